"""What kernels compute in, how the tile kernel cuts its work, and what a multiprocessor has room for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ..dtypes import FLOAT32, FLOAT32_MAX, FLOAT64, FLOAT64_MAX, element_kind
from .elements import read_float32, read_float64, write_float32, write_float64
from .primitives import device


class Accumulator(NamedTuple):
    """What a kernel computes in, and how it reads and writes elements of other formats."""

    real: types.Type
    itemsize: int
    vector: int  # numbers in 16 bytes
    own_format: int
    read: Callable[..., Any]
    write: Callable[..., Any]
    highest: float  # finite number


FLOAT32_ACCUMULATOR = Accumulator(types.float32, 4, 4, FLOAT32, read_float32, write_float32, FLOAT32_MAX)
FLOAT64_ACCUMULATOR = Accumulator(types.float64, 8, 2, FLOAT64, read_float64, write_float64, FLOAT64_MAX)


def accumulator_of(problem: np.ndarray) -> Accumulator:
    """What a call is accumulated in: float64 for float64 queries, in either byte order, and float32 for all others."""
    return FLOAT64_ACCUMULATOR if element_kind(problem["q_format"]) == FLOAT64 else FLOAT32_ACCUMULATOR


class ThreadTile(NamedTuple):
    """Rows and keys of a thread of the tile kernel, and threads along rows and along keys."""

    rows: int
    keys: int
    threads_y: int = 16
    threads_x: int = 8


OTHER_REGISTERS = 64  # of a thread of the tile kernel: addresses, bounds and what a product is working on


class TileTiling(NamedTuple):
    """What follows from a `ThreadTile` and the head dimensions. Sizes and places in shared memory count numbers."""

    accumulator: Accumulator
    thread_tile: ThreadTile
    dim: int
    value_dim: int
    threads: int
    block_q: int  # rows of a work tile, keys of a block
    block_k: int
    piece: int  # dimensions of K that are in shared memory at a time
    padded: int  # all of them, in whole pieces
    vectors: int  # of V's columns that a thread takes at a time
    columns: int  # of V that are in shared memory at a time
    parts: int  # of O: all columns by so many
    q_stride: int
    k_stride: int
    p_stride: int
    out_stride: int
    kv_at: int
    p_at: int
    partial_at: int
    end: int

    @property
    def shared_bytes(self) -> int:
        return self.end * self.accumulator.itemsize

    @property
    def registers(self) -> int:
        """About how many a thread needs: scores, output, operands, and what the rest takes."""
        rows, vector = self.thread_tile.rows, self.accumulator.vector
        numbers = rows * (self.thread_tile.keys + self.parts * self.vectors * vector + vector + 2) + vector
        return numbers * self.accumulator.itemsize // 4 + OTHER_REGISTERS


def tile_tiling(accumulator: Accumulator, thread_tile: ThreadTile, dim: int, value_dim: int) -> TileTiling:
    """K goes through shared memory in pieces of up to 64 dimensions, V in columns of 1 to 3 vectors a thread."""
    rows, keys, threads_y, threads_x = thread_tile
    vector, threads = accumulator.vector, threads_y * threads_x
    block_q, block_k = rows * threads_y, keys * threads_x
    pieces = -(-dim // min(64, threads * vector))
    piece = up_to(8, -(-dim // pieces))
    padded = piece * pieces
    # as many vectors at a time as leave least over
    all_vectors = -(-value_dim // (threads_x * vector))
    vectors = min(range(1, min(3, threads_y) + 1), key=lambda n: (up_to(n, all_vectors), -n))
    columns = vectors * threads_x * vector
    # rows start `vector` numbers (8 for P, which is written one by one) further in the banks than the ones before
    q_stride, k_stride, p_stride, out_stride = padded + vector, piece + vector, block_k + 8, columns + vector
    kv_at = block_q * max(q_stride, out_stride)
    p_at = kv_at + block_k * max(k_stride, columns)
    partial_at = p_at + block_q * p_stride
    return TileTiling(
        accumulator, thread_tile, dim, value_dim, threads, block_q, block_k, piece, padded, vectors, columns,
        -(-all_vectors // vectors), q_stride, k_stride, p_stride, out_stride, kv_at, p_at, partial_at,
        partial_at + block_q * threads_x,
    )  # fmt: skip


def up_to(multiple: int, n: int) -> int:
    """n, rounded up to a multiple, at least one."""
    return max(1, -(-n // multiple)) * multiple


def in_turn(functions):
    """One function that calls several, one after the other, with the same arguments: a loop that is always unrolled."""
    if len(functions) == 1:
        return functions[0]
    first, others = functions[0], in_turn(functions[1:])

    @device
    def both(*args):
        first(*args)
        others(*args)

    return both


SHARED_LIMITS = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}


def shared_limit(cc: tuple[int, int]) -> int:
    """Bytes of shared memory that a thread block may have: 64 to 227 KB by generation, 99 KB where it isn't listed."""
    return SHARED_LIMITS.get(cc, 99) * 1024
