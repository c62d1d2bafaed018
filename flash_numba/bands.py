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
6. Below the smallest normal number errors are absolute, half of a subnormal's spacing, for the output and each
   weight.

For standard normal q, k and v at D = 64 that is 1e-14 in float64, 5e-6 in float32, and with everything in bfloat16
about 1e-2 to 3e-2 from 128 keys up; what is measured lies at a tenth to a half of it, with large logits too.
"""

from math import sqrt
from typing import NamedTuple

import ml_dtypes
import numpy as np

from . import reference


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


@np.errstate(invalid="ignore", over="ignore")
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


def output_limit(dtype, v_max, score_max, *, keys, head_dim):
    """Allowed |error| of a compiled kernel's output in `dtype`, from the largest |v| and score (z of point 1) alone.

    Looser than `limit`, which knows each row's weights: here A and |O| may be as large as `v_max`, and S as large as
    `v_max / sqrt(2)`, which two opposite values sharing a row come to. Takes numbers, or arrays with a value a row.
    """
    fmt = TABLE[np.dtype(dtype)]
    allowed = fmt.accumulated * (_sums(keys) + _score(head_dim) * score_max / sqrt(2))
    if fmt.roundoff > fmt.accumulated:
        allowed = allowed + fmt.roundoff
    return allowed * v_max + fmt.tiny


def lse_limit(dtype, score_max, *, keys, head_dim):
    """Allowed |error| of a log-sum-exp from inputs in `dtype`; it is kept in the accumulation format.

    The error of the largest score passes through whole (points 1 and 3), and rounding the result adds u (|s| + log N).
    """
    return TABLE[np.dtype(dtype)].accumulated * (_sums(keys) + _score(head_dim) * score_max)
