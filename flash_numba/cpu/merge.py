"""Partial results put together in NumPy, the twin of `gpu/merge.py`."""

import numpy as np

from .. import recurrence
from ..problem import in_base_2
from ..scores import LOG2E


def merge(
    outs: list[np.ndarray], lses: list[np.ndarray], sinks: np.ndarray | None, out: np.ndarray, lse: np.ndarray
) -> None:
    """Fill `out` and `lse` in. Arrays are (..., H, rows, columns) and (..., H, rows), or without H for one head.

    sinks: (1, H) or (B, H), B counting the axes left of the heads.
    """
    one, log2e = lse.dtype.type(1), lse.dtype.type(LOG2E)
    m = np.full(lse.shape, -np.inf, lse.dtype)
    l = np.zeros_like(m)
    total = np.zeros(out.shape, lse.dtype)
    with np.errstate(all="ignore"):  # NaN is passed on, and small weights underflow
        for part, part_lse in zip(outs, lses, strict=True):
            m, l, alpha, beta = recurrence.merge(m, l, part_lse * log2e, one)
            empty = (part_lse == -np.inf)[..., None]  # whatever its output holds
            total = total * alpha[..., None] + np.where(empty, 0, part) * beta[..., None]
        sink = -np.inf if sinks is None else row_sinks(in_base_2(sinks, lse.dtype), lse.shape)
        row_lse, factor = recurrence.finalize(m, l, np.asarray(sink, lse.dtype))
        np.multiply(total, factor[..., None], out=out, casting="unsafe")
        lse[...] = row_lse


def row_sinks(sinks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(1 or B, H) sinks in a form that broadcasts to rows of a shape (..., H, rows), or (rows,)."""
    if len(shape) < 2:
        return sinks[0]
    batch = shape[:-2] if len(sinks) > 1 else ()
    return sinks.reshape(*batch, shape[-2], 1)
