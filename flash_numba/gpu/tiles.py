"""Rows of Q, K and V from global memory into tiles of floats in shared memory, converted on the way.

All threads of a block take part. What stands in the usual way (a native format, contiguous columns, aligned rows) is
read in vectors, several of them in flight at once; anything else one element at a time.
"""

from numba import types

from ..dtypes import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    bfloat16_to_float32,
    float8_e4m3fn_to_float32,
    float8_e5m2_to_float32,
    float16_to_float32,
)
from ..ops import as_float
from .ir.memory import fetch_4, fetch_8, fetch_16, give, local_array, put
from .primitives import device, lane, scalar

int32, int64 = types.int32, types.int64

# of the formats that are read in vectors
BYTES = {FLOAT64: 8, FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT8_E4M3FN: 1, FLOAT8_E5M2: 1}


@device
def part(word, shift, ones):
    """Some of a word's bits, as the formulas of `dtypes.py` take them."""
    return lane(int32((word >> shift) & ones))


@device
def from_two_words(low, high):
    """The float64 whose halves these are."""
    return scalar(as_float(lane((int64(high) << 32) | (int64(low) & 0xFFFFFFFF))))


def converter(form):
    """A function that turns fetched words raw[k], raw[k + 1], ... into one vector of the kernel's floats."""
    if form == FLOAT64:

        def convert(values, raw, k):
            values[0] = from_two_words(raw[k], raw[k + 1])
            values[1] = from_two_words(raw[k + 2], raw[k + 3])
    elif form == FLOAT32:

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(as_float(lane(raw[k + j])))
    elif form in (FLOAT16, BFLOAT16):
        widen = float16_to_float32 if form == FLOAT16 else bfloat16_to_float32

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(widen(part(raw[k + j // 2], j % 2 * 16, 0xFFFF)))
    else:
        widen = float8_e4m3fn_to_float32 if form == FLOAT8_E4M3FN else float8_e5m2_to_float32

        def convert(values, raw, k):
            for j in range(4):
                values[j] = scalar(widen(part(raw[k], j * 8, 0xFF)))

    return device(convert)


def vector_reader(accumulator, form):
    """`(bytes of a vector in memory, fetch, convert)` where a format can be read in vectors, else None."""
    if form not in BYTES or (form == FLOAT64) != (accumulator.own_format == FLOAT64):
        return None
    size = BYTES[form] * accumulator.vector
    return size, {4: fetch_4, 8: fetch_8, 16: fetch_16}[size], converter(form)


def tile_loader(accumulator, form, rows, width, stride, threads):
    """A function that loads a tile of `rows` x `width` numbers into shared memory, `stride` numbers from row to row.

    form: the format that is read in vectors, if it turns out to be the one. The function's arguments: the shared array
    and where the tile starts in it, the address of row 0, strides in bytes, the format, whether rows can be read in
    vectors, which to read (first to stop, at least one; the others, and columns beyond `columns`, become 0), a factor,
    and the thread's number. It returns whether all that this thread has loaded is finite.
    """
    real, vector, read = accumulator.real, accumulator.vector, accumulator.read
    reader = vector_reader(accumulator, form)
    size, fetch, convert = reader or (1, None, None)
    item = size // vector
    # Threads stand in rows of `in_row`, each with a column of its own; `each` vectors a thread, `at_once` rows apart.
    in_row = width // vector
    at_once = threads // in_row
    each = -(-rows // at_once)
    words = each * 4
    all_busy = threads % in_row == 0 and rows % at_once == 0

    def load(shared, at, address, row_stride, column_stride, code, quick, first, stop, columns, factor, t):
        bad = real(0)
        if reader_exists and quick:
            raw = local_array(words, int32)
            values = local_array(vector, real)
            row, column = t // in_row, t % in_row * vector
            there = column < columns
            source = address + min(column, columns - vector) * item
            for n in range(each):  # where there is no row: another one's
                fetch(raw, n * 4, source + min(max(row + n * at_once, first), stop - 1) * row_stride)
            for n in range(each):
                to = row + n * at_once
                if all_busy or (t < busy and to < rows):
                    convert(values, raw, n * 4)
                    seen = there and to >= first and to < stop
                    for j in range(vector):
                        values[j] = values[j] * factor if seen else real(0)
                        bad += values[j] * real(0)
                    give(shared, at + to * stride + column, values, 0)
        else:
            for place in range(t, rows * width, threads):
                row, column = place // width, place % width
                x = real(0)
                if row >= first and row < stop and column < columns:
                    x = read(address + row * row_stride + column * column_stride, code) * factor
                    bad += x * real(0)
                put(shared, at + row * stride + column, x)
        return bad == bad

    busy = at_once * in_row
    reader_exists = reader is not None
    if not reader_exists:  # never called, but compiled
        _, fetch, convert = vector_reader(accumulator, accumulator.own_format)
    return device(load)


def quickness(accumulator, form, columns):
    """A function that tells whether rows of `columns` numbers can be read in vectors of the format `form`."""
    vector = accumulator.vector
    reader = vector_reader(accumulator, form)
    size = reader[0] if reader else 1
    fits = reader is not None and columns % vector == 0

    @device
    def is_quick(address, row_stride, column_stride, code):
        return fits and code == form and column_stride * vector == size and (address | row_stride) % size == 0

    return is_quick
