"""The score rules one by one: faults that other libraries had, what isn't read, dropout, 8-bit K and V, biases.

The pairs of rules are in the conformance suite (`cases.RULE_CASES`); here are the properties that a comparison with the
oracle doesn't show, and right values by hand.
"""

import math
import os
import subprocess
import sys
import textwrap
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, FLOAT8, FLOAT16, FLOAT32, FLOAT64
from test_conformance import assert_within, expect_call, normal, same_bits

from flash_numba import attention, attention_grad, checked, reference
from flash_numba.cpu import launch
from flash_numba.cpu.backend import CPU
from flash_numba.cpu.plan import FEW_QUERIES
from flash_numba.problem import describe

INF, NAN = math.inf, math.nan
LINUX = sys.platform.startswith("linux")
few_or_many = pytest.mark.parametrize("rows", [3, 70])  # queries: each is a kernel of its own
assert 3 <= FEW_QUERIES < 20


def qkv(rows, keys, *, batch=2, heads=4, kv_heads=2, dim=16, dtype=FLOAT32):
    shapes = [(batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)]
    return [normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def assert_right(got, q, k, v, **options):
    """(out, lse) against the oracle."""
    want = expect_call(q.dtype, q, k, v, **options)
    assert_within("out", got[0], want.out, want.out_limit)
    assert_within("lse", got[1], want.lse, want.lse_limit)


def mean_of_seen(seen, v, **options):
    """What scores of 0 give: the mean of V over the keys that each row sees, 0 for none."""
    rows, keys = seen.shape
    out, lse = attention(np.zeros((rows, 4)), np.zeros((keys, 4)), v, return_lse=True, **options)
    count = seen.sum(axis=1)
    np.testing.assert_allclose(out, seen @ v / np.maximum(count, 1)[:, None], rtol=1e-13, atol=1e-13)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(count), rtol=1e-13)


# ---- which keys a row sees, counted here


@pytest.mark.parametrize(("rows", "keys"), [(4, 4), (3, 7), (7, 3), (1, 300), (300, 1), (200, 330), (330, 200)])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (130, None), (-1, 1), (1, 200), (1000, 1000)])
def test_seen_keys_are_those_of_the_definition(rows, keys, causal, window):
    """j <= p; p - left <= j <= p + right, p = i + S_kv - S_q or i. Off by one is the usual fault where S_q != S_kv."""
    p = np.arange(rows)[:, None] + (0 if causal == "top-left" else keys - rows)
    j = np.arange(keys)
    seen = np.ones((rows, keys), bool)
    if causal:
        seen &= j <= p
    if window is not None:
        left, right = (10**6 if side in (None, -1) else side for side in window)
        seen &= (p - left <= j) & (j <= p + right)
    mean_of_seen(seen, normal(keys, 3, dtype=FLOAT64), causal=causal, window=window)


@pytest.mark.parametrize("rows", [7, 210])
@pytest.mark.parametrize("offset", [-400, -3, 0, 5, 140, 500])
@pytest.mark.parametrize("window", [None, (10, 2)])
def test_seen_keys_at_an_offset(rows, offset, window):
    keys = 300
    p, j = np.arange(rows)[:, None] + offset, np.arange(keys)
    seen = j <= p
    if window is not None:
        seen &= p - window[0] <= j
    mean_of_seen(seen, normal(keys, 3, dtype=FLOAT64), causal=True, window=window, q_offset=offset)


@few_or_many
def test_an_offset_as_large_as_allowed(rows):
    q, k, v = qkv(rows, 150)
    for offset in (2**40, 10**9):
        assert same_bits(attention(q, k, v, causal=True, q_offset=offset), attention(q, k, v))
        out, lse = attention(q, k, v, causal=True, q_offset=-offset, return_lse=True)
        assert (out == 0).all()
        assert (lse == -INF).all()
        assert (attention(q, k, v, window=(10, None), q_offset=offset) == 0).all()


def test_right_padded_causal_self_attention():
    """A padded batch gives each sequence what it gives alone, to the bit, and zeros in the padding."""
    lengths = [20, 70, 0, 300]
    q, k, v = qkv(300, 300, batch=4)
    padded, padded_lse = attention(q, k, v, causal=True, q_lengths=lengths, kv_lengths=lengths, return_lse=True)
    for b, n in enumerate(lengths):
        alone = attention(q[b, :, :n], k[b, :, :n], v[b, :, :n], causal=True, return_lse=True)
        assert same_bits(padded[b, :, :n], alone[0])
        assert same_bits(padded_lse[b, :, :n], alone[1])
        assert (padded[b, :, n:] == 0).all()
        assert (padded_lse[b, :, n:] == -INF).all()


@few_or_many
def test_padding_holds_anything(rows):
    q, k, v = qkv(rows, 50)
    lengths = {"q_lengths": [2, rows], "kv_lengths": [50, 31]}
    want = attention(q, k, v, causal=True, return_lse=True, **lengths)
    for b in range(2):
        q[b, :, lengths["q_lengths"][b] :] = NAN
        k[b, :, lengths["kv_lengths"][b] :] = NAN
        v[b, :, lengths["kv_lengths"][b] :] = INF
    got = attention(q, k, v, causal=True, return_lse=True, **lengths)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@few_or_many
def test_softcap_comes_before_the_mask(rows):
    """Capped afterwards, a hidden key would have -softcap instead of -inf, and weight."""
    q, k = np.zeros((rows, 4), FLOAT32), np.zeros((300, 4), FLOAT32)
    v = np.ones((300, 1), FLOAT32)
    v[200:] = 1e6
    hidden = np.arange(300) < 200
    for rule in ({"mask": hidden}, {"bias": np.where(hidden, 0, -INF)}, {"kv_lengths": 200}):
        np.testing.assert_allclose(attention(q, k, v, softcap=0.5, **rule), 1, rtol=1e-6)
    out = attention(q, k, v, softcap=0.5, causal=True, q_offset=200 - rows)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@few_or_many
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_softcap_comes_after_the_scale_and_before_bias_and_alibi(rows, dtype):
    """A score of 32 is capped to 2; a bias of 10 and a step of ALiBi aren't."""
    q, k = np.full((rows, 1), 4, dtype), np.array([[8], [0]], dtype)
    bias = np.array([10.0, 0.0])
    lse = attention(q, k, k, scale=1.0, softcap=2.0, bias=bias, alibi_slopes=[1.5], return_lse=True)[1]
    capped = 2 * math.tanh(32 / 2)
    assert lse[-1] == pytest.approx(math.log(math.exp(capped + 10 - 1.5) + 1), rel=1e-6)


@pytest.mark.parametrize(("rows", "keys"), [(3, 7), (7, 3), (150, 300)])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_alibi_is_0_at_the_rows_own_position(rows, keys, causal):
    """So a steep slope leaves the key there alone; a fault of one would choose its neighbour."""
    v = np.arange(keys, dtype=FLOAT64)[:, None]
    out = attention(np.zeros((rows, 4)), np.zeros((keys, 4)), v, causal=causal, alibi_slopes=[1000.0])
    p = np.arange(rows) + (0 if causal == "top-left" else keys - rows)
    seen_at_all = (p >= 0) | (not causal)
    np.testing.assert_array_equal(out[:, 0], np.where(seen_at_all, np.clip(p, 0, keys - 1), 0))


@pytest.mark.parametrize("rows", [10, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_first_blocks_hidden_from_some_rows(dtype, rows):
    """A row's state is still (-inf, 0, 0) when its first key comes, in a block of its own or of others."""
    q, k, v = qkv(rows, 400, dtype=dtype)
    first = 390 - np.arange(rows)[::-1, None] * 400 // rows
    seen = np.arange(400) >= first
    for rule in ({"mask": seen}, {"bias": np.where(seen, 0.0, -INF)}):
        got = attention(q, k, v, return_lse=True, **rule)
        assert_right(got, q, k, v, **rule)
    # The last row sees ten keys; nothing of the three blocks before may show.
    alone = attention(q[:, :, -1:], k[:, :, 390:], v[:, :, 390:])
    np.testing.assert_allclose(got[0][:, :, -1:].astype(float), alone.astype(float), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("rule", ["mask", "bias", "kv_lengths", "window", "causal", "all at once"])
@few_or_many
def test_rows_without_a_key_are_0_and_minus_infinity(rule, rows):
    q, k, v = qkv(rows, 60)
    hide = {
        "mask": {"mask": np.zeros((rows, 60), bool)},
        "bias": {"bias": np.full((60,), -INF)},
        "kv_lengths": {"kv_lengths": [0, 0]},
        "window": {"window": (1, 1), "q_offset": 200},
        "causal": {"causal": True, "q_offset": -100},
    }
    rules = hide.get(rule) or {name: value for one in hide.values() for name, value in one.items()}
    for more in ({}, {"softcap": 2.0}, {"dropout": 0.5, "seed": 1}, {"alibi_slopes": np.ones(4)}):
        out, lse = attention(q, k, v, return_lse=True, **rules, **more)
        assert same_bits(out, np.zeros_like(out))
        assert same_bits(lse, np.full_like(lse, -INF))
        sinks = np.array([0.0, 1.0, -2.5, 80.0])
        out, lse = attention(q, k, v, return_lse=True, sinks=sinks, **rules, **more)
        assert same_bits(out, np.zeros_like(out))
        np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape), rtol=1e-6)


# ---- biases and masks in any format


BIAS_FORMATS = [*DTYPES, *map(np.dtype, (">f8", ">f4", ">f2", bool))]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, FLOAT16], ids=str)
@pytest.mark.parametrize("format", BIAS_FORMATS, ids=str)
@few_or_many
def test_bias_of_any_format(dtype, format, rows):
    """As the same numbers in the kernel's own format, to the bit."""
    q, k, v = qkv(rows, 150, dtype=dtype)
    bias = normal(2, 4, rows, 150).astype(format)
    if format.kind != "b":
        bias[normal(2, 4, rows, 150, seed=1) > 0.5] = -INF
        bias[0, 0, 1] = np.array(ml_dtypes.finfo(bias.dtype.newbyteorder("=")).min, format)
    with np.errstate(over="ignore"):
        wide = bias if format.kind == "b" else bias.astype(FLOAT64 if dtype == FLOAT64 else FLOAT32)
    if format.newbyteorder("=") == FLOAT64 and dtype != FLOAT64:
        wide[0, 0, 1] = np.finfo(np.float32).min  # what lies beyond is as low as it gets, and no mask
    want = attention(q, k, v, bias=wide, return_lse=True)
    for name in ("bias", "mask"):
        got = attention(q, k, v, return_lse=True, **{name: bias})
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])
    assert np.isfinite(want[1][0, 0, 1])
    # strided, as a slice of something larger and transposed
    larger = np.zeros((2, 4, 150, 141), format)[..., ::2].swapaxes(-1, -2)[:, :, :rows]
    larger[...] = bias
    got = attention(q, k, v, bias=larger[:, ::-1], return_lse=True)
    again = attention(q, k, v, bias=np.ascontiguousarray(larger[:, ::-1]), return_lse=True)
    assert same_bits(got[0], again[0])
    unaligned = np.frombuffer(bytearray(bias.nbytes + 1), np.uint8)[1:].view(format).reshape(bias.shape)
    unaligned[...] = bias
    assert same_bits(attention(q, k, v, bias=unaligned), want[0])


@pytest.mark.parametrize("rows", [6, 20])
@pytest.mark.parametrize("low", [-1e30, -1e39, -1e300, float(np.finfo(np.float64).min)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float64_bias_beyond_the_kernels_range_is_a_number(dtype, low, rows):
    """A row of it is the mean of V; one key of it has no weight; only -inf is a mask."""
    q, k, v = qkv(rows, 300, dtype=dtype)
    bias = np.zeros((rows, 300))
    bias[2] = low
    bias[3, ::2] = low
    bias[4] = -INF
    bias[5, :299] = -INF
    bias[5, 299] = low
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    mean = np.repeat(v.astype(FLOAT64).mean(axis=2, keepdims=True), 2, axis=1)
    unit = float(ml_dtypes.finfo(dtype).eps)
    if abs(low) > 1e38 or dtype == FLOAT64:
        # a score is nothing next to it
        np.testing.assert_allclose(out[:, :, 2:3].astype(FLOAT64), mean, atol=1e-6 + unit)
    odd = attention(q, k[:, :, 1::2], v[:, :, 1::2])[:, :, 3]
    np.testing.assert_allclose(out[:, :, 3].astype(FLOAT64), odd.astype(FLOAT64), atol=1e-6 + 2 * unit)
    assert (out[:, :, 4] == 0).all()
    assert (lse[:, :, 4] == -INF).all()
    assert same_bits(out[:, :, 5], np.repeat(v[:, :, 299], 2, axis=1))
    assert np.isfinite(lse[:, :, [2, 3, 5]]).all()


@few_or_many
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_the_highest_finite_bias_takes_all_the_weight(dtype, rows):
    """As in the plain formula: it is a number too."""
    q, k, v = qkv(rows, 40, dtype=dtype)
    bias = np.zeros(40, dtype)
    bias[17] = np.finfo(dtype).max
    out = attention(q, k, v, bias=bias)
    np.testing.assert_allclose(out, np.broadcast_to(np.repeat(v[:, :, 17:18], 2, axis=1), out.shape), rtol=1e-6)


@few_or_many
def test_bias_and_mask_together(rows):
    q, k, v = qkv(rows, 150)
    bias, mask, other = normal(rows, 150), normal(rows, 150, seed=1) > 0, normal(rows, 150, seed=2)
    got = attention(q, k, v, bias=bias, mask=mask, return_lse=True)
    assert_right(got, q, k, v, bias=bias, mask=mask)
    merged = attention(q, k, v, bias=np.where(mask, bias, -INF).astype(FLOAT32), return_lse=True)
    assert same_bits(got[0], merged[0])
    assert same_bits(got[1], merged[1])
    # two of a kind, and in each other's place
    assert same_bits(attention(q, k, v, bias=mask, mask=other > 0), attention(q, k, v, mask=mask & (other > 0)))
    assert same_bits(attention(q, k, v, bias=mask, mask=bias), got[0])
    for second in (other, np.where(other < -1, -INF, other)):
        two = attention(q, k, v, bias=bias, mask=second, return_lse=True)
        assert_right(two, q, k, v, bias=bias, mask=second)


@few_or_many
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_and_infinity_of_a_bias(rows, bad):
    """Seen, it makes its row NaN (inf - inf), and no other; under a mask, none."""
    q, k, v = qkv(rows, 150)
    clean = attention(q, k, v)
    bias = np.zeros((rows, 150))
    bias[1, 148] = bad
    out = attention(q, k, v, bias=bias)
    assert np.isnan(out[:, :, 1]).all()
    others = np.arange(rows) != 1
    np.testing.assert_allclose(out[:, :, others], clean[:, :, others], rtol=1e-5, atol=1e-6)
    mask = np.ones((rows, 150), bool)
    mask[1, 148] = False
    hidden = attention(q, k, v, bias=bias, mask=mask)
    assert same_bits(hidden, attention(q, k, v, bias=np.nan_to_num(bias, posinf=0), mask=mask))
    assert not np.isnan(attention(q, k, v, bias=bias, kv_lengths=148)).any()
    assert not np.isnan(attention(q, k, v, bias=bias, causal="top-left")).any()


@pytest.mark.parametrize("kind", ["mask", "bias", "bias >f2", "both"])
def test_stride_0_is_never_written_out(kind, monkeypatch):
    """(4, 8, 1024, 1024) of them would be 32 MiB even as bytes."""
    monkeypatch.setattr(launch, "SERIAL_FLOPS", INF)  # one scratch
    q, k, v = (np.broadcast_to(normal(1, 1, 1024, 8), (4, 8, 1024, 8)) for _ in range(3))
    mask, bias = np.ones((4, 1, 1, 1024), bool), np.zeros((1, 1, 1024, 1), FLOAT32)
    terms = {
        "mask": {"mask": mask}, "bias": {"bias": bias}, "bias >f2": {"bias": bias.astype(">f2")},
        "both": {"mask": mask[0, 0, 0], "bias": bias},
    }[kind]  # fmt: skip
    attention(q[:1, :1], k[:1, :1], v[:1, :1])
    tracemalloc.start()
    try:
        attention(q, k, v, **terms)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < q.size * 4 + 2_000_000  # the output and a thread's scratch


# ---- numbers that are finite, but not in the kernel's own format


@few_or_many
@pytest.mark.parametrize("softcap", [1e39, 1.7e308])
def test_a_cap_beyond_the_range_caps_nothing(rows, softcap):
    q, k, v = qkv(rows, 150)
    np.testing.assert_allclose(attention(q, k, v, softcap=softcap), attention(q, k, v), rtol=1e-5, atol=1e-6)


@few_or_many
@pytest.mark.parametrize("softcap", [1e-40, 1e-46, 1e-320])
def test_a_cap_below_the_range_makes_all_keys_alike(rows, softcap):
    q, k, v = qkv(rows, 150)
    q[:, :, 1] = 0
    mean = np.repeat(v.mean(axis=2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(attention(q, k, v, softcap=softcap), np.broadcast_to(mean, q.shape), atol=1e-6)


@few_or_many
def test_a_slope_beyond_the_range_leaves_the_rows_own_key(rows):
    q, k, v = qkv(rows, 150)
    out = attention(q, k, v, alibi_slopes=np.full(4, 1e39))
    np.testing.assert_allclose(out, np.repeat(v[:, :, -rows:], 2, axis=1), rtol=1e-6)


@few_or_many
def test_a_sink_beyond_the_range_takes_all_the_weight(rows):
    q, k, v = qkv(rows, 150)
    plain, plain_lse = attention(q, k, v, return_lse=True)
    out, lse = attention(q, k, v, sinks=[1e39, -1e39, 1e300, -1e300], return_lse=True)
    assert (out[:, ::2] == 0).all()
    assert (lse[:, ::2] > 1e38).all()
    assert same_bits(np.ascontiguousarray(out[:, 1::2]), np.ascontiguousarray(plain[:, 1::2]))
    assert same_bits(np.ascontiguousarray(lse[:, 1::2]), np.ascontiguousarray(plain_lse[:, 1::2]))


@few_or_many
@pytest.mark.parametrize("options", [{"scale": 1e30, "k_scale": 1e30}, {"k_scale": 1e39}, {"scale": 1e39}], ids=str)
def test_a_scale_beyond_the_range_leaves_a_query_of_zeros_alone(rows, options):
    q, k, v = qkv(rows, 150)
    q[...] = 0
    mean = np.repeat(v.mean(axis=2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(attention(q, k, v, **options), np.broadcast_to(mean, q.shape), atol=1e-6)


# ---- dropout


def kept_by_kernel(q_shape, keys, **options):
    """Which keys dropout keeps, seen by giving each its own column of V; scores are 0."""
    *batch, heads, rows, _ = q_shape
    dtype = options.pop("dtype", FLOAT32)
    q = np.zeros((*batch, heads, rows, 1), dtype)
    k = np.zeros((*batch, 1, keys, 1), dtype)
    v = np.broadcast_to(np.eye(keys, dtype=dtype), (*batch, 1, keys, keys))
    return attention(q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@few_or_many
def test_dropout_drops_the_oracles_keys(dtype, p, rows):
    for seed in (0, 1, 2**32, 2**63 + 12345, 2**64 - 1):
        out = kept_by_kernel((2, 3, rows, 1), 150, dropout=p, seed=seed, dtype=dtype)
        zeros = np.zeros((2, 3, rows, 1)), np.zeros((2, 1, 150, 1))
        want = reference.attention(*zeros, np.eye(150), dropout=p, seed=seed)
        np.testing.assert_array_equal(out > 0, want > 0)
        np.testing.assert_allclose(out.astype(FLOAT64), want, rtol=1e-6 + float(ml_dtypes.finfo(dtype).eps))


@few_or_many
@pytest.mark.parametrize("offset", [0, 3, 2**31 - 2, 2**32 - 1, -7])
def test_dropout_counts_rows_from_the_offset(offset, rows):
    q, k, v = np.zeros((1, 1, rows, 1)), np.zeros((1, 1, 50, 1)), np.eye(50)
    out = attention(q, k, v, dropout=0.5, seed=9, q_offset=offset)
    np.testing.assert_array_equal(out > 0, reference.attention(q, k, v, dropout=0.5, seed=9, q_offset=offset) > 0)


def test_dropout_keeps_its_share():
    """In all, and along every row, key, head and batch element: within 5 standard deviations."""
    p = 0.3
    kept = kept_by_kernel((3, 4, 200, 1), 256, dropout=p, seed=7) > 0
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        share = kept.mean(axis=axes)
        count = np.prod([kept.shape[axis] for axis in axes])
        assert np.abs(share - (1 - p)).max() < 5 * math.sqrt(p * (1 - p) / count)
    # neighbours in any direction have nothing to do with each other
    for axis in range(4):
        a, b = (np.delete(kept, at, axis).astype(float).ravel() - (1 - p) for at in (0, -1))
        assert abs((a * b).mean()) < 5 * p * (1 - p) / math.sqrt(a.size)
    other = kept_by_kernel((3, 4, 200, 1), 256, dropout=p, seed=8) > 0
    agree = (kept == other).mean()
    assert abs(agree - (p * p + (1 - p) ** 2)) < 0.01


def test_dropout_leaves_the_mean_as_it_was():
    """Over many masks, one for each batch element: kept weights count 1 / (1 - p)."""
    q, k, v = (np.broadcast_to(normal(1, 1, n, 4, seed=n), (3000, 1, n, 4)) for n in (3, 12, 13))
    k = k[:, :, :12]
    v = v[:, :, :12]
    out = attention(q, k, v, dropout=0.4, seed=3)
    want = attention(q[:1], k[:1], v[:1])
    error = out.std(axis=0) / math.sqrt(3000)
    assert (np.abs(out.mean(axis=0) - want[0]) < 5 * error).all()


@few_or_many
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_dropout_to_the_bit(dtype, rows):
    q, k, v = qkv(rows, 150, dtype=dtype)
    plain, plain_lse = attention(q, k, v, causal=True, return_lse=True)
    for options in ({"dropout": 0.0}, {"dropout": 0, "seed": 3}, {"dropout": 0.5, "training": False}):
        got, lse = attention(q, k, v, causal=True, return_lse=True, **options)
        assert same_bits(got, plain)
        assert same_bits(lse, plain_lse)
    dropped, lse = attention(q, k, v, causal=True, return_lse=True, dropout=0.5, seed=1)
    assert same_bits(lse, plain_lse)  # the denominator has every key
    assert not same_bits(dropped, plain)


def test_seeds():
    q, k, v = qkv(20, 40)

    def call(seed):
        return attention(q, k, v, dropout=0.5, seed=seed)

    assert same_bits(call(5), call(np.uint64(5)))
    assert same_bits(call(5), call(np.int32(5)))
    assert not same_bits(call(5), call(5 + 2**32))
    assert same_bits(call(np.random.default_rng(1)), call(np.random.default_rng(1)))
    rng = np.random.default_rng(1)
    assert not same_bits(call(rng), call(rng))  # drawn from anew
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    for options in ({"dropout": 0.0}, {"dropout": 0.5, "training": False}):
        attention(q, k, v, seed=rng, **options)
    assert rng.bit_generator.state == twin.bit_generator.state  # and only where something is dropped
    by_oracle = attention(q, k, v, dropout=0.5, seed=twin, backend="reference")
    np.testing.assert_allclose(call(rng), by_oracle, rtol=1e-4, atol=1e-5)


def test_dropout_of_a_nan_and_of_a_row():
    """A dropped key isn't hidden: its weight is 0 and its V is multiplied, as in the plain formula."""
    v = np.full((8, 8), 1.0)
    kept = kept_by_kernel((1, 1, 8, 1), 8, dropout=0.9, seed=2)[0, 0] > 0
    assert (~kept).all(axis=1).any()  # a row of which nothing is left
    out = attention(np.zeros((8, 1)), np.zeros((8, 1)), v, dropout=0.9, seed=2)
    np.testing.assert_allclose(out, np.broadcast_to(kept.sum(axis=1, keepdims=True) * 10 / 8, (8, 8)))


@few_or_many
@pytest.mark.parametrize("causal", [False, True])
def test_a_dropped_nan_is_a_nan(rows, causal):
    """0 * NaN and 0 * inf are: only rows that don't see the key at all are spared."""
    v = np.ones((80, 4))
    v[78, 0], v[78, 1], v[78, 2] = NAN, INF, -INF
    options = {"dropout": 0.5, "seed": 0, "causal": causal}
    kept = kept_by_kernel((1, 1, rows, 1), 80, **options)[0, 0, :, 78] > 0
    out = attention(np.zeros((rows, 1)), np.zeros((80, 1)), v, **options)
    seen = np.arange(rows) >= (rows - 2 if causal else 0)
    assert kept[seen].any()
    assert not kept[seen].all()
    for column, bad in enumerate([NAN, INF, -INF]):
        np.testing.assert_array_equal(out[seen, column], np.where(kept[seen], bad, NAN))
    assert np.isfinite(out[~seen]).all()
    assert np.isfinite(out[:, 3]).all()


@pytest.mark.parametrize(
    ("p", "threshold"), [(0.1, 429496729), (0.5, 2**31), (0.9, 3865470566), (1 - 2**-53, 2**32 - 1)]
)
def test_the_threshold_of_dropout_is_rounded_down(p, threshold):
    """It is a random word that is kept: 0.1 * 2**32 is 429496729.6."""
    call = checked.checked_call(*qkv(20, 30), CPU(), dropout=p, seed=1)[0]
    assert int(describe(call)[0]["drop_below"]) == threshold


# ---- 8-bit keys and values


def every_number(dtype):
    return np.arange(256, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", FLOAT8, ids=str)
def test_every_8_bit_value(dtype, kv_dtype):
    """A single key's value is the output; in the other order of columns, the strided way in."""
    numbers = every_number(kv_dtype)
    one, many = (np.ones((n, 1), dtype) for n in (1, 20))
    for v in (numbers, numbers[::-1], np.repeat(numbers, 3)[::3]):
        for q in (one, many):
            out = attention(q, one.astype(kv_dtype), v[None])[-1]
            np.testing.assert_array_equal(out.astype(FLOAT64), v.astype(FLOAT64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_every_8_bit_key(dtype, kv_dtype, rows):
    """With one key of one number, the log-sum-exp is that number."""
    numbers = every_number(kv_dtype)
    q, k = np.ones((256, 1, rows, 1), dtype), numbers.reshape(256, 1, 1, 1)
    out, lse = attention(q, k, np.ones_like(k), scale=1.0, return_lse=True)
    exact = numbers.astype(FLOAT64)
    want = np.where(exact == INF, NAN, exact)  # inf - inf, as the plain formula has it
    np.testing.assert_allclose(lse[:, 0, -1], want, rtol=1e-15 if dtype == FLOAT64 else 3e-7)
    weight = np.where(np.isnan(want), NAN, exact != -INF)
    np.testing.assert_array_equal(out[:, 0, -1, 0].astype(FLOAT64), weight)


@pytest.mark.parametrize("kv_dtype", FLOAT8, ids=str)
@few_or_many
def test_8_bit_scales_are_factors_of_keys_and_values(kv_dtype, rows):
    q, k, v = qkv(rows, 150)
    k, v = k.astype(kv_dtype), v.astype(kv_dtype)
    rng = np.random.default_rng(0)
    for shape in ((), (2,), (2, 2)):
        k_scale, v_scale = rng.uniform(0.1, 3, shape), rng.uniform(0.1, 3, shape)
        got = attention(q, k, v, k_scale=k_scale, v_scale=v_scale, causal=True, return_lse=True)
        assert_right(got, q, k, v, k_scale=k_scale, v_scale=v_scale, causal=True)
        wide_k, wide_v = (
            (x.astype(FLOAT64) * factor[..., None, None]).astype(FLOAT32) for x, factor in ((k, k_scale), (v, v_scale))
        )
        plain = attention(q, wide_k, wide_v, causal=True)
        np.testing.assert_allclose(got[0], plain, rtol=2e-5, atol=2e-6)
    assert same_bits(attention(q, k, v, k_scale=2.0), attention(q, k, v, k_scale=[2.0, 2.0]))
    assert same_bits(attention(q, k, v, k_scale=2.0), attention(q, k, v, scale=2 / math.sqrt(16)))


@few_or_many
@pytest.mark.parametrize("shared", ["k", "v"])
def test_scales_belong_to_the_heads_of_their_own(shared, rows):
    """Where K has one head for all and V has not, or the other way round."""
    q, k, v = qkv(rows, 70, kv_heads=4)
    scales = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    k, v = (k[:, :1], v) if shared == "k" else (k, v[:, :1])
    options = {"v_scale" if shared == "k" else "k_scale": scales, "k_scale" if shared == "k" else "v_scale": [0.3]}
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert_right((out, lse), q, k, v, **options)
    got = attention_grad(out, q, k, v, out, lse, **options)
    want = reference.attention_grad(out, q, k, v, out, lse, **options)
    for dx, right in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(dx, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())


def test_keys_and_values_may_differ_in_their_8_bits():
    q, k, v = qkv(30, 40)
    for k_dtype, v_dtype in ((FLOAT8[0], FLOAT8[1]), (FLOAT32, FLOAT8[0]), (FLOAT8[1], FLOAT32)):
        narrow = k.astype(k_dtype), v.astype(v_dtype)
        assert same_bits(attention(q, *narrow), attention(q, *(x.astype(FLOAT32) for x in narrow)))


# ---- what isn't seen isn't read


UNREADABLE = """
    import ctypes, mmap, os, sys, warnings
    import ml_dtypes, numpy as np
    from flash_numba import attention
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking, should some library have started a thread
    libc = ctypes.CDLL(None, use_errno=True)
    PAGE = mmap.PAGESIZE

    def guarded(array, *rows):
        '''A copy whose rows (start, stop) along axis -2 can't be read, as far as they are whole pages.'''
        memory = mmap.mmap(-1, -(-array.nbytes // PAGE) * PAGE)
        copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        copy[...] = array
        base, row = copy.__array_interface__["data"][0], array.strides[-2]
        for head in range(array.size // (array.shape[-1] * array.shape[-2])):
            for start, stop in rows:
                first = -(-(base + head * array.strides[-3] + start * row) // PAGE) * PAGE
                size = (base + head * array.strides[-3] + stop * row) // PAGE * PAGE - first
                assert size > 0, "nothing to protect"
                if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(size), 0):
                    raise OSError(ctypes.get_errno())
        return copy

    def run(name, rows, keys, *, hidden, dtype=np.float32, kv_dtype=None, hidden_rows=(), **options):
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, rows, 64)).astype(dtype)
        k, v = (rng.standard_normal((2, keys, 64)).astype(kv_dtype or dtype) for _ in range(2))
        want = attention(q, k, v, **options)
        pid = os.fork()
        if pid == 0:
            q, k, v = guarded(q, *hidden_rows), guarded(k, *hidden), guarded(v, *hidden)
            os._exit(0 if attention(q, k, v, **options).tobytes() == want.tobytes() else 1)
        print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sep=": ")

    def between(start, stop, keys=1024):
        return (np.arange(keys) >= start) & (np.arange(keys) < stop)

    last = [(512, 1024)]
    run("control", 64, 1024, hidden=last)
    for name, dtype, kv_dtype in (
        ("float32", np.float32, None), ("float64", np.float64, None), ("float16", np.float16, None),
        ("float8", np.float32, ml_dtypes.float8_e5m2),
    ):
        types = {"dtype": dtype, "kv_dtype": kv_dtype}
        # rows that end where a page does, so that the last key seen is next to the first unreadable one
        run(f"causal, {name}", 512, 1024, hidden=last, causal="top-left", **types)
        run(f"offset, {name}", 64, 1024, hidden=last, causal=True, q_offset=448, **types)
        run(f"kv_lengths, {name}", 64, 1024, hidden=last, kv_lengths=512, **types)
        run(f"window, {name}", 64, 1024, hidden=[(0, 512), (704, 1024)], window=(32, 64), q_offset=576, **types)
        # from the first readable key on, and up to the last one
        run(f"window's ends, {name}", 64, 1024, hidden=[(0, 512), (704, 1024)], window=(32, 96), q_offset=544, **types)
        keep = ~between(256, 640)
        run(f"mask, {name}", 64, 1024, hidden=[(256, 640)], mask=keep, **types)
        run(f"mask of rows, {name}", 300, 1024, hidden=[(256, 640)], mask=np.tile(keep, (300, 1)), **types)
        bias = np.where(keep, 0, -np.inf)
        run(f"bias, {name}", 64, 1024, hidden=[(256, 640)], bias=bias.astype(np.float32), **types)
        run(f"bias of rows, {name}", 300, 1024, hidden=[(256, 640)], bias=np.tile(bias, (300, 1)), **types)
        run(f"q_lengths, {name}", 640, 1024, hidden=[], hidden_rows=[(128, 640)], q_lengths=128, **types)
        # not a whole number of row tiles
        run(f"q_lengths 144, {name}", 640, 1024, hidden=[], hidden_rows=[(144, 640)], q_lengths=144, **types)
        run(f"nothing, {name}", 64, 1024, hidden=[(0, 1024)], kv_lengths=0, **types)
        # few queries: a kernel of its own
        run(f"causal, few, {name}", 8, 1024, hidden=last, causal=True, q_offset=504, **types)
        run(f"kv_lengths, few, {name}", 1, 4096, hidden=[(1536, 4096)], kv_lengths=1536, **types)
        run(f"window, few, {name}", 8, 4096, hidden=[(0, 2048), (2304, 4096)], window=(32, 64), q_offset=2176, **types)
        ends = [(0, 2048), (2176, 4096)]
        run(f"window's ends, few, {name}", 8, 4096, hidden=ends, window=(32, 88), q_offset=2080, **types)
        keep = ~between(2048, 3072, 4096)
        run(f"mask, few, {name}", 8, 4096, hidden=[(2048, 3072)], mask=keep, **types)
        run(f"bias, few, {name}", 8, 4096, hidden=[(2048, 3072)], bias=np.where(keep, 0, -np.inf), **types)
    # window and mask together; a key hidden by one or the other
    run("both", 64, 1024, hidden=[(0, 768), (896, 1024)], mask=between(768, 896), kv_lengths=960)
"""


def in_new_process(code, *arguments, **environment):
    got = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert got.returncode == 0, got.stderr
    return got.stdout


@pytest.mark.skipif(not LINUX, reason="protects pages by mprotect")
def test_hidden_keys_are_not_read():
    """Their pages can't be: reading one ends the process, as the first line shows, which reads them all."""
    out = in_new_process(UNREADABLE, NUMBA_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    lines = dict(line.rsplit(": ", 1) for line in out.splitlines())
    assert lines.pop("control") == "-11"
    assert len(lines) == 73
    failed = {name: code for name, code in lines.items() if code != "0"}
    assert not failed, failed


# ---- offsets beyond 32 bits


FAR_APART = """
    import sys
    import numpy as np
    from flash_numba import attention, attention_varlen
    memory = np.memmap(sys.argv[1] + "/sparse", np.uint8, "w+", shape=(3 * 2**33,))
    free = [0]

    def place(array, strides):
        '''The array in the file, its axes that many bytes apart. Only the pages written take space.'''
        start, free[0] = free[0], free[0] + 2**16
        size = sum((n - 1) * stride for n, stride in zip(array.shape, strides)) + array.itemsize
        assert start + size <= memory.size
        view = np.ndarray(array.shape, array.dtype, memory, start, strides)
        view[...] = array
        return view

    def check(name, got, want):
        assert got.tobytes() == want.tobytes(), name
        print(name)

    rng = np.random.default_rng(0)
    far = 2**32 + 2**20
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    inner, row, column = 2**12, 2**7, 4

    def everything_apart(rows):
        arrays = {"q": normal(2, 2, rows, 4), "k": normal(2, 2, 5, 4), "v": normal(2, 2, 5, 4)}
        terms = {"mask": normal(rows, 5) > 0, "bias": normal(rows, 5)}
        want = attention(**arrays, **terms)
        next_row = -(-far // (rows - 1))  # of as many rows, so that the last is far
        for axis, strides in {
            "batch": (far, inner, row, column), "head": (inner, far, row, column), "row": (row * 4, row, far, column),
            "column": (inner * 2, inner, row, far),
        }.items():
            few = [next_row if stride == far and axis == "row" else stride for stride in strides]
            out = place(np.zeros_like(want), few)
            attention(**arrays, **terms, out=out)
            check(f"out, {axis}", np.ascontiguousarray(out), want)
            for name, array in arrays.items():
                elsewhere = {name: place(array, few if name == "q" else strides)}
                check(f"{name}, {axis}", attention(**arrays | elsewhere, **terms), want)
        for name, term in terms.items():
            size = term.itemsize
            full = np.ascontiguousarray(np.broadcast_to(term, (2, 2, rows, 5)))
            for axis, strides in {
                "batch": (far, inner, row, size), "head": (inner, far, row, size), "row": (0, 0, next_row, size),
                "column": (inner * 2, inner, row, far // 4),
            }.items():
                elsewhere = {name: place(term, strides[2:]) if axis == "row" else place(full, strides)}
                check(f"{name}, {axis}", attention(**arrays, **terms | elsewhere), want)

    everything_apart(3)
    everything_apart(20)
    # 2**24 keys of 256 bytes each, of which the last are seen
    keys = 2**24 + 2**16
    k, v = (np.ndarray((keys, 64), np.float32, memory, start) for start in (2**33, 2**34))
    k[-60:], v[-60:] = normal(60, 64), normal(60, 64)
    for rows in (3, 20):
        q = normal(rows, 64)
        got = attention(q, k, v, causal=True, window=(37, 0))
        want = attention(q, k[-60:].copy(), v[-60:].copy(), causal=True, window=(37, 0))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        print("keys")
    packed = [x[:, None] for x in (q, k, v)]
    got = attention_varlen(*packed, np.int64([0, 0, 20]), np.int64([0, keys - 60, keys]), causal=True)[:, 0]
    check("packed", got, attention(q, k[-60:].copy(), v[-60:].copy(), causal=True))
"""


@pytest.mark.skipif(not LINUX, reason="needs a sparse file")
def test_offsets_beyond_32_bits(tmp_path):
    lines = in_new_process(FAR_APART, tmp_path, NUMBA_NUM_THREADS="1").splitlines()
    assert len(lines) == 2 * (16 + 8) + 3
    assert lines[-1] == "packed"


@few_or_many
@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("kinds", ["mask mask", "bias bias", "bias mask", "mask bias"])
def test_any_two_terms(rows, nonfinite, kinds):
    """Two masks or two biases too: tiles that are kept whole, and what hides a key where V isn't finite."""
    q, k, v = qkv(rows, 300)
    half = np.random.default_rng(1).random((rows, 300)) < 0.5
    wide = np.ones((rows, 300), bool)
    wide[:, :3] = False
    if nonfinite:
        v[:, :, 1], v[:, :, 9, 3] = NAN, INF
    terms = {}
    for name, kind, kept in zip(("bias", "mask"), kinds.split(), (wide, half), strict=True):
        terms[name] = kept if kind == "mask" else np.where(kept, np.float32(0.5 * kept), -np.float32(INF))
        if kind == "bias":
            terms[name][:, 20:30] = 0  # a number, not a mask
    for swapped in (terms, dict(zip(terms, reversed(terms.values()), strict=True))):
        want = attention(q, k, v, **swapped, backend="reference")
        np.testing.assert_allclose(attention(q, k, v, **swapped), want, rtol=1e-5, atol=1e-5)
