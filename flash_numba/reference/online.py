"""The softmax and attention at once and block by block, in the dtype of the input: streaming is exact.

A row's state over the keys seen so far is `(m, l, o)`: the maximum of its scores, the sum of its weights exp(s - m),
and the output not yet divided by l. m and l keep a trailing axis of 1.
"""

import math

import numpy as np

# Infinities and NaN in the input make inf - inf or 0 * inf: the NaN that the formula asks for, nothing to warn of.
ieee = np.errstate(all="ignore")


# ---- the softmax, at once and block by block


def _floating(x):
    """`x` as an array of a floating dtype: integers and bools become float64."""
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype.kind in "biu" else x


def row_sum(x):
    """Sum over the last axis, keepdims; 16-bit formats are added up in float32 and rounded once."""
    return x.sum(axis=-1, keepdims=True, dtype=np.float32 if x.dtype.itemsize == 2 else x.dtype).astype(x.dtype)


def row_max(x):
    """Maximum over the last axis, keepdims; -inf for an empty axis."""
    return x.max(axis=-1, keepdims=True, initial=-np.inf)


def _matmul(a, b, scale=1.0):
    """`scale * a @ b`; 16-bit formats are multiplied in float32 and rounded once."""
    if a.dtype.itemsize == 2:
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)) * np.float32(scale)).astype(a.dtype)
    return np.matmul(a, b) * a.dtype.type(scale)


def exp_from(x, m):
    """exp(x - m), and 0 where both are -inf (m = -inf says that every x of the row is)."""
    return np.exp(x - np.where(m == -np.inf, m.dtype.type(0), m))


def ratio(a, l):
    """a / l, and 0 for a row that saw no key (l = 0). Adding 0 makes -0 into 0, which any sum started from 0 gives."""
    zero, one = l.dtype.type(0), l.dtype.type(1)
    return np.where(l == 0, zero, a / np.where(l == 0, one, l)) + zero


def row_lse(m, l):
    """Natural logarithm of the row's sum of exp(score), without the trailing axis; -inf for a row that saw no key."""
    return np.where(l == 0, m.dtype.type(-np.inf), m + np.log(np.where(l == 0, l.dtype.type(1), l)))[..., 0]


def _block_starts(n, block):
    if block < 1:
        raise ValueError(f"block is {block!r}; a block holds at least 1 key")
    return range(0, n, block)


@ieee
def softmax_stats(x):
    """The maximum `m` and the sum of weights `l = sum(exp(x - m))` over the last axis of `x`, each (..., 1).

    A row that is -inf throughout, or empty, has m = -inf and l = 0.
    """
    x = _floating(x)
    m = row_max(x)
    return m, row_sum(exp_from(x, m))


@ieee
def one_shot_softmax(x):
    """exp(x - max(x)) / sum over the last axis, in the dtype of `x`; a row that is -inf throughout gives 0."""
    x = _floating(x)
    m, l = softmax_stats(x)
    return ratio(exp_from(x, m), l)


@ieee
def online_softmax(x, block):
    """`one_shot_softmax` in two passes over blocks of the last axis: m and l first, then p.

    Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3, a block at a time. When the maximum grows from m to
    m_new, every weight counted in l is too large by exp(m_new - m), all by the same factor, so one product repairs l.
    """
    x = _floating(x)
    m = np.full((*x.shape[:-1], 1), -np.inf, x.dtype)
    l = np.zeros_like(m)
    for start in _block_starts(x.shape[-1], block):
        x_block = x[..., start : start + block]
        m_new = np.maximum(m, row_max(x_block))
        l = exp_from(m, m_new) * l + row_sum(exp_from(x_block, m_new))
        m = m_new
    return ratio(exp_from(x, m), l)


# ---- attention, at once and block by block, in the dtype of the input


def _attention_inputs(q, k, v, causal, scale, mask):
    """q, k, v as floats of one dtype, the scale, and which keys (..., S_q, S_kv) each row sees."""
    q, k, v = (_floating(x) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    rows, keys = q.shape[-2], k.shape[-2]
    p = np.arange(rows)[:, None] + (0 if isinstance(causal, str) else keys - rows)
    seen = visible(causal, None, p, np.arange(keys))
    if mask is not None:
        seen = seen & np.asarray(mask, bool)
    return q, k, v, default_scale(q) if scale is None else scale, seen


def visible(causal, window, p, j):
    """The keys j that `causal` and `window` let a row at position p see."""
    if causal not in (False, True, "top-left"):
        raise ValueError(f"causal is {causal!r}; it may be False, True or 'top-left'")
    left, right = (None, None) if window is None else window
    seen = np.ones(np.broadcast_shapes(p.shape, j.shape), bool)
    if causal:
        seen &= j <= p
    if left is not None and left != -1:
        seen &= j >= p - left
    if right is not None and right != -1:
        seen &= j <= p + right
    return seen


def default_scale(q):
    return 1.0 / math.sqrt(max(q.shape[-1], 1))


def _scores(q, k, scale, seen):
    """`scale * q k^T`, and -inf at the keys that a row doesn't see."""
    s = _matmul(q, np.swapaxes(k, -1, -2), scale)
    return np.where(seen, s, s.dtype.type(-np.inf))


def weigh(w, v, seen):
    """`w @ v` over the keys that each row sees. An unseen key has weight 0, but 0 * NaN is NaN: its V must not count.

    So the product takes V without its non-finite values, and those are added where they are seen. There a weight that
    has underflowed to 0 does make NaN of an infinite or NaN value, as the plain formula has it.
    """
    finite = np.isfinite(v)
    if finite.all():
        return _matmul(w, v)
    out = _matmul(w, np.where(finite, v, v.dtype.type(0)))
    for j in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), v.ndim - 1))):
        counts = seen[..., :, j, None] & ~finite[..., j, None, :]
        out = out + np.where(counts, w[..., :, j, None] * v[..., j, None, :], v.dtype.type(0))
    return out


def _empty_state(q, k, v, seen):
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], seen.shape[:-2])
    m = np.full((*lead, q.shape[-2], 1), -np.inf, q.dtype)
    o = np.zeros((*np.broadcast_shapes(lead, v.shape[:-2]), q.shape[-2], v.shape[-1]), q.dtype)
    return m, np.zeros_like(m), o


@ieee
def one_shot_attention(q, k, v, *, causal=False, scale=None, mask=None):
    """softmax(scale * q k^T) v with the whole score matrix in memory: `(out, lse)`.

    q (..., S_q, D), k (..., S_kv, D), v (..., S_kv, D_v), one floating dtype (else `TypeError`), leading axes
    broadcast. `causal` True lets row i see key j <= i + S_kv - S_q, "top-left" j <= i. `scale` defaults to 1 / sqrt(D).
    `mask` is boolean, True = keep, and broadcasts to the scores. out (..., S_q, D_v) and lse (..., S_q), a natural
    logarithm, have the dtype of q. A row that sees no key gives 0 and -inf.
    """
    q, k, v, scale, seen = _attention_inputs(q, k, v, causal, scale, mask)
    s = _scores(q, k, scale, seen)
    m, l = softmax_stats(s)
    return ratio(weigh(exp_from(s, m), v, seen), l), row_lse(m, l)


@ieee
def online_attention(q, k, v, block, *, causal=False, scale=None, mask=None):
    """As `one_shot_attention`, `block` keys at a time: the scores of one block are all that is ever needed at once.

    The output so far is a sum with the same weights as l, so the same factor repairs it when the maximum grows
    (Rabe and Staats 2021, arXiv:2112.05682, section 2; Dao 2023, arXiv:2307.08691, section 3.1). A block of at least
    S_kv gives the one-shot result to the bit.
    """
    q, k, v, scale, seen = _attention_inputs(q, k, v, causal, scale, mask)
    m, l, o = _empty_state(q, k, v, seen)
    for start in _block_starts(k.shape[-2], block):
        keys = slice(start, start + block)
        s = _scores(q, k[..., keys, :], scale, seen[..., keys])
        m_new = np.maximum(m, row_max(s))
        alpha, w = exp_from(m, m_new), exp_from(s, m_new)
        l = alpha * l + row_sum(w)
        o = alpha * o + weigh(w, v[..., keys, :], seen[..., keys])
        m = m_new
    return ratio(o, l), row_lse(m, l)


@ieee
def kv_outer_attention(q, k, v, block_q, block_k, *, causal=False, scale=None, mask=None):
    """As `online_attention`, in FlashAttention-1's order: K/V blocks outermost, O kept normalised after each block.

    Dao et al. 2022 (arXiv:2205.14135), algorithm 1. Blocks of at least S_q and S_kv give the one-shot result to the
    bit.
    """
    q, k, v, scale, seen = _attention_inputs(q, k, v, causal, scale, mask)
    m, l, o = _empty_state(q, k, v, seen)
    for k_start in _block_starts(k.shape[-2], block_k):
        keys = slice(k_start, k_start + block_k)
        for q_start in _block_starts(q.shape[-2], block_q):
            at = (..., slice(q_start, q_start + block_q), slice(None))
            seen_here = seen[at][..., keys]
            s = _scores(q[at], k[..., keys, :], scale, seen_here)
            m_new = np.maximum(m[at], row_max(s))
            alpha, w = exp_from(m[at], m_new), exp_from(s, m_new)
            l_new = alpha * l[at] + row_sum(w)
            o[at] = ratio(alpha * l[at] * o[at] + weigh(w, v[..., keys, :], seen_here), l_new)
            m[at], l[at] = m_new, l_new
    return o, row_lse(m, l)


@ieee
def merge(a, b):
    """The state over two disjoint sets of keys from their states `(m, l, o)`: m and l (..., 1), o (..., D_v).

    o is unnormalised. Associative and commutative up to rounding; the identity is (-inf, 0, 0).
    """
    (m_a, l_a, o_a), (m_b, l_b, o_b) = a, b
    m = np.maximum(m_a, m_b)
    alpha_a, alpha_b = exp_from(m_a, m), exp_from(m_b, m)
    return m, alpha_a * l_a + alpha_b * l_b, alpha_a * o_a + alpha_b * o_b
