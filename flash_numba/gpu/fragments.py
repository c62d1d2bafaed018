"""What a thread of the tensor-core kernel does with its part of a tile: copies, products, softmax, rules, dropout.

Each factory takes the kernel's `TensorTiling` and gives a function with its sizes as constants, so that loops unroll
and local arrays become registers. A warp owns `fragments` times 16 rows. A thread has two rows of each, 8 r below its
first row for r = 0, 1, ...; of eight neighbouring keys or columns it has two. The scores of row r and keys 8n and
8n + 1, counted from the thread's first key, stand at s[fragment_index(r, n)] and behind it, and the output likewise
with columns.
"""

import inspect
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32

from .. import dropout, geometry, ops, recurrence
from ..dtypes import FLOAT16
from .ir import ptx
from .primitives import device, lane, larger, scalar
from .rules import At, hidden_unless, random_words, score_rules, weight_dropout
from .tensor_tiling import PIECE
from .tiling import FLOAT32_ACCUMULATOR

ALL_LANES = 0xFFFFFFFF  # of a warp


def fragment_indexer(columns):
    """A function for where row r, column pair n stands among `columns` groups of eight columns."""

    @device
    def fragment_index(r, n):
        return (r // 2 * columns + n) * 4 + r % 2 * 2

    return fragment_index


def unrolled(count, step):
    """A function that calls `step(i, *arguments)` for i = 0 to count - 1, with each i as a constant.

    Arrays become registers only where all of their indices are constants. LLVM unrolls loops up to some length, not the
    same for every GPU.
    """
    names = ", ".join([*inspect.signature(step).parameters][1:])
    scope = {"step": step}
    exec("\n    ".join([f"def run({names}):", *(f"step({i}, {names})" for i in range(count))]), scope)
    return device(scope["run"])


# -- load --------------------------------------------------------------------------------------------------------------


def tile_copy(tiling, rows, address_of):
    """A function that starts the copy of a tile to shared memory: each thread one piece of every `step`-th row.

    Its arguments: where to, and the rows from `first` on of what `address_of(p, head, row)` finds, `count` of them.
    """
    step, pieces, pitch = tiling.copied_rows, tiling.pieces, tiling.pitch
    idle, passes = step * pieces < tiling.threads, rows // step

    @device
    def copy(shared, p, head, first, count):
        thread = uint32(ptx.thread_index())  # division of signed numbers takes more instructions
        row, piece = int32(thread // uint32(pieces)), int32(thread % uint32(pieces) * uint32(PIECE))
        if idle and row >= step:
            return
        shared, left = int32(shared + row * pitch + piece), int32(count - row)
        for i in range(passes):
            size = PIECE if i * step < left else 0  # rows beyond the last one become 0
            address = address_of(p, head, first + row + i * step) + piece
            ptx.copy_async(int32(shared + i * step * pitch), address, int32(size))

    return copy


# -- score, recur ------------------------------------------------------------------------------------------------------


class RowState(NamedTuple):
    """Arrays with a number for each of the thread's rows; l is of this thread's keys only."""

    m: Any
    l: Any
    ref: Any  # of the block in work
    alpha: Any


def key_product(tiling):
    """S = Q K^T"""
    mma = ptx.mma_float16 if tiling.code == FLOAT16 else ptx.mma_bfloat16
    depth, columns, fragments, pitch = tiling.dim // 16, tiling.keys // 16, tiling.fragments, tiling.pitch
    a_size, s_size, of_fragment = fragments * 4, fragments * tiling.keys // 2, tiling.keys // 2

    @device
    def multiply_keys(s, q_at, k_at):
        a = cuda.local.array(a_size, int32)
        for i in range(s_size):
            s[i] = float32(0)
        for d in range(depth):
            for f in range(fragments):
                a[f * 4], a[f * 4 + 1], a[f * 4 + 2], a[f * 4 + 3] = ptx.load_matrices(q_at + f * 16 * pitch + d * 32)
            for n in range(columns):
                b0, b1, b2, b3 = ptx.load_matrices(k_at + n * 16 * pitch + d * 32)
                for f in range(fragments):
                    a0, a1, a2, a3 = a[f * 4], a[f * 4 + 1], a[f * 4 + 2], a[f * 4 + 3]
                    i = f * of_fragment + n * 8
                    c = mma(a0, a1, a2, a3, b0, b1, s[i], s[i + 1], s[i + 2], s[i + 3])
                    s[i], s[i + 1], s[i + 2], s[i + 3] = c
                    c = mma(a0, a1, a2, a3, b2, b3, s[i + 4], s[i + 5], s[i + 6], s[i + 7])
                    s[i + 4], s[i + 5], s[i + 6], s[i + 7] = c

    return multiply_keys


def value_product(tiling, has_dropout):
    """Weights P, l += sum of P, O += P V: a function of (o, s, state, scale, v_at, p, head, part).

    Weights are made just before they are needed, 16 keys at a time, so that few are alive at once. They stand where a
    left operand has to, so they go from registers to registers.
    """
    mma = ptx.mma_float16 if tiling.code == FLOAT16 else ptx.mma_bfloat16
    pack = ptx.pack_float16 if tiling.code == FLOAT16 else ptx.pack_bfloat16
    depth, columns, fragments, pitch = tiling.keys // 16, tiling.dim // 16, tiling.fragments, tiling.pitch
    a_size, of_fragment, pairs = fragments * 4, tiling.dim // 2, tiling.keys // 8
    score, drop_weights = fragment_indexer(pairs), dropout_of_fragments(tiling)

    @device
    def add_values_of_16(d, o, s, state, scale, v_at, p, head, part):
        a = cuda.local.array(a_size, int32)
        for r in range(2 * fragments):
            for n in range(2 * d, 2 * d + 2):
                i = score(r, n)
                w0 = recurrence.weight(lane(s[i]) * lane(scale), lane(state.ref[r]))
                w1 = recurrence.weight(lane(s[i + 1]) * lane(scale), lane(state.ref[r]))
                # l is brought to the block's maximum with the block's first weights
                alpha = state.alpha[r] if d == 0 and n == 0 else float32(1)
                state.l[r] = scalar(recurrence.absorb(lane(state.l[r]), lane(alpha), w0 + w1))
                s[i], s[i + 1] = scalar(w0), scalar(w1)
        for f in range(fragments):
            for n in range(2):
                g = f * pairs + 2 * d + n
                if has_dropout:
                    drop_weights(g, p, s, head, part)
                a[f * 4 + n * 2] = pack(s[g * 4], s[g * 4 + 1])
                a[f * 4 + n * 2 + 1] = pack(s[g * 4 + 2], s[g * 4 + 3])
        for n in range(columns):
            b0, b1, b2, b3 = ptx.load_transposed_matrices(v_at + d * 16 * pitch + n * 32)
            for f in range(fragments):
                a0, a1, a2, a3 = a[f * 4], a[f * 4 + 1], a[f * 4 + 2], a[f * 4 + 3]
                i = f * of_fragment + n * 8
                c = mma(a0, a1, a2, a3, b0, b1, o[i], o[i + 1], o[i + 2], o[i + 3])
                o[i], o[i + 1], o[i + 2], o[i + 3] = c
                c = mma(a0, a1, a2, a3, b2, b3, o[i + 4], o[i + 5], o[i + 6], o[i + 7])
                o[i + 4], o[i + 5], o[i + 6], o[i + 7] = c

    return unrolled(depth, add_values_of_16)


@device
def largest_of_row(x):
    """The largest of the numbers that the four threads of a row have."""
    x = larger(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return larger(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@device
def sum_of_row(x):
    """The sum of the numbers that the four threads of a row have."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


def rescaling(tiling):
    """A function of (s, o, state, scale) that takes scores times `scale` into m, and brings O to it."""
    columns, value_columns, rows = tiling.keys // 8, tiling.dim // 8, 2 * tiling.fragments
    score, value = fragment_indexer(columns), fragment_indexer(value_columns)

    @device
    def rescale_row(r, s, o, state, scale):
        top = larger(s[score(r, 0)], s[score(r, 0) + 1])
        for n in range(1, columns):
            top = larger(top, larger(s[score(r, n)], s[score(r, n) + 1]))
        m_new, ref, alpha = recurrence.advance(lane(state.m[r]), lane(largest_of_row(top)) * lane(scale))
        state.m[r], state.ref[r], state.alpha[r] = scalar(m_new), scalar(ref), scalar(alpha)
        for n in range(value_columns):
            for i in range(value(r, n), value(r, n) + 2):
                o[i] *= scalar(alpha)

    return unrolled(rows, rescale_row)


# -- rules -------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Where a thread's scores of a block stand, in 32-bit integers: registers are scarce there."""

    row: int  # of the sequence, the thread's first, and the last one that there is
    last_row: int
    key: int  # and likewise
    last_key: int
    position: float  # of the row, counted from the key
    group: int  # of four random words that the key belongs to


def tile_rules(tiling, rules):
    """A function of (p, s, head, scale, slope, part): scores times the scale, and the call's rules.

    Rows and keys that aren't there are taken for the last ones, as operands have no more.
    """
    columns, rows = tiling.keys // 8, 2 * tiling.fragments
    score, rule = fragment_indexer(columns), score_rules(FLOAT32_ACCUMULATOR, rules)

    @device
    def apply_to_pair(g, p, s, head, scale, slope, part):
        r, n = g // columns, g % columns
        row = int32(min(int32(part.row + r * 8), part.last_row))
        bias_row, mask_row = head.bias + row * p.bias_row, head.mask + row * p.mask_row
        position = part.position + float32(r * 8)
        for e in range(2):
            i, j = score(r, n) + e, int32(min(int32(part.key + n * 8 + e), part.last_key))
            bias, mask = bias_row + j * p.bias_column, mask_row + j * p.mask_column
            s[i], _ = rule((s[i] * scale, True), p, At(slope, position, float32(n * 8 + e), bias, mask))

    return unrolled(rows * columns, apply_to_pair)


def position_mask(tiling):
    """A function of (s, row, left, right, end): -inf for what rows don't see for where they stand.

    row: of the thread's first row, as it sees the keys from `row - left` to `row + right`; keys, and the last one that
    there is, are counted from the thread's first key.
    """
    columns, rows = tiling.keys // 8, 2 * tiling.fragments
    score = fragment_indexer(columns)

    @device
    def hide_in_row(r, s, row, left, right, end):
        own_first, own_last = geometry.row_bounds(lane(int32(row + r * 8)), lane(left), lane(right))
        own_last = ops.select(own_last < lane(end), own_last, lane(end))
        for n in range(columns):
            for e in range(2):
                i, seen = score(r, n) + e, geometry.between(lane(int32(n * 8 + e)), own_first, own_last)
                s[i] = hidden_unless(s[i], seen)

    return unrolled(rows, hide_in_row)


def dropout_of_fragments(tiling):
    """A function of (g, p, s, head, part): dropout of the weights of eight neighbouring keys in a fragment's rows.

    g: fragment and keys, as s is ordered. Two neighbouring threads hold the four keys of a counter, in two rows 8
    apart: each makes one row's words, and gives the other the two that it needs.
    """
    columns, (with_word, _) = tiling.keys // 8, weight_dropout(float32)

    @device
    def drop_weights(g, p, s, head, part):
        f, n, own_half = g // columns, g % columns, int32(ptx.thread_index() & 1)
        row, group = part.row + f * 16 + own_half * 8, part.group + n * 2
        word_0, word_1, word_2, word_3 = random_words(p, head, row, group)
        for e in range(2):
            j = int32(own_half * 2 + e)  # this thread's key among the four; the other thread's is j ^ 2
            own = dropout.word_of_key(word_0, word_1, word_2, word_3, lane(j))
            other = dropout.word_of_key(word_0, word_1, word_2, word_3, lane(int32(j ^ 2)))
            other = lane(cuda.shfl_xor_sync(ALL_LANES, scalar(other), 1))
            for half in range(2):
                i = g * 4 + half * 2 + e
                s[i] = with_word(p, s[i], ops.select(lane(own_half) == half, own, other))

    return drop_weights
