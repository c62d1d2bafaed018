"""The stages of the tile kernel: products, rules, weights and dropout, each for one `TileTiling`.

Every factory gives a function with the tiling's sizes as constants. A thread's registers hold s[r * keys + c], the
scores of its row r and key c, and o[n * rows + r], the output of its row r and column n; a tile's weights are in shared
memory from `p_at` on, and an operand of the scores is there before them.
"""

from math import inf

from numba import types

from .. import dropout, geometry, recurrence
from .ir.memory import get, local_array, put, take
from .ir.products import score_step, value_step
from .loading import key_address, value_address
from .primitives import device, lane, larger, scalar
from .rules import (
    hidden_unless,
    in_order,
    operand_of,
    operand_rules,
    random_words,
    soft_cap,
    weight_dropout,
    with_alibi,
)
from .threads import barrier, barrier_or
from .tile_loading import Part, tile_loader
from .tiling import in_turn

int32, int64 = types.int32, types.int64


# -- score -------------------------------------------------------------------------------------------------------------


def key_product(tiling, form):
    """A function for S[row, key] = sum_t Q[row, t] K[key, t], K a piece of the dimensions after the other."""
    rows, keys, threads_y, threads_x = tiling.thread_tile
    real, vector, n_scores = tiling.accumulator.real, tiling.accumulator.vector, rows * keys
    kv_at, dim, piece, padded = tiling.kv_at, tiling.dim, tiling.piece, tiling.padded
    whole = dim == padded
    sizes = tiling.block_k, piece, tiling.k_stride, tiling.threads
    load_keys = tile_loader(tiling.accumulator, form, *sizes, key_address)
    multiply = score_step(rows, keys, threads_y * tiling.q_stride, threads_x * tiling.k_stride)

    @device
    def multiply_keys(p, s, shared, head, source, tile, block, t):
        for n in range(n_scores):
            s[n] = real(0.0)
        for d in range(0, padded, piece):
            if d > 0:
                barrier()
            part = Part(block.j0, block.first, block.stop, d, piece if whole else min(piece, dim - d))
            load_keys(shared, kv_at, p, head, source, part, real(1.0), t)
            barrier()
            for e in range(0, piece, vector):
                multiply(s, shared, tile.q_row + d + e, tile.k_row + e)

    return multiply_keys


def tile_rules(tiling, load_operand):
    """A function of (True, p, s, shared, tile, block, t) for a block's scores: whether the operands leave any key.

    Each stage goes through all scores of the thread, as barriers stand between the operands.
    """
    return in_order(
        softcap_stage(tiling), alibi_stage(tiling), operand_stage(tiling, load_operand), position_stage(tiling)
    )


def softcap_stage(tiling):
    n_scores, softcapped = tiling.thread_tile.rows * tiling.thread_tile.keys, soft_cap(tiling.accumulator.real)

    @device
    def softcap(kept, p, s, shared, tile, block, t):
        if p.softcap != 0.0:
            for n in range(n_scores):
                s[n] = softcapped(p, s[n])
        return kept

    return softcap


def alibi_stage(tiling):
    (rows, keys, threads_y, threads_x), real = tiling.thread_tile, tiling.accumulator.real

    @device
    def alibi(kept, p, s, shared, tile, block, t):
        if p.slopes != 0:
            for r in range(rows):
                # counted from the thread's first key
                row = real(tile.position + tile.ty - block.j0 - tile.tx + r * threads_y)
                for c in range(keys):
                    s[r * keys + c] = with_alibi(s[r * keys + c], tile.slope, row, real(c * threads_x))
        return kept

    return alibi


def operand_stage(tiling, load_operand):
    (rows, keys, threads_y, threads_x), p_stride = tiling.thread_tile, tiling.p_stride
    with_operand, _ = operand_rules(tiling.accumulator)

    @device
    def operands(kept, p, s, shared, tile, block, t):
        """The first one is loaded already."""
        for n in range((p.bias != 0) + (p.mask != 0)):
            _, _, _, code = operand_of(p, n, tile.bias, tile.mask)
            if n > 0:
                barrier()
                if not load_operand(p, shared, n, tile, block, t):
                    return False
            for r in range(rows):
                for c in range(keys):
                    x = get(shared, tile.p_element + r * threads_y * p_stride + c * threads_x)
                    s[r * keys + c] = with_operand(s[r * keys + c], x, code)
        return kept

    return operands


def position_stage(tiling):
    rows, keys, threads_y, threads_x = tiling.thread_tile

    @device
    def position(kept, p, s, shared, tile, block, t):
        if block.partly:
            at = tile.position + tile.ty - block.j0 - tile.tx
            for r in range(rows):
                low, high = geometry.row_bounds(at + r * threads_y, p.left, p.right)
                low = int32(max(low, block.first - tile.tx))
                high = int32(max(min(high, block.stop - 1 - tile.tx), -threads_x))
                for c in range(keys):
                    seen = geometry.between(int32(c * threads_x), low, high)
                    s[r * keys + c] = hidden_unless(s[r * keys + c], seen)
        return kept

    return position


# -- recur -------------------------------------------------------------------------------------------------------------


def weigher(tiling):
    """A function that turns scores into weights in shared memory, and brings m, l and O to the block's maxima."""
    (rows, keys, threads_y, threads_x), p_stride = tiling.thread_tile, tiling.p_stride
    real, vector = tiling.accumulator.real, tiling.accumulator.vector
    n_columns = tiling.parts * tiling.vectors * vector

    @device
    def weigh(s, o, m, l, shared, tile):
        top = local_array(vector, real)
        for r in range(rows):
            largest = s[r * keys]
            for c in range(1, keys):
                largest = larger(largest, s[r * keys + c])
            put(shared, tile.partial + r * threads_y * threads_x + tile.tx, largest)
        barrier()  # K is no longer needed, nor is an operand
        for r in range(rows):
            largest = real(-inf)
            for n in range(0, threads_x, vector):
                take(top, 0, shared, tile.partial + r * threads_y * threads_x + n)
                for e in range(vector):
                    largest = larger(largest, top[e])
            m_new, ref, alpha = recurrence.advance(lane(m[r]), lane(largest))
            m[r] = scalar(m_new)
            total = real(0.0)
            for c in range(keys):
                w = scalar(recurrence.weight(lane(s[r * keys + c]), ref))
                total += w
                put(shared, tile.p_element + r * threads_y * p_stride + c * threads_x, w)
            l[r] = scalar(recurrence.absorb(lane(l[r]), alpha, lane(total)))
            for n in range(n_columns):
                o[n * rows + r] *= scalar(alpha)

    return weigh


def dropout_stage(tiling):
    """A function for dropout of a tile's weights."""
    block_k, p_at, p_stride, threads = tiling.block_k, tiling.p_at, tiling.p_stride, tiling.threads
    groups = block_k // 4 + 1  # of four keys that share a counter, where a block doesn't start at a multiple of four
    all_groups, (with_word, _) = tiling.block_q * groups, weight_dropout(tiling.accumulator.real)

    @device
    def drop_weights(p, shared, head, first_row, j0, t):
        first_key = p.key_index + j0
        for n in range(t, all_groups, threads):
            row, group = n // groups, (first_key >> 2) + n % groups
            word_0, word_1, word_2, word_3 = random_words(p, head, first_row + row, group)
            for e in range(4):
                j = group * 4 + e - first_key
                if j >= 0 and j < block_k:
                    at = p_at + row * p_stride + j
                    word = dropout.word_of_key(word_0, word_1, word_2, word_3, e)
                    put(shared, at, with_word(p, get(shared, at), word))

    return drop_weights


def value_product(tiling, form):
    """A function for O += P V, a part of the columns after the other; `form` is V's usual format."""
    mark_hidden = hidden_marker(tiling)
    return in_turn([value_part(tiling, form, n, mark_hidden) for n in range(tiling.parts)])


def value_part(tiling, form, n, mark_hidden):
    rows, _, threads_y, threads_x = tiling.thread_tile
    real, vector = tiling.accumulator.real, tiling.accumulator.vector
    block_k, vectors, columns, kv_at = tiling.block_k, tiling.vectors, tiling.columns, tiling.kv_at
    strides = threads_y * tiling.p_stride, columns, threads_x * vector
    sizes = block_k, columns, columns, tiling.threads
    load_values = tile_loader(tiling.accumulator, form, *sizes, value_address)
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
    def add_part(p, o, shared, head, source, tile, block, t):
        if n > 0:
            barrier()
        part = Part(block.j0, block.first, block.stop, begin, left)
        finite = load_values(shared, kv_at, p, head, source, part, real(1.0), t)
        if barrier_or(int32(not finite)) and (block.partly or p.bias != 0 or p.mask != 0):
            mark_hidden(p, shared, tile, block, t)
            barrier()
            add_seen_values(o, shared, tile.p_row, tile.v_column)
        else:
            add_values(o, shared, tile.p_row, tile.v_column)

    return add_part


def hidden_marker(tiling):
    """A function that makes the weights of hidden keys, which are 0, -0.0. Rare: where V isn't finite."""
    real, read, (_, hides) = tiling.accumulator.real, tiling.accumulator.read, operand_rules(tiling.accumulator)
    block_k, p_at, p_stride, threads = tiling.block_k, tiling.p_at, tiling.p_stride, tiling.threads
    elements = tiling.block_q * block_k

    @device
    def mark_hidden(p, shared, tile, block, t):
        for n in range(t, elements, threads):
            row, j = n // block_k, n % block_k
            low, high = geometry.row_bounds(tile.position + row - block.j0, p.left, p.right)
            seen = geometry.between(j, max(block.first, low), min(block.stop - 1, high))
            for i in range((p.bias != 0) + (p.mask != 0)):
                address, row_stride, column_stride, code = operand_of(p, i, tile.bias, tile.mask)
                if row < tile.rows and j >= block.first and j < block.stop:
                    x = read(address + row * row_stride + (block.j0 + j) * column_stride, code)
                    seen = seen and not hides(x, code)
            if not seen:
                put(shared, p_at + row * p_stride + j, real(-0.0))

    return mark_hidden
