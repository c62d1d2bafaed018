"""How the tensor-core kernel cuts its work: compile-time constants."""

from typing import NamedTuple

from .rules import Rules
from .tiling import shared_limit

PIECE = 16  # bytes of an asynchronous copy, and of the padding of a shared row


class TensorTiling(NamedTuple):
    """What a thread block of the tensor-core kernel holds at a time."""

    code: int  # of the format
    dim: int
    rows: int  # queries of a work tile
    keys: int  # of a block
    warps: int
    blocks: int  # thread blocks that a multiprocessor shall hold

    @property
    def pitch(self) -> int:
        """Bytes from row to row of a shared tile."""
        return 2 * self.dim + PIECE

    @property
    def shared_bytes(self) -> int:
        return (self.rows + 2 * self.keys) * self.pitch

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def pieces(self) -> int:
        """Of a row."""
        return 2 * self.dim // PIECE

    @property
    def copied_rows(self) -> int:
        """So many rows the threads copy at a time: a power of two, though some threads may have nothing to do."""
        return 1 << (self.threads // self.pieces).bit_length() - 1

    @property
    def fragments(self) -> int:
        """Of 16 rows, that a warp owns."""
        return self.rows // (16 * self.warps)

    @property
    def warp_rows(self) -> int:
        return 16 * self.fragments


# -- choice ------------------------------------------------------------------------------------------------------------

# Rows of a work tile, keys of a block, warps, and thread blocks that a multiprocessor shall hold, by head dimension.
# Two fragments a warp halve the loads of matrices, where scores and output of 32 rows, and what rules need, fit
# registers.
SIZES = {64: (128, 64, 4, 3), 96: (128, 64, 4, 2), 128: (128, 64, 4, 2), 192: (128, 64, 8, 1), 256: (128, 64, 8, 1)}
SIZES_WITH_RULES = SIZES | {64: (128, 64, 8, 2), 96: (128, 64, 8, 1), 128: (128, 64, 8, 1)}
SMALL_SIZES = (64, 64, 4, 1)  # where shared memory is short


def choose_tiling(code: int, dim: int, rules: Rules, cc: tuple[int, int]) -> TensorTiling:
    limit = shared_limit(cc)
    usual = (SIZES if rules == Rules() else SIZES_WITH_RULES)[dim]
    tilings = [TensorTiling(code, dim, *sizes) for sizes in (usual, SMALL_SIZES)]
    if rules.bias is not None and rules.mask is not None:
        tilings = [tiling._replace(blocks=1) for tiling in tilings]
    return next(tiling for tiling in tilings if tiling.shared_bytes <= limit)
