"""Infinities and NaN, for the tensor-core kernel.

A key that a row doesn't see has weight 0, but 0 * NaN is NaN in a matrix product. So a row whose output isn't finite is
done once more, by a warp, key by key without tensor cores, and what it doesn't see is never multiplied. All other rows
have met nothing that isn't finite. Rare, so short rather than fast.
"""

from math import inf

from numba import cuda, float32, int32

from .. import dropout, geometry, ops, recurrence
from ..dtypes import FLOAT16, FLOAT32, bfloat16_to_float32, float16_to_float32
from .fragments import ALL, one_score, place, term_rule, unrolled
from .ir import ptx
from .ir.memory import load_int32, store_float32, store_int32
from .operands import of_head, operands, quotient
from .primitives import device, lane, scalar

SIGNS = 0x8000_8000 - 2**32  # of two 16-bit elements
HALVES = 0x7FFF_7FFF


def query_signs(shape):
    """A function that makes a tile of queries fit a scale of 0 or less, as the maximum is taken before scaling."""
    carry = 0x8000 - (0x7C00 if shape.code == FLOAT16 else 0x7F80)  # lifts exponents of all ones over the sign bit
    carries, threads, pitch, words_of_row = carry << 16 | carry, shape.threads, shape.pitch, shape.dim // 2
    words = shape.rows * words_of_row

    @device
    def sign_queries(shared, thread, scale):
        """For a negative scale negates all elements; for 0 makes them 0, or NaN where 0 times them is."""
        for i in range(thread, words, threads):
            at = int32(shared + i // words_of_row * pitch + i % words_of_row * 4)
            word = ptx.load_shared(at)
            nonfinite = ((word & HALVES) + carries) >> 15 & 0x10001
            ptx.store_shared(at, int32(word ^ SIGNS) if scale < 0 else int32(nonfinite * 0x7FFF))

    return sign_queries


def row_test(shape):
    """Which rows of a warp aren't finite."""
    columns, rows = shape.dim // 8, 2 * shape.fragments
    value = place(columns)

    @device
    def test_row(r, o, found):
        test = float32(0)
        for n in range(columns):
            test += o[value(r, n)] * float32(0) + o[value(r, n) + 1] * float32(0)
        found[r] = cuda.ballot_sync(ALL, test != float32(0)) >> (cuda.laneid & ~3) & 15

    test_rows = unrolled(rows, test_row)

    @device
    def nonfinite_rows(o):
        """Bit 4 (i % 8) + i // 8 for the warp's row i."""
        found, own = cuda.local.array(rows, int32), 0
        test_rows(o, found)
        for r in range(rows):
            own |= found[r] * (cuda.laneid & 3 == r)
        return cuda.ballot_sync(ALL, own != 0)

    return nonfinite_rows


@device
def sum_of_warp(x):
    for step in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL, x, step)
    return x


def row_attention(shape, rules):
    """A row, done by a warp key by key."""
    to_float32 = float16_to_float32 if shape.code == FLOAT16 else bfloat16_to_float32
    pack = ptx.pack_float16 if shape.code == FLOAT16 else ptx.pack_bfloat16
    words, passes = shape.dim // 2, -(-shape.dim // 64)
    size = 2 * passes
    rule = one_score(rules)
    has_bias, has_mask, has_dropout = rules.bias is not None, rules.mask is not None, rules.dropout
    (_, bias_hides), (_, mask_hides) = term_rule(rules.bias), term_rule(rules.mask)

    @device
    def load_row(x, address, index):
        """Each thread two columns of 64."""
        for i in range(passes):
            word = load_int32(address + (index + i * 32) * 4) if index + i * 32 < words else int32(0)
            for e in range(2):
                x[2 * i + e] = scalar(to_float32(lane(int32(word >> e * 16 & 0xFFFF))))

    @device
    def attend_row(p, b, h, i):
        q_at, k_at, v_at, out_at, lse_at, bias_at, mask_at, _, keys, shift, row_index = operands(p, b, h)
        sink = float32(of_head(p.sinks, p.sink_batch, p.sink_head, b, h, -inf))
        scale = float32(p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, quotient(h, p.k_group), 1.0))
        v_scale = float32(of_head(p.v_scales, p.v_scale_batch, p.v_scale_head, b, quotient(h, p.v_group), 1.0))
        slope = float32(of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0))
        q, x, o = cuda.local.array(size, float32), cuda.local.array(size, float32), cuda.local.array(size, float32)
        index, position = cuda.laneid, i + shift
        load_row(q, q_at + i * p.q_row, index)
        for c in range(size):
            o[c] = float32(0)
        m, l = lane(float32(-inf)), lane(float32(0))
        start, stop, _, _ = geometry.visible_keys(position, position, p.left, p.right, 0, keys)
        for j in range(start, stop):
            bias_there, mask_there = (
                bias_at + i * p.bias_row + j * p.bias_column,
                mask_at + i * p.mask_row + j * p.mask_column,
            )
            if (has_bias and bias_hides(bias_there)) or (has_mask and mask_hides(mask_there)):
                continue
            load_row(x, k_at + j * p.k_row, index)
            s = float32(0)
            for c in range(size):
                s += q[c] * x[c]
            s = lane(sum_of_warp(s)) * lane(scale)
            s = rule(p, s, lane(slope), lane(float32(position - j)), lane(float32(0)), bias_there, mask_there)
            m, ref, alpha = recurrence.advance(m, s)
            w = recurrence.weight(s, ref)
            l = alpha * l + w
            if has_dropout:
                at = j + p.key_index
                counter = lane(int32(at >> 2)), lane(int32(row_index + i)), lane(int32(h)), lane(int32(b))
                w0, w1, w2, w3 = dropout.philox(*counter, p.round_keys)
                low = ops.select(lane(int32(at & 1)) == 0, w0, w1)
                high = ops.select(lane(int32(at & 1)) == 0, w2, w3)
                kept = dropout.kept(ops.select(lane(int32(at & 2)) == 0, low, high), lane(int32(p.drop_below)))
                w = ops.select(kept, w * lane(float32(p.keep_factor)), 0.0)
            load_row(x, v_at + j * p.v_row, index)
            for c in range(size):
                o[c] = scalar(alpha * lane(o[c]) + w * lane(x[c]))
        row_lse, factor = recurrence.finalize(m, l, lane(sink))
        factor = lane(scalar(factor) * v_scale)
        for c in range(2 * passes):
            o[c] = scalar(recurrence.normalized(lane(o[c]), l, factor))
        for c in range(passes):
            at = index + c * 32
            if at < words:
                if p.out_format == FLOAT32:
                    ptx.store_pair(out_at + i * p.out_row + at * 8, o[2 * c], o[2 * c + 1])
                else:
                    store_int32(out_at + i * p.out_row + at * 4, pack(o[2 * c], o[2 * c + 1]))
        if index == 0:
            store_float32(lse_at + i * 4, scalar(row_lse))

    return attend_row
