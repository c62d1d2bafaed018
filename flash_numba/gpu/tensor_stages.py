"""The stages of the tensor-core kernel: what a thread block keeps and loads, one block's rules, and writing.

Each factory takes the kernel's `TensorTiling` and gives functions with its sizes as constants. What a thread does with
its registers is in `fragments.py`.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from numba import cuda, float32, int32

from .. import geometry, ops, recurrence
from ..dtypes import FLOAT16, FLOAT32
from ..geometry import FAR, VisibleKeys
from .fragments import (
    ALL_LANES,
    Part,
    fragment_indexer,
    position_mask,
    sum_of_row,
    tile_copy,
    tile_rules,
    unrolled,
)
from .ir import ptx
from .ir.memory import store_float32
from .loading import head_of, query_address, row_keys
from .nonfinite import query_signs, row_attention, row_test
from .primitives import device, lane, scalar
from .tensor_tiling import PIECE


@device
def bound(x):
    """What is compared with the keys of a block, as an int32."""
    return int32(max(-FAR, min(FAR, x)))


@device
def bounded(visible):
    """`VisibleKeys` in 32-bit integers."""
    start, stop = bound(visible.start), bound(visible.stop)
    return geometry.key_range(start, stop, bound(visible.full_start), bound(visible.full_stop))


# -- numbers that all threads share ------------------------------------------------------------------------------------

# Registers are scarce in the loop over the keys, so what it asks of the head and of the work tile waits in the padding
# behind the queries, 16 bytes a row. A note's number counts 32-bit words; addresses and positions take two.
K_AT, V_AT, VISIBLE, TILE, POSITION = 0, 2, 4, 8, 12


class KeyRows(NamedTuple):
    """Of a head, what `loading.key_address` asks for."""

    k: int


class ValueRows(NamedTuple):
    """Of a head, what `loading.value_address` asks for."""

    v: int


class Tile(NamedTuple):
    """A work tile whose rows are counted from its first, which stands at position 0: in 32-bit integers."""

    left: int  # so a row sees the keys from its number less `left` to its number and `right`
    right: int
    rows: int  # that there are
    keys: int


class Noted(NamedTuple):
    """Functions that read the notes."""

    keys: Callable[..., KeyRows]
    values: Callable[..., ValueRows]
    visible: Callable[..., VisibleKeys]
    tile: Callable[..., Tile]
    position: Callable[..., int]  # of the tile's first row


def notes(tiling):
    """`(write_notes, noted)`, where noted is `Noted`; all are functions of where shared memory starts."""
    pitch, row_bytes = tiling.pitch, 2 * tiling.dim

    @device
    def place_of(shared, i):
        return int32(shared + i // 4 * pitch + row_bytes + i % 4 * 4)

    @device
    def write_four(shared, i, four):
        for n in range(4):
            ptx.store_shared(place_of(shared, i + n), four[n])

    @device
    def write_notes(shared, p, head, first_row, rows, visible):
        ptx.store_shared_long(place_of(shared, K_AT), head.k)
        ptx.store_shared_long(place_of(shared, V_AT), head.v)
        ptx.store_shared_long(place_of(shared, POSITION), first_row + head.shift)
        write_four(shared, VISIBLE, visible)
        first, last = row_keys(p, head, first_row)
        write_four(shared, TILE, Tile(bound(-first), bound(last), int32(rows), int32(head.keys)))

    @device
    def noted_keys(shared):
        return KeyRows(ptx.load_shared_long(place_of(shared, K_AT)))

    @device
    def noted_values(shared):
        return ValueRows(ptx.load_shared_long(place_of(shared, V_AT)))

    @device
    def noted_visible(shared):
        start, stop, full_start, full_stop = ptx.load_shared_four(place_of(shared, VISIBLE))
        return geometry.key_range(start, stop, full_start, full_stop)

    @device
    def noted_tile(shared):
        left, right, rows, keys = ptx.load_shared_four(place_of(shared, TILE))
        return Tile(left, right, rows, keys)

    @device
    def noted_position(shared):
        return ptx.load_shared_long(place_of(shared, POSITION))

    return write_notes, Noted(noted_keys, noted_values, noted_visible, noted_tile, noted_position)


# -- load --------------------------------------------------------------------------------------------------------------


@device
def wait_for_tile():
    """Until the tile that is needed next is there for all threads, and all are done with the one before it."""
    ptx.wait_for_copies()
    cuda.syncthreads()


def query_loader(tiling):
    """A function that starts the copy of a work tile's queries, and returns the scale of the products with them."""
    copy_queries, sign_queries = tile_copy(tiling, tiling.rows, query_address), query_signs(tiling)

    @device
    def load_queries(shared, p, head, first_row, rows):
        copy_queries(shared, p, head, first_row, int32(rows))
        scale = float32(head.scale)
        if scale <= 0:
            ptx.commit_copies()
            wait_for_tile()
            sign_queries(shared, int32(cuda.threadIdx.x), scale)
            scale = -scale if scale < 0 else float32(1)
        return scale

    return load_queries


class Matrices(NamedTuple):
    """Addresses in shared memory: the tiles of K and V, and the rows of Q, K and V that this thread loads."""

    k_tile: int
    v_tile: int
    q: int
    k: int
    v: int


def matrix_finder(tiling):
    """A function of where shared memory starts that gives the thread's `Matrices`."""
    pitch, q_bytes, tile_bytes = tiling.pitch, tiling.rows * tiling.pitch, tiling.keys * tiling.pitch
    warp_rows = tiling.warp_rows

    @device
    def matrices_in(shared):
        thread = int32(cuda.threadIdx.x)
        lane_index, warp_row = int32(thread & 31), int32((thread >> 5) * warp_rows)
        k_tile = int32(shared + q_bytes)
        v_tile = int32(k_tile + tile_bytes)
        return Matrices(
            k_tile,
            v_tile,
            int32(shared + (warp_row + (lane_index & 15)) * pitch + (lane_index >> 4) * 16),
            int32(k_tile + ((lane_index >> 4) * 8 + (lane_index & 7)) * pitch + (lane_index >> 3 & 1) * 16),
            int32(v_tile + (lane_index & 15) * pitch + (lane_index >> 4) * 16),
        )

    return matrices_in


# -- one block of keys -------------------------------------------------------------------------------------------------


def warp_sight(tiling):
    """A function that tells whether some row of this warp sees a key of the block from `key` on."""
    warp_rows, block_keys = tiling.warp_rows, tiling.keys

    @device
    def warp_sees(tile, key):
        own_row = int32((ptx.thread_index() >> 5) * warp_rows)
        last_row = min(own_row + warp_rows, tile.rows) - 1
        visible = geometry.visible_keys(own_row, last_row, tile.left, tile.right, 0, tile.keys)
        return cuda.any_sync(ALL_LANES, geometry.block_state(visible, key, key + block_keys) != geometry.SKIP)

    return warp_sees


def block_rules(tiling, rules):
    """`(apply_rules, dropout_part)`: all that is done to a block's scores, and where its weights stand for dropout."""
    warp_rows, (_, noted) = tiling.warp_rows, notes(tiling)
    noted_tile, noted_position = noted.tile, noted.position
    has_rules = rules.on_scores
    hide_by_position, apply_to_tile = position_mask(tiling), tile_rules(tiling, rules)

    @device
    def own_row_and_key(key):
        """The thread's first row in the tile, and its first key in the block."""
        thread = ptx.thread_index()
        return int32((thread >> 5) * warp_rows + (thread >> 2 & 7)), int32(key + (thread & 3) * 2)

    @device
    def part_of(p, shared, first_row, key):
        tile, (own_row, own_key) = noted_tile(shared), own_row_and_key(key)
        row, last_row = int32(first_row + own_row), int32(first_row + tile.rows - 1)
        position, group = float32(noted_position(shared) + own_row - own_key), int32((p.key_index + own_key) >> 2)
        return Part(row, last_row, own_key, int32(tile.keys - 1), position, group)

    @device
    def no_part(p, shared, first_row, key):
        return Part(0, 0, 0, 0, float32(0), 0)

    @device
    def apply_rules(p, s, shared, head, first_row, key, scale, masked):
        """The order is that of `rules.in_order`. Scores come out multiplied by the scale if there are any rules."""
        if has_rules:
            apply_to_tile(p, s, head, scale, float32(head.slope), part_of(p, shared, first_row, key))
        if masked:
            tile, (own_row, own_key) = noted_tile(shared), own_row_and_key(key)
            hide_by_position(s, int32(own_row - own_key), tile.left, tile.right, int32(tile.keys - 1 - own_key))

    return apply_rules, part_of if rules.dropout else no_part


# -- write -------------------------------------------------------------------------------------------------------------


class WarpRows(NamedTuple):
    """Where the rows of a warp go."""

    out: int  # addresses of the work tile's first row
    lse: int
    shared: int  # of the warp's first row, where the queries were
    warp_row: int  # the warp's first row in the tile, the thread's first one in the warp, its first pair of columns
    own_row: int
    pair: int
    there: int  # rows of the tile from here on see no key
    written: int  # and from here on there are none
    redone: int  # `nonfinite.row_test`
    sink: float
    v_scale: float


def warp_row_writer(tiling):
    """A function of (p, o, m, l, rows): normalized rows to global memory; those of 16 bits to shared memory first."""
    pack = ptx.pack_float16 if tiling.code == FLOAT16 else ptx.pack_bfloat16
    columns, pitch = tiling.dim // 8, tiling.pitch
    value = fragment_indexer(columns)

    @device
    def write_row(r, p, o, m, l, rows):
        row = rows.warp_row + rows.own_row + r * 8
        there = lane(int32(row)) < lane(int32(rows.there))
        own_m, own_l = ops.select(there, lane(m[r]), -inf), ops.select(there, lane(sum_of_row(l[r])), 0.0)
        row_lse, normalizer = recurrence.finalize(own_m, own_l, lane(rows.sink))
        normalizer = normalizer * lane(rows.v_scale)
        for n in range(columns):
            for i in range(value(r, n), value(r, n) + 2):
                o[i] = scalar(recurrence.normalized(lane(o[i]), own_l, normalizer))
        finite = rows.redone >> (rows.own_row * 4 + r) & 1 == 0 or row >= rows.there
        if finite and row < rows.written:
            if rows.pair == 0:
                store_float32(rows.lse + row * 4, scalar(row_lse))
            if p.out_format == FLOAT32:
                for n in range(columns):
                    at = rows.out + row * p.out_row + n * 32 + rows.pair * 8
                    ptx.store_pair(at, o[value(r, n)], o[value(r, n) + 1])
        if p.out_format != FLOAT32:
            for n in range(columns):
                at = rows.shared + (rows.own_row + r * 8) * pitch + n * 16 + rows.pair * 4
                ptx.store_shared(int32(at), pack(o[value(r, n)], o[value(r, n) + 1]))

    return unrolled(2 * tiling.fragments, write_row)


def row_writer(tiling, rules, work_tile):
    """A function of (p, o, m, l, shared) that writes a work tile's rows. `shared`: where the queries were."""
    pieces, pitch, warp_rows, tile_rows = tiling.pieces, tiling.pitch, tiling.warp_rows, tiling.rows
    nonfinite_rows, attend_row, write_each = row_test(tiling), row_attention(tiling, rules), warp_row_writer(tiling)

    @device
    def is_redone(rows, row):
        """Whether a warp's row has met something that isn't finite."""
        return rows.redone >> ((row & 7) * 4 + (row >> 3)) & 1 != 0

    @device
    def warp_rows_of(p, head, first_row, redone, shared):
        there = int32(min(tile_rows, head.queries - first_row))
        written = there if p.work_tiles != 0 else int32(min(tile_rows, p.queries - first_row))
        thread = ptx.thread_index()
        lane_index, warp_row = int32(thread & 31), int32((thread >> 5) * warp_rows)
        return WarpRows(
            head.out + first_row * p.out_row,
            head.lse + first_row * 4,
            shared + warp_row * pitch,
            warp_row,
            lane_index >> 2,
            lane_index & 3,
            there,
            written,
            redone,
            float32(head.sink),
            float32(head.v_scale),
        )

    @device
    def write_rows(p, o, m, l, shared):
        # where they go is found anew: registers are scarce in the loop over the keys
        b, h, first_row = work_tile(p, ptx.block_index())
        rows = warp_rows_of(p, head_of(p, b, h), first_row, nonfinite_rows(o), shared)
        write_each(p, o, m, l, rows)
        if p.out_format != FLOAT32:
            cuda.syncwarp()
            for i in range(ptx.thread_index() & 31, warp_rows * pieces, 32):
                row, piece = i // pieces, i % pieces
                finite = not is_redone(rows, row) or rows.warp_row + row >= rows.there
                if finite and rows.warp_row + row < rows.written:
                    w, x, y, z = ptx.load_shared_four(int32(rows.shared + row * pitch + piece * PIECE))
                    ptx.store_four(rows.out + (rows.warp_row + row) * p.out_row + piece * PIECE, w, x, y, z)
        if rows.redone != 0:
            for row in range(min(warp_rows, rows.there - rows.warp_row)):
                if is_redone(rows, row):
                    attend_row(p, b, h, first_row + rows.warp_row + row)

    return write_rows
