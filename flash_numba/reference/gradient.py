"""The gradient of attention with every feature, in float64 and with every score in memory."""

from typing import NamedTuple

import numpy as np

from .full import Scored, per_head, scored, sequences_of, to_heads
from .online import exp_from, ieee, weigh


class Gradients(NamedTuple):
    """The derivatives of a loss by each argument, in that argument's shape; None where there is none."""

    dq: np.ndarray | None
    dk: np.ndarray | None
    dv: np.ndarray | None
    dbias: np.ndarray | None = None
    dsinks: np.ndarray | None = None


class Differentiated(NamedTuple):
    """A call up to its scores' derivatives; matrices are (B, H, S_q, S_kv), and 0 where a pair doesn't count."""

    call: Scored
    counts: np.ndarray  # which keys have a part in which row: those it sees, unless the score is -inf
    p: np.ndarray
    dp: np.ndarray
    ds: np.ndarray  # by the score as the softmax takes it
    d_product: np.ndarray  # by q k^T
    delta: np.ndarray  # (B, H, S_q, 1), like lse
    lse: np.ndarray
    dout: np.ndarray  # (B, H, S_q, D_v), like out
    out: np.ndarray


@ieee
def differentiated(dout, q, k, v, out, lse, *, dlse=None, layout="bhsd", **rules):
    """The arguments of `attention_grad` as a `Differentiated`."""
    call = scored(q, k, v, layout=layout, **rules)
    rows = call.s.shape[:-1]
    dout, out = (to_heads(x, layout).reshape((*rows, call.v.shape[-1])) for x in (dout, out))
    lse = np.asarray(lse, np.float64).reshape((*rows, 1))
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse, np.float64).reshape(lse.shape)
    counts = call.s != -np.inf

    p = np.where(counts, np.minimum(exp_from(call.s, lse), 1.0), 0.0)  # whatever rounding the LSE suffered
    dp = np.where(counts, np.matmul(dout, np.swapaxes(call.v, -1, -2)) * call.keep, 0.0)
    has_key = counts.any(axis=-1, keepdims=True)
    delta = np.where(has_key, (dout * out).sum(axis=-1, keepdims=True), 0.0) - dlse
    ds = np.where(counts, p * (dp - delta), 0.0)
    d_product = np.where(counts, ds * call.cap_slope * call.scale, 0.0)
    return Differentiated(call, counts, p, dp, ds, d_product, delta, lse, dout, out)


@ieee
def attention_grad(dout, q, k, v, out, lse, *, dlse=None, layout="bhsd", **rules):
    """The gradient of `attention`, called with the same q, k, v and rules, from what came out of it: `Gradients`.

    `dout` and `dlse` are a loss's derivatives by `out` and `lse`, and have their shapes; dlse None is 0. With scores s,
    weights p = exp(s - lse), and d[x] for the derivative by x (Dao et al. 2022, arXiv:2205.14135, appendix B.2):

        d[p] = dout v^T           d[v] = p^T dout
        delta = sum(dout * out) - dlse, for each row
        d[s] = p * (d[p] - delta)
        d[q] = scale * d[s] k     d[k] = scale * d[s]^T q     d[bias] = d[s]     d[sink] = -sum(exp(sink - lse) * delta)

    Dropout multiplies p in d[v], and d[p], by 0 or 1 / (1 - dropout); soft-capping multiplies d[s] by 1 - (s / cap)^2
    on its way to q and k. `lse` may be that of more keys than are given, as for a chunk of them; the gradients of all
    chunks add up.

    A key counts for a row that sees it, unless its score is -inf. Every other pair adds exactly 0 to any gradient,
    whatever q, k, v and dout hold. So a row without a key has no gradient.

    dq, dk and dv are the derivatives by the arrays given (before `k_scale` and `v_scale`), summed over heads and axes
    that these are shared along; dbias is None unless `bias` holds floats, dsinks unless there are sinks.
    """
    x = differentiated(dout, q, k, v, out, lse, dlse=dlse, layout=layout, **rules)
    call, bias, sinks = x.call, rules.get("bias"), rules.get("sinks")
    seeing, seen = x.counts, np.swapaxes(x.counts, -1, -2)
    dq = weigh(x.d_product, call.k, seeing)
    dk = weigh(np.swapaxes(x.d_product, -1, -2), call.q, seen)
    dv = weigh(np.swapaxes(x.p * call.keep, -1, -2), x.dout, seen)
    dbias = dsinks = None
    if bias is not None and np.asarray(bias).dtype != bool:
        dbias = sum_to(x.ds.reshape((*call.batch, *x.ds.shape[1:])), np.shape(bias))
    if sinks is not None:
        of_rows = np.where(call.sink == -np.inf, 0.0, -exp_from(call.sink, x.lse) * x.delta)  # -inf is no sink
        dsinks = sum_heads(of_rows, np.shape(sinks))
    return Gradients(
        dq=sum_as(q, dq, call.batch, layout),
        dk=sum_as(k, dk, call.batch, layout, rules.get("k_scale")),
        dv=sum_as(v, dv, call.batch, layout, rules.get("v_scale")),
        dbias=dbias,
        dsinks=dsinks,
    )


def sum_to(x, shape):
    """`x` summed over the axes along which an array of `shape` was repeated to give it."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def sum_heads(x, shape):
    """(B, H, ...) summed to a number for each batch element and head, or each head, as `shape` has it."""
    x = x.sum(axis=tuple(range(2, x.ndim)))
    return x.sum(axis=0) if len(shape) == 1 else x.reshape(shape)


def sum_as(given, dx, batch, layout, scaling=None):
    """The derivative by q, k or v as given, from one for each batch element and query head, (B, H, S, D)."""
    shape = to_heads(given, layout).shape
    batches, heads, *matrix = dx.shape
    dx = dx.reshape((batches, shape[-3], heads // shape[-3], *matrix)).sum(axis=2)
    if scaling is not None:
        dx = dx * per_head(scaling, batches, shape[-3])
    dx = sum_to(dx.reshape((*batch, *dx.shape[1:])), shape)
    if np.ndim(given) == 2:
        return dx[0]
    return dx if layout == "bhsd" else np.swapaxes(dx, -2, -3)


def attention_varlen_grad(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, dlse=None, **rules):
    """`attention_grad` on packed sequences, as `attention_varlen`: dq, dk and dv in the shapes of q, k and v.

    lse and dlse are (H_q, total_q). Rows and keys beyond the last sequence have no gradient.
    """
    dout, q, k, v, out, lse = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dsinks = []
    for rows, keys, q_b, k_b, v_b, own in sequences_of(q, k, v, cu_seqlens_q, cu_seqlens_k, rules):
        dout_b, out_b = (np.swapaxes(x[rows], 0, 1) for x in (dout, out))
        dlse_b = None if dlse is None else np.asarray(dlse)[:, rows]
        gradients = attention_grad(dout_b, q_b, k_b, v_b, out_b, lse[:, rows], dlse=dlse_b, **own)
        for whole, places, part in ((dq, rows, gradients.dq), (dk, keys, gradients.dk), (dv, keys, gradients.dv)):
            whole[places] = np.swapaxes(part, 0, 1)
        dsinks.append(gradients.dsinks)
    if rules.get("sinks") is None:
        return Gradients(dq, dk, dv)
    by_sequence = np.reshape(dsinks, (len(dsinks), q.shape[1]))
    return Gradients(dq, dk, dv, None, by_sequence if np.ndim(rules["sinks"]) == 2 else by_sequence.sum(axis=0))
