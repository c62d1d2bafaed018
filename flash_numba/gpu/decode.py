"""The attention forward on a GPU for few queries: rows that share a key head, against a KV split.

The twin of `cpu/decode.py`. With few query rows the time goes into reading K and V, so a thread block takes up to 8
rows of all query heads that share a key head, and reads the keys of its split once for all of them: 16 bytes a copy,
a block of K or of V always under way while the other is worked on. The keys of a row are split among thread blocks at
fixed multiples; each leaves a state of the recurrence, and whoever finishes last merges them in the order of their keys
(Flash-Decoding, Dao et al. 2023). A block's keys are as many as the thread block's threads:

    S[row, key]  = sum_t Q[row, t] * K[key, t]        a thread has a key
    weights, m, l                                     `threads / rows` threads have a row
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]
                                                      a thread has 16 bytes of columns, and every so many keys
"""

from math import inf

import numpy as np
from numba import cuda, types

from .. import recurrence
from ..geometry import FULL, block_state, next_block
from ..problem import FEW_QUERIES
from . import SIMULATED
from .compile import Kernel
from .copies import wait_for_all_but_last_copies, wait_for_copies
from .decode_stages import (
    key_copier,
    key_product,
    query_loader,
    rescaler,
    row_block_finder,
    row_finder,
    row_maximum,
    row_scorer,
    row_weigher,
    value_copier,
    value_products,
)
from .decode_tiling import DecodeBlock, DecodeTiling, decode_tiling
from .decode_writing import finisher
from .elements import BYTES
from .ir.memory import local_array, put
from .loading import head_of, tile_keys
from .primitives import lane, scalar
from .threads import SHARED_ALIGNMENT, barrier, thread_index
from .tiling import accumulator_of, shared_limit, up_to

int32, int64 = types.int32, types.int64

ROWS = 2 if SIMULATED else 8  # at most, of a thread block
THREADS = (8,) if SIMULATED else (128, 64, 32)  # which cost the simulator most
SPLIT_KEYS, SPLITS = 16 if SIMULATED else 256, 64  # the least keys of a KV split, and about the most splits
RESERVED = 1024  # bytes of shared memory that each thread block takes besides its own
BLOCKS = 3  # on a multiprocessor, where they have room: one computes while others wait for memory


def build(tiling):
    """The kernel for one tiling."""
    real, itemsize, (rows, threads) = tiling.accumulator.real, tiling.accumulator.itemsize, tiling.block
    key_groups, s_stride = tiling.key_groups, tiling.score_stride
    s_at, alpha_at, n_outputs = tiling.scores // itemsize, tiling.alpha // itemsize, tiling.columns * rows
    row_block_of, row_of_thread = row_block_finder(tiling), row_finder(tiling)
    load_queries, copy_keys, copy_values = query_loader(tiling), key_copier(tiling), value_copier(tiling)
    multiply_key, (add_values, add_seen_values) = key_product(tiling), value_products(tiling)
    score_row, largest_of_row, weigh_row = row_scorer(tiling), row_maximum(tiling), row_weigher(tiling)
    rescale, finish = rescaler(tiling), finisher(tiling)

    def attend(p):
        raw = cuda.shared.array(0, int32, alignment=SHARED_ALIGNMENT)
        shared = cuda.shared.array(0, real, alignment=SHARED_ALIGNMENT)
        t = int64(thread_index())
        block = row_block_of(p)
        keys_of = head_of(p, block.b, block.h)  # whose keys all rows share
        split_start = block.split * p.split_keys
        split_stop = min(split_start + p.split_keys, keys_of.keys)
        visible = tile_keys(p, keys_of, 0, keys_of.queries, split_start, split_stop)
        head, row = row_of_thread(p, block, visible, t)
        m, l = real(-inf), real(0.0)
        s, o = local_array(rows, real), local_array(n_outputs, real)
        for n in range(n_outputs):
            o[n] = real(0.0)

        j0 = next_block(visible, visible.start, threads)
        copy_keys(raw, p, keys_of, j0, visible.stop - j0, t)
        copy_values(raw, p, keys_of, j0, visible.stop - j0, t)
        load_queries(shared, p, keys_of, block, t)
        while j0 < visible.stop:
            following = next_block(visible, j0 + threads, threads)
            wait_for_all_but_last_copies()
            barrier()  # K is there, and Q
            multiply_key(s, shared, raw, t)
            for n in range(rows):
                put(shared, s_at + n * s_stride + t, s[n])
            barrier()
            copy_keys(raw, p, keys_of, following, visible.stop - following, t)

            top, hidden = score_row(p, shared, head, row, j0)
            top = largest_of_row(shared, row, top, t)
            m_new, ref, alpha = recurrence.advance(lane(m), lane(top))
            total = weigh_row(p, shared, head, row, j0, ref, hidden)
            m, l = scalar(m_new), scalar(recurrence.absorb(lane(l), alpha, lane(total)))
            if row.u == 0:
                put(shared, alpha_at + row.r, scalar(alpha))
            wait_for_all_but_last_copies()
            barrier()  # V is there, and the weights
            rescale(o, shared)
            if row.key_group < key_groups:
                hides = p.bias != 0 or p.mask != 0 or keys_of.queries < p.queries
                if hides or block_state(visible, j0, j0 + threads) != FULL:
                    add_seen_values(o, shared, raw, row.column, row.key_group)
                else:
                    add_values(o, shared, raw, row.column, row.key_group)
            barrier()
            copy_values(raw, p, keys_of, following, visible.stop - following, t)
            j0 = following

        wait_for_copies()
        finish(p, shared, block, row, o, m, l, t)

    return attend


# -- which kernel for which call ---------------------------------------------------------------------------------------


def packed_rows(problem: np.ndarray) -> int:
    """Query rows that share a key head and a value head."""
    return int(min(problem["k_group"], problem["v_group"]) * problem["queries"])


def row_blocks(problem: np.ndarray, rows: int) -> int:
    """Thread blocks of all heads and batch elements for one split of the keys."""
    groups = problem["batch"] * (problem["heads"] // min(problem["k_group"], problem["v_group"]))
    return int(groups * -(-packed_rows(problem) // rows))


def splits(problem: np.ndarray) -> tuple[int, int]:
    """How many KV splits there are, and the keys of each: a matter of the number of keys alone."""
    keys = max(1, int(problem["keys"]))
    split_keys = up_to(SPLIT_KEYS, -(-keys // SPLITS))
    return -(-keys // split_keys), split_keys


def rows_of_block(problem: np.ndarray) -> int:
    """Query rows of a thread block: a power of two, as many as there are or `ROWS`."""
    return min(ROWS, 1 << (packed_rows(problem) - 1).bit_length())


def choose_block(problem: np.ndarray, cc: tuple[int, int]) -> DecodeBlock | None:
    """As many threads as leave room for three thread blocks, or at least for one; None where none fits."""
    blocks = [DecodeBlock(rows_of_block(problem), threads) for threads in THREADS]
    roomy = [block for block in blocks if shared_bytes(problem, block) <= shared_limit(cc) // BLOCKS]
    possible = [block for block in blocks if shared_bytes(problem, block) <= shared_limit(cc)]
    return next(iter((*roomy, *possible[-1:])), None)


def shared_bytes(problem: np.ndarray, block: DecodeBlock) -> int:
    return tiling_of(problem, block).end


def tiling_of(problem: np.ndarray, block: DecodeBlock) -> DecodeTiling:
    dims = int(problem["dim"]), int(problem["value_dim"])
    formats = int(problem["k_format"]), int(problem["v_format"])
    return decode_tiling(accumulator_of(problem), block, *dims, formats)


def why_not(problem: np.ndarray, cc: tuple[int, int]) -> str | None:
    """Why this kernel doesn't take a call, in words; None if it does."""
    if problem["queries"] > FEW_QUERIES:
        return f"more than {FEW_QUERIES} queries"
    if problem["work_tiles"] or problem["state"] or not problem["out"]:
        return "packed sequences and streams have tiles of rows"
    if cc < (8, 0) and not SIMULATED:
        return "copies that run aside need compute capability 8.0"
    if packed_rows(problem) == 0 or problem["keys"] == 0:
        return "nothing to read"
    for name, columns in (("k", "dim"), ("v", "value_dim")):
        size = BYTES.get(int(problem[f"{name}_format"]))
        if size is None or (size == 8) != (accumulator_of(problem).itemsize == 8):
            return f"{name} is of another format than q, or in foreign byte order"
        places = (problem[name], *(problem[f"{name}_{axis}"] for axis in ("batch", "head", "row")))
        aligned = all(int(place) % 16 == 0 for place in places)
        if problem[f"{name}_column"] != size or int(problem[columns]) * size % 16 or not aligned:
            return f"rows of {name} aren't contiguous and whole multiples of 16 bytes at multiples of 16 bytes"
    if choose_block(problem, cc) is None:
        return "head dimensions too large for the shared memory"
    return None


def workspace_bytes(record: np.ndarray) -> int:
    """Bytes of all splits' states, for an `ARGUMENTS` record; 0 where the keys aren't split."""
    if record["splits"] == 1:
        return 0
    rows = rows_of_block(record)
    states = row_blocks(record, rows) * int(record["splits"]) * rows
    return states * tiling_of(record, DecodeBlock(rows, THREADS[0])).state_bytes


def counters(record: np.ndarray) -> int:
    """How many int64 counters there are, 0 before a launch and after it."""
    return row_blocks(record, rows_of_block(record)) if record["splits"] > 1 else 0


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a call: its floats, head dimensions, formats and rows are compiled in, all else is read."""
    block = choose_block(problem, cc)
    assert block is not None
    of = tiling_of(problem, block)

    def grid(record: np.ndarray) -> tuple[int, int, int]:
        """One thread block for each split of the keys of each block of rows."""
        return row_blocks(record, block.rows) * int(record["splits"]), 1, 1

    name = "-".join(map(str, ("decode", of.accumulator.real, of.dim, of.value_dim, *of.formats, *block)))
    resident = min(BLOCKS, shared_limit(cc) // (of.end + RESERVED)) if block.threads == 128 else 1
    return Kernel(name, build(of), block.threads, of.end, grid, block.rows, resident)
