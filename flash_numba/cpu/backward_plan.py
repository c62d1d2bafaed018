"""How a gradient call is split into work tiles, in which order they add to the same sums, and what a scratch holds.

A work tile is a block of query rows of one head. It owns their dQ; dK and dV it shares with the other rows and heads of
its key head. These form a chain: a work tile adds to a block of keys after its predecessor in the chain has, so every
sum is taken in the same order, by whichever thread. Blocks start at fixed multiples: like the forward's, the launch
parameters depend on sizes, dtype and CPU only.
"""

import numpy as np

from .plan import HEADER, SimdSizes, block_rows, lay_out, up_to

BLOCK_K = 128  # keys a block
PAD = 1  # registers more than a row of floats has: rows a power of two apart would share few sets of the L1 cache

# A work tile. `previous` is its predecessor in the chain, -1 for none.
CHAINED_TILE = np.dtype([("sequence", np.int64), ("head", np.int64), ("first_row", np.int64), ("previous", np.int64)])

LAUNCH_PARAMETERS = np.dtype(
    [
        *HEADER,
        ("table", np.int64),  # address of the CHAINED_TILE records
        ("progress", np.int64),  # address of a number a work tile: the blocks of keys that it is done with
        ("gradient", np.int64),  # address of the PROBLEM record of the gradients (backward_launch.describe_gradients)
        (
            "walks_all",
            np.int64,
        ),  # whether each goes through all blocks of keys, as its successor waits for that
        ("block_q", np.int64),
        ("block_k", np.int64),
        # elements from row to row
        ("q_stride", np.int64),
        ("dout_stride", np.int64),
        ("weight_stride", np.int64),
        # where a thread's scratch holds what, in bytes
        ("queries", np.int64),  # Q and dO: (row tile, column, row), scaled for the scores
        ("douts", np.int64),
        ("query_rows", np.int64),  # and as they are, (row, column), scaled for dK and dV
        ("dout_rows", np.int64),
        ("dq", np.int64),  # (row, column)
        ("lse", np.int64),  # of each row, in base 2
        ("delta", np.int64),
        ("row_bias", np.int64),  # the gradient of a bias that has one number for all keys of a row
        ("scores", np.int64),  # of one row tile, (key, row)
        ("dout_values", np.int64),  # dO V, likewise
        ("keep", np.int64),  # what dropout multiplies a weight by, likewise
        ("cap_slope", np.int64),  # the derivative of soft-capping, likewise
        ("bias", np.int64),  # the two operands' parts, likewise
        ("mask", np.int64),
        ("weights", np.int64),  # P and dS of all rows: (key, row)
        ("score_gradients", np.int64),
        ("keys", np.int64),  # a block of K, (key, column), and of V where it can't be read in place
        ("values", np.int64),
        ("key_ranges", np.int64),  # which keys each row tile sees, which rows see each step of keys
        ("row_ranges", np.int64),
        ("staging", np.int64),
        ("end", np.int64),
    ],
    align=True,
)


def chained_tiles(counts: np.ndarray, heads: int, group: int, block_q: int) -> np.ndarray:
    """The `CHAINED_TILE` records of sequences of `counts` tiles of rows; `group` query heads share one of dK and dV.

    Chains side by side, so that threads rarely wait. Within one the last rows come first: under a causal mask they see
    most keys. The work tiles that see some block of keys are neighbours in their chain.
    """
    kv_heads = heads // group
    lengths = np.repeat(counts * group, kv_heads)  # of each chain
    chain = np.repeat(np.arange(lengths.size), lengths)
    link = np.arange(chain.size) - np.repeat(lengths.cumsum() - lengths, lengths)
    order = np.lexsort((chain, link))
    chain, link = chain[order], link[order]
    table = np.zeros(chain.size, CHAINED_TILE)
    sequence = chain // kv_heads
    table["sequence"] = sequence
    table["head"] = chain % kv_heads * group + link % group
    table["first_row"] = (counts[sequence] - 1 - link // group) * block_q
    where = np.empty(chain.size, np.int64)
    where[order] = np.arange(chain.size)  # of each link, chain by chain
    previous = where[order - 1]
    table["previous"] = np.where(link > 0, previous, -1)
    return table


def plan_backward(problem: np.ndarray, simd: SimdSizes) -> np.ndarray:
    """The launch parameters of a gradient call, without the addresses of its tables."""
    queries, keys, dim, value_dim = (int(problem[name]) for name in ("queries", "keys", "dim", "value_dim"))
    launch = np.zeros((), LAUNCH_PARAMETERS)
    launch["block_q"] = block_q = block_rows(queries, simd)
    launch["block_k"] = block_k = min(BLOCK_K, max(1, keys))
    pad = PAD * simd.register
    launch["q_stride"] = q_stride = up_to(simd.register, dim) + pad
    launch["dout_stride"] = dout_stride = up_to(simd.register, value_dim) + pad
    launch["weight_stride"] = weight_stride = block_q + pad
    tile = block_k * simd.tile
    bias, mask = bool(problem["bias"]), bool(problem["mask"])
    return lay_out(
        launch,
        simd.itemsize,
        {
            "queries": block_q * dim,
            "douts": block_q * value_dim,
            "query_rows": block_q * q_stride,
            "dout_rows": block_q * dout_stride,
            "dq": block_q * q_stride,
            "lse": block_q,
            "delta": block_q,
            "row_bias": block_q,
            "scores": tile,
            "dout_values": tile,
            "keep": tile * bool(problem["keep_factor"]),
            "cap_slope": tile * bool(problem["softcap"]),
            "bias": tile * bias,
            "mask": tile * mask,
            "weights": block_k * weight_stride,
            "score_gradients": block_k * weight_stride,
            "keys": block_k * q_stride,
            "values": block_k * value_dim,
            "key_ranges": 2 * 8 * (block_q // simd.tile) // simd.itemsize,
            "row_ranges": 2 * 8 * block_k // simd.itemsize,
            "staging": simd.tile * max(dim, value_dim, block_k),
        },
    )
