"""Gradients: the oracle against central differences, and every backend against the oracle on `cases.py`'s problems.

A backend's gradients are compared with the oracle's from the same out and lse, so only its own errors count; the bands'
limits are `bands.gradient_bands`.
"""

import functools
import itertools
import math
import zlib
from dataclasses import replace
from types import FunctionType, SimpleNamespace

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
    mask_like,
    put,
    rule_case,
    self_attention,
)
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from test_conformance import ANY_SHAPE, heads_first, normal, same_bits

import flash_numba
from flash_numba import Gradients, attention, attention_varlen, bands, recurrence, reference
from flash_numba.cpu import backward, backward_plan, launch
from flash_numba.geometry import key_range

INF, NAN = math.inf, math.nan
NAMES = Gradients._fields
ARGUMENTS = ("q", "k", "v", "bias", "sinks")

# Rows of numbers so low that an LSE in the accumulation format has no digits left for the scores: see
# `test_rows_of_the_lowest_number_stay_finite`.
SATURATED = [case for case in RULE_CASES if "finfo-min" in case.name]
GRADIENT_CASES = [
    case for case in (*CASES, *RULE_CASES) if "benchmark" not in case.about and case not in SATURATED
]  # fmt: skip


def pytest_generate_tests(metafunc):
    """Each backend's tests get the cases that it can afford."""
    if metafunc.cls is None or not issubclass(metafunc.cls, GradientConformance):
        return
    cases = {"case": GRADIENT_CASES, "memory_case": MEMORY_CASES, "saturated_case": SATURATED}
    for argument in cases.keys() & set(metafunc.fixturenames):
        affordable = [case for case in cases[argument] if case.cost <= metafunc.cls.max_cost]
        metafunc.parametrize(argument, affordable, ids=[case.name for case in affordable])


# ---- what is right, and how far from it a result may be


def expect(dtype, operands, dlse, options):
    """The oracle's gradients, and the allowed |error| of each element."""
    exact = reference.attention_grad(*operands, dlse=dlse, **options)
    return exact, bands.gradient_bands(dtype, *operands, dlse=dlse, **options).limits


def assert_gradients(got, exact, limits, dtypes):
    for name, x, want, limit, dtype in zip(NAMES, got, exact, limits, dtypes, strict=True):
        if want is None:
            assert x is None, name
            continue
        assert isinstance(x, np.ndarray)
        assert x.dtype == dtype, f"{name} is {x.dtype}, not {dtype}"
        assert x.shape == want.shape, f"{name} has shape {x.shape}, not {want.shape}"
        x = x.astype(np.float64)
        with np.errstate(over="ignore"):
            in_dtype = want.astype(dtype).astype(np.float64)
            in_range, beyond = np.isfinite(want) & np.isfinite(in_dtype), np.isfinite(want) & np.isinf(in_dtype)
        with np.errstate(invalid="ignore"):
            allowed = limit + bands.rounding(dtype, np.nan_to_num(want, posinf=0, neginf=0))
            wrong = in_range & ~(np.abs(x - want) <= allowed)
        assert (x[beyond] == in_dtype[beyond]).all(), f"{name}: not the infinity that a number beyond {dtype} rounds to"
        # NaN or infinity is the order of sums' affair, but it stays where it belongs
        assert not np.isfinite(x[~np.isfinite(want)]).any(), f"{name}: a finite number where NaN or infinity is right"
        if wrong.any():
            worst = np.argmax(np.where(wrong, np.nan_to_num(np.abs(x - want) - allowed, nan=INF), -1))
            place = tuple(int(n) for n in np.unravel_index(worst, x.shape))
            pytest.fail(
                f"{name}{list(place)} is {x[place]!r}, should be {want[place]!r}, allowed {allowed[place]:.3g}; "
                f"{np.mean(wrong):.1%} of the elements are off by more than allowed"
            )


def dtypes_of(q, k, v, options):
    """What dtype each gradient has."""
    eight_bit = [x.dtype.itemsize == 1 for x in (k, v)]
    native = q.dtype.newbyteorder("=")
    key_dtypes = (native if small else x.dtype.newbyteorder("=") for small, x in zip(eight_bit, (k, v), strict=True))
    bias, sinks = options.get("bias"), options.get("sinks")
    return (
        native,
        *key_dtypes,
        None if bias is None else np.asarray(bias).dtype,
        None if sinks is None else np.asarray(sinks).dtype,
    )


def derivatives(case, out, lse):
    """dout, and for half of the cases dlse; the same in every process."""
    number = zlib.crc32(case.name.encode())
    rng = np.random.default_rng([number, 1])
    dout = rng.standard_normal(out.shape).astype(case.dtype)
    return dout, rng.standard_normal(lse.shape).astype(lse.dtype) if number % 2 else None


# ---- the oracle, by central differences


def float64_arguments(case):
    """The arguments of a case that have a gradient, float64, and the rest of the options."""
    q, k, v, options = case.arguments()
    learnt = dict(zip("qkv", (q, k, v), strict=True)) | {name: options.pop(name, None) for name in ("bias", "sinks")}
    learnt = {name: np.asarray(x).astype(np.float64) for name, x in learnt.items() if x is not None}
    return learnt, options


@functools.cache
def slopes(case):
    """Of sum(out * dout) + sum(lse * dlse), along a random direction of each argument: `(directions, slopes)`.

    Fourth-order central differences of the oracle's forward, whose error is about 1e-11 here.
    """
    learnt, options = float64_arguments(case)
    out, lse = reference.attention(**learnt, **options, return_lse=True)
    rng = np.random.default_rng(7)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)

    def loss(**changed):
        out, lse = reference.attention(**(learnt | changed), **options, return_lse=True)
        return (out * dout).sum() + (np.where(lse == -INF, 0.0, lse) * dlse).sum()

    directions, found, step = {}, {}, 1e-3
    for name, x in learnt.items():
        direction = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
        by_step = [loss(**{name: np.where(np.isfinite(x), x + n * step * direction, x)}) for n in (-2, -1, 1, 2)]
        directions[name] = direction
        found[name] = np.dot(by_step, (1, -8, 8, -1)) / (12 * step)
    return directions, found, dout, dlse


PAIRS = [
    # without the 8-bit formats of "float8", only its scales
    replace(rule_case("+".join(rules), *rules, rows=13, keys=17, dim=6, dtype=FLOAT64), kv_dtype=None)
    for count in (1, 2)
    for rules in itertools.combinations(RULES, count)
]
PAIRS += [
    self_attention("plain", rows=13, keys=17, dim=6, value_dim=5, dtype=FLOAT64),
    self_attention("no-keys", rows=3, keys=0, dim=6, dtype=FLOAT64),
    Case("shared", (2, 3, 4, 7, 5), (3, 2, 9, 5), (2, 1, 1, 9, 3), dtype=FLOAT64),
    Case("shared-bshd", (2, 3, 4, 7, 5), (3, 2, 9, 5), (9, 3), dtype=FLOAT64, layout="bshd"),
    Case("one-head", (7, 5), (9, 5), (9, 3), dtype=FLOAT64),
]


# ---- NaN and infinities: what a row doesn't see


def sparse_mask(rows, keys):
    """Row 5 sees keys 0 to 9 and 47; the others all but that one."""
    mask = np.ones((rows, keys), bool)
    mask[:, 47] = False
    mask[5] = np.arange(keys) < 10
    mask[5, 47] = True
    return mask


POISON = {
    "v": put(2, NAN, 47, 3),
    "k": put(1, NAN, 47, 3),
    "k-inf": put(1, INF, 47),
    "q": put(0, NAN, 5, 3),
    "dout": put(3, NAN, 5, 3),
    "dout-inf": put(3, INF, 5, 3),
}


# ---- bad input: what changes in a good call, the error, and what its message must hold

Q, KV = (2, 4, 5, 8), (2, 2, 7, 8)
BAD_INPUT = {
    "dout of another shape": ({"dout": normal(2, 4, 5, 7)}, ValueError, ("dout", "(2, 4, 5, 7)", str(Q))),
    "dout of integers": ({"dout": np.ones(Q, int)}, TypeError, ("dout", "int64", "float32")),
    "dout None": ({"dout": None}, TypeError, ("dout", "float32")),
    "out of another shape": ({"out": normal(4, 5, 8)}, ValueError, ("out", "(4, 5, 8)", str(Q))),
    "out complex": ({"out": np.ones(Q, complex)}, TypeError, ("out", "complex128", "float32")),
    "lse of another shape": ({"lse": normal(2, 5, 4)}, ValueError, ("lse", "(2, 5, 4)", "(2, 4, 5)")),
    "lse in 16 bits": ({"lse": normal(2, 4, 5, dtype=FLOAT16)}, TypeError, ("lse", "float16", "float32")),
    "lse missing": ({"lse": None}, TypeError, ("lse", "float32")),
    "dlse of another shape": ({"dlse": normal(2, 4)}, ValueError, ("dlse", "(2, 4)", "(2, 4, 5)")),
    "dlse of integers": ({"dlse": np.ones((2, 4, 5), int)}, TypeError, ("dlse", "int64", "float32")),
    "need a word": ({"need": "q"}, TypeError, ("need", "'q'", "'sinks'")),
    "need unknown": ({"need": ("q", "mask")}, ValueError, ("need", "mask", "'bias'")),
    "need a number": ({"need": 3}, TypeError, ("need", "got 3", "'bias'")),
    "seed a generator": (
        {"dropout": 0.1, "seed": np.random.default_rng(0)},
        TypeError,
        ("seed", "integer", "Generator"),
    ),
    "seed missing": ({"dropout": 0.1}, ValueError, ("seed", "dropout")),
    "k of another D": ({"k": normal(2, 2, 7, 9)}, ValueError, ("k", "(2, 2, 7, 9)")),
    "mixed dtypes": ({"k": normal(*KV, dtype=FLOAT64)}, TypeError, ("k", "float64", "float32")),
    "k_offset negative": ({"k_offset": -1}, ValueError, ("k_offset", "-1")),
    "backend": ({"backend": "cuda"}, ValueError, ("backend", "'cuda'", "'cpu'")),
    "layout": ({"layout": "sbhd"}, ValueError, ("layout", "'sbhd'", "'bshd'")),
    "progress": ({"progress": 1}, TypeError, ("progress", "callable")),
}


class GradientConformance:
    """The tests that every backend passes."""

    backend: str
    max_cost = math.inf

    def grad(self, *args, **options):
        return flash_numba.attention_grad(*args, **options, backend=self.backend)

    def forward(self, q, k, v, **options):
        return attention(q, k, v, **options, return_lse=True, backend=self.backend)

    def check(self, case):
        q, k, v, options = case.arguments()
        out, lse = self.forward(q, k, v, **options)
        dout, dlse = derivatives(case, out, lse)
        if case.view is not None:
            dout, out = case.view(dout), case.view(out)
        operands = dout, q, k, v, out, lse
        got = self.grad(*operands, dlse=dlse, **options)
        exact, limits = expect(case.dtype, operands, dlse, options)
        assert_gradients(got, exact, limits, dtypes_of(q, k, v, options))
        empty = heads_first(np.broadcast_to(got.dq, q.shape), case.layout)[lse == -INF]
        assert (empty == 0).all()

    def test_case(self, case):
        self.check(case)

    @pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
    def test_central_differences(self, pair):
        learnt, options = float64_arguments(pair)
        directions, found, dout, dlse = slopes(pair)
        q, k, v = (learnt.pop(name) for name in "qkv")
        options |= learnt
        out, lse = self.forward(q, k, v, **options)
        gradients = dict(zip(ARGUMENTS, self.grad(dout, q, k, v, out, lse, dlse=dlse, **options), strict=True))
        for name, direction in directions.items():
            terms = gradients[name] * direction
            size = math.sqrt((terms * terms).sum())  # what a random direction's slope comes to
            np.testing.assert_allclose(terms.sum(), found[name], rtol=1e-7, atol=1e-7 * size + 1e-11, err_msg=name)

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    @pytest.mark.parametrize("poison", POISON)
    @pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16], ids=str)
    def test_what_a_row_does_not_see_does_not_reach_its_gradient(self, poison, dtype, dropout):
        """Only row 5 sees what isn't finite, and only keys 0 to 9 and 47 are seen by it."""
        q, k, v, dout = (normal(1, 1, n, 16, dtype=dtype, seed=n) for n in (70, 90, 91, 71))
        q, v, dout = q[:, :, :70], v[:, :, :90], dout[:, :, :70]
        options = {"mask": sparse_mask(70, 90), "bias": normal(70, 90, dtype=dtype), "dropout": dropout, "seed": 1}
        clean = self.grad(dout, q, k, v, *self.forward(q, k, v, **options), **options)
        POISON[poison](q, k, v, dout)
        got = self.grad(dout, q, k, v, *self.forward(q, k, v, **options), **options)
        rows, keys = np.arange(70) != 5, ~options["mask"][5]
        assert np.isnan(got.dq[0, 0, 5].astype(np.float32)).any()
        for x, want, others in ((got.dq, clean.dq, rows), (got.dk, clean.dk, keys), (got.dv, clean.dv, keys)):
            assert same_bits(x[:, :, others], want[:, :, others])
        assert same_bits(got.dbias[rows], clean.dbias[rows])
        assert (got.dbias[5, keys] == 0).all()

    @pytest.mark.parametrize("causal", [True, "top-left"])
    def test_nan_behind_the_causal_mask(self, causal):
        q, k, v, dout = (normal(1, 2, 150, 16, seed=n) for n in range(4))
        clean = self.grad(dout, q, k, v, *self.forward(q, k, v, causal=causal), causal=causal)
        v[:, :, 147, 3] = k[:, :, 148, 0] = NAN
        got = self.grad(dout, q, k, v, *self.forward(q, k, v, causal=causal), causal=causal)
        assert same_bits(got.dq[:, :, :147], clean.dq[:, :, :147])
        assert np.isnan(got.dq[:, :, 147:]).all()
        dout[:, :, 10] = NAN
        v[:, :, 147, 3] = k[:, :, 148, 0] = 0
        late = self.grad(dout, q, k, v, *self.forward(q, k, v, causal=causal), causal=causal)
        assert np.isnan(late.dk[:, :, :11]).all()
        assert np.isfinite(late.dk[:, :, 11:]).all()
        assert np.isfinite(late.dv[:, :, 11:]).all()

    @pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
    def test_nan_beside_a_window(self, offset):
        """Keys just before and behind those that some rows see, which no product goes through on its own."""
        q, k, v, dout = (normal(1, 1, n, 8, seed=n) for n in (192, 220, 221, 193))
        v, dout = v[:, :, :220], dout[:, :, :192]
        options = {"window": (20, 0), "q_offset": offset}
        dout[:, :, 64:128] = NAN
        got = self.grad(dout, q, k, v, *self.forward(q, k, v, **options), **options)
        seen = (np.arange(220) >= 64 + offset - 20) & (np.arange(220) < 128 + offset)
        for dx in (got.dk, got.dv):
            np.testing.assert_array_equal(np.isnan(dx[0, 0]).all(axis=-1), seen)
            assert np.isfinite(dx[0, 0, ~seen]).all()

    @pytest.mark.parametrize("options", [{"mask": np.zeros((9, 20), bool)}, {"kv_lengths": 0}, {"q_lengths": 0}])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_without_a_key_have_no_gradient(self, dtype, options):
        q, k, v, dout = (np.full((1, 2, n, 8), NAN, dtype) for n in (9, 20, 20, 9))
        bias = np.zeros((9, 20))
        out, lse = self.forward(q, k, v, bias=bias, **options)
        for dx in self.grad(dout, q, k, v, out, lse, bias=bias, **options)[:4]:
            assert (dx == 0).all()

    @pytest.mark.parametrize("options", [{"mask": np.zeros((9, 20), bool)}, {"kv_lengths": 0}, {"q_lengths": 0}])
    def test_a_row_of_a_sink_alone(self, options):
        """Its LSE is the sink, and that derivative is all there is."""
        q, k, v, dout, dlse = normal(1, 2, 9, 8), *(normal(1, 2, 20, 8),) * 2, normal(1, 2, 9, 8), normal(1, 2, 9)
        sinks = np.array([0.5, -3.0], np.float32)
        out, lse = self.forward(q, k, v, sinks=sinks, **options)
        gradients = self.grad(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, **options)
        np.testing.assert_allclose(gradients.dsinks, dlse.sum(axis=(0, 2)), rtol=1e-5, atol=1e-6)
        for dx in gradients[:3]:
            assert not dx.any()

    def test_rows_of_the_lowest_number_stay_finite(self, saturated_case):
        """The LSE can't tell how many keys share such a row, so its own gradient has lost its size. Rows that a loss
        doesn't count, as padding's, do no harm."""
        case = saturated_case
        q, k, v, options = case.arguments()
        out, lse = self.forward(q, k, v, **options)
        dout, _ = derivatives(case, out, lse)
        assert all(np.isfinite(dx.astype(np.float64)).all() for dx in self.grad(dout, q, k, v, out, lse, **options)[:3])
        dout[np.abs(lse) > 1e3] = 0
        got = self.grad(dout, q, k, v, out, lse, **options)
        exact, limits = expect(case.dtype, (dout, q, k, v, out, lse), None, options)
        for dx, want, limit in list(zip(got, exact, limits, strict=True))[:3]:
            error = np.abs(dx.astype(np.float64) - want)
            assert (error <= limit + bands.rounding(case.dtype, want)).all()

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_gradient_beyond_the_dtype_is_infinite(self, dtype, sign):
        """Three rows that share a key, each with two thirds of the largest number; the next column is in range."""
        q, k, v = np.zeros((1, 1, 3, 2), dtype), np.zeros((1, 1, 1, 2), dtype), np.zeros((1, 1, 1, 2), dtype)
        dout = np.full((1, 1, 3, 2), sign * float(ml_dtypes.finfo(dtype).max) / 1.5).astype(dtype)
        dout[..., 1] /= dtype.type(4)
        operands = dout, q, k, v, *self.forward(q, k, v)
        got = self.grad(*operands)
        assert got.dv[0, 0, 0, 0] == sign * INF
        assert np.isfinite(got.dv[0, 0, 0, 1])
        if dtype != FLOAT64:  # whose exact gradient is infinite too
            assert_gradients(got, *expect(dtype, operands, None, {}), dtypes_of(q, k, v, {}))
            largest = sign * np.float64(ml_dtypes.finfo(dtype).max)
            wrong = got._replace(dv=np.where(np.isinf(got.dv), largest, got.dv.astype(np.float64)).astype(dtype))
            with pytest.raises(AssertionError, match="infinity"):
                assert_gradients(wrong, *expect(dtype, operands, None, {}), dtypes_of(q, k, v, {}))

    # ---- parts

    @pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
    def test_gradients_of_chunks_of_keys_add_up(self, dtype):
        q, k, v, dout = (normal(2, 4, 90, 16, dtype=dtype, seed=n) for n in range(4))
        k, v = k[:, :2], v[:, :2]
        rules = {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "dropout": 0.2, "seed": 3, "causal": True}
        out, lse = self.forward(q, k, v, **rules)
        whole = self.grad(dout, q, k, v, out, lse, **rules)
        dq, dk, dv = np.zeros_like(q), [], []
        for start, stop in itertools.pairwise((0, 31, 64, 90)):
            keys = slice(start, stop)
            part = self.grad(
                dout, q, k[:, :, keys], v[:, :, keys], out, lse, q_offset=0, k_offset=start, **rules
            )  # fmt: skip
            dq += part.dq
            dk.append(part.dk)
            dv.append(part.dv)
        tolerance = 1e-12 if dtype == FLOAT64 else 1e-5
        for x, want in ((dq, whole.dq), (np.concatenate(dk, 2), whole.dk), (np.concatenate(dv, 2), whole.dv)):
            np.testing.assert_allclose(x, want, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
    def test_dout_of_a_row_without_a_key_does_not_reach_the_sinks(self, packed):
        """Whose output and LSE don't depend on any key: only the LSE's own derivative counts."""
        q, k, v, dout = normal(1, 2, 6, 8), normal(1, 2, 4, 8), normal(1, 2, 4, 8, seed=1), normal(1, 2, 6, 8, seed=2)
        rules = {"sinks": np.array([0.5, -1.0]), "causal": True}  # rows 0 and 1 see no key
        if packed:
            q, k, v, dout = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v, dout))
            offsets = ([0, 6, 6], [0, 4, 4])
            out, lse = attention_varlen(q, k, v, *offsets, **rules, return_lse=True)
            grad = functools.partial(flash_numba.attention_varlen_grad, backend=self.backend)
            hidden = (slice(2),)
        else:
            offsets = ()
            out, lse = self.forward(q, k, v, **rules)
            grad, hidden = self.grad, (0, slice(None), slice(2))
        want = grad(dout, q, k, v, out, lse, *offsets, dlse=np.ones_like(lse), **rules)
        dout[hidden] = NAN
        got = grad(dout, q, k, v, out, lse, *offsets, dlse=np.ones_like(lse), **rules)
        for dx, right in zip(got, want, strict=True):
            assert dx is right is None or same_bits(dx, right)

    def test_a_share_is_at_most_1(self):
        """However many digits the LSE has lost: dv of the only key is its share of dout. P itself never is more than 1;
        what makes up for the LSE's rounding may be, by `recurrence.MOST_ROUNDING` at most."""
        q = np.concatenate([10 ** np.random.default_rng(0).uniform(5, 9, 300), [1148951, 4e6, 5e7, 1e9]])
        q = q.astype(np.float32)[:, None, None]  # a head of one row and one key each
        k, v = np.full(q.shape, 1.2345, np.float32), np.ones(q.shape, np.float32)
        out, lse = self.forward(q, k, v, scale=1.0)
        dv = self.grad(np.ones_like(out), q, k, v, out, lse, scale=1.0).dv
        assert (dv >= 0).all()
        most = recurrence.rounding_factor(-0.9999 * recurrence.MOST_ROUNDING) if self.backend == "cpu" else 1.0001
        assert (dv <= most).all()

    def test_only_what_is_needed(self):
        q, k, v, dout = normal(*Q), normal(*KV), normal(*KV, seed=1), normal(*Q, seed=2)
        rules = {"bias": normal(5, 7), "sinks": normal(4), "causal": True}
        out, lse = self.forward(q, k, v, **rules)
        everything = self.grad(dout, q, k, v, out, lse, **rules)
        for count in range(6):
            for need in itertools.combinations(ARGUMENTS, count):
                for name, dx, want in zip(
                    ARGUMENTS, self.grad(dout, q, k, v, out, lse, need=need, **rules), everything, strict=True
                ):
                    assert (dx is None) == (name not in need)
                    assert dx is None or same_bits(dx, want)
        assert self.grad(dout, q, k, v, out, lse, need=(name for name in ["k"]), **rules).dk is not None
        plain = self.grad(dout, q, k, v, out, lse)
        assert plain.dbias is None
        assert plain.dsinks is None
        assert self.grad(dout, q, k, v, out, lse, bias=np.ones((5, 7), bool)).dbias is None
        assert self.grad(dout, q, k, v, out, lse, mask=np.ones((5, 7), np.float32)).dbias is None

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_operands_of_other_formats(self, dtype):
        """dout and out in whatever format they came, lse and dlse in either of theirs, a bias in its own."""
        q, k, v = normal(*Q, dtype=dtype), normal(*KV, dtype=dtype), normal(*KV, dtype=dtype, seed=1)
        bias, sinks = normal(1, 7, dtype=FLOAT16), normal(2, 4, dtype=FLOAT64)
        out, lse = self.forward(q, k, v, bias=bias, sinks=sinks)
        dout, dlse = normal(*Q, dtype=FLOAT16, seed=5), normal(2, 4, 5, dtype=FLOAT16, seed=6).astype(np.float64)
        want = self.grad(dout.astype(np.float32), q, k, v, out, lse, dlse=dlse, bias=bias, sinks=sinks)
        got = self.grad(
            dout.astype(">f4"), q, k, v, out.astype(np.float64), np.asfortranarray(lse.astype(np.float64)),
            dlse=dlse.astype(np.float32), bias=bias, sinks=sinks,
        )  # fmt: skip
        assert [dx.dtype for dx in got] == [dtype, dtype, dtype, FLOAT16, FLOAT64]
        for dx, other in zip(got, want, strict=True):
            assert same_bits(dx, other)

    def test_inputs_are_left_as_they_were(self):
        q, k, v, dout, bias = normal(*Q), normal(*KV), normal(*KV, seed=1), normal(*Q, seed=2), normal(5, 7)
        out, lse = self.forward(q, k, v, bias=bias)
        before = [x.copy() for x in (dout, q, k, v, out, lse, bias)]
        self.grad(dout, q, k, v, out, lse, bias=bias)
        assert all(same_bits(x, y) for x, y in zip((dout, q, k, v, out, lse, bias), before, strict=True))

    @pytest.mark.parametrize("name", BAD_INPUT)
    def test_bad_input_is_named_and_quoted(self, name):
        changed, error, words = BAD_INPUT[name]
        call = {
            "dout": normal(*Q), "q": normal(*Q), "k": normal(*KV), "v": normal(*KV), "out": normal(*Q),
            "lse": normal(2, 4, 5), "backend": self.backend,
        } | changed  # fmt: skip
        with pytest.raises(error) as raised:
            flash_numba.attention_grad(**call)
        message = str(raised.value)
        missing = [word for word in words if word not in message]
        assert not missing, f"{message!r} doesn't hold {missing}"
        assert "\n" not in message

    # ---- packed sequences

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "rules",
        [
            {},
            {"causal": True},
            {"window": (9, 2), "softcap": 2.0, "dropout": 0.3, "seed": 11},
            {"causal": "top-left", "sinks": normal(4), "alibi_slopes": np.linspace(0.1, 0.4, 4)},
            {"sinks": normal(6, 4), "k_scale": np.linspace(0.5, 1, 12).reshape(6, 2), "v_scale": 0.7},
        ],
        ids=lambda rules: "+".join(rules) or "plain",
    )
    def test_packed_sequences(self, dtype, rules):
        lengths = [(17, 7), (0, 5), (1, 40), (5, 0), (70, 130), (33, 33)]
        cu_q, cu_k = (np.cumsum([0, *each]) for each in zip(*lengths, strict=True))
        q, dout = (normal(cu_q[-1] + 3, 4, 16, dtype=dtype, seed=n) for n in (0, 1))
        k, v = (normal(cu_k[-1] + 2, 2, 16, dtype=dtype, seed=n) for n in (2, 3))
        out, lse = attention_varlen(q, k, v, cu_q, cu_k, **rules, return_lse=True, backend=self.backend)
        dlse = normal(*lse.shape, seed=4).astype(lse.dtype)
        got = flash_numba.attention_varlen_grad(
            dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, **rules, backend=self.backend
        )  # fmt: skip
        exact = reference.attention_varlen_grad(dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, **rules)
        limits = [np.zeros(np.shape(x)) for x in exact]
        per_sequence = ("k_scale", "sinks") if "k_scale" in rules else ()
        for b, (rows, keys) in enumerate(zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)):
            at, of = slice(*rows), slice(*keys)
            own = {name: value[b] if name in per_sequence else value for name, value in rules.items()}
            limit = bands.gradient_bands(
                dtype, dout[at], q[at], k[of], v[of], out[at], lse[:, at], dlse=dlse[:, at], layout="bshd", **own,
                _first_batch=b,
            ).limits  # fmt: skip
            for whole, places, part in (
                (limits[0], at, limit.dq),
                (limits[1], of, limit.dk),
                (limits[2], of, limit.dv),
            ):
                whole[places] = part
            if limit.dsinks is not None:
                limits[4][b if per_sequence else ...] += limit.dsinks
        assert_gradients(got, exact, limits, dtypes_of(q, k, v, rules))
        for dx, end in ((got.dq, cu_q[-1]), (got.dk, cu_k[-1]), (got.dv, cu_k[-1])):
            assert not dx[end:].any()

    def test_packed_sequences_name_what_is_bad(self):
        q, k = normal(9, 4, 8), normal(9, 2, 8)
        cu = np.array([0, 4, 9])
        out, lse = attention_varlen(q, k, k, cu, cu, return_lse=True)
        good = {"dout": out, "q": q, "k": k, "v": k, "out": out, "lse": lse, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        for changed, error, word in (
            ({"cu_seqlens_q": np.array([1, 9])}, ValueError, "cu_seqlens_q"),
            ({"lse": lse.T}, ValueError, "lse"),
            ({"dout": out[:4]}, ValueError, "dout"),
            ({"need": ("p",)}, ValueError, "need"),
            ({"backend": "tpu"}, ValueError, "backend"),
        ):
            with pytest.raises(error, match=word):
                flash_numba.attention_varlen_grad(**(good | changed))


@pytest.mark.parametrize("size", [3e4, 1e15])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64])
def test_a_saturated_soft_cap_has_no_derivative(dtype, rows, size):
    """However large q and k are that it is multiplied by."""
    rng = np.random.default_rng(2)
    q, k = np.full((2, rows, 8), size, dtype), np.full((2, 40, 8), size, dtype)
    k[:, ::2] *= -1
    v, dout = normal(2, 40, 8, dtype=dtype), rng.standard_normal((2, rows, 8)).astype(dtype)
    out, lse = attention(q, k, v, softcap=30.0, return_lse=True)
    exact = reference.attention_grad(dout, q, k, v, out, lse, softcap=30.0)
    assert not exact.dq.any()
    assert not exact.dk.any()
    got = flash_numba.attention_grad(dout, q, k, v, out, lse, softcap=30.0)
    assert not got.dq.any()
    assert not got.dk.any()
    np.testing.assert_allclose(got.dv, exact.dv, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_sink_of_minus_infinity_has_no_gradient(packed, backend):
    """It isn't there, whatever the derivative by the LSE of a row that has nothing else is."""
    q, k, v = normal(5, 2, 8), normal(3, 2, 8), normal(3, 2, 8)
    dlse = np.full((2, 5), -np.inf, np.float32)
    sinks = np.array([-np.inf, 0.5], np.float32)
    call, gradient, offsets = (attention_varlen, flash_numba.attention_varlen_grad, ([0, 2, 5], [0, 0, 3]))
    if not packed:
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        call, gradient, offsets = attention, flash_numba.attention_grad, ()
    rules = {"sinks": sinks, "causal": True, "backend": backend}
    offsets = tuple(np.array(x) for x in offsets)
    out, lse = call(q, k, v, *offsets, return_lse=True, **rules)
    dsinks = gradient(np.ones_like(out), q, k, v, out, lse, *offsets, dlse=dlse, **rules).dsinks
    assert dsinks[0] == 0
    assert dsinks[1] == -np.inf


def test_sinks_of_many_packed_sequences():
    """Each sequence's gradient is that of its own rows; some have none."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 4, 300)
    offsets = np.concatenate([[0], lengths.cumsum()])
    total = offsets[-1] + 2  # rows behind the last sequence
    q, k, v, dout = (normal(total, 2, 8, seed=n) for n in range(4))
    sinks = rng.standard_normal((300, 2))
    out, lse = attention_varlen(q, k, v, offsets, offsets, sinks=sinks, return_lse=True)
    got = flash_numba.attention_varlen_grad(dout, q, k, v, out, lse, offsets, offsets, sinks=sinks).dsinks
    want = reference.attention_varlen_grad(dout, q, k, v, out, lse, offsets, offsets, sinks=sinks).dsinks
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert (got[lengths == 0] == 0).all()


class KernelGradientConformance(GradientConformance):
    """Compiled kernels also promise bits, and take sizes that the oracle's own tests needn't."""

    @fuzz(60)
    @given(drawn=ANY_SHAPE)
    def test_any_shape(self, drawn):
        self.check(drawn)

    @fuzz(100)
    @given(
        seed=st.integers(0, 2**32),
        names=st.sets(st.sampled_from(sorted(RULES)), min_size=1, max_size=6),
        rows=st.integers(1, 230),
        keys=st.integers(1, 400),
        dtype=st.sampled_from(DTYPES),
    )
    def test_any_rules_at_any_lengths(self, seed, names, rows, keys, dtype):
        """More than one block of keys and of rows, which the matrix of pairs hasn't."""
        if "float8" in names and dtype == FLOAT64:
            dtype = FLOAT32
        self.check(rule_case(f"any-rules-{seed}", *sorted(names), rows=rows, keys=keys, dtype=dtype))

    def test_memory_layout_changes_no_bit(self, memory_case):
        case = memory_case
        q, k, v, options = case.arguments()
        plain = [np.ascontiguousarray(x, case.dtype) for x in (q, k, v)]
        out, lse = self.forward(*plain, **options)
        dout, dlse = derivatives(case, out, lse)
        dout, out = case.view(dout), case.view(out)
        want = self.grad(*(np.ascontiguousarray(x, case.dtype) for x in (dout, *plain, out)), lse, dlse=dlse, **options)
        got = self.grad(dout, q, k, v, out, lse, dlse=dlse, **options)
        for dx, other in zip(got[:3], want[:3], strict=True):
            assert same_bits(np.ascontiguousarray(dx), np.ascontiguousarray(other))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("lengths", [(1, 203), (113, 203), (400, 300)], ids=str)
    @pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
    def test_the_batch_changes_no_bit(self, dtype, lengths, options):
        rows, keys = lengths
        q, dout = (normal(8, 4, rows, 40, dtype=dtype, seed=n) for n in (0, 1))
        k, v = (normal(8, 2, keys, 40, dtype=dtype, seed=n) for n in (2, 3))
        bias, sinks = normal(8, 4, 1, keys, seed=4), normal(8, 4, seed=5)
        out, lse = self.forward(q, k, v, bias=bias, sinks=sinks, **options)
        together = self.grad(dout, q, k, v, out, lse, bias=bias, sinks=sinks, **options)
        for b in range(8):
            at = slice(b, b + 1)
            alone = self.grad(
                *(x[at] for x in (dout, q, k, v, out, lse)), bias=bias[at], sinks=sinks[at], **options
            )  # fmt: skip
            for name, dx, of_all in zip(NAMES, alone, together, strict=True):
                assert same_bits(dx[0], of_all[b]), name
        # Half of the heads, with the same number of query heads to a K/V head.
        half = self.grad(
            dout[:, 2:], q[:, 2:], k[:, 1:], v[:, 1:], out[:, 2:], lse[:, 2:], bias=bias[:, 2:], sinks=sinks[:, 2:],
            **options,
        )  # fmt: skip
        assert same_bits(half.dq, np.ascontiguousarray(together.dq[:, 2:]))
        assert same_bits(half.dk, np.ascontiguousarray(together.dk[:, 1:]))


class TestReference(GradientConformance):
    backend = "reference"
    max_cost = 300_000


class TestCpu(KernelGradientConformance):
    backend = "cpu"

    @pytest.fixture
    def threads(self, monkeypatch):
        if numba.config.NUMBA_NUM_THREADS < 2:
            pytest.skip("Numba has one thread here")
        monkeypatch.setattr(launch, "SERIAL_FLOPS", 0)
        before = numba.get_num_threads()
        yield numba.set_num_threads
        numba.set_num_threads(before)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("q_shape", "kv_shape"),
        [((1, 1, 1023, 40), (1, 1, 1024, 40)), ((2, 6, 203, 64), (2, 3, 113, 64)), ((4, 8, 1, 64), (4, 2, 500, 64))],
        ids=["long", "GQA", "decode"],
    )
    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.2, "seed": 1}], ids=str)
    def test_threads_change_no_bit(self, threads, dtype, q_shape, kv_shape, options):
        """One head alone too, whose work threads have to share."""
        q, dout = normal(*q_shape, dtype=dtype), normal(*q_shape, dtype=dtype, seed=1)
        k, v = normal(*kv_shape, dtype=dtype, seed=2), normal(*kv_shape, dtype=dtype, seed=3)
        out, lse = self.forward(q, k, v, **options)
        threads(1)
        serial = self.grad(dout, q, k, v, out, lse, **options)
        threads(2)
        for _ in range(3):
            parallel = self.grad(dout, q, k, v, out, lse, **options)
            for dx, want in zip(parallel[:3], serial[:3], strict=True):
                assert same_bits(dx, want)

    @pytest.mark.parametrize("name", ["bias", "bias-keys-float16", "sinks", "mask", "window", "softcap", "float8"])
    def test_threads_change_no_bit_under_rules(self, name, threads):
        """A bias shared by heads and batches too, to whose gradient several threads may have something to add."""
        q, k, v, options = rule_case(f"threads-{name}", name, rows=200, keys=300).arguments()
        out, lse = self.forward(q, k, v, **options)
        dout = normal(*out.shape, seed=9)
        for bias in [options.pop("bias", None), normal(1, 1, 200, 300), normal(300), normal(2, 1, 200, 1)]:
            rules = options if bias is None else options | {"bias": bias}
            threads(1)
            serial = self.grad(dout, q, k, v, out, lse, **rules)
            threads(2)
            parallel = self.grad(dout, q, k, v, out, lse, **rules)
            for dx, want in zip(parallel, serial, strict=True):
                assert dx is want is None or same_bits(dx, want)

    def test_a_bias_shared_by_all_is_summed_in_one_order(self, threads):
        """Though some rows see no key, or none of a block: a work tile's successor waits for blocks that it skips too.
        With a batch element of a single key in between, whoever doesn't wait is far ahead."""
        q, dout = normal(4, 1, 100, 16), normal(4, 1, 100, 16, seed=1)
        k, v = normal(4, 1, 4000, 16, seed=2), normal(4, 1, 4000, 16, seed=3)
        rules = {
            "bias": normal(4000), "kv_lengths": [4000, 1, 4000, 4000], "q_offset": [2000, 0, 5900, 5900],
            "window": (2000, 2000),
        }  # fmt: skip
        out, lse = self.forward(q, k, v, **rules)
        threads(1)
        serial = self.grad(dout, q, k, v, out, lse, **rules).dbias
        threads(2)
        for _ in range(3):
            assert same_bits(self.grad(dout, q, k, v, out, lse, **rules).dbias, serial)

    def test_auto_is_the_cpu_here(self):
        q, k, v, dout = (normal(1, 2, 30, 8, seed=n) for n in range(4))
        out, lse = self.forward(q, k, v)
        for dx, want in zip(
            flash_numba.attention_grad(dout, q, k, v, out, lse)[:3], self.grad(dout, q, k, v, out, lse)[:3], strict=True
        ):
            assert same_bits(dx, want)

    def test_mask_of_the_wrong_half_would_be_seen(self):
        """That the limits are tight enough: a wrong formula isn't within them."""
        case = self_attention("limits", rows=65, keys=90, options=mask_like(65, 90))
        q, k, v, options = case.arguments()
        out, lse = self.forward(q, k, v, **options)
        dout, _ = derivatives(case, out, lse)
        exact, limits = expect(FLOAT32, (dout, q, k, v, out, lse), None, options)
        got = self.grad(dout, q, k, v, out, lse, **options)
        for n in range(3):
            wrong = list(got)
            wrong[n] = got[n] * np.float32(1 + 1e-4)
            with pytest.raises(pytest.fail.Exception, match=NAMES[n]):
                assert_gradients(wrong, exact, limits, dtypes_of(q, k, v, options))


# ---- the order in which a work tile waits, adds and tells its successor, on which no run depends but once in thousands


def order_of(function, **names):
    """What a function of `backward` does, with recording functions in the place of those that it calls."""
    python = function.py_func
    events = []

    def recorder(name, result):
        def record(*arguments):
            events.append((name, *(x for x in arguments if isinstance(x, int))))
            return result

        return record

    made = {name: recorder(name, value[0]) if isinstance(value, tuple) else value for name, value in names.items()}
    of = FunctionType(python.__code__, vars(backward) | made, python.__name__, python.__defaults__)
    return of, events


GEOMETRY = SimpleNamespace(next_block=lambda visible, start, size: start)


@pytest.mark.parametrize("row_bias", [False, True])
@pytest.mark.parametrize("before", [0, 77])
def test_a_work_tile_is_done_once_all_is_added(row_bias, before):
    """A bias of one number a row is added in the end, after the predecessor has, and before the successor may."""
    head = SimpleNamespace(bias=0, scale=1.0)
    visible = SimpleNamespace(start=0, stop=20)
    work = SimpleNamespace(head=head, gradients=head, visible=visible, done=55, before=before, first_row=0, rows=3)
    names = dict.fromkeys(("pointer_like", "part", "queries_of", "saturated"), (0,))
    gradient = SimpleNamespace(bias=1, bias_column=0 if row_bias else 4, bias_row=4, q=1)
    launch_ = SimpleNamespace(gradient=0, walks_all=0, block_k=10, row_bias=0, dq=0, q_stride=0)
    names |= {
        "problem_at": (gradient,), "itemsize": (4,), "start_work_tile": (work,), "read_flag": (0,), "publish": (None,),
        "differentiate_block": (True,), "wait_for": (True,), "add_to_rows": (None,), "write_rows": (None,),
        "geometry": GEOMETRY,
    }  # fmt: skip
    of, events = order_of(backward.differentiate_work_tile, **names)
    of(None, launch_, 0, 0, 0)
    told = [event for event in events if event[0] in ("publish", "differentiate_block", "wait_for", "add_to_rows")]
    done = backward.ALL_BLOCKS_DONE
    end = [("publish", 55, done)]
    if row_bias:
        end = [("wait_for", 77, done, 0)] * (before != 0) + [("add_to_rows", 0, 1, 0, 3)] + end
    assert told[0] == ("publish", 55, 0)
    assert [name for name, *_ in told[1:3]] == ["differentiate_block"] * 2
    assert told[3:] == end


@pytest.mark.parametrize("walks_all", [0, 1])
def test_a_work_tile_that_others_wait_for_goes_through_all_blocks(walks_all):
    """Also through those that it sees nothing of: its successor may, and so may whoever it waits for itself."""
    head = SimpleNamespace(bias=0, scale=1.0)
    visible = SimpleNamespace(start=10, stop=20)
    work = SimpleNamespace(head=head, gradients=head, visible=visible, done=55, before=77, first_row=0, rows=3)
    names = {
        "problem_at": (SimpleNamespace(bias=1, bias_column=4, q=0),), "itemsize": (4,), "start_work_tile": (work,),
        "read_flag": (0,), "publish": (None,), "differentiate_block": (True,),
        "geometry": SimpleNamespace(next_block=lambda of, start, size: max(start, of.start), key_range=key_range),
    }  # fmt: skip
    of, events = order_of(backward.differentiate_work_tile, **names)
    of(SimpleNamespace(keys=40), SimpleNamespace(gradient=0, walks_all=walks_all, block_k=10), 0, 0, 0)
    blocks = [event[2] for event in events if event[0] == "differentiate_block"]  # behind the scratch
    assert blocks == ([0, 10, 20, 30] if walks_all else [10])
    assert next(event for event in events if event[0] == "publish") == ("publish", 55, 0 if walks_all else 1)


@pytest.mark.parametrize(
    ("bias", "shared"), [((2, 4, 5, 7), False), ((2, 4, 1, 7), False), ((4, 5, 7), True), ((7,), True), (None, False)]
)
def test_work_tiles_of_a_shared_bias_are_one_chain(monkeypatch, bias, shared):
    q, k, v = normal(*Q), normal(*KV), normal(*KV, seed=1)
    rules = {} if bias is None else {"bias": normal(*bias)}
    out, lse = attention(q, k, v, return_lse=True, **rules)
    seen = []

    def start(run, addresses, alive, progress):
        at = launch.PARAMETERS_AT
        words = run.words.view(np.uint8)[at : at + backward_plan.LAUNCH_PARAMETERS.itemsize]
        table = next(x for x in alive if isinstance(x, np.ndarray) and x.dtype == backward_plan.CHAINED_TILE)
        seen.append((int(words.view(backward_plan.LAUNCH_PARAMETERS)["walks_all"][0]), table["previous"].copy()))

    monkeypatch.setattr(launch, "start", start)
    flash_numba.attention_grad(out, q, k, v, out, lse, **rules)
    ((walks_all, previous),) = seen
    assert walks_all == shared
    assert (list(previous) == list(range(-1, 7))) == shared  # else by key heads


@pytest.mark.parametrize("bias", [0, 1])
def test_a_block_is_done_once_it_is_added(bias):
    """dK, dV and a bias's gradient: all after the predecessor's, and before it is told."""
    work = SimpleNamespace(done=55, before=77, visible=SimpleNamespace(stop=400))
    names = {
        "wait_for": (True,), "score_block": ((True, SimpleNamespace(hidden=0.0)),), "add_to_keys": (None,),
        "publish": (None,), "add_to_queries": (None,),
    }  # fmt: skip
    of, events = order_of(backward.differentiate_block, **names)
    assert of(None, SimpleNamespace(bias=bias, q=1), SimpleNamespace(block_k=128), work, None, 256, 0)
    scored = ["wait_for", "score_block"] if bias else ["score_block", "wait_for"]  # which adds the bias's gradient
    assert [event[0] for event in events] == [*scored, "add_to_keys", "publish", "add_to_queries"]
    assert ("wait_for", 77, 3, 0) in events
    assert ("publish", 55, 3) in events
