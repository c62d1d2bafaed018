"""What every backend must do, on the same cases (`cases.py`), against the float64 oracle and the bands' limits.

A new backend is a subclass with its name: of `Conformance`, or of `KernelConformance` if it promises the same bits
whatever else is in the batch, as compiled kernels do. A slow one sets `max_cost`.
"""

import functools
import importlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from cases import (
    BFLOAT16,
    CASES,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    MEMORY_CASES,
    RULE_CASES,
    RULES,
    Case,
    rule_case,
    self_attention,
)
from cases import mask_like as masked
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

import flash_numba
from flash_numba import bands, reference
from flash_numba.cpu import launch

SIXTEEN_BIT_CASES = [case for case in CASES if case.dtype in (FLOAT16, BFLOAT16)]
FEATURES = frozenset().union(*(case.features for case in CASES))
RULE_FEATURES = frozenset().union(*(case.features for case in RULE_CASES))


def pytest_generate_tests(metafunc):
    """Each backend's tests get the cases that it can afford."""
    if metafunc.cls is None or not issubclass(metafunc.cls, Conformance):
        return
    cases = {
        "case": CASES,
        "sixteen_bit_case": SIXTEEN_BIT_CASES,
        "memory_case": MEMORY_CASES,
        "rule_case": RULE_CASES,
    }
    for argument in cases.keys() & set(metafunc.fixturenames):
        affordable = [case for case in cases[argument] if case.cost <= metafunc.cls.max_cost]
        metafunc.parametrize(argument, affordable, ids=[case.name for case in affordable])


# ---- what is right, and how far from it a result may be


@dataclass(frozen=True)
class Expected:
    """The oracle's result in the case's layout, and the allowed |error| of each element."""

    out: np.ndarray
    lse: np.ndarray
    out_limit: np.ndarray
    lse_limit: np.ndarray
    v_max: float


def heads_first(x, layout):
    return np.swapaxes(x, -2, -3) if layout == "bshd" and x.ndim > 2 else x


def expect_call(dtype, q, k, v, *, layout="bhsd", **rules):
    """The limits take each row's own weights and values (`bands.limit`), so a row of small values must be as exact,
    relative to them, as one of large values.
    """
    truth = bands.exact(*(heads_first(np.asarray(x), layout) for x in (q, k, v)), **rules)
    unit = np.finfo(np.float64 if dtype == FLOAT64 else np.float32).eps
    lse_limit = bands.lse_limit(dtype, truth.score_max, keys=truth.keys, head_dim=truth.head_dim)
    return Expected(
        out=heads_first(truth.out, layout),
        lse=truth.lse,
        out_limit=heads_first(bands.limit(dtype, truth), layout),
        lse_limit=lse_limit + 4 * unit * np.nan_to_num(np.abs(truth.lse), posinf=0),
        v_max=truth.v_max,
    )


def expect(case: Case) -> Expected:
    q, k, v, options = case.arguments()
    return expect_call(case.dtype, q, k, v, **options)


expect_once = functools.lru_cache(maxsize=None)(expect)


def assert_within(what, got, want, limit):
    """NaN where NaN is right, infinities likewise, and everything else off by `limit` at most."""
    assert got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}"
    got = got.astype(np.float64)
    assert (np.isnan(got) == np.isnan(want)).all(), (
        f"{what}: NaN where there should be none, or none where it should be"
    )
    infinite = np.isinf(want)
    assert (got[infinite] == want[infinite]).all(), f"{what}: infinities differ"
    finite = np.isfinite(want)
    error, allowed = np.abs(got[finite] - want[finite]), np.broadcast_to(limit, want.shape)[finite]
    if not (error <= allowed).all():
        worst = np.argmax(error - allowed)
        place = tuple(int(n) for n in np.argwhere(finite)[worst])
        pytest.fail(
            f"{what}{list(place)} is {got[place]!r}, should be {want[place]!r}: off by {error[worst]:.3g}, allowed "
            f"{allowed[worst]:.3g}; {np.mean(error > allowed):.1%} of the elements are off by more than allowed"
        )


def ulp(x, dtype):
    """The spacing of `dtype` at x."""
    info = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(x.astype(np.float64)), float(info.smallest_normal))
    return 2.0 ** (np.floor(np.log2(size)) - info.nmant)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- bad input: what changes in a good call, the error, and what its message must hold

Q, KV = (2, 4, 5, 8), (2, 2, 7, 8)
BAD_INPUT = {
    "k of another D": ({"k": normal(2, 2, 7, 9)}, ValueError, ("k", "(2, 2, 7, 9)", "(2, 4, 5, 8)")),
    "v of another length": ({"v": normal(2, 2, 6, 8)}, ValueError, ("v", "(2, 2, 6, 8)", "(2, 2, 7, 8)")),
    "heads": ({"k": normal(2, 3, 7, 8), "v": normal(2, 3, 7, 8)}, ValueError, ("heads", "4", "3", "multiple")),
    "batches": ({"k": normal(3, 2, 7, 8), "v": normal(3, 2, 7, 8)}, ValueError, ("k", "(3, 2, 7, 8)")),
    "q 1-D": ({"q": normal(8)}, ValueError, ("q", "(8,)", "2")),
    "k 1-D": ({"k": normal(8)}, ValueError, ("k", "(8,)", "2")),
    "v 0-D": ({"v": np.float32(1)}, ValueError, ("v", "()", "2")),
    "q of integers": ({"q": np.ones(Q, np.int64)}, TypeError, ("q", "int64", "float32", "bfloat16")),
    "k of bools": ({"k": np.ones(KV, bool)}, TypeError, ("k", "bool", "float32")),
    "v complex": ({"v": np.ones(KV, np.complex64)}, TypeError, ("v", "complex64", "float32")),
    "q of objects": ({"q": np.ones(Q, object)}, TypeError, ("q", "object", "float32")),
    "q of strings": ({"q": np.full(Q, "a")}, TypeError, ("q", "float32")),
    "q ragged": ({"q": [[1.0, 2.0], [3.0]]}, TypeError, ("q", "float32")),
    "q None": ({"q": None}, TypeError, ("q", "float32")),
    "k of long doubles": ({"k": np.ones(KV, np.longdouble)}, TypeError, ("k", np.dtype(np.longdouble).name, "float32")),
    "mixed dtypes": ({"k": normal(*KV, dtype=np.float64)}, TypeError, ("k", "float64", "float32")),
    "mixed 16-bit dtypes": (
        {
            "q": normal(*Q, dtype=FLOAT16),
            "k": normal(*KV, dtype=BFLOAT16),
            "v": normal(*KV, dtype=FLOAT16),
        },
        TypeError,
        ("k", "bfloat16", "float16"),
    ),
    "scale NaN": ({"scale": math.nan}, ValueError, ("scale", "nan", "finite")),
    "scale infinite": ({"scale": -math.inf}, ValueError, ("scale", "-inf", "finite")),
    "scale of letters": ({"scale": "big"}, TypeError, ("scale", "'big'", "number")),
    "causal": ({"causal": "bottom-right"}, ValueError, ("causal", "'bottom-right'", "'top-left'")),
    "layout": ({"layout": "sbhd"}, ValueError, ("layout", "'sbhd'", "'bhsd'", "'bshd'")),
    "backend": ({"backend": "tpu"}, ValueError, ("backend", "'tpu'", "'cpu'")),
    "window below -1": ({"window": (-2, 0)}, ValueError, ("window", "(-2, 0)", "-1")),
    "window of one side": ({"window": (3,)}, TypeError, ("window", "(3,)", "left, right")),
    "window of a number": ({"window": 3}, TypeError, ("window", "got 3", "left, right")),
    "window of a fraction": ({"window": (1.5, 0)}, TypeError, ("window", "(1.5, 0)", "integers")),
    "softcap 0": ({"softcap": 0}, ValueError, ("softcap", "got 0", "positive")),
    "softcap negative": ({"softcap": -2.0}, ValueError, ("softcap", "-2.0", "positive")),
    "softcap infinite": ({"softcap": math.inf}, ValueError, ("softcap", "inf", "finite")),
    "softcap NaN": ({"softcap": math.nan}, ValueError, ("softcap", "nan", "finite")),
    "softcap of letters": ({"softcap": "big"}, TypeError, ("softcap", "'big'", "number")),
    "dropout 1": ({"dropout": 1, "seed": 0}, ValueError, ("dropout", "got 1", "below 1")),
    "dropout negative": ({"dropout": -0.1, "seed": 0}, ValueError, ("dropout", "-0.1", "0")),
    "dropout NaN": ({"dropout": math.nan, "seed": 0}, ValueError, ("dropout", "nan", "below 1")),
    "dropout None": ({"dropout": None}, TypeError, ("dropout", "None", "number")),
    "seed missing": ({"dropout": 0.1}, ValueError, ("seed", "dropout", "None")),
    "seed negative": ({"dropout": 0.1, "seed": -1}, ValueError, ("seed", "-1", "2**64")),
    "seed too large": ({"dropout": 0.1, "seed": 2**64}, ValueError, ("seed", str(2**64), "2**64 - 1")),
    "seed of a fraction": ({"dropout": 0.1, "seed": 1.5}, TypeError, ("seed", "1.5", "integer", "Generator")),
    "q_lengths negative": ({"q_lengths": [-1, 3]}, ValueError, ("q_lengths", "[-1, 3]", "0 to 5")),
    "q_lengths beyond S": ({"q_lengths": [6, 3]}, ValueError, ("q_lengths", "[6, 3]", "0 to 5")),
    "kv_lengths beyond S": ({"kv_lengths": 8}, ValueError, ("kv_lengths", "got 8", "0 to 7")),
    "kv_lengths negative": ({"kv_lengths": [7, -7]}, ValueError, ("kv_lengths", "[7, -7]", "0 to 7")),
    "kv_lengths of another batch": ({"kv_lengths": [1, 2, 3]}, ValueError, ("kv_lengths", "(3,)", "(2,)")),
    "kv_lengths of fractions": ({"kv_lengths": [1.0, 2.0]}, TypeError, ("kv_lengths", "[1.0, 2.0]", "integers")),
    "q_offset of another batch": ({"q_offset": [1, 2, 3]}, ValueError, ("q_offset", "(3,)", "(2,)")),
    "q_offset of a fraction": ({"q_offset": 1.5}, TypeError, ("q_offset", "1.5", "integer")),
    "q_offset too large": ({"q_offset": 2**62}, ValueError, ("q_offset", str(2**62))),
    "alibi_slopes of other heads": ({"alibi_slopes": [1.0, 2.0]}, ValueError, ("alibi_slopes", "(2,)", "(4,)")),
    "alibi_slopes of letters": ({"alibi_slopes": "steep"}, TypeError, ("alibi_slopes", "'steep'", "floats")),
    "sinks of other heads": ({"sinks": np.ones((3, 4))}, ValueError, ("sinks", "(3, 4)", "(4,)", "(2, 4)")),
    "k_scale of query heads": ({"k_scale": np.ones(4)}, ValueError, ("k_scale", "(4,)", "(2,)")),
    "v_scale of letters": ({"v_scale": "x"}, TypeError, ("v_scale", "'x'", "number")),
    "bias of another shape": ({"bias": np.ones((2, 2, 5, 7))}, ValueError, ("bias", "(2, 2, 5, 7)", "(2, 4, 5, 7)")),
    "bias of integers": ({"bias": np.ones((5, 7), int)}, TypeError, ("bias", "int64", "float32", "bool")),
    "bias complex": ({"bias": np.ones((5, 7), complex)}, TypeError, ("bias", "complex128", "float32")),
    "bias of five axes": ({"bias": np.ones((1, 2, 4, 5, 7))}, ValueError, ("bias", "(1, 2, 4, 5, 7)", "(2, 4, 5, 7)")),
    "mask of another shape": ({"mask": np.ones((5, 6), bool)}, ValueError, ("mask", "(5, 6)", "(2, 4, 5, 7)")),
    "mask of integers": ({"mask": np.ones((5, 7), np.int32)}, TypeError, ("mask", "int32", "bool")),
    "out of another shape": ({"out": np.empty((2, 4, 5, 7), np.float32)}, ValueError, ("out", "(2, 4, 5, 7)", str(Q))),
    "out of integers": ({"out": np.empty(Q, np.int32)}, TypeError, ("out", "int32", "float32")),
    "out a list": ({"out": [0.0]}, TypeError, ("out", "list")),
    "out read-only": ({"out": np.broadcast_to(np.float32(0), Q)}, ValueError, ("out", "read-only")),
}


class Conformance:
    """The tests that every backend passes."""

    backend: str
    max_cost = math.inf

    def attend(self, *args, **options):
        return flash_numba.attention(*args, **options, backend=self.backend)

    def check(self, case, expected):
        q, k, v, options = case.arguments()
        out, lse = self.attend(q, k, v, **options, return_lse=True)
        assert out.dtype == case.dtype
        assert lse.dtype == (np.float64 if case.dtype == FLOAT64 else np.float32)
        assert_within("out", out, expected.out, expected.out_limit)
        # kernels keep scores in base 2, where what lies beyond saturates (a bias of finfo.min)
        lowest = float(np.finfo(lse.dtype).min) * math.log(2)
        seen = expected.lse != -np.inf
        wanted = np.where(seen, np.maximum(expected.lse, lowest), expected.lse)
        assert_within("lse", np.where(seen, np.maximum(lse, lowest), lse), wanted, expected.lse_limit)
        empty = heads_first(expected.out, case.layout)[expected.lse == -np.inf]
        assert (heads_first(out, case.layout)[lse == -np.inf] == 0).all()
        assert (empty == 0).all()
        if case.dtype == FLOAT64:
            assert_within("out", out, expected.out, 1e-13 * expected.v_max)

    def test_case(self, case):
        self.check(case, expect_once(case))

    def test_rule_case(self, rule_case):
        self.check(rule_case, expect_once(rule_case))

    def test_every_feature_is_within_the_backends_cost(self):
        affordable = [case for case in CASES if case.cost <= self.max_cost]
        assert frozenset().union(*(case.features for case in affordable)) == FEATURES
        affordable = [case for case in RULE_CASES if case.cost <= self.max_cost]
        assert frozenset().union(*(case.features for case in affordable)) == RULE_FEATURES

    def test_sixteen_bits_are_the_float32_result_rounded(self, sixteen_bit_case):
        """Within one unit in the last place; where an output cancels to nearly 0, within float32's own error."""
        case = sixteen_bit_case
        q, k, v, options = case.arguments()
        wide = self.attend(*(x.astype(np.float32) for x in (q, k, v)), **options)
        with np.errstate(over="ignore"):
            rounded = wide.astype(case.dtype)
        expected = expect_once(case)
        info = bands.TABLE[case.dtype]
        float32_error = np.maximum(expected.out_limit - info.roundoff * np.abs(np.nan_to_num(expected.out)), 0.0)
        out = self.attend(q, k, v, **options)
        assert_within("out", out, rounded.astype(np.float64), ulp(np.nan_to_num(rounded), case.dtype) + float32_error)

    @pytest.mark.parametrize("causal", [False, True])
    def test_nan_in_v_reaches_the_rows_that_see_it_and_no_other(self, causal):
        q, k, v = (normal(1, 2, 100, 16, seed=n) for n in range(3))
        clean = self.attend(q, k, v, causal=causal)
        v[:, :, 47, 5] = np.nan
        out = self.attend(q, k, v, causal=causal)
        assert np.isnan(out[:, :, 47 if causal else 0 :, 5]).all()
        others = np.arange(16) != 5
        np.testing.assert_allclose(out[..., others], clean[..., others], rtol=1e-5, atol=1e-6)
        if causal:
            np.testing.assert_allclose(out[:, :, :47], clean[:, :, :47], rtol=1e-5, atol=1e-6)

    def test_a_query_of_zeros_gives_the_mean_of_v(self):
        v = normal(1, 1, 300, 8)
        out, lse = self.attend(np.zeros((1, 1, 3, 8), np.float32), normal(1, 1, 300, 8), v, return_lse=True)
        np.testing.assert_allclose(out[0, 0], np.broadcast_to(v.mean(axis=2)[0, 0], (3, 8)), atol=1e-6)
        np.testing.assert_allclose(lse, math.log(300), rtol=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_of_the_lowest_number_are_the_mean_of_v(self, dtype):
        q, k, v = (normal(1, 1, 300, 8, dtype=dtype, seed=n) for n in range(3))
        bias = np.full((300, 300), np.finfo(np.float32).min)
        out, lse = self.attend(q, k, v, bias=bias, return_lse=True)
        want = np.broadcast_to(v.astype(np.float64).mean(axis=2, keepdims=True), out.shape)
        np.testing.assert_allclose(out.astype(np.float64), want, atol=1e-6 + bands.TABLE[dtype].roundoff)
        assert np.isfinite(lse).all()

    # ---- out=

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_out_is_filled_and_returned(self, dtype, layout):
        q, k, v = (normal(2, 4, 4, 8, dtype=dtype, seed=n) for n in range(3))
        want = self.attend(q, k, v, layout=layout)
        strided = np.full((2, 4, 8, 16), np.nan, dtype)
        for out in (np.full_like(want, np.nan), strided[:, :, ::-2, ::2], np.full_like(want.T, np.nan).T):
            assert self.attend(q, k, v, layout=layout, out=out) is out
            assert same_bits(np.ascontiguousarray(out), want)
        assert np.isnan(strided[:, :, ::2].astype(np.float32)).all()
        assert np.isnan(strided[..., 1::2].astype(np.float32)).all()
        got, _ = self.attend(q, k, v, layout=layout, out=out, return_lse=True)
        assert got is out

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("out_dtype", [*DTYPES, np.dtype(">f4"), np.dtype(">f2")], ids=str)
    def test_out_of_another_dtype(self, dtype, out_dtype):
        q, k, v = (normal(2, 3, 30, 16, dtype=dtype, seed=n) for n in range(3))
        wide = reference.attention(q, k, v)
        out = np.empty(wide.shape, out_dtype)
        self.attend(q, k, v, out=out)
        native = out_dtype.newbyteorder("=")
        rounding = max(bands.TABLE[native].roundoff, bands.TABLE[dtype].accumulated)
        np.testing.assert_allclose(out.astype(np.float64), wide, rtol=1.01 * rounding, atol=20 * 2.0**-24)
        if native == dtype:
            assert same_bits(out.astype(dtype), self.attend(q, k, v))

    @pytest.mark.parametrize("rows", [5, 300])
    @pytest.mark.parametrize("overlap", ["q", "k", "v", "flipped v", "part of v"])
    def test_out_may_overlap_an_input(self, rows, overlap):
        def arrays():
            wide = normal(1, 2, rows + 3, 16, seed=2)
            return {"q": normal(1, 2, rows, 16), "k": normal(1, 2, rows, 16, seed=1), "v": wide[:, :, 3:], "wide": wide}

        x = arrays()
        want = self.attend(x["q"], x["k"], x["v"], causal=True)
        out = {"flipped v": x["v"][:, ::-1, ::-1], "part of v": x["wide"][:, :, :-3]}.get(overlap, x.get(overlap))
        self.attend(x["q"], x["k"], x["v"], causal=True, out=out)
        assert same_bits(np.ascontiguousarray(out), want)

    @pytest.mark.parametrize("rows", [8, 300])
    def test_out_may_overlap_the_mask(self, rows):
        """The first head's output covers the mask of all that come later."""
        q, k, v = (normal(1, 4, n, 8, dtype=np.float64, seed=n) for n in (rows, 8, 9))
        v = v[:, :, :8]
        memory = np.zeros(4 * rows * 8 * 8, bool)
        memory[::3] = True
        mask = memory[: 4 * rows * 8].reshape(1, 4, rows, 8)
        want = self.attend(q, k, v, mask=mask.copy())
        out = memory.view(np.float64).reshape(1, 4, rows, 8)
        self.attend(q, k, v, mask=mask, out=out)
        assert same_bits(out, want)

    # ---- what is taken, and what isn't

    def test_inputs_are_left_as_they_were(self):
        q, k, v = normal(2, 4, 30, 8), normal(2, 2, 40, 8), normal(2, 2, 40, 8)
        mask = np.random.default_rng(0).random((30, 40)) < 0.5
        before = [x.copy() for x in (q, k, v, mask)]
        self.attend(q, k, v, mask=mask, causal=True)
        assert all(same_bits(x, y) for x, y in zip((q, k, v, mask), before, strict=True))

    def test_takes_what_numpy_makes_a_float_array_of(self):
        class Wrapped:
            def __init__(self, array):
                self.array = array

            def __array__(self, dtype=None, copy=None):
                return self.array

        x = normal(5, 4, dtype=np.float64)
        want = self.attend(x, x, x)
        assert same_bits(self.attend(x.tolist(), tuple(map(tuple, x.tolist())), x), want)
        assert same_bits(self.attend(Wrapped(x), Wrapped(x), Wrapped(x)), want)
        assert same_bits(self.attend(x, x, x, mask=[[True] * 5] * 5, scale=np.float64(0.5)), want)

    @pytest.mark.parametrize("name", BAD_INPUT)
    def test_bad_input_is_named_and_quoted(self, name):
        changed, error, words = BAD_INPUT[name]
        call = {"q": normal(*Q), "k": normal(*KV), "v": normal(*KV), "backend": self.backend} | changed
        with pytest.raises(error) as raised:
            flash_numba.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
        message = str(raised.value)
        missing = [word for word in words if word not in message]
        assert not missing, f"{message!r} doesn't hold {missing}"
        assert "\n" not in message


def case_of_shape(seed, heads, rows, keys, dim, value_dim, dtype, causal, masked):
    def options(rng, case):
        mask = {} if masked is None else {"mask": rng.random((rows, keys)) < masked}
        return {"causal": causal, **mask}

    return self_attention(
        f"any-{seed}", heads=heads[0], kv_heads=heads[1], rows=rows, keys=keys, dim=dim, value_dim=value_dim,
        dtype=dtype, options=options,
    )  # fmt: skip


ANY_SHAPE = st.builds(
    case_of_shape,
    seed=st.integers(0, 2**32),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    rows=st.integers(1, 230),
    keys=st.integers(1, 300),
    dim=st.integers(1, 70),
    value_dim=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    causal=st.sampled_from([False, True, "top-left"]),
    masked=st.sampled_from([None, 0.02, 0.6]),
)


class KernelConformance(Conformance):
    """Compiled kernels also promise bits: nothing but a call's own sizes, dtype and features decides them."""

    @fuzz(80)
    @given(drawn=ANY_SHAPE)
    def test_any_shape(self, drawn):
        self.check(drawn, expect(drawn))

    @fuzz(120)
    @given(
        seed=st.integers(0, 2**32),
        names=st.sets(st.sampled_from(sorted(RULES)), min_size=1, max_size=6),
        lengths=st.one_of(
            st.tuples(st.integers(1, 230), st.integers(1, 300)), st.tuples(st.integers(1, 20), st.integers(1, 2500))
        ),
        dtype=st.sampled_from(DTYPES),
    )
    def test_any_rules_at_any_lengths(self, seed, names, lengths, dtype):
        """More than one block of keys and tile of rows, which the matrix of pairs hasn't."""
        rows, keys = lengths
        if "float8" in names and dtype == FLOAT64:
            dtype = FLOAT32
        case = rule_case(f"any-rules-{seed}", *sorted(names), rows=rows, keys=keys, dtype=dtype)
        self.check(case, expect(case))

    def test_memory_layout_changes_no_bit(self, memory_case):
        q, k, v, options = memory_case.arguments()
        native = memory_case.dtype
        want = self.attend(*(np.ascontiguousarray(x, native) for x in (q, k, v)), **options, return_lse=True)
        got = self.attend(q, k, v, **options, return_lse=True)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_asking_for_lse_changes_no_bit(self, dtype):
        q, k, v = (normal(2, 4, 203, 40, dtype=dtype, seed=n) for n in range(3))
        assert same_bits(self.attend(q, k, v, causal=True), self.attend(q, k, v, causal=True, return_lse=True)[0])

    def test_a_hidden_nan_changes_no_bit(self):
        q, k, v = (normal(1, 2, 300, 16, seed=n) for n in range(3))
        clean, clean_lse = self.attend(q, k, v, causal=True, return_lse=True)
        k[:, :, 250] = v[:, :, 147, 3] = np.nan
        out, lse = self.attend(q, k, v, causal=True, return_lse=True)
        assert same_bits(out[:, :, :147], clean[:, :, :147])
        assert same_bits(lse[:, :, :250], clean_lse[:, :, :250])

    @pytest.mark.parametrize("shape", [(2, 4, 53, 37), (2, 1, 53, 37), (2, 4, 1, 37), (1, 1, 53, 1)], ids=str)
    def test_a_broadcast_mask_changes_no_bit(self, shape):
        q, k, v = normal(2, 4, 53, 8), normal(2, 4, 37, 8), normal(2, 4, 37, 8)
        mask = np.random.default_rng(0).random(shape) < 0.6
        written_out = np.ascontiguousarray(np.broadcast_to(mask, (2, 4, 53, 37)))
        assert same_bits(self.attend(q, k, v, mask=mask), self.attend(q, k, v, mask=written_out))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rows", [1, 113, 400])
    @pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
    def test_the_batch_changes_no_bit(self, dtype, rows, options):
        q, k, v = (normal(8, heads, n, 40, dtype=dtype, seed=n) for heads, n in ((4, rows), (2, 203), (2, 203)))
        out, lse = self.attend(q, k, v, **options, return_lse=True)
        for b in range(8):
            one, one_lse = self.attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options, return_lse=True)
            assert same_bits(one[0], out[b])
            assert same_bits(one_lse[0], lse[b])
        # Half of the heads, with the same number of query heads to a K/V head.
        half = self.attend(q[:, 2:], k[:, 1:], v[:, 1:], **options)
        assert same_bits(half, np.ascontiguousarray(out[:, 2:]))


def test_every_module_with_a_backend_of_its_own_gives_it_its_cases():
    """Where pytest doesn't find the hook, tests that take a case are an error, which a skipped one doesn't show."""
    here, found = Path(__file__), False
    for path in here.parent.glob("test_*.py"):
        text = path.read_text("utf-8")
        if path != here and re.search(r"^class \w+\((Kernel)?Conformance\)", text, re.M):
            hook = importlib.import_module(path.stem).pytest_generate_tests
            assert hook is pytest_generate_tests, path.name
            found = True
    assert found


class TestReference(Conformance):
    backend = "reference"
    max_cost = 300_000


class TestCpu(KernelConformance):
    backend = "cpu"

    @pytest.fixture
    def threads(self):
        if numba.config.NUMBA_NUM_THREADS < 2:
            pytest.skip("Numba has one thread here")
        before = numba.get_num_threads()
        yield numba.set_num_threads
        numba.set_num_threads(before)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("q_shape", "kv_shape"),
        [((1, 2, 1023, 40), (1, 2, 1024, 40)), ((2, 6, 203, 64), (2, 3, 113, 64)), ((4, 32, 1, 64), (4, 8, 2000, 64))],
        ids=["long", "GQA", "decode"],
    )
    @pytest.mark.parametrize("options", ["full", "causal", "mask"])
    def test_threads_change_no_bit(self, threads, dtype, q_shape, kv_shape, options):
        """One thread takes the serial entry, two the parallel one."""
        q, k, v = normal(*q_shape, dtype=dtype), normal(*kv_shape, dtype=dtype), normal(*kv_shape, dtype=dtype, seed=1)
        case = Case("", q.shape, k.shape, v.shape)
        mask = masked(q_shape[-2], kv_shape[-2])(np.random.default_rng(0), case)
        options = {"full": {}, "causal": {"causal": True}, "mask": mask}[options]
        threads(1)
        serial = self.attend(q, k, v, **options, return_lse=True)
        threads(2)
        for _ in range(3):
            parallel = self.attend(q, k, v, **options, return_lse=True)
            assert same_bits(parallel[0], serial[0])
            assert same_bits(parallel[1], serial[1])

    def test_threads_change_no_bit_under_rules(self, rule_case, threads, monkeypatch):
        monkeypatch.setattr(launch, "SERIAL_FLOPS", 0)
        q, k, v, options = rule_case.arguments()
        threads(1)
        serial = self.attend(q, k, v, **options, return_lse=True)
        threads(2)
        parallel = self.attend(q, k, v, **options, return_lse=True)
        assert same_bits(parallel[0], serial[0])
        assert same_bits(parallel[1], serial[1])

    def test_auto_is_the_cpu_here(self):
        q, k, v = (normal(1, 2, 30, 8, seed=n) for n in range(3))
        assert same_bits(flash_numba.attention(q, k, v), self.attend(q, k, v))
