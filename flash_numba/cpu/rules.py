"""The rule stage of a score tile: soft-capping, ALiBi, bias and masks, then dropout of the weights.

Each rule is a loop over the tile's keys around one formula of `scores.py` or `dropout.py`; whether it runs is decided
once a tile, at run time.
"""

from math import inf

import numpy as np
from numba import njit

from .. import dropout, geometry, ops, scores
from ..dtypes import BOOL
from .compile import HELPER, STAGE
from .rows import fetch_row, in_place, saturated, transpose, uint8_at
from .simd import (
    TILE,
    bytes_of,
    common_bits,
    itemsize,
    lanes_of,
    load,
    load_bytes,
    move,
    pointer_like,
    real,
    row_numbers,
    some_bits,
    store,
    tile_width,
)

FAR = 2**30  # a bound that no key of a tile reaches, in 32-bit lanes
BYTES = TILE.bits // 8  # in a vector register


@njit(**STAGE)
def softcap_scores(s, keys, cap):
    inverse = real(s, 1.0 / cap)
    cap = real(s, cap)
    for j in range(keys):
        store(scores.softcapped(load(s, j), cap, inverse), s, j)


@njit(**STAGE)
def alibi_scores(s, keys, slope, position):
    """position: of the tile's first row, counted from the tile's first key."""
    p = lanes_of(s, 0.0) + row_numbers(s, 0) + real(s, position)
    slope = real(s, slope)
    for j in range(keys):
        store(scores.with_alibi(load(s, j), slope, p, real(s, j)), s, j)


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


@njit(**STAGE)
def load_term(term, staging, address, rows, keys, row_stride, column_stride, code):
    """A mask's or a bias's part of a score tile, as (key, row): `(some key is kept, some key may be hidden)`.

    A mask that keeps or hides the whole tile, and a bias that hides it, isn't laid out. A term with row stride 0 is
    read for one row. Lanes without a row of their own hold what they held before; nothing of them is written out.
    """
    width = tile_width(term)
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
            fetch_row(move(staging, r * keys), keys, address + r * row_stride, column_stride, code)
    if code != BOOL:
        kept = False
        for r in range(own_rows):
            kept = scan_bias(move(source, r * stride), keys, kept)
        if not kept:
            return False, True
    if row_stride != 0:
        transpose(term, width, source, stride, rows, keys)
    else:
        for j in range(keys):
            store(lanes_of(term, source[j]), term, j)
    return True, True


@njit(**HELPER)
def hidden_value(like, code):
    """What stands in a term, mask or bias by its format, where it hides a key."""
    return real(like, 0.0 if code == BOOL else -inf)


@njit(**STAGE)
def apply_term(s, term, keys, is_mask):
    if is_mask:
        for j in range(keys):
            store(scores.hide(load(s, j), load(term, j) != 0.0), s, j)
    else:
        lowest = saturated(s, -inf)
        for j in range(keys):
            store(scores.with_bias(load(s, j), load(term, j), lowest), s, j)


@njit(**HELPER)
def bound(s, position):
    """The first or last key that each row of a tile sees, counted from the tile's first key."""
    return row_numbers(s, max(-FAR, min(FAR, position)))


@njit(**STAGE)
def hide_by_position(s, start, stop, first, last):
    """-inf for the keys start to stop that lie outside a row's range; `first` and `last` are the first row's bounds."""
    first, last = bound(s, first), bound(s, last)
    for j in range(start, stop):
        store(scores.hide(load(s, j), geometry.between(j, first, last)), s, j)


@njit(**STAGE)
def drop_weights(s, keys, row_index, key_index, h, b, round_keys, threshold, factor):
    """Dropout: weights of dropped keys to 0, of kept ones times 1 / (1 - p). Four keys share a counter."""
    i = row_numbers(s, 0) + np.int32(row_index)
    factor = real(s, factor)
    threshold = np.int32(threshold)
    zero = row_numbers(s, 0) & 0
    j = 0
    while j < keys:
        group = (key_index + j) >> 2
        words = dropout.philox(zero + np.int32(group), i, zero + np.int32(h), zero + np.int32(b), round_keys)
        for w in range(4):
            at = group * 4 + w - key_index
            if at >= j and at < keys:
                word = words[0]
                if w == 1:
                    word = words[1]
                elif w == 2:
                    word = words[2]
                elif w == 3:
                    word = words[3]
                store(ops.select(dropout.kept(word, threshold), load(s, at) * factor, 0.0), s, at)
        j = group * 4 + 4 - key_index


@njit(**HELPER)
def load_terms(p, bias, mask, staging, bias_at, mask_at, row, rows, j0, keys):
    """Both terms' parts of a score tile at (row, j0): `(some key is kept, each may hide or add something)`."""
    has_bias, has_mask, kept = p.bias != 0, p.mask != 0, True
    if has_bias:
        at = bias_at + row * p.bias_row + j0 * p.bias_column
        kept, has_bias = load_term(bias, staging, at, rows, keys, p.bias_row, p.bias_column, p.bias_format)
    if has_mask and kept:
        at = mask_at + row * p.mask_row + j0 * p.mask_column
        kept, has_mask = load_term(mask, staging, at, rows, keys, p.mask_row, p.mask_column, p.mask_format)
    return kept, has_bias, has_mask


@njit(**HELPER)
def apply_rules(p, s, bias, mask, has_bias, has_mask, slope, position, j0, keys, all0, all1):
    """All rules after soft-capping, on the scores of keys j0 on; the keys all0 to all1 are seen by every row.

    position: of the tile's first row.
    """
    if slope != 0.0:
        alibi_scores(s, keys, slope, position - j0)
    if has_bias:
        apply_term(s, bias, keys, p.bias_format == BOOL)
    if has_mask:
        apply_term(s, mask, keys, p.mask_format == BOOL)
    first, last = position - p.left - j0, position + p.right - j0
    if j0 < all0:
        hide_by_position(s, 0, min(keys, all0 - j0), first, last)
    if j0 + keys > all1:
        hide_by_position(s, max(0, all1 - j0), keys, first, last)
