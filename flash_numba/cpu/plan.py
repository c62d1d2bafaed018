"""How a call is split into work tiles and blocks, and what a thread's scratch holds: the launch parameters.

They depend on sizes, dtype and CPU only, never on the number of threads, batches or heads, which is what makes
results the same to the bit whatever else runs.
"""

from typing import NamedTuple

import numpy as np

from ..problem import FEW_QUERIES

LINE = 64  # bytes of a cache line; parts of the scratch start on one
# Query rows a work tile and keys a block. On Zen 4 every pair of (96, 192, 384) and (64, 128, 256) lies within 3 % at
# D = 64 and 128.
BLOCK_Q, BLOCK_K = 192, 128
# Of `decode.py`: keys of a KV split, and the most scores of a block, which stay in cache. A block has a multiple of
# LEAST_KEYS keys, and no fewer: each change from K to V and back costs about a microsecond of reading.
SPLIT_KEYS, BLOCK_SCORES, LEAST_KEYS = 1024, 8192, 256
ROWS = 4  # query rows, if several, whose scores are computed together there
CONVERTED = 32  # keys that are converted at a time where K or V can't be read in place

# What the launch parameters of every kernel start with: what is written while the call runs, each in a cache line of
# its own, and how many work tiles there are.
HEADER: list[tuple] = [
    ("next_tile", np.int64),
    ("_next_tile_line", np.int64, 7),
    ("cancel", np.int64),
    ("_cancel_line", np.int64, 7),
    ("tiles", np.int64),
]
LAUNCH_PARAMETERS = np.dtype(
    [
        *HEADER,
        # query rows a work tile, keys a block
        ("block_q", np.int64),
        ("block_k", np.int64),
        # where a thread's scratch holds what, in bytes; the first three parts are a state of the recurrence
        ("output", np.int64),  # O: forward (row tile, column, row), decode (row, column)
        ("maximum", np.int64),  # m and l of every row
        ("total", np.int64),
        ("state_bytes", np.int64),
        ("queries", np.int64),  # Q: forward (row tile, dim, row), decode (row, dim)
        ("scores", np.int64),  # S, then the weights P: forward (key, row) of one row tile, decode (row, key)
        ("alpha", np.int64),  # what O is to be rescaled by; at the end of forward, LSE and normalizer
        ("keys", np.int64),  # a block of K and of V where they can't be read in place
        ("values", np.int64),
        ("bias", np.int64),  # the two operands' parts, laid out as the scores
        ("mask", np.int64),
        ("staging", np.int64),  # rows on their way in or out
        ("end", np.int64),
        # of decode: elements from row to row; KV splits, their states and how many are done of each group
        ("query_rows", np.int64),  # of Q and S, with those that fill a step up
        ("padded_dim", np.int64),
        ("padded_value_dim", np.int64),
        ("score_stride", np.int64),
        ("splits", np.int64),
        ("split_keys", np.int64),
        ("workspace", np.int64),
        ("finished", np.int64),
    ],
    align=True,
)
NEXT_TILE, CANCEL = (LAUNCH_PARAMETERS.fields[name][1] for name in ("next_tile", "cancel"))  # type: ignore[index]


class SimdSizes(NamedTuple):
    """What a plan has to know of the CPU: numbers in a vector register and in a register tile, and bytes of one."""

    register: int
    tile: int
    itemsize: int


def up_to(multiple: int, n: int) -> int:
    """n, rounded up to a multiple."""
    return -(-n // multiple) * multiple


def block_rows(queries: int, simd: SimdSizes) -> int:
    """Query rows of a work tile of `forward`."""
    return max(1, min(-(-queries // simd.tile), BLOCK_Q // simd.tile)) * simd.tile


def has_few_queries(problem: np.ndarray) -> bool:
    """Whether `decode` takes a call: few rows a head, none of them packed with other sequences or part of a stream."""
    special = problem["work_tiles"] or problem["state"] or not problem["out"]
    return bool(problem["queries"] <= FEW_QUERIES and not special)


def lay_out(launch: np.ndarray, itemsize: int, parts: dict[str, int]) -> np.ndarray:
    """Place the parts of the scratch, of so many elements each, one after the other."""
    end = 0
    for part, elements in parts.items():
        launch[part] = end
        end += up_to(LINE, elements * itemsize)
    launch["end"] = end
    return launch


def plan_forward(problem: np.ndarray, simd: SimdSizes) -> np.ndarray:
    """The launch parameters of a call of `forward`."""
    queries, keys, dim, value_dim = (int(problem[name]) for name in ("queries", "keys", "dim", "value_dim"))
    block_q = block_rows(queries, simd)
    block_k = min(BLOCK_K, max(1, keys))
    launch = np.zeros((), LAUNCH_PARAMETERS)
    tiles = problem["work_tile_count"] if problem["work_tiles"] else problem["batch"] * -(-queries // block_q)
    launch["tiles"] = tiles * problem["heads"]
    launch["block_q"], launch["block_k"] = block_q, block_k
    bias, mask = bool(problem["bias"]), bool(problem["mask"])
    return lay_out(
        launch,
        simd.itemsize,
        {
            "output": block_q * value_dim,
            "maximum": block_q,
            "total": block_q,
            "state_bytes": 0,
            "queries": block_q * dim,
            "scores": block_k * simd.tile,
            "alpha": 2 * simd.tile,
            "keys": block_k * dim,
            "values": block_k * value_dim,
            "bias": block_k * simd.tile * bias,
            "mask": block_k * simd.tile * mask,
            "staging": simd.tile * max(dim, value_dim, block_k * (bias or mask)),
        },
    )


def plan_decode(problem: np.ndarray, simd: SimdSizes) -> np.ndarray:
    """The launch parameters of a call of `decode`, without the addresses of its workspace."""
    keys, dim, value_dim = (int(problem[name]) for name in ("keys", "dim", "value_dim"))
    group = int(min(problem["k_group"], problem["v_group"]))
    rows = group * int(problem["queries"])
    launch = np.zeros((), LAUNCH_PARAMETERS)
    launch["query_rows"] = query_rows = rows if rows == 1 else up_to(ROWS, rows)
    most = max(LEAST_KEYS, min(SPLIT_KEYS, BLOCK_SCORES // rows // LEAST_KEYS * LEAST_KEYS))
    launch["block_k"] = block_k = min(most, up_to(simd.tile, max(1, keys)))
    launch["splits"] = splits = max(1, -(-keys // SPLIT_KEYS))
    launch["split_keys"] = SPLIT_KEYS
    launch["tiles"] = problem["batch"] * (problem["heads"] // group) * splits
    launch["padded_dim"] = padded_dim = up_to(simd.register, dim)
    launch["padded_value_dim"] = padded_value_dim = up_to(simd.register, value_dim)
    # one register more than the block: the last keys' register may be written past it
    launch["score_stride"] = score_stride = up_to(simd.tile, block_k + simd.register)
    bias, mask = bool(problem["bias"]), bool(problem["mask"])
    return lay_out(
        launch,
        simd.itemsize,
        {
            "output": rows * padded_value_dim,
            "maximum": rows,
            "total": rows,
            "state_bytes": 0,
            "queries": query_rows * padded_dim,
            "scores": query_rows * score_stride,
            "alpha": rows,
            "keys": min(block_k, CONVERTED) * padded_dim,
            "values": block_k * padded_value_dim,
            "bias": rows * score_stride * bias,
            "mask": rows * score_stride * mask,
            "staging": padded_value_dim,
        },
    )
