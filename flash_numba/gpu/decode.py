"""The attention forward on a GPU for few queries: rows that share a key head, against a share of its keys.

The twin of `cpu/decode.py`. With few query rows the time goes into reading K and V, so a thread block takes up to 8
rows of all query heads that share a key head, and reads the keys of its split once for all of them: 16 bytes a copy,
a tile of K or of V always under way while the other is worked on. The keys of a row are split among thread blocks at
fixed multiples; each leaves a state of the recurrence, and whoever finishes last merges them in the order of their keys
(Flash-Decoding, Dao et al. 2023). A tile's keys are as many as the block's threads:

    S[row, key]  = sum_t Q[row, t] * K[key, t]        a thread has a key
    weights, m, l                                     `threads / rows` threads have a row
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]
                                                      a thread has 16 bytes of columns, and every so many keys
"""

from math import inf

import numpy as np
from numba import cuda, types

from .. import geometry, recurrence, scores
from . import SIMULATED
from .compile import Kernel
from .copies import wait_for_all_but_last_copies, wait_for_copies
from .decode_stages import (
    Cut,
    Shape,
    columns_of,
    cut,
    drop,
    ending,
    gatherer,
    head_and_query,
    key_copier,
    key_product,
    row_sum,
    term_stage,
    value_copier,
    value_products,
)
from .ir.memory import atomic_add, get, local_array, put, store_int64, take
from .operands import of_head, operands, quotient
from .primitives import lane, larger, scalar
from .threads import SHARED_ALIGNMENT, barrier, block_index, publish, thread_index
from .tiles import BYTES
from .tiling import accumulator_of, shared_limit, up_to

int32, int64 = types.int32, types.int64

FEW_QUERIES = 16  # as many as `cpu/plan.py` has
ROWS = 2 if SIMULATED else 8  # at most, of a thread block
THREADS = (8,) if SIMULATED else (128, 64, 32)  # which cost the simulator most
SPLIT_KEYS, SPLITS = 16 if SIMULATED else 256, 64  # the least keys of a split, and about the most splits
BLOCKS = 3  # on a multiprocessor, where they have room: one computes while others wait for memory


def build(cut):
    """The kernel for one cut."""
    accumulator, (rows, threads) = cut.accumulator, cut.shape
    real, itemsize, vector = accumulator.real, accumulator.itemsize, accumulator.vector
    read, highest = accumulator.read, accumulator.highest
    dim, value_dim, state_bytes = cut.dim, cut.value_dim, cut.state_bytes
    across, key_groups, of_row, s_stride = cut.across, cut.key_groups, threads // rows, cut.score_stride
    q_at, s_at, partial_at = cut.q // itemsize, cut.scores // itemsize, cut.partial // itemsize
    alpha_at, maximum_at, total_at = cut.alpha // itemsize, cut.maximum // itemsize, cut.total // itemsize
    sums_at = cut.v // itemsize
    n_columns = columns_of(cut)
    n_outputs = n_columns * rows
    copy_keys, copy_values, multiply_key = key_copier(cut), value_copier(cut), key_product(cut)
    add_values, add_seen_values = value_products(cut)
    with_terms, sum_of_row, gather_rows = term_stage(cut), row_sum(cut), gatherer(cut)
    store_state, merge_splits, write_element = ending(cut)

    def attend(p):
        raw = cuda.shared.array(0, int32, alignment=SHARED_ALIGNMENT)
        shared = cuda.shared.array(0, real, alignment=SHARED_ALIGNMENT)
        t = int64(thread_index())
        group = min(p.k_group, p.v_group)
        all_rows = group * p.queries
        row_blocks = (all_rows + rows - 1) // rows
        # blocks of rows side by side, as they read the same keys; then splits, then key heads
        item = int64(block_index())
        of_keys = quotient(item, row_blocks)
        g = quotient(of_keys, p.splits)
        row_block, split = item - of_keys * row_blocks, of_keys - g * p.splits
        key_heads = quotient(p.heads, group)
        b = quotient(g, key_heads)
        h0 = (g - b * key_heads) * group
        q_from, k_from, v_from, out_at, lse_at, bias_at, mask_at, queries, keys, shift, row_index = operands(p, b, h0)
        first_row = row_block * rows
        rows_here = min(rows, all_rows - first_row)

        # the row that this thread weighs scores of, and the thread's number among those of the row
        r, u = t // of_row, t % of_row
        h, i = head_and_query(p, first_row + r)
        mine = r < rows_here and i < queries
        slope = real(0.0)
        if mine:
            slope = real(of_head(p.slopes, p.slope_batch, p.slope_head, b, h0 + h, 0.0))
        scale = p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, quotient(h0, p.k_group), 1.0)
        scale = real(max(-highest, min(highest, scale)))
        cap, inverse_cap = real(0.0), real(0.0)
        if p.softcap != 0.0:
            cap, inverse_cap = real(p.softcap), real(1.0 / p.softcap)
        m, l = real(-inf), real(0.0)
        s, o, line = local_array(rows, real), local_array(n_outputs, real), local_array(vector, real)
        for n in range(n_outputs):
            o[n] = real(0.0)
        column, key_group = t % across, t // across

        start, stop, all0, all1 = geometry.visible_keys(shift, shift + queries - 1, p.left, p.right, 0, keys)
        start, stop = max(start, split * p.split_keys), min(stop, (split + 1) * p.split_keys)
        if queries <= 0 or start >= stop:
            start = stop = 0
        # from a fixed multiple, so that the bits of a row don't depend on the rows that share its block
        begin = start // threads * threads
        count = max(0, min(threads, stop - begin))
        copy_keys(raw, k_from + begin * p.k_row, p.k_row, count, t)
        copy_values(raw, v_from + begin * p.v_row, p.v_row, count, t)
        for place in range(t, rows * dim, threads):
            to, x = first_row + place // dim, real(0.0)
            if to < all_rows:
                q_head, query = head_and_query(p, to)
                at = q_from + q_head * p.q_head + query * p.q_row + place % dim * p.q_column
                x = read(at, p.q_format) * scale
            put(shared, q_at + place, x)

        position = shift + i
        for j0 in range(begin, stop, threads):
            after = j0 + threads
            count = max(0, min(threads, stop - after))
            wait_for_all_but_last_copies()
            barrier()  # K is there, and Q
            multiply_key(s, shared, raw, t)
            for n in range(rows):
                put(shared, s_at + n * s_stride + t, s[n])
            barrier()
            copy_keys(raw, k_from + after * p.k_row, p.k_row, count, t)

            top, hidden, bit = real(-inf), int64(0), int64(1)
            low, high = max(position - p.left, start), min(position + p.right, stop - 1)
            for n in range(u, threads, of_row):
                j, at = j0 + n, s_at + r * s_stride + n
                x, seen = get(shared, at), mine and geometry.between(j0 + n, low, high)
                if p.softcap != 0.0:
                    x = scalar(scores.softcapped(lane(x), lane(cap), lane(inverse_cap)))
                if p.slopes != 0:
                    x = scalar(scores.with_alibi(lane(x), lane(slope), lane(real(position - j0)), lane(real(n))))
                x, seen = with_terms(x, seen, p, h, i, j, bias_at, mask_at)
                x = scalar(scores.hide(lane(x), seen))
                top = larger(top, x)
                put(shared, at, x)
                hidden = hidden if seen else hidden | bit
                bit = bit << 1
            put(shared, partial_at + t, top)
            barrier()
            for n in range(0, of_row, vector):
                take(line, 0, shared, partial_at + r * of_row + n)
                for e in range(vector):
                    top = larger(top, line[e])
            m_new, ref, alpha = recurrence.advance(lane(m), lane(top))
            m, total = scalar(m_new), real(0.0)
            for n in range(u, threads, of_row):
                at = s_at + r * s_stride + n
                w = scalar(recurrence.weight(lane(get(shared, at)), ref))
                total += w
                if p.keep_factor != 0.0:
                    key = p.key_index + j0 + n
                    w = drop(w, row_index + i, key, h0 + h, b, p.round_keys, p.drop_below, real(p.keep_factor))
                put(shared, at, real(-0.0) if hidden & 1 else w)
                hidden = hidden >> 1
            l = scalar(alpha) * l + total
            if u == 0:
                put(shared, alpha_at + r, scalar(alpha))
            wait_for_all_but_last_copies()
            barrier()  # V is there, and the weights
            for n in range(rows):
                factor = get(shared, alpha_at + n)
                for c in range(n_columns):
                    o[c * rows + n] *= factor
            if key_group < key_groups:
                if p.bias != 0 or p.mask != 0 or j0 < all0 or after > all1 or queries < p.queries:
                    add_seen_values(o, shared, raw, column, key_group)
                else:
                    add_values(o, shared, raw, column, key_group)
            barrier()
            copy_values(raw, v_from + after * p.v_row, p.v_row, count, t)

        wait_for_copies()
        l = sum_of_row(shared, l, t)
        if u == 0:
            put(shared, maximum_at + r, m)
            put(shared, total_at + r, l)
        gather_rows(o, shared, column, key_group, t)
        barrier()

        # -- write what has come of it, or the state of this split's keys
        if p.splits == 1:
            for place in range(t, rows_here * value_dim, threads):
                n, c = place // value_dim, place % value_dim
                h, i = head_and_query(p, first_row + n)
                m, l = get(shared, maximum_at + n), get(shared, total_at + n)
                write_element(p, h0, b, h, i, out_at, lse_at, c, get(shared, sums_at + place), m, l)
            return
        first_state = p.workspace + (g * row_blocks + row_block) * p.splits * rows * state_bytes
        own_state = first_state + split * rows * state_bytes
        for place in range(t, rows_here * value_dim, threads):
            n, c = place // value_dim, place % value_dim
            m, l = get(shared, maximum_at + n), get(shared, total_at + n)
            store_state(own_state + n * state_bytes, c, get(shared, sums_at + place), m, l)
        publish()
        barrier()
        finished = p.finished + (g * row_blocks + row_block) * 8
        if t == 0:
            put(shared, partial_at, real(atomic_add(finished, 1)))
        barrier()
        if get(shared, partial_at) != real(p.splits - 1):
            return
        publish()
        if t == 0:
            store_int64(finished, 0)  # as the next launch expects it
        for place in range(t, rows_here * value_dim, threads):
            n, c = place // value_dim, place % value_dim
            h, i = head_and_query(p, first_row + n)
            x, m, l = merge_splits(first_state + n * state_bytes, p.splits, rows * state_bytes, c)
            write_element(p, h0, b, h, i, out_at, lse_at, c, x, m, l)

    return attend


# -- which kernel for which call ---------------------------------------------------------------------------------------


def packed_rows(problem: np.ndarray) -> int:
    """Query rows that share a key head and a value head."""
    return int(min(problem["k_group"], problem["v_group"]) * problem["queries"])


def row_blocks(problem: np.ndarray, rows: int) -> int:
    """Thread blocks of all heads and batch elements for one split of the keys."""
    groups = problem["batch"] * (problem["heads"] // min(problem["k_group"], problem["v_group"]))
    return int(groups * -(-packed_rows(problem) // rows))


def splits(problem: np.ndarray) -> tuple[int, int]:
    """Into how many splits the keys are cut, and the keys of each: a matter of their number alone."""
    keys = max(1, int(problem["keys"]))
    split_keys = up_to(SPLIT_KEYS, -(-keys // SPLITS))
    return -(-keys // split_keys), split_keys


def rows_of_block(problem: np.ndarray) -> int:
    """Query rows of a thread block: a power of two, as many as there are or `ROWS`."""
    return min(ROWS, 1 << (packed_rows(problem) - 1).bit_length())


def choose_shape(problem: np.ndarray, cc: tuple[int, int]) -> Shape | None:
    """As many threads as leave room for three thread blocks, or at least for one; None where none fits."""
    shapes = [Shape(rows_of_block(problem), threads) for threads in THREADS]
    roomy = [shape for shape in shapes if shared_bytes(problem, shape) <= shared_limit(cc) // BLOCKS]
    possible = [shape for shape in shapes if shared_bytes(problem, shape) <= shared_limit(cc)]
    return next(iter((*roomy, *possible[-1:])), None)


def shared_bytes(problem: np.ndarray, shape: Shape) -> int:
    return cut_of(problem, shape).end


def cut_of(problem: np.ndarray, shape: Shape) -> Cut:
    dims = int(problem["dim"]), int(problem["value_dim"])
    formats = int(problem["k_format"]), int(problem["v_format"])
    return cut(accumulator_of(problem), shape, *dims, formats)


def why_not(problem: np.ndarray, cc: tuple[int, int]) -> str | None:
    """Why this kernel doesn't take a call, in words; None if it does."""
    if problem["queries"] > FEW_QUERIES:
        return f"more than {FEW_QUERIES} queries"
    if problem["work_tiles"] or problem["state"] or not problem["out"]:
        return "packed sequences and streams have tiles of rows"
    if cc < (8, 0) and not SIMULATED:
        return "copies that run aside need compute capability 8.0"
    if packed_rows(problem) == 0 or problem["keys"] == 0:
        return "nothing to read"
    for name, columns in (("k", "dim"), ("v", "value_dim")):
        size = BYTES.get(int(problem[f"{name}_format"]))
        if size is None or (size == 8) != (accumulator_of(problem).itemsize == 8):
            return f"{name} is of another format than q, or in foreign byte order"
        places = (problem[name], *(problem[f"{name}_{axis}"] for axis in ("batch", "head", "row")))
        aligned = all(int(place) % 16 == 0 for place in places)
        if problem[f"{name}_column"] != size or int(problem[columns]) * size % 16 or not aligned:
            return f"rows of {name} aren't contiguous and whole multiples of 16 bytes at multiples of 16 bytes"
    if choose_shape(problem, cc) is None:
        return "head dimensions too large for the shared memory"
    return None


def workspace_bytes(record: np.ndarray) -> int:
    """Bytes of all splits' states, for an `ARGUMENTS` record; 0 where the keys aren't split."""
    if record["splits"] == 1:
        return 0
    rows = rows_of_block(record)
    states = row_blocks(record, rows) * int(record["splits"]) * rows
    return states * cut_of(record, Shape(rows, THREADS[0])).state_bytes


def counters(record: np.ndarray) -> int:
    """How many int64 counters there are, 0 before a launch and after it."""
    return row_blocks(record, rows_of_block(record)) if record["splits"] > 1 else 0


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a call: its floats, head dimensions, formats and rows are compiled in, all else is read."""
    shape = choose_shape(problem, cc)
    assert shape is not None
    of = cut_of(problem, shape)

    def grid(record: np.ndarray) -> tuple[int, int, int]:
        """One thread block for each split of the keys of each block of rows."""
        return row_blocks(record, shape.rows) * int(record["splits"]), 1, 1

    name = "-".join(map(str, ("decode", of.accumulator.real, of.dim, of.value_dim, *of.formats, *shape)))
    blocks = min(BLOCKS, shared_limit(cc) // (of.end + 1024)) if shape.threads == 128 else 1
    return Kernel(name, build(of), shape.threads, of.end, grid, shape.rows, blocks)
