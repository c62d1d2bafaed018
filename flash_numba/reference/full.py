"""Attention with every feature, in float64 and with every score in memory."""

import math
from typing import NamedTuple

import numpy as np

from .dropout import kept, seed_number
from .online import default_scale, exp_from, ieee, ratio, row_lse, row_max, row_sum, visible, weigh


def to_heads(x, layout):
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


def per_head(x, batches, heads):
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
        x = x * per_head(scaling, batches, kv_heads)
    return np.repeat(x, heads // kv_heads, axis=1)


def _add_bias(s, bias):
    """`s + bias`; a sum of finite numbers saturates, since -inf would make a mask of what is only a very low score."""
    limit = np.finfo(np.float64).max
    total = s + bias
    return np.where(np.isfinite(s) & np.isfinite(bias), np.clip(total, -limit, limit), total)


class Scored(NamedTuple):
    """A call up to its scores: everything float64, the leading axes one, K and V once a query head."""

    batch: tuple[int, ...]
    q: np.ndarray  # (B, H, S_q, D)
    k: np.ndarray  # (B, H, S_kv, D), times k_scale
    v: np.ndarray  # (B, H, S_kv, D_v), times v_scale
    scale: float
    s: np.ndarray  # (B, H, S_q, S_kv), -inf where a row doesn't see a key
    seen: np.ndarray
    cap_slope: np.ndarray | float  # of the soft-capped score by the score
    sink: np.ndarray | float  # (B, H, 1, 1), or -inf
    keep: np.ndarray | float  # what dropout multiplies weights by: 0, or 1 / (1 - dropout)


def scored(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, mask=None, alibi_slopes=None,
    sinks=None, q_lengths=None, kv_lengths=None, q_offset=None, k_offset=0, dropout=0.0, seed=None, training=True,
    k_scale=None, v_scale=None, layout="bhsd", _first_batch=0, _counts_from_offset=True,
):  # fmt: skip
    """The arguments of `attention` as a `Scored`.

    _first_batch: index of the first batch element, for dropout. _counts_from_offset: whether it counts rows from
    `q_offset`, as they stand in a longer sequence.
    """
    q, k, v = (to_heads(x, layout) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    batches = math.prod(batch)
    q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]).reshape((batches, *x.shape[-3:])) for x in (q, k, v))
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (_spread_heads(x, heads, scaling) for x, scaling in ((k, k_scale), (v, v_scale)))
    scale = default_scale(q) if scale is None else scale

    b = np.arange(batches)[:, None, None, None] + _first_batch
    h = np.arange(heads)[:, None, None]
    i = np.arange(rows)[:, None]
    j = np.arange(keys) + k_offset
    q_length = _per_batch(rows if q_lengths is None else q_lengths, batches)
    kv_length = _per_batch(keys if kv_lengths is None else kv_lengths, batches)
    i_given = i + _per_batch(0 if q_offset is None else q_offset, batches)
    p = i + kv_length - q_length if q_offset is None and not isinstance(causal, str) else i_given

    s = np.matmul(q, np.swapaxes(k, -1, -2)) * scale
    cap_slope: np.ndarray | float = 1.0
    if softcap is not None:
        capped = np.tanh(s / softcap)
        s, cap_slope = softcap * capped, 1 - capped * capped
    if alibi_slopes is not None:
        s = s - per_head(alibi_slopes, batches, heads) * np.abs(p - j)
    seen = visible(causal, window, p, j) & (i < q_length) & (np.arange(keys) < kv_length)
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
    keep: np.ndarray | float = 1.0
    if training and dropout > 0:
        row_index = i_given if _counts_from_offset else i
        keep = np.where(kept(dropout, seed, b, h, row_index, j), 1 / (1 - dropout), 0.0)
    return Scored(
        batch=batch,
        q=q,
        k=k,
        v=v,
        scale=scale,
        s=np.where(seen, s, -np.inf),
        seen=seen,
        cap_slope=cap_slope,
        sink=-np.inf if sinks is None else per_head(sinks, batches, heads),
        keep=keep,
    )


@ieee
def attention(q, k, v, *, layout="bhsd", return_lse=False, **rules):
    """softmax(rules(scale * q k^T)) v in float64, with every feature of `flash_numba.attention`, by its conventions.

    q (..., H_q, S_q, D), k (..., H_kv, S_kv, D), v (..., H_kv, S_kv, D_v), any dtype that converts to float64. 2-D
    arrays are one head; in layout "bshd" S stands before H. Leading axes broadcast; B counts them in C order. H_q is a
    multiple of H_kv, and query heads share K/V heads in contiguous groups.

    The rules are causal, window, scale, softcap, bias, mask, alibi_slopes, sinks, q_lengths, kv_lengths, q_offset,
    k_offset, dropout, seed, training, k_scale and v_scale. Row i stands at p = i + q_offset, by default 0 for
    causal="top-left" and L_kv - L_q (bottom-right) otherwise. Scores are scaled (1 / sqrt(D) by default), soft-capped
    (softcap * tanh(s / softcap)), biased by ALiBi (-slope * abs(p - j), Press et al. 2021, arXiv:2108.12409) and
    `bias`, and masked by: `causal` (j <= p), `window` (p - left <= j <= p + right; None or -1 = no limit), `mask`
    (boolean, True = keep; a float mask is one more bias), a bias of -inf, and `q_lengths`/`kv_lengths`. Mask and bias
    broadcast to (..., H_q, S_q, S_kv). `sinks` (H_q,) are logits in the maximum and the denominator only.
    `alibi_slopes` are (H_q,) or (B, H_q), lengths and `q_offset` one number or (B,), `k_scale`/`v_scale` one number,
    (H_kv,) or (B, H_kv). `k_offset` is the index of the first key given, for a chunk of a longer sequence. Dropout
    scales what it keeps, in the numerator only.

    Returns out (..., H_q, S_q, D_v) in the layout of q, float64, or `(out, lse)` with lse (..., H_q, S_q), a natural
    logarithm. A row without a visible key gives 0 and -inf (its sink, if it has one).
    `ValueError` for shapes that don't fit together, an unknown layout or causal, or dropout without a seed.
    """
    one_head = max(np.ndim(x) for x in (q, k, v)) == 2
    call = scored(q, k, v, layout=layout, **rules)
    m = np.maximum(row_max(call.s), call.sink)
    w = exp_from(call.s, m)
    l = row_sum(w) + exp_from(np.broadcast_to(call.sink, m.shape), m)
    out = ratio(weigh(np.where(call.keep == 0, 0.0, w * call.keep), call.v, call.seen), l)
    lse = row_lse(m, l)
    out, lse = (x.reshape(call.batch + x.shape[1:]) for x in (out, lse))
    if one_head:
        out, lse = out[0], lse[0]
    elif layout == "bshd":
        out = np.swapaxes(out, -2, -3)
    return (out, lse) if return_lse else out


def sequences_of(q, k, v, cu_seqlens_q, cu_seqlens_k, rules):
    """Packed sequences one by one: `(rows, keys, q, k, v, rules)` each, q, k and v heads first."""
    rules = rules | {"seed": seed_number(rules.get("seed"))}
    by_sequence = ("alibi_slopes", "sinks", "k_scale", "v_scale")
    per_sequence = {name: rules.pop(name) for name in by_sequence if np.ndim(rules.get(name, 0)) == 2}
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        own = {name: value[b] for name, value in per_sequence.items()}
        heads_first = (np.swapaxes(x, 0, 1) for x in (q[rows], k[keys], v[keys]))
        yield rows, keys, *heads_first, rules | own | {"_first_batch": b}


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse=False, **rules):
    """`attention` on packed sequences: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q; k, v likewise.

    q (total_q, H_q, D), k (total_kv, H_kv, D), v (total_kv, H_kv, D_v). Takes causal, window, scale, softcap,
    alibi_slopes, sinks, dropout, seed, training, k_scale and v_scale, with B the number of sequences; rows and keys
    count within their sequence. Returns out (total_q, H_q, D_v), float64, or `(out, lse)` with lse (H_q, total_q).
    Rows beyond the last sequence give 0 and -inf.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.full(q.shape[1::-1], -np.inf)
    for rows, _, q_b, k_b, v_b, own in sequences_of(q, k, v, cu_seqlens_q, cu_seqlens_k, rules):
        out_b, lse[:, rows] = attention(q_b, k_b, v_b, **own, return_lse=True)
        out[rows] = np.swapaxes(out_b, 0, 1)
    return (out, lse) if return_lse else out


@ieee
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
    weights = exp_from(lses, m)
    l = weights.sum(axis=0) + exp_from(sink, m)
    return ratio((weights * outs).sum(axis=0), l), row_lse(m, l)
