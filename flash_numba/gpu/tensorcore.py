"""The attention forward on tensor cores: float16 and bfloat16, compute capability 8.0 and up.

FlashAttention-2's scheme (Dao 2023, arXiv:2307.08691, section 3): a thread block holds a tile of query rows in shared
memory and goes through the keys block by block. Each warp owns rows of the tile; scores, weights and output stay in its
registers, as fragments of `mma.sync`. K and V have a shared tile each, filled by asynchronous copies: the next keys are
on their way while weights and values are multiplied, the values while queries and keys are. Rows of a tile are padded
to an odd number of 16-byte pieces, so that the eight rows of a matrix load lie in different banks.

Only blocks that some row doesn't see whole are masked, and a warp skips those that none of its rows sees.
"""

from math import inf

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from .. import geometry, ops, recurrence
from ..dtypes import ALL_CODES, BFLOAT16, FLOAT16, FLOAT32
from .compile import Kernel
from .fragments import (
    ALL,
    key_product,
    place,
    position_mask,
    rescaling,
    score_rules,
    sum_of_row,
    tile_copy,
    unrolled,
    value_product,
)
from .ir import ptx
from .ir.memory import load_int64, store_float32
from .nonfinite import query_signs, row_attention, row_test
from .operands import FIRST_ROW, TILE_BYTES, of_head, operands, quotient
from .primitives import device, lane, scalar
from .tensor_shapes import PIECE, Rules, Shape, choose_rules, choose_shape

DIMS = (64, 96, 128, 192, 256)
FAR = 2**30  # a bound that no key of a block reaches
L2_BYTES = 24 * 2**20  # of the L2 cache, for the keys and values of the heads that are worked on at a time


# -- which rows --------------------------------------------------------------------------------------------------------


def locator(shape):
    rows, key_bytes = shape.rows, 4 * shape.dim

    @device
    def locate(p, block_index):
        """`(sequence, head, first row)` of this thread block: heads side by side, tiles with most keys first."""
        block, heads = uint32(block_index), uint32(p.heads)
        if p.work_tiles != 0:
            at = p.work_tiles + int64(block // heads) * TILE_BYTES
            return load_int64(at), int64(block % heads), load_int64(at + FIRST_ROW)
        # only so many heads side by side that their keys and values stay in the L2 cache
        tiles, all_heads = uint32(p.row_tiles), uint32(p.batch * p.heads)
        in_cache = uint32(L2_BYTES // key_bytes) // uint32(max(1, min(p.keys, L2_BYTES // key_bytes)))
        section = uint32(in_cache * uint32(p.k_group))
        first = uint32(block // uint32(section * tiles) * section)
        at = uint32(block - first * tiles)
        size = uint32(min(section, uint32(all_heads - first)))
        head = uint32(first + at % size)
        return int64(head // heads), int64(head % heads), int64(tiles - 1 - at // size) * rows

    return locate


@device
def bound(x):
    return int32(max(-FAR, min(FAR, x)))


# -- write -------------------------------------------------------------------------------------------------------------


def row_writer(shape, rules, locate):
    """Normalised rows to global memory."""
    pack = ptx.pack_float16 if shape.code == FLOAT16 else ptx.pack_bfloat16
    columns, rows, pitch, pieces = shape.dim // 8, 2 * shape.fragments, shape.pitch, shape.dim // 8
    value, own_rows, tile_rows = place(columns), 16 * shape.fragments, shape.rows
    nonfinite_rows, attend_row = row_test(shape), row_attention(shape, rules)

    @device
    def write_row(
        r, p, o, m, l, shared, out_at, lse_at, warp_row, own_row, pair, rows_there, rows_to_write, redo, sink, v_scale
    ):
        row = warp_row + own_row + r * 8
        there = lane(int32(row)) < lane(int32(rows_there))
        own_m, own_l = ops.select(there, lane(m[r]), -inf), ops.select(there, lane(sum_of_row(l[r])), 0.0)
        row_lse, factor = recurrence.finalize(own_m, own_l, lane(sink))
        factor = factor * lane(v_scale)
        for n in range(columns):
            for i in range(value(r, n), value(r, n) + 2):
                o[i] = scalar(ops.select(there, lane(o[i]) * factor, 0.0))
        finite = redo >> (own_row * 4 + r) & 1 == 0 or row >= rows_there
        if finite and row < rows_to_write:
            if pair == 0:
                store_float32(lse_at + row * 4, scalar(row_lse))
            if p.out_format == FLOAT32:
                for n in range(columns):
                    at = out_at + row * p.out_row + n * 32 + pair * 8
                    ptx.store_pair(at, o[value(r, n)], o[value(r, n) + 1])
        if p.out_format != FLOAT32:
            for n in range(columns):
                at = shared + (own_row + r * 8) * pitch + n * 16 + pair * 4
                ptx.store_shared(int32(at), pack(o[value(r, n)], o[value(r, n) + 1]))

    write_each = unrolled(rows, write_row)

    @device
    def write_rows(p, o, m, l, shared):
        """`shared`: where the queries were, as 16-bit rows go that way.

        Where they go is found anew: registers are scarce in the loop over the keys.
        """
        sequence, h, first_row = locate(p, ptx.block_index())
        _, _, _, out_at, lse_at, _, _, queries, _, _, _ = operands(p, sequence, h)
        sink = float32(of_head(p.sinks, p.sink_batch, p.sink_head, sequence, h, -inf))
        v_scale = float32(of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, sequence, quotient(h, p.v_group), 1.0))
        rows_there = int32(min(tile_rows, queries - first_row))  # rows from here on see no key
        rows_to_write = rows_there if p.work_tiles != 0 else int32(min(tile_rows, p.queries - first_row))
        out_at, lse_at = out_at + first_row * p.out_row, lse_at + first_row * 4
        thread = ptx.thread_index()
        lane_index, warp_row = int32(thread & 31), int32((thread >> 5) * own_rows)
        own_row, pair = lane_index >> 2, lane_index & 3
        shared += warp_row * pitch
        redo = nonfinite_rows(o)
        write_each(
            p, o, m, l, shared, out_at, lse_at, warp_row, own_row, pair, rows_there, rows_to_write, redo, sink, v_scale
        )
        if p.out_format != FLOAT32:
            cuda.syncwarp()
            for i in range(lane_index, own_rows * pieces, 32):
                row, piece = i // pieces, i % pieces
                finite = redo >> ((row & 7) * 4 + (row >> 3)) & 1 == 0 or warp_row + row >= rows_there
                if finite and warp_row + row < rows_to_write:
                    a, b, c, d = ptx.load_shared_words(int32(shared + row * pitch + piece * PIECE))
                    ptx.store_words(out_at + (warp_row + row) * p.out_row + piece * PIECE, a, b, c, d)
        if redo != 0:
            for row in range(min(own_rows, rows_there - warp_row)):
                if redo >> ((row & 7) * 4 + (row >> 3)) & 1 != 0:
                    attend_row(p, sequence, h, first_row + warp_row + row)

    return write_rows


# -- numbers that all threads share ------------------------------------------------------------------------------------

# Registers are scarce in the loop over the keys, so these wait in the padding behind the queries, 16 bytes a row.
K_AT, V_AT, KEYS, ROWS, FIRST_SEEN, LAST_SEEN, WHOLE_BEGIN, WHOLE_END = 0, 2, 4, 5, 6, 7, 8, 9


def notes(shape):
    """Functions that keep an int32 there and read it, and the same for an int64, which takes two places."""
    pitch, row_bytes = shape.pitch, 2 * shape.dim

    @device
    def place_of(shared, i):
        return int32(shared + i // 4 * pitch + row_bytes + i % 4 * 4)

    @device
    def keep(shared, i, x):
        ptx.store_shared(place_of(shared, i), x)

    @device
    def kept(shared, i):
        return ptx.load_shared(place_of(shared, i))

    @device
    def keep_address(shared, i, x):
        ptx.store_shared_long(place_of(shared, i), x)

    @device
    def kept_address(shared, i):
        return ptx.load_shared_long(place_of(shared, i))

    return keep, kept, keep_address, kept_address


# -- one thread block --------------------------------------------------------------------------------------------------


def attention_kernel(shape, rules):
    copy_queries, copy_keys = tile_copy(shape, shape.rows), tile_copy(shape, shape.keys)
    multiply_keys, rescale, add_values = key_product(shape), rescaling(shape), value_product(shape, rules.dropout)
    hide_by_position, apply_rules = position_mask(shape), score_rules(shape, rules)
    sign_queries, locate = query_signs(shape), locator(shape)
    keep, kept, keep_address, kept_address = notes(shape)
    write_rows = row_writer(shape, rules, locate)

    tile_rows, block_keys, pitch = shape.rows, shape.keys, shape.pitch
    warp_rows, tile_bytes = 16 * shape.fragments, shape.keys * shape.pitch
    s_size, o_size, row_count = shape.fragments * shape.keys // 2, shape.fragments * shape.dim // 2, 2 * shape.fragments
    has_rules, has_alibi, has_dropout = rules[:4] != Rules()[:4], rules.alibi, rules.dropout

    @device
    def wait_for_tile():
        """Until the tile that is needed next is there for all threads, and all are done with the one before it."""
        ptx.wait_for_copies()
        cuda.syncthreads()

    @device
    def own_place(key):
        """The thread's first row in the tile, and its first key in the block."""
        thread = ptx.thread_index()
        return int32((thread >> 5) * warp_rows + (thread >> 2 & 7)), int32(key + (thread & 3) * 2)

    def kernel(p):
        shared = ptx.shared_address(cuda.shared.array(0, int32, PIECE))
        thread = int32(cuda.threadIdx.x)
        lane_index, warp_row = int32(thread & 31), int32((thread >> 5) * warp_rows)
        b, h, first_row = locate(p, ptx.block_index())
        q_at, k_at, v_at, _, _, bias_at, mask_at, queries, keys64, shift, row_index = operands(p, b, h)
        scale = float32(p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, quotient(h, p.k_group), 1.0))
        slope = float32(0)
        if has_alibi:
            slope = float32(of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0))

        # the keys that some row sees, in blocks, and the blocks that all rows see whole
        keys, rows = int32(keys64), int32(max(0, min(tile_rows, queries - first_row)))
        position, first_index = first_row + shift, int32(row_index + first_row)
        start, stop, whole_start, whole_stop = geometry.visible_keys(
            position, position + rows - 1, p.left, p.right, 0, keys64
        )
        begin, end = int32(start // block_keys), int32((stop + block_keys - 1) // block_keys)
        if rows == 0:
            end = begin
        first_seen, last_seen = bound(position - p.left), bound(position + p.right)  # by the tile's first row
        whole_begin = int32((min(whole_start, keys64) + block_keys - 1) // block_keys)
        whole_end = int32(max(whole_stop, 0) // block_keys)

        # where the thread's rows are in the shared tiles
        k_tile = int32(shared + tile_rows * pitch)
        v_tile = int32(k_tile + tile_bytes)
        q_lane = int32(shared + (warp_row + (lane_index & 15)) * pitch + (lane_index >> 4) * 16)
        k_lane = int32(k_tile + ((lane_index >> 4) * 8 + (lane_index & 7)) * pitch + (lane_index >> 3 & 1) * 16)
        v_lane = int32(v_tile + (lane_index & 15) * pitch + (lane_index >> 4) * 16)

        s, o = cuda.local.array(s_size, float32), cuda.local.array(o_size, float32)
        m, l = cuda.local.array(row_count, float32), cuda.local.array(row_count, float32)
        ref = cuda.local.array(row_count, float32)

        if ptx.thread_index() == 0:
            keep_address(shared, K_AT, k_at)
            keep_address(shared, V_AT, v_at)
            keep(shared, KEYS, keys)
            keep(shared, ROWS, rows)
            keep(shared, FIRST_SEEN, first_seen)
            keep(shared, LAST_SEEN, last_seen)
            keep(shared, WHOLE_BEGIN, whole_begin)
            keep(shared, WHOLE_END, whole_end)

        copy_queries(shared, q_at + first_row * p.q_row, p.q_row, rows)
        if scale <= 0:
            ptx.commit_copies()
            ptx.wait_for_copies()
            cuda.syncthreads()
            sign_queries(shared, thread, scale)
            scale = -scale if scale < 0 else float32(1)

        for i in range(o_size):
            o[i] = float32(0)
        for r in range(row_count):
            m[r], l[r] = float32(-inf), float32(0)
        copy_keys(k_tile, k_at + begin * block_keys * p.k_row, p.k_row, int32(keys - begin * block_keys))
        ptx.commit_copies()

        for block in range(begin, end):
            key = int32(int32(block) * block_keys)
            following = int32(key + block_keys)
            wait_for_tile()
            keys = kept(shared, KEYS)
            copy_keys(v_tile, kept_address(shared, V_AT) + key * p.v_row, p.v_row, int32(keys - key))
            ptx.commit_copies()
            masked = (int32(block) < kept(shared, WHOLE_BEGIN)) | (int32(block) >= kept(shared, WHOLE_END))
            active = True
            if masked:
                own_row, rows = int32((ptx.thread_index() >> 5) * warp_rows), kept(shared, ROWS)
                first_seen, last_seen = kept(shared, FIRST_SEEN), kept(shared, LAST_SEEN)
                last_row = int32(min(own_row + warp_rows, rows) - 1)
                sees = int32(last_seen + last_row) >= key and int32(first_seen + own_row) < following
                active = cuda.any_sync(ALL, own_row < rows and sees)
            if active:
                multiply_keys(s, q_lane, k_lane)

            wait_for_tile()
            if int32(block) + 1 < end:
                keys = kept(shared, KEYS)
                k_at = kept_address(shared, K_AT) + following * p.k_row
                copy_keys(k_tile, k_at, p.k_row, int32(keys - following))
                ptx.commit_copies()
            if active:
                if has_rules:
                    own_row, own_key = own_place(key)
                    at, own_index = float32(position + own_row - own_key), first_row + own_row
                    last_index, keys = first_row + kept(shared, ROWS) - 1, kept(shared, KEYS)
                    apply_rules(p, s, scale, slope, at, bias_at, mask_at, own_index, last_index, own_key, keys)
                if masked:
                    own_row, own_key = own_place(key)
                    first_seen, last_seen = kept(shared, FIRST_SEEN), kept(shared, LAST_SEEN)
                    keys = kept(shared, KEYS)
                    first, last = int32(first_seen + own_row - own_key), int32(last_seen + own_row - own_key)
                    hide_by_position(s, first, last, int32(keys - 1 - own_key))
                factor = float32(1) if has_rules else scale
                rescale(s, o, m, l, ref, factor)
                row_index, key_index = int32(0), int32(0)
                if has_dropout:
                    own_row, own_key = own_place(key)
                    row_index, key_index = int32(first_index + own_row), int32(p.key_index + own_key)
                add_values(o, s, l, ref, factor, v_lane, p, b, h, row_index, key_index)

        if begin == end:
            wait_for_tile()  # the queries are still on their way to where the output goes
        write_rows(p, o, m, l, shared)

    return kernel


def grid(record) -> tuple[int, int, int]:
    """Thread blocks of an `ARGUMENTS` record."""
    tiles = record["work_tile_count"] if record["work_tiles"] else record["row_tiles"] * record["batch"]
    return int(tiles * record["heads"]), 1, 1


# -- what is compiled for which call -----------------------------------------------------------------------------------


def make_kernel(shape: Shape, rules: Rules) -> Kernel:
    name = "tensorcore-" + "-".join(str(int(x)) if x is not None else "" for x in (*shape, *rules))
    function = attention_kernel(shape, rules)
    return Kernel(name, function, shape.threads, shape.shared_bytes, grid, shape.rows, shape.blocks)


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a `PROBLEM` record that `why_not` has nothing against."""
    rules = choose_rules(problem)
    return make_kernel(choose_shape(int(problem["q_format"]), int(problem["dim"]), rules, cc), rules)


def why_not(problem: np.ndarray, cc: tuple[int, int]) -> str | None:
    """Why this kernel doesn't take a call, or None if it does."""
    names = {code: dtype.name for dtype, code in ALL_CODES.items()}
    code, dim, value_dim = (int(problem[name]) for name in ("q_format", "dim", "value_dim"))
    formats = [int(problem[f"{name}_format"]) for name in "qkv"]
    if tuple(cc) < (8, 0):
        return f"needs compute capability 8.0, this GPU has {cc[0]}.{cc[1]}"
    if code not in (FLOAT16, BFLOAT16) or formats != [code] * 3:
        used = ", ".join(sorted({names.get(x, "foreign byte order") for x in formats}))
        return f"takes float16 or bfloat16 for all of q, k, v, not {used}"
    if problem["out_format"] not in (code, FLOAT32):
        return f"writes {names[code]} or float32"
    if dim not in DIMS or value_dim != dim:
        return f"head dimensions are {', '.join(map(str, DIMS))}, not {dim}" + f" and {value_dim}" * (value_dim != dim)
    if problem["state"] or not problem["out"]:
        return "keeps no state between calls"
    if problem["keep_factor"] and problem["key_index"] % 4:
        return "dropout needs a k_offset that is a multiple of 4"
    if problem["keys"] >= FAR or problem["queries"] >= FAR:
        return f"takes less than {FAR} queries and keys"
    batch, heads, queries, keys = (int(problem[name]) for name in ("batch", "heads", "queries", "keys"))
    for name, of_heads, rows in (
        ("q", heads, queries),
        ("k", heads // int(problem["k_group"]), keys),
        ("v", heads // int(problem["v_group"]), keys),
        ("out", heads, queries),
    ):
        if rows == 0:
            continue
        if problem[f"{name}_column"] != (4 if name == "out" and problem["out_format"] == FLOAT32 else 2):
            return f"columns of {name} aren't contiguous"
        steps = {"batch": batch, "head": of_heads, "row": rows}
        places = [problem[name], *(problem[f"{name}_{axis}"] for axis, size in steps.items() if size > 1)]
        if any(place % PIECE for place in places):
            return f"rows of {name} don't start at multiples of {PIECE} bytes"
    return None
