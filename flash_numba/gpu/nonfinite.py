"""Infinities and NaN, for the tensor-core kernel.

A key that a row doesn't see has weight 0, but 0 * NaN is NaN in a matrix product. So a row whose output isn't finite is
done once more, by a warp, key by key without tensor cores, and what it doesn't see is never multiplied. All other rows
have met nothing that isn't finite. Rare, so short rather than fast.
"""

from math import inf

from numba import cuda, float32, int32

from .. import geometry, recurrence
from ..dtypes import FLOAT16, FLOAT32, bfloat16_to_float32, float16_to_float32
from .fragments import ALL_LANES, fragment_indexer, unrolled
from .ir import ptx
from .ir.memory import load_int32, store_float32, store_int32
from .loading import head_of, key_address, query_address, tile_keys, value_address
from .primitives import device, lane, scalar
from .rules import At, score_rules, weight_dropout
from .tiling import FLOAT32_ACCUMULATOR

SIGNS = 0x8000_8000 - 2**32  # of two 16-bit elements
HALVES = 0x7FFF_7FFF


def query_signs(tiling):
    """A function that makes a tile of queries fit a scale of 0 or less, as the maximum is taken before scaling."""
    carry = 0x8000 - (0x7C00 if tiling.code == FLOAT16 else 0x7F80)  # lifts exponents of all ones over the sign bit
    carries, threads, pitch, row_pairs = carry << 16 | carry, tiling.threads, tiling.pitch, tiling.dim // 2
    pairs = tiling.rows * row_pairs

    @device
    def sign_queries(shared, thread, scale):
        """For a negative scale negates all elements; for 0 makes them 0, or NaN where 0 times them is."""
        for i in range(thread, pairs, threads):
            at = int32(shared + i // row_pairs * pitch + i % row_pairs * 4)
            pair = ptx.load_shared(at)
            nonfinite = ((pair & HALVES) + carries) >> 15 & 0x10001
            ptx.store_shared(at, int32(pair ^ SIGNS) if scale < 0 else int32(nonfinite * 0x7FFF))

    return sign_queries


def row_test(tiling):
    """Which rows of a warp aren't finite."""
    columns, rows = tiling.dim // 8, 2 * tiling.fragments
    value = fragment_indexer(columns)

    @device
    def test_row(r, o, found):
        test = float32(0)
        for n in range(columns):
            test += o[value(r, n)] * float32(0) + o[value(r, n) + 1] * float32(0)
        found[r] = cuda.ballot_sync(ALL_LANES, test != float32(0)) >> (cuda.laneid & ~3) & 15

    test_rows = unrolled(rows, test_row)

    @device
    def nonfinite_rows(o):
        """Bit 4 (i % 8) + i // 8 for the warp's row i."""
        found, own = cuda.local.array(rows, int32), 0
        test_rows(o, found)
        for r in range(rows):
            own |= found[r] * (cuda.laneid & 3 == r)
        return cuda.ballot_sync(ALL_LANES, own != 0)

    return nonfinite_rows


@device
def sum_of_warp(x):
    for step in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL_LANES, x, step)
    return x


def row_loader(tiling):
    """A function that loads a row of 16-bit numbers for a warp: each thread two columns of each 64."""
    to_float32 = float16_to_float32 if tiling.code == FLOAT16 else bfloat16_to_float32
    pairs, passes = tiling.dim // 2, -(-tiling.dim // 64)

    @device
    def load_row(x, address):
        for n in range(passes):
            at = cuda.laneid + n * 32
            pair = load_int32(address + at * 4) if at < pairs else int32(0)
            for e in range(2):
                x[2 * n + e] = scalar(to_float32(lane(int32(pair >> e * 16 & 0xFFFF))))

    return load_row


def row_writer(tiling):
    """A function that writes such a row, normalized, and its log-sum-exp."""
    pack = ptx.pack_float16 if tiling.code == FLOAT16 else ptx.pack_bfloat16
    pairs, passes = tiling.dim // 2, -(-tiling.dim // 64)

    @device
    def write_row(p, head, i, m, l, o):
        row_lse, normalizer = recurrence.finalize(m, l, lane(float32(head.sink)))
        normalizer = lane(scalar(normalizer) * float32(head.v_scale))
        for c in range(2 * passes):
            o[c] = scalar(recurrence.normalized(lane(o[c]), l, normalizer))
        for n in range(passes):
            at = cuda.laneid + n * 32
            if at < pairs:
                if p.out_format == FLOAT32:
                    ptx.store_pair(head.out + i * p.out_row + at * 8, o[2 * n], o[2 * n + 1])
                else:
                    store_int32(head.out + i * p.out_row + at * 4, pack(o[2 * n], o[2 * n + 1]))
        if cuda.laneid == 0:
            store_float32(head.lse + i * 4, scalar(row_lse))

    return write_row


def row_attention(tiling, rules):
    """A function for one row, done by a warp key by key."""
    size, has_dropout = 2 * -(-tiling.dim // 64), rules.dropout
    load_row, write_row = row_loader(tiling), row_writer(tiling)
    rule, (_, dropped) = score_rules(FLOAT32_ACCUMULATOR, rules), weight_dropout(float32)

    @device
    def attend_row(p, b, h, i):
        head = head_of(p, b, h)
        q, x, o = cuda.local.array(size, float32), cuda.local.array(size, float32), cuda.local.array(size, float32)
        load_row(q, query_address(p, head, i))
        for c in range(size):
            o[c] = float32(0)
        m, l = lane(float32(-inf)), lane(float32(0))
        visible = tile_keys(p, head, i, 1, 0, head.keys)
        j = geometry.next_block(visible, visible.start, 1)
        while j < visible.stop:
            load_row(x, key_address(p, head, j))
            s = float32(0)
            for c in range(size):
                s += q[c] * x[c]
            s = sum_of_warp(s) * float32(head.scale)
            bias, mask = (
                head.bias + i * p.bias_row + j * p.bias_column,
                head.mask + i * p.mask_row + j * p.mask_column,
            )
            at = At(float32(head.slope), float32(i + head.shift - j), float32(0), bias, mask)
            s, seen = rule((s, True), p, at)
            if seen:
                m, ref, alpha = recurrence.advance(m, lane(s))
                w = recurrence.weight(lane(s), ref)
                l = recurrence.absorb(l, alpha, w)
                if has_dropout:
                    w = lane(dropped(p, head, scalar(w), i, j))
                load_row(x, value_address(p, head, j))
                for c in range(size):
                    o[c] = scalar(alpha * lane(o[c]) + w * lane(x[c]))
            j = geometry.next_block(visible, j + 1, 1)
        write_row(p, head, i, m, l, o)

    return attend_row
