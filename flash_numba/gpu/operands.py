"""Where a thread block's rows are, and what belongs to its head: read from the problem, alike in every kernel."""

from numba import types

from ..problem import SEQUENCE, WORK_TILE
from .ir.memory import load_float64, load_int64
from .primitives import device

int64, uint32 = types.int64, types.uint32

SEQUENCE_BYTES, TILE_BYTES, FIRST_ROW = SEQUENCE.itemsize, WORK_TILE.itemsize, WORK_TILE.fields["first_row"][1]  # type: ignore[index]
Q, K, V, OUT, LSE, BIAS, MASK, QUERIES, KEYS, SHIFT, ROW_INDEX = (
    SEQUENCE.fields[name][1]  # type: ignore[index]
    for name in ("q", "k", "v", "out", "lse", "bias", "mask", "queries", "keys", "shift", "row_index")
)


@device
def quotient(a, b):
    """a // b of numbers from 0 to 2**32 - 1; a division of int64 is a call."""
    return int64(uint32(a) // uint32(b))


@device
def locate(p, item, rows):
    """Which rows an item is: `(sequence, head, first row)`. Longest first, heads side by side."""
    tile = quotient(item, p.heads)
    h = item - tile * p.heads
    if p.work_tiles != 0:
        at = p.work_tiles + tile * TILE_BYTES
        return load_int64(at), h, load_int64(at + FIRST_ROW)
    from_last = quotient(tile, p.batch)
    return tile - from_last * p.batch, h, (p.row_tiles - 1 - from_last) * rows


@device
def operands(p, b, h):
    """Where head h of sequence b starts: q, k, v, out, lse and both terms; and its lengths, shift and row index."""
    if p.sequences != 0:
        own = p.sequences + b * SEQUENCE_BYTES
        q, k, v, out = load_int64(own + Q), load_int64(own + K), load_int64(own + V), load_int64(own + OUT)
        lse, bias, mask = load_int64(own + LSE), load_int64(own + BIAS), load_int64(own + MASK)
        queries, keys = load_int64(own + QUERIES), load_int64(own + KEYS)
        shift, row_index = load_int64(own + SHIFT), load_int64(own + ROW_INDEX)
    else:
        q, k, v, out = b * p.q_batch, b * p.k_batch, b * p.v_batch, b * p.out_batch
        lse, bias, mask = b * p.lse_batch, b * p.bias_batch, b * p.mask_batch
        queries, keys, shift, row_index = p.queries, p.keys, p.shift, p.row_index
    return (
        p.q + q + h * p.q_head,
        p.k + k + quotient(h, p.k_group) * p.k_head,
        p.v + v + quotient(h, p.v_group) * p.v_head,
        p.out + out + h * p.out_head,
        p.lse + lse + h * p.lse_head,
        p.bias + bias + h * p.bias_head,
        p.mask + mask + h * p.mask_head,
        queries,
        keys,
        shift,
        row_index,
    )


@device
def of_head(address, batch_stride, head_stride, b, h, default):
    """A number given for each batch element and head, or the default where none is given."""
    if address == 0:
        return default
    return load_float64(address + b * batch_stride + h * head_stride)
