"""Element formats: which dtypes are taken, their codes in a `PROBLEM` record, and 16-bit formats in and out of float32.

Numba rejects float16 and ml_dtypes arrays, so kernels see their bits. The conversions are plain functions on int32 bits
(see `ops.py`), correct for every input: subnormals, infinities, NaN, and rounding to nearest even.
"""

import ml_dtypes
import numpy as np

from .ops import as_float, as_int, select

FLOAT32, FLOAT16, BFLOAT16, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2, BOOL = range(7)
SWAPPED = 64  # added to the code of a format that isn't in this machine's byte order: 64 formats have room below
FLOAT32_MAX, FLOAT64_MAX = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)

CODES = {
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float16): FLOAT16,
    np.dtype(ml_dtypes.bfloat16): BFLOAT16,
}
EIGHT_BIT = {  # of K and V
    np.dtype(ml_dtypes.float8_e4m3fn): FLOAT8_E4M3FN,
    np.dtype(ml_dtypes.float8_e5m2): FLOAT8_E5M2,
}
ALL_CODES = CODES | EIGHT_BIT | {np.dtype(np.bool_): BOOL}


def format_code(dtype: np.dtype) -> int | None:
    """The code of a dtype in either byte order; None for one that isn't taken."""
    code = ALL_CODES.get(dtype)
    if code is None and not dtype.isnative:
        code = ALL_CODES.get(dtype.newbyteorder("="))
        return None if code is None else code | SWAPPED
    return code


def element_kind(code):
    """A format's code without its byte order. Whoever asks for each kind in turn gives NaN for one that isn't known."""
    return code & (SWAPPED - 1)


def float16_to_float32(bits):
    """IEEE 754 binary16. Exponents are rebased by a multiplication, which is exact and takes subnormals along."""
    magnitude = (bits & 0x7FFF) << 13
    x = as_float(magnitude) * 5.192296858534828e33  # 2**112
    x = select(magnitude >= 0xF800000, as_float(magnitude | 0x7F800000), x)  # inf and NaN
    return as_float(as_int(x) | ((bits & 0x8000) << 16))


def float32_to_float16(x):
    """IEEE 754 binary16, rounded to nearest even; from 65520 on infinity."""
    bits = as_int(x)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x37FFF001 + ((magnitude >> 13) & 1)) >> 13  # rebase the exponent by 112, round
    # below 2**-14: adding 1/2 leaves the subnormal's bits, rounded, at the end of the sum
    small = select(magnitude < 0x38800000, as_float(magnitude), 0.0)
    subnormal = as_int(small + 0.5) - 0x3F000000
    half = select(magnitude < 0x47800000, normal, 0x7C00)
    half = select(magnitude < 0x38800000, subnormal, half)
    half = select(magnitude > 0x7F800000, 0x7E00, half)  # NaN
    return half | ((bits >> 16) & 0x8000)


def bfloat16_to_float32(bits):
    """The upper half of a float32."""
    return as_float(bits << 16)


def float32_to_bfloat16(x):
    """The upper half of a float32, rounded to nearest even; a NaN stays one."""
    bits = as_int(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return select((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded) & 0xFFFF


def float8_e5m2_to_float32(bits):
    """The upper half of a float16."""
    return float16_to_float32(bits << 8)


def float8_e4m3fn_to_float32(bits):
    """OCP 8-bit floating point, E4M3: bias 7, no infinity, NaN where all bits but the sign are 1."""
    magnitude = bits & 0x7F
    x = as_float(magnitude << 20) * 1.329227995784916e36  # 2**120
    x = select(magnitude == 0x7F, as_float(magnitude | 0x7FC00000), x)
    return as_float(as_int(x) | ((bits & 0x80) << 24))
