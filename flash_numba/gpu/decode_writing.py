"""What the decode kernel does when all keys of a split have been seen: sums over threads, split states, output."""

from math import inf

from .. import recurrence
from .decode_stages import row_of
from .ir.memory import atomic_add, get, load_float32, load_float64, put, store_float32, store_float64, store_int64
from .primitives import device, lane, scalar
from .threads import barrier, publish
from .tiling import in_turn


def row_sum(tiling):
    real, partial_at = tiling.accumulator.real, tiling.partial // tiling.accumulator.itemsize
    of_row = tiling.block.threads // tiling.block.rows

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


def gatherer(tiling):
    """A function that sums O over the threads that have the same columns, into shared memory."""
    real, value_dim, across, chunks = tiling.accumulator.real, tiling.value_dim, tiling.across, tiling.chunks
    (rows, threads), key_groups, sums_at = tiling.block, tiling.key_groups, tiling.v // tiling.accumulator.itemsize
    chunk_columns = tiling.columns // chunks

    def row(n):
        @device
        def gather(o, shared, row, t):
            column, key_group = row.column, row.key_group
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


def finisher(tiling):
    """A function of (p, shared, block, row, o, m, l, t), after the last block of keys.

    It sums l and O over threads, and writes the rows of the row block. Where the keys are split, it leaves this split's
    state, and the thread block that is the last to do so merges all and writes.
    """
    (rows, threads), value_dim, itemsize = tiling.block, tiling.value_dim, tiling.accumulator.itemsize
    maximum_at, total_at, sums_at = tiling.maximum // itemsize, tiling.total // itemsize, tiling.v // itemsize
    state_bytes, sum_of_row, gather_rows = tiling.state_bytes, row_sum(tiling), gatherer(tiling)
    store_states, merge_splits = state_writer(tiling), split_merger(tiling)
    is_last, write_element = countdown(tiling), element_writer(tiling)

    @device
    def finish(p, shared, block, row, o, m, l, t):
        l = sum_of_row(shared, l, t)
        if row.u == 0:
            put(shared, maximum_at + row.r, m)
            put(shared, total_at + row.r, l)
        gather_rows(o, shared, row, t)
        barrier()
        states = p.workspace + (block.group * block.of_blocks + block.n) * p.splits * rows * state_bytes
        if p.splits > 1:
            store_states(shared, block, states + block.split * rows * state_bytes, t)
            if not is_last(p, shared, block, t):
                return
        for n in range(t, block.rows * value_dim, threads):
            r, c = n // value_dim, n % value_dim
            if p.splits > 1:
                x, m, l = merge_splits(states + r * state_bytes, p.splits, c)
            else:
                x, m, l = get(shared, sums_at + n), get(shared, maximum_at + r), get(shared, total_at + r)
            write_element(p, block, r, c, x, m, l)

    return finish


def countdown(tiling):
    """A function that tells whether this thread block is the last of its row block's splits to get there."""
    real, partial_at = tiling.accumulator.real, tiling.partial // tiling.accumulator.itemsize

    @device
    def is_last(p, shared, block, t):
        publish()
        barrier()
        finished = p.finished + (block.group * block.of_blocks + block.n) * 8
        if t == 0:
            put(shared, partial_at, real(atomic_add(finished, 1)))
        barrier()
        if get(shared, partial_at) != real(p.splits - 1):
            return False
        publish()
        if t == 0:
            store_int64(finished, 0)  # as the next launch expects it
        return True

    return is_last


def state_writer(tiling):
    """A function that stores a split's states at an address: O, and behind it m and l, for each row."""
    itemsize, value_dim, threads, state_bytes = (
        tiling.accumulator.itemsize, tiling.value_dim, tiling.block.threads, tiling.state_bytes,
    )  # fmt: skip
    maximum_at, total_at, sums_at = tiling.maximum // itemsize, tiling.total // itemsize, tiling.v // itemsize
    store = store_float32 if itemsize == 4 else store_float64

    @device
    def store_states(shared, block, address, t):
        for n in range(t, block.rows * value_dim, threads):
            row, c = n // value_dim, n % value_dim
            at = address + row * state_bytes
            store(at + c * itemsize, get(shared, sums_at + n))
            if c == 0:
                store(at + value_dim * itemsize, get(shared, maximum_at + row))
                store(at + (value_dim + 1) * itemsize, get(shared, total_at + row))

    return store_states


def split_merger(tiling):
    """A function for column c of O, m and l of a row from the states of all splits, in the order of their keys."""
    real, itemsize, value_dim = tiling.accumulator.real, tiling.accumulator.itemsize, tiling.value_dim
    between_splits = tiling.block.rows * tiling.state_bytes
    load = load_float32 if itemsize == 4 else load_float64

    @device
    def merge_splits(first, n_splits, c):
        x, m, l = real(0.0), lane(real(-inf)), lane(real(0.0))
        for n in range(n_splits):
            at = first + n * between_splits
            m_n, l_n = load(at + value_dim * itemsize), load(at + (value_dim + 1) * itemsize)
            m, l, mine, theirs = recurrence.merge(m, l, lane(m_n), lane(l_n))
            if m_n != real(-inf):  # else there is no output
                x = scalar(mine) * x + scalar(theirs) * load(at + c * itemsize)
        return x, scalar(m), scalar(l)

    return merge_splits


def element_writer(tiling):
    """A function for column c of a row of which all keys have been seen, and with column 0 its log-sum-exp."""
    accumulator = tiling.accumulator
    real, itemsize, write, own_format = (
        accumulator.real, accumulator.itemsize, accumulator.write, accumulator.own_format,
    )  # fmt: skip

    @device
    def write_element(p, block, row, c, x, m, l):
        head, i = row_of(p, block, row)
        row_lse, normalizer = recurrence.finalize(lane(m), lane(l), lane(real(head.sink)))
        if c == 0:
            write(head.lse + i * itemsize, own_format, scalar(row_lse))
        normalizer = lane(scalar(normalizer) * real(head.v_scale))
        at = head.out + i * p.out_row + c * p.out_column
        write(at, p.out_format, scalar(recurrence.normalized(lane(x), lane(l), normalizer)))

    return write_element
