"""The oracle against implementations that share nothing with it: scalar loops, published vectors, numbers by hand."""

import math
import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from flash_numba import reference

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
INF, NAN = math.inf, math.nan


def normal(rng, *shape, dtype=np.float64):
    return rng.standard_normal(shape).astype(dtype)


# ---- an implementation in scalar Python, one query row and key at a time; what is masked is never touched


def scalar_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def scalar_row(scores, values, factors, sink, width):
    """(out, lse) of one row from the scores and values of the keys it sees; `factors` are dropout's."""
    logits = [*scores, sink]
    if any(math.isnan(s) for s in logits):
        return [NAN] * width, NAN
    top = max(logits)
    if top == -INF:
        return [0.0] * width, -INF
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum([*weights, math.exp(sink - top)])
    out = [0.0] * width
    for w, value, factor in zip(weights, values, factors, strict=True):
        for c in range(width):
            out[c] += factor * w * value[c] / total
    return out, top + math.log(total)


def scalar_attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, mask=None, alibi_slopes=None,
    sinks=None, q_lengths=None, kv_lengths=None, q_offset=None, k_offset=0, dropout=0.0, seed=None, k_scale=None,
    v_scale=None,
):  # fmt: skip
    """On 4-D arrays; lengths and q_offset (B,), slopes and sinks (H,), k_scale and v_scale (H_kv,)."""
    batches, heads, rows, depth = q.shape
    kv_heads, keys = k.shape[1:3]
    width = v.shape[3]
    q, k, v = (x.astype(np.float64).tolist() for x in (q, k, v))
    bias, mask = (None if x is None else np.broadcast_to(x, (batches, heads, rows, keys)) for x in (bias, mask))
    left, right = window or (None, None)
    scale = 1 / math.sqrt(depth) if scale is None else scale
    out, lse = np.empty((batches, heads, rows, width)), np.empty((batches, heads, rows))
    for b, h, i in np.ndindex(batches, heads, rows):
        g = h * kv_heads // heads
        q_length = rows if q_lengths is None else q_lengths[b]
        kv_length = keys if kv_lengths is None else kv_lengths[b]
        given_i = i + (0 if q_offset is None else int(q_offset[b]))
        if q_offset is not None or causal == "top-left":
            p = given_i
        else:
            p = i + kv_length - q_length
        scores, values, factors = [], [], []
        for j in range(keys):
            at = j + k_offset
            if i >= q_length or j >= kv_length or (causal and at > p):
                continue
            if left not in (None, -1) and at < p - left:
                continue
            if right not in (None, -1) and at > p + right:
                continue
            if mask is not None and not mask[b, h, i, j]:
                continue
            if bias is not None and bias[b, h, i, j] == -INF:
                continue
            s = sum(q[b][h][i][t] * k[b][g][j][t] for t in range(depth))
            s *= scale * (1 if k_scale is None else float(k_scale[g]))
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            if alibi_slopes is not None:
                s -= float(alibi_slopes[h] * abs(p - at))
            if bias is not None:
                s += float(bias[b, h, i, j])
            scores.append(s)
            values.append([x * (1 if v_scale is None else float(v_scale[g])) for x in v[b][g][j]])
            keep = True
            if dropout > 0:
                word = scalar_philox((at // 4, given_i, h, b), (seed % 2**32, seed // 2**32))[at % 4]
                keep = word >= math.floor(dropout * 2**32)
            factors.append(1 / (1 - dropout) if keep else 0.0)
        out[b, h, i], lse[b, h, i] = scalar_row(
            scores, values, factors, -INF if sinks is None else float(sinks[h]), width
        )
    return out, lse


def assert_close(got, want, limit=1e-13):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


# ---- attention with every feature

RULES = {
    "causal": lambda rng, s: {"causal": True},
    "top-left": lambda rng, s: {"causal": "top-left"},
    "window": lambda rng, s: {"window": (int(rng.integers(-1, 4)), int(rng.integers(-1, 4)))},
    "left-window": lambda rng, s: {"window": (2, None)},
    "right-window": lambda rng, s: {"window": (None, 1)},
    "scale": lambda rng, s: {"scale": float(rng.choice([0.0, -1.0, 3.0]))},
    "softcap": lambda rng, s: {"softcap": 1.5},
    "alibi_slopes": lambda rng, s: {"alibi_slopes": rng.uniform(0, 1, s[1])},
    "bias": lambda rng, s: {"bias": np.where(rng.random(s) < 0.3, -np.inf, rng.standard_normal(s))},
    "bias-row": lambda rng, s: {"bias": normal(rng, 1, 1, 1, s[3], dtype=np.float32)},
    "mask": lambda rng, s: {"mask": rng.random(s) < 0.6},
    "mask-head": lambda rng, s: {"mask": rng.random((1, s[1], s[2], 1)) < 0.6},
    "sinks": lambda rng, s: {"sinks": normal(rng, s[1])},
    "q_lengths": lambda rng, s: {"q_lengths": rng.integers(0, s[2] + 1, s[0])},
    "kv_lengths": lambda rng, s: {"kv_lengths": rng.integers(0, s[3] + 1, s[0])},
    "q_offset": lambda rng, s: {"q_offset": rng.integers(0, 4, s[0])},
    "k_offset": lambda rng, s: {"k_offset": 3, "q_offset": rng.integers(0, 9, s[0])},
    "dropout": lambda rng, s: {"dropout": 0.4, "seed": int(rng.integers(2**63))},
    "k_scale": lambda rng, s: {"k_scale": rng.uniform(0.5, 2, 2), "v_scale": rng.uniform(0.5, 2, 2)},
}


def small_problem(rng, rows=5, keys=7):
    return normal(rng, 2, 4, rows, 3), normal(rng, 2, 2, keys, 3), normal(rng, 2, 2, keys, 2)


@fuzz(100)
@given(
    seed=st.integers(0, 2**32),
    names=st.sets(st.sampled_from(sorted(RULES)), max_size=6),
    rows=st.integers(0, 6),
    keys=st.integers(0, 8),
    special=st.sampled_from([None, NAN, INF, -INF]),
)
def test_any_rules_agree_with_scalar_loops(seed, names, rows, keys, special):
    rng = np.random.default_rng(seed)
    q, k, v = small_problem(rng, rows, keys)
    if special is not None and keys:
        for x in (k, v):
            x[rng.integers(2), rng.integers(2), rng.integers(keys), 0] = special
    options = {}
    for name in sorted(names):
        options |= RULES[name](rng, (2, 4, rows, keys))
    got, got_lse = reference.attention(q, k, v, **options, return_lse=True)
    want, want_lse = scalar_attention(q, k, v, **options)
    assert_close(got, want)
    assert_close(got_lse, want_lse)


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_agrees_with_scalar_loops(name):
    rng = np.random.default_rng(3)
    q, k, v = small_problem(rng)
    options = RULES[name](rng, (2, 4, 5, 7))
    got, got_lse = reference.attention(q, k, v, **options, return_lse=True)
    want, want_lse = scalar_attention(q, k, v, **options)
    assert_close(got, want)
    assert_close(got_lse, want_lse)


def ones(*shape):
    return np.ones((1, 1, *shape))


def test_by_hand_softmax_and_lse():
    k = np.log([[1.0], [2.0], [4.0]])
    v = np.array([[7.0, 0.0], [0.0, 7.0], [14.0, 14.0]])
    out, lse = reference.attention(np.ones((1, 1)), k, v, return_lse=True)
    assert_close(out, [[1 + 8, 2 + 8]])
    assert_close(lse, [math.log(7)])


def test_by_hand_scale_is_one_over_root_of_d():
    k = math.log(2) * np.array([[4.0, 0, 0, 0], [0, 0, 0, 0]])
    out = reference.attention(np.ones((1, 4)), k, np.array([[5.0], [0.0]]))
    assert_close(out, [[5 * 4 / 5]])


def test_by_hand_positions_of_causal():
    q, k, v = np.zeros((2, 1)), np.zeros((4, 1)), np.array([[1.0], [2.0], [4.0], [8.0]])
    assert_close(reference.attention(q, k, v, causal=True), [[7 / 3], [15 / 4]])
    assert_close(reference.attention(q, k, v, causal="top-left"), [[1], [3 / 2]])
    out, lse = reference.attention(np.zeros((4, 1)), k[:2], v[:2], causal=True, return_lse=True)
    assert_close(out, [[0], [0], [1], [3 / 2]])
    assert_close(lse, [-INF, -INF, 0, math.log(2)])


def test_by_hand_window():
    q, k, v = np.zeros((3, 1)), np.zeros((4, 1)), np.array([[1.0], [2.0], [4.0], [8.0]])
    assert_close(reference.attention(q, k, v, window=(1, 0)), [[3 / 2], [3], [6]])
    assert_close(reference.attention(q, k, v, window=(0, 1), causal=True), [[2], [4], [8]])
    assert_close(reference.attention(q, k, v, window=(-1, None)), [[15 / 4]] * 3)


def test_by_hand_alibi_halves_with_distance():
    v = np.array([[1.0], [10.0], [100.0]])
    out = reference.attention(np.zeros((1, 1)), np.zeros((3, 1)), v, alibi_slopes=[math.log(2)])
    assert_close(out, [[(0.25 * 1 + 0.5 * 10 + 100) / 1.75]])


def test_by_hand_softcap_comes_before_bias():
    k = np.array([[1000.0], [0.0]])
    out = reference.attention(np.ones((1, 1)), k, [[3.0], [0.0]], softcap=math.log(2), bias=[[math.log(4), 0.0]])
    assert_close(out, [[3 * 8 / 9]])


def test_by_hand_sink():
    out, lse = reference.attention(ones(1, 1), 0 * ones(3, 1), 8 * ones(3, 1), sinks=[0.0], return_lse=True)
    assert_close(out, 6 * ones(1, 1))
    assert_close(lse, [[[math.log(4)]]])
    out, lse = reference.attention(ones(1, 1), ones(3, 1), ones(3, 1), sinks=[0.5], kv_lengths=0, return_lse=True)
    assert_close(out, 0 * ones(1, 1))
    assert_close(lse, [[[0.5]]])


def test_by_hand_dropout_with_the_published_words():
    # Counter 0, key 0 gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8: at p = 0.5 only the first key is dropped.
    v = np.array([[1.0], [2.0], [4.0], [8.0]])
    out, lse = reference.attention(np.zeros((1, 1)), np.zeros((4, 1)), v, dropout=0.5, seed=0, return_lse=True)
    assert_close(out, [[2 * (2 + 4 + 8) / 4]])
    assert_close(lse, [math.log(4)])
    plain = reference.attention(np.zeros((1, 1)), np.zeros((4, 1)), v, dropout=0.5, training=False)
    assert_close(plain, [[15 / 4]])


def test_by_hand_finite_lows_are_not_masks():
    v = np.array([[1.0], [2.0], [6.0]])
    for low in (np.finfo(np.float64).min, float(np.finfo(np.float32).min), -1e9):
        out = reference.attention(np.zeros((1, 1)), np.zeros((3, 1)), v, bias=np.full((1, 3), low))
        assert_close(out, [[3]])
    k = np.full((3, 1), -1e308)  # the score and the bias together leave the range of float64
    out, lse = reference.attention(ones(1, 1)[0, 0], k, v, bias=np.full((1, 3), -1.7e308), return_lse=True)
    assert_close(out, [[3]])
    assert np.isfinite(lse).all()


def test_by_hand_8_bit_scales():
    k = np.array([[1.0], [0.0]], ml_dtypes.float8_e4m3fn)
    v = np.array([[2.0], [0.0]], ml_dtypes.float8_e5m2)
    out = reference.attention(np.ones((1, 1)), k, v, k_scale=math.log(3), v_scale=10.0)
    assert_close(out, [[20 * 3 / 4]])


# ---- NaN and infinities


def test_nan_in_v_reaches_the_rows_that_see_it():
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, 100, 8) for _ in range(3))
    clean = reference.attention(q, k, v, causal=True)
    v[47, 2] = NAN
    out = reference.attention(q, k, v, causal=True)
    assert np.isnan(out[47:, 2]).all()
    others = np.arange(8) != 2
    assert (out[:47] == clean[:47]).all()
    assert_close(out[:, others], clean[:, others])
    # The functions of one precision have the same rule, whichever block the NaN is in.
    for block in (1, 30, 100):
        assert_close(reference.online_attention(q, k, v, block, causal=True)[0], out)
        assert_close(reference.kv_outer_attention(q, k, v, 30, block, causal=True)[0], out)


def test_nan_in_k_and_q():
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, 10, 4) for _ in range(3))
    clean, clean_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    k[6, 1] = NAN
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert np.isnan(out[6:]).all()
    assert np.isnan(lse[6:]).all()
    assert_close(out[:6], clean[:6])
    q[2, 0] = NAN
    out = reference.attention(q, k, v, causal=True)
    assert np.isnan(out[2]).all()
    assert_close(out[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    hidden, lse = reference.attention(q, k, v, mask=np.zeros((10, 10), bool), bias=[[NAN] * 10], return_lse=True)
    assert (hidden == 0).all()
    assert (lse == -INF).all()
    assert_close(clean_lse[0], (q[:1] @ k[:1].T)[0, 0] / 2)


def test_a_weight_of_zero_at_a_seen_key_makes_nan_of_infinity():
    k = np.array([[0.0], [-2000.0]])
    for special in (NAN, INF, -INF):
        out = reference.attention(np.ones((1, 1)), k, [[1.0], [special]])
        assert np.isnan(out).all()
        out = reference.attention(np.ones((1, 1)), k, [[1.0], [special]], mask=[[True, False]])
        assert_close(out, [[1]])


def test_scores_of_minus_infinity_alone_give_an_empty_row():
    out, lse = reference.attention(np.ones((1, 1)), np.full((3, 1), -INF), np.ones((3, 1)), return_lse=True)
    assert_close(out, [[0]])
    assert_close(lse, [-INF])


# ---- shapes and layouts


def test_heads_are_grouped_contiguously_and_leading_axes_broadcast():
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 2, 3, 6, 5, 4), normal(rng, 3, 2, 7, 4), normal(rng, 1, 1, 2, 7, 3)
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 3, 6, 5, 3)
    assert lse.shape == (2, 3, 6, 5)
    for a, b, h in np.ndindex(2, 3, 6):
        one, one_lse = reference.attention(q[a, b, h], k[b, h // 3], v[0, 0, h // 3], return_lse=True)
        assert_close(out[a, b, h], one)
        assert_close(lse[a, b, h], one_lse)


def test_five_dimensions_count_batches_in_c_order():
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 2, 3, 1, 4, 4), normal(rng, 2, 3, 1, 6, 4), normal(rng, 2, 3, 1, 6, 4)
    lengths, mask = np.array([6, 5, 4, 3, 2, 1]), rng.random((2, 3, 1, 4, 6)) < 0.7
    out = reference.attention(q, k, v, kv_lengths=lengths, mask=mask, dropout=0.3, seed=5)
    flat = reference.attention(
        *(x.reshape(6, 1, -1, 4) for x in (q, k, v)), kv_lengths=lengths, mask=mask.reshape(6, 1, 4, 6), dropout=0.3,
        seed=5,
    )  # fmt: skip
    assert_close(out.reshape(flat.shape), flat)


def test_layout_bshd():
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 2, 4, 5, 3), normal(rng, 2, 2, 7, 3), normal(rng, 2, 2, 7, 3)
    want, want_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = reference.attention(*swapped, causal=True, layout="bshd", return_lse=True)
    assert_close(out.swapaxes(1, 2), want)
    assert_close(lse, want_lse)


@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_empty_lengths(rows, keys):
    q, k, v = np.ones((2, rows, 4)), np.ones((2, keys, 4)), np.ones((2, keys, 5))
    results = [
        reference.attention(q, k, v, return_lse=True),
        reference.one_shot_attention(q, k, v),
        reference.online_attention(q, k, v, 2),
        reference.kv_outer_attention(q, k, v, 2, 2),
    ]
    for out, lse in results:
        assert out.shape == (2, rows, 5)
        assert lse.shape == (2, rows)
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_packed_sequences_are_separate_calls():
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 14, 4, 3), normal(rng, 12, 2, 3), normal(rng, 12, 2, 5)
    cu_q, cu_k = [0, 4, 4, 9, 12], np.array([0, 5, 7, 7, 11])
    slopes, sinks = rng.uniform(0, 1, (4, 4)), normal(rng, 4)
    options = {"causal": True, "softcap": 2.0, "sinks": sinks, "dropout": 0.3}
    out, lse = reference.attention_varlen(
        q, k, v, cu_q, cu_k, alibi_slopes=slopes, seed=np.random.default_rng(7), return_lse=True, **options
    )
    number = int(np.random.default_rng(7).integers(2**64, dtype=np.uint64))
    assert out.shape == (14, 4, 5)
    assert lse.shape == (4, 14)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        # Three empty sequences before it would give sequence b its place in a batch: the same dropout counters.
        batch = [np.zeros((b + 1, *x.shape)) for x in (q[rows], k[keys], v[keys])]
        for x, own in zip(batch, (q[rows], k[keys], v[keys]), strict=True):
            x[b] = own
        want, want_lse = reference.attention(
            *batch, alibi_slopes=slopes[b], layout="bshd", seed=number, return_lse=True, **options
        )
        assert_close(out[rows], want[b])
        assert_close(lse[:, rows], want_lse[b])
    assert (out[12:] == 0).all()
    assert (lse[:, 12:] == -INF).all()


def test_errors_say_what_was_passed():
    x = np.ones((2, 3, 4))
    for function in (reference.one_shot_attention, reference.attention):
        with pytest.raises(ValueError, match=r"causal is 'left'.*'top-left'"):
            function(x, x, x, causal="left")
    with pytest.raises(ValueError, match="layout is 'sbhd'"):
        reference.attention(x, x, x, layout="sbhd")
    with pytest.raises(ValueError, match=r"q has 2 heads.*has 3"):
        reference.attention(x, np.ones((3, 3, 4)), np.ones((3, 3, 4)))
    with pytest.raises(ValueError, match=r"seed is needed where dropout is 0\.5"):
        reference.attention(x, x, x, dropout=0.5)
    with pytest.raises(ValueError, match="block is 0"):
        reference.online_softmax(x, 0)
    with pytest.raises(TypeError, match="float64, float32 and float64"):
        reference.one_shot_attention(x, x.astype(np.float32), x)


# ---- the online softmax is exact

rows_of_scores = st.builds(
    lambda seed, n, spread, gaps: np.where(
        (r := np.random.default_rng(seed)).random((2, 3, n)) < gaps, -np.inf, spread * r.standard_normal((2, 3, n))
    ),
    seed=st.integers(0, 2**32),
    n=st.integers(0, 70),
    spread=st.sampled_from([1.0, 30.0, 1e4]),
    gaps=st.sampled_from([0.0, 0.5, 1.0]),
)


@fuzz(100)
@given(x=rows_of_scores, block=st.integers(1, 80))
def test_online_softmax_is_one_shot_softmax(x, block):
    p = reference.one_shot_softmax(x)
    m, l = reference.softmax_stats(x)
    assert m.shape == l.shape == (2, 3, 1)
    assert_close(reference.online_softmax(x, block), p)
    assert reference.online_softmax(x, max(x.shape[-1], 1)).tobytes() == p.tobytes()
    assert_close(p.sum(axis=-1, keepdims=True), l > 0)
    assert ((l == 0) == (m == -INF)).all()


def test_softmax_by_hand():
    x = np.log([[1.0, 2.0, 4.0, 1.0]])
    assert_close(reference.one_shot_softmax(x), [[1 / 8, 2 / 8, 4 / 8, 1 / 8]])
    m, l = reference.softmax_stats(x)
    assert_close(m, [[math.log(4)]])
    assert_close(l, [[2]])
    assert_close(reference.one_shot_softmax([0, 0]), [0.5, 0.5])
    assert np.isnan(reference.online_softmax(np.array([0.0, INF, 0.0]), 1)).all()
    assert np.isnan(reference.one_shot_softmax(np.array([0.0, NAN, -INF]))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@fuzz(100)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    keys=st.integers(1, 60),
    block_q=st.integers(1, 50),
    block_k=st.integers(1, 70),
    causal=st.sampled_from([False, True, "top-left"]),
    masked=st.booleans(),
    spread=st.sampled_from([1.0, 20.0]),
)
def test_online_attention_is_one_shot_attention(dtype, seed, rows, keys, block_q, block_k, causal, masked, spread):
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, 2, n, 8, dtype=dtype) for n in (rows, keys, keys))
    q = (q * dtype(spread)).astype(dtype)
    options = {"causal": causal, "mask": rng.random((rows, keys)) < 0.5 if masked else None}
    one_shot = reference.one_shot_attention(q, k, v, **options)
    online = reference.online_attention(q, k, v, block_k, **options)
    kv_outer = reference.kv_outer_attention(q, k, v, block_q, block_k, **options)
    # An operation rounds to half a unit; the number of blocks sets how many roundings meet in one value.
    limit = {8: 1e-13, 4: 5e-5, 2: 0.3}[np.dtype(dtype).itemsize]
    for got in (online, kv_outer):
        for x, y in zip(got, one_shot, strict=True):
            assert x.dtype == dtype
            assert_close(x, y, limit)
    if dtype is np.float64:
        want = reference.attention(q, k, v, **options, return_lse=True)
        assert_close(one_shot[0], want[0])
        assert_close(one_shot[1], want[1])
    whole = reference.online_attention(q, k, v, keys, **options), reference.kv_outer_attention(
        q, k, v, rows, keys + 5, **options
    )  # fmt: skip
    for got in whole:
        assert [x.tobytes() for x in got] == [x.tobytes() for x in one_shot]


def test_sixteen_bits_accumulate_in_float32():
    # Added up in bfloat16, a sum of ones stops at 256.
    x = np.zeros((1, 4096), ml_dtypes.bfloat16)
    assert float(reference.softmax_stats(x)[1][0, 0]) == 4096
    v = np.ones((4096, 1), ml_dtypes.bfloat16)
    out, _ = reference.one_shot_attention(np.zeros((1, 4), v.dtype), np.zeros((4096, 4), v.dtype), v)
    assert float(out[0, 0]) == 1


# ---- merging


def state_of(s, v):
    m, l = reference.softmax_stats(s)
    return m, l, np.exp(s - np.where(m == -INF, 0, m)) @ v


@fuzz(100)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 30), min_size=2, max_size=2), spread=st.floats(0, 50))
def test_merge_is_associative_and_exact(seed, cuts, spread):
    rng = np.random.default_rng(seed)
    s, v = spread * normal(rng, 4, 30), normal(rng, 30, 3)
    s[0] = s[1, :15] = s[2, 15:] = -INF
    first, second = sorted(cuts)
    a, b, c = (state_of(s[:, at], v[at]) for at in (slice(first), slice(first, second), slice(second, None)))
    whole = state_of(s, v)
    left = reference.merge(reference.merge(a, b), c)
    right = reference.merge(a, reference.merge(b, c))
    identity = (np.full((4, 1), -INF), np.zeros((4, 1)), np.zeros((4, 3)))
    for got in (left, right, reference.merge(whole, identity), reference.merge(identity, whole)):
        for x, y in zip(got, whole, strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_merge_partials_is_one_call(lead):
    rng = np.random.default_rng(4)
    q, k, v = normal(rng, *lead, 5, 4), normal(rng, *lead, 11, 4), normal(rng, *lead, 11, 3)
    sinks = normal(rng, lead[-1] if lead else 1)
    parts = [
        reference.attention(
            q, k[..., at, :], v[..., at, :], causal=True, q_offset=2, k_offset=at.start, return_lse=True
        )
        for at in (slice(0, 4), slice(4, 4), slice(4, 9), slice(9, 11))
    ]
    for options in ({}, {"sinks": sinks}):
        out, lse = reference.merge_partials(*zip(*parts, strict=True), **options)
        want, want_lse = reference.attention(q, k, v, causal=True, q_offset=2, return_lse=True, **options)
        assert_close(out, want)
        assert_close(lse, want_lse)


# ---- the dropout generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    assert tuple(int(w) for w in reference.philox(counter, key)) == words
    assert tuple(scalar_philox(counter, key)) == words


def test_dropout_keeps_its_share_and_depends_on_absolute_indices_only():
    q, k, v = np.zeros((2, 2, 64, 1)), np.zeros((2, 2, 256, 1)), np.broadcast_to(np.eye(256), (2, 2, 256, 256))
    kept = reference.attention(q, k, v, dropout=0.25, seed=2**40 + 1) > 0
    assert abs(kept.mean() - 0.75) < 0.01
    part = reference.attention(
        q[:, :, 10:20], k[:, :, 7:30], v[:, :, 7:30], dropout=0.25, seed=2**40 + 1, q_offset=10, k_offset=7
    )
    assert ((part > 0)[..., 7:30] == kept[:, :, 10:20, 7:30]).all()


# ---- torch, where it is installed


@pytest.mark.interop
@pytest.mark.parametrize("causal", [False, "top-left"])
@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_torch(causal, masked):
    torch = pytest.importorskip("torch")
    if causal and masked:
        pytest.skip("torch takes either is_causal or attn_mask")
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, 2, 3, n, 8) for n in (17, 23, 23))
    mask = rng.random((2, 1, 17, 23)) < 0.7 if masked else None
    want = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x) for x in (q, k, v)),
        attn_mask=None if mask is None else torch.from_numpy(mask),
        is_causal=bool(causal),
    )
    assert_close(reference.attention(q, k, v, causal=causal, mask=mask), want.numpy())


# ---- the example that a reader can follow


def test_the_example_finds_every_error_within_its_limit(capsys):
    path = Path(__file__).resolve().parent.parent / "examples" / "online_softmax_check.py"
    assert runpy.run_path(str(path))["main"]() == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("float64", "float32", "bfloat16", "softmax", "attention"))
