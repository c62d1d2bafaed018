"""The bands hold and mean something, `check` breaks when a kernel does, and each guard of docs/numerics.md works."""

import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import flash_numba
from flash_numba import bands, check, dtypes, gradient, interface, ops, recurrence, reference, scores

DTYPES = list(bands.TABLE)
FLOAT32, FLOAT64, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)
inf, nan = math.inf, math.nan


def normal(*shape, dtype=FLOAT32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


# ---- bands


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_table_is_about_its_dtypes(dtype):
    info, fmt = ml_dtypes.finfo(dtype), bands.TABLE[dtype]
    assert fmt.roundoff == float(info.eps) / 2
    assert fmt.tiny == float(info.smallest_subnormal) / 2
    assert fmt.accumulated == min(fmt.roundoff, 2.0**-24)


def test_bands_for_standard_normal_are_as_tight_as_promised():
    """The issue's figures: 1e-13 max|V| in float64, 1e-5 in float32; in 16 bits the rounding of the output, 1 ulp."""
    for size in check.SIZES:
        q, k, v = normal(3, 2, size, check.HEAD_DIM, dtype=FLOAT64)
        truth = bands.exact(q, k, v)
        assert (bands.limit(FLOAT64, truth) <= 1e-13 * truth.v_max).all()
        assert (bands.limit(FLOAT32, truth) <= 1e-5).all()
        for dtype in DTYPES[2:]:
            assert (bands.limit(dtype, truth) <= bands.TABLE[dtype].roundoff * np.abs(truth.out) + 1e-5).all()


def test_measured_errors_are_as_small_as_expected():
    """Standard normal input, everything in the dtype: about 1e-13, 1e-5 or better, and 5e-3 to 1e-2 in bfloat16."""
    expected = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
    for dtype, size in (("float64", 128), ("float32", 128), ("float16", 128), ("bfloat16", 128), ("bfloat16", 500)):
        online, kernel, *_ = check.measure(check.Case(dtype, size, "normal"))
        assert 0 < online.abs_max <= expected[dtype]
        assert kernel.abs_max <= expected[dtype]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bands_are_not_much_wider_than_errors(dtype):
    """The worst of thousands of elements takes a twentieth of what it may and more: a wider band tells nothing."""
    online, kernel, *gradients = check.measure(check.Case(dtype, 128, "normal"))
    for row in (online, kernel, *gradients):
        assert 0.04 <= row.share <= 1, row
    assert 0.04 <= kernel.lse_max / kernel.lse_band <= 1


def test_exact_describes_a_row_of_two_keys():
    """Weights 1/4 and 3/4, worked out by hand."""
    q, k, v = np.array([[1.0]]), np.array([[0.0], [math.log(3)]]), np.array([[-2.0], [2.0]])
    truth = bands.exact(q, k, v)
    assert truth.out == pytest.approx(1)
    assert truth.lse == pytest.approx(math.log(4))
    assert truth.size == pytest.approx(2)
    assert truth.spread == pytest.approx(math.hypot(1 / 4 * 3, 3 / 4 * 1))
    assert truth.score_max == pytest.approx(2 * math.log(3))
    assert (truth.keys, truth.head_dim, truth.v_max) == (2, 1, 2.0)


def test_unseen_keys_do_not_widen_the_bands():
    q, k, v = normal(3, 40, 8, dtype=FLOAT64)
    k[20:] *= 1e6
    mask = np.arange(40) < 20
    masked, short = bands.exact(q, k, v, mask=mask), bands.exact(q, k[:20], v[:20])
    np.testing.assert_allclose(masked.score_max, short.score_max)
    np.testing.assert_allclose(masked.spread, short.spread)


def limit_without_weights(dtype, truth):
    """The band of an output from the largest |v| and score alone: A and |O| of docs/numerics.md may be as large as
    `v_max`, and S as large as `v_max / sqrt(2)`, which two opposite values sharing a row come to."""
    fmt = bands.TABLE[dtype]
    sums, score = bands._sums(truth.keys), bands._score(truth.head_dim)
    allowed = fmt.accumulated * (sums + score * truth.score_max / math.sqrt(2))
    if fmt.roundoff > fmt.accumulated:
        allowed = allowed + fmt.roundoff
    return allowed * truth.v_max + fmt.tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_limit_without_weights_is_the_looser_one(dtype):
    q, k, v = normal(3, 2, 100, 32, dtype=FLOAT64)
    truth = bands.exact(5 * q, k, v)
    assert (bands.limit(dtype, truth) <= limit_without_weights(dtype, truth)[..., None]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1, 20])
@pytest.mark.parametrize(("size", "dim"), [(2, 256), (5, 1), (130, 64), (130, 8)])
def test_any_block_size_lies_within_the_bands(size, dim, factor, dtype):
    q, k, v = (normal(2, size, dim, dtype=dtype, seed=n) for n in range(3))
    q = (factor * q.astype(FLOAT64)).astype(dtype)
    truth = bands.exact(q, k, v)
    one_shot, _ = reference.one_shot_attention(q, k, v)
    for block in (1, 7, size - 1):
        online, _ = reference.online_attention(q, k, v, block)
        error = np.abs(online.astype(FLOAT64) - one_shot.astype(FLOAT64))
        assert (error <= bands.limit(dtype, truth, blocks=math.ceil(size / block))).all()


# ---- check


def test_measurements_are_within_their_bands_and_of_their_size():
    for case in check.cases(sizes=[33]):
        online, kernel, *gradients = check.measure(case, seed=3, head_dim=16)
        assert [row.comparison for row in gradients] == ["dq", "dk", "dv"]
        for row in (online, kernel, *gradients):
            assert row.ok
            assert (row.dtype, row.keys, row.logits) == case
            assert row.rel_p50 <= row.rel_p99 <= row.rel_max <= row.rel_band
            assert 0 < row.abs_max <= row.abs_band
        assert online.lse_max is None
        assert kernel.lse_max <= kernel.lse_band


def broken_kernel(change):
    def attention(q, k, v, *, return_lse):
        out, lse = reference.attention(q, k, v, return_lse=True)
        out = out.astype(q.dtype)
        change(out, lse)
        return out, lse

    return attention


def one_element_off(out, lse):
    out[0, 3, 5] *= 1.02


def one_nan(out, lse):
    out[1, 7, 0] = nan


def lse_off(out, lse):
    lse[0, 0] += 1e-3


@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("change", [one_element_off, one_nan, lse_off])
def test_a_kernel_with_a_mistake_breaks_its_band(monkeypatch, dtype, change):
    case = check.Case(dtype, 64, "normal")
    monkeypatch.setattr(interface, "attention", broken_kernel(lambda out, lse: None))
    assert check.measure(case)[1].ok
    monkeypatch.setattr(interface, "attention", broken_kernel(change))
    online, kernel, *gradients = check.measure(case)
    assert not kernel.ok
    assert all(row.ok for row in (online, *gradients))


@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [1.02, nan])
def test_a_gradient_with_a_mistake_breaks_its_band(monkeypatch, dtype, which, value):
    def broken(*operands):
        gradients = flash_numba.attention_grad(*operands)
        gradients[which][0, 3, np.argmax(np.abs(gradients[which][0, 3]))] *= value
        return gradients

    monkeypatch.setattr(gradient, "attention_grad", broken)
    rows = check.measure(check.Case(dtype, 64, "normal"))
    assert [row.comparison for row in rows if not row.ok] == [check.GRADIENTS[which]]


# ---- the guards (docs/numerics.md)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_guard_exponent_clamp(dtype):
    """Weights far below the largest are 0, whatever the distance; around the smallest normal number, off by that."""
    smallest = float(np.finfo(dtype).smallest_normal)
    bits = -math.log2(smallest)
    below = np.array([bits - 3, bits - 0.5, bits, bits + 0.4, bits + 0.6, bits + 30, 3 * bits, 1e6, 1e30])
    k = np.array([[0.0, *-below * math.log(2)]], dtype).T
    v = np.eye(len(k), dtype=dtype)  # so that the output is the weights
    weights = flash_numba.attention(np.ones((1, 1), dtype), k, v, scale=1.0)[0]
    assert weights[0] == 1
    exact = np.exp(k[1:, 0].astype(np.float64)) if dtype == FLOAT32 else np.exp2(-below)
    np.testing.assert_allclose(weights[1:], exact, rtol=1e-4, atol=smallest)
    assert (weights[1:4] > 0).all()
    assert (weights[5:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guard_overflow_limits(dtype):
    """exp never overflows, since no weight exceeds 1: the limits are those of a score and of sum(w |v|)."""
    largest = float(ml_dtypes.finfo(dtype).max)
    accumulator = float(np.finfo(FLOAT64 if dtype == FLOAT64 else FLOAT32).max)
    # Scores up to the accumulator's limit; in float16 no input reaches it.
    side = min(math.sqrt(accumulator) / 4, largest / 2)
    q = np.full((3, 4), side).astype(dtype)
    k = np.array([[1.0], [0.9], [-1.0]]).astype(dtype) * q
    v = normal(3, 5, dtype=dtype)
    np.testing.assert_array_equal(flash_numba.attention(q, k, v), np.broadcast_to(v[0], (3, 5)))
    # 100 keys of equal weight, each value a hundredth of what the sum may be, and no more than the format holds.
    value = np.array(min(largest, accumulator / 101)).astype(dtype)
    out = flash_numba.attention(np.zeros((1, 4), dtype), np.zeros((100, 4), dtype), np.full((100, 1), value))
    np.testing.assert_allclose(out.astype(FLOAT64), float(value), rtol=4 * float(ml_dtypes.finfo(dtype).eps))


def test_guard_zero_denominator():
    """A row without a key is 0 and -inf."""
    assert recurrence.finish(0.0) == 0.0
    assert recurrence.lse(-inf, 0.0) == -inf
    q, k, v = (normal(40, 8, seed=n) for n in range(3))
    mask = np.ones((40, 40), bool)
    mask[[0, 17, 39]] = False
    out, lse = flash_numba.attention(q, k, v, mask=mask, return_lse=True)
    empty = ~mask.any(axis=1)
    assert (out[empty] == 0).all()
    assert (lse[empty] == -inf).all()
    assert np.isfinite(lse[~empty]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guard_no_epsilon_is_added(dtype):
    """With one visible key the output is its V to the bit, however small, and however low its score: l is exactly 1."""
    q, k, v = (normal(50, 8, dtype=dtype, seed=n) for n in range(3))
    v[:, 0] *= dtype.type(1e-4)
    out = flash_numba.attention(q, k - dtype.type(8) * q, v, mask=np.eye(50, dtype=bool))
    assert out.tobytes() == v.tobytes()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_guard_minus_infinity_reference(dtype):
    """(-inf) - (-inf) never happens, though a row may see nothing in its first blocks of keys, or ever."""
    m, ref, alpha = recurrence.advance(-inf, -inf)
    assert (m, ref, alpha) == (-inf, 0.0, 0.0)
    assert recurrence.weight(-inf, ref) == 0
    assert recurrence.merge(-inf, 0.0, -inf, 0.0)[1:] == (0.0, 0.0, 0.0)

    q, k, v = normal(3, 1100, 8, dtype=dtype)
    mask = np.arange(1100) >= np.array([[0], [1], [600], [1099], [1100]])
    out, lse = flash_numba.attention(q[:5], k, v, mask=mask, return_lse=True)
    truth = bands.exact(q[:5], k, v, mask=mask)
    assert (np.abs(out - truth.out) <= bands.limit(dtype, truth)).all()
    assert lse[-1] == -inf
    np.testing.assert_allclose(lse[:-1], truth.lse[:-1], rtol=1e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_guard_saturating_scale(dtype, sign):
    """A scale beyond float32 stays finite: times 0 it is 0, not NaN, and the largest score takes all the weight."""
    q = np.array([[0.0], [1e-20], [-1e-20]]).astype(dtype)
    k = np.array([[1.0], [3.0], [2.0]]).astype(dtype)
    v = np.eye(3).astype(dtype)
    out = flash_numba.attention(q, k, v, scale=sign * 1e300).astype(FLOAT64)
    np.testing.assert_allclose(out[0], 1 / 3, rtol=1e-2)
    np.testing.assert_array_equal(out[1:], np.eye(3)[[1, 0][::sign]])


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_guard_saturating_bias(dtype, rows):
    """A finite bias times log2(e) stays finite: a row of the lowest is the mean of V. So its LSE saturates too."""
    lowest = float(np.finfo(dtype).min)
    q, k, v = normal(rows, 8, dtype=dtype), normal(300, 8, dtype=dtype), normal(300, 4, dtype=dtype, seed=1)
    for low in (lowest, lowest / 1.2, lowest / 1.4):  # all below lowest / log2(e)
        with np.errstate(over="ignore"):
            assert scores.with_bias(dtype.type(1), dtype.type(low), dtype.type(lowest)) == lowest
        out, lse = flash_numba.attention(q, k, v, bias=np.full(300, low, dtype), return_lse=True)
        np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), out.shape), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(lse, lowest * math.log(2), rtol=1e-6)
    exact = flash_numba.attention(q, k, v, bias=np.full(300, lowest / 1.5, dtype), return_lse=True)[1]
    np.testing.assert_allclose(exact, lowest / 1.5, rtol=1e-6)
    masked = flash_numba.attention(q, k, v, bias=np.full(300, -inf, dtype), return_lse=True)
    assert (masked[0] == 0).all()
    assert (masked[1] == -inf).all()


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guard_softcap_is_bounded(dtype, rows):
    """However large a score, infinite too, it is capped before anything is added, and what is hidden stays hidden."""
    assert scores.softcapped(inf, 30.0, 1 / 30.0) == 30
    assert scores.softcapped(-inf, 30.0, 1 / 30.0) == -30
    assert math.isnan(scores.softcapped(nan, 30.0, 1 / 30.0))
    q, k = np.ones((rows, 1), dtype), np.array([[inf], [0.0], [-inf], [1.0]]).astype(dtype)
    v = np.eye(4).astype(dtype)
    out, lse = flash_numba.attention(q, k, v, softcap=2.0, scale=1.0, mask=[True, True, True, False], return_lse=True)
    weights = np.array([math.exp(2), 1, math.exp(-2), 0])
    rounding = 1e-6 + bands.TABLE[dtype].roundoff
    np.testing.assert_allclose(out.astype(FLOAT64), np.tile(weights / weights.sum(), (rows, 1)), rtol=rounding)
    np.testing.assert_allclose(lse, math.log(weights.sum()), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 20])
def test_guard_sink_is_merged_at_the_end(rows):
    """As a partial state with the sink as maximum, a sum of 1 and no output: once, whatever parts there were."""
    sink, keys = 3.0, normal(300, 8)
    out, lse = flash_numba.attention(normal(rows, 8), keys, keys, return_lse=True)
    with_sink, lse_with_sink = flash_numba.attention(normal(rows, 8), keys, keys, sinks=[sink], return_lse=True)
    np.testing.assert_allclose(lse_with_sink, np.logaddexp(lse, sink), rtol=1e-6)
    np.testing.assert_allclose(with_sink, out * np.exp(lse - lse_with_sink)[:, None], rtol=1e-5, atol=1e-7)
    m, l, a, b = recurrence.merge(-inf, 0.0, sink, 1.0)  # a row without a key
    assert (m, l, a, b) == (sink, 1, 0, 1)
    assert recurrence.lse(m, l) == pytest.approx(sink * recurrence.LN2)
    top, far = flash_numba.attention(normal(rows, 8), keys, keys, sinks=[1000.0], return_lse=True)
    assert (top == 0).all()  # its weight underflows: no overflow of the sink's
    np.testing.assert_allclose(far, 1000, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 20])
def test_guard_blocks_are_summed_from_zero(rows):
    """0.1 times 300 000: added one by one in float32, that is off by 2.7e-3; a block at a time, a hundredth of it."""
    keys = 300_000
    naive = np.cumsum(np.full(keys, 0.1, FLOAT32), dtype=FLOAT32)[-1] / keys
    assert abs(naive / np.float32(0.1) - 1) > 2e-3
    q, k, v = np.zeros((rows, 1), FLOAT32), np.zeros((keys, 1), FLOAT32), np.full((keys, 1), 0.1, FLOAT32)
    out, lse = flash_numba.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, v[:rows], rtol=4e-5)
    np.testing.assert_allclose(lse, math.log(keys), rtol=1e-6)
    partial, _ = flash_numba.attention(q, k, v, mask=np.arange(keys) % 7 != 0, return_lse=True)
    np.testing.assert_allclose(partial, v[:rows], rtol=4e-5)


@pytest.mark.parametrize("scale", [0.0, -1.0, -30.0])
def test_guard_maximum_is_taken_after_scaling(scale):
    """So a negative scale is no special case."""
    q, k, v = normal(3, 2, 60, 16)
    truth = bands.exact(q, k, v, scale=scale)
    out = flash_numba.attention(q, k, v, scale=scale)
    assert (np.abs(out - truth.out) <= bands.limit(FLOAT32, truth)).all()


@pytest.mark.parametrize("bad", [nan, -nan, inf, -inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_guard_nan_behind_a_mask_does_not_leak(which, dtype, bad):
    """0 * NaN is NaN, so V of a key that a row doesn't see is left out by selection. Rows that see it get NaN."""
    q, k, v = (normal(150, 8, dtype=dtype, seed=n) for n in range(3))
    clean = flash_numba.attention(q, k, v, causal=True)
    (k if which == "k" else v)[47] = bad
    out = flash_numba.attention(q, k, v, causal=True)
    assert out[:47].tobytes() == clean[:47].tobytes()
    expected = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(out.astype(FLOAT64)), np.isnan(expected))


def test_guard_nan_is_carried_by_the_sum():
    """`maximum` may drop a NaN score, but its weight is NaN, and so are l and the row. No other row is."""
    assert ops.maximum(nan, 1.0) == 1.0
    assert math.isnan(recurrence.weight(nan, 0.0))
    assert math.isnan(recurrence.finish(nan))
    for row in (0, 20, 63):
        q, k, v = normal(3, 64, 8)
        q[row, 3] = nan
        out, lse = flash_numba.attention(q, k, v, return_lse=True)
        assert (np.isnan(out).any(axis=1) == (np.arange(64) == row)).all()
        assert (np.isnan(lse) == (np.arange(64) == row)).all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_guard_16_bits_accumulate_in_float32(dtype):
    """A bfloat16 sum of ones ends at 256 and a float16 one at 2048; here 5000 keys of equal weight count as 5000."""
    keys = 5000
    v = np.where(np.arange(keys) % 2, 3.0, 1.0).astype(dtype)[:, None]
    out, lse = flash_numba.attention(np.zeros((2, 8), dtype), np.zeros((keys, 8), dtype), v, return_lse=True)
    assert (out == 2).all()
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, math.log(keys), rtol=1e-6)


def test_guard_16_bit_rounding():
    """The output is rounded to nearest even once, to infinity only where it should be, and NaN stays NaN."""
    x = np.concatenate([normal(1000), 2.0 ** np.arange(-30, 17, dtype=np.float32)]).astype(np.float32)
    x = np.concatenate([x, x * np.float32(1 + 2**-9), x * np.float32(1 + 2**-12), np.float32([65519, 65520, inf, nan])])
    for narrow, dtype in (
        (dtypes.float32_to_float16, np.float16),
        (dtypes.float32_to_bfloat16, ml_dtypes.bfloat16),
    ):
        with np.errstate(over="ignore"):
            expected = x.astype(dtype)
        got = narrow(x).astype(np.uint16).view(dtype)
        np.testing.assert_array_equal(got.astype(FLOAT32), expected.astype(FLOAT32))


def test_guard_table_names_the_tests():
    """docs/numerics.md has a row for each test of a guard, and no other."""
    table = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_guard_\w+)`", table)
    assert sorted(named) == sorted(name for name in globals() if name.startswith("test_guard_") and "table" not in name)
