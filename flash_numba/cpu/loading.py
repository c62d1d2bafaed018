"""Where things lie in memory, and how rows of them get to where a kernel works on them.

A key's row lies where `row_address` says, in the format that `load_one` reads, and may be read where it lies if
`readable_in_place` or `readable_as_stored` says so, or loaded with others at once if `are_one_row` does. All kernels
ask these, so another way of storing keys (pages, a scale for each token) changes them and no kernel.
"""

from math import inf
from typing import NamedTuple

from numba import njit, types

from .. import geometry
from ..dtypes import BFLOAT16, FLOAT16
from ..problem import PROBLEM, SEQUENCE, WORK_TILE, Head
from .compile import HELPER, STAGE
from .formats import in_place, load_row, transpose
from .ir.lanes import itemsize, lanes_of, tile_width
from .ir.memory import load, move, pointer_like, pointer_to, prefetch, record_at, store
from .ir.registers import REGISTER_TILE
from .plan import LAUNCH_PARAMETERS, LINE

problem_at, sequence_at, work_tile_at = (record_at(dtype) for dtype in (PROBLEM, SEQUENCE, WORK_TILE))
launch_at = record_at(LAUNCH_PARAMETERS)
float64_at = pointer_to(types.float64)
CONVERTS_FLOAT16 = REGISTER_TILE.half
SEQUENCE_BYTES, WORK_TILE_BYTES = SEQUENCE.itemsize, WORK_TILE.itemsize


# -- a head, and which keys its rows see -------------------------------------------------------------------------------


@njit(**HELPER)
def head_number(address, batch_stride, head_stride, b, h, default):
    """A number given for each batch element and head, or the default where none is given."""
    if address == 0:
        return default
    return float64_at(address + b * batch_stride + h * head_stride)[0]


@njit(forceinline=True, **HELPER)
def head_of(p, b, h):
    """Head h of batch element or packed sequence b. Inlined, where nothing is left of what isn't used."""
    k_head, v_head = h // p.k_group, h // p.v_group
    if p.sequences != 0:
        own = sequence_at(p.sequences + b * SEQUENCE_BYTES)
        q, k, v, out, lse, bias, mask = own.q, own.k, own.v, own.out, own.lse, own.bias, own.mask
        queries, keys, shift, row_index = own.queries, own.keys, own.shift, own.row_index
    else:
        q, k, v, out = b * p.q_batch, b * p.k_batch, b * p.v_batch, b * p.out_batch
        lse, bias, mask = b * p.lse_batch, b * p.bias_batch, b * p.mask_batch
        queries, keys, shift, row_index = p.queries, p.keys, p.shift, p.row_index
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
        p.scale * head_number(p.k_scales, p.k_scale_batch, p.k_scale_head, b, k_head, 1.0),
        head_number(p.v_scales, p.v_scale_batch, p.v_scale_head, b, v_head, 1.0),
        head_number(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0),
        head_number(p.sinks, p.sink_batch, p.sink_head, b, h, -inf),
    )


@njit(**HELPER)
def locate(p, launch, number):
    """Which rows a work tile is: `(sequence, head, first row, its number)`. Longest first, heads side by side.

    Its number counts by head, and tells where a stream keeps its state.
    """
    tile, h = number // p.heads, number % p.heads
    if p.work_tiles != 0:
        row = work_tile_at(p.work_tiles + tile * WORK_TILE_BYTES)
        return row.sequence, h, row.first_row, tile
    count = (p.queries + launch.block_q - 1) // launch.block_q
    b = tile % p.batch
    tile = count - 1 - tile // p.batch
    return b, h, tile * launch.block_q, (b * p.heads + h) * count + tile


@njit(**HELPER)
def tile_keys(p, head, first_row, rows, start, stop):
    """The `geometry.VisibleKeys` among the keys start to stop for a tile of a head's rows."""
    position = first_row + head.shift
    return geometry.visible_keys(position, position + rows - 1, p.left, p.right, start, min(stop, head.keys))


# -- rows of a matrix --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a head's Q, K, V, O or dO, in any format."""

    address: int  # of row 0
    row_stride: int  # bytes from row to row, and from column to column
    column_stride: int
    code: int  # of the format, `dtypes.format_code`
    columns: int


@njit(**HELPER)
def queries_of(p, head):
    return Rows(head.q, p.q_row, p.q_column, p.q_format, p.dim)


@njit(**HELPER)
def keys_of(p, head):
    return Rows(head.k, p.k_row, p.k_column, p.k_format, p.dim)


@njit(**HELPER)
def values_of(p, head):
    return Rows(head.v, p.v_row, p.v_column, p.v_format, p.value_dim)


@njit(**HELPER)
def out_of(p, head):
    return Rows(head.out, p.out_row, p.out_column, p.out_format, p.value_dim)


@njit(**HELPER)
def row_address(rows, j):
    """Where row j lies."""
    return rows.address + j * rows.row_stride


@njit(**HELPER)
def readable_in_place(like, rows, first, count):
    """Whether `count` rows from row `first` on can be read as the kernel's floats where they lie."""
    return in_place(like, row_address(rows, first), rows.row_stride, rows.column_stride, rows.code)


@njit(**HELPER)
def readable_as_stored(like, rows, first, count):
    """Whether float32 products can read rows of a 16-bit format where they lie, and convert them in registers."""
    known = rows.code == BFLOAT16 or (rows.code == FLOAT16 and CONVERTS_FLOAT16)
    aligned = row_address(rows, first) % 2 == 0 and rows.row_stride % 2 == 0
    return itemsize(like) == 4 and known and rows.column_stride == 2 and aligned


@njit(**HELPER)
def are_one_row(rows, first, count):
    """Whether `count` rows from row `first` on lie behind one another, with nothing between them or beside them."""
    return rows.row_stride == rows.columns * rows.column_stride


@njit(**HELPER)
def stride_of(like, rows):
    """Elements from row to row of rows that are read in place."""
    return rows.row_stride // itemsize(like)


@njit(**HELPER)
def load_one(to, rows, j):
    """Row j."""
    load_row(to, rows.columns, row_address(rows, j), rows.column_stride, rows.code)


@njit(**STAGE)
def load_rows(to, to_stride, rows, first, count, scale):
    """`count` rows from row `first` on as (row, column), scaled."""
    for r in range(count):
        row = move(to, r * to_stride)
        load_one(row, rows, first + r)
        if scale != 1:
            for c in range(rows.columns):
                row[c] *= scale


@njit(**STAGE)
def load_block(block, rows, first, count):
    """Rows of K or V: `(pointer, elements from row to row)`, in place where the format allows, else through `block`."""
    if readable_in_place(block, rows, first, count):
        return pointer_like(block, row_address(rows, first)), stride_of(block, rows)
    for j in range(count):
        load_one(move(block, j * rows.columns), rows, first + j)
    return block, rows.columns


@njit(**STAGE)
def load_padded(block, rows, first, count, padded):
    """The same into a block, each row filled up with zeros to a whole number of registers."""
    columns = rows.columns
    if columns == padded and are_one_row(rows, first, count):
        load_row(block, count * columns, row_address(rows, first), rows.column_stride, rows.code)
        return
    for j in range(count):
        row = move(block, j * padded)
        load_one(row, rows, first + j)
        for c in range(columns, padded):
            row[c] = 0


@njit(**STAGE)
def load_queries(q, staging, rows, first, count, scale):
    """Query rows into q, as (row tile, dim, row) and scaled; lanes without a row get 0."""
    width, dim = tile_width(q), rows.columns
    factor = lanes_of(q, scale)
    for done in range(0, count, width):
        own = min(width, count - done)
        tile, source, stride = move(q, done * dim), staging, dim
        if own == width and readable_in_place(q, rows, first + done, own):
            source, stride = pointer_like(q, row_address(rows, first + done)), stride_of(q, rows)
        else:
            for r in range(own):
                load_one(move(staging, r * dim), rows, first + done + r)
            for d in range(own * dim, width * dim):
                staging[d] = 0
        transpose(tile, width, source, stride, width, dim)
        for d in range(dim):
            store(load(tile, d) * factor, tile, d)


# -- prefetch ----------------------------------------------------------------------------------------------------------


class Ahead(NamedTuple):
    """Where parts of the next block's rows of K and V start, and how far apart they are."""

    k: int
    k_stride: int
    v: int
    v_stride: int


@njit(**HELPER)
def ahead_of(p, head, key, tile):
    """What `prefetch_row` shall have fetched from key `key` on: two cache lines a row for each row tile."""
    k, v, part = keys_of(p, head), values_of(p, head), tile * 2 * LINE
    return Ahead(row_address(k, key) + part, k.row_stride, row_address(v, key) + part, v.row_stride)


@njit(**HELPER)
def prefetch_row(ahead, j):
    """Have row j's part of the next block fetched into the second-level cache meanwhile.

    The products read K and V in steps that the CPU's own prefetcher doesn't follow. On Zen 4 this saves 5 % of the
    forward's time at D = 64 and 4 % at 128.
    """
    prefetch(ahead.k + j * ahead.k_stride)
    prefetch(ahead.k + j * ahead.k_stride + LINE)
    prefetch(ahead.v + j * ahead.v_stride)
    prefetch(ahead.v + j * ahead.v_stride + LINE)
