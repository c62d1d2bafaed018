"""The stages of the tile kernel: products, rules, dropout and writing, each for one `tiling.Tiling`.

Every factory gives a function with the tiling's sizes as constants. A thread's registers hold s[r * keys + c], the
scores of its row r and key c, and o[n * rows + r], the output of its row r and column n; a tile's weights are in shared
memory from `p_at` on, and a term of the scores is there before them.
"""

from math import inf

from numba import types

from .. import dropout, geometry, ops, recurrence, scores
from ..dtypes import BOOL
from .ir.memory import get, give, local_array, put
from .ir.products import score_step, value_step
from .ir.ptx import fresh
from .operands import locate, of_head, operands, quotient
from .primitives import device, lane, scalar
from .threads import barrier, barrier_or, block_index
from .tiles import tile_loader
from .tiling import in_turn

int32, int64 = types.int32, types.int64


# -- products ----------------------------------------------------------------------------------------------------------


def key_product(tiling):
    rows, keys, threads_y, threads_x = tiling.shape
    piece, vector = tiling.piece, tiling.accumulator.vector
    multiply = score_step(rows, keys, threads_y * tiling.q_stride, threads_x * tiling.k_stride)

    @device
    def multiply_keys(s, shared, q_row, k_row):
        """S[row, key] += sum_t Q[row, t] K[key, t] over a piece of the dimensions."""
        for d in range(0, piece, vector):
            multiply(s, shared, q_row + d, k_row + d)

    return multiply_keys


def value_product(tiling, form, mark_hidden):
    """O += P V, a part of the columns after the other; `form` is V's usual format."""
    rows, _, threads_y, threads_x = tiling.shape
    real, vector = tiling.accumulator.real, tiling.accumulator.vector
    block_k, vectors, columns, kv_at = tiling.block_k, tiling.vectors, tiling.columns, tiling.kv_at
    strides = threads_y * tiling.p_stride, columns, threads_x * vector
    load_values = tile_loader(tiling.accumulator, form, block_k, columns, columns, tiling.threads)

    def part(n):
        begin, start = n * columns, n * vectors * vector * rows  # among all columns, and in a thread's registers
        left = min(columns, tiling.value_dim - begin)
        multiply, multiply_seen = (value_step(rows, vectors, start, *strides, seen) for seen in (False, True))

        @device
        def add_values(o, shared, p_row, v_column):
            """O[row, c] += sum_j P[row, j] V[j, c]"""
            for j in range(0, block_k, vector):
                multiply(o, shared, p_row + j, v_column + j * columns)

        @device
        def add_seen_values(o, shared, p_row, v_column):
            """The same without the keys that a row doesn't see."""
            for j in range(0, block_k, vector):
                multiply_seen(o, shared, p_row + j, v_column + j * columns)

        @device
        def absorb(p, o, shared, address, quick, first, stop, p_row, v_column, hides, tile, t):
            if n > 0:
                barrier()
            finite = load_values(
                shared, kv_at, address + begin * p.v_column, p.v_row, p.v_column, p.v_format, quick, first, stop, left,
                real(1.0), t,
            )  # fmt: skip
            if barrier_or(int32(not finite)) and hides:
                mark_hidden(p, shared, tile, first, stop, t)
                barrier()
                add_seen_values(o, shared, p_row, v_column)
            else:
                add_values(o, shared, p_row, v_column)

        return absorb

    return in_turn([part(n) for n in range(tiling.parts)])


# -- rules -------------------------------------------------------------------------------------------------------------


@device
def term_of(p, n, bias_at, mask_at):
    """The n-th term of the scores: its address, strides and format. A lone one is the first, whichever it is."""
    if n == 0 and p.bias != 0:
        return bias_at, p.bias_row, p.bias_column, p.bias_format
    return mask_at, p.mask_row, p.mask_column, p.mask_format


def term_stages(tiling):
    """`(load_term, apply_term, mark_hidden)`."""
    real, read, highest = tiling.accumulator.real, tiling.accumulator.read, tiling.accumulator.highest
    rows, keys, threads_y, threads_x = tiling.shape
    block_k, p_at, p_stride, threads = tiling.block_k, tiling.p_at, tiling.p_stride, tiling.threads
    places = tiling.block_q * block_k

    @device
    def load_term(shared, term, j0, first, stop, own_rows, t):
        """A term's part of a tile to where the weights come later; whether this thread has seen a key kept."""
        address, row_stride, column_stride, code = term
        kept = False
        hides = real(0.0) if code == BOOL else real(-inf)
        for place in range(t, places, threads):
            row, j = place // block_k, place % block_k
            x = hides
            if row < own_rows and j >= first and j < stop:
                x = read(address + row * row_stride + (j0 + j) * column_stride, code)
                kept = kept or x != hides
            put(shared, p_at + row * p_stride + j, x)
        return kept

    @device
    def apply_term(s, shared, p_element, code):
        """A loaded term on the scores."""
        lowest = real(-highest)
        for r in range(rows):
            for c in range(keys):
                x = get(shared, p_element + r * threads_y * p_stride + c * threads_x)
                at = r * keys + c
                if code == BOOL:
                    s[at] = scalar(scores.hide(lane(s[at]), x != real(0.0)))
                else:
                    s[at] = scalar(scores.with_bias(lane(s[at]), lane(x), lowest))

    @device
    def mark_hidden(p, shared, tile, first, stop, t):
        """-0.0 for the weights of keys that their rows don't see, which are 0 anyway. Where V isn't finite: rare."""
        position, j0, own_rows, bias_at, mask_at = tile
        for place in range(t, places, threads):
            row, j = place // block_k, place % block_k
            at = position + row - j0
            seen = geometry.between(j, max(first, at - p.left), min(stop - 1, at + p.right))
            for n in range((p.bias != 0) + (p.mask != 0)):
                address, row_stride, column_stride, code = term_of(p, n, bias_at, mask_at)
                if row < own_rows and j >= first and j < stop:
                    x = read(address + row * row_stride + (j0 + j) * column_stride, code)
                    seen = seen and x != (real(0.0) if code == BOOL else real(-inf))
            if not seen:
                put(shared, p_at + row * p_stride + j, real(-0.0))

    return load_term, apply_term, mark_hidden


def dropout_stage(tiling):
    block_k, p_at, p_stride, threads = tiling.block_k, tiling.p_at, tiling.p_stride, tiling.threads
    groups = block_k // 4 + 1  # of four keys that share a counter, where a block doesn't start at a multiple of four
    places = tiling.block_q * groups

    @device
    def drop_weights(shared, i, j0, h, b, round_keys, threshold, factor, t):
        """Dropout: weights of dropped keys to 0, of kept ones times 1 / (1 - p).

        i and j0: the indices of the tile's first row and first key among the random words.
        """
        for place in range(t, places, threads):
            row, group = place // groups, (j0 >> 2) + place % groups
            words = dropout.philox(lane(int32(group)), lane(int32(i + row)), lane(int32(h)), lane(int32(b)), round_keys)
            for n in range(4):
                j = group * 4 + n - j0
                if j >= 0 and j < block_k:
                    word = words[0] if n == 0 else words[1] if n == 1 else words[2] if n == 2 else words[3]
                    at = p_at + row * p_stride + j
                    w = get(shared, at)
                    put(shared, at, scalar(ops.select(dropout.kept(word, int32(threshold)), lane(w * factor), 0.0)))

    return drop_weights


# -- write -------------------------------------------------------------------------------------------------------------


def writer(tiling):
    accumulator = tiling.accumulator
    real, vector, write, itemsize = accumulator.real, accumulator.vector, accumulator.write, accumulator.itemsize
    own_format = accumulator.own_format
    rows, _, threads_y, threads_x = tiling.shape
    vectors, columns, out_stride, value_dim = tiling.vectors, tiling.columns, tiling.out_stride, tiling.value_dim
    threads, block_q, partial_at = tiling.threads, tiling.block_q, tiling.partial_at
    n_columns = tiling.parts * vectors * vector

    def part(n):
        """The n-th part of O's columns, through shared memory, to where it belongs."""
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
            for place in range(t, block_q * columns, threads):
                row, c = place // columns, place % columns
                if row < written and begin + c < value_dim:
                    at = out_at + row * p.out_row + (begin + c) * p.out_column
                    write(at, p.out_format, get(shared, row * out_stride + c))

        return write_columns

    write_output = in_turn([part(n) for n in range(tiling.parts)])

    @device
    def write_rows(p, shared, o, m, l, t):
        """Take the sink in, normalise, and write a tile's rows; those beyond a sequence's own see no key."""
        ty, tx = t // threads_x, t % threads_x
        partial = partial_at + ty * threads_x
        for r in range(rows):
            put(shared, partial + r * threads_y * threads_x + tx, l[r])
        barrier()
        b, h, first_row = locate(p, fresh(int64(block_index())), block_q)
        _, _, _, out_at, lse_at, _, _, queries, _, _, _ = operands(p, b, h)
        sink = real(of_head(p.sinks, p.sink_batch, p.sink_head, b, h, -inf))
        v_scale = real(of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, quotient(h, p.v_group), 1.0))
        own_rows = max(0, min(block_q, queries - first_row))
        written = own_rows if p.work_tiles != 0 else min(block_q, p.queries - first_row)
        for r in range(rows):
            row = ty + r * threads_y
            total = real(0.0)
            for n in range(threads_x):
                total += get(shared, partial + r * threads_y * threads_x + n)
            mine = row < own_rows
            row_lse, factor = recurrence.finalize(
                lane(m[r] if mine else real(-inf)), lane(total if mine else real(0.0)), lane(sink)
            )
            if tx == 0 and row < written:
                write(lse_at + (first_row + row) * itemsize, own_format, scalar(row_lse))
            own_l, factor = lane(total if mine else real(0.0)), lane(scalar(factor) * v_scale)
            for n in range(n_columns):
                o[n * rows + r] = scalar(recurrence.normalized(lane(o[n * rows + r]), own_l, factor))
        write_output(p, o, shared, out_at + first_row * p.out_row, written, t)

    return write_rows
