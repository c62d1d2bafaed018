"""The attention forward on a CPU: one tile of query rows against the keys they see, block by block.

A SIMD lane is a query row. The score tile is kept transposed, (key, row), so maximum, exp2 and sum run across lanes with
no horizontal operation, and both matrix products are the same register-tile step (`simd.outer_product`):

    S[key, row]  = sum_t K[key, t] * Q[t, row]
    O[c, row]   += sum_j V[j, c]   * P[j, row]

K and V are read in place as broadcasts; only Q is transposed, once a tile. Formats other than the kernel's own (16 bits,
foreign byte order, strided columns) are converted a block at a time, and the block serves all query rows of the tile.
The scheme is FlashAttention-2's (Dao 2023, arXiv:2307.08691, algorithm 1), on register tiles.
"""

from math import inf

from numba import njit, types

from .. import ops, recurrence, scores
from . import lanes  # noqa: F401  gives the words of the formulas their meaning
from ..problem import PROBLEM
from .plan import CANCEL, CONTROL, TICKET
from .rows import JIT, all_finite, fetch_row, in_place, write_row
from .simd import (
    TILE,
    address_of,
    itemsize,
    lane,
    lanes_of,
    load,
    load_bytes,
    move,
    outer_product,
    part,
    pointer_like,
    pointer_to,
    read_flag,
    real,
    record_at,
    row_numbers,
    scalar,
    store,
    take_ticket,
    tile_width,
)

problem_at, control_at = record_at(PROBLEM), record_at(CONTROL)
uint8_at, int64_at = pointer_to(types.uint8), pointer_to(types.int64)
score_step, score_step_1 = outer_product(across=False, blend=False)
value_step, value_step_1 = outer_product(across=True, blend=True)


# -- load --------------------------------------------------------------------------------------------------------------


@njit(**JIT)
def operands(p, b, h):
    """Where head h of batch b starts: the addresses of q, k, v, the mask and out."""
    if p.batch_offsets != 0:
        at = int64_at(p.batch_offsets + b * 40)
        q, k, v, mask, out = at[0], at[1], at[2], at[3], at[4]
    else:
        q, k, v = b * p.q_strides[0], b * p.k_strides[0], b * p.v_strides[0]
        mask, out = b * p.mask_strides[0], b * p.out_strides[0]
    return (
        p.q + q + h * p.q_strides[1],
        p.k + k + h // p.k_group * p.k_strides[1],
        p.v + v + h // p.v_group * p.v_strides[1],
        p.mask + mask + h * p.mask_strides[1],
        p.out + out + h * p.out_strides[1],
    )


@njit(**JIT)
def load_queries(q, row, address, rows, strides, code, dim, scale):
    """Query rows at an address into q, transposed to (register tile, dim, row) and scaled; lanes without a row get 0."""
    width = tile_width(q)
    for i in range((rows + width - 1) // width * width):
        if i < rows:
            fetch_row(row, dim, address + i * strides[2], strides[3], code)
        else:
            for d in range(dim):
                row[d] = 0
        first = i // width * width * dim + i % width
        for d in range(dim):
            q[first + d * width] = row[d] * scale


@njit(**JIT)
def load_block(block, address, rows, strides, code, columns):
    """Rows of K or V: `(pointer, elements from row to row)`, in place where the format allows it, else through `block`."""
    if in_place(block, address, strides, code):
        return pointer_like(block, address), strides[2] // itemsize(block)
    for j in range(rows):
        fetch_row(move(block, j * columns), columns, address + j * strides[2], strides[3], code)
    return block, columns


@njit(**JIT)
def start_rows(m, l, o, tiles, value_dim):
    """The state before any key: (-inf, 0, 0)."""
    for tile in range(tiles):
        store(lanes_of(m, -inf), m, tile)
        store(lanes_of(l, 0.0), l, tile)
    for c in range(tiles * value_dim):
        store(lanes_of(o, 0.0), o, c)


# -- score -------------------------------------------------------------------------------------------------------------


@njit(**JIT)
def multiply_keys(s, k, k_stride, q, keys, dim):
    """S[key, row] = sum_t K[key, t] Q[t, row]"""
    width = tile_width(s)
    j = 0
    while j + TILE.rows <= keys:
        score_step(move(s, j * width), move(k, j * k_stride), k_stride, q, dim)
        j += TILE.rows
    while j < keys:
        score_step_1(move(s, j * width), move(k, j * k_stride), k_stride, q, dim)
        j += 1


@njit(**JIT)
def hide_by_position(s, start, stop, first_key, first_row, shift):
    """-inf for the keys start to stop that a row doesn't see by its position."""
    i = row_numbers(s, first_row)
    for j in range(start, stop):
        store(scores.hide(load(s, j), scores.seen_causal(i, first_key + j, shift)), s, j)


@njit(**JIT)
def transpose_mask(kept, s, address, rows, keys, strides):
    """The mask's bytes as (key, row); how many are nonzero. Lanes without a row repeat the last one."""
    width = tile_width(s)
    count = 0
    for r in range(width):
        line = address + min(r, rows - 1) * strides[2]
        for j in range(keys):
            keep = uint8_at(line + j * strides[3])[0] != 0
            kept[j * width + r] = keep
            count += keep
    return count


@njit(**JIT)
def hide_by_mask(s, kept, keys):
    for j in range(keys):
        store(scores.hide(load(s, j), load_bytes(s, kept, j) != 0), s, j)


# -- recur -------------------------------------------------------------------------------------------------------------


@njit(**JIT)
def scores_to_weights(s, m, l, alpha, keys):
    """Scores to weights in place; brings m and l to the new reference, and leaves O to be multiplied by alpha."""
    top = load(s, 0)
    for j in range(1, keys):
        top = ops.maximum(top, load(s, j))
    m_new, ref, a = recurrence.advance(load(m, 0), top)
    total = lanes_of(s, 0.0)
    for j in range(keys):
        w = recurrence.weight(load(s, j), ref)
        store(w, s, j)
        total = total + w
    store(m_new, m, 0)
    store(a * load(l, 0) + total, l, 0)
    store(a, alpha, 0)


@njit(**JIT)
def add_values(o, alpha, v, v_stride, s, keys, value_dim):
    """O[c, row] = alpha[row] O[c, row] + sum_j V[j, c] P[j, row]"""
    width = tile_width(s)
    c = 0
    while c + TILE.rows <= value_dim:
        value_step(move(o, c * width), move(v, c), v_stride, s, keys, alpha)
        c += TILE.rows
    while c < value_dim:
        value_step_1(move(o, c * width), move(v, c), v_stride, s, keys, alpha)
        c += 1


@njit(**JIT)
def add_seen_values(o, alpha, v, v_stride, s, keys, value_dim, first_key, first_row, shift, masked, kept):
    """The same where V holds NaN or infinity: 0 * NaN would leak, so a key that a row doesn't see is left out. Rare."""
    i = row_numbers(s, first_row)
    for c in range(value_dim):
        total = lanes_of(s, 0.0)
        for j in range(keys):
            seen = scores.seen_causal(i, first_key + j, shift)
            if masked:
                seen = seen & (load_bytes(s, kept, j) != 0)
            total = ops.select(seen, total + load(s, j) * v[j * v_stride + c], total)
        store(load(alpha, 0) * load(o, c) + total, o, c)


# -- write -------------------------------------------------------------------------------------------------------------


@njit(**JIT)
def write_rows(o, m, l, row, rows, value_dim, out, strides, code, lse):
    """Normalise one register tile and write its rows out."""
    width = tile_width(o)
    lse_out = pointer_like(o, lse)
    for r in range(rows):
        lse_out[r] = scalar(recurrence.lse(lane(m[r]), lane(l[r])))
    inverse = recurrence.finish(load(l, 0))
    for c in range(value_dim):
        store(load(o, c) * inverse, o, c)
    for r in range(rows):
        for c in range(value_dim):
            row[c] = o[c * width + r]
        write_row(out + r * strides[2], strides[3], code, row, value_dim)


# -- one thread --------------------------------------------------------------------------------------------------------


def forward(problem, control, scratch):
    """One thread's work: items, each `block_q` query rows of one head, until none is left or the call is cancelled.

    Compiled as a C function of three addresses for float32 and for float64, which `scratch` points to.
    """
    p, plan = problem_at(problem), control_at(control)
    width = tile_width(scratch)
    size = itemsize(scratch)
    dim, value_dim, shift, block_k = p.dim, p.value_dim, p.shift, plan.block_k
    masked = p.mask != 0
    heads = p.batch * p.heads
    q, s = part(scratch, plan.queries), part(scratch, plan.scores)
    o, m, l = part(scratch, plan.output), part(scratch, plan.maximum), part(scratch, plan.total)
    alpha = part(scratch, plan.alpha)
    k_block, v_block, row = part(scratch, plan.keys), part(scratch, plan.values), part(scratch, plan.row)
    kept = uint8_at(address_of(scratch) + plan.kept)

    while read_flag(control + CANCEL) == 0:
        item = take_ticket(control + TICKET)
        if item >= plan.items:
            return
        # longest first: the last rows of every head, then the rows before them
        first_row = (plan.items // heads - 1 - item // heads) * plan.block_q
        b, h = item % heads // p.heads, item % heads % p.heads
        rows = min(plan.block_q, p.queries - first_row)
        tiles = (rows + width - 1) // width
        q_at, k_at, v_at, mask_at, out_at = operands(p, b, h)

        load_queries(q, row, q_at + first_row * p.q_strides[2], rows, p.q_strides, p.q_format, dim, real(q, p.scale))
        start_rows(m, l, o, tiles, value_dim)
        last_key = scores.keys_seen_by_any(first_row + rows - 1, shift, p.keys)
        for first_key in range(0, last_key, block_k):
            if read_flag(control + CANCEL) != 0:
                return
            keys = min(block_k, last_key - first_key)
            k, k_stride = load_block(k_block, k_at + first_key * p.k_strides[2], keys, p.k_strides, p.k_format, dim)
            v_rows = v_at + first_key * p.v_strides[2]
            v, v_stride = load_block(v_block, v_rows, keys, p.v_strides, p.v_format, value_dim)
            finite = -1  # V not looked at yet
            for tile in range(tiles):
                tile_row = first_row + tile * width
                n = min(keys, scores.keys_seen_by_any(tile_row + width - 1, shift, p.keys) - first_key)
                if n <= 0:
                    continue
                seen = scores.keys_seen_by_all(tile_row, shift, p.keys) - first_key
                mask_hides = False
                if masked:
                    tile_mask = mask_at + tile_row * p.mask_strides[2] + first_key * p.mask_strides[3]
                    count = transpose_mask(kept, s, tile_mask, min(width, rows - tile * width), n, p.mask_strides)
                    if count == 0:
                        continue
                    mask_hides = count < n * width
                tile_o = move(o, tile * width * value_dim)
                multiply_keys(s, k, k_stride, move(q, tile * width * dim), n, dim)
                if mask_hides:
                    hide_by_mask(s, kept, n)
                if seen < n:
                    hide_by_position(s, max(0, seen), n, first_key, tile_row, shift)
                scores_to_weights(s, move(m, tile * width), move(l, tile * width), alpha, n)
                if (seen < n or mask_hides) and finite < 0:
                    finite = all_finite(v, keys, value_dim, v_stride)
                if (seen < n or mask_hides) and finite == 0:
                    add_seen_values(
                        tile_o, alpha, v, v_stride, s, n, value_dim, first_key, tile_row, shift, mask_hides, kept
                    )
                else:
                    add_values(tile_o, alpha, v, v_stride, s, n, value_dim)

        lse = p.lse + ((b * p.heads + h) * p.queries + first_row) * size
        for tile in range(tiles):
            tile_rows = min(width, rows - tile * width)
            write_rows(
                move(o, tile * width * value_dim),
                move(m, tile * width),
                move(l, tile * width),
                row,
                tile_rows,
                value_dim,
                out_at + (first_row + tile * width) * p.out_strides[2],
                p.out_strides,
                p.out_format,
                lse + tile * width * size,
            )
