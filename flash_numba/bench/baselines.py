"""Attention in NumPy as one writes it for speed: in place, few passes, the query heads of a group in one product.

What flash_numba is compared with. The oracle, `flash_numba.reference`, is written to be read and takes up to twice as
long, so a ratio to it would flatter. No guard for rows that see no key: the shapes here have none.
"""

import math

import numpy as np

# Keys a block of the streaming version: few enough that a head's scores stay in the last-level cache.
BLOCK = 256


def grouped(q, k):
    """q scaled, (B, H_kv, group * S_q, D): rows of one K/V head together."""
    scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
    return (q * scale).reshape(*k.shape[:-2], -1, q.shape[-1])


def unseen(q, k, keys=slice(None)):
    """(S_q, keys), True above the diagonal that ends in the lower right corner."""
    rows, columns = q.shape[-2], k.shape[-2]
    return np.arange(columns)[keys] > np.arange(rows)[:, None] + (columns - rows)


def hide(scores, above):
    """Set what the causal mask hides to -inf, in every head of each group."""
    by_head = scores.reshape(*scores.shape[:-2], -1, *above.shape)
    np.copyto(by_head, -np.inf, where=above)


def one_shot(q, k, v, causal=False):
    """softmax(q k^T / sqrt(D)) v with every score in memory."""
    scores = np.matmul(grouped(q, k), k.swapaxes(-1, -2))
    if causal:
        hide(scores, unseen(q, k))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = np.matmul(scores, v)
    out /= scores.sum(axis=-1, keepdims=True)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def online(q, k, v, causal=False, block=BLOCK):
    """One-shot attention's formula, `block` keys at a time, with a running maximum and sum."""
    rows = grouped(q, k)
    m = np.full((*rows.shape[:-1], 1), -np.inf, q.dtype)
    l = np.zeros_like(m)
    out = np.zeros((*rows.shape[:-1], v.shape[-1]), q.dtype)
    for start in range(0, k.shape[-2], block):
        keys = slice(start, start + block)
        scores = np.matmul(rows, k[..., keys, :].swapaxes(-1, -2))
        if causal:
            hide(scores, unseen(q, k, keys))
        m_new = np.maximum(m, scores.max(axis=-1, keepdims=True))
        alpha = np.exp(m - m_new)
        scores -= m_new
        np.exp(scores, out=scores)
        l *= alpha
        l += scores.sum(axis=-1, keepdims=True)
        out *= alpha
        out += np.matmul(scores, v[..., keys, :])
        m = m_new
    out /= l
    return out.reshape(*q.shape[:-1], v.shape[-1])


def one_shot_grad(q, k, v, dout, causal=False):
    """The gradient of `one_shot`, its weights computed anew: (dq, dk, dv)."""
    rows = grouped(q, k)
    weights = np.matmul(rows, k.swapaxes(-1, -2))
    if causal:
        hide(weights, unseen(q, k))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    dout = dout.reshape(*rows.shape[:-1], v.shape[-1])
    dv = np.matmul(weights.swapaxes(-1, -2), dout)
    scores = np.matmul(dout, v.swapaxes(-1, -2))
    scores -= np.vecdot(weights, scores)[..., None]
    scores *= weights
    dq = np.matmul(scores, k)
    dq *= q.dtype.type(1 / math.sqrt(q.shape[-1]))
    return dq.reshape(q.shape), np.matmul(scores.swapaxes(-1, -2), rows), dv
