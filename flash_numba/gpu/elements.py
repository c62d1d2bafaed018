"""Elements of any format between global memory and a kernel's own floats, one at a time; the twin of `cpu/rows.py`.

What the formats mean stands in `dtypes.py`. Whole vectors of the usual formats are read by `tiles.py`.
"""

import numpy as np
from numba import types

from .. import ops
from ..dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SWAPPED,
    bfloat16_to_float32,
    float8_e4m3fn_to_float32,
    float8_e5m2_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)
from .ir.memory import (
    load_int32,
    load_int64,
    load_uint8,
    load_uint16,
    store_int32,
    store_int64,
    store_uint16,
    swap_bytes,
)
from .primitives import device, lane, scalar

float32, float64, int32 = types.float32, types.float64, types.int32
HIGHEST, HIGHEST_64 = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)


@device
def swap_halves(bits):
    """16 bits with their bytes in the other order."""
    return ((bits & 0xFF) << 8) | (bits >> 8)


@device
def read_double(address, swapped):
    bits = load_int64(address)
    return scalar(ops.as_float(lane(swap_bytes(bits) if swapped else bits)))


@device
def read_float32(address, code):
    """One element of the format `code` as float32."""
    swapped = (code & SWAPPED) != 0
    kind = code & (SWAPPED - 1)
    if kind == FLOAT32:
        bits = load_int32(address)
        return scalar(ops.as_float(lane(swap_bytes(bits) if swapped else bits)))
    if kind == BOOL:
        return float32(load_uint8(address) != 0)
    if kind == FLOAT8_E4M3FN:
        return scalar(float8_e4m3fn_to_float32(lane(load_uint8(address))))
    if kind == FLOAT8_E5M2:
        return scalar(float8_e5m2_to_float32(lane(load_uint8(address))))
    if kind == FLOAT64:  # of a bias: only an infinity may become one
        bits = load_int64(address)
        if swapped:
            bits = swap_bytes(bits)
        x = float32(scalar(ops.as_float(lane(bits))))
        if (bits & 0x7FFFFFFFFFFFFFFF) < 0x7FF0000000000000:
            return max(float32(-HIGHEST), min(float32(HIGHEST), x))
        return x
    bits = load_uint16(address)
    if swapped:
        bits = swap_halves(bits)
    if kind == FLOAT16:
        return scalar(float16_to_float32(lane(int32(bits))))
    return scalar(bfloat16_to_float32(lane(int32(bits))))


@device
def read_float64(address, code):
    """One element of the format `code` as float64."""
    if code & (SWAPPED - 1) == FLOAT64:
        return read_double(address, (code & SWAPPED) != 0)
    return float64(read_float32(address, code))


@device
def half_bits(x, kind):
    """A float32 as float16 or bfloat16, in an int32."""
    if kind == BFLOAT16:
        return scalar(float32_to_bfloat16(lane(x)))
    return scalar(float32_to_float16(lane(x)))


@device
def write_float32(address, code, x):
    """A float32 to an element of the format `code`, one that `out` may have."""
    swapped = (code & SWAPPED) != 0
    kind = code & (SWAPPED - 1)
    if kind == FLOAT32:
        bits = scalar(ops.as_int(lane(x)))
        store_int32(address, swap_bytes(bits) if swapped else bits)
    else:
        half = half_bits(x, kind)
        store_uint16(address, int32(swap_halves(half) if swapped else half))


@device
def write_float64(address, code, x):
    """A float64 likewise; its only format is float64."""
    bits = scalar(ops.as_int(lane(x)))
    store_int64(address, swap_bytes(bits) if code & SWAPPED else bits)
