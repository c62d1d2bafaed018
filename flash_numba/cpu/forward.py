"""The attention forward on a CPU: one tile of query rows against the keys they see, block by block.

A SIMD lane is a query row. The score tile is kept transposed, (key, row), so maximum, exp2 and sum run across lanes
with no horizontal operation, and both matrix products are the same register-tile step (`ir.products.product_step`):

    S[key, row]  = sum_t K[key, t] * Q[t, row]
    O[c, row]    = alpha[row] * O[c, row] + sum_j V[j, c] * P[j, row]

K and V are read in place as broadcasts; only Q is transposed, once a tile. Formats other than the kernel's own (16 and
8 bits, foreign byte order, strided columns) are converted a block at a time, and the block serves all query rows of the
tile. The scheme is FlashAttention-2's (Dao 2023, arXiv:2307.08691, algorithm 1), on register tiles.

A work tile is up to `block_q` query rows of one head. It goes through the key blocks that some of its rows see; within
a block, the rows of one register tile at a time (a row tile) are scored, weighed and multiplied.
"""

from math import inf
from typing import Any, NamedTuple

from numba import njit

from .. import geometry, ops, recurrence, scores
from ..problem import Head
from . import primitives  # noqa: F401  gives the primitive operations of the formulas their meaning
from .compile import HELPER, STAGE
from .formats import all_finite, in_place, saturated, store_row, transpose
from .ir.lanes import itemsize, lane, lanes_of, real, scalar, tile_width
from .ir.memory import load, move, part, pointer_like, store
from .ir.products import product_step
from .ir.registers import REGISTER_TILE
from .ir.threads import keep_subnormals, next_tile, read_flag, restore_float_state
from .loading import (
    ahead_of,
    head_of,
    keys_of,
    launch_at,
    load_block,
    load_queries,
    locate,
    out_of,
    prefetch_row,
    problem_at,
    queries_of,
    row_address,
    tile_keys,
    values_of,
)
from .operands import hidden_value, load_operands
from .plan import CANCEL, NEXT_TILE
from .rules import apply_rules, drop_weights, lane_bounds

STEP = REGISTER_TILE.rows
score_step, score_step_1 = (product_step(m, REGISTER_TILE.vectors, across=False) for m in (STEP, 1))
value_step, value_step_1 = (product_step(m, REGISTER_TILE.vectors, across=True, blend="lanes") for m in (STEP, 1))


class WorkTile(NamedTuple):
    """What a work tile is, and where it has its state of the recurrence."""

    head: Head
    first_row: int
    rows: int
    visible: geometry.VisibleKeys
    o: Any  # pointers: (row tile, column, row), and a number a row
    m: Any
    l: Any


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def start_rows(m, l, o, tiles, value_dim):
    """The state before any key: (-inf, 0, 0)."""
    for tile in range(tiles):
        store(lanes_of(m, -inf), m, tile)
        store(lanes_of(l, 0.0), l, tile)
    for c in range(tiles * value_dim):
        store(lanes_of(o, 0.0), o, c)


@njit(**HELPER)
def start_work_tile(p, launch, number, scratch):
    """The work tile of a number, its queries loaded, its state started or where a stream has saved it."""
    b, h, first_row, number = locate(p, launch, number)
    head = head_of(p, b, h)
    rows = max(0, min(launch.block_q, head.queries - first_row))
    state = scratch if p.state == 0 else pointer_like(scratch, p.state + number * launch.state_bytes)
    o, m, l = part(state, launch.output), part(state, launch.maximum), part(state, launch.total)
    if p.state == 0:
        width = tile_width(scratch)
        start_rows(m, l, o, (rows + width - 1) // width, p.value_dim)
    q, staging = part(scratch, launch.queries), part(scratch, launch.staging)
    load_queries(q, staging, queries_of(p, head), first_row, rows, saturated(q, head.scale))
    return WorkTile(head, first_row, rows, tile_keys(p, head, first_row, rows, 0, head.keys), o, m, l)


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
        prefetch_row(ahead, j)
        w = recurrence.weight(load(s, j), ref)
        store(w, s, j)
        total = total + w
    store(m_new, m, 0)
    store(recurrence.absorb(load(l, 0), a, total), l, 0)
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
def add_seen_values(o, alpha, v, v_stride, s, keys, value_dim, position, left, right, operands):
    """The same where V holds NaN or infinity: 0 * NaN would leak, so a key that a row doesn't see is left out. Rare.

    position: of the tile's first row, counted from the first key.
    """
    first, last = lane_bounds(s, position, left, right)
    bias, mask = operands.first, operands.second
    bias_hides, mask_hides = hidden_value(s, bias.is_mask), hidden_value(s, mask.is_mask)
    for c in range(value_dim):
        total = lanes_of(s, 0.0)
        for j in range(keys):
            seen = geometry.between(j, first, last)
            if bias.used:
                seen = seen & (load(bias.part, j) != bias_hides)
            if mask.used:
                seen = seen & (load(mask.part, j) != mask_hides)
            total = ops.select(seen, total + load(s, j) * v[j * v_stride + c], total)
        store(recurrence.absorb(load(o, c), load(alpha, 0), total), o, c)


@njit(**HELPER)
def attend_block(p, launch, work, scratch, block_start):
    """All rows of a work tile against one block of keys. K and V are loaded when the first row tile needs them."""
    width, head = tile_width(scratch), work.head
    q, s, alpha = part(scratch, launch.queries), part(scratch, launch.scores), part(scratch, launch.alpha)
    k, v = part(scratch, launch.keys), part(scratch, launch.values)
    bias, mask, staging = part(scratch, launch.bias), part(scratch, launch.mask), part(scratch, launch.staging)
    block_stop = min(block_start + launch.block_k, work.visible.stop)
    count = block_stop - block_start
    k_stride, v_stride = p.dim, p.value_dim
    loaded, finite = False, -1  # whether V is finite, when that matters
    for first in range(0, work.rows, width):
        row, rows = work.first_row + first, min(width, work.rows - first)
        seen = tile_keys(p, head, row, rows, block_start, block_stop)
        state, n = geometry.block_state(seen, seen.start, seen.stop), seen.stop - seen.start
        if state == geometry.SKIP:
            continue
        kept, operands = load_operands(p, head, bias, mask, staging, row, rows, seen.start, n)
        if not kept:
            continue
        if not loaded:
            loaded = True
            k, k_stride = load_block(k, keys_of(p, head), block_start, count)
            v, v_stride = load_block(v, values_of(p, head), block_start, count)

        tile_k, tile_v = move(k, (seen.start - block_start) * k_stride), move(v, (seen.start - block_start) * v_stride)
        multiply_keys(s, tile_k, k_stride, move(q, first * p.dim), n, p.dim)
        apply_rules(p, head, s, operands, row, seen, None)

        ahead = ahead_of(p, head, block_stop, first // width)
        scores_to_weights(s, move(work.m, first), move(work.l, first), alpha, n, ahead)
        drop_weights(p, head, s, row, seen.start, n)
        o = move(work.o, first * p.value_dim)
        hides = operands.first.used or operands.second.used or state != geometry.FULL
        if hides and finite < 0:
            finite = all_finite(v, count, p.value_dim, v_stride)
        if hides and finite == 0:
            at = row + head.shift - seen.start
            add_seen_values(o, alpha, tile_v, v_stride, s, n, p.value_dim, at, p.left, p.right, operands)
        else:
            add_values(o, alpha, tile_v, v_stride, s, n, p.value_dim)


# -- write -------------------------------------------------------------------------------------------------------------


@njit(**STAGE)
def write_rows(o, m, l, staging, finals, rows, out, first, lse, sink, v_scale):
    """Finalize a row tile: take the sink in, normalize, and store its rows. The state itself stays as it is."""
    width, value_dim, address = tile_width(o), out.columns, row_address(out, first)
    row_lse, normalizer = recurrence.finalize(load(m, 0), load(l, 0), lanes_of(m, sink))
    store(row_lse, finals, 0)
    store(normalizer * real(m, v_scale), finals, 1)
    lse_out = pointer_like(o, lse)
    direct = in_place(o, address, out.row_stride, out.column_stride, out.code)
    to, stride = (pointer_like(o, address), out.row_stride // itemsize(o)) if direct else (staging, value_dim)
    transpose(to, stride, o, width, value_dim, rows)
    for r in range(rows):
        lse_out[r] = finals[r]
        row, own_l, normalizer = move(to, r * stride), lane(l[r]), lane(finals[width + r])
        for c in range(value_dim):
            row[c] = scalar(recurrence.normalized(lane(row[c]), own_l, normalizer))
        if not direct:
            store_row(row_address(out, first + r), out.column_stride, out.code, row, value_dim)


@njit(**STAGE)
def write_empty_rows(staging, rows, out, first, lse, sink):
    """Rows beyond a sequence's length see no key: output 0, and the sink alone as their LSE, if there is one."""
    lse_out = pointer_like(staging, lse)
    for c in range(out.columns):
        staging[c] = 0
    for r in range(rows):
        lse_out[r] = sink / scores.LOG2E
        store_row(row_address(out, first + r), out.column_stride, out.code, staging, out.columns)


@njit(**HELPER)
def write_work_tile(p, launch, work, scratch):
    width, size, head, out = tile_width(scratch), itemsize(scratch), work.head, out_of(p, work.head)
    staging, finals = part(scratch, launch.staging), part(scratch, launch.alpha)
    for first in range(0, work.rows, width):
        o, m, l = move(work.o, first * p.value_dim), move(work.m, first), move(work.l, first)
        row, rows = work.first_row + first, min(width, work.rows - first)
        write_rows(o, m, l, staging, finals, rows, out, row, head.lse + row * size, head.sink, head.v_scale)
    if p.work_tiles == 0:
        row = work.first_row + work.rows
        empty = min(launch.block_q, p.queries - work.first_row) - work.rows
        write_empty_rows(staging, empty, out, row, head.lse + row * size, head.sink)


# -- one thread --------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def attend_work_tile(p, launch, number, scratch, cancel):
    """One work tile against all keys that it sees."""
    work = start_work_tile(p, launch, number, scratch)
    block = geometry.next_block(work.visible, 0, launch.block_k)
    while block < work.visible.stop:
        if read_flag(cancel) != 0:
            return
        attend_block(p, launch, work, scratch, block)
        block = geometry.next_block(work.visible, block + launch.block_k, launch.block_k)
    if p.out != 0:
        write_work_tile(p, launch, work, scratch)


def each_work_tile(attend, launch_at=launch_at):
    """The work of one thread: work tiles until none is left or the call is cancelled.

    launch_at: what makes the kernel's launch parameters of an address; all start alike (`plan.HEADER`).

    To be compiled as a C function of three addresses for float32 and for float64, which `scratch` points to.
    """

    def work(problem, parameters, scratch):
        p, launch, cancel = problem_at(problem), launch_at(parameters), parameters + CANCEL
        before = keep_subnormals(True)
        while read_flag(cancel) == 0:
            number = next_tile(parameters + NEXT_TILE)
            if number >= launch.tiles:
                break
            attend(p, launch, number, scratch, cancel)
        restore_float_state(before)

    return work


forward = each_work_tile(attend_work_tile)
