"""The attention forward on any GPU: a work tile of query rows against the keys that they see, block by block.

The twin of `cpu/forward.py`, for every format and every rule. A thread block of `threads_y` x `threads_x` threads
holds a tile of queries in shared memory and streams K and V through it in pieces. Both matrix products are the same
step (`ir/products.py`): each thread multiplies several rows by several keys (or columns) out of shared memory, 16 bytes
a load, and keeps its part of the scores and of the output in registers:

    S[row, key]  = sum_t Q[row, t] * K[key, t]
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]

A thread's rows stand `threads_y` apart, its keys `threads_x` apart, and its columns in vectors that stand `threads_x`
vectors apart, so that neighbours read different banks of shared memory. Weights reach all threads of their row through
shared memory, and a row's maximum over its threads too. The scheme is FlashAttention-2's (Dao 2023, arXiv:2307.08691,
algorithm 1), on CUDA cores.
"""

from math import inf

import numpy as np
from numba import cuda, types

from ..geometry import FULL, block_state, next_block
from . import SIMULATED
from .compile import Kernel
from .ir.memory import local_array
from .ir.ptx import fresh
from .loading import tile_keys
from .threads import SHARED_ALIGNMENT, barrier, thread_index
from .tile_loading import Block, operand_loaders, query_loader, sources, work_tile_finder
from .tile_stages import dropout_stage, key_product, tile_rules, value_product, weigher
from .tile_writing import row_writer
from .tiling import ThreadTile, TileTiling, accumulator_of, shared_limit, tile_tiling

int64 = types.int64


def build(tiling, formats):
    """The kernel for a tiling and for the usual formats of q, k and v, which are read in vectors."""
    real, vector, (rows, keys, _, _) = tiling.accumulator.real, tiling.accumulator.vector, tiling.thread_tile
    # sizes of a thread's own arrays: Numba wants them as one constant each
    n_scores, n_outputs = rows * keys, tiling.parts * tiling.vectors * vector * rows
    block_k, tile_of = tiling.block_k, work_tile_finder(tiling)
    of_queries, of_keys, of_values = sources(tiling, formats)
    load_queries, multiply_keys = query_loader(tiling, formats[0], of_queries), key_product(tiling, formats[1])
    load_operand, load_first_operand = operand_loaders(tiling)
    apply_rules, weigh, drop_weights = tile_rules(tiling, load_operand), weigher(tiling), dropout_stage(tiling)
    add_values, write_rows = value_product(tiling, formats[2]), row_writer(tiling)

    def attend(p):
        shared = cuda.shared.array(0, real, alignment=SHARED_ALIGNMENT)
        t = int64(thread_index())
        head, tile = tile_of(p, t)
        visible = tile_keys(p, head, tile.first_row, tile.rows, 0, head.keys)
        s, o = local_array(n_scores, real), local_array(n_outputs, real)
        m, l = local_array(rows, real), local_array(rows, real)
        for r in range(rows):
            m[r], l[r] = real(-inf), real(0.0)
        for n in range(n_outputs):
            o[n] = real(0.0)
        if visible.start < visible.stop:
            load_queries(p, shared, head, tile, t)
        keys_source, values_source = of_keys(p, head), of_values(p, head)

        j0 = next_block(visible, visible.start, block_k)
        while j0 < visible.stop:
            first, stop = max(visible.start - j0, 0), min(visible.stop - j0, block_k)
            block = Block(j0, first, stop, block_state(visible, j0, j0 + block_k) != FULL)
            barrier()  # everyone is done with the block before
            t = fresh(int64(thread_index()))
            if load_first_operand(p, shared, tile, block, t):
                multiply_keys(p, s, shared, head, keys_source, tile, block, t)
                if apply_rules(True, p, s, shared, tile, block, t):
                    weigh(s, o, m, l, shared, tile)
                    if p.keep_factor != 0.0:
                        barrier()
                        drop_weights(p, shared, head, tile.first_row, j0, t)
                    t = fresh(int64(thread_index()))
                    add_values(p, o, shared, head, values_source, tile, block, t)
            j0 = next_block(visible, j0 + block_k, block_k)

        write_rows(p, shared, o, m, l, int64(thread_index()))

    return attend


# -- which kernel for which call ---------------------------------------------------------------------------------------

# As many rows and keys a thread as registers and shared memory have room for. Two thread blocks of 128 threads fill a
# multiprocessor's registers at 255 a thread, which is the most there may be, and three at 168.
MOST_REGISTERS = 255
REGISTERS_OF_THREE = 160  # less than 168, as `TileTiling.registers` is an estimate
THREAD_TILES = {
    4: (ThreadTile(4, 8), ThreadTile(2, 8), ThreadTile(2, 4), ThreadTile(1, 4)),
    8: (ThreadTile(4, 4), ThreadTile(2, 4), ThreadTile(1, 4)),
}
SIMULATED_THREAD_TILE = ThreadTile(4, 4, 2, 4)  # few threads, which cost the simulator most


def choose_tiling(problem: np.ndarray, cc: tuple[int, int]) -> TileTiling | None:
    """The tiling for a call; None where none fits."""
    accumulator = accumulator_of(problem)
    dims = int(problem["dim"]), int(problem["value_dim"])
    if SIMULATED:
        return tile_tiling(accumulator, SIMULATED_THREAD_TILE, *dims)
    tilings = [tile_tiling(accumulator, thread_tile, *dims) for thread_tile in THREAD_TILES[accumulator.itemsize]]
    fitting = (t for t in tilings if t.registers <= MOST_REGISTERS and t.shared_bytes <= shared_limit(cc))
    return next(fitting, None)


def why_not(problem: np.ndarray, cc: tuple[int, int]) -> str | None:
    """Why this kernel doesn't take a call, in words; None if it does."""
    if problem["state"] or not problem["out"]:
        return "a stream's state is laid out for the CPU"
    if choose_tiling(problem, cc) is None:
        return "head dimensions too large for the shared memory"
    return None


def grid(record: np.ndarray) -> tuple[int, int, int]:
    """One thread block for each work tile of each head."""
    tiles = record["work_tile_count"] if record["work_tiles"] else record["batch"] * record["row_tiles"]
    return int(tiles * record["heads"]), 1, 1


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a call: its floats, head dimensions, formats and tiling are compiled in, all else is read."""
    tiling = choose_tiling(problem, cc)
    assert tiling is not None
    formats = tuple(int(problem[f"{name}_format"]) for name in "qkv")
    blocks = 3 if tiling.registers <= REGISTERS_OF_THREE else 2
    parts = "tile", tiling.accumulator.real, tiling.dim, tiling.value_dim, *formats, *tiling.thread_tile
    name = "-".join(map(str, parts))
    return Kernel(name, build(tiling, formats), tiling.threads, tiling.shared_bytes, grid, tiling.block_q, blocks)
