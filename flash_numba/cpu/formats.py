"""Element formats on the CPU: rows of any format in and out of a kernel's own floats, converted on the way.

What the formats mean stands in `dtypes.py`. Whole rows of the usual formats go through plain loops, which LLVM
vectorises; strided columns and foreign byte order are read and written one element at a time.
"""

from math import inf, nan

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT32_MAX,
    FLOAT64,
    FLOAT64_MAX,
    SWAPPED,
    bfloat16_to_float32,
    element_kind,
    float8_e4m3fn_to_float32,
    float8_e5m2_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)
from ..ops import as_float, as_int
from .compile import HELPER, STAGE
from .ir.lanes import itemsize, lane, real, register_width, scalar
from .ir.memory import move, pointer_to, swap_bytes, transpose_block

uint8_at = pointer_to(types.uint8)
uint16_at = pointer_to(types.uint16)
int32_at = pointer_to(types.int32)
int64_at = pointer_to(types.int64)
float32_at = pointer_to(types.float32)
float64_at = pointer_to(types.float64)

BITS16 = 0xFFFF
NAN16 = 0x7FFF  # a NaN in float16 and in bfloat16


@njit(**HELPER)
def half_bits(address, i, swapped):
    bits = uint16_at(address)[i]
    return lane(np.int32(swap_bytes(bits) if swapped else bits))


@njit(**HELPER)
def saturated(like, x):
    """A number in the kernel's format, within its finite range."""
    highest = FLOAT32_MAX if itemsize(like) == 4 else FLOAT64_MAX
    if x > highest:  # not min and max, which Numba compiles for floats besides those for integers: 30 ms a kernel
        x = highest
    return real(like, x if x > -highest else -highest)


@njit(**HELPER)
def read_double(address, swapped):
    bits = int64_at(address)[0]
    return scalar(as_float(lane(swap_bytes(bits) if swapped else bits)))


@njit(**HELPER)
def byte_bits(address, i):
    return lane(np.int32(uint8_at(address)[i]))


@njit(**HELPER)
def read_float32(address, code):
    """One element as float32; NaN for a format that isn't known."""
    swapped = code & SWAPPED
    kind = element_kind(code)
    if kind == BOOL:
        return np.float32(uint8_at(address)[0] != 0)
    if kind == FLOAT8_E4M3FN:
        return scalar(float8_e4m3fn_to_float32(byte_bits(address, 0)))
    if kind == FLOAT8_E5M2:
        return scalar(float8_e5m2_to_float32(byte_bits(address, 0)))
    if kind == FLOAT64:  # of a bias: only an infinity may become one
        wide = read_double(address, swapped)
        if FLOAT32_MAX < abs(wide) < inf:
            wide = FLOAT32_MAX if wide > 0 else -FLOAT32_MAX
        return np.float32(wide)
    if kind == FLOAT32:
        bits = int32_at(address)[0]
        return scalar(as_float(lane(swap_bytes(bits) if swapped else bits)))
    if kind == FLOAT16:
        return scalar(float16_to_float32(half_bits(address, 0, swapped)))
    if kind == BFLOAT16:
        return scalar(bfloat16_to_float32(half_bits(address, 0, swapped)))
    return np.float32(nan)


@njit(**HELPER)
def read_float64(address, code):
    if element_kind(code) == FLOAT64:
        return read_double(address, code & SWAPPED)
    return np.float64(read_float32(address, code))  # a mask or a bias of another format


@njit(**STAGE)
def load_row_float32(row, n, address, stride, code):
    """n elements at an address, `stride` bytes apart, into a row of floats."""
    if code == FLOAT32 and stride == 4:
        for c in range(n):
            row[c] = float32_at(address)[c]
    elif code == FLOAT16 and stride == 2:
        for c in range(n):
            row[c] = scalar(float16_to_float32(half_bits(address, c, False)))
    elif code == BFLOAT16 and stride == 2:
        for c in range(n):
            row[c] = scalar(bfloat16_to_float32(half_bits(address, c, False)))
    elif code == FLOAT8_E4M3FN and stride == 1:
        for c in range(n):
            row[c] = scalar(float8_e4m3fn_to_float32(byte_bits(address, c)))
    elif code == FLOAT8_E5M2 and stride == 1:
        for c in range(n):
            row[c] = scalar(float8_e5m2_to_float32(byte_bits(address, c)))
    elif code == BOOL and stride == 1:
        for c in range(n):
            row[c] = np.float32(uint8_at(address)[c] != 0)
    else:
        for c in range(n):
            row[c] = read_float32(address + c * stride, code)


@njit(**STAGE)
def load_row_float64(row, n, address, stride, code):
    if code == FLOAT64 and stride == 8:
        for c in range(n):
            row[c] = float64_at(address)[c]
    else:
        for c in range(n):
            row[c] = read_float64(address + c * stride, code)


@njit(**HELPER)
def float16_bits(x):
    return np.uint16(scalar(float32_to_float16(lane(x))) & BITS16)


@njit(**HELPER)
def bfloat16_bits(x):
    return np.uint16(scalar(float32_to_bfloat16(lane(x))) & BITS16)


@njit(**STAGE)
def store_row_float32(address, stride, code, row, n):
    """A row of floats out, `stride` bytes apart, in the given format."""
    if code == FLOAT32 and stride == 4:
        for c in range(n):
            float32_at(address)[c] = row[c]
    elif code == FLOAT16 and stride == 2:
        for c in range(n):
            uint16_at(address)[c] = float16_bits(row[c])
    elif code == BFLOAT16 and stride == 2:
        for c in range(n):
            uint16_at(address)[c] = bfloat16_bits(row[c])
    else:
        swapped = code & SWAPPED
        kind = element_kind(code)
        for c in range(n):
            to = address + c * stride
            if kind == FLOAT32:
                bits = scalar(as_int(lane(row[c])))
                int32_at(to)[0] = swap_bytes(bits) if swapped else bits
            else:
                half = np.uint16(NAN16)  # for a format that isn't known
                if kind == FLOAT16:
                    half = float16_bits(row[c])
                elif kind == BFLOAT16:
                    half = bfloat16_bits(row[c])
                uint16_at(to)[0] = swap_bytes(half) if swapped else half


@njit(**STAGE)
def store_row_float64(address, stride, code, row, n):
    for c in range(n):
        bits = scalar(as_int(lane(row[c])))
        int64_at(address + c * stride)[0] = swap_bytes(bits) if code & SWAPPED else bits


def load_row(row, n, address, stride, code):
    """n elements at an address, `stride` bytes apart and in the format `code`, into a row of the kernel's floats."""
    raise NotImplementedError


def store_row(address, stride, code, row, n):
    """A row of the kernel's floats to an address, `stride` bytes apart and in the format `code`."""
    raise NotImplementedError


@njit(**HELPER)
def in_place(like, address, row_stride, column_stride, code):
    """Whether rows at an address can be read as the kernel's floats: its format, contiguous columns, aligned rows."""
    size = itemsize(like)
    own = FLOAT32 if size == 4 else FLOAT64
    return code == own and column_stride == size and address % size == 0 and row_stride % size == 0


@overload(load_row, jit_options=HELPER)
def _load_row(row, n, address, stride, code):
    chosen = load_row_float32 if row.dtype == types.float32 else load_row_float64
    return lambda row, n, address, stride, code: chosen(row, n, address, stride, code)


@overload(store_row, jit_options=HELPER)
def _store_row(address, stride, code, row, n):
    chosen = store_row_float32 if row.dtype == types.float32 else store_row_float64
    return lambda address, stride, code, row, n: chosen(address, stride, code, row, n)


@njit(**STAGE)
def transpose(to, to_stride, source, stride, rows, columns):
    """to[c * to_stride + r] = source[r * stride + c], in squares of a register's size, and one by one at the edges."""
    n = register_width(to)
    square_rows, square_columns = rows // n * n, columns // n * n
    for r in range(0, square_rows, n):
        for c in range(0, square_columns, n):
            transpose_block(move(to, c * to_stride + r), to_stride, move(source, r * stride + c), stride)
    for r in range(rows):
        for c in range(square_columns if r < square_rows else 0, columns):
            to[c * to_stride + r] = source[r * stride + c]


# Sums that LLVM may reorder, and so vectorise.
REORDERED = STAGE | {"fastmath": STAGE["fastmath"] | {"reassoc"}}


@njit(**REORDERED)
def dot(a, b, n):
    """The sum of the products of two rows."""
    total = real(a, 0)
    for c in range(n):
        total += a[c] * b[c]
    return total


@njit(**REORDERED)
def all_finite(rows, n, columns, stride):
    """Whether n rows hold neither NaN nor infinity: x * 0 is 0 or NaN. A sum that LLVM may
    reorder is quick and as good (but not x - x, which it then takes for 0)."""
    bad = rows[0] * 0
    if stride == columns:  # one long loop
        n, columns = 1, n * columns
    for j in range(n):
        for c in range(columns):
            bad += rows[j * stride + c] * 0
    return bad == bad
