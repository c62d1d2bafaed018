"""How a call is cut into work items and blocks, and what a thread's scratch holds.

The cut depends on sizes, dtype and CPU only, never on the number of threads, batches or heads: that is what makes
results the same to the bit whatever else runs.
"""

import numpy as np

LINE = 64  # bytes of a cache line; parts of the scratch start on one
# Query rows an item and keys a block. On Zen 4 every pair of (96, 192, 384) and (64, 128, 256) lies within 3 % at
# D = 64 and 128.
BLOCK_Q, BLOCK_K = 192, 128

CONTROL = np.dtype(
    [
        # written while the call runs, each in a cache line of its own
        ("ticket", np.int64),
        ("_ticket_line", np.int64, 7),
        ("cancel", np.int64),
        ("_cancel_line", np.int64, 7),
        # the plan: work items, query rows an item, keys a block
        ("items", np.int64),
        ("block_q", np.int64),
        ("block_k", np.int64),
        # where a thread's scratch holds what, in bytes; the first three parts are the state of a stream
        ("output", np.int64),  # O, (register tile, column, row)
        ("maximum", np.int64),  # m and l, (register tile, row)
        ("total", np.int64),
        ("state_bytes", np.int64),
        ("queries", np.int64),  # Q, (register tile, dim, row)
        ("scores", np.int64),  # S, then the weights P, of one register tile: (key, row)
        ("alpha", np.int64),  # what O is to be rescaled by, of one register tile; at the end LSE and factor
        ("keys", np.int64),  # a block of K and of V where they can't be read in place
        ("values", np.int64),
        ("bias", np.int64),  # the two terms' parts of a score tile: (key, row)
        ("mask", np.int64),
        ("staging", np.int64),  # rows of one register tile on their way in or out
        ("end", np.int64),
    ],
    align=True,
)
TICKET, CANCEL = (CONTROL.fields[name][1] for name in ("ticket", "cancel"))  # type: ignore[index]


def block_rows(queries: int, width: int) -> int:
    """Query rows of an item, for `width` rows a register tile."""
    return max(1, min(-(-queries // width), BLOCK_Q // width)) * width


def make_control(problem: np.ndarray, width: int, itemsize: int) -> np.ndarray:
    """The control block of a call: `width` is the query rows of a register tile, `itemsize` the kernel's float size."""
    queries, keys, dim, value_dim = (int(problem[name]) for name in ("queries", "keys", "dim", "value_dim"))
    block_q = block_rows(queries, width)
    block_k = min(BLOCK_K, max(1, keys))
    control = np.zeros((), CONTROL)
    tiles = problem["tile_count"] if problem["tiles"] else problem["batch"] * -(-queries // block_q)
    control["items"] = tiles * problem["heads"]
    control["block_q"], control["block_k"] = block_q, block_k
    terms = problem["terms"]
    end = 0
    for part, elements in (
        ("output", block_q * value_dim),
        ("maximum", block_q),
        ("total", block_q),
        ("state_bytes", 0),
        ("queries", block_q * dim),
        ("scores", block_k * width),
        ("alpha", 2 * width),
        ("keys", block_k * dim),
        ("values", block_k * value_dim),
        ("bias", block_k * width * bool(terms[0])),
        ("mask", block_k * width * bool(terms[1])),
        ("staging", width * max(dim, value_dim, block_k if terms.any() else 0)),
        ("end", 0),
    ):
        control[part] = end
        end += -(-elements * itemsize // LINE) * LINE
    return control
