"""What the primitive operations of `ops.py` mean on SIMD lanes, and the formulas that Numba may inline for them.

Written in Python on `ir.lanes.Lanes`; literals take the lane's type. Float32 and float64 differ in polynomials only.
"""

import inspect
from math import inf

from numba.extending import overload, register_jitable

from .. import dropout, dtypes, geometry, ops, recurrence, scores
from ..ops import as_float, as_int
from .compile import HelperCompiler
from .ir.lanes import Lanes

INLINE = {"forceinline": True, "pipeline_class": HelperCompiler, "no_cfunc_wrapper": True}


def formulas(module):
    """The functions that a module defines itself."""
    return [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]


def meaning(primitive, **by_dtype):
    """Give a primitive operation its meaning on lanes, for each lane type."""

    @overload(primitive, jit_options=INLINE, strict=False)
    def choose(*args):
        if isinstance(args[0], Lanes):
            return by_dtype.get(str(args[0].dtype))
        return None


# 1.5 * 2**(mantissa bits) + exponent bias: adding it rounds x to an integer n and leaves n + bias in the low bits.
ROUND_32 = 12582912.0 + 127.0
ROUND_64 = 6755399441055744.0 + 1023.0


def exp2_float32(x):
    """2**x for x < 128 to 8e-8 relative; exactly 0 up to -126.5, exactly 1 at 0.

    Minimax coefficients in the relative error of 2**f on [-1/2, 1/2] with p(0) = 1 (2e-9 before rounding; Taylor's, as
    good as free, are 1.6e-7).

    The clamp is a comparison that a NaN fails, and the power of two is a factor, not an addition to the exponent bits,
    which would turn some NaNs into numbers.
    """
    x = ops.select(x < -127.0, -127.0, x)
    t = x + ROUND_32
    f = x - (t - ROUND_32)
    p = 1.53533618e-4 * f + 1.33988744e-3
    p = p * f + 9.61843736e-3
    p = p * f + 5.55033247e-2
    p = p * f + 2.40226479e-1
    p = p * f + 6.93147203e-1
    p = p * f + 1.0
    return p * as_float(as_int(t) << 23)


def exp2_float64(x):
    """2**x for x < 1024 to 3e-16 relative, likewise: Taylor's coefficients ln(2)**k / k! suffice on [-1/2, 1/2]."""
    x = ops.select(x < -1023.0, -1023.0, x)
    t = x + ROUND_64
    f = x - (t - ROUND_64)
    p = 1.3691488853904128e-12 * f + 2.5678435993488206e-11
    p = p * f + 4.4455382718708115e-10
    p = p * f + 7.0549116208011235e-09
    p = p * f + 1.01780860092396997e-07
    p = p * f + 1.3215486790144307e-06
    p = p * f + 1.5252733804059841e-05
    p = p * f + 1.5403530393381606e-04
    p = p * f + 1.3333558146428443e-03
    p = p * f + 9.6181291076284769e-03
    p = p * f + 5.5504108664821580e-02
    p = p * f + 2.4022650695910071e-01
    p = p * f + 6.9314718055994531e-01
    p = p * f + 1.0
    return p * as_float(as_int(t) << 52)


# log2 of a positive normal number: an exponent and a mantissa in [sqrt(1/2), sqrt(2)), whose logarithm is
# 2 atanh(s) = 2 s (1 + z / 3 + z**2 / 5 + ...), z = s**2 <= 0.03. What isn't finite comes out as it came.


def log2_float32(x):
    """To 2 ulp of the larger of the logarithm's integer and fraction."""
    i = as_int(x) - 0x3F3504F3
    f = as_float((i & 0x7FFFFF) + 0x3F3504F3) - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = 0.1111111 * z + 0.14285715
    p = p * z + 0.2
    p = p * z + 0.33333334
    y = 2.8853900817779268 * (s * z * p + s) + (i >> 23)
    return ops.select(x < inf, y, x)


def log2_float64(x):
    i = as_int(x) - 0x3FE6A09E667F3BCD
    f = as_float((i & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD) - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = 0.04761904761904762 * z + 0.05263157894736842
    p = p * z + 0.058823529411764705
    p = p * z + 0.06666666666666667
    p = p * z + 0.07692307692307693
    p = p * z + 0.09090909090909091
    p = p * z + 0.1111111111111111
    p = p * z + 0.14285714285714285
    p = p * z + 0.2
    p = p * z + 0.3333333333333333
    y = 2.8853900817779268 * (s * z * p + s) + (i >> 52)
    return ops.select(x < inf, y, x)


def tanh_float32(x):
    """To 5 ulp: a rational minimax approximation up to where tanh rounds to 1, as in Eigen's generic tanh."""
    x = ops.select(x > 7.90531110763549805, 7.90531110763549805, x)
    x = ops.select(x < -7.90531110763549805, -7.90531110763549805, x)
    z = x * x
    p = -2.76076847742355e-16 * z + 2.00018790482477e-13
    p = p * z - 8.60467152213735e-11
    p = p * z + 5.12229709037114e-08
    p = p * z + 1.48572235717979e-05
    p = p * z + 6.37261928875436e-04
    p = p * z + 4.89352455891786e-03
    q = 1.19825839466702e-06 * z + 1.18534705686654e-04
    q = q * z + 2.26843463243900e-03
    q = q * z + 4.89352518554385e-03
    return x * p / q


def tanh_float64(x):
    """(1 - t) / (1 + t) with t = exp(-2 |x|): to 2e-16 absolute, which is what a soft-capped score needs."""
    t = ops.exp2(-2.8853900817779268 * ops.maximum(x, -x))
    y = (1.0 - t) / (1.0 + t)
    return ops.select(x < 0.0, -y, y)


MEANINGS = {
    ops.exp2: {"float32": exp2_float32, "float64": exp2_float64},
    ops.tanh: {"float32": tanh_float32, "float64": tanh_float64},
    ops.log2: {"float32": log2_float32, "float64": log2_float64},
}
for _primitive, _by_dtype in MEANINGS.items():
    meaning(_primitive, **_by_dtype)

# Whatever is written in these operations alone compiles as it stands.
for _formula in (
    ops.maximum,
    *formulas(recurrence),
    *formulas(scores),
    *formulas(geometry),
    *formulas(dtypes),
    *formulas(dropout),
):
    register_jitable(**INLINE)(_formula)
