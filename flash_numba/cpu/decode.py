"""The attention forward on a CPU for few queries: all query rows that share a key head, against a KV split.

With one query (decoding) or a handful (speculative decoding) there are too few rows to fill SIMD lanes with, and the
time goes into reading K and V. So lanes run along the head dimension for the scores and along the value's columns for
the output, both read in place, once for all rows of the group:

    S[row, key]  = sum_t Q[row, t] * K[key, t]        lanes along t, summed across at the end (`dot_step`)
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]        lanes along c (`product_step`)

Keys are split at fixed multiples, so that one long sequence keeps all threads busy: a work tile is one KV split of one
group of heads. Whoever finishes the last split of a group merges the states of all of them, in the order of their keys
(Flash-Decoding, Dao et al. 2023); the result is the same whoever that is.

Rows are packed: row r is query r % queries of the group's head r // queries.
"""

from math import inf
from typing import Any, NamedTuple

from numba import njit

from .. import geometry, ops, recurrence
from ..geometry import VisibleKeys
from ..problem import Head
from .compile import HELPER, STAGE
from .decode_products import add_values_of_block, multiply_keys_of_block
from .formats import all_finite, saturated, store_row
from .forward import each_work_tile
from .ir.lanes import itemsize, lane, lanes_of, real, scalar, sum_of_lanes, top_of_lanes
from .ir.memory import load, move, part, pointer_like, prefetch, store
from .ir.threads import count_finished, read_flag
from .loading import (
    head_of,
    keys_of,
    load_padded,
    out_of,
    queries_of,
    readable_in_place,
    row_address,
    stride_of,
    tile_keys,
    values_of,
)
from .operands import hidden_value, load_operand_rows, operands_of_row
from .plan import LINE, ROWS
from .rules import apply_rules_to_row, drop_weights_of_row, rows_of_lanes


class State(NamedTuple):
    """Pointers to a state of the recurrence: O, (row, column), and m and l of each row."""

    o: Any
    m: Any
    l: Any


class Split(NamedTuple):
    """A work tile: a group of heads and a KV split."""

    group: int  # its number
    number: int  # of the split
    rows: int
    head: Head  # the group's first query head
    visible: VisibleKeys  # of the split's keys, to some row
    state: State


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def state_at(launch, memory):
    return State(part(memory, launch.output), part(memory, launch.maximum), part(memory, launch.total))


@njit(**HELPER)
def first_state_of(launch, group, scratch):
    """The memory of the first of a group's split states, which lie side by side: a lone one in the scratch."""
    if launch.splits == 1:
        return scratch
    return pointer_like(scratch, launch.workspace + group * launch.splits * launch.state_bytes)


@njit(**HELPER)
def start_split(p, launch, tile, scratch):
    """The work tile of a number, its queries loaded and its state started."""
    heads = min(p.k_group, p.v_group)
    number, group = tile % launch.splits, tile // launch.splits
    key_heads = p.heads // heads
    head = head_of(p, group // key_heads, group % key_heads * heads)
    rows, dim = heads * p.queries, launch.padded_dim
    q, scale = part(scratch, launch.queries), saturated(scratch, head.scale)
    state = state_at(launch, part(first_state_of(launch, group, scratch), number * launch.state_bytes))
    for n in range(heads):
        of_head = queries_of(p, head_of(p, head.b, head.h + n))
        load_padded(move(q, n * p.queries * dim), of_head, 0, p.queries, dim)
    for d in range(rows * dim):
        q[d] *= scale
    for r in range(rows):
        state.m[r], state.l[r] = -inf, 0
    for d in range(rows * dim, launch.query_rows * dim):
        q[d] = 0
    for c in range(rows * launch.padded_value_dim):
        state.o[c] = 0
    start = number * launch.split_keys
    visible = tile_keys(p, head, 0, head.queries, start, start + launch.split_keys)
    return Split(group, number, rows, head, visible, state)


@njit(**HELPER)
def row_keys(p, head, i, start, stop):
    """What query i sees of the keys start to stop; nothing if it lies beyond the sequence's length."""
    return tile_keys(p, head, i, 1 if i < head.queries else 0, start, stop)


# -- score, recur ------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def weigh_row(s, count, m, l, v, v_row, v_bytes):
    """Scores to weights in place: `(m, l, alpha)` brought to the new reference.

    Memory would be idle meanwhile, so each row of lanes asks for the `v_bytes` of a row of V, `v_row` bytes apart from
    v on.
    """
    top = load(s, 0)
    for n in range(1, count):
        top = ops.maximum(top, load(s, n))
    m_new, ref, alpha = recurrence.advance(lane(m), lane(top_of_lanes(top)))
    ref = real(s, scalar(ref))
    total = lanes_of(s, 0.0)
    for n in range(count):
        for byte in range(0, v_bytes, LINE):
            prefetch(v + n * v_row + byte)
        w = recurrence.weight(load(s, n), ref)
        store(w, s, n)
        total = total + w
    l = recurrence.absorb(lane(l), alpha, lane(sum_of_lanes(total)))
    return scalar(m_new), scalar(l), scalar(alpha)


@njit(**STAGE)
def add_seen_values(o, alpha, v, v_stride, s, keys, columns, first, stop, operands):
    """O of one row where V holds NaN or infinity: a key that the row doesn't see is left out. Rare.

    The row sees the keys first to stop, as far as the operands keep them.
    """
    bias, mask = operands.first, operands.second
    bias_hides, mask_hides = hidden_value(o, bias.is_mask), hidden_value(o, mask.is_mask)
    for c in range(columns):
        total = o[c] * 0
        for j in range(keys):
            seen = j >= first and j < stop
            if bias.used:
                seen = seen and bias.part[j] != bias_hides
            if mask.used:
                seen = seen and mask.part[j] != mask_hides
            if seen:
                total += s[j] * v[j * v_stride + c]
        o[c] = alpha * o[c] + total


@njit(**HELPER)
def weigh_rows(p, launch, split, scratch, start, stop):
    """Scores of a block to weights, row by row: rules, recurrence, dropout. Whether some key may be hidden."""
    head, state, n, hides, r = split.head, split.state, stop - start, False, 0
    s, alpha, stride = part(scratch, launch.scores), part(scratch, launch.alpha), launch.score_stride
    bias, mask = part(scratch, launch.bias), part(scratch, launch.mask)
    values, count = values_of(p, head), rows_of_lanes(s, n)
    v_bytes = p.value_dim * p.v_column if p.v_column <= 8 else 0  # of contiguous columns
    while r < split.rows:
        own = head_of(p, head.b, head.h + r // p.queries)
        for i in range(p.queries):
            row, seen = move(s, r * stride), row_keys(p, head, i, start, stop)
            visible = geometry.key_range(start, stop, seen.start, seen.stop)
            operands = operands_of_row(p, move(bias, r * stride), move(mask, r * stride))
            apply_rules_to_row(p, own, row, operands, i, visible, None)
            hides = hides or seen.start > start or seen.stop < stop
            ahead = row_address(values, start + r % ROWS * count)
            state.m[r], state.l[r], alpha[r] = weigh_row(
                row, count, state.m[r], state.l[r], ahead, values.row_stride, v_bytes
            )
            drop_weights_of_row(p, own, row, i, start, n)
            r += 1
    return hides


@njit(**HELPER)
def absorb_values(p, launch, split, scratch, start, stop, hides):
    """O of all rows, from a block's weights."""
    head, o, n, o_stride = split.head, split.state.o, stop - start, launch.padded_value_dim
    s, alpha, stride = part(scratch, launch.scores), part(scratch, launch.alpha), launch.score_stride
    values, v, v_stride = values_of(p, head), part(scratch, launch.values), o_stride
    finite = True
    if hides:
        if readable_in_place(v, values, start, n):
            v, v_stride = pointer_like(v, row_address(values, start)), stride_of(v, values)
        else:
            load_padded(v, values, start, n, o_stride)
        finite = all_finite(v, n, p.value_dim, v_stride)
    if finite:
        block = part(scratch, launch.values)
        add_values_of_block(o, alpha, block, values, start, s, stride, split.rows, n, o_stride)
        return
    bias, mask = part(scratch, launch.bias), part(scratch, launch.mask)
    for r in range(split.rows):
        seen = row_keys(p, head, r % p.queries, start, stop)
        operands = operands_of_row(p, move(bias, r * stride), move(mask, r * stride))
        add_seen_values(
            move(o, r * o_stride), alpha[r], v, v_stride, move(s, r * stride), n, p.value_dim,
            seen.start - start, seen.stop - start, operands,
        )  # fmt: skip


@njit(**HELPER)
def attend_block(p, launch, split, scratch, start, stop):
    """All rows of a work tile against the keys start to stop."""
    s, n, stride = part(scratch, launch.scores), stop - start, launch.score_stride
    bias, mask = part(scratch, launch.bias), part(scratch, launch.mask)
    kept, hides = load_operand_rows(p, split.head, bias, mask, stride, split.rows, start, n)
    if not kept:
        return
    q, block = part(scratch, launch.queries), part(scratch, launch.keys)
    multiply_keys_of_block(s, stride, block, keys_of(p, split.head), start, q, split.rows, n, launch.padded_dim)
    hides = weigh_rows(p, launch, split, scratch, start, stop) or hides
    absorb_values(p, launch, split, scratch, start, stop, hides)


# -- merge, write ------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def merge_splits(o, m, l, first, splits, state_bytes, plan_m, plan_l, rows, o_stride):
    """The state of all keys from the states of all splits, merged in the order of their keys."""
    for r in range(rows):
        row = move(o, r * o_stride)
        top, total = lane(real(o, -inf)), lane(real(o, 0.0))
        for c in range(o_stride):
            row[c] = 0
        for split in range(splits):
            state = part(first, split * state_bytes)
            split_m, split_l = part(state, plan_m)[r], part(state, plan_l)[r]
            top, total, a, b = recurrence.merge(top, total, lane(split_m), lane(split_l))
            mine, theirs, split_o = scalar(a), scalar(b), move(state, r * o_stride)
            for c in range(o_stride):
                row[c] = mine * row[c] + theirs * split_o[c]
        m[r], l[r] = scalar(top), scalar(total)


@njit(**HELPER)
def write_group(p, launch, split, state, scratch):
    """Finalize all rows: take the sinks in, normalize, and store them."""
    staging, size, o_stride = part(scratch, launch.staging), itemsize(scratch), launch.padded_value_dim
    o, m, l, r = state.o, state.m, state.l, 0
    while r < split.rows:
        own = head_of(p, split.head.b, split.head.h + r // p.queries)
        out = out_of(p, own)
        for i in range(p.queries):
            row_lse, normalizer = recurrence.finalize(lane(m[r]), lane(l[r]), lane(real(m, own.sink)))
            pointer_like(o, own.lse + i * size)[0] = scalar(row_lse)
            normalizer = normalizer * lane(real(m, own.v_scale))
            for c in range(p.value_dim):
                staging[c] = scalar(recurrence.normalized(lane(o[r * o_stride + c]), lane(l[r]), normalizer))
            store_row(row_address(out, i), out.column_stride, out.code, staging, out.columns)
            r += 1


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def attend_split(p, launch, tile, scratch, cancel):
    """One work tile; the last one of a group merges and writes."""
    split = start_split(p, launch, tile, scratch)
    block = geometry.next_block(split.visible, 0, launch.block_k)
    while block < split.visible.stop:
        if read_flag(cancel) != 0:
            return
        start, stop = max(block, split.visible.start), min(block + launch.block_k, split.visible.stop)
        attend_block(p, launch, split, scratch, start, stop)
        block = geometry.next_block(split.visible, block + launch.block_k, launch.block_k)

    state = split.state
    if launch.splits > 1:
        if count_finished(launch.finished + split.group * 8) != launch.splits - 1:
            return
        state, first = state_at(launch, scratch), first_state_of(launch, split.group, scratch)
        merge_splits(
            state.o, state.m, state.l, first, launch.splits, launch.state_bytes, launch.maximum, launch.total,
            split.rows, launch.padded_value_dim,
        )  # fmt: skip
    write_group(p, launch, split, state, scratch)


decode = each_work_tile(attend_split)
