"""How a call is cut into work items and blocks, and what a thread's scratch holds.

The cut depends on sizes, dtype and CPU only, never on the number of threads, batches or heads: that is what makes
results the same to the bit whatever else runs.
"""

from typing import NamedTuple

import numpy as np

LINE = 64  # bytes of a cache line; parts of the scratch start on one
# Query rows an item and keys a block. On Zen 4 every pair of (96, 192, 384) and (64, 128, 256) lies within 3 % at
# D = 64 and 128.
BLOCK_Q, BLOCK_K = 192, 128
# Up to so many queries a head, `decode.py` takes the call: from there on `forward.py`'s lanes are filled well enough.
FEW_QUERIES = 16
# Keys of an item there; a block is as many, or fewer so that no more than so many scores stay in cache. Each change
# from K to V and back costs about a microsecond of reading.
SHARE_KEYS, BLOCK_SCORES = 1024, 8192
ROWS = 4  # query rows, if several, whose scores are computed together there
CONVERTED = 32  # keys that are converted at a time where K or V can't be read in place

# What every control block starts with: what is written while the call runs, each in a cache line of its own, and how
# many work items there are.
HEADER: list[tuple] = [
    ("ticket", np.int64),
    ("_ticket_line", np.int64, 7),
    ("cancel", np.int64),
    ("_cancel_line", np.int64, 7),
    ("items", np.int64),
]
CONTROL = np.dtype(
    [
        *HEADER,
        # query rows an item, keys a block
        ("block_q", np.int64),
        ("block_k", np.int64),
        # where a thread's scratch holds what, in bytes; the first three parts are a state of the recurrence
        ("output", np.int64),  # O: forward (register tile, column, row), decode (row, column)
        ("maximum", np.int64),  # m and l of every row
        ("total", np.int64),
        ("state_bytes", np.int64),
        ("queries", np.int64),  # Q: forward (register tile, dim, row), decode (row, dim)
        ("scores", np.int64),  # S, then the weights P: forward (key, row) of one register tile, decode (row, key)
        ("alpha", np.int64),  # what O is to be rescaled by; at the end of forward, LSE and factor
        ("keys", np.int64),  # a block of K and of V where they can't be read in place
        ("values", np.int64),
        ("bias", np.int64),  # the two terms' parts, laid out as the scores
        ("mask", np.int64),
        ("staging", np.int64),  # rows on their way in or out
        ("end", np.int64),
        # of decode: elements from row to row; shares of the keys, their states and how many are done of each group
        ("query_rows", np.int64),  # of Q and S, with those that fill a step up
        ("padded_dim", np.int64),
        ("padded_value_dim", np.int64),
        ("score_stride", np.int64),
        ("shares", np.int64),
        ("share_keys", np.int64),
        ("workspace", np.int64),
        ("finished", np.int64),
    ],
    align=True,
)
TICKET, CANCEL = (CONTROL.fields[name][1] for name in ("ticket", "cancel"))  # type: ignore[index]


class Lanes(NamedTuple):
    """What the plan has to know of the CPU: numbers in a vector register, in a register tile, and bytes of one."""

    register: int
    tile: int
    itemsize: int


def up_to(multiple: int, n: int) -> int:
    """n, rounded up to a multiple."""
    return -(-n // multiple) * multiple


def block_rows(queries: int, lanes: Lanes) -> int:
    """Query rows of an item of `forward`."""
    return max(1, min(-(-queries // lanes.tile), BLOCK_Q // lanes.tile)) * lanes.tile


def has_few_queries(problem: np.ndarray) -> bool:
    """Whether `decode` takes a call: few rows a head, none of them packed with other sequences or part of a stream."""
    special = problem["work_tiles"] or problem["state"] or not problem["out"]
    return bool(problem["queries"] <= FEW_QUERIES and not special)


def lay_out(control: np.ndarray, itemsize: int, parts: dict[str, int]) -> np.ndarray:
    """Place the parts of the scratch, of so many elements each, one after the other."""
    end = 0
    for part, elements in parts.items():
        control[part] = end
        end += up_to(LINE, elements * itemsize)
    control["end"] = end
    return control


def plan_forward(problem: np.ndarray, lanes: Lanes) -> np.ndarray:
    """The control block of a call of `forward`."""
    queries, keys, dim, value_dim = (int(problem[name]) for name in ("queries", "keys", "dim", "value_dim"))
    block_q = block_rows(queries, lanes)
    block_k = min(BLOCK_K, max(1, keys))
    control = np.zeros((), CONTROL)
    tiles = problem["work_tile_count"] if problem["work_tiles"] else problem["batch"] * -(-queries // block_q)
    control["items"] = tiles * problem["heads"]
    control["block_q"], control["block_k"] = block_q, block_k
    bias, mask = bool(problem["bias"]), bool(problem["mask"])
    return lay_out(
        control,
        lanes.itemsize,
        {
            "output": block_q * value_dim,
            "maximum": block_q,
            "total": block_q,
            "state_bytes": 0,
            "queries": block_q * dim,
            "scores": block_k * lanes.tile,
            "alpha": 2 * lanes.tile,
            "keys": block_k * dim,
            "values": block_k * value_dim,
            "bias": block_k * lanes.tile * bias,
            "mask": block_k * lanes.tile * mask,
            "staging": lanes.tile * max(dim, value_dim, block_k * (bias or mask)),
        },
    )


def plan_decode(problem: np.ndarray, lanes: Lanes) -> np.ndarray:
    """The control block of a call of `decode`, without the addresses of its workspace."""
    keys, dim, value_dim = (int(problem[name]) for name in ("keys", "dim", "value_dim"))
    group = int(min(problem["k_group"], problem["v_group"]))
    rows = group * int(problem["queries"])
    control = np.zeros((), CONTROL)
    control["query_rows"] = query_rows = rows if rows == 1 else up_to(ROWS, rows)
    most = max(256, min(SHARE_KEYS, BLOCK_SCORES // rows // 256 * 256))
    control["block_k"] = block_k = min(most, up_to(lanes.tile, max(1, keys)))
    control["shares"] = shares = max(1, -(-keys // SHARE_KEYS))
    control["share_keys"] = SHARE_KEYS
    control["items"] = problem["batch"] * (problem["heads"] // group) * shares
    control["padded_dim"] = padded_dim = up_to(lanes.register, dim)
    control["padded_value_dim"] = padded_value_dim = up_to(lanes.register, value_dim)
    # one register more than the block: the last keys' register may be written past it
    control["score_stride"] = score_stride = up_to(lanes.tile, block_k + lanes.register)
    bias, mask = bool(problem["bias"]), bool(problem["mask"])
    return lay_out(
        control,
        lanes.itemsize,
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
