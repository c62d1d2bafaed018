"""The numerical report behind `flash-numba check`: measured errors, each next to the band that `bands` allows.

Comparisons, for each dtype, sequence length and kind of logits:

* "online": `reference.online_attention` against `reference.one_shot_attention`, both in NumPy, every step in the dtype.
  What streaming itself costs.
* "kernel": the compiled `flash_numba.attention` against the float64 oracle on the same inputs. What a user gets.
* "dq", "dk" and "dv": the compiled `flash_numba.attention_grad` against the oracle's, from the same output and LSE,
  which are the exact ones in their formats.
"""

import itertools
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

import numpy as np

from . import bands, gradient, interface, reference

DTYPES = {dtype.name: dtype for dtype in bands.TABLE}
SIZES = (16, 128, 1000)
HEADS, HEAD_DIM = 2, 64
BLOCKS = 8
"""How many blocks of keys the online softmax goes through."""
LOGITS = {"normal": 1.0, "large": 20.0}
"""Factor of the queries: scores of standard deviation 1, and of 20, where nearly all the weight is on one key."""


GRADIENTS = ("dq", "dk", "dv")
COMPARISONS = ("online", "kernel", *GRADIENTS)


class Measurement(NamedTuple):
    """A line of the report: absolute errors, and relative to the size of the terms that cancel to an element, which
    is sum(p |v|) for an output. A band is what the worst element may have."""

    comparison: str
    dtype: str
    keys: int
    logits: str
    abs_max: float
    abs_band: float
    rel_p50: float
    rel_p99: float
    rel_max: float
    rel_band: float
    lse_max: float | None
    lse_band: float | None
    share: float
    """The largest error of an element as a share of what that element is allowed."""

    @property
    def ok(self) -> bool:
        """Whether every element lies within its band; a NaN never does."""
        return self.share <= 1


class Case(NamedTuple):
    dtype: str
    size: int
    logits: str


def cases(dtypes: Iterable[str] = tuple(DTYPES), sizes: Iterable[int] = SIZES) -> list[Case]:
    """Every combination with every kind of logits. `dtypes` are keys of `DTYPES`."""
    return [Case(*case) for case in itertools.product(dtypes, sizes, LOGITS)]


def measure(case: Case, seed: int = 0, head_dim: int = HEAD_DIM) -> list[Measurement]:
    """Every comparison, on q, k and v of (2, size, head_dim)."""
    rng = np.random.default_rng([seed, case.size])
    q, k, v = rng.standard_normal((3, HEADS, case.size, head_dim))
    dout = rng.standard_normal(v.shape)
    q, k, v, dout = (x.astype(DTYPES[case.dtype]) for x in (LOGITS[case.logits] * q, k, v, dout))
    truth = bands.exact(q, k, v)
    return [
        online_against_one_shot(q, k, v, truth, case.logits),
        kernel_against_oracle(q, k, v, truth, case.logits),
        *gradients_against_oracle(dout, q, k, v, truth, case.logits),
    ]


def online_against_one_shot(q, k, v, truth: bands.Exact, logits: str) -> Measurement:
    one_shot, _ = reference.one_shot_attention(q, k, v)
    online, _ = reference.online_attention(q, k, v, block=ceil(truth.keys / BLOCKS))
    limit = bands.limit(q.dtype, truth, blocks=BLOCKS)
    return measured(COMPARISONS[0], logits, truth.keys, truth.size, online, one_shot, limit)


def kernel_against_oracle(q, k, v, truth: bands.Exact, logits: str) -> Measurement:
    out, lse = interface.attention(q, k, v, return_lse=True)
    oracle, oracle_lse = reference.attention(q, k, v, return_lse=True)
    row = measured(COMPARISONS[1], logits, truth.keys, truth.size, out, oracle, bands.limit(q.dtype, truth))
    lse_error = np.abs(lse - oracle_lse)
    lse_limit = bands.lse_limit(q.dtype, truth.score_max, keys=truth.keys, head_dim=truth.head_dim)
    worst = np.argmax(lse_error)
    return row._replace(
        lse_max=float(lse_error.flat[worst]),
        lse_band=float(lse_limit.flat[worst]),
        share=float(np.maximum(row.share, (lse_error / lse_limit).max())),
    )


def gradients_against_oracle(dout, q, k, v, truth: bands.Exact, logits: str) -> list[Measurement]:
    wide = np.float64 if q.dtype == np.float64 else np.float32
    operands = dout, q, k, v, truth.out.astype(q.dtype), truth.lse.astype(wide)
    found = gradient.attention_grad(*operands)
    exact = reference.attention_grad(*operands)
    limits, sizes = bands.gradient_bands(q.dtype, *operands)
    rows = zip(GRADIENTS, found[:3], exact[:3], limits[:3], sizes[:3], strict=True)
    return [
        measured(name, logits, truth.keys, size, dx, want, limit + bands.rounding(q.dtype, want))
        for name, dx, want, limit, size in rows
    ]


def measured(comparison: str, logits: str, keys: int, size, out, expected, limit) -> Measurement:
    error = np.abs(out.astype(np.float64) - expected.astype(np.float64))
    relative = error / size
    worst, relatively_worst = np.argmax(error), np.argmax(relative)
    return Measurement(
        comparison=comparison,
        dtype=out.dtype.name,
        keys=keys,
        logits=logits,
        abs_max=float(error.flat[worst]),
        abs_band=float(limit.flat[worst]),
        rel_p50=float(np.percentile(relative, 50)),
        rel_p99=float(np.percentile(relative, 99)),
        rel_max=float(relative.flat[relatively_worst]),
        rel_band=float((limit / size).flat[relatively_worst]),
        lse_max=None,
        lse_band=None,
        share=float((error / limit).max()),
    )
