"""The few primitive operations that the recurrence and the score rules are written in.

The bodies here are their meaning on Python numbers and NumPy arrays. A compiled target gives the same operations their
meaning there (`cpu/primitives.py` for SIMD lanes, `gpu/primitives.py` for CUDA threads), so `recurrence.py` and
`scores.py` need no second version.
"""

import numpy as np


def select(mask, a, b):
    """`a` where `mask` holds, else `b`. Never arithmetic on the mask: what isn't selected can't leak, NaN included."""
    return np.where(mask, a, b)[()]


def maximum(a, b):
    """The larger one. A NaN may be dropped: the recurrence carries NaN in the sum, not in the maximum."""
    return select(a > b, a, b)


def exp2(x):
    """2 to the power x; 0 for -inf, NaN for NaN."""
    return np.exp2(x)


def log2(x):
    """Base-2 logarithm; -inf for 0."""
    with np.errstate(all="ignore"):
        return np.log2(x)


def tanh(x):
    """Hyperbolic tangent."""
    return np.tanh(x)


def as_int(x):
    """The bits of a float as an integer of the same size."""
    x = np.asarray(x)
    return x.view(f"i{x.itemsize}")[()]


def as_float(x):
    """The bits of an integer as a float of the same size."""
    x = np.asarray(x)
    return x.view(f"f{x.itemsize}")[()]


def mul_high(a, b):
    """The upper halves of the products of 32-bit numbers taken as unsigned."""
    a, b = (np.asarray(x).astype(np.int64).astype(np.uint32).astype(np.uint64) for x in (a, b))
    return ((a * b) >> np.uint64(32)).astype(np.uint32).view(np.int32)[()]
