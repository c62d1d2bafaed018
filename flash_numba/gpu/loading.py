"""Which rows a thread block computes, what belongs to their head, which keys they see, and where those lie.

Every kernel asks these functions. A page table is a change of `key_address` and `value_address`; a table of blocks is
one of `geometry.next_block` and `geometry.block_state`, which kernels ask with what `tile_keys` gives.
"""

from math import inf

from numba import types

from .. import geometry
from ..problem import SEQUENCE, WORK_TILE, Head
from .ir.memory import load_float64, load_int64
from .primitives import device

int64, uint32 = types.int64, types.uint32

SEQUENCE_BYTES, WORK_TILE_BYTES = SEQUENCE.itemsize, WORK_TILE.itemsize
FIRST_ROW = WORK_TILE.fields["first_row"][1]  # type: ignore[index]
Q, K, V, OUT, LSE, BIAS, MASK, QUERIES, KEYS, SHIFT, ROW_INDEX = (
    SEQUENCE.fields[name][1]  # type: ignore[index]
    for name in ("q", "k", "v", "out", "lse", "bias", "mask", "queries", "keys", "shift", "row_index")
)


@device
def quotient(a, b):
    """a // b of numbers from 0 to 2**32 - 1; a division of int64 is a call."""
    return int64(uint32(a) // uint32(b))


# -- which rows --------------------------------------------------------------------------------------------------------


@device
def listed_work_tile(p, index):
    """`(sequence, first row)` of a work tile in the table of packed sequences."""
    at = p.work_tiles + index * WORK_TILE_BYTES
    return load_int64(at), load_int64(at + FIRST_ROW)


@device
def work_tile(p, index, rows):
    """`(sequence, head, first row)` of a thread block's work tile: most keys first, heads side by side."""
    tile = quotient(index, p.heads)
    h = index - tile * p.heads
    if p.work_tiles != 0:
        b, first_row = listed_work_tile(p, tile)
        return b, h, first_row
    from_last = quotient(tile, p.batch)
    return tile - from_last * p.batch, h, (p.row_tiles - 1 - from_last) * rows


@device
def number_of(address, batch_stride, head_stride, b, h, default):
    """A number given for each batch element and head, or the default where none is given."""
    if address == 0:
        return default
    return load_float64(address + b * batch_stride + h * head_stride)


@device
def head_of(p, b, h):
    """The `Head` h of batch element or packed sequence b."""
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
    k_head, v_head = quotient(h, p.k_group), quotient(h, p.v_group)
    return Head(
        b,
        h,
        p.q + q + h * p.q_head,
        p.k + k + k_head * p.k_head,
        p.v + v + v_head * p.v_head,
        p.out + out + h * p.out_head,
        p.lse + lse + h * p.lse_head,
        p.bias + bias + h * p.bias_head,
        p.mask + mask + h * p.mask_head,
        queries,
        keys,
        shift,
        row_index,
        p.scale * number_of(p.k_scales, p.k_scale_batch, p.k_scale_head, b, k_head, 1.0),
        number_of(p.v_scales, p.v_scale_batch, p.v_scale_head, b, v_head, 1.0),
        number_of(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0),
        number_of(p.sinks, p.sink_batch, p.sink_head, b, h, -inf),
    )


# -- which keys --------------------------------------------------------------------------------------------------------


@device
def tile_keys(p, head, first_row, rows, start, stop):
    """The `VisibleKeys` of so many rows of a head, among the keys start to stop: all, or those of a KV split."""
    position = first_row + head.shift
    return geometry.visible_keys(position, position + rows - 1, p.left, p.right, start, stop)


@device
def row_keys(p, head, i):
    """The first and the last key that row i sees, before there being keys at all is looked at."""
    return geometry.row_bounds(i + head.shift, p.left, p.right)


# -- where their rows lie ----------------------------------------------------------------------------------------------

# Of a head these three ask for one address only, so that kernels may keep less of it than a whole `Head`.


@device
def query_address(p, head, i):
    """Where row i of Q starts."""
    return head.q + i * p.q_row


@device
def key_address(p, head, j):
    """Where key j starts."""
    return head.k + j * p.k_row


@device
def value_address(p, head, j):
    """Where the value of key j starts."""
    return head.v + j * p.v_row
