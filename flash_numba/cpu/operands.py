"""Bias and mask operands: their parts of a score tile, loaded in the layout of the scores.

A call has up to two, each a float bias or a boolean mask by its format, floats first.
"""

from math import inf
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..dtypes import BOOL
from .compile import HELPER, STAGE
from .formats import in_place, load_row, transpose, uint8_at
from .ir.lanes import common_bits, itemsize, lanes_of, real, some_bits, tile_width
from .ir.memory import bytes_of, load_bytes, move, pointer_like, store
from .ir.registers import REGISTER_TILE

BYTES = REGISTER_TILE.bits // 8  # in a vector register


class Operand(NamedTuple):
    """An operand's part of a score tile."""

    part: Any  # pointer to the scratch that it is loaded to, laid out as the scores
    used: bool  # whether it may hide or add something there; otherwise nothing is loaded
    is_mask: bool


class Operands(NamedTuple):
    first: Operand
    second: Operand


class Source(NamedTuple):
    """A head's part of an operand in memory."""

    address: int  # of row 0 and key 0
    row_stride: int
    column_stride: int
    code: int


@njit(**HELPER)
def sources_of(p, head):
    """The two operands of a head; the address is 0 where the call has none."""
    first = Source(head.bias if p.bias != 0 else 0, p.bias_row, p.bias_column, p.bias_format)
    second = Source(head.mask if p.mask != 0 else 0, p.mask_row, p.mask_column, p.mask_format)
    return first, second


@njit(**HELPER)
def hidden_value(like, is_mask):
    """What stands in an operand, a mask or a bias, where it hides a key."""
    return real(like, 0.0 if is_mask else -inf)


@njit(**HELPER)
def scan_mask(address, rows, keys, row_stride, column_stride):
    """Of a boolean mask's elements: `(some is true, some is false)`."""
    some, every = bytes_of(0), bytes_of(-1)
    some_rest, every_rest = np.uint8(0), np.uint8(255)
    for r in range(rows):
        line, j = address + r * row_stride, 0
        if column_stride == 1:
            while j + BYTES <= keys:
                some, every = some | load_bytes(line + j), every & load_bytes(line + j)
                j += BYTES
        while j < keys:
            some_rest |= uint8_at(line + j * column_stride)[0]
            every_rest &= uint8_at(line + j * column_stride)[0]
            j += 1
    return (some_bits(some) | some_rest) != 0, (common_bits(every) & every_rest) == 0


@njit(**HELPER)
def scan_bias(row, keys, kept):
    """Whether one of a row's elements isn't -inf, or was in a row before."""
    if row[0] != -inf or kept:
        return True
    for j in range(keys):
        kept |= row[j] != -inf
    return kept


# -- for a row tile, (key, row) ----------------------------------------------------------------------------------------


@njit(**STAGE)
def load_operand(part, staging, address, rows, keys, row_stride, column_stride, code):
    """An operand's part of a row tile, as (key, row): `(some key is kept, some key may be hidden)`.

    A mask that keeps or hides the whole tile, and a bias that hides it, isn't laid out. An operand with row stride 0 is
    read for one row. Lanes without a row of their own hold what they held before; nothing of them is written out.
    """
    width = tile_width(part)
    own_rows = rows if row_stride != 0 else 1
    if code == BOOL:
        kept, hidden = scan_mask(address, own_rows, keys, row_stride, column_stride)
        if not kept or not hidden:
            return kept, hidden
    if in_place(staging, address, row_stride, column_stride, code):
        source, stride = pointer_like(staging, address), row_stride // itemsize(staging)
    else:
        source, stride = staging, keys
        for r in range(own_rows):
            load_row(move(staging, r * keys), keys, address + r * row_stride, column_stride, code)
    if code != BOOL:
        kept = False
        for r in range(own_rows):
            kept = scan_bias(move(source, r * stride), keys, kept)
        if not kept:
            return False, True
    if row_stride != 0:
        transpose(part, width, source, stride, rows, keys)
    else:
        for j in range(keys):
            store(lanes_of(part, source[j]), part, j)
    return True, True


@njit(**HELPER)
def load_operands(p, head, bias, mask, staging, row, rows, key, keys):
    """Both operands' parts of a row tile at (row, key): `(some key is kept, Operands)`. Neither counts if none is."""
    first, second = sources_of(p, head)
    kept, has_first, has_second = True, first.address != 0, second.address != 0
    if has_first:
        at = first.address + row * first.row_stride + key * first.column_stride
        kept, has_first = load_operand(
            bias, staging, at, rows, keys, first.row_stride, first.column_stride, first.code
        )  # fmt: skip
    if has_second and kept:
        at = second.address + row * second.row_stride + key * second.column_stride
        kept, has_second = load_operand(
            mask, staging, at, rows, keys, second.row_stride, second.column_stride, second.code
        )  # fmt: skip
    return kept, Operands(Operand(bias, has_first, first.code == BOOL), Operand(mask, has_second, second.code == BOOL))


# -- for one row, keys along lanes -------------------------------------------------------------------------------------


@njit(**STAGE)
def load_operand_row(part, keys, address, stride, code):
    """A mask's or a bias's part of a row: `(some key is kept, some key may be hidden)`."""
    load_row(part, keys, address, stride, code)
    if code == BOOL:
        some, every = False, True
        for j in range(keys):
            some |= part[j] != 0
            every &= part[j] != 0
        return some, not every
    return scan_bias(part, keys, False), True


@njit(**HELPER)
def operands_of_row(p, bias, mask):
    """Both operands' parts of a row, loaded before by `load_operand_rows`."""
    return Operands(
        Operand(bias, p.bias != 0, p.bias_format == BOOL), Operand(mask, p.mask != 0, p.mask_format == BOOL)
    )


@njit(**HELPER)
def load_operand_rows(p, head, bias, mask, stride, rows, key, keys):
    """Both operands' parts of packed rows (row r is query r % queries of head r // queries, from `head` on), `stride`
    numbers apart: `(some row keeps a key, some row may not see one)`.
    """
    if p.bias == 0 and p.mask == 0:
        return True, False
    kept, hides = False, False
    for r in range(rows):
        h, i = r // p.queries, r % p.queries
        row_kept = True
        if p.bias != 0:
            at = head.bias + h * p.bias_head + i * p.bias_row + key * p.bias_column
            row_kept, hidden = load_operand_row(move(bias, r * stride), keys, at, p.bias_column, p.bias_format)
            hides = hides | hidden
        if p.mask != 0:
            at = head.mask + h * p.mask_head + i * p.mask_row + key * p.mask_column
            mask_kept, hidden = load_operand_row(move(mask, r * stride), keys, at, p.mask_column, p.mask_format)
            row_kept, hides = row_kept & mask_kept, hides | hidden
        kept = kept | row_kept
    return kept, hides
