"""The gradient of attention on a CPU: one tile of query rows against the keys they see, block by block.

As in the forward, a SIMD lane is a query row and the score tile is (key, row). P comes from the scores and the LSE that
the forward left, so the S x S matrix is never held, and the same register-tile step makes all five products:

    S[key, row]   = sum_t K[key, t] * Q[t, row]            P = exp(S - lse)
    dP[key, row]  = sum_c V[key, c] * dO[c, row]           dS = P * (dP - delta)
    dV[key, c]   += sum_row P[key, row] * dO[row, c]
    dK[key, t]   += sum_row dS[key, row] * Q[row, t]
    dQ[row, t]   += sum_key dS[key, row] * K[key, t]

In the last three, lanes run along the head dimension, so dK and dV are added to where they lie. A work tile owns its
rows' dQ and goes through the key blocks in ascending order; it adds to a block's dK and dV once its predecessor in the
chain of its key head has (`backward_plan`), which is no wait as long as threads go at one speed.

Dao et al. 2022 (arXiv:2205.14135), appendix B.2 and algorithm 4; Dao 2023 (arXiv:2307.08691), algorithm 2.
"""

from math import inf
from typing import Any, NamedTuple

from numba import njit, types

from .. import geometry, ops, recurrence, scores
from ..geometry import VisibleKeys
from ..problem import Head
from .backward_plan import CHAINED_TILE, LAUNCH_PARAMETERS
from .backward_products import STEP, add_bias_gradient, add_key_gradients, add_query_gradients, add_seen, fill
from .compile import HELPER, STAGE
from .formats import all_finite, dot, load_row, saturated, store_row, transpose
from .forward import each_work_tile, multiply_keys
from .ir.lanes import itemsize, lane, lanes_of, real, scalar, tile_width
from .ir.memory import address_of, load, move, part, pointer_like, pointer_to, record_at, store
from .ir.threads import give_way, publish, read_flag, read_progress
from .loading import (
    ahead_of,
    head_of,
    keys_of,
    load_block,
    load_queries,
    load_rows,
    out_of,
    prefetch_row,
    problem_at,
    queries_of,
    row_address,
    tile_keys,
    values_of,
)
from .operands import load_operands
from .rules import apply_rules_with_derivative, drop_weights

launch_at, chained_tile_at = record_at(LAUNCH_PARAMETERS), record_at(CHAINED_TILE)
int64_at = pointer_to(types.int64)
CHAINED_TILE_BYTES = CHAINED_TILE.itemsize
ALL_BLOCKS_DONE = 2**62  # the progress of a work tile that is done with every block


class WorkTile(NamedTuple):
    """What a work tile is, and whom it waits for."""

    head: Head
    gradients: Head  # where the head's dq, dk, dv, dout, delta and dbias lie, as q, k, v, out, lse and bias
    first_row: int
    rows: int
    visible: VisibleKeys
    finite: bool  # whether its Q and dO hold neither NaN nor infinity
    done: int  # address of its own progress
    before: int  # and of its predecessor's; 0 without one


class KeyBlock(NamedTuple):
    """A block of keys: where it starts and how many it has, V, and what marks a hidden key in P (0: nothing)."""

    start: int
    count: int
    v: Any
    v_stride: int
    hidden: float


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def load_row_numbers(lse, delta, tiles, rows, lse_at, delta_at, dout, dout_stride, staging, out, first, v_scale):
    """Each row's LSE, in base 2, and delta = sum(dO * O) - dLSE, of which the last part stands at `delta_at` before.

    The LSE's rounding would be an error of all the row's P. They are a factor of dO and of delta here instead: P only
    ever comes with one of them.
    """
    lse_in, delta_in, value_dim = pointer_like(lse, lse_at), pointer_like(lse, delta_at), out.columns
    for r in range(tiles * tile_width(lse)):
        lse[r] = delta[r] = 0
    for r in range(rows):
        row = move(dout, r * dout_stride)
        load_row(staging, value_dim, row_address(out, first + r), out.column_stride, out.code)
        delta_in[r] += dot(row, staging, value_dim)
        exact = lse_in[r] * scores.LOG2E
        lse[r] = exact
        factor = scalar(recurrence.rounding_factor(lane((exact - lse[r]) * recurrence.LN2)))
        delta[r] = delta_in[r] * factor
        factor = real(lse, factor * v_scale)
        for c in range(value_dim):
            row[c] *= factor


@njit(**HELPER)
def load_work_tile(p, g, launch, scratch, head, gradients, first_row, rows):
    """Its part of Q and dO, both ways round, and of LSE and delta; dQ to 0. Whether Q and dO are finite."""
    width, size, staging = tile_width(scratch), itemsize(scratch), part(scratch, launch.staging)
    q, q_rows, q_stride = part(scratch, launch.queries), part(scratch, launch.query_rows), launch.q_stride
    dout, dout_rows, dout_stride = part(scratch, launch.douts), part(scratch, launch.dout_rows), launch.dout_stride
    lse, delta, tiles = part(scratch, launch.lse), part(scratch, launch.delta), (rows + width - 1) // width
    lse_at, delta_at, queries = head.lse + first_row * size, gradients.lse + first_row * size, queries_of(p, head)

    load_rows(dout_rows, dout_stride, out_of(g, gradients), first_row, rows, real(q, 1))
    load_row_numbers(
        lse, delta, tiles, rows, lse_at, delta_at, dout_rows, dout_stride, staging, out_of(p, head), first_row,
        head.v_scale,
    )  # fmt: skip
    for first in range(0, rows, width):  # lanes without a row hold what they held before, which goes nowhere
        source, own_rows = move(dout_rows, first * dout_stride), min(width, rows - first)
        transpose(move(dout, first * p.value_dim), width, source, dout_stride, own_rows, p.value_dim)
    load_rows(q_rows, q_stride, queries, first_row, rows, saturated(q, head.scale / scores.LOG2E))
    load_queries(q, staging, queries, first_row, rows, saturated(q, head.scale))
    fill(part(scratch, launch.dq), tiles * width * q_stride, 0)
    fill(part(scratch, launch.row_bias), tiles * width, 0)
    finite = all_finite(q_rows, rows, p.dim, q_stride)
    return finite and all_finite(dout_rows, rows, p.value_dim, dout_stride)


@njit(**HELPER)
def start_work_tile(p, g, launch, number, scratch):
    own = chained_tile_at(launch.table + number * CHAINED_TILE_BYTES)
    head, gradients, first_row = head_of(p, own.sequence, own.head), head_of(g, own.sequence, own.head), own.first_row
    rows = max(0, min(launch.block_q, head.queries - first_row))
    finite = load_work_tile(p, g, launch, scratch, head, gradients, first_row, rows)
    visible = tile_keys(p, head, first_row, rows, 0, head.keys)
    before = launch.progress + own.previous * 8 if own.previous >= 0 else 0
    return WorkTile(head, gradients, first_row, rows, visible, finite, launch.progress + number * 8, before)


# -- scores ------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def multiply_tile(tile, factors, keys):
    for j in range(keys):
        store(load(tile, j) * load(factors, j), tile, j)


@njit(**STAGE)
def multiply_column(block, stride, factors, keys):
    """A row tile's column of a block, but for what is marked as hidden, by the numbers of a tile."""
    for j in range(keys):
        at = move(block, j * stride)
        w = load(at, 0)
        store(ops.select(w < 0.0, w, w * load(factors, j)), at, 0)


@njit(**STAGE)
def score_gradients(weights, gradients, stride, s, dp, lse, delta, keys, hidden, ahead):
    """P and dS of a row tile into its column of their blocks; P of a hidden key is `hidden`, its dS is 0."""
    lse, delta, hidden = load(lse, 0), load(delta, 0), lanes_of(s, hidden)
    for j in range(keys):
        prefetch_row(ahead, j)
        score = load(s, j)
        seen = score != -inf
        w = recurrence.probability(score, lse)
        d = recurrence.score_gradient(w, load(dp, j), delta)
        store(ops.select(seen, w, hidden), move(weights, j * stride), 0)
        store(ops.select(seen, d, 0.0), move(gradients, j * stride), 0)


@njit(**STAGE)
def multiply_gradients(gradients, stride, factors, keys):
    """dS by the derivative of the rules; a hidden key's stays 0."""
    for j in range(keys):
        at = move(gradients, j * stride)
        d = load(at, 0)
        store(ops.select(d == 0.0, d, d * load(factors, j)), at, 0)


@njit(**STAGE)
def hide_keys(weights, gradients, stride, start, stop, hidden):
    """Keys that no row of a row tile sees."""
    for j in range(start, stop):
        store(lanes_of(weights, hidden), move(weights, j * stride), 0)
        store(lanes_of(weights, 0.0), move(gradients, j * stride), 0)


@njit(**HELPER)
def differentiate_row_tile(p, g, launch, work, scratch, block, first, rows, seen, step_first, step_end, operands):
    """P and dS of one row tile into its column of their blocks, and dS onto the bias's gradient.

    first: the row, among the work tile's. seen: the keys that its rows see; with those that fill steps of the products
    up, the block's keys step_first to step_end.
    """
    width, size, n = tile_width(scratch), itemsize(scratch), seen.stop - seen.start
    s, dp, q = part(scratch, launch.scores), part(scratch, launch.dout_values), part(scratch, launch.queries)
    keep, slopes, staging = part(scratch, launch.keep), part(scratch, launch.cap_slope), part(scratch, launch.staging)
    k, dout = part(scratch, launch.keys), part(scratch, launch.douts)
    head, row, key, stride = work.head, work.first_row + first, seen.start - block.start, launch.weight_stride

    multiply_keys(s, move(k, key * launch.q_stride), launch.q_stride, move(q, first * p.dim), n, p.dim)
    v = move(block.v, key * block.v_stride)
    multiply_keys(dp, v, block.v_stride, move(dout, first * p.value_dim), n, p.value_dim)
    apply_rules_with_derivative(p, head, s, operands, row, seen, slopes)
    if p.keep_factor != 0.0:
        fill(keep, n * width, 1)
        drop_weights(p, head, keep, row, seen.start, n)
        multiply_tile(dp, keep, n)

    weights = move(part(scratch, launch.weights), key * stride + first)
    gradients = move(part(scratch, launch.score_gradients), key * stride + first)
    lse, delta = move(part(scratch, launch.lse), first), move(part(scratch, launch.delta), first)
    ahead = ahead_of(p, head, block.start + block.count, first // width)
    score_gradients(weights, gradients, stride, s, dp, lse, delta, n, block.hidden, ahead)
    hide_keys(weights, gradients, stride, step_first - key, 0, block.hidden)
    hide_keys(weights, gradients, stride, n, step_end - key, block.hidden)
    if p.keep_factor != 0.0:
        multiply_column(weights, stride, keep, n)
    if g.bias != 0:
        to = pointer_like(s, work.gradients.bias + row * g.bias_row + seen.start * g.bias_column)
        row_step = g.bias_row // size
        if g.bias_column == 0:  # the same number for all keys: kept here until all are done
            to, row_step = move(part(scratch, launch.row_bias), first), 1
        add_bias_gradient(to, row_step, g.bias_column // size, staging, gradients, stride, rows, n)
    if p.softcap != 0.0:
        multiply_gradients(gradients, stride, slopes, n)


# -- products ---------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def ranges_at(scratch, offset):
    return int64_at(address_of(scratch) + offset)


@njit(**STAGE)
def clear_rows(row_ranges, steps, rows):
    for step in range(steps):
        row_ranges[2 * step], row_ranges[2 * step + 1] = rows, 0


@njit(**STAGE)
def mark_rows(row_ranges, start, stop, first_row, end_row):
    """The rows first_row to end_row see some of the keys start to stop."""
    for step in range(start // STEP, (stop + STEP - 1) // STEP):
        row_ranges[2 * step] = min(row_ranges[2 * step], first_row)
        row_ranges[2 * step + 1] = max(row_ranges[2 * step + 1], end_row)


@njit(**HELPER)
def add_to_keys(p, g, launch, work, scratch, block):
    """dK and dV of a block of keys, from P and dS in the scratch."""
    stride, staging = launch.weight_stride, part(scratch, launch.staging)
    weights, gradients = part(scratch, launch.weights), part(scratch, launch.score_gradients)
    ranges = ranges_at(scratch, launch.row_ranges)
    for of_values in range(2):
        if of_values:
            to_rows, a, b, b_stride = values_of(g, work.gradients), weights, launch.dout_rows, launch.dout_stride
        else:
            to_rows, a, b, b_stride = keys_of(g, work.gradients), gradients, launch.query_rows, launch.q_stride
        if (g.v if of_values else g.k) == 0:
            continue
        b, columns = part(scratch, b), p.value_dim if of_values else p.dim
        to = pointer_like(scratch, row_address(to_rows, block.start))
        to_stride = to_rows.row_stride // itemsize(scratch)
        if block.hidden == 0.0:
            add_key_gradients(to, to_stride, a, stride, b, b_stride, block.count, columns, ranges)
            continue
        for key in range(block.count):
            first, end = ranges[key // STEP * 2], ranges[key // STEP * 2 + 1]
            own, w, by = key * stride + first, move(weights, key * stride + first), move(b, first * b_stride)
            add_seen(
                move(to, key * to_stride), 0, move(a, own), w, 0, 1, by, b_stride, 1, end - first, columns, staging
            )


@njit(**HELPER)
def add_to_queries(p, launch, work, scratch, hidden):
    """dQ of the work tile, from dS and the block of K in the scratch."""
    width, stride, staging = tile_width(scratch), launch.weight_stride, part(scratch, launch.staging)
    weights, gradients = part(scratch, launch.weights), part(scratch, launch.score_gradients)
    dq, k, q_stride = part(scratch, launch.dq), part(scratch, launch.keys), launch.q_stride
    ranges = ranges_at(scratch, launch.key_ranges)
    for first in range(0, work.rows, width):
        start, own_rows = ranges[first // width * 2], min(width, work.rows - first)
        n, at = ranges[first // width * 2 + 1] - start, start * stride + first
        to, a, w, b = move(dq, first * q_stride), move(gradients, at), move(weights, at), move(k, start * q_stride)
        if n > 0 and hidden == 0.0:
            add_query_gradients(to, q_stride, a, stride, b, q_stride, own_rows, p.dim, n)
        elif n > 0:
            add_seen(to, q_stride, a, w, 1, stride, b, q_stride, own_rows, n, p.dim, staging)


# -- write -------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def add_to_rows(to, stride, numbers, rows):
    for r in range(rows):
        to[r * stride] += numbers[r]


@njit(**STAGE)
def write_rows(dq, stride, rows, factor, to, first):
    for r in range(rows):
        row = move(dq, r * stride)
        for c in range(to.columns):
            row[c] *= factor
        store_row(row_address(to, first + r), to.column_stride, to.code, row, to.columns)


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def wait_for(progress, blocks, cancel):
    """Wait until a work tile is done with so many blocks of keys; False if the call was cancelled meanwhile."""
    while read_progress(progress) < blocks:
        if read_flag(cancel) != 0:
            return False
        give_way()
    return True


@njit(**HELPER)
def load_key_block(p, launch, work, scratch, start, count):
    """K with its rows apart, V in place where the format allows."""
    k, head = part(scratch, launch.keys), work.head
    load_rows(k, launch.q_stride, keys_of(p, head), start, count, real(k, 1))
    v, v_stride = load_block(part(scratch, launch.values), values_of(p, head), start, count)
    hidden = 0.0 if work.finite and all_finite(k, count, p.dim, launch.q_stride) else -1.0
    return KeyBlock(start, count, v, v_stride, hidden)


@njit(**HELPER)
def score_block(p, g, launch, work, scratch, start, count):
    """P and dS of all rows against a block of keys: `(whether there are any, the KeyBlock)`."""
    width, staging = tile_width(scratch), part(scratch, launch.staging)
    bias, mask = part(scratch, launch.bias), part(scratch, launch.mask)
    key_ranges, row_ranges = ranges_at(scratch, launch.key_ranges), ranges_at(scratch, launch.row_ranges)
    block, loaded, skipped = KeyBlock(start, count, part(scratch, launch.values), p.value_dim, 0.0), False, 0
    clear_rows(row_ranges, (launch.block_k + STEP - 1) // STEP, work.rows)
    for first in range(0, work.rows, width):
        tile, row, rows = first // width, work.first_row + first, min(width, work.rows - first)
        key_ranges[2 * tile] = key_ranges[2 * tile + 1] = 0
        seen = tile_keys(p, work.head, row, rows, start, start + count)
        n = seen.stop - seen.start
        if geometry.block_state(seen, seen.start, seen.stop) == geometry.SKIP:
            continue
        kept, operands = load_operands(p, work.head, bias, mask, staging, row, rows, seen.start, n)
        step_first = (seen.start - start) // STEP * STEP
        step_end = min((seen.stop - start + STEP - 1) // STEP * STEP, count)
        key_ranges[2 * tile], key_ranges[2 * tile + 1] = step_first, step_end
        mark_rows(row_ranges, step_first, step_end, first, first + rows)
        if not kept:
            skipped |= 1 << tile
            continue
        if not loaded:
            loaded, block = True, load_key_block(p, launch, work, scratch, start, count)
        differentiate_row_tile(p, g, launch, work, scratch, block, first, rows, seen, step_first, step_end, operands)
    if loaded and skipped != 0:
        hide_skipped(launch, work, scratch, skipped, block.hidden)
    return loaded, block


@njit(**HELPER)
def hide_skipped(launch, work, scratch, skipped, hidden):
    """Row tiles, bits of `skipped`, of which operands hide all keys of a block that others see."""
    width, stride, ranges = tile_width(scratch), launch.weight_stride, ranges_at(scratch, launch.key_ranges)
    for first in range(0, work.rows, width):
        tile = first // width
        if skipped >> tile & 1 != 0:
            start, stop = ranges[2 * tile], ranges[2 * tile + 1]
            weights = move(part(scratch, launch.weights), start * stride + first)
            gradients = move(part(scratch, launch.score_gradients), start * stride + first)
            hide_keys(weights, gradients, stride, 0, stop - start, hidden)
            ranges[2 * tile + 1] = start


@njit(**HELPER)
def differentiate_block(p, g, launch, work, scratch, start, cancel):
    """What all rows of a work tile add to the gradients for one block of keys; False if the call was cancelled."""
    blocks = start // launch.block_k + 1  # of which to be done with
    count = min(start + launch.block_k, work.visible.stop) - start
    if g.bias != 0 and work.before != 0 and not wait_for(work.before, blocks, cancel):
        return False
    loaded, block = score_block(p, g, launch, work, scratch, start, count)
    if g.bias == 0 and work.before != 0 and not wait_for(work.before, blocks, cancel):
        return False
    if loaded:
        add_to_keys(p, g, launch, work, scratch, block)
    publish(work.done, blocks)
    if loaded and g.q != 0:
        add_to_queries(p, launch, work, scratch, block.hidden)
    return True


@njit(**HELPER)
def differentiate_work_tile(p, launch, number, scratch, cancel):
    """One work tile: what up to `block_q` query rows of one head add to the gradients."""
    g, size = problem_at(launch.gradient), itemsize(scratch)
    work = start_work_tile(p, g, launch, number, scratch)
    walked = work.visible
    if launch.walks_all:
        walked = geometry.key_range(0, p.keys, 0, 0)
    start = geometry.next_block(walked, 0, launch.block_k)
    publish(work.done, start // launch.block_k)
    while start < walked.stop:
        if read_flag(cancel) != 0 or not differentiate_block(p, g, launch, work, scratch, start, cancel):
            return
        start = geometry.next_block(walked, start + launch.block_k, launch.block_k)

    if g.bias != 0 and g.bias_column == 0:
        if work.before != 0 and not wait_for(work.before, ALL_BLOCKS_DONE, cancel):
            return
        to = pointer_like(scratch, work.gradients.bias + work.first_row * g.bias_row)
        add_to_rows(to, g.bias_row // size, part(scratch, launch.row_bias), work.rows)
    publish(work.done, ALL_BLOCKS_DONE)
    if g.q != 0:
        dq, factor = part(scratch, launch.dq), saturated(scratch, work.head.scale / scores.LOG2E)
        write_rows(dq, launch.q_stride, work.rows, factor, queries_of(g, work.gradients), work.first_row)


backward = each_work_tile(differentiate_work_tile, launch_at)
