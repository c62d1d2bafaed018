"""Packed sequences: attention_varlen is one call of attention for each sequence, to the bit.

But for sequences so short that `attention` has a kernel of its own for them, which attention_varlen doesn't use: those
are the bits of attention_varlen of that sequence alone.
"""

import itertools
import math

import ml_dtypes
import numba
import numpy as np
import pytest
from cases import BFLOAT16, DTYPES, FLOAT8, FLOAT16, FLOAT32, FLOAT64
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from test_conformance import assert_within, expect_call, normal, same_bits

from flash_numba import attention, attention_varlen, reference
from flash_numba.cpu import launch
from flash_numba.cpu.plan import FEW_QUERIES
from flash_numba.problem import SEQUENCE
from flash_numba.work_tiles import packed_work_tiles

INF, NAN = math.inf, math.nan

# Rows and keys of each sequence: empty ones of either or both kinds, one row, whole blocks, more than one tile.
LENGTHS = [(17, 7), (0, 5), (1, 40), (5, 0), (0, 0), (200, 130), (128, 256), (33, 300)]


def offsets(lengths, dtype=np.int32):
    return np.cumsum([0, *lengths], dtype=dtype)


def packed(lengths, *, heads=4, kv_heads=2, dim=16, value_dim=24, dtype=FLOAT32, kv_dtype=None, tail=0):
    """q, k, v and both offsets; with a tail behind the last sequence."""
    rows, keys = (list(x) for x in zip(*lengths, strict=True)) if lengths else ([], [])
    q = normal(sum(rows) + tail, heads, dim, dtype=dtype)
    k = normal(sum(keys) + tail, kv_heads, dim, seed=1).astype(kv_dtype or dtype)
    v = normal(sum(keys) + tail, kv_heads, value_dim, seed=2).astype(kv_dtype or dtype)
    return q, k, v, offsets(rows), offsets(keys)


def one_by_one(q, k, v, cu_q, cu_k, per_sequence=(), **options):
    """The same by `attention`, a sequence at a time."""
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    lse = np.full(q.shape[1::-1], -INF, FLOAT64 if q.dtype == FLOAT64 else FLOAT32)
    for b, (rows, keys) in enumerate(zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)):
        own = {name: value[b] if name in per_sequence else value for name, value in options.items()}
        at, of = slice(*rows), slice(*keys)
        out[at], lse[:, at] = attention(q[at], k[of], v[of], layout="bshd", return_lse=True, **own)
    return out, lse


def assert_same(got, want, cu_q):
    """(out, lse) alike, to the bit where attention had many rows."""
    for rows in itertools.pairwise(cu_q):
        at = slice(*rows)
        if rows[1] - rows[0] > FEW_QUERIES:
            assert same_bits(got[0][at], want[0][at])
            assert same_bits(got[1][:, at], want[1][:, at])
        else:
            digits = float(ml_dtypes.finfo(got[0].dtype).eps)
            for x, y in ((got[0][at], want[0][at]), (got[1][:, at], want[1][:, at])):
                assert x.dtype == y.dtype
                np.testing.assert_allclose(x.astype(FLOAT64), y.astype(FLOAT64), rtol=20 * digits, atol=20 * digits)
    assert same_bits(got[0][cu_q[-1] :], want[0][cu_q[-1] :])
    assert same_bits(got[1][:, cu_q[-1] :], want[1][:, cu_q[-1] :])


RULES = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (9, 4)},
    "causal-window": {"window": (40, 0), "causal": True},
    "right": {"window": (None, 2)},
    "scale": {"scale": -0.4},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "sinks": {"sinks": np.float32([0.5, -1, 3, 0])},
    "all": {
        "causal": True, "window": (60, 0), "softcap": 3.0, "alibi_slopes": [0.5, 0.25, 0.1, 0.0],
        "sinks": [0.5, -1, 3, 0],
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_bits_of_one_call_each(dtype, name):
    q, k, v, cu_q, cu_k = packed(LENGTHS, dtype=dtype)
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **RULES[name], return_lse=True)
    assert_same((out, lse), one_by_one(q, k, v, cu_q, cu_k, **RULES[name]), cu_q)
    for rows, keys in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        at, of = slice(*rows), slice(*keys)
        ends = [0, rows[1] - rows[0]], [0, keys[1] - keys[0]]
        alone = attention_varlen(q[at], k[of], v[of], *ends, **RULES[name], return_lse=True)
        assert same_bits(out[at], alone[0])
        assert same_bits(lse[:, at], alone[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_agrees_with_the_oracle(dtype, name):
    q, k, v, cu_q, cu_k = packed(LENGTHS, dtype=dtype, tail=3)
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **RULES[name], return_lse=True)
    want, want_lse = reference.attention_varlen(q, k, v, cu_q, cu_k, **RULES[name], return_lse=True)
    assert out.dtype == dtype
    assert out.shape == want.shape
    assert lse.dtype == (FLOAT64 if dtype == FLOAT64 else FLOAT32)
    assert lse.shape == want_lse.shape
    np.testing.assert_array_equal(lse == -INF, want_lse == -INF)
    for rows, keys in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        at, of = slice(*rows), slice(*keys)
        own = expect_call(dtype, q[at], k[of], v[of], layout="bshd", **RULES[name])
        assert_within("out", out[at], want[at], own.out_limit)
        assert_within("lse", lse[:, at], want_lse[:, at], own.lse_limit)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_positions_align_in_each_sequence_by_hand(backend):
    """Bottom right, the last row of a sequence stands at its last key; top left, the first row at the first."""
    q, k = np.zeros((5, 1, 1)), np.zeros((7, 1, 1))
    v = 2.0 ** np.arange(7)[:, None, None]
    cu_q, cu_k = offsets([2, 3]), offsets([4, 3])
    out = attention_varlen(q, k, v, cu_q, cu_k, causal=True, backend=backend)
    np.testing.assert_allclose(out[:, 0, 0], [7 / 3, 15 / 4, 16, 48 / 2, 112 / 3])
    out = attention_varlen(q, k, v, cu_q, cu_k, causal="top-left", backend=backend)
    np.testing.assert_allclose(out[:, 0, 0], [1, 3 / 2, 16, 48 / 2, 112 / 3])
    out = attention_varlen(q, k, v, cu_q, cu_k, window=(1, 0), backend=backend)
    np.testing.assert_allclose(out[:, 0, 0], [6 / 2, 12 / 2, 16, 48 / 2, 96 / 2])
    slopes = [math.log(2)]
    out = attention_varlen(q[:1], k[:2], v[:2], offsets([1]), offsets([2]), alibi_slopes=slopes, backend=backend)
    np.testing.assert_allclose(out[:, 0, 0], [(0.5 * 1 + 2) / 1.5])


@fuzz(80)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 200)), max_size=6),
    name=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from(DTYPES),
    offset_dtypes=st.tuples(*[st.sampled_from([np.int32, np.int64])] * 2),
    tail=st.sampled_from([0, 1, 40]),
)
def test_any_lengths(lengths, name, dtype, offset_dtypes, tail):
    q, k, v, cu_q, cu_k = packed(lengths, dtype=dtype, tail=tail)
    out, lse = attention_varlen(
        q, k, v, *(cu.astype(t) for cu, t in zip((cu_q, cu_k), offset_dtypes, strict=True)), **RULES[name],
        return_lse=True,
    )  # fmt: skip
    assert_same((out, lse), one_by_one(q, k, v, cu_q, cu_k, **RULES[name]), cu_q)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_of_either_size(dtype):
    q, k, v, cu_q, cu_k = packed(LENGTHS)
    want = attention_varlen(q, k, v, cu_q, cu_k)
    assert same_bits(attention_varlen(q, k, v, cu_q.astype(dtype), cu_k.astype(dtype)), want)
    every_second = np.repeat(cu_q.astype(dtype), 2)[::2]
    assert same_bits(attention_varlen(q, k, v, every_second, cu_k.astype(np.int64)), want)
    assert same_bits(attention_varlen(q, k, v, cu_q.astype(np.int64).tolist(), cu_k.astype(np.int64).tolist()), want)


def test_sequences_of_nothing():
    for rows, keys in ((0, 0), (0, 3), (3, 0), (3, 3)):
        q, k, v = normal(rows, 2, 8), normal(keys, 2, 8), normal(keys, 2, 5)
        for count in (0, 1, 4):  # of which all are empty, so that every row is behind the last
            cu = np.zeros(count + 1, np.int32)
            out, lse = attention_varlen(q, k, v, cu, cu, causal=True, sinks=[1.0, 2.0], return_lse=True)
            assert same_bits(out, np.zeros((rows, 2, 5), FLOAT32))
            assert same_bits(lse, np.full((2, rows), -INF, FLOAT32))
    out, lse = attention_varlen(q, k, v, [0, 3], [0, 0], sinks=[1.0, 2.0], return_lse=True)
    assert same_bits(out, np.zeros((3, 2, 5), FLOAT32))
    np.testing.assert_allclose(lse, [[1] * 3, [2] * 3], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tail_is_written_as_empty_and_not_read(dtype):
    q, k, v, cu_q, cu_k = packed([(30, 40), (9, 9)], tail=5, dtype=dtype)
    q[-5:] = k[-5:] = v[-5:] = NAN
    out = np.full((44, 4, 24), NAN, dtype)
    lse = attention_varlen(q, k, v, cu_q, cu_k, causal=True, sinks=np.ones(4), out=out, return_lse=True)[1]
    assert (out[39:] == 0).all()
    assert (lse[:, 39:] == -INF).all()
    want = attention_varlen(q[:39], k[:49], v[:49], cu_q, cu_k, causal=True, sinks=np.ones(4))
    assert same_bits(out[:39], want)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_sequences_nan_is_its_own(bad):
    q, k, v, cu_q, cu_k = packed([(30, 40), (60, 50), (9, 9)])
    clean = attention_varlen(q, k, v, cu_q, cu_k)
    k[45, 0, 0] = v[60, 1, 2] = q[40, 3, 1] = bad
    out = attention_varlen(q, k, v, cu_q, cu_k)
    assert same_bits(out[:30], clean[:30])
    assert same_bits(out[90:], clean[90:])
    assert np.isnan(out[30:90]).any()


def test_numbers_of_each_sequence():
    q, k, v, cu_q, cu_k = packed(LENGTHS, kv_dtype=FLOAT8[0])
    rng = np.random.default_rng(0)
    options = {
        "alibi_slopes": rng.uniform(0, 1, (8, 4)),
        "sinks": rng.standard_normal((8, 4)),
        "k_scale": rng.uniform(0.5, 2, (8, 2)),
        "v_scale": rng.uniform(0.5, 2, (8, 2)),
    }
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, **options)
    want = one_by_one(q, k, v, cu_q, cu_k, per_sequence=tuple(options), causal=True, **options)
    assert_same((out, lse), want, cu_q)
    # The same with one number for all, or one each head.
    for k_scale, v_scale in ((0.5, 2.0), (np.array([0.5, 2.0]), np.array([2.0, 3.0]))):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        got = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **scales)
        assert_same(got, one_by_one(q, k, v, cu_q, cu_k, **scales), cu_q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_counts_within_a_sequence(dtype, causal):
    """Against the oracle, which numbers the sequences as batch elements. Rows and keys start from 0 in each."""
    q, k, v, cu_q, cu_k = packed(LENGTHS, dtype=dtype, tail=2)
    options = {"causal": causal, "dropout": 0.4, "seed": 2**50 + 3}
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    want = reference.attention_varlen(q, k, v, cu_q, cu_k, **options)
    for b in range(len(LENGTHS)):
        at, of = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = expect_call(dtype, q[at], k[of], v[of], layout="bshd", _first_batch=b, **options)
        np.testing.assert_allclose(own.out, want[at], rtol=1e-12, atol=1e-12)
        assert_within("out", out[at], want[at], own.out_limit)
    plain_lse = attention_varlen(q, k, v, cu_q, cu_k, causal=causal, return_lse=True)[1]
    assert same_bits(lse, plain_lse)
    first = attention(q[:17], k[:7], v[:7], layout="bshd", **options)
    assert same_bits(out[:17], first)
    generator = attention_varlen(q, k, v, cu_q, cu_k, dropout=0.4, seed=np.random.default_rng(1))
    again = attention_varlen(q, k, v, cu_q, cu_k, dropout=0.4, seed=np.random.default_rng(1), backend="reference")
    np.testing.assert_allclose(generator.astype(FLOAT64), again.astype(FLOAT64), rtol=2e-2, atol=2e-3)


def test_equal_lengths_are_a_batch():
    """Dropout's indices too: a sequence counts as a batch element."""
    q, k, v = normal(3, 4, 50, 8), normal(3, 2, 60, 8), normal(3, 2, 60, 8)
    options = {"causal": True, "dropout": 0.3, "seed": 5, "alibi_slopes": np.random.default_rng(0).random((3, 4))}
    want, want_lse = attention(q, k, v, return_lse=True, **options)
    flat = [x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (q, k, v)]
    out, lse = attention_varlen(*flat, offsets([50] * 3), offsets([60] * 3), return_lse=True, **options)
    assert same_bits(np.ascontiguousarray(out.reshape(3, 50, 4, 8).swapaxes(1, 2)), want)
    assert same_bits(np.ascontiguousarray(lse.reshape(4, 3, 50).swapaxes(0, 1)), want_lse)


# ---- memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input(dtype):
    """q, k and v as views of one array, as projections come; columns apart, reversed rows, the other byte order."""
    qkv = normal(60, 3, 4, 16, dtype=dtype)
    cu = offsets([20, 0, 37])
    views = [qkv[:, i] for i in range(3)]
    want = attention_varlen(*(np.ascontiguousarray(x) for x in views), cu, cu, causal=True)
    assert same_bits(attention_varlen(*views, cu, cu, causal=True), want)
    heads_first = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in views]
    assert same_bits(attention_varlen(*heads_first, cu, cu, causal=True), want)
    columns_apart = [np.repeat(x, 2, axis=2)[..., ::2] for x in views]
    assert same_bits(attention_varlen(*columns_apart, cu, cu, causal=True), want)
    backwards = [x[::-1].copy()[::-1] for x in views]
    assert same_bits(attention_varlen(*backwards, cu, cu, causal=True), want)
    if dtype != BFLOAT16:
        swapped = [x.astype(dtype.newbyteorder(">")) for x in views]
        assert same_bits(attention_varlen(*swapped, cu, cu, causal=True), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_is_filled_and_returned(dtype):
    q, k, v, cu_q, cu_k = packed([(30, 40), (9, 9)], tail=5, value_dim=16, dtype=dtype)
    want, want_lse = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    strided = np.full((44, 8, 32), NAN, dtype)
    for out in (np.full_like(want, NAN), strided[:, ::-2, ::2], np.full_like(want.T, NAN).T, q.copy()):
        got, lse = attention_varlen(q, k, v, cu_q, cu_k, out=out, return_lse=True)
        assert got is out
        assert same_bits(np.ascontiguousarray(out), want)
        assert same_bits(lse, want_lse)
    assert np.isnan(strided[:, ::2].astype(FLOAT32)).all()
    wide = np.empty(want.shape, FLOAT64 if dtype == FLOAT64 else FLOAT32)
    attention_varlen(q, k, v, cu_q, cu_k, out=wide)
    assert same_bits(wide.astype(dtype), want)
    other = np.empty(want.shape, FLOAT16)
    attention_varlen(q, k, v, cu_q, cu_k, out=other)
    assert same_bits(other, wide.astype(FLOAT16))


@pytest.mark.parametrize("overlap", ["q", "v backwards"])
def test_out_may_overlap_an_input(overlap):
    q, k, v, cu_q, cu_k = packed([(30, 30), (220, 220)], heads=2, dim=16, value_dim=16)
    want = attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    out = q if overlap == "q" else v[::-1, ::-1]
    attention_varlen(q, k, v, cu_q, cu_k, causal=True, out=out)
    assert same_bits(np.ascontiguousarray(out), want)


def test_inputs_are_left_as_they_were():
    arrays = packed(LENGTHS)
    before = [x.copy() for x in arrays]
    attention_varlen(*arrays, causal=True, sinks=np.ones(4))
    assert all(same_bits(x, y) for x, y in zip(arrays, before, strict=True))


# ---- work


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba has one thread here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["full", "all"])
def test_threads_change_no_bit(monkeypatch, dtype, name):
    monkeypatch.setattr(launch, "SERIAL_FLOPS", 0)
    arrays = packed(LENGTHS, dtype=dtype)
    before = numba.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            numba.set_num_threads(threads)
            results.append(attention_varlen(*arrays, **RULES[name], dropout=0.2, seed=1, return_lse=True))
    finally:
        numba.set_num_threads(before)
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@fuzz(80)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=8),
    block_q=st.sampled_from([24, 192]),
    sides=st.sampled_from([(2**40, 2**40), (2**40, 0), (30, 0), (0, 5)]),
)
def test_tiles_cover_every_row_once_longest_first(lengths, block_q, sides):
    own = np.zeros(len(lengths), SEQUENCE)
    if lengths:
        own["queries"], own["keys"] = np.transpose(lengths)
    own["shift"] = own["keys"] - own["queries"]
    tiles = packed_work_tiles(own, block_q, *sides)
    rows = [(b, i) for b, first in tiles for i in range(first, min(first + block_q, lengths[b][0]))]
    assert sorted(rows) == [(b, i) for b, (count, _) in enumerate(lengths) for i in range(count)]
    if sides == (2**40, 2**40):
        work = [lengths[b][1] * min(block_q, lengths[b][0] - first) for b, first in tiles]
        assert work == sorted(work, reverse=True)


# ---- bad input

BAD = {
    "not from 0": ({"cu_seqlens_q": np.int32([1, 3, 5])}, ValueError, ("cu_seqlens_q", "[1, 3, 5]", "start at 0")),
    "decreasing": ({"cu_seqlens_k": np.int32([0, 4, 3])}, ValueError, ("cu_seqlens_k", "[0, 4, 3]", "decrease")),
    "beyond the rows": ({"cu_seqlens_q": np.int64([0, 3, 6])}, ValueError, ("cu_seqlens_q", "[0, 3, 6]", "5")),
    "beyond the keys": ({"cu_seqlens_k": np.int64([0, 3, 8])}, ValueError, ("cu_seqlens_k", "[0, 3, 8]", "7")),
    "negative": ({"cu_seqlens_k": np.int64([0, -3, 7])}, ValueError, ("cu_seqlens_k", "[0, -3, 7]", "decrease")),
    "other numbers": (
        {"cu_seqlens_k": np.int32([0, 3, 5, 7])},
        ValueError,
        ("cu_seqlens_q", "cu_seqlens_k", "2 and 3"),
    ),
    "fractions": ({"cu_seqlens_q": np.array([0.0, 3, 5])}, TypeError, ("cu_seqlens_q", "float64", "int32 or int64")),
    "unsigned": ({"cu_seqlens_q": np.uint32([0, 3, 5])}, TypeError, ("cu_seqlens_q", "uint32", "int32 or int64")),
    "2-D": ({"cu_seqlens_q": np.int32([[0, 3, 5]])}, TypeError, ("cu_seqlens_q", "(1, 3)", "1-D")),
    "none": ({"cu_seqlens_q": np.int32([])}, TypeError, ("cu_seqlens_q", "(0,)", "sequences + 1")),
    "q 4-D": ({"q": normal(1, 5, 4, 8)}, ValueError, ("q, k and v", "(1, 5, 4, 8)", "(total, H, D)")),
    "k 2-D": ({"k": normal(7, 8)}, ValueError, ("q, k and v", "(7, 8)", "(total, H, D)")),
    "k of another D": ({"k": normal(7, 2, 9)}, ValueError, ("k", "(7, 2, 9)")),
    "v of another length": ({"v": normal(6, 2, 8)}, ValueError, ("v", "(6, 2, 8)")),
    "heads": ({"k": normal(7, 3, 8), "v": normal(7, 3, 8)}, ValueError, ("heads", "4", "3", "multiple")),
    "mixed dtypes": ({"k": normal(7, 2, 8, dtype=FLOAT64)}, TypeError, ("k", "float64", "float32")),
    "slopes": ({"alibi_slopes": np.ones((3, 4))}, ValueError, ("alibi_slopes", "(3, 4)", "(4,)", "(2, 4)")),
    "k_scale": ({"k_scale": np.ones(4)}, ValueError, ("k_scale", "(4,)", "(2,)")),
    "window": ({"window": (-3, 0)}, ValueError, ("window", "(-3, 0)", "-1")),
    "softcap": ({"softcap": -1}, ValueError, ("softcap", "-1", "positive")),
    "dropout": ({"dropout": 1.5, "seed": 1}, ValueError, ("dropout", "1.5", "below 1")),
    "seed": ({"dropout": 0.5}, ValueError, ("seed", "dropout", "None")),
    "causal": ({"causal": "right"}, ValueError, ("causal", "'right'", "'top-left'")),
    "out": ({"out": np.empty((5, 4, 9), FLOAT32)}, ValueError, ("out", "(5, 4, 9)", "(5, 4, 8)")),
    "backend": ({"backend": "tpu"}, ValueError, ("backend", "'tpu'", "'cpu'")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_quoted(name):
    changed, error, words = BAD[name]
    call = {"q": normal(5, 4, 8), "k": normal(7, 2, 8), "v": normal(7, 2, 8)}
    call |= {"cu_seqlens_q": np.int32([0, 3, 5]), "cu_seqlens_k": np.int32([0, 3, 7])} | changed
    with pytest.raises(error) as raised:
        attention_varlen(**call)
    message = str(raised.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} doesn't hold {missing}"
    assert "\n" not in message
