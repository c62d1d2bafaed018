"""How a call is cut into work items and blocks, and what a thread's scratch holds.

The cut depends on sizes, dtype and CPU only, never on the number of threads, batches or heads: that is what makes
results the same to the bit whatever else runs.
"""

import numpy as np

LINE = 64  # bytes of a cache line; parts of the scratch start on one

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
        # where a thread's scratch holds what, in bytes
        ("queries", np.int64),  # Q, (register tile, dim, row)
        ("scores", np.int64),  # S, then the weights P, of one register tile: (key, row)
        ("output", np.int64),  # O, (register tile, column, row)
        ("maximum", np.int64),  # m and l, (register tile, row)
        ("total", np.int64),
        ("alpha", np.int64),  # what O is to be rescaled by, of one register tile
        ("keys", np.int64),  # a block of K and of V where they can't be read in place
        ("values", np.int64),
        ("row", np.int64),  # one row on its way in or out
        ("kept", np.int64),  # which (key, row) the mask keeps, a byte each
        ("end", np.int64),
    ],
    align=True,
)
TICKET, CANCEL = CONTROL.fields["ticket"][1], CONTROL.fields["cancel"][1]


def make_control(problem: np.ndarray, width: int, itemsize: int) -> np.ndarray:
    """The control block of a call: `width` is the query rows of a register tile, `itemsize` the kernel's float size."""
    queries, dim, value_dim = (int(problem[name]) for name in ("queries", "dim", "value_dim"))
    tiles = max(1, min(-(-queries // width), BLOCK_Q // width))
    block_q, block_k = tiles * width, min(BLOCK_K, max(1, int(problem["keys"])))
    control = np.zeros((), CONTROL)
    control["items"] = problem["batch"] * problem["heads"] * -(-queries // block_q)
    control["block_q"], control["block_k"] = block_q, block_k
    end = 0
    for part, size in (
        ("queries", block_q * dim * itemsize),
        ("scores", block_k * width * itemsize),
        ("output", block_q * value_dim * itemsize),
        ("maximum", block_q * itemsize),
        ("total", block_q * itemsize),
        ("alpha", width * itemsize),
        ("keys", block_k * dim * itemsize),
        ("values", block_k * value_dim * itemsize),
        ("row", max(dim, value_dim) * itemsize),
        ("kept", block_k * width),
    ):
        control[part] = end
        end += -(-size // LINE) * LINE
    control["end"] = end
    return control


BLOCK_Q, BLOCK_K = 192, 128
