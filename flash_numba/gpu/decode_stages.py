"""The stages of the decode kernel: copies, products, rules, sums and merging, each for one `Cut`.

Every factory gives functions with the cut's sizes as constants. K and V lie in shared memory as they come, and each of
their elements is converted by the one thread that uses it. A thread's registers hold s[row], the scores of its key, and
o[n * rows + row], the output of its column n over its own share of the keys.
"""

from math import inf
from typing import NamedTuple

from numba import types

from .. import dropout, ops, recurrence, scores
from ..dtypes import BOOL
from .copies import commit_copies, copy_words
from .ir.memory import get, load_float32, load_float64, local_array, put, store_float32, store_float64, take
from .ir.products import dot_step, outer_step
from .operands import of_head, quotient
from .primitives import device, lane, scalar
from .threads import barrier
from .tiles import BYTES, vector_reader
from .tiling import Accumulator, in_turn, up_to

int32 = types.int32

LINE = 128  # bytes of a cache line: states of two thread blocks share none


class Shape(NamedTuple):
    """Query rows of a thread block, and its threads, which are the keys of a tile."""

    rows: int
    threads: int


class Cut(NamedTuple):
    """What follows from a shape, the head dimensions and the formats of k and v."""

    accumulator: Accumulator
    shape: Shape
    dim: int
    value_dim: int
    formats: tuple[int, int]
    # threads stand side by side along V's chunks of 16 bytes, `chunks` of them a thread, in groups that share the keys
    across: int
    chunks: int
    key_groups: int
    # in bytes: K and V from row to row, and where the parts of shared memory start
    k_stride: int
    v_stride: int
    k: int  # in the end: parts of a row of O, to be summed
    v: int  # in the end: O
    q: int
    scores: int
    partial: int  # a number of each thread
    alpha: int  # and of each row
    maximum: int
    total: int
    end: int

    @property
    def score_stride(self) -> int:
        """Scores from row to row: the threads of a row read neighbours, and those of the next row other banks."""
        rows, threads = self.shape
        return threads + (threads // rows if threads // rows < 32 else 0)

    @property
    def state_bytes(self) -> int:
        """Of a row's state in the workspace: O, m and l, in whole cache lines."""
        return up_to(LINE, (self.value_dim + 2) * self.accumulator.itemsize)


def cut(accumulator: Accumulator, shape: Shape, dim: int, value_dim: int, formats: tuple[int, int]) -> Cut:
    size, (rows, threads) = accumulator.itemsize, shape
    # reads of 16 bytes by threads one row apart meet no bank twice where the stride is an odd multiple of 16
    k_stride = dim * BYTES[formats[0]]
    k_stride += 16 * (k_stride // 16 % 2 == 0)
    v_stride = value_dim * BYTES[formats[1]]
    v_chunks = v_stride // 16
    across = min(threads, v_chunks)
    key_groups = min(threads // across, threads // accumulator.vector)
    parts = (
        max(threads * k_stride, key_groups * value_dim * size),
        max(threads * v_stride, rows * value_dim * size),
        rows * dim * size,
        rows * (threads + threads // rows) * size,
        threads * size,
        rows * size,
        rows * size,
        rows * size,
    )
    places = [0]
    for length in parts:
        places.append(places[-1] + up_to(16, length))
    return Cut(
        accumulator, shape, dim, value_dim, formats, across, -(-v_chunks // across), key_groups, k_stride, v_stride,
        *places,
    )  # fmt: skip


def columns_of(cut: Cut) -> int:
    """Columns of O that a thread holds."""
    return cut.chunks * 16 // BYTES[cut.formats[1]]


@device
def head_and_query(p, row):
    """A packed row's head within its group, and its query."""
    h = quotient(row, p.queries)
    return h, row - h * p.queries


# -- load --------------------------------------------------------------------------------------------------------------


def copier(base, stride, chunks, threads):
    """A function that starts the copy of a tile's rows to shared memory; those beyond `count` become 0."""
    base, stride = base // 4, stride // 4
    # threads stand in rows of `across` chunks of 16 bytes, `at_once` rows a step
    across = min(chunks, threads)
    at_once = threads // across
    even, one_each = threads % at_once == 0, across == chunks

    @device
    def copy(raw, address, row_stride, count, t):
        row, first_chunk = t // across, t % across
        left = int32(count - row)
        if row < at_once:
            for chunk in range(first_chunk, first_chunk + 1 if one_each else chunks, across):
                to, source = base + row * stride + chunk * 4, address + row * row_stride + chunk * 16
                for n in range(0, threads, at_once):
                    if even or row + n < threads:
                        copy_words(raw, to + n * stride, source, 16 if int32(n) < left else 0)
                    source += at_once * row_stride
        commit_copies()

    return copy


def key_copier(cut):
    return copier(cut.k, cut.k_stride, cut.dim * BYTES[cut.formats[0]] // 16, cut.shape.threads)


def value_copier(cut):
    return copier(cut.v, cut.v_stride, cut.v_stride // 16, cut.shape.threads)


# -- products ----------------------------------------------------------------------------------------------------------


def key_product(cut):
    real, vector = cut.accumulator.real, cut.accumulator.vector
    rows, k_at, k_stride, q_at = cut.shape.rows, cut.k // 4, cut.k_stride // 4, cut.q // cut.accumulator.itemsize
    size, _, convert_k = vector_reader(cut.accumulator, cut.formats[0])
    k_chunks, k_vectors, k_words = cut.dim * BYTES[cut.formats[0]] // 16, 16 // size, size // 4
    multiply = dot_step(rows, cut.dim)

    @device
    def multiply_key(s, shared, raw, t):
        """s[row] = sum_t Q[row, t] K[key, t] for this thread's key."""
        words, values = local_array(4, int32), local_array(vector, real)
        for r in range(rows):
            s[r] = real(0.0)
        for chunk in range(k_chunks):
            take(words, 0, raw, k_at + t * k_stride + chunk * 4)
            for n in range(k_vectors):
                convert_k(values, words, n * k_words)
                multiply(s, shared, q_at + (chunk * k_vectors + n) * vector, values)

    return multiply_key


def value_products(cut):
    """`(add_values, add_seen_values)`: the latter leaves out what V holds where a row doesn't see the key."""
    real, vector = cut.accumulator.real, cut.accumulator.vector
    (rows, threads), across, chunks, key_groups = cut.shape, cut.across, cut.chunks, cut.key_groups
    v_at, v_stride, v_chunks = cut.v // 4, cut.v_stride // 4, cut.v_stride // 16
    s_at, s_stride = cut.scores // cut.accumulator.itemsize, cut.score_stride
    v_size, _, convert_v = vector_reader(cut.accumulator, cut.formats[1])
    v_vectors, n_weights = 16 // v_size, rows * vector

    def absorb_vector(key, chunk, n, seen):
        """O += P V for one of the keys that are read together and for one vector of the columns."""
        add = outer_step(rows, vector, (chunk * v_vectors + n) * vector * rows, key, seen)
        words_before = n * v_size // 4

        @device
        def absorb(o, p, words, values):
            convert_v(values, words, words_before)
            add(o, p, values)

        return absorb

    def absorb_chunk(key, chunk, seen):
        absorb_vectors = in_turn([absorb_vector(key, chunk, n, seen) for n in range(v_vectors)])
        short = (chunk + 1) * across > v_chunks

        @device
        def absorb(o, p, words, values, raw, j, column):
            if not short or chunk * across + column < v_chunks:
                take(words, 0, raw, v_at + (j + key) * v_stride + (chunk * across + column) * 4)
                absorb_vectors(o, p, words, values)

        return absorb

    def absorber(seen):
        """A function for O[row, c] += sum_j P[row, j] V[j, c] over this thread's keys and columns."""
        keys_and_chunks = [(key, chunk) for key in range(vector) for chunk in range(chunks)]
        absorb_keys = in_turn([absorb_chunk(key, chunk, seen) for key, chunk in keys_and_chunks])

        @device
        def absorb(o, shared, raw, column, group):
            words, values, p = local_array(4, int32), local_array(vector, real), local_array(n_weights, real)
            for j in range(group * vector, threads, key_groups * vector):
                for r in range(rows):
                    take(p, r * vector, shared, s_at + r * s_stride + j)
                absorb_keys(o, p, words, values, raw, j, column)

        return absorb

    return absorber(False), absorber(True)


# -- rules -------------------------------------------------------------------------------------------------------------


@device
def drop(w, row, key, h, b, round_keys, threshold, factor):
    """Dropout of one weight: 0, or times 1 / (1 - p)."""
    words = dropout.philox(lane(int32(key >> 2)), lane(int32(row)), lane(int32(h)), lane(int32(b)), round_keys)
    n = key & 3
    word = words[0] if n == 0 else words[1] if n == 1 else words[2] if n == 2 else words[3]
    return scalar(ops.select(dropout.kept(word, int32(threshold)), lane(w * factor), 0.0))


def term_stage(cut):
    real, read, highest = cut.accumulator.real, cut.accumulator.read, cut.accumulator.highest

    @device
    def with_terms(x, seen, p, h, i, j, bias_at, mask_at):
        """Both terms on the score of query i of head h: `(score, whether the key is seen)`."""
        for n in range((p.bias != 0) + (p.mask != 0)):
            code, at = p.mask_format, mask_at + h * p.mask_head + i * p.mask_row + j * p.mask_column
            if n == 0 and p.bias != 0:
                code, at = p.bias_format, bias_at + h * p.bias_head + i * p.bias_row + j * p.bias_column
            if seen:
                term = read(at, code)
                if code == BOOL:
                    seen = term != real(0.0)
                else:
                    seen = term != real(-inf)
                    x = scalar(scores.with_bias(lane(x), lane(term), real(-highest)))
        return x, seen

    return with_terms


# -- put together ------------------------------------------------------------------------------------------------------


def row_sum(cut):
    real, partial_at = cut.accumulator.real, cut.partial // cut.accumulator.itemsize
    of_row = cut.shape.threads // cut.shape.rows

    @device
    def sum_of_row(shared, x, t):
        """The sum of a number over all threads of this thread's row. All threads wait for one another here."""
        put(shared, partial_at + t, x)
        barrier()
        total = real(0.0)
        for n in range(of_row):
            total += get(shared, partial_at + t // of_row * of_row + n)
        return total

    return sum_of_row


def gatherer(cut):
    """A function that sums O over the threads that have the same columns, into shared memory."""
    real, value_dim, across, chunks = cut.accumulator.real, cut.value_dim, cut.across, cut.chunks
    (rows, threads), key_groups, sums_at = cut.shape, cut.key_groups, cut.v // cut.accumulator.itemsize
    chunk_columns = columns_of(cut) // chunks

    def row(n):
        @device
        def gather(o, shared, column, key_group, t):
            if n > 0:
                barrier()
            if key_group < key_groups:
                for chunk in range(chunks):
                    for k in range(chunk_columns):
                        c = (chunk * across + column) * chunk_columns + k
                        if c < value_dim:
                            put(shared, key_group * value_dim + c, o[(chunk * chunk_columns + k) * rows + n])
            barrier()
            for c in range(t, value_dim, threads):
                total = real(0.0)
                for k in range(key_groups):
                    total += get(shared, k * value_dim + c)
                put(shared, sums_at + n * value_dim + c, total)

        return gather

    return in_turn([row(n) for n in range(rows)])


def ending(cut):
    """`(store_state, merge_splits, write_element)`."""
    accumulator, value_dim = cut.accumulator, cut.value_dim
    real, itemsize, write, own_format = (
        accumulator.real,
        accumulator.itemsize,
        accumulator.write,
        accumulator.own_format,
    )
    load_real, store_real = (load_float32, store_float32) if itemsize == 4 else (load_float64, store_float64)

    @device
    def store_state(at, c, x, m, l):
        """Column c of a row's state at an address, and with column 0 the rest."""
        store_real(at + c * itemsize, x)
        if c == 0:
            store_real(at + value_dim * itemsize, m)
            store_real(at + (value_dim + 1) * itemsize, l)

    @device
    def merge_splits(first, n_splits, between_splits, c):
        """Column c of O, m and l of a row from the states of all splits, merged in the order of their keys."""
        x, m, l = real(0.0), lane(real(-inf)), lane(real(0.0))
        for n in range(n_splits):
            at = first + n * between_splits
            m_n, l_n = load_real(at + value_dim * itemsize), load_real(at + (value_dim + 1) * itemsize)
            m, l, mine, theirs = recurrence.merge(m, l, lane(m_n), lane(l_n))
            if m_n != real(-inf):  # else there is no output
                x = scalar(mine) * x + scalar(theirs) * load_real(at + c * itemsize)
        return x, scalar(m), scalar(l)

    @device
    def write_element(p, h0, b, h, i, out_at, lse_at, c, x, m, l):
        """Column c of a row of which all keys have been seen, and with column 0 its log-sum-exp."""
        sink = real(of_head(p.sinks, p.sink_batch, p.sink_head, b, h0 + h, -inf))
        v_scale = real(of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, quotient(h0, p.v_group), 1.0))
        row_lse, factor = recurrence.finalize(lane(m), lane(l), lane(sink))
        if c == 0:
            write(lse_at + h * p.lse_head + i * itemsize, own_format, scalar(row_lse))
        at = out_at + h * p.out_head + i * p.out_row + c * p.out_column
        write(at, p.out_format, scalar(recurrence.normalized(lane(x), lane(l), lane(scalar(factor) * v_scale))))

    return store_state, merge_splits, write_element
