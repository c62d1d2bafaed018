"""How the tensor-core kernel is cut, and what it does besides attention: its compile-time constants."""

from typing import NamedTuple

import numpy as np

from .tiling import shared_limit

PIECE = 16  # bytes of an asynchronous copy, and of the padding of a shared row


class Rules(NamedTuple):
    """What is done to scores and weights besides masks by position. Terms by their format, None for none."""

    softcap: bool = False
    alibi: bool = False
    bias: int | None = None
    mask: int | None = None
    dropout: bool = False


class Shape(NamedTuple):
    """How a thread block is cut."""

    code: int  # of the format
    dim: int
    rows: int  # queries of a tile
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


# -- choice ------------------------------------------------------------------------------------------------------------

# Rows of a tile, keys of a block, warps, and thread blocks that a multiprocessor shall hold, by head dimension. Two
# fragments a warp halve the loads of matrices, where scores and output of 32 rows, and what rules need, fit registers.
CUTS = {64: (128, 64, 4, 3), 96: (128, 64, 4, 2), 128: (128, 64, 4, 2), 192: (128, 64, 8, 1), 256: (128, 64, 8, 1)}
CUTS_FOR_RULES = CUTS | {64: (128, 64, 8, 2), 96: (128, 64, 8, 1), 128: (128, 64, 8, 1)}
SMALL_CUT = (64, 64, 4, 1)  # where shared memory is short


def choose_shape(code: int, dim: int, rules: Rules, cc) -> Shape:
    limit = shared_limit(cc)
    cuts = [Shape(code, dim, *cut) for cut in ((CUTS if rules == Rules() else CUTS_FOR_RULES)[dim], SMALL_CUT)]
    if rules.bias is not None and rules.mask is not None:
        cuts = [cut._replace(blocks=1) for cut in cuts]
    return next(shape for shape in cuts if shape.shared_bytes <= limit)


def choose_rules(problem: np.ndarray) -> Rules:
    """The rules of a `PROBLEM` record."""
    bias, mask = (int(problem[f"{name}_format"]) if problem[name] else None for name in ("bias", "mask"))
    return Rules(bool(problem["softcap"]), bool(problem["slopes"]), bias, mask, bool(problem["keep_factor"]))
