"""The attention forward on a CPU for few queries: all query rows that share a key head, against a share of its keys.

With one query (decoding) or a handful (speculative decoding) there are too few rows to fill SIMD lanes with, and the
time goes into reading K and V. So lanes run along the head dimension for the scores and along the value's columns for
the output, both read in place, once for all rows of the group:

    S[row, key]  = sum_t Q[row, t] * K[key, t]        lanes along t, summed across at the end (`simd.dot_step`)
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]        lanes along c (`simd.product_step`)

Keys are split at fixed multiples into items, so that one long sequence keeps all threads busy. Whoever finishes the
last share of a head merges all of them, in the order of their keys (Flash-Decoding, Dao et al. 2023); the result is the
same whoever that is.
"""

from math import inf

import numpy as np
from numba import njit

from .. import dropout, geometry, ops, recurrence, scores
from ..dtypes import BOOL
from .compile import HELPER, STAGE
from .forward import each_item, of_head, operands
from .plan import CANCEL, LINE, ROWS
from .products import add_values_of_block, load_padded, multiply_keys_of_block
from .rows import all_finite, fetch_row, in_place, saturated, write_row
from .rules import apply_term, hidden_value, scan_bias, softcap_scores
from .simd import (
    finish_ticket,
    itemsize,
    lane,
    lanes_of,
    load,
    move,
    part,
    pointer_like,
    prefetch,
    read_flag,
    real,
    row_numbers,
    scalar,
    store,
    sum_of_lanes,
    tile_width,
    top_of_lanes,
)

# -- load --------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def load_row_term(term, address, keys, stride, code):
    """A mask's or a bias's part of a row: `(some key is kept, some key may be hidden)`."""
    fetch_row(term, keys, address, stride, code)
    if code == BOOL:
        some, every = False, True
        for j in range(keys):
            some |= term[j] != 0
            every &= term[j] != 0
        return some, not every
    return scan_bias(term, keys, False), True


# -- score -------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def alibi_row(s, tiles, slope, position):
    """position: of the row, counted from the block's first key."""
    p, slope, width = real(s, position), real(s, slope), tile_width(s)
    for t in range(tiles):
        store(scores.with_alibi(load(s, t), slope, p, lanes_of(s, 0.0) + row_numbers(s, t * width)), s, t)


@njit(**STAGE)
def hide_row(s, tiles, first, last):
    """-inf outside the keys first to last."""
    width = tile_width(s)
    for t in range(tiles):
        low, high = np.int32(max(-1, first - t * width)), np.int32(min(width, last - t * width))
        store(scores.hide(load(s, t), geometry.between(row_numbers(s, 0), low, high)), s, t)


@njit(**STAGE)
def weigh_row(s, tiles, m, l, v, v_row, v_bytes):
    """Scores to weights in place: `(m, l, alpha)` brought to the new reference.

    Memory would be idle meanwhile, so each tile asks for the `v_bytes` of a row of V, `v_row` bytes apart from v on.
    """
    top = load(s, 0)
    for t in range(1, tiles):
        top = ops.maximum(top, load(s, t))
    m_new, ref, alpha = recurrence.advance(lane(m), lane(top_of_lanes(top)))
    ref = real(s, scalar(ref))
    total = lanes_of(s, 0.0)
    for t in range(tiles):
        for byte in range(0, v_bytes, LINE):
            prefetch(v + t * v_row + byte)
        w = recurrence.weight(load(s, t), ref)
        store(w, s, t)
        total = total + w
    return scalar(m_new), scalar(alpha * lane(l) + lane(sum_of_lanes(total))), scalar(alpha)


@njit(**STAGE)
def drop_row(s, tiles, i, key_index, h, b, round_keys, threshold, factor):
    """Dropout along a row: every lane draws its key's counter and takes the word that is the key's own."""
    width, factor, threshold = tile_width(s), real(s, factor), np.int32(threshold)
    zero = row_numbers(s, 0) & 0
    for t in range(tiles):
        j = row_numbers(s, 0) + np.int32(key_index + t * width)
        words = dropout.philox(j >> 2, zero + np.int32(i), zero + np.int32(h), zero + np.int32(b), round_keys)
        word = ops.select((j & 2) != 0, words[2], words[0])
        odd = ops.select((j & 2) != 0, words[3], words[1])
        word = ops.select((j & 1) != 0, odd, word)
        store(ops.select(dropout.kept(word, threshold), load(s, t) * factor, 0.0), s, t)


# -- recur -------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def add_seen_values(o, alpha, v, v_stride, s, keys, columns, first, last, bias, has_bias, mask, has_mask, codes):
    """The same for one row where V holds NaN or infinity: a key that the row doesn't see is left out. Rare."""
    bias_hides, mask_hides = hidden_value(o, codes[0]), hidden_value(o, codes[1])
    for c in range(columns):
        total = o[c] * 0
        for j in range(keys):
            seen = j >= first and j <= last
            if has_bias:
                seen = seen and bias[j] != bias_hides
            if has_mask:
                seen = seen and mask[j] != mask_hides
            if seen:
                total += s[j] * v[j * v_stride + c]
        o[c] = alpha * o[c] + total


@njit(**STAGE)
def merge_shares(o, m, l, first, shares, share_bytes, plan_m, plan_l, rows, o_stride):
    """The state of all keys from the states of all shares, merged in the order of their keys."""
    for r in range(rows):
        row = move(o, r * o_stride)
        top, total = lane(real(o, -inf)), lane(real(o, 0.0))
        for c in range(o_stride):
            row[c] = 0
        for share in range(shares):
            state = part(first, share * share_bytes)
            share_m, share_l = part(state, plan_m)[r], part(state, plan_l)[r]
            top, total, a, b = recurrence.merge(top, total, lane(share_m), lane(share_l))
            mine, theirs, share_o = scalar(a), scalar(b), move(state, r * o_stride)
            for c in range(o_stride):
                row[c] = mine * row[c] + theirs * share_o[c]
        m[r], l[r] = scalar(top), scalar(total)


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def attend_share(p, plan, item, scratch, control):
    """One item: all rows of a group of query heads against one share of the keys."""
    size, width = itemsize(scratch), tile_width(scratch)
    group = min(p.k_group, p.v_group)
    share, g = item % plan.shares, item // plan.shares
    key_heads = p.heads // group
    b, h0 = g // key_heads, g % key_heads * group
    q_at, k_at, v_at, out_at, lse_at, bias_at, mask_at, queries, keys, shift, row_index = operands(p, b, h0)
    rows, dim, o_stride, s_stride = group * p.queries, plan.padded_dim, plan.padded_value_dim, plan.score_stride
    q, s, alpha = part(scratch, plan.queries), part(scratch, plan.scores), part(scratch, plan.alpha)
    k_block, v_block = part(scratch, plan.keys), part(scratch, plan.values)
    bias, mask, staging = part(scratch, plan.bias), part(scratch, plan.mask), part(scratch, plan.staging)
    alone = plan.shares == 1
    first_state = scratch if alone else pointer_like(scratch, plan.workspace + g * plan.shares * plan.state_bytes)
    state = part(first_state, share * plan.state_bytes)
    o, m, l = part(state, plan.output), part(state, plan.maximum), part(state, plan.total)

    scale = saturated(q, p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, h0 // p.k_group, 1.0))
    for r in range(rows):
        at = q_at + r // p.queries * p.q_head + r % p.queries * p.q_row
        load_padded(move(q, r * dim), at, 1, 0, p.q_column, p.q_format, p.dim, dim)
        for d in range(dim):
            q[r * dim + d] *= scale
        m[r], l[r] = -inf, 0
    for d in range(rows * dim, plan.query_rows * dim):
        q[d] = 0
    for c in range(rows * o_stride):
        o[c] = 0

    start, stop, _, _ = geometry.visible_keys(shift, shift + queries - 1, p.left, p.right, 0, keys)
    start, stop = max(start, share * plan.share_keys), min(stop, (share + 1) * plan.share_keys)
    has_bias, has_mask = p.bias != 0, p.mask != 0
    for j0 in range(start // plan.block_k * plan.block_k, stop, plan.block_k):
        if read_flag(control + CANCEL) != 0:
            return
        j0, j1 = max(j0, start), min(j0 + plan.block_k, stop)
        n = j1 - j0
        if n <= 0:
            continue
        tiles = (n + width - 1) // width
        hides, kept = False, not (has_bias or has_mask)
        for r in range(rows if has_bias or has_mask else 0):
            h, i = r // p.queries, r % p.queries
            row_kept = True
            if has_bias:
                at = bias_at + h * p.bias_head + i * p.bias_row + j0 * p.bias_column
                row_kept, hidden = load_row_term(move(bias, r * s_stride), at, n, p.bias_column, p.bias_format)
                hides = hides | hidden
            if has_mask:
                at = mask_at + h * p.mask_head + i * p.mask_row + j0 * p.mask_column
                mask_kept, hidden = load_row_term(move(mask, r * s_stride), at, n, p.mask_column, p.mask_format)
                row_kept, hides = row_kept & mask_kept, hides | hidden
            kept = kept | row_kept
        if not kept:
            continue
        multiply_keys_of_block(
            s, s_stride, k_block, k_at + j0 * p.k_row, p.k_row, p.k_column, p.k_format, q, rows, n, p.dim, dim
        )
        for r in range(rows):
            row, h, i = move(s, r * s_stride), h0 + r // p.queries, r % p.queries
            if p.softcap != 0.0:
                softcap_scores(row, tiles, p.softcap)
            slope = of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0)
            if slope != 0.0:
                alibi_row(row, tiles, slope, shift + i - j0)
            if has_bias:
                apply_term(row, move(bias, r * s_stride), tiles, p.bias_format == BOOL)
            if has_mask:
                apply_term(row, move(mask, r * s_stride), tiles, p.mask_format == BOOL)
            for j in range(n, tiles * width):  # what fills the last tile is no key
                row[j] = -inf
            first, last = shift + i - p.left - j0, shift + i + p.right - j0
            if i >= queries:
                first, last = 0, -1
            if first > 0 or last < n - 1:
                hides = True
                hide_row(row, tiles, first, last)
            at = v_at + (j0 + r % ROWS * tiles) * p.v_row
            v_bytes = p.value_dim * p.v_column if p.v_column <= 8 else 0  # of contiguous columns
            m[r], l[r], alpha[r] = weigh_row(row, tiles, m[r], l[r], at, p.v_row, v_bytes)
            if p.keep_factor != 0.0:
                at = p.key_index + j0
                drop_row(row, tiles, row_index + i, at, h, b, p.round_keys, p.drop_below, p.keep_factor)

        v_from, v, v_stride = v_at + j0 * p.v_row, v_block, o_stride
        if hides and in_place(v, v_from, p.v_row, p.v_column, p.v_format):
            v, v_stride = pointer_like(v, v_from), p.v_row // size
        elif hides:
            load_padded(v, v_from, n, p.v_row, p.v_column, p.v_format, p.value_dim, o_stride)
        if hides and not all_finite(v, n, p.value_dim, v_stride):
            for r in range(rows):
                i = r % p.queries
                first, last = shift + i - p.left - j0, shift + i + p.right - j0
                if i >= queries:
                    first, last = 0, -1
                add_seen_values(
                    move(o, r * o_stride), alpha[r], v, v_stride, move(s, r * s_stride), n, p.value_dim, first, last,
                    move(bias, r * s_stride), has_bias, move(mask, r * s_stride), has_mask,
                    (p.bias_format, p.mask_format),
                )  # fmt: skip
        else:
            add_values_of_block(
                o, alpha, v_block, v_from, p.v_row, p.v_column, p.v_format, s, s_stride, rows, n, p.value_dim, o_stride
            )

    if not alone:
        if finish_ticket(plan.finished + g * 8) != plan.shares - 1:
            return
        o, m, l = part(scratch, plan.output), part(scratch, plan.maximum), part(scratch, plan.total)
        merge_shares(
            o, m, l, first_state, plan.shares, plan.state_bytes, plan.maximum, plan.total, rows, o_stride
        )  # fmt: skip
    v_scale = of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, h0 // p.v_group, 1.0)
    for r in range(rows):
        h, i = r // p.queries, r % p.queries
        sink = of_head(p.sinks, p.sink_batch, p.sink_head, b, h0 + h, -inf)
        row_lse, factor = recurrence.finalize(lane(m[r]), lane(l[r]), lane(real(m, sink)))
        pointer_like(o, lse_at + h * p.lse_head + i * size)[0] = scalar(row_lse)
        factor = factor * lane(real(m, v_scale))
        for c in range(p.value_dim):
            staging[c] = scalar(recurrence.normalized(lane(o[r * o_stride + c]), lane(l[r]), factor))
        to = out_at + h * p.out_head + i * p.out_row
        write_row(to, p.out_column, p.out_format, staging, p.value_dim)


decode = each_item(attend_share)
