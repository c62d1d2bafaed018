"""The rules on a score tile, in their one order, and dropout of the weights.

SIMD lanes are query rows in a row tile, (key, row), and keys in a row of `decode`. `score_rules` makes the ordered
function for either. Each rule is a loop over the tile around one formula of `scores.py` or `dropout.py`; whether it
runs is decided once a tile, at run time.
"""

import numpy as np
from numba import njit

from .. import dropout, geometry, ops, scores
from ..geometry import FAR
from .compile import HELPER, STAGE
from .formats import saturated
from .ir.lanes import lane_numbers, lanes_of, real, tile_width
from .ir.memory import load, store

# -- rules that are the same either way; `count` rows of lanes ---------------------------------------------------------


@njit(**STAGE)
def softcap_scores(s, count, cap):
    inverse = real(s, 1.0 / cap)
    cap = real(s, cap)
    for n in range(count):
        store(scores.softcapped(load(s, n), cap, inverse), s, n)


@njit(**HELPER)
def softcap(s, derivative, count, cap):
    softcap_scores(s, count, cap)


@njit(**STAGE)
def softcap_slopes(slopes, s, count, cap):
    """The derivative of soft-capping, from capped scores."""
    inverse = real(s, 1.0 / cap)
    cap = real(s, cap)
    for n in range(count):
        store(scores.softcap_slope(load(s, n), cap, inverse), slopes, n)


@njit(**HELPER)
def softcap_with_derivative(s, derivative, count, cap):
    softcap_scores(s, count, cap)
    softcap_slopes(derivative, s, count, cap)


@njit(**STAGE)
def add_bias(s, bias, count):
    lowest = saturated(s, -np.inf)
    for n in range(count):
        store(scores.with_bias(load(s, n), load(bias, n), lowest), s, n)


@njit(**STAGE)
def hide_masked(s, mask, count):
    for n in range(count):
        store(scores.hide(load(s, n), load(mask, n) != 0.0), s, n)


# -- lanes are rows ----------------------------------------------------------------------------------------------------


@njit(**STAGE)
def alibi_of_rows(s, keys, slope, position):
    """position: of the tile's first row, counted from the tile's first key."""
    p = lanes_of(s, 0.0) + lane_numbers(s, 0) + real(s, position)
    slope = real(s, slope)
    for j in range(keys):
        store(scores.with_alibi(load(s, j), slope, p, real(s, j)), s, j)


@njit(**HELPER)
def lane_bounds(s, position, left, right):
    """The first and the last key that each row of a tile sees; the position is its first row's."""
    first, last = geometry.row_bounds(position, left, right)
    return lane_numbers(s, max(-FAR, min(FAR, first))), lane_numbers(s, max(-FAR, min(FAR, last)))


@njit(**STAGE)
def hide_by_position(s, start, stop, position, left, right):
    """-inf for the keys start to stop of a tile that lie outside a row's range."""
    first, last = lane_bounds(s, position, left, right)
    for j in range(start, stop):
        store(scores.hide(load(s, j), geometry.between(j, first, last)), s, j)


@njit(**HELPER)
def hide_from_rows(s, visible, position, left, right):
    """The keys that every row sees are left alone: only the others, before and behind, are looked at."""
    start, keys = visible.start, visible.stop - visible.start
    if start < visible.full_start:
        hide_by_position(s, 0, min(keys, visible.full_start - start), position - start, left, right)
    if visible.stop > visible.full_stop:
        hide_by_position(s, max(0, visible.full_stop - start), keys, position - start, left, right)


@njit(**HELPER)
def rows_of_keys(s, keys):
    """Rows of lanes that hold a tile's keys."""
    return keys


@njit(forceinline=True, **HELPER)
def drop_key(s, at, first, keys, word, threshold, factor):
    if at >= first and at < keys:
        store(ops.select(dropout.kept(word, threshold), load(s, at) * factor, 0.0), s, at)


@njit(**STAGE)
def drop_from_rows(s, keys, row_index, key_index, h, b, round_keys, threshold, factor):
    """Dropout: weights of dropped keys to 0, of kept ones times 1 / (1 - p). Four keys share a counter."""
    i = lane_numbers(s, 0) + np.int32(row_index)
    factor = real(s, factor)
    threshold = np.int32(threshold)
    zero = lane_numbers(s, 0) & 0
    j = 0
    while j < keys:
        group = (key_index + j) >> 2
        word_0, word_1, word_2, word_3 = dropout.philox(
            zero + np.int32(group), i, zero + np.int32(h), zero + np.int32(b), round_keys
        )
        at = group * 4 - key_index  # of the key whose word is the first one
        drop_key(s, at, j, keys, word_0, threshold, factor)
        drop_key(s, at + 1, j, keys, word_1, threshold, factor)
        drop_key(s, at + 2, j, keys, word_2, threshold, factor)
        drop_key(s, at + 3, j, keys, word_3, threshold, factor)
        j = at + 4


# -- lanes are keys ----------------------------------------------------------------------------------------------------


@njit(**STAGE)
def alibi_of_keys(s, count, slope, position):
    """position: of the row, counted from the block's first key."""
    p, slope, width = real(s, position), real(s, slope), tile_width(s)
    for n in range(count):
        store(scores.with_alibi(load(s, n), slope, p, lanes_of(s, 0.0) + lane_numbers(s, n * width)), s, n)


@njit(**STAGE)
def hide_outside(s, count, first, last):
    """-inf outside the keys first to last."""
    width = tile_width(s)
    for n in range(count):
        low, high = np.int32(max(-1, first - n * width)), np.int32(min(width, last - n * width))
        store(scores.hide(load(s, n), geometry.between(lane_numbers(s, 0), low, high)), s, n)


@njit(**HELPER)
def hide_from_keys(s, visible, position, left, right):
    """What fills the last row of lanes is no key; the range that this one row sees is `visible`'s full one."""
    start, keys = visible.start, visible.stop - visible.start
    count = rows_of_lanes(s, keys)
    for j in range(keys, count * tile_width(s)):
        s[j] = -np.inf
    if start < visible.full_start or visible.stop > visible.full_stop:
        hide_outside(s, count, visible.full_start - start, visible.full_stop - 1 - start)


@njit(**HELPER)
def rows_of_lanes(s, keys):
    """Rows of lanes that keys along lanes take."""
    return (keys + tile_width(s) - 1) // tile_width(s)


@njit(**STAGE)
def drop_from_keys(s, keys, row_index, key_index, h, b, round_keys, threshold, factor):
    """The same along a row: every lane draws its key's counter and takes the word that is the key's own."""
    width, factor, threshold = tile_width(s), real(s, factor), np.int32(threshold)
    zero = lane_numbers(s, 0) & 0
    for n in range(rows_of_lanes(s, keys)):
        j = lane_numbers(s, 0) + np.int32(key_index + n * width)
        word_0, word_1, word_2, word_3 = dropout.philox(
            j >> 2, zero + np.int32(row_index), zero + np.int32(h), zero + np.int32(b), round_keys
        )
        word = dropout.word_of_key(word_0, word_1, word_2, word_3, j)
        store(ops.select(dropout.kept(word, threshold), load(s, n) * factor, 0.0), s, n)


# -- all of them, in order ---------------------------------------------------------------------------------------------


def score_rules(rows_of, softcap, alibi, hide):
    """The ordered function for one meaning of lanes."""

    @njit(**HELPER)
    def apply_rules(p, head, s, operands, i, visible, derivative):
        """All rules on the scores of the keys visible.start to visible.stop.

        operands: loaded `operands.Operands`. i: the row of the head, or the tile's first row.
        visible: its full range are the keys that need no mask by position. derivative: where the derivative of the
        rules by the score goes, laid out as s, in the gradient; None elsewhere.
        """
        count, position = rows_of(s, visible.stop - visible.start), i + head.shift
        first, second = operands.first, operands.second
        if p.softcap != 0.0:
            softcap(s, derivative, count, p.softcap)
        if head.slope != 0.0:
            alibi(s, count, head.slope, position - visible.start)
        if first.used and not first.is_mask:
            add_bias(s, first.part, count)
        if second.used and not second.is_mask:
            add_bias(s, second.part, count)
        # A user's function of the score comes here: after all that is added, before whatever hides.
        if first.used and first.is_mask:
            hide_masked(s, first.part, count)
        if second.used and second.is_mask:
            hide_masked(s, second.part, count)
        hide(s, visible, position, p.left, p.right)

    return apply_rules


def weight_dropout(drop):
    @njit(**HELPER)
    def drop_weights(p, head, s, i, key, keys):
        """Dropout of the weights of `keys` keys from `key` on, if there is any, for row i of a head, or from it on."""
        if p.keep_factor != 0.0:
            row_index, key_index = head.row_index + i, p.key_index + key
            drop(s, keys, row_index, key_index, head.h, head.b, p.round_keys, p.drop_below, p.keep_factor)

    return drop_weights


# of a row tile, in the forward and in the gradient, and of a row of decode
apply_rules = score_rules(rows_of_keys, softcap, alibi_of_rows, hide_from_rows)
apply_rules_with_derivative = score_rules(rows_of_keys, softcap_with_derivative, alibi_of_rows, hide_from_rows)
apply_rules_to_row = score_rules(rows_of_lanes, softcap, alibi_of_keys, hide_from_keys)
drop_weights, drop_weights_of_row = weight_dropout(drop_from_rows), weight_dropout(drop_from_keys)
