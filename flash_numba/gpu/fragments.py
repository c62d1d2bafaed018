"""The stages of the tensor-core kernel on what a thread holds of a tile: products, rules, softmax, values out of line.

Each factory takes the kernel's `Shape` and gives a function with its sizes as constants, so that loops unroll and
local arrays become registers. A warp owns `fragments` times 16 rows. A thread has two rows of each, 8 r below its first
row for r = 0, 1, ...; of eight neighbouring keys or columns it has two. The scores of row r and keys 8n and 8n + 1,
counted from the thread's first key, stand at s[place(r, n)] and behind it, and the output likewise with columns.
"""

import inspect
from math import inf

from numba import cuda, float32, int32, uint32

from .. import dropout, geometry, ops, recurrence, scores
from ..dtypes import BOOL, FLOAT16
from .elements import HIGHEST, read_float32
from .ir import ptx
from .primitives import device, lane, larger, scalar
from .tensor_shapes import PIECE

ALL = 0xFFFFFFFF  # lanes of a warp


def place(columns):
    """A function for where row r, column pair n stands among `columns` groups of eight columns."""

    @device
    def place_of(r, n):
        return (r // 2 * columns + n) * 4 + r % 2 * 2

    return place_of


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


def tile_copy(shape, rows):
    """A function that starts the copy of a tile to shared memory: each thread one piece of every `step`-th row."""
    step, pieces, pitch = shape.copied_rows, shape.pieces, shape.pitch
    idle, passes = step * pieces < shape.threads, rows // step

    @device
    def copy(shared, address, row_stride, rows_left):
        thread = uint32(ptx.thread_index())  # division of signed numbers takes more instructions
        row, piece = int32(thread // uint32(pieces)), int32(thread % uint32(pieces) * uint32(PIECE))
        if idle and row >= step:
            return
        shared, address = int32(shared + row * pitch + piece), address + row * row_stride + piece
        left = int32(rows_left - row)
        for i in range(passes):
            count = PIECE if i * step < left else 0  # rows beyond the last one become 0
            ptx.copy_async(int32(shared + i * step * pitch), address, int32(count))
            address += step * row_stride

    return copy


# -- score, recur ------------------------------------------------------------------------------------------------------


def key_product(shape):
    """S = Q K^T"""
    mma = ptx.mma_float16 if shape.code == FLOAT16 else ptx.mma_bfloat16
    depth, columns, fragments, pitch = shape.dim // 16, shape.keys // 16, shape.fragments, shape.pitch
    a_size, s_size, of_fragment = fragments * 4, fragments * shape.keys // 2, shape.keys // 2

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


def value_product(shape, has_dropout):
    """Weights P, l += sum of P, O += P V: a function of (o, s, l, ref, scale, v_at, p, b, h, row_index, key_index).

    Weights are made just before they are needed, 16 keys at a time, so that few are alive at once. They stand where a
    left operand has to, so they go from registers to registers. The last arguments are those of `weight_dropout`.
    """
    mma = ptx.mma_float16 if shape.code == FLOAT16 else ptx.mma_bfloat16
    pack = ptx.pack_float16 if shape.code == FLOAT16 else ptx.pack_bfloat16
    depth, columns, fragments, pitch = shape.keys // 16, shape.dim // 16, shape.fragments, shape.pitch
    a_size, of_fragment, pairs, score = fragments * 4, shape.dim // 2, shape.keys // 8, place(shape.keys // 8)
    drop_weights = weight_dropout(shape)

    @device
    def add_values_of_16(d, o, s, l, ref, scale, v_at, p, b, h, row_index, key_index):
        a = cuda.local.array(a_size, int32)
        for r in range(2 * fragments):
            for n in range(2 * d, 2 * d + 2):
                i = score(r, n)
                w0 = recurrence.weight(lane(s[i]) * lane(scale), lane(ref[r]))
                w1 = recurrence.weight(lane(s[i + 1]) * lane(scale), lane(ref[r]))
                l[r] = scalar(lane(l[r]) + (w0 + w1))
                s[i], s[i + 1] = scalar(w0), scalar(w1)
        for f in range(fragments):
            for n in range(2):
                g = f * pairs + 2 * d + n
                if has_dropout:
                    drop_weights(g, p, s, b, h, row_index, key_index)
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
    """Over the four threads that share a row."""
    x = larger(x, cuda.shfl_xor_sync(ALL, x, 1))
    return larger(x, cuda.shfl_xor_sync(ALL, x, 2))


@device
def sum_of_row(x):
    x += cuda.shfl_xor_sync(ALL, x, 1)
    return x + cuda.shfl_xor_sync(ALL, x, 2)


def rescaling(shape):
    """A function of (s, o, m, l, ref, scale) that takes scores times `scale` into m, and brings l and O to it."""
    columns, value_columns, rows = shape.keys // 8, shape.dim // 8, 2 * shape.fragments
    score, value = place(columns), place(value_columns)

    @device
    def rescale_row(r, s, o, m, l, ref, scale):
        top = larger(s[score(r, 0)], s[score(r, 0) + 1])
        for n in range(1, columns):
            top = larger(top, larger(s[score(r, n)], s[score(r, n) + 1]))
        m_new, own_ref, alpha = recurrence.advance(lane(m[r]), lane(largest_of_row(top)) * lane(scale))
        m[r], ref[r], l[r] = scalar(m_new), scalar(own_ref), scalar(alpha * lane(l[r]))
        for n in range(value_columns):
            for i in range(value(r, n), value(r, n) + 2):
                o[i] *= scalar(alpha)

    return unrolled(rows, rescale_row)


# -- rules -------------------------------------------------------------------------------------------------------------


def position_mask(shape):
    """A function of (s, first, last, end): -inf for what rows don't see for where they stand.

    Bounds of the thread's first row, and of all, counted from the thread's first key.
    """
    columns, rows = shape.keys // 8, 2 * shape.fragments
    score = place(columns)

    @device
    def hide_in_row(r, s, first, last, end):
        own_first, own_last = lane(int32(first + r * 8)), lane(int32(min(last + r * 8, end)))
        for n in range(columns):
            for e in range(2):
                seen = geometry.between(lane(int32(n * 8 + e)), own_first, own_last)
                s[score(r, n) + e] = scalar(scores.hide(lane(s[score(r, n) + e]), seen))

    return unrolled(rows, hide_in_row)


def term_rule(code):
    """A function that applies an element of a bias, or of a boolean mask, to a score."""
    is_mask = code == BOOL

    @device
    def apply(x, address):
        term = lane(read_float32(address, code))
        if is_mask:
            return scores.hide(x, term != 0.0)
        return scores.with_bias(x, term, -HIGHEST)

    @device
    def hides(address):
        term = read_float32(address, code)
        return term == (float32(0) if is_mask else float32(-inf))

    return apply, hides


def one_score(rules):
    """A function that applies those of softcap, ALiBi, bias and mask that `rules` has to a scaled score."""
    softcap, alibi, has_bias, has_mask = rules.softcap, rules.alibi, rules.bias is not None, rules.mask is not None
    (apply_bias, _), (apply_mask, _) = term_rule(rules.bias), term_rule(rules.mask)

    @device
    def apply(p, x, slope, position, j, bias_at, mask_at):
        if softcap:
            x = scores.softcapped(x, lane(float32(p.softcap)), lane(float32(1.0 / p.softcap)))
        if alibi:
            x = scores.with_alibi(x, slope, position, j)
        if has_bias:
            x = apply_bias(x, bias_at)
        if has_mask:
            x = apply_mask(x, mask_at)
        return x

    return apply


def score_rules(shape, rules):
    """The scale and the same for a tile: (p, s, scale, slope, position, bias_at, mask_at, row, last_row, key, keys).

    row, position: of the thread's first row, counted from the terms' first row and from `key`, its first key. Rows and
    keys that aren't there are taken for the last ones.
    """
    columns, rows = shape.keys // 8, 2 * shape.fragments
    score, rule = place(columns), one_score(rules)

    @device
    def apply_to_pair(g, p, s, scale, slope, position, bias_at, mask_at, row, last_row, key, keys):
        r, n = g // columns, g % columns
        there = min(row + r * 8, last_row)
        bias_row, mask_row = bias_at + there * p.bias_row, mask_at + there * p.mask_row
        for e in range(2):
            i, j = score(r, n) + e, min(key + n * 8 + e, keys - 1)
            x, own_position = lane(s[i]) * lane(scale), lane(position) + r * 8
            bias_there, mask_there = bias_row + j * p.bias_column, mask_row + j * p.mask_column
            x = rule(p, x, lane(slope), own_position, lane(float32(n * 8 + e)), bias_there, mask_there)
            s[i] = scalar(x)

    return unrolled(rows * columns, apply_to_pair)


def weight_dropout(shape):
    """Dropout of the weights of eight neighbouring keys in the two rows of a fragment."""
    columns = shape.keys // 8

    @device
    def drop_weights(g, p, s, b, h, row_index, key_index):
        """g: fragment and keys, as s is ordered. Indices of the thread's first row and key among the random words.

        Two neighbouring threads hold the four keys of a counter, in two rows 8 apart: each makes one row's words.
        """
        f, n, own_half = g // columns, g % columns, int32(ptx.thread_index() & 1)
        row, group = lane(int32(row_index + f * 16 + own_half * 8)), lane(int32((key_index + n * 8) >> 2))
        words = dropout.philox(group, row, lane(int32(h)), lane(int32(b)), p.round_keys)
        first, threshold, factor = lane(own_half) == 0, lane(int32(p.drop_below)), lane(float32(p.keep_factor))
        for e in range(2):
            own = ops.select(first, words[e], words[2 + e])
            other = ops.select(first, words[2 + e], words[e])
            other = lane(cuda.shfl_xor_sync(ALL, scalar(other), 1))
            for half in range(2):
                i = g * 4 + half * 2 + e
                kept = dropout.kept(ops.select(lane(own_half) == half, own, other), threshold)
                s[i] = scalar(ops.select(kept, lane(s[i]) * factor, 0.0))

    return drop_weights
