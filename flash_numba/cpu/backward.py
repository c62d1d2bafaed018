"""The gradient of attention on a CPU: one tile of query rows against the keys they see, block by block.

As in the forward, a SIMD lane is a query row and the score tile is (key, row). P comes from the scores and the LSE that
the forward left, so the S x S matrix is never held, and the same register-tile step makes all five products:

    S[key, row]   = sum_t K[key, t] * Q[t, row]            P = exp(S - lse)
    dP[key, row]  = sum_c V[key, c] * dO[c, row]           dS = P * (dP - delta)
    dV[key, c]   += sum_row P[key, row] * dO[row, c]
    dK[key, t]   += sum_row dS[key, row] * Q[row, t]
    dQ[row, t]   += sum_key dS[key, row] * K[key, t]

In the last three, lanes run along the head dimension, so dK and dV are added to where they lie. An item owns its rows'
dQ and goes through the blocks of keys in ascending order; it adds to a block's dK and dV once its predecessor in the
chain of its key head has (`backward_plan`), which is no wait as long as threads go at one speed.

Dao et al. 2022 (arXiv:2205.14135), appendix B.2 and algorithm 4; Dao 2023 (arXiv:2307.08691), algorithm 2.
"""

from math import inf

from numba import njit, types

from .. import geometry, ops, recurrence, scores
from .backward_plan import CONTROL, ITEM
from .compile import HELPER, STAGE
from .forward import (
    ahead_of,
    ask_for,
    each_item,
    keys_of_tile,
    load_block,
    load_queries,
    multiply_keys,
    of_head,
    operands,
    problem_at,
)
from .head_products import STEP, add_key_gradients, add_query_gradients, add_seen
from .plan import CANCEL
from .rows import all_finite, dot, fetch_row, saturated, transpose, write_row
from .rules import apply_rules, drop_weights, load_terms, softcap_scores
from .simd import (
    address_of,
    give_way,
    itemsize,
    lanes_of,
    load,
    move,
    part,
    pointer_like,
    pointer_to,
    publish,
    read_flag,
    read_progress,
    real,
    record_at,
    store,
    tile_width,
)

control_at, item_at = record_at(CONTROL), record_at(ITEM)
int64_at = pointer_to(types.int64)
ITEM_BYTES = ITEM.itemsize
NEVER = 2**62  # blocks of keys that an item is done with when it is done with all


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def load_rows(to, to_stride, address, rows, row_stride, column_stride, code, columns, scale):
    """Rows of any format as (row, column), scaled."""
    for r in range(rows):
        row = move(to, r * to_stride)
        fetch_row(row, columns, address + r * row_stride, column_stride, code)
        if scale != 1:
            for c in range(columns):
                row[c] *= scale


@njit(**STAGE)
def load_row_numbers(lse, delta, tiles, rows, lse_at, delta_at, dout, dout_stride, staging, out, p, v_scale):
    """Each row's LSE, in base 2, and delta = sum(dO * O) - dLSE, of which the last part stands at `delta_at` before.

    The LSE's rounding would be an error of all the row's P. They are a factor of dO and of delta here instead: P only
    ever comes with one of them.
    """
    lse_in, delta_in, value_dim = pointer_like(lse, lse_at), pointer_like(lse, delta_at), p.value_dim
    for r in range(tiles * tile_width(lse)):
        lse[r] = delta[r] = 0
    for r in range(rows):
        row = move(dout, r * dout_stride)
        fetch_row(staging, value_dim, out + r * p.out_row, p.out_column, p.out_format)
        delta_in[r] += dot(row, staging, value_dim)
        exact = lse_in[r] * scores.LOG2E
        lse[r] = exact
        rounded_off = (exact - lse[r]) * recurrence.LN2
        factor = 1.0 - rounded_off * (1.0 - 0.5 * rounded_off)  # exp(-rounded_off)
        if not abs(rounded_off) < 0.02:  # of an LSE without digits left, which would make more than 1 of P, or of NaN
            factor = 1.0
        delta[r] = delta_in[r] * factor
        factor = real(lse, factor * v_scale)
        for c in range(value_dim):
            row[c] *= factor


@njit(**STAGE)
def fill(to, count, value):
    for i in range(count):
        to[i] = value


@njit(**HELPER)
def load_item(p, g, plan, scratch, first_row, rows, q_at, out_at, dout_at, lse_at, delta_at, scale, v_scale):
    """An item's part of Q and dO, both ways round, and of LSE and delta; dQ and the like to 0."""
    width, size, staging = tile_width(scratch), itemsize(scratch), part(scratch, plan.staging)
    q, q_rows, q_stride = part(scratch, plan.queries), part(scratch, plan.query_rows), plan.q_stride
    dout, dout_rows, dout_stride = part(scratch, plan.douts), part(scratch, plan.dout_rows), plan.dout_stride
    lse, delta, tiles = part(scratch, plan.lse), part(scratch, plan.delta), (rows + width - 1) // width
    q_at, dout_at, out_at = q_at + first_row * p.q_row, dout_at + first_row * g.out_row, out_at + first_row * p.out_row
    lse_at, delta_at = lse_at + first_row * size, delta_at + first_row * size
    q_row, q_column, q_format, dim = p.q_row, p.q_column, p.q_format, p.dim
    value_dim = p.value_dim

    load_rows(dout_rows, dout_stride, dout_at, rows, g.out_row, g.out_column, g.out_format, value_dim, real(q, 1))
    load_row_numbers(lse, delta, tiles, rows, lse_at, delta_at, dout_rows, dout_stride, staging, out_at, p, v_scale)
    for first in range(0, rows, width):  # lanes without a row hold what they held before, which goes nowhere
        source, own_rows = move(dout_rows, first * dout_stride), min(width, rows - first)
        transpose(move(dout, first * value_dim), width, source, dout_stride, own_rows, value_dim)
    load_rows(q_rows, q_stride, q_at, rows, q_row, q_column, q_format, dim, saturated(q, scale / scores.LOG2E))
    load_queries(q, staging, q_at, rows, q_row, q_column, q_format, dim, saturated(q, scale))
    fill(part(scratch, plan.dq), tiles * width * q_stride, 0)
    fill(part(scratch, plan.row_bias), tiles * width, 0)


# -- scores ------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def softcap_slopes(slopes, s, keys, cap):
    """The derivative of soft-capping, from capped scores."""
    inverse = real(s, 1.0 / cap)
    for j in range(keys):
        store(scores.softcap_slope(load(s, j), inverse), slopes, j)


@njit(**STAGE)
def multiply_tile(tile, factors, keys):
    for j in range(keys):
        store(load(tile, j) * load(factors, j), tile, j)


@njit(**STAGE)
def multiply_column(block, stride, factors, keys):
    """A register tile's column of a block, but for what is marked as hidden, by the numbers of a tile."""
    for j in range(keys):
        at = move(block, j * stride)
        w = load(at, 0)
        store(ops.select(w < 0.0, w, w * load(factors, j)), at, 0)


@njit(**STAGE)
def score_gradients(weights, gradients, stride, s, dp, lse, delta, keys, hidden, ahead):
    """P and dS of a register tile into its column of their blocks; P of a hidden key is `hidden`, its dS is 0."""
    lse, delta, hidden = load(lse, 0), load(delta, 0), lanes_of(s, hidden)
    for j in range(keys):
        ask_for(ahead, j)
        score = load(s, j)
        seen = score != -inf
        w = recurrence.probability(score, lse)
        d = recurrence.score_gradient(w, load(dp, j), delta)
        store(ops.select(seen, w, hidden), move(weights, j * stride), 0)
        store(ops.select(seen, d, 0.0), move(gradients, j * stride), 0)


@njit(**STAGE)
def multiply_gradients(gradients, stride, factors, keys):
    """dS by the derivative of soft-capping; a hidden key's stays 0."""
    for j in range(keys):
        at = move(gradients, j * stride)
        d = load(at, 0)
        store(ops.select(d == 0.0, d, d * load(factors, j)), at, 0)


@njit(**STAGE)
def hide_keys(weights, gradients, stride, start, stop, hidden):
    """Keys that no row of a register tile sees."""
    for j in range(start, stop):
        store(lanes_of(weights, hidden), move(weights, j * stride), 0)
        store(lanes_of(weights, 0.0), move(gradients, j * stride), 0)


# -- products ---------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def ranges_at(scratch, offset):
    return int64_at(address_of(scratch) + offset)


@njit(**HELPER)
def add_to_keys(p, g, plan, scratch, dk_at, dv_at, count, hidden):
    """dK and dV of a block of `count` keys, from P and dS in the scratch."""
    size, stride, staging = itemsize(scratch), plan.weight_stride, part(scratch, plan.staging)
    weights, gradients = part(scratch, plan.weights), part(scratch, plan.score_gradients)
    q_rows, dout_rows = part(scratch, plan.query_rows), part(scratch, plan.dout_rows)
    ranges = ranges_at(scratch, plan.row_ranges)
    for of_values in range(2):
        if of_values:
            at, row, a, b, b_stride, columns = dv_at, g.v_row, weights, dout_rows, plan.dout_stride, p.value_dim
        else:
            at, row, a, b, b_stride, columns = dk_at, g.k_row, gradients, q_rows, plan.q_stride, p.dim
        if (g.v if of_values else g.k) == 0:
            continue
        to, to_stride = pointer_like(scratch, at), row // size
        if hidden == 0.0:
            add_key_gradients(to, to_stride, a, stride, b, b_stride, count, columns, ranges)
            continue
        for key in range(count):
            first, end = ranges[key // STEP * 2], ranges[key // STEP * 2 + 1]
            own, w, by = key * stride + first, move(weights, key * stride + first), move(b, first * b_stride)
            add_seen(
                move(to, key * to_stride), 0, move(a, own), w, 0, 1, by, b_stride, 1, end - first, columns, staging
            )


@njit(**HELPER)
def add_to_queries(p, plan, scratch, rows, hidden):
    """dQ of the item, from dS and the block of K in the scratch."""
    width, stride, staging = tile_width(scratch), plan.weight_stride, part(scratch, plan.staging)
    weights, gradients = part(scratch, plan.weights), part(scratch, plan.score_gradients)
    dq, k, q_stride = part(scratch, plan.dq), part(scratch, plan.keys), plan.q_stride
    ranges = ranges_at(scratch, plan.key_ranges)
    for first in range(0, rows, width):
        start, own_rows = ranges[first // width * 2], min(width, rows - first)
        n, at = ranges[first // width * 2 + 1] - start, start * stride + first
        to, a, w, b = move(dq, first * q_stride), move(gradients, at), move(weights, at), move(k, start * q_stride)
        if n > 0 and hidden == 0.0:
            add_query_gradients(to, q_stride, a, stride, b, q_stride, own_rows, p.dim, n)
        elif n > 0:
            add_seen(to, q_stride, a, w, 1, stride, b, q_stride, own_rows, n, p.dim, staging)


@njit(**STAGE)
def add_bias_gradient(to, row_stride, column_stride, staging, gradients, stride, rows, keys):
    """dS of a register tile onto the bias's gradient; a stride of 0 is an axis that the bias repeats along."""
    transpose(staging, keys, gradients, stride, keys, rows)
    if column_stride == 0:
        for r in range(rows):
            total = staging[r * keys]
            for j in range(1, keys):
                total += staging[r * keys + j]
            to[r * row_stride] += total
        return
    if row_stride == 0:
        for r in range(1, rows):
            for j in range(keys):
                staging[j] += staging[r * keys + j]
        rows = 1
    for r in range(rows):
        row = move(to, r * row_stride)
        if column_stride == 1:
            for j in range(keys):
                row[j] += staging[r * keys + j]
        else:
            for j in range(keys):
                row[j * column_stride] += staging[r * keys + j]


@njit(**STAGE)
def add_to_rows(to, stride, numbers, rows):
    for r in range(rows):
        to[r * stride] += numbers[r]


@njit(**STAGE)
def write_rows(dq, stride, rows, columns, factor, to, row_stride, column_stride, code):
    for r in range(rows):
        row = move(dq, r * stride)
        for c in range(columns):
            row[c] *= factor
        write_row(to + r * row_stride, column_stride, code, row, columns)


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def wait_for(progress, blocks, cancel):
    """Wait until an item is done with so many blocks of keys; False if the call was cancelled meanwhile."""
    while read_progress(progress) < blocks:
        if read_flag(cancel) != 0:
            return False
        give_way()
    return True


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
def differentiate_rows(p, plan, item, scratch, control):
    """One item: what up to `block_q` query rows of one head add to the gradients."""
    g = problem_at(plan.gradient)
    width, size = tile_width(scratch), itemsize(scratch)
    dim, value_dim, block_k = p.dim, p.value_dim, plan.block_k
    q, dout = part(scratch, plan.queries), part(scratch, plan.douts)
    lse, delta, row_bias = part(scratch, plan.lse), part(scratch, plan.delta), part(scratch, plan.row_bias)
    s, dp = part(scratch, plan.scores), part(scratch, plan.dout_values)
    keep, slopes = part(scratch, plan.keep), part(scratch, plan.cap_slope)
    bias, mask, staging = part(scratch, plan.bias), part(scratch, plan.mask), part(scratch, plan.staging)
    weights, gradients, stride = part(scratch, plan.weights), part(scratch, plan.score_gradients), plan.weight_stride
    k, v_block = part(scratch, plan.keys), part(scratch, plan.values)
    key_ranges, row_ranges = ranges_at(scratch, plan.key_ranges), ranges_at(scratch, plan.row_ranges)

    own = item_at(plan.table + item * ITEM_BYTES)
    b, h, first_row = own.sequence, own.head, own.first_row
    done, before = plan.progress + item * 8, plan.progress + own.previous * 8
    q_at, k_at, v_at, out_at, lse_at, bias_at, mask_at, queries, keys, shift, row_index = operands(p, b, h)
    dq_at, dk_at, dv_at, dout_at, delta_at, dbias_at, _, _, _, _, _ = operands(g, b, h)
    rows = max(0, min(plan.block_q, queries - first_row))
    tiles = (rows + width - 1) // width
    slope = of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0)
    scale = p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, h // p.k_group, 1.0)  # to base 2
    v_scale = of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, h // p.v_group, 1.0)
    load_item(p, g, plan, scratch, first_row, rows, q_at, out_at, dout_at, lse_at, delta_at, scale, v_scale)

    position = first_row + shift
    start, stop = 0, 0
    if rows > 0:
        start, stop, _, _ = geometry.visible_keys(position, position + rows - 1, p.left, p.right, 0, keys)
    first_block, end_block = start // block_k, (stop + block_k - 1) // block_k
    if plan.walks_all:
        first_block, end_block = 0, (p.keys + block_k - 1) // block_k
    publish(done, first_block)
    rows_finite = all_finite(part(scratch, plan.query_rows), rows, dim, plan.q_stride)
    rows_finite = rows_finite and all_finite(part(scratch, plan.dout_rows), rows, value_dim, plan.dout_stride)
    for block in range(first_block, end_block):
        if read_flag(control + CANCEL) != 0:
            return
        block_start = block * block_k
        block_stop = min(block_start + block_k, stop)
        count = block_stop - block_start
        loaded, skipped, hidden = False, 0, 0.0
        v, v_stride = v_block, value_dim
        if g.bias != 0 and own.previous >= 0 and not wait_for(before, block + 1, control + CANCEL):
            return
        clear_rows(row_ranges, (block_k + STEP - 1) // STEP, rows)
        for tile in range(tiles):
            key_ranges[2 * tile] = key_ranges[2 * tile + 1] = 0
            own_rows, top = min(width, rows - tile * width), position + tile * width
            j0, j1, all0, all1 = keys_of_tile(p, top, own_rows, keys, block_start, block_stop)
            n = j1 - j0
            if n <= 0:
                continue
            row = first_row + tile * width
            kept, has_bias, has_mask = load_terms(p, bias, mask, staging, bias_at, mask_at, row, own_rows, j0, n)
            first, end = j0 - block_start, j1 - block_start
            step_first, step_end = first // STEP * STEP, min((end + STEP - 1) // STEP * STEP, count)
            key_ranges[2 * tile], key_ranges[2 * tile + 1] = step_first, step_end
            mark_rows(row_ranges, step_first, step_end, tile * width, tile * width + own_rows)
            if not kept:
                skipped |= 1 << tile
                continue
            if not loaded:
                loaded = True
                k_from, v_from = k_at + block_start * p.k_row, v_at + block_start * p.v_row
                load_rows(k, plan.q_stride, k_from, count, p.k_row, p.k_column, p.k_format, dim, real(k, 1))
                v, v_stride = load_block(v_block, v_from, count, p.v_row, p.v_column, p.v_format, value_dim)
                if not (rows_finite and all_finite(k, count, dim, plan.q_stride)):
                    hidden = -1.0
            multiply_keys(s, move(k, first * plan.q_stride), plan.q_stride, move(q, tile * width * dim), n, dim)
            multiply_keys(dp, move(v, first * v_stride), v_stride, move(dout, tile * width * value_dim), n, value_dim)
            if p.softcap != 0.0:
                softcap_scores(s, n, p.softcap)
                softcap_slopes(slopes, s, n, p.softcap)
            apply_rules(p, s, bias, mask, has_bias, has_mask, slope, top, j0, n, all0, all1)
            if p.keep_factor != 0.0:
                fill(keep, n * width, 1)
                i = row_index + row
                drop_weights(keep, n, i, p.key_index + j0, h, b, p.round_keys, p.drop_below, p.keep_factor)
                multiply_tile(dp, keep, n)

            at = first * stride + tile * width
            tile_weights, tile_gradients = move(weights, at), move(gradients, at)
            tile_lse, tile_delta = move(lse, tile * width), move(delta, tile * width)
            ahead = ahead_of(p, k_at, v_at, block_stop, tile)
            score_gradients(tile_weights, tile_gradients, stride, s, dp, tile_lse, tile_delta, n, hidden, ahead)
            hide_keys(tile_weights, tile_gradients, stride, step_first - first, 0, hidden)
            hide_keys(tile_weights, tile_gradients, stride, n, step_end - first, hidden)
            if p.keep_factor != 0.0:
                multiply_column(tile_weights, stride, keep, n)
            if g.bias != 0:
                to, row_step = pointer_like(s, dbias_at + row * g.bias_row + j0 * g.bias_column), g.bias_row // size
                if g.bias_column == 0:  # the same number for all keys: kept here until all are done
                    to, row_step = move(row_bias, tile * width), 1
                add_bias_gradient(to, row_step, g.bias_column // size, staging, tile_gradients, stride, own_rows, n)
            if p.softcap != 0.0:
                multiply_gradients(tile_gradients, stride, slopes, n)

        if g.bias == 0 and own.previous >= 0 and not wait_for(before, block + 1, control + CANCEL):
            return
        if loaded:
            for tile in range(tiles):
                if skipped >> tile & 1 != 0:
                    at, n = key_ranges[2 * tile], key_ranges[2 * tile + 1] - key_ranges[2 * tile]
                    moved = at * stride + tile * width
                    hide_keys(move(weights, moved), move(gradients, moved), stride, 0, n, hidden)
                    key_ranges[2 * tile + 1] = at
            dk_to, dv_to = dk_at + block_start * g.k_row, dv_at + block_start * g.v_row
            add_to_keys(p, g, plan, scratch, dk_to, dv_to, count, hidden)
        publish(done, block + 1)
        if loaded and g.q != 0:
            add_to_queries(p, plan, scratch, rows, hidden)
    if g.bias != 0 and g.bias_column == 0:
        if own.previous >= 0 and not wait_for(before, NEVER, control + CANCEL):
            return
        add_to_rows(pointer_like(s, dbias_at + first_row * g.bias_row), g.bias_row // size, row_bias, rows)
    publish(done, NEVER)
    if g.q != 0:
        dq, factor = part(scratch, plan.dq), saturated(q, scale / scores.LOG2E)
        write_rows(dq, plan.q_stride, rows, dim, factor, dq_at + first_row * g.q_row, g.q_row, g.q_column, g.q_format)


backward = each_item(differentiate_rows, control_at)
