"""The attention forward on a CPU: one tile of query rows against the keys they see, block by block.

A SIMD lane is a query row. The score tile is kept transposed, (key, row), so maximum, exp2 and sum run across lanes
with no horizontal operation, and both matrix products are the same register-tile step (`simd.product_step`):

    S[key, row]  = sum_t K[key, t] * Q[t, row]
    O[c, row]    = alpha[row] * O[c, row] + sum_j V[j, c] * P[j, row]

K and V are read in place as broadcasts; only Q is transposed, once a tile. Formats other than the kernel's own (16 and
8 bits, foreign byte order, strided columns) are converted a block at a time, and the block serves all query rows of the
tile. The scheme is FlashAttention-2's (Dao 2023, arXiv:2307.08691, algorithm 1), on register tiles.
"""

from math import inf

from numba import njit, types

from .. import geometry, ops, recurrence, scores
from ..problem import PROBLEM, SEQUENCE, WORK_TILE
from . import (
    lanes,  # noqa: F401  gives the words of the formulas their meaning
    simd,
)
from .compile import HELPER, STAGE
from .plan import CANCEL, CONTROL, LINE, TICKET
from .rows import all_finite, fetch_row, in_place, saturated, transpose, write_row
from .rules import apply_rules, bound, drop_weights, hidden_value, load_terms, softcap_scores
from .simd import (
    itemsize,
    lane,
    lanes_of,
    load,
    move,
    part,
    pointer_like,
    pointer_to,
    prefetch,
    read_flag,
    real,
    record_at,
    scalar,
    store,
    take_ticket,
    tile_width,
)

problem_at, sequence_at, tile_at, control_at = (record_at(dtype) for dtype in (PROBLEM, SEQUENCE, WORK_TILE, CONTROL))
float64_at = pointer_to(types.float64)
SEQUENCE_BYTES, TILE_BYTES = SEQUENCE.itemsize, WORK_TILE.itemsize
STEP = simd.TILE.rows
score_step, score_step_1 = (simd.product_step(m, simd.TILE.vectors, across=False) for m in (STEP, 1))
value_step, value_step_1 = (simd.product_step(m, simd.TILE.vectors, across=True, blend="lanes") for m in (STEP, 1))


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def locate(p, plan, item):
    """Which rows an item is: `(sequence, head, first row, number of the tile)`. Longest first, heads side by side."""
    tile, h = item // p.heads, item % p.heads
    if p.work_tiles != 0:
        row = tile_at(p.work_tiles + tile * TILE_BYTES)
        return row.sequence, h, row.first_row, tile
    count = (p.queries + plan.block_q - 1) // plan.block_q
    b = tile % p.batch
    tile = count - 1 - tile // p.batch
    return b, h, tile * plan.block_q, (b * p.heads + h) * count + tile


@njit(**HELPER)
def operands(p, b, h):
    """Where head h of sequence b starts: q, k, v, out, lse and both terms; and its lengths, shift and row index."""
    if p.sequences != 0:
        own = sequence_at(p.sequences + b * SEQUENCE_BYTES)
        q, k, v, out, lse, bias, mask = own.q, own.k, own.v, own.out, own.lse, own.bias, own.mask
        queries, keys, shift, row_index = own.queries, own.keys, own.shift, own.row_index
    else:
        q, k, v, out = b * p.q_batch, b * p.k_batch, b * p.v_batch, b * p.out_batch
        lse, bias, mask = b * p.lse_batch, b * p.bias_batch, b * p.mask_batch
        queries, keys, shift, row_index = p.queries, p.keys, p.shift, p.row_index
    return (
        p.q + q + h * p.q_head,
        p.k + k + h // p.k_group * p.k_head,
        p.v + v + h // p.v_group * p.v_head,
        p.out + out + h * p.out_head,
        p.lse + lse + h * p.lse_head,
        p.bias + bias + h * p.bias_head,
        p.mask + mask + h * p.mask_head,
        queries,
        keys,
        shift,
        row_index,
    )


@njit(**HELPER)
def of_head(address, batch_stride, head_stride, b, h, default):
    """A number given for each batch element and head, or the default where none is given."""
    if address == 0:
        return default
    return float64_at(address + b * batch_stride + h * head_stride)[0]


@njit(**STAGE)
def load_queries(q, staging, address, rows, row_stride, column_stride, code, dim, scale):
    """Query rows at an address into q, as (register tile, dim, row) and scaled; lanes without a row get 0."""
    width = tile_width(q)
    factor = lanes_of(q, scale)
    for first in range(0, rows, width):
        own, at = min(width, rows - first), address + first * row_stride
        tile, source, stride = move(q, first * dim), staging, dim
        if own == width and in_place(q, at, row_stride, column_stride, code):
            source, stride = pointer_like(q, at), row_stride // itemsize(q)
        else:
            for r in range(own):
                fetch_row(move(staging, r * dim), dim, at + r * row_stride, column_stride, code)
            for d in range(own * dim, width * dim):
                staging[d] = 0
        transpose(tile, width, source, stride, width, dim)
        for d in range(dim):
            store(load(tile, d) * factor, tile, d)


@njit(**STAGE)
def load_block(block, address, rows, row_stride, column_stride, code, columns):
    """Rows of K or V: `(pointer, elements from row to row)`, in place where the format allows, else through `block`."""
    if in_place(block, address, row_stride, column_stride, code):
        return pointer_like(block, address), row_stride // itemsize(block)
    for j in range(rows):
        fetch_row(move(block, j * columns), columns, address + j * row_stride, column_stride, code)
    return block, columns


@njit(**HELPER)
def keys_of_tile(p, position, rows, keys, start, stop):
    """Of the keys start to stop, those that some row of a tile sees, and the keys that all its rows see.

    position: of the first row.
    """
    last = position + rows - 1
    j0, j1, all0, all1 = geometry.visible_keys(position, last, p.left, p.right, 0, keys)
    return max(j0, start), min(j1, stop), all0, all1


@njit(**HELPER)
def ahead_of(p, k_at, v_at, key, tile):
    """A part of the keys and values from `key` on, for `ask_for`: two cache lines a row for each register tile."""
    return k_at + key * p.k_row + tile * 2 * LINE, p.k_row, v_at + key * p.v_row + tile * 2 * LINE, p.v_row


@njit(**HELPER)
def ask_for(ahead, j):
    """Have the next block's row j fetched into the second-level cache meanwhile, its part given by `ahead_of`.

    The products read K and V in steps that the CPU's own prefetcher doesn't follow. On Zen 4 this saves 5 % of the
    forward's time at D = 64 and 4 % at 128.
    """
    k, k_row, v, v_row = ahead
    prefetch(k + j * k_row)
    prefetch(k + j * k_row + LINE)
    prefetch(v + j * v_row)
    prefetch(v + j * v_row + LINE)


@njit(**STAGE)
def start_rows(m, l, o, tiles, value_dim):
    """The state before any key: (-inf, 0, 0)."""
    for tile in range(tiles):
        store(lanes_of(m, -inf), m, tile)
        store(lanes_of(l, 0.0), l, tile)
    for c in range(tiles * value_dim):
        store(lanes_of(o, 0.0), o, c)


# -- score, recur ------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def multiply_keys(s, k, k_stride, q, keys, dim):
    """S[key, row] = sum_t K[key, t] Q[t, row]"""
    width = tile_width(s)
    j = 0
    while j + STEP <= keys:
        score_step(move(s, j * width), width, move(k, j * k_stride), k_stride, q, width, dim, s)
        j += STEP
    while j < keys:
        score_step_1(move(s, j * width), width, move(k, j * k_stride), k_stride, q, width, dim, s)
        j += 1


@njit(**STAGE)
def scores_to_weights(s, m, l, alpha, keys, ahead):
    """Scores to weights in place; brings m and l to the new reference, and leaves O to be multiplied by alpha."""
    top = load(s, 0)
    for j in range(1, keys):
        top = ops.maximum(top, load(s, j))
    m_new, ref, a = recurrence.advance(load(m, 0), top)
    total = lanes_of(s, 0.0)
    for j in range(keys):
        ask_for(ahead, j)
        w = recurrence.weight(load(s, j), ref)
        store(w, s, j)
        total = total + w
    store(m_new, m, 0)
    store(a * load(l, 0) + total, l, 0)
    store(a, alpha, 0)


@njit(**STAGE)
def add_values(o, alpha, v, v_stride, s, keys, value_dim):
    """O[c, row] = alpha[row] O[c, row] + sum_j V[j, c] P[j, row]"""
    width = tile_width(s)
    c = 0
    while c + STEP <= value_dim:
        value_step(move(o, c * width), width, move(v, c), v_stride, s, width, keys, alpha)
        c += STEP
    while c < value_dim:
        value_step_1(move(o, c * width), width, move(v, c), v_stride, s, width, keys, alpha)
        c += 1


@njit(**STAGE)
def add_seen_values(o, alpha, v, v_stride, s, keys, value_dim, first, last, bias, has_bias, mask, has_mask, codes):
    """The same where V holds NaN or infinity: 0 * NaN would leak, so a key that a row doesn't see is left out. Rare."""
    first, last = bound(s, first), bound(s, last)
    bias_hides, mask_hides = hidden_value(s, codes[0]), hidden_value(s, codes[1])
    for c in range(value_dim):
        total = lanes_of(s, 0.0)
        for j in range(keys):
            seen = geometry.between(j, first, last)
            if has_bias:
                seen = seen & (load(bias, j) != bias_hides)
            if has_mask:
                seen = seen & (load(mask, j) != mask_hides)
            total = ops.select(seen, total + load(s, j) * v[j * v_stride + c], total)
        store(load(alpha, 0) * load(o, c) + total, o, c)


# -- write -------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def write_rows(o, m, l, staging, finals, rows, value_dim, out, row_stride, column_stride, code, lse, sink, v_scale):
    """Take the sink in, normalise, and write a register tile's rows out. The state itself stays as it is."""
    width = tile_width(o)
    row_lse, factor = recurrence.finalize(load(m, 0), load(l, 0), real(m, sink))
    store(row_lse, finals, 0)
    store(factor * real(m, v_scale), finals, 1)
    lse_out = pointer_like(o, lse)
    direct = in_place(o, out, row_stride, column_stride, code)
    to, stride = (pointer_like(o, out), row_stride // itemsize(o)) if direct else (staging, value_dim)
    transpose(to, stride, o, width, value_dim, rows)
    for r in range(rows):
        lse_out[r] = finals[r]
        row, own_l, factor = move(to, r * stride), lane(l[r]), lane(finals[width + r])
        for c in range(value_dim):
            row[c] = scalar(recurrence.normalized(lane(row[c]), own_l, factor))
        if not direct:
            write_row(out + r * row_stride, column_stride, code, row, value_dim)


@njit(**STAGE)
def write_empty_rows(staging, rows, value_dim, out, row_stride, column_stride, code, lse, sink):
    """Rows beyond a sequence's length see no key: output 0, and the sink alone as their LSE, if there is one."""
    lse_out = pointer_like(staging, lse)
    for c in range(value_dim):
        staging[c] = 0
    for r in range(rows):
        lse_out[r] = sink / scores.LOG2E
        write_row(out + r * row_stride, column_stride, code, staging, value_dim)


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def attend_rows(p, plan, item, scratch, control):
    """One item: up to `block_q` query rows of one head against all keys that they see."""
    width, size = tile_width(scratch), itemsize(scratch)
    dim, value_dim = p.dim, p.value_dim
    q, s, alpha = part(scratch, plan.queries), part(scratch, plan.scores), part(scratch, plan.alpha)
    k_block, v_block = part(scratch, plan.keys), part(scratch, plan.values)
    bias, mask, staging = part(scratch, plan.bias), part(scratch, plan.mask), part(scratch, plan.staging)

    b, h, first_row, tile_number = locate(p, plan, item)
    q_at, k_at, v_at, out_at, lse_at, bias_at, mask_at, queries, keys, shift, row_index = operands(p, b, h)
    rows = max(0, min(plan.block_q, queries - first_row))
    tiles = (rows + width - 1) // width
    slope = of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0)
    sink = of_head(p.sinks, p.sink_batch, p.sink_head, b, h, -inf)
    scale = p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, h // p.k_group, 1.0)
    v_scale = of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, h // p.v_group, 1.0)

    state = scratch if p.state == 0 else pointer_like(scratch, p.state + tile_number * plan.state_bytes)
    o, m, l = part(state, plan.output), part(state, plan.maximum), part(state, plan.total)
    if p.state == 0:
        start_rows(m, l, o, tiles, value_dim)
    load_queries(
        q, staging, q_at + first_row * p.q_row, rows, p.q_row, p.q_column, p.q_format, dim, saturated(q, scale)
    )

    position = first_row + shift
    start, stop, _, _ = geometry.visible_keys(position, position + rows - 1, p.left, p.right, 0, keys)
    # from a fixed multiple, so that the bits of a row don't depend on the rows that share its item
    for block_start in range(start // plan.block_k * plan.block_k, stop, plan.block_k):
        if read_flag(control + CANCEL) != 0:
            return
        block_stop = min(block_start + plan.block_k, stop)
        k, k_stride, v, v_stride = k_block, dim, v_block, value_dim
        loaded, finite = False, -1  # K and V, when a tile needs them; whether V is finite, when that matters
        for tile in range(tiles):
            own_rows, top = min(width, rows - tile * width), position + tile * width
            j0, j1, all0, all1 = keys_of_tile(p, top, own_rows, keys, block_start, block_stop)
            n = j1 - j0
            if n <= 0:
                continue
            row = first_row + tile * width
            kept, has_bias, has_mask = load_terms(p, bias, mask, staging, bias_at, mask_at, row, own_rows, j0, n)
            if not kept:
                continue
            if not loaded:
                loaded = True
                count = block_stop - block_start
                k_from, v_from = k_at + block_start * p.k_row, v_at + block_start * p.v_row
                k, k_stride = load_block(k_block, k_from, count, p.k_row, p.k_column, p.k_format, dim)
                v, v_stride = load_block(v_block, v_from, count, p.v_row, p.v_column, p.v_format, value_dim)

            multiply_keys(s, move(k, (j0 - block_start) * k_stride), k_stride, move(q, tile * width * dim), n, dim)
            if p.softcap != 0.0:
                softcap_scores(s, n, p.softcap)
            apply_rules(p, s, bias, mask, has_bias, has_mask, slope, top, j0, n, all0, all1)

            ahead = ahead_of(p, k_at, v_at, block_stop, tile)
            scores_to_weights(s, move(m, tile * width), move(l, tile * width), alpha, n, ahead)
            if p.keep_factor != 0.0:
                i = row_index + row
                drop_weights(s, n, i, p.key_index + j0, h, b, p.round_keys, p.drop_below, p.keep_factor)
            tile_v, tile_o = move(v, (j0 - block_start) * v_stride), move(o, tile * width * value_dim)
            hides = has_bias or has_mask or j0 < all0 or j1 > all1
            if hides and finite < 0:
                finite = all_finite(v, block_stop - block_start, value_dim, v_stride)
            if hides and finite == 0:
                first, last = top - p.left - j0, top + p.right - j0
                codes = p.bias_format, p.mask_format
                add_seen_values(
                    tile_o, alpha, tile_v, v_stride, s, n, value_dim, first, last, bias, has_bias, mask, has_mask, codes
                )
            else:
                add_values(tile_o, alpha, tile_v, v_stride, s, n, value_dim)

    if p.out == 0:
        return
    out_rows, lse_rows = out_at + first_row * p.out_row, lse_at + first_row * size
    for first in range(0, rows, width):
        write_rows(
            move(o, first * value_dim),
            move(m, first),
            move(l, first),
            staging,
            alpha,
            min(width, rows - first),
            value_dim,
            out_rows + first * p.out_row,
            p.out_row,
            p.out_column,
            p.out_format,
            lse_rows + first * size,
            sink,
            v_scale,
        )
    if p.work_tiles == 0:
        empty = min(plan.block_q, p.queries - first_row) - rows
        out_rows, lse_rows = out_rows + rows * p.out_row, lse_rows + rows * size
        write_empty_rows(staging, empty, value_dim, out_rows, p.out_row, p.out_column, p.out_format, lse_rows, sink)


def each_item(attend, control_at=control_at):
    """The work of one thread: items until none is left or the call is cancelled.

    control_at: what makes the kernel's control block of an address; all start alike (`plan.HEADER`).

    To be compiled as a C function of three addresses for float32 and for float64, which `scratch` points to.
    """

    def work(problem, control, scratch):
        p, plan = problem_at(problem), control_at(control)
        while read_flag(control + CANCEL) == 0:
            item = take_ticket(control + TICKET)
            if item >= plan.items:
                return
            attend(p, plan, item, scratch, control)

    return work


forward = each_item(attend_rows)
