"""How far a result may be from the truth: the one table of tolerance bands, for `flash-numba check` and for the tests.

Where the bands come from. Let u be the unit roundoff that sums and products are accumulated with (2**-53 for float64,
2**-24 for the rest), p the exact weights of a row, O its exact output, D the head dimension and N the number of keys.
Rounding errors are taken as independent and centred, so n of them grow as sqrt(n) (Higham and Mary 2019, "A new
approach to probabilistic rounding error analysis"). One is about 0.4 u times what is rounded; the largest of many
results is four standard deviations off, and the difference of two results sqrt(2) times that.

1. A score is a dot product of D terms. If it ends up large, its partial sums grow steadily, partial sum t is rounded
   by about 0.4 u |s| t / D, and the root of the sum of squares is 0.23 sqrt(D) u |s|. If it doesn't, they wander, and
   it is 0.3 sqrt(D) u s0, where s0 = scale |q| |k| / sqrt(D) is what a score of unrelated vectors would be. Folding
   the scale into the query and the last rounding add a few u |s|. Allowed: (4 + 2 sqrt(D)) u z, with z = |s| + s0,
   the largest of the row. So errors grow with the logits.
2. exp turns an error of the score into a relative error e_j of the weight. What all weights share cancels between
   numerator and denominator; sum(p_j e_j (v_j - O)) is left, which is the error of a score times the spread S =
   sqrt(sum(p_j**2 (v_j - O)**2)): small where many keys share a row, and where one key has it all.
3. A sum of N terms is rounded N times, in the worst order always at full size, for numerator and denominator each;
   exp itself, rescaling and the division are a few roundings. Allowed: (8 + 3 sqrt(N)) u A, where A = sum(p_j |v_j|)
   is the size of the terms before they cancel.
4. A kernel with 16-bit inputs accumulates in float32 and rounds once, at the end: one unit roundoff u16 of its
   output.
5. NumPy in 16 bits rounds after every step: a score (one unit apart in two evaluations, where float32 sums straddle
   the middle), weights, and both sums twice a block. Allowed on top, for B blocks: u16 ((2 + 4 sqrt(B)) (|O| + S) + 2
   z S).
6. A gradient takes P from a given LSE, so the error of a score is no longer shared by numerator and denominator: the
   relative error of p is (4 + 2 sqrt(D)) u z + u (|lse| + 8). In ds = p (dp - delta), dp and delta are dot products
   of D_v terms as in point 1; the error of delta is shared by all keys of its row. Gradients are sums over n of such
   terms, for which points 2 and 3 hold: the root of the sum of squares of their errors, and (8 + 3 sqrt(n)) u times
   the sum of their sizes.
7. Below the smallest normal number errors are absolute, half of a subnormal's spacing, for the output and each
   weight.

For standard normal q, k and v at D = 64 that is 1e-14 in float64, 5e-6 in float32, and with everything in bfloat16
about 1e-2 to 3e-2 from 128 keys up; what is measured lies at a tenth to a half of it, with large logits too.
"""

from math import sqrt
from typing import NamedTuple

import ml_dtypes
import numpy as np

from . import reference
from .reference import Gradients
from .reference.gradient import differentiated, sum_as, sum_heads, sum_to


class Format(NamedTuple):
    """What the bands need to know of a dtype."""

    roundoff: float
    """Largest relative error of rounding to it, half of the spacing above 1."""
    accumulated: float
    """The roundoff of the format that sums and products are kept in."""
    tiny: float
    """Largest error of rounding near 0, half of the spacing of subnormal numbers (0 where float64 can't hold that)."""


TABLE = {
    np.dtype(np.float64): Format(roundoff=2.0**-53, accumulated=2.0**-53, tiny=0.0),
    np.dtype(np.float32): Format(roundoff=2.0**-24, accumulated=2.0**-24, tiny=2.0**-150),
    np.dtype(np.float16): Format(roundoff=2.0**-11, accumulated=2.0**-24, tiny=2.0**-25),
    np.dtype(ml_dtypes.bfloat16): Format(roundoff=2.0**-8, accumulated=2.0**-24, tiny=2.0**-134),
}


def _score(head_dim):
    """Point 1: error of a score in units of u z."""
    return 4 + 2 * sqrt(head_dim)


def _sums(keys):
    """Point 3: error of weights, sums and division in units of u A."""
    return 8 + 3 * sqrt(keys)


class Exact(NamedTuple):
    """A problem's result in float64, and what errors are measured by: (..., S_q, D_v), lse and score_max (..., S_q)."""

    out: np.ndarray
    lse: np.ndarray
    size: np.ndarray
    """A = sum(p |v|): how large the terms are that cancel to `out`. Relative errors are relative to it."""
    spread: np.ndarray
    """S = sqrt(sum(p**2 (v - out)**2)): how far a relative error of 1 in each weight would move `out`."""
    score_max: np.ndarray
    """z = |s| + s0 (point 1), the largest among the keys that the row sees."""
    keys: int
    head_dim: int
    v_max: float


@np.errstate(all="ignore")
def exact(q, k, v, **rules):
    """`Exact` for q, k and v as (..., H, S, D) and any `rules` of `reference.attention`. Holds S x S matrices.

    NaN and infinities of the inputs are in `out` and `lse`, where they belong, and count for nothing in the rest.
    """
    out, lse = reference.attention(q, k, v, **rules, return_lse=True)
    factors = {name: rules.pop(name, None) for name in ("k_scale", "v_scale")}
    # With the identity for V the output is the weights, by the oracle's own rules.
    p = np.nan_to_num(reference.attention(q, k, np.eye(k.shape[-2]), k_scale=factors["k_scale"], **rules))

    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (
        x if factor is None else x * np.asarray(factor, np.float64)[..., None, None]
        for x, factor in zip((k, v), factors.values(), strict=True)
    )
    heads = q.shape[-3] if q.ndim > 2 else 1
    k, v = (x if x.ndim == 2 else np.repeat(x, heads // x.shape[-3], axis=-3) for x in (k, v))
    v = np.nan_to_num(v, posinf=0, neginf=0)
    mean, squares = p @ v, p * p
    spread = squares @ (v * v) - 2 * mean * (squares @ v) + mean * mean * squares.sum(axis=-1, keepdims=True)
    if rules.get("dropout"):
        # An error of l moves the whole output, however few of the weights in it dropout keeps.
        spread = spread + mean * mean
    return Exact(
        out=out,
        lse=lse,
        size=p @ np.abs(v),
        spread=np.sqrt(np.maximum(spread, 0.0)),
        score_max=np.where(p > 0, _score_sizes(q, k, rules), 0.0).max(axis=-1, initial=0.0),
        keys=k.shape[-2],
        head_dim=q.shape[-1],
        v_max=float(np.abs(v).max(initial=0.0)),
    )


def _score_sizes(q, k, rules):
    """z = |s| + s0 of every score (point 1), and whatever biases add to |s|."""
    scale = rules.get("scale")
    scale = 1 / sqrt(max(q.shape[-1], 1)) if scale is None else abs(scale)
    lengths = np.linalg.norm(q, axis=-1)[..., :, None] * np.linalg.norm(k, axis=-1)[..., None, :]
    sizes = scale * (np.abs(q @ np.swapaxes(k, -1, -2)) + lengths / sqrt(max(q.shape[-1], 1)))
    sizes = np.nan_to_num(sizes, posinf=0.0)
    for name in ("bias", "mask"):
        term = rules.get(name)
        if term is not None and np.asarray(term).dtype != bool:
            # One beyond 1e5 outweighs every other key, or is alike in all keys of the row.
            sizes = sizes + np.minimum(np.nan_to_num(np.abs(np.asarray(term).astype(np.float64))), 1e5)
    if rules.get("alibi_slopes") is not None:
        offsets = [rules[name] for name in ("q_offset", "k_offset") if rules.get(name) is not None]
        farthest = sum(sizes.shape[-2:]) + sum(np.max(np.abs(offset), initial=0) for offset in offsets)
        sizes = sizes + np.max(np.abs(rules["alibi_slopes"]), initial=0) * farthest
    return sizes


def limit(dtype, truth, *, blocks=None):
    """Allowed |error| of each element of an output in `dtype`: an array like `truth.out`, float64.

    `truth` is the problem's `Exact`. `blocks` None is for a compiled kernel, compared with float64; a number is for
    `reference.online_attention` in that many blocks, compared with `reference.one_shot_attention` in the same dtype.
    """
    fmt = TABLE[np.dtype(dtype)]
    score = truth.score_max[..., None]
    output = np.abs(truth.out)
    allowed = fmt.accumulated * (_sums(truth.keys) * truth.size + _score(truth.head_dim) * score * truth.spread)
    if fmt.roundoff > fmt.accumulated:
        if blocks is None:
            allowed += fmt.roundoff * output
        else:
            allowed += fmt.roundoff * ((2 + 4 * sqrt(blocks)) * (output + truth.spread) + 2 * score * truth.spread)
            allowed += fmt.tiny * sqrt(truth.keys) * truth.v_max
    return allowed + fmt.tiny


def lse_limit(dtype, score_max, *, keys, head_dim):
    """Allowed |error| of a log-sum-exp from inputs in `dtype`; it is kept in the accumulation format.

    The error of the largest score passes through whole (points 1 and 3), and rounding the result adds u (|s| + log N).
    """
    return TABLE[np.dtype(dtype)].accumulated * (_sums(keys) + _score(head_dim) * score_max)


class GradientBands(NamedTuple):
    """For each element of each gradient, in float64."""

    limits: Gradients
    """Allowed |error|, before a gradient is rounded to its own dtype (`rounding`)."""
    sizes: Gradients
    """How large the terms are that cancel to it: in ds, p (|dp| + |delta|). Relative errors are relative to it."""


@np.errstate(all="ignore")
def gradient_bands(dtype, dout, q, k, v, out, lse, *, dlse=None, layout="bhsd", **rules) -> GradientBands:
    """How exact a compiled kernel's gradients of arrays in `dtype` have to be (point 6).

    The arguments are those of `reference.attention_grad`, whose results the kernel's are compared with: out and lse
    count as exact. Holds S x S matrices. NaN and infinities count for nothing.
    """
    u = TABLE[np.dtype(dtype)].accumulated
    x = differentiated(dout, q, k, v, out, lse, dlse=dlse, layout=layout, **rules)
    call = x.call
    batches, heads = x.p.shape[:2]
    q_by_batch, k_by_batch = (part.reshape((*call.batch, *part.shape[1:])) for part in (call.q, call.k))
    z = np.broadcast_to(_score_sizes(q_by_batch, k_by_batch, rules), (*call.batch, *x.p.shape[1:])).reshape(x.p.shape)
    parts = (call.q, call.k, call.v, x.p, x.dp, x.ds, x.d_product, x.delta, x.lse, x.dout, x.out, call.sink)
    queries, keys, values, p, dp, ds, d_product, delta, row_lse, douts, outs, sink = (
        np.abs(np.nan_to_num(part, posinf=0, neginf=0)) for part in parts
    )

    # errors in units of u: of p, and of ds, apart from delta's, which is shared along a row
    wide = np.float64 if u == TABLE[np.dtype(np.float64)].accumulated else np.float32
    least = float(np.finfo(wide).smallest_normal) / u  # smaller weights may be taken for 0
    of_p = p * (_score(call.q.shape[-1]) * z + np.minimum(row_lse, 1e30) + 8) + least
    dot, root = _score(call.v.shape[-1]), sqrt(call.v.shape[-1])
    of_dp = dot * (dp + _lengths(douts)[..., :, None] * _lengths(values)[..., None, :] / root * call.keep)
    of_delta = dot * (delta + (_lengths(douts) * _lengths(outs))[..., None] / root)
    of_ds = np.where(x.counts, of_p * (dp + delta) + p * of_dp, 0.0)
    # and of the derivative by q k^T
    factor = np.abs(call.scale) * np.nan_to_num(call.cap_slope)
    of_slope = 8 + 2 * _score(call.q.shape[-1]) * z / (rules.get("softcap") or np.inf)
    of_product = factor * of_ds + np.abs(call.scale) * ds * of_slope
    shared = factor * p
    weights = p * call.keep
    of_weights = of_p * call.keep

    # sums of squared errors, of what is rounded, and of sizes before anything cancels
    whole_ds = p * (dp + delta)
    whole_product = factor * whole_ds
    signed_keys = np.nan_to_num(call.k, posinf=0, neginf=0)
    by_key = (0, 1, 3, 2)
    k_scale, v_scale = (1.0 if rules.get(name) is None else rules[name] for name in ("k_scale", "v_scale"))
    many = x.p.shape[-2] * heads * max(batches, 1)  # at most as many terms meet in a key's gradient

    def of(given, squares, rounded, size, terms, scaling=1.0):
        scaling = np.abs(np.asarray(scaling, np.float64))
        squares, rounded, size = (
            sum_as(given, part, call.batch, layout, by)
            for part, by in ((squares, scaling * scaling), (rounded, scaling), (size, scaling))
        )
        return u * (np.sqrt(squares) + _sums(terms) * rounded), size

    dq_squares = of_product**2 @ keys**2 + (of_delta * np.abs(shared @ signed_keys)) ** 2
    dk_squares = (of_product**2 + (shared * of_delta) ** 2).transpose(by_key) @ queries**2
    dk_sums, dk_sizes = (part.transpose(by_key) @ queries for part in (d_product, whole_product))
    dv_sums = weights.transpose(by_key) @ douts
    found = [
        of(q, dq_squares, d_product @ keys, whole_product @ keys, p.shape[-1]),
        of(k, dk_squares, dk_sums, dk_sizes, many, k_scale),
        of(v, (of_weights**2).transpose(by_key) @ douts**2, dv_sums, dv_sums, many, v_scale),
    ]
    bias, sinks = rules.get("bias"), rules.get("sinks")
    if bias is None or np.asarray(bias).dtype == bool:
        found.append((None, None))
    else:
        square, of_row, rounded, size = (
            sum_to(part.reshape((*call.batch, *part.shape[1:])), np.shape(bias))
            for part in (of_ds**2, p * of_delta, ds, whole_ds)
        )
        found.append((u * (np.sqrt(square) + of_row + _sums(p.size / max(np.size(bias), 1)) * rounded), size))
    if sinks is None:
        found.append((None, None))
    else:
        p_sink = np.exp(np.minimum(np.nan_to_num(call.sink - x.lse), 0))
        squares = sum_heads((p_sink * ((row_lse + sink + 8) * delta + of_delta)) ** 2, np.shape(sinks))
        size = sum_heads(p_sink * delta, np.shape(sinks))
        found.append((u * (np.sqrt(squares) + _sums(p.shape[-2] * max(batches, 1)) * size), size))
    limits, sizes = zip(*found, strict=True)
    return GradientBands(Gradients(*limits), Gradients(*sizes))


def _lengths(x):
    return np.linalg.norm(x, axis=-1)


def rounding(dtype, exact):
    """|error| of rounding float64 numbers to `dtype`, at most."""
    fmt = TABLE[np.dtype(dtype)]
    return fmt.roundoff * np.abs(exact) + fmt.tiny
