"""How the decode kernel cuts its work: rows, threads, and where the parts of shared memory lie."""

from typing import NamedTuple

from .elements import BYTES
from .tiling import Accumulator, up_to

LINE = 128  # bytes of a cache line: states of two thread blocks share none
COPIED = 16  # bytes of a copy from global to shared memory, and of what a thread takes out of there at a time


class DecodeBlock(NamedTuple):
    """Query rows of a thread block, and its threads, which are the keys of a block of keys."""

    rows: int
    threads: int


class DecodeTiling(NamedTuple):
    """What follows from a `DecodeBlock`, the head dimensions and the formats of k and v."""

    accumulator: Accumulator
    block: DecodeBlock
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
        rows, threads = self.block
        return threads + (threads // rows if threads // rows < 32 else 0)

    @property
    def state_bytes(self) -> int:
        """Of a row's split state in the workspace: O, m and l, in whole cache lines."""
        return up_to(LINE, (self.value_dim + 2) * self.accumulator.itemsize)

    @property
    def columns(self) -> int:
        """Of O, that a thread holds."""
        return self.chunks * COPIED // BYTES[self.formats[1]]


def decode_tiling(
    accumulator: Accumulator, block: DecodeBlock, dim: int, value_dim: int, formats: tuple[int, int]
) -> DecodeTiling:
    size, (rows, threads) = accumulator.itemsize, block
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
    return DecodeTiling(
        accumulator, block, dim, value_dim, formats, across, -(-v_chunks // across), key_groups, k_stride, v_stride,
        *places,
    )  # fmt: skip
