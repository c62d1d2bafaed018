"""Floating point as the device does it, where NumPy's own operations differ: flushing, fused and directed rounding,
approximate functions, small formats.

Arrays are float32 unless said otherwise. Sources: the PTX ISA's descriptions of the instructions (9.7.3); fused
multiply-add by rounding to odd, Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .registers import Array

SMALLEST_NORMAL = np.array(2.0**-126, np.float32)
CANONICAL_NAN = 0x7FFF  # of float16 and bfloat16


def flush(x: Array) -> Array:
    """`.ftz`: subnormal numbers become zeros of their sign; NaN and infinities stay."""
    return x * (np.abs(x) >= SMALLEST_NORMAL)


def saturate(x: Array) -> Array:
    """`.sat`: into [0, 1], NaN to 0."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))


# ---- rounding


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Sum and its rounding error, exactly (Knuth)."""
    s = a + b
    rest = s - a
    return s, (a - (s - rest)) + (b - rest)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Product and its rounding error, exactly unless halves overflow (Dekker, Veltkamp). float64."""
    p = a * b
    split = 2.0**27 + 1
    (ah, al), (bh, bl) = ((h := split * x - (split * x - x), x - h) for x in (a, b))
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def to_odd(s: Array, error: Array) -> Array:
    """`s + error` rounded to odd: what is rounded once more afterwards comes out as if it had been rounded once."""
    bits = s.view(np.int64)
    step = np.where((error > 0) == (s > 0), 1, -1)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    return np.where(inexact, bits + step, bits).view(np.float64)


def round_to_float32(x: Array, mode: str) -> Array:
    """float64 to float32 by "rn", "rz", "rm" (down) or "rp" (up)."""
    nearest = x.astype(np.float32)
    if mode == "rn":
        return nearest
    down = np.nextafter(nearest, np.float32(-np.inf))
    up = np.nextafter(nearest, np.float32(np.inf))
    too_high, too_low = nearest > x, nearest < x
    if mode == "rz":
        too_high, too_low = too_high & (x > 0), too_low & (x < 0)
    low = mode == "rm" or mode == "rz"
    high = mode == "rp" or mode == "rz"
    return np.where(too_high & low, down, np.where(too_low & high, up, nearest))


def add32(a: Array, b: Array, mode: str) -> Array:
    if mode == "rn":
        return a + b
    return round_to_float32(to_odd(*two_sum(a.astype(np.float64), b.astype(np.float64))), mode)


def multiply32(a: Array, b: Array, mode: str) -> Array:
    return a * b if mode == "rn" else round_to_float32(a.astype(np.float64) * b.astype(np.float64), mode)


def fma32(a: Array, b: Array, c: Array, mode: str = "rn", flushed: bool = False) -> Array:
    """a * b + c, rounded once. The product is exact in float64; the sum is, but for one that is about half way between
    two float32 numbers, precise enough to be rounded again. Subnormals count where they aren't `flushed` anyway.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    if mode != "rn":
        return round_to_float32(to_odd(*two_sum(product, addend)), mode)
    total = np.asarray(product + addend)
    rounded = np.asarray(total.astype(np.float32))
    unsure = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if not flushed:
        unsure |= np.abs(rounded) < SMALLEST_NORMAL
    if unsure.any():
        parts = (np.broadcast_to(x, total.shape)[unsure] for x in (product, addend))
        rounded[unsure] = to_odd(*two_sum(*parts)).astype(np.float32)
    return rounded


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64, rounded once wherever no part of it over- or underflows."""
    high, low = two_product(a, b)
    t_high, t_low = two_sum(c, low)
    v_high, v_low = two_sum(high, t_high)
    exact = v_high + to_odd(*two_sum(t_low, v_low))
    plain = a * b + c
    return np.where(np.isfinite(exact) & np.isfinite(plain), exact, plain)


# ---- functions


def approximate_tanh(x: Array) -> Array:
    """tanh.approx.f32 is right to about 11 bits only: a result with no more than those."""
    bits = np.asarray(np.tanh(x)).view(np.uint32)
    kept = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), x, kept.view(np.float32))


def approximate_divide(a: Array, b: Array) -> Array:
    """div.approx.f32: a times a reciprocal that is 0 for divisors beyond 2^126."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(huge, a * np.float32(0), a / b)


def upper_half(x: Array) -> Array:
    """The approximate float64 instructions have 20 bits of fraction; the lower word is 0."""
    return (np.asarray(x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rcp": lambda x: x.dtype.type(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "tanh": approximate_tanh,
}


# ---- formats of 16 and 8 bits, as their bits


def to_float16(x: Array) -> Array:
    """float32 or float64 to the bits of float16, to nearest even; NaN is canonical."""
    return np.where(np.isnan(x), np.uint16(CANONICAL_NAN), np.asarray(x.astype(np.float16)).view(np.uint16))


def from_float16(bits: Array) -> Array:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def to_bfloat16(x: Array) -> Array:
    """float32 to the bits of bfloat16, to nearest even; NaN is canonical."""
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), CANONICAL_NAN, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _small_format(exponent_bits: int, fraction_bits: int) -> Array:
    """The values of all 8-bit codes, an OCP E4M3 (no infinity) or E5M2."""
    code = np.arange(256)
    exponent, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code & (1 << fraction_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    steps = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction)
    value = steps * 2.0 ** (np.maximum(exponent, 1) - bias - fraction_bits)
    if exponent_bits == 4:
        value = np.where(code & 0x7F == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), value)
    return np.where(code & 0x80, -value, value).astype(np.float16)


FLOAT8 = {"e4m3x2": _small_format(4, 3), "e5m2x2": _small_format(5, 2)}


def to_integer(x: Array, dtype: np.dtype, rounding: str, from_float64: bool) -> Array:
    """Rounded by "rni", "rzi", "rmi" or "rpi", and saturated; NaN is 0, or the upper bit where 64 bits take part."""
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](x.astype(np.float64))
    limits = np.iinfo(dtype)
    inside = (rounded > limits.min) & (rounded < float(limits.max))
    result = np.where(inside, rounded, 0).astype(dtype)
    result = np.where(rounded >= float(limits.max), dtype.type(limits.max), result)
    result = np.where(rounded <= float(limits.min), dtype.type(limits.min), result)
    wide = from_float64 or dtype.itemsize == 8
    of_nan = np.array(1 << 8 * dtype.itemsize - 1 if wide else 0, f"u{dtype.itemsize}").view(dtype)
    return np.where(np.isnan(x), of_nan, result)
