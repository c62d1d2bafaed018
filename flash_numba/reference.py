"""Exact attention in whole-matrix NumPy: the oracle that every backend is tested against. Readable beats fast.

It imports nothing from the kernels' formulas (`recurrence.py`, `scores.py`, `dropout.py`), so a mistake there can't
hide in both, and it uses natural logarithms throughout where they use base 2.

Two groups of functions:

* `one_shot_*`, `online_*`, `kv_outer_attention` and `merge` show that the streaming softmax is exact. They compute in
  the dtype of their input (16-bit formats round after every step, only sums and products accumulate in float32, as
  eager code does), so an online result can be compared with a one-shot result of the same precision.
* `attention`, `attention_varlen` and `merge_partials` have every feature of the public functions, and compute in
  float64.

A row's state over the keys seen so far is `(m, l, o)`: the maximum of its scores, the sum of its weights exp(s - m),
and the output not yet divided by l. m and l keep a trailing axis of 1.
"""

import math

import numpy as np

# Infinities and NaN in the input make inf - inf or 0 * inf: the NaN that the formula asks for, nothing to warn of.
_ieee = np.errstate(invalid="ignore", over="ignore")


# ---- the softmax, at once and block by block


def _floating(x):
    """`x` as an array of a floating dtype: integers and bools become float64."""
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype.kind in "biu" else x


def _sum(x):
    """Sum over the last axis, keepdims; 16-bit formats are added up in float32 and rounded once."""
    return x.sum(axis=-1, keepdims=True, dtype=np.float32 if x.dtype.itemsize == 2 else x.dtype).astype(x.dtype)


def _max(x):
    """Maximum over the last axis, keepdims; -inf for an empty axis."""
    return x.max(axis=-1, keepdims=True, initial=-np.inf)


def _matmul(a, b, scale=1.0):
    """`scale * a @ b`; 16-bit formats are multiplied in float32 and rounded once."""
    if a.dtype.itemsize == 2:
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)) * np.float32(scale)).astype(a.dtype)
    return np.matmul(a, b) * a.dtype.type(scale)


def _exp_from(x, m):
    """exp(x - m), and 0 where both are -inf (m = -inf says that every x of the row is)."""
    return np.exp(x - np.where(m == -np.inf, m.dtype.type(0), m))


def _ratio(a, l):
    """a / l, and 0 for a row that saw no key (l = 0). Adding 0 makes -0 into 0, which any sum started from 0 gives."""
    zero, one = l.dtype.type(0), l.dtype.type(1)
    return np.where(l == 0, zero, a / np.where(l == 0, one, l)) + zero


def _lse(m, l):
    """Natural logarithm of the row's sum of exp(score), without the trailing axis; -inf for a row that saw no key."""
    return np.where(l == 0, m.dtype.type(-np.inf), m + np.log(np.where(l == 0, l.dtype.type(1), l)))[..., 0]


def _block_starts(n, block):
    if block < 1:
        raise ValueError(f"block is {block!r}; a block holds at least 1 key")
    return range(0, n, block)


@_ieee
def softmax_stats(x):
    """The maximum `m` and the sum of weights `l = sum(exp(x - m))` over the last axis of `x`, each (..., 1).

    A row that is -inf throughout, or empty, has m = -inf and l = 0.
    """
    x = _floating(x)
    m = _max(x)
    return m, _sum(_exp_from(x, m))


@_ieee
def one_shot_softmax(x):
    """exp(x - max(x)) / sum over the last axis, in the dtype of `x`; a row that is -inf throughout gives 0."""
    x = _floating(x)
    m, l = softmax_stats(x)
    return _ratio(_exp_from(x, m), l)


@_ieee
def online_softmax(x, block):
    """The same in two passes over blocks of the last axis: m and l first, then p.

    Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3, a block at a time. When the maximum grows from m to
    m_new, every weight counted in l is too large by exp(m_new - m), all by the same factor, so one product repairs l.
    """
    x = _floating(x)
    m = np.full((*x.shape[:-1], 1), -np.inf, x.dtype)
    l = np.zeros_like(m)
    for start in _block_starts(x.shape[-1], block):
        x_block = x[..., start : start + block]
        m_new = np.maximum(m, _max(x_block))
        l = _exp_from(m, m_new) * l + _sum(_exp_from(x_block, m_new))
        m = m_new
    return _ratio(_exp_from(x, m), l)


# ---- attention, at once and block by block, in the dtype of the input


def _attention_inputs(q, k, v, causal, scale, mask):
    """q, k, v as floats of one dtype, the scale, and which keys (..., S_q, S_kv) each row sees."""
    q, k, v = (_floating(x) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    rows, keys = q.shape[-2], k.shape[-2]
    p = np.arange(rows)[:, None] + (0 if isinstance(causal, str) else keys - rows)
    seen = _visible(causal, None, p, np.arange(keys))
    if mask is not None:
        seen = seen & np.asarray(mask, bool)
    return q, k, v, _default_scale(q) if scale is None else scale, seen


def _visible(causal, window, p, j):
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


def _default_scale(q):
    return 1.0 / math.sqrt(max(q.shape[-1], 1))


def _scores(q, k, scale, seen):
    """`scale * q k^T`, and -inf at the keys that a row doesn't see."""
    s = _matmul(q, np.swapaxes(k, -1, -2), scale)
    return np.where(seen, s, s.dtype.type(-np.inf))


def _weigh(w, v, seen):
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


@_ieee
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
    return _ratio(_weigh(_exp_from(s, m), v, seen), l), _lse(m, l)


@_ieee
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
        m_new = np.maximum(m, _max(s))
        alpha, w = _exp_from(m, m_new), _exp_from(s, m_new)
        l = alpha * l + _sum(w)
        o = alpha * o + _weigh(w, v[..., keys, :], seen[..., keys])
        m = m_new
    return _ratio(o, l), _lse(m, l)


@_ieee
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
            visible = seen[at][..., keys]
            s = _scores(q[at], k[..., keys, :], scale, visible)
            m_new = np.maximum(m[at], _max(s))
            alpha, w = _exp_from(m[at], m_new), _exp_from(s, m_new)
            l_new = alpha * l[at] + _sum(w)
            o[at] = _ratio(alpha * l[at] * o[at] + _weigh(w, v[..., keys, :], visible), l_new)
            m[at], l[at] = m_new, l_new
    return o, _lse(m, l)


@_ieee
def merge(a, b):
    """The state over two disjoint sets of keys from their states `(m, l, o)`: m and l (..., 1), o (..., D_v).

    o is unnormalised. Associative and commutative up to rounding; the identity is (-inf, 0, 0).
    """
    (m_a, l_a, o_a), (m_b, l_b, o_b) = a, b
    m = np.maximum(m_a, m_b)
    alpha_a, alpha_b = _exp_from(m_a, m), _exp_from(m_b, m)
    return m, alpha_a * l_a + alpha_b * l_b, alpha_a * o_a + alpha_b * o_b


# ---- dropout


def philox(counter, key):
    """Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3).

    `counter` is four integers or integer arrays below 2^32, which broadcast, and `key` two integers below 2^32. Returns
    four uint64 arrays of words below 2^32.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = (int(k) for k in key)
    for r in range(10):
        round_k0 = np.uint64((k0 + r * 0x9E3779B9) & 0xFFFFFFFF)
        round_k1 = np.uint64((k1 + r * 0xBB67AE85) & 0xFFFFFFFF)
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (product1 >> half) ^ c1 ^ round_k0, (product0 >> half) ^ c3 ^ round_k1
        c1, c3 = product1 & low, product0 & low
    return c0, c1, c2, c3


def _seed_number(seed):
    """A seed as a number of 64 bits; a `numpy.random.Generator` is drawn from, once."""
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(0, 2**64, dtype=np.uint64))
    return None if seed is None else int(seed) % 2**64


def _kept(dropout, seed, b, h, i, j):
    """Which weights dropout keeps: word j & 3 of the counter (j >> 2, i, h, b) is at least floor(dropout * 2^32)."""
    seed = _seed_number(seed)
    if seed is None:
        raise ValueError(f"seed is needed where dropout is {dropout!r}")
    counter = [index % 2**32 for index in (j >> 2, i, h, b)]
    words = np.stack(np.broadcast_arrays(*philox(counter, (seed & 0xFFFFFFFF, seed >> 32))))
    word = np.take_along_axis(words, np.broadcast_to(j & 3, words.shape[1:])[None], axis=0)[0]
    return word >= math.floor(dropout * 2**32)


# ---- attention with every feature, in float64


def _to_heads(x, layout):
    """float64, (..., H, S, D) whatever the layout; a 2-D array is one head."""
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; it may be 'bhsd' or 'bshd'")
    x = np.asarray(x).astype(np.float64)
    if x.ndim == 2:
        return x[None]
    return x if layout == "bhsd" else np.swapaxes(x, -2, -3)


def _per_batch(x, batches):
    """A number, or one a batch, as (B, 1, 1, 1) int64."""
    return np.broadcast_to(np.asarray(x, np.int64).reshape(-1), (batches,))[:, None, None, None]


def _per_head(x, batches, heads):
    """A number, (H,) or (B, H), as (B, H, 1, 1)."""
    x = np.asarray(x, np.float64)
    x = x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x
    return np.broadcast_to(x, (batches, heads))[..., None, None]


def _spread_heads(x, heads, scaling):
    """K or V (B, H_kv, S_kv, D), times its `scaling` if any, once a query head: (B, H_q, S_kv, D)."""
    batches, kv_heads = x.shape[:2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k or v has {kv_heads}; q needs a multiple of them")
    if scaling is not None:
        x = x * _per_head(scaling, batches, kv_heads)
    return np.repeat(x, heads // kv_heads, axis=1)


def _add_bias(s, bias):
    """`s + bias`; a sum of finite numbers saturates, since -inf would make a mask of what is only a very low score."""
    limit = np.finfo(np.float64).max
    total = s + bias
    return np.where(np.isfinite(s) & np.isfinite(bias), np.clip(total, -limit, limit), total)


@_ieee
def attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, mask=None, alibi_slopes=None,
    sinks=None, q_lengths=None, kv_lengths=None, q_offset=None, k_offset=0, dropout=0.0, seed=None, training=True,
    k_scale=None, v_scale=None, layout="bhsd", return_lse=False, _first_batch=0,
):  # fmt: skip
    """softmax(rules(scale * q k^T)) v in float64, with every feature of `flash_numba.attention`, by its conventions.

    q (..., H_q, S_q, D), k (..., H_kv, S_kv, D), v (..., H_kv, S_kv, D_v), any dtype that converts to float64. 2-D
    arrays are one head; in layout "bshd" S stands before H. Leading axes broadcast; B counts them in C order. H_q is a
    multiple of H_kv, and query heads share K/V heads in contiguous groups.

    Row i stands at p = i + q_offset, by default 0 for causal="top-left" and L_kv - L_q (bottom-right) otherwise. Scores
    are scaled (1 / sqrt(D) by default), soft-capped (softcap * tanh(s / softcap)), biased by ALiBi
    (-slope * abs(p - j), Press et al. 2021, arXiv:2108.12409) and `bias`, and masked by: `causal` (j <= p), `window`
    (p - left <= j <= p + right; None or -1 = no limit), `mask` (boolean, True = keep; a float mask is one more bias),
    a bias of -inf, and `q_lengths`/`kv_lengths`. Mask and bias broadcast to (..., H_q, S_q, S_kv). `sinks` (H_q,) are
    logits in the maximum and the denominator only. `alibi_slopes` are (H_q,) or (B, H_q), lengths and `q_offset` one
    number or (B,), `k_scale`/`v_scale` one number, (H_kv,) or (B, H_kv). `k_offset` is the index of the first key
    given, for a chunk of a longer sequence. Dropout scales what it keeps, in the numerator only.

    Returns out (..., H_q, S_q, D_v) in the layout of q, float64, or `(out, lse)` with lse (..., H_q, S_q), a natural
    logarithm. A row without a visible key gives 0 and -inf (its sink, if it has one).
    `ValueError` for shapes that don't fit together, an unknown layout or causal, or dropout without a seed.
    """
    one_head = max(np.ndim(x) for x in (q, k, v)) == 2
    q, k, v = (_to_heads(x, layout) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    batches = math.prod(batch)
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]).reshape((batches, *x.shape[-3:])) for x in (q, k, v))
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (_spread_heads(x, heads, scaling) for x, scaling in ((k, k_scale), (v, v_scale)))

    b = np.arange(batches)[:, None, None, None] + _first_batch
    h = np.arange(heads)[:, None, None]
    i = np.arange(rows)[:, None]
    j = np.arange(keys) + k_offset
    q_length = _per_batch(rows if q_lengths is None else q_lengths, batches)
    kv_length = _per_batch(keys if kv_lengths is None else kv_lengths, batches)
    i_given = i + _per_batch(0 if q_offset is None else q_offset, batches)
    p = i + kv_length - q_length if q_offset is None and not isinstance(causal, str) else i_given

    s = np.matmul(q, np.swapaxes(k, -1, -2)) * (_default_scale(q) if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - _per_head(alibi_slopes, batches, heads) * np.abs(p - j)
    seen = _visible(causal, window, p, j) & (i < q_length) & (np.arange(keys) < kv_length)
    seen = np.broadcast_to(seen, s.shape)
    for rule in (bias, mask):
        if rule is None:
            continue
        rule = np.broadcast_to(rule, (*batch, heads, rows, keys)).reshape(s.shape)
        if rule.dtype == bool:
            seen = seen & rule
        else:
            rule = rule.astype(np.float64)
            seen = seen & (rule != -np.inf)
            s = _add_bias(s, rule)
    s = np.where(seen, s, -np.inf)

    m = _max(s)
    sink = -np.inf if sinks is None else _per_head(sinks, batches, heads)
    m = np.maximum(m, sink)
    w = _exp_from(s, m)
    l = _sum(w) + _exp_from(np.broadcast_to(sink, m.shape), m)
    if training and dropout > 0:
        w = np.where(_kept(dropout, seed, b, h, i_given, j), w / (1 - dropout), 0.0)
    out = _ratio(_weigh(w, v, seen), l).reshape((*batch, heads, rows, v.shape[-1]))
    lse = _lse(m, l).reshape((*batch, heads, rows))
    if one_head:
        out, lse = out[0], lse[0]
    elif layout == "bshd":
        out = np.swapaxes(out, -2, -3)
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse=False, **rules):
    """`attention` on packed sequences: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q; k, v likewise.

    q (total_q, H_q, D), k (total_kv, H_kv, D), v (total_kv, H_kv, D_v). Takes causal, window, scale, softcap,
    alibi_slopes, sinks, dropout, seed, training, k_scale and v_scale, with B the number of sequences; rows and keys
    count within their sequence. Returns out (total_q, H_q, D_v), float64, or `(out, lse)` with lse (H_q, total_q).
    Rows beyond the last sequence give 0 and -inf.
    """
    rules["seed"] = _seed_number(rules.get("seed"))
    by_sequence = ("alibi_slopes", "k_scale", "v_scale")
    per_sequence = {name: rules.pop(name) for name in by_sequence if np.ndim(rules.get(name, 0)) == 2}
    q, k, v = (np.asarray(x) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.full(q.shape[1::-1], -np.inf)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        own = {name: value[b] for name, value in per_sequence.items()}
        q_b, k_b, v_b = (np.swapaxes(x, 0, 1) for x in (q[rows], k[keys], v[keys]))
        out_b, lse[:, rows] = attention(q_b, k_b, v_b, **rules, **own, return_lse=True, _first_batch=b)
        out[rows] = np.swapaxes(out_b, 0, 1)
    return (out, lse) if return_lse else out


@_ieee
def merge_partials(outs, lses, sinks=None):
    """Attention over all keys from normalised results over disjoint parts of them: `(out, lse)`, float64.

    `outs` are arrays (..., H, S_q, D_v) and `lses` (..., H, S_q), one of each a part; a part without a visible key has
    lse = -inf. `sinks` (H,), left out of the parts, are added once here.
    """
    outs = np.stack([np.asarray(out, np.float64) for out in outs])
    lses = np.stack([np.asarray(lse, np.float64) for lse in lses])[..., None]
    sink = np.asarray(-np.inf if sinks is None else sinks, np.float64)
    sink = np.broadcast_to(sink.reshape((-1, 1, 1)[-min(lses.ndim - 1, 3) :]), lses.shape[1:])
    m = np.maximum(lses.max(axis=0), sink)
    weights = _exp_from(lses, m)
    l = weights.sum(axis=0) + _exp_from(sink, m)
    return _ratio((weights * outs).sum(axis=0), l), _lse(m, l)
