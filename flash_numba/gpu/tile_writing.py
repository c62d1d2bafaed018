"""How the tile kernel finalizes a work tile's rows and writes them."""

from math import inf

from numba import types

from .. import recurrence
from .ir.memory import get, give, local_array, put
from .ir.ptx import fresh
from .loading import head_of, work_tile
from .primitives import device, lane, scalar
from .threads import barrier, block_index
from .tiling import in_turn

int32, int64 = types.int32, types.int64


# -- write -------------------------------------------------------------------------------------------------------------


def column_writer(tiling, n):
    """A function that writes the n-th part of O's columns, through shared memory."""
    real, vector, write = tiling.accumulator.real, tiling.accumulator.vector, tiling.accumulator.write
    rows, _, threads_y, threads_x = tiling.thread_tile
    vectors, columns, out_stride, value_dim = tiling.vectors, tiling.columns, tiling.out_stride, tiling.value_dim
    threads, elements = tiling.threads, tiling.block_q * columns
    start, begin = n * vectors * vector * rows, n * columns

    @device
    def write_columns(p, o, shared, out_at, written, t):
        line = local_array(vector, real)
        if n > 0:
            barrier()
        for r in range(rows):
            for i in range(vectors):
                for e in range(vector):
                    line[e] = o[start + (i * vector + e) * rows + r]
                at = (t // threads_x + r * threads_y) * out_stride
                give(shared, at + (i * threads_x + t % threads_x) * vector, line, 0)
        barrier()
        for i in range(t, elements, threads):
            row, c = i // columns, i % columns
            if row < written and begin + c < value_dim:
                at = out_at + row * p.out_row + (begin + c) * p.out_column
                write(at, p.out_format, get(shared, row * out_stride + c))

    return write_columns


def row_writer(tiling):
    """A function that finalizes a work tile's rows and writes them; those beyond a sequence's own see no key."""
    real, itemsize, vector = tiling.accumulator.real, tiling.accumulator.itemsize, tiling.accumulator.vector
    write, own_format = tiling.accumulator.write, tiling.accumulator.own_format
    rows, _, threads_y, threads_x = tiling.thread_tile
    block_q, partial_at, n_columns = tiling.block_q, tiling.partial_at, tiling.parts * tiling.vectors * vector
    write_output = in_turn([column_writer(tiling, n) for n in range(tiling.parts)])

    @device
    def write_rows(p, shared, o, m, l, t):
        ty, tx = t // threads_x, t % threads_x
        partial = partial_at + ty * threads_x
        for r in range(rows):
            put(shared, partial + r * threads_y * threads_x + tx, l[r])
        barrier()
        # where they go is found anew: registers are scarce in the loop over the keys
        b, h, first_row = work_tile(p, fresh(int64(block_index())), block_q)
        head = head_of(p, b, h)
        sink, v_scale = real(head.sink), real(head.v_scale)
        own_rows = max(0, min(block_q, head.queries - first_row))
        written = own_rows if p.work_tiles != 0 else min(block_q, p.queries - first_row)
        for r in range(rows):
            row = ty + r * threads_y
            total = real(0.0)
            for n in range(threads_x):
                total += get(shared, partial + r * threads_y * threads_x + n)
            own_m, own_l = (m[r], total) if row < own_rows else (real(-inf), real(0.0))
            row_lse, normalizer = recurrence.finalize(lane(own_m), lane(own_l), lane(sink))
            if tx == 0 and row < written:
                write(head.lse + (first_row + row) * itemsize, own_format, scalar(row_lse))
            normalizer = lane(scalar(normalizer) * v_scale)
            for n in range(n_columns):
                o[n * rows + r] = scalar(recurrence.normalized(lane(o[n * rows + r]), lane(own_l), normalizer))
        write_output(p, o, shared, head.out + first_row * p.out_row, written, t)

    return write_rows
