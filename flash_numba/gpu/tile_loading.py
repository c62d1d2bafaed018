"""What the tile kernel loads: which rows a thread block has, and rows of Q, K, V and of operands to shared memory.

Every factory gives a function with the `TileTiling`'s sizes as constants.
"""

from math import inf
from typing import NamedTuple

from numba import types

from ..dtypes import BOOL
from .elements import vector_reader
from .ir.memory import give, local_array, put
from .ir.ptx import fresh
from .loading import head_of, query_address, work_tile
from .primitives import device
from .rules import operand_of, operand_rules
from .threads import barrier_or, block_index

int32, int64 = types.int32, types.int64


# -- which rows and keys -----------------------------------------------------------------------------------------------


class WorkTile(NamedTuple):
    """The rows of a thread block, and where this thread's parts of shared memory start."""

    first_row: int
    rows: int  # that there are
    position: int  # of the first
    bias: int  # addresses of the operands' elements for the first row and key 0
    mask: int
    slope: float
    ty: int  # the thread's first row
    tx: int  # and its first key
    q_row: int
    k_row: int
    p_row: int
    p_element: int
    v_column: int
    partial: int  # numbers of all threads of the thread's rows


class Block(NamedTuple):
    """A block of keys that some row of the work tile sees."""

    j0: int  # its first key
    first: int  # the keys from first to stop are visible, counted from there
    stop: int
    partly: bool  # whether some row doesn't see all of it


def work_tile_finder(tiling):
    """A function of p and t for the `Head` and the `WorkTile` of a thread."""
    real, vector, block_q = tiling.accumulator.real, tiling.accumulator.vector, tiling.block_q
    _, _, _, threads_x = tiling.thread_tile
    q_stride, k_stride, p_stride = tiling.q_stride, tiling.k_stride, tiling.p_stride
    kv_at, p_at, partial_at = tiling.kv_at, tiling.p_at, tiling.partial_at

    @device
    def tile_of(p, t):
        b, h, first_row = work_tile(p, int64(block_index()), block_q)
        head = head_of(p, b, h)
        ty, tx = t // threads_x, t % threads_x
        p_row = p_at + ty * p_stride
        return head, WorkTile(
            first_row,
            max(0, min(block_q, head.queries - first_row)),
            first_row + head.shift,
            head.bias + first_row * p.bias_row,
            head.mask + first_row * p.mask_row,
            real(head.slope),
            ty,
            tx,
            ty * q_stride,
            kv_at + tx * k_stride,
            p_row,
            p_row + tx,
            kv_at + tx * vector,
            partial_at + ty * threads_x,
        )

    return tile_of


# -- load --------------------------------------------------------------------------------------------------------------

# Rows of Q, K and V go from global memory into tiles of floats in shared memory, converted on the way. What stands in
# the usual way (a native format, contiguous columns, aligned rows) is read in vectors, several of them in flight at
# once; anything else one element at a time.


class Source(NamedTuple):
    """How a matrix's rows are read."""

    column: int  # bytes from column to column
    code: int  # of the format
    quick: bool  # whether in vectors


class Part(NamedTuple):
    """Which part of a matrix goes into a tile. Its other rows, and columns beyond those that there are, become 0."""

    row: int  # of the matrix, the first of the tile
    first: int  # rows of the tile, at least one
    stop: int
    column: int  # of the matrix, the first of the tile
    columns: int


def quickness(accumulator, form, columns):
    """A function that tells whether rows of `columns` numbers can be read in vectors of the format `form`."""
    vector, reader = accumulator.vector, vector_reader(accumulator, form)
    size = reader[0] if reader else 1
    fits = reader is not None and columns % vector == 0

    @device
    def is_quick(address, row_stride, column_stride, code):
        return fits and code == form and column_stride * vector == size and (address | row_stride) % size == 0

    return is_quick


def sources(tiling, formats):
    """Functions of p and a head for how Q, K and V are read; formats: what they are in usually."""
    quick_q, quick_k = (quickness(tiling.accumulator, form, tiling.dim) for form in formats[:2])
    quick_v = quickness(tiling.accumulator, formats[2], tiling.value_dim)

    @device
    def of_queries(p, head):
        return Source(p.q_column, p.q_format, quick_q(head.q, p.q_row, p.q_column, p.q_format))

    @device
    def of_keys(p, head):
        return Source(p.k_column, p.k_format, quick_k(head.k, p.k_row, p.k_column, p.k_format))

    @device
    def of_values(p, head):
        return Source(p.v_column, p.v_format, quick_v(head.v, p.v_row, p.v_column, p.v_format))

    return of_queries, of_keys, of_values


def tile_loader(accumulator, form, rows, width, stride, threads, address_of):
    """A function that loads a tile of `rows` x `width` numbers into shared memory, `stride` numbers from row to row.

    form: the format that is read in vectors, if it turns out to be the one; address_of: where a row of a head starts.
    The function's arguments: the shared array and where the tile starts in it, the record and the head, a `Source` and
    a `Part`, a factor, and the thread's number. It returns whether all that this thread has loaded is finite.
    """
    sizes = rows, width, stride, threads
    load_elements = element_loader(accumulator, *sizes, address_of)
    reader = vector_reader(accumulator, form)
    if reader is None:
        return load_elements
    load_vectors = vector_loader(accumulator, reader, *sizes, address_of)

    @device
    def load(shared, at, p, head, source, part, factor, t):
        if source.quick:
            return load_vectors(shared, at, p, head, source, part, factor, t)
        return load_elements(shared, at, p, head, source, part, factor, t)

    return load


def element_loader(accumulator, rows, width, stride, threads, address_of):
    real, read = accumulator.real, accumulator.read

    @device
    def load_elements(shared, at, p, head, source, part, factor, t):
        bad = real(0)
        for n in range(t, rows * width, threads):
            row, column = n // width, n % width
            x = real(0)
            if row >= part.first and row < part.stop and column < part.columns:
                address = address_of(p, head, part.row + row) + (part.column + column) * source.column
                x = read(address, source.code) * factor
                bad += x * real(0)
            put(shared, at + row * stride + column, x)
        return bad == bad

    return load_elements


def vector_loader(accumulator, reader, rows, width, stride, threads, address_of):
    real, vector, (size, fetch, convert) = accumulator.real, accumulator.vector, reader
    item = size // vector
    # Threads stand in rows of `in_row`, each with a column of its own; `each` vectors a thread, `at_once` rows apart.
    in_row = width // vector
    at_once = threads // in_row
    each = -(-rows // at_once)
    n_raw, busy, all_busy = each * 4, at_once * in_row, threads % in_row == 0 and rows % at_once == 0

    @device
    def load_vectors(shared, at, p, head, source, part, factor, t):
        bad, raw, values = real(0), local_array(n_raw, int32), local_array(vector, real)
        row, column = t // in_row, t % in_row * vector
        there = column < part.columns
        offset = part.column * source.column + min(column, part.columns - vector) * item
        for n in range(each):  # where there is no row: another one's
            own = min(max(row + n * at_once, part.first), part.stop - 1)
            fetch(raw, n * 4, address_of(p, head, part.row + own) + offset)
        for n in range(each):
            to = row + n * at_once
            if all_busy or (t < busy and to < rows):
                convert(values, raw, n * 4)
                seen = there and to >= part.first and to < part.stop
                for j in range(vector):
                    values[j] = values[j] * factor if seen else real(0)
                    bad += values[j] * real(0)
                give(shared, at + to * stride + column, values, 0)
        return bad == bad

    return load_vectors


def query_loader(tiling, form, of_queries):
    """A function that loads a work tile's queries, times the scale, in pieces of the dimensions."""
    accumulator, dim, piece, padded = tiling.accumulator, tiling.dim, tiling.piece, tiling.padded
    real, highest, whole = accumulator.real, accumulator.highest, dim == padded
    load = tile_loader(accumulator, form, tiling.block_q, piece, tiling.q_stride, tiling.threads, query_address)

    @device
    def load_queries(p, shared, head, tile, t):
        scale, source = real(max(-highest, min(highest, head.scale))), of_queries(p, head)
        for d in range(0, padded, piece):
            part = Part(tile.first_row, 0, tile.rows, d, piece if whole else min(piece, dim - d))
            load(shared, d, p, head, source, part, scale, t)

    return load_queries


def operand_loaders(tiling):
    """`(load_operand, load_first_operand)`: whether the operand leaves a key of the block to any row."""
    real, read, (_, hides) = tiling.accumulator.real, tiling.accumulator.read, operand_rules(tiling.accumulator)
    block_k, p_at, p_stride, threads = tiling.block_k, tiling.p_at, tiling.p_stride, tiling.threads
    elements = tiling.block_q * block_k

    @device
    def load_operand(p, shared, n, tile, block, t):
        """An operand's part of a tile goes to where the weights come later."""
        address, row_stride, column_stride, code = operand_of(p, n, tile.bias, tile.mask)
        kept, hidden = False, real(0.0) if code == BOOL else real(-inf)
        for n in range(t, elements, threads):
            row, j = n // block_k, n % block_k
            x = hidden
            if row < tile.rows and j >= block.first and j < block.stop:
                x = read(address + row * row_stride + (block.j0 + j) * column_stride, code)
                kept = kept or not hides(x, code)
            put(shared, p_at + row * p_stride + j, x)
        return barrier_or(int32(kept)) != 0

    @device
    def load_first_operand(p, shared, tile, block, t):
        """Before anything else of a block, as it may turn out to be hidden."""
        if p.bias == 0 and p.mask == 0:
            return True
        return load_operand(p, shared, fresh(int64(0)), tile, block, t)

    return load_operand, load_first_operand
