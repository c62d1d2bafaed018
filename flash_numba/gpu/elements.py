"""Elements of any format between global memory and a kernel's own floats, one at a time or in vectors.

The twin of `cpu/formats.py`. What the formats mean stands in `dtypes.py`. An element of an unknown format reads as NaN.
"""

from math import nan

from numba import types

from .. import ops
from ..dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT32_MAX,
    FLOAT64,
    SWAPPED,
    bfloat16_to_float32,
    element_kind,
    float8_e4m3fn_to_float32,
    float8_e5m2_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)
from .ir.memory import (
    fetch_4,
    fetch_8,
    fetch_16,
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

float32, float64, int32, int64 = types.float32, types.float64, types.int32, types.int64


# -- one element -------------------------------------------------------------------------------------------------------


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
    kind = element_kind(code)
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
            return max(float32(-FLOAT32_MAX), min(float32(FLOAT32_MAX), x))
        return x
    is_float16, is_bfloat16 = kind == FLOAT16, kind == BFLOAT16
    if is_float16 or is_bfloat16:
        bits = load_uint16(address)
        half = lane(int32(swap_halves(bits) if swapped else bits))
        return scalar(float16_to_float32(half) if is_float16 else bfloat16_to_float32(half))
    return float32(nan)


@device
def read_float64(address, code):
    """One element of the format `code` as float64."""
    if element_kind(code) == FLOAT64:
        return read_double(address, (code & SWAPPED) != 0)
    return float64(read_float32(address, code))


@device
def write_float32(address, code, x):
    """A float32 to an element of the format `code`, one that `out` may have; nothing is written to any other."""
    swapped = (code & SWAPPED) != 0
    kind = element_kind(code)
    if kind == FLOAT32:
        bits = scalar(ops.as_int(lane(x)))
        store_int32(address, swap_bytes(bits) if swapped else bits)
        return
    is_float16, is_bfloat16 = kind == FLOAT16, kind == BFLOAT16
    if is_float16 or is_bfloat16:
        half = scalar(float32_to_float16(lane(x)) if is_float16 else float32_to_bfloat16(lane(x)))
        store_uint16(address, int32(swap_halves(half) if swapped else half))


@device
def write_float64(address, code, x):
    """A float64 likewise; its only format is float64."""
    bits = scalar(ops.as_int(lane(x)))
    store_int64(address, swap_bytes(bits) if code & SWAPPED else bits)


# -- vectors of elements that make 16 bytes of the kernel's floats -----------------------------------------------------

# Bytes of an element, of the formats that are read so.
BYTES = {FLOAT64: 8, FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT8_E4M3FN: 1, FLOAT8_E5M2: 1}
WIDENED = {
    FLOAT16: float16_to_float32,
    BFLOAT16: bfloat16_to_float32,
    FLOAT8_E4M3FN: float8_e4m3fn_to_float32,
    FLOAT8_E5M2: float8_e5m2_to_float32,
}


@device
def part_of(raw, shift, ones):
    """Some of an int32's bits, as the formulas of `dtypes.py` take them."""
    return lane(int32((raw >> shift) & ones))


@device
def from_halves(low, high):
    """The float64 whose halves these are."""
    return scalar(ops.as_float(lane((int64(high) << 32) | (int64(low) & 0xFFFFFFFF))))


def converter(form):
    """A function that turns fetched int32 raw[k], raw[k + 1], ... into one vector of the kernel's floats."""
    if form == FLOAT64:

        def convert(values, raw, k):
            values[0] = from_halves(raw[k], raw[k + 1])
            values[1] = from_halves(raw[k + 2], raw[k + 3])
    elif form == FLOAT32:

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(ops.as_float(lane(raw[k + j])))
    elif BYTES[form] == 2:
        widen = WIDENED[form]

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(widen(part_of(raw[k + j // 2], j % 2 * 16, 0xFFFF)))
    else:
        widen = WIDENED[form]

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(widen(part_of(raw[k], j * 8, 0xFF)))

    return device(convert)


def vector_reader(accumulator, form):
    """`(bytes of a vector in memory, fetch, convert)` where a format can be read in vectors, else None."""
    if form not in BYTES or (form == FLOAT64) != (accumulator.own_format == FLOAT64):
        return None
    size = BYTES[form] * accumulator.vector
    return size, {4: fetch_4, 8: fetch_8, 16: fetch_16}[size], converter(form)
