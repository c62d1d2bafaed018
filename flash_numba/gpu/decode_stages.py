"""The stages of the decode kernel up to a split's state: copies, products, scores and weights, for a `DecodeTiling`.

Every factory gives functions with the tiling's sizes as constants. K and V lie in shared memory as they come, and each
of their elements is converted by the one thread that uses it. A thread's registers hold s[row], the scores of its key,
and o[n * rows + row], the output of its column n over its own keys.
"""

from math import inf
from typing import NamedTuple

from numba import types

from .. import geometry, recurrence
from .copies import commit_copies, copy_chunk
from .decode_tiling import COPIED
from .elements import BYTES, vector_reader
from .ir.memory import get, local_array, put, take
from .ir.products import dot_step, outer_step
from .loading import head_of, key_address, query_address, quotient, row_keys, value_address
from .primitives import device, lane, larger, scalar
from .rules import At, hidden_unless, score_rules, weight_dropout
from .threads import barrier, block_index
from .tiling import in_turn

int32, int64 = types.int32, types.int64


# -- which rows --------------------------------------------------------------------------------------------------------


class RowBlock(NamedTuple):
    """What a thread block computes: rows of all query heads that share a key head, against one KV split."""

    b: int
    h: int  # the first of those heads
    group: int  # which key head of which batch element
    n: int  # which of its row blocks, of how many
    of_blocks: int
    split: int
    first_row: int  # rows of all heads are counted through: packed
    rows: int


def row_block_finder(tiling):
    """A function of p for this thread block's `RowBlock`.

    Row blocks stand side by side, as they read the same keys; then KV splits, then key heads.
    """
    rows = tiling.block.rows

    @device
    def row_block_of(p):
        group = min(p.k_group, p.v_group)
        all_rows = group * p.queries
        count = (all_rows + rows - 1) // rows
        index = int64(block_index())
        of_keys = quotient(index, count)
        g = quotient(of_keys, p.splits)
        n, split = index - of_keys * count, of_keys - g * p.splits
        key_heads = quotient(p.heads, group)
        b = quotient(g, key_heads)
        h = (g - b * key_heads) * group
        return RowBlock(b, h, g, n, count, split, n * rows, min(rows, all_rows - n * rows))

    return row_block_of


@device
def head_and_query(p, row):
    """A packed row's head within its group, and its query."""
    h = quotient(row, p.queries)
    return h, row - h * p.queries


@device
def row_of(p, block, n):
    """`(head, query)` of row n of a row block."""
    h, i = head_and_query(p, block.first_row + n)
    return head_of(p, block.b, block.h + h), i


# -- load --------------------------------------------------------------------------------------------------------------


def copier(address_of, base, stride, chunks, threads):
    """A function that starts the copy of a block's rows to shared memory; those beyond `count` become 0.

    address_of: where a row of a head starts, `loading.key_address` or `loading.value_address`.
    """
    base, stride = base // 4, stride // 4
    # threads stand in rows of `across` chunks of 16 bytes, `at_once` rows a step
    across = min(chunks, threads)
    at_once = threads // across
    even, one_each = threads % at_once == 0, across == chunks

    @device
    def copy(raw, p, head, first, count, t):
        row, first_chunk = t // across, t % across
        left = int32(count - row)
        if row < at_once:
            for chunk in range(first_chunk, first_chunk + 1 if one_each else chunks, across):
                to = base + row * stride + chunk * 4
                for n in range(0, threads, at_once):
                    source = address_of(p, head, first + row + n) + chunk * COPIED
                    if even or row + n < threads:
                        copy_chunk(raw, to + n * stride, source, COPIED if int32(n) < left else 0)
        commit_copies()

    return copy


def key_copier(tiling):
    chunks = tiling.dim * BYTES[tiling.formats[0]] // COPIED
    return copier(key_address, tiling.k, tiling.k_stride, chunks, tiling.block.threads)


def value_copier(tiling):
    return copier(value_address, tiling.v, tiling.v_stride, tiling.v_stride // COPIED, tiling.block.threads)


def query_loader(tiling):
    """A function that loads a row block's queries, times the scale, to shared memory; rows that aren't there are 0."""
    real, read, highest = tiling.accumulator.real, tiling.accumulator.read, tiling.accumulator.highest
    (rows, threads), dim, q_at = tiling.block, tiling.dim, tiling.q // tiling.accumulator.itemsize

    @device
    def load_queries(shared, p, head, block, t):
        scale = real(max(-highest, min(highest, head.scale)))
        for n in range(t, rows * dim, threads):
            row, x = n // dim, real(0.0)
            if row < block.rows:
                h, i = head_and_query(p, block.first_row + row)
                x = read(query_address(p, head, i) + h * p.q_head + n % dim * p.q_column, p.q_format) * scale
            put(shared, q_at + n, x)

    return load_queries


# -- products ----------------------------------------------------------------------------------------------------------


def key_product(tiling):
    real, vector = tiling.accumulator.real, tiling.accumulator.vector
    rows, k_at, k_stride, q_at = (
        tiling.block.rows,
        tiling.k // 4,
        tiling.k_stride // 4,
        tiling.q // tiling.accumulator.itemsize,
    )
    size, _, convert_k = vector_reader(tiling.accumulator, tiling.formats[0])
    k_chunks, k_vectors, per_vector = tiling.dim * BYTES[tiling.formats[0]] // 16, 16 // size, size // 4
    multiply = dot_step(rows, tiling.dim)

    @device
    def multiply_key(s, shared, raw, t):
        """s[row] = sum_t Q[row, t] K[key, t] for this thread's key."""
        line, values = local_array(4, int32), local_array(vector, real)
        for r in range(rows):
            s[r] = real(0.0)
        for chunk in range(k_chunks):
            take(line, 0, raw, k_at + t * k_stride + chunk * 4)
            for n in range(k_vectors):
                convert_k(values, line, n * per_vector)
                multiply(s, shared, q_at + (chunk * k_vectors + n) * vector, values)

    return multiply_key


def value_products(tiling):
    """`(add_values, add_seen_values)`: the latter leaves out what V holds where a row doesn't see the key."""
    real, vector = tiling.accumulator.real, tiling.accumulator.vector
    (rows, threads), across, chunks, key_groups = tiling.block, tiling.across, tiling.chunks, tiling.key_groups
    v_at, v_stride, v_chunks = tiling.v // 4, tiling.v_stride // 4, tiling.v_stride // 16
    s_at, s_stride = tiling.scores // tiling.accumulator.itemsize, tiling.score_stride
    v_size, _, convert_v = vector_reader(tiling.accumulator, tiling.formats[1])
    v_vectors, n_weights = 16 // v_size, rows * vector

    def vector_adder(key, chunk, n, seen):
        """O += P V for one of the keys that are read together and for one vector of the columns."""
        add = outer_step(rows, vector, (chunk * v_vectors + n) * vector * rows, key, seen)
        before = n * v_size // 4

        @device
        def add_in(o, p, line, values):
            convert_v(values, line, before)
            add(o, p, values)

        return add_in

    def chunk_adder(key, chunk, seen):
        add_vectors = in_turn([vector_adder(key, chunk, n, seen) for n in range(v_vectors)])
        short = (chunk + 1) * across > v_chunks

        @device
        def add_in(o, p, line, values, raw, j, column):
            if not short or chunk * across + column < v_chunks:
                take(line, 0, raw, v_at + (j + key) * v_stride + (chunk * across + column) * 4)
                add_vectors(o, p, line, values)

        return add_in

    def adder(seen):
        """A function for O[row, c] += sum_j P[row, j] V[j, c] over this thread's keys and columns."""
        keys_and_chunks = [(key, chunk) for key in range(vector) for chunk in range(chunks)]
        add_keys = in_turn([chunk_adder(key, chunk, seen) for key, chunk in keys_and_chunks])

        @device
        def add_in(o, shared, raw, column, group):
            line, values, p = local_array(4, int32), local_array(vector, real), local_array(n_weights, real)
            for j in range(group * vector, threads, key_groups * vector):
                for r in range(rows):
                    take(p, r * vector, shared, s_at + r * s_stride + j)
                add_keys(o, p, line, values, raw, j, column)

        return add_in

    return adder(False), adder(True)


# -- score, recur ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What a thread does: it weighs scores of a row together with others, and adds up columns of some keys' values."""

    r: int  # of the row block
    u: int  # the thread's number among those of the row
    i: int  # query
    first: int  # the keys that it sees; none where there is no such row
    last: int
    slope: float
    column: int  # of V's chunks of 16 bytes, the thread's first
    key_group: int  # whose keys' values the thread takes


def row_finder(tiling):
    """A function for the `Head` and the `Row` of thread t."""
    (rows, threads), real, across = tiling.block, tiling.accumulator.real, tiling.across
    of_row = threads // rows

    @device
    def row_of_thread(p, block, visible, t):
        r, u = t // of_row, t % of_row
        head, i = row_of(p, block, min(r, block.rows - 1))
        first, last = row_keys(p, head, i)
        first, last = max(first, visible.start), min(last, visible.stop - 1)
        if r >= block.rows or i >= head.queries:
            last = first - 1
        return head, Row(r, u, i, first, last, real(head.slope), t % across, t // across)

    return row_of_thread


def row_scorer(tiling):
    """A function that applies all rules to a row's scores of a block: `(largest, bits of the thread's hidden keys)`."""
    (rows, threads), real = tiling.block, tiling.accumulator.real
    of_row, s_at, s_stride = threads // rows, tiling.scores // tiling.accumulator.itemsize, tiling.score_stride
    apply_rules = score_rules(tiling.accumulator, None)

    @device
    def score_row(p, shared, head, row, j0):
        top, hidden, bit = real(-inf), int64(0), int64(1)
        position, bias, mask = head.shift + row.i, head.bias + row.i * p.bias_row, head.mask + row.i * p.mask_row
        for n in range(row.u, threads, of_row):
            j, at = j0 + n, s_at + row.r * s_stride + n
            seen = geometry.between(j, row.first, row.last)
            here = At(row.slope, real(position - j0), real(n), bias + j * p.bias_column, mask + j * p.mask_column)
            x, seen = apply_rules((get(shared, at), seen), p, here)
            x = hidden_unless(x, seen)
            top = larger(top, x)
            put(shared, at, x)
            hidden = hidden if seen else hidden | bit
            bit = bit << 1
        return top, hidden

    return score_row


def row_maximum(tiling):
    """A function for the largest of a number over the threads of a row. All threads wait for one another in it."""
    (rows, threads), real, vector = tiling.block, tiling.accumulator.real, tiling.accumulator.vector
    of_row, partial_at = threads // rows, tiling.partial // tiling.accumulator.itemsize

    @device
    def largest_of_row(shared, row, top, t):
        line = local_array(vector, real)
        put(shared, partial_at + t, top)
        barrier()
        for n in range(0, of_row, vector):
            take(line, 0, shared, partial_at + row.r * of_row + n)
            for e in range(vector):
                top = larger(top, line[e])
        return top

    return largest_of_row


def row_weigher(tiling):
    """A function that turns a row's scores of a block into weights, -0.0 where hidden, and returns their sum."""
    (rows, threads), real = tiling.block, tiling.accumulator.real
    of_row, s_at, s_stride = threads // rows, tiling.scores // tiling.accumulator.itemsize, tiling.score_stride
    _, dropped = weight_dropout(real)

    @device
    def weigh_row(p, shared, head, row, j0, ref, hidden):
        total = real(0.0)
        for n in range(row.u, threads, of_row):
            at = s_at + row.r * s_stride + n
            w = scalar(recurrence.weight(lane(get(shared, at)), ref))
            total += w
            if p.keep_factor != 0.0:
                w = dropped(p, head, w, row.i, j0 + n)
            put(shared, at, real(-0.0) if hidden & 1 else w)
            hidden = hidden >> 1
        return total

    return weigh_row


def rescaler(tiling):
    """A function that brings O to the block's maxima."""
    rows, alpha_at, n_columns = tiling.block.rows, tiling.alpha // tiling.accumulator.itemsize, tiling.columns

    @device
    def rescale(o, shared):
        for n in range(rows):
            alpha = get(shared, alpha_at + n)
            for c in range(n_columns):
                o[c * rows + n] *= alpha

    return rescale
