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

from ..dtypes import ALL_CODES, BFLOAT16, FLOAT16, FLOAT32
from ..geometry import FAR, FULL, block_state, next_block
from .compile import Kernel
from .fragments import RowState, key_product, rescaling, tile_copy, value_product
from .ir import ptx
from .loading import head_of, key_address, listed_work_tile, tile_keys, value_address
from .primitives import device
from .rules import Rules, rules_of
from .tensor_stages import (
    block_rules,
    bounded,
    matrix_finder,
    notes,
    query_loader,
    row_writer,
    wait_for_tile,
    warp_sight,
)
from .tensor_tiling import PIECE, TensorTiling, choose_tiling

DIMS = (64, 96, 128, 192, 256)
L2_BYTES = 24 * 2**20  # of the L2 cache, for the keys and values of the heads that are worked on at a time


def work_tile_finder(tiling):
    """`loading.work_tile`, ordered so that the keys and values of the heads in work stay in the L2 cache."""
    rows, key_bytes = tiling.rows, 4 * tiling.dim

    @device
    def work_tile(p, block_index):
        """`(sequence, head, first row)` of this thread block: heads side by side, tiles with most keys first."""
        block, heads = uint32(block_index), uint32(p.heads)
        if p.work_tiles != 0:
            b, first_row = listed_work_tile(p, int64(block // heads))
            return b, int64(block % heads), first_row
        # only so many heads side by side that their keys and values stay in the L2 cache
        tiles, all_heads = uint32(p.row_tiles), uint32(p.batch * p.heads)
        in_cache = uint32(L2_BYTES // key_bytes) // uint32(max(1, min(p.keys, L2_BYTES // key_bytes)))
        section = uint32(in_cache * uint32(p.k_group))
        first = uint32(block // uint32(section * tiles) * section)
        at = uint32(block - first * tiles)
        size = uint32(min(section, uint32(all_heads - first)))
        head = uint32(first + at % size)
        return int64(head // heads), int64(head % heads), int64(tiles - 1 - at // size) * rows

    return work_tile


# -- one thread block --------------------------------------------------------------------------------------------------


def attention_kernel(tiling, rules):
    copy_keys, copy_values = (tile_copy(tiling, tiling.keys, address) for address in (key_address, value_address))
    multiply_keys, rescale, add_values = key_product(tiling), rescaling(tiling), value_product(tiling, rules.dropout)
    work_tile, load_queries, matrices_in = work_tile_finder(tiling), query_loader(tiling), matrix_finder(tiling)
    write_notes, (noted_keys, noted_values, noted_visible, noted_tile, _) = notes(tiling)
    warp_sees, (apply_rules, dropout_part) = warp_sight(tiling), block_rules(tiling, rules)
    write_rows = row_writer(tiling, rules, work_tile)
    tile_rows, block_keys = tiling.rows, tiling.keys
    s_size, o_size = tiling.fragments * tiling.keys // 2, tiling.fragments * tiling.dim // 2
    row_count = 2 * tiling.fragments
    has_rules = rules.on_scores

    def kernel(p):
        shared = ptx.shared_address(cuda.shared.array(0, int32, PIECE))
        b, h, first_row = work_tile(p, ptx.block_index())
        head = head_of(p, b, h)
        rows = max(0, min(tile_rows, head.queries - first_row))
        visible = bounded(tile_keys(p, head, first_row, rows, 0, head.keys))
        matrices = matrices_in(shared)
        s, o = cuda.local.array(s_size, float32), cuda.local.array(o_size, float32)
        m, l = cuda.local.array(row_count, float32), cuda.local.array(row_count, float32)
        ref, alpha = cuda.local.array(row_count, float32), cuda.local.array(row_count, float32)
        state = RowState(m, l, ref, alpha)
        if ptx.thread_index() == 0:
            write_notes(shared, p, head, first_row, rows, visible)
        scale = load_queries(shared, p, head, first_row, rows)
        for i in range(o_size):
            o[i] = float32(0)
        for r in range(row_count):
            m[r], l[r] = float32(-inf), float32(0)
        key = int32(next_block(visible, visible.start, block_keys))
        copy_keys(matrices.k_tile, p, head, key, int32(head.keys - key))
        ptx.commit_copies()
        if key >= visible.stop:
            wait_for_tile()  # the queries are still on their way to where the output goes

        while key < visible.stop:
            wait_for_tile()
            copy_values(matrices.v_tile, p, noted_values(shared), key, noted_tile(shared).keys - key)
            ptx.commit_copies()
            masked = block_state(noted_visible(shared), key, int32(key + block_keys)) != FULL
            active = not masked or warp_sees(noted_tile(shared), key)
            if active:
                multiply_keys(s, matrices.q, matrices.k)

            wait_for_tile()
            visible = noted_visible(shared)
            following = int32(next_block(visible, int32(key + block_keys), block_keys))
            if following < visible.stop:
                copy_keys(matrices.k_tile, p, noted_keys(shared), following, noted_tile(shared).keys - following)
                ptx.commit_copies()
            if active:
                apply_rules(p, s, shared, head, first_row, key, scale, masked)
                factor = float32(1) if has_rules else scale
                rescale(s, o, state, factor)
                part = dropout_part(p, shared, first_row, key)
                add_values(o, s, state, factor, matrices.v, p, head, part)
            visible = noted_visible(shared)  # once more: registers are scarce in between
            key = int32(next_block(visible, int32(key + block_keys), block_keys))

        write_rows(p, o, m, l, shared)

    return kernel


def grid(record) -> tuple[int, int, int]:
    """Thread blocks of an `ARGUMENTS` record."""
    tiles = record["work_tile_count"] if record["work_tiles"] else record["row_tiles"] * record["batch"]
    return int(tiles * record["heads"]), 1, 1


# -- what is compiled for which call -----------------------------------------------------------------------------------


def make_kernel(tiling: TensorTiling, rules: Rules) -> Kernel:
    name = "tensorcore-" + "-".join(str(int(x)) if x is not None else "" for x in (*tiling, *rules))
    function = attention_kernel(tiling, rules)
    return Kernel(name, function, tiling.threads, tiling.shared_bytes, grid, tiling.rows, tiling.blocks)


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a `PROBLEM` record that `why_not` has nothing against."""
    rules = rules_of(problem)
    return make_kernel(choose_tiling(int(problem["q_format"]), int(problem["dim"]), rules, cc), rules)


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
