"""In which order the work tiles of packed sequences are computed."""

import numpy as np

from .geometry import row_bounds
from .problem import WORK_TILE


def packed_work_tiles(own: np.ndarray, block_q: int, left: int, right: int) -> np.ndarray:
    """`WORK_TILE` records that cover every row of every sequence, those that see most keys first.

    own: the SEQUENCE records of the sequences. block_q: rows of a work tile.
    """
    counts = -(-own["queries"] // block_q)
    tiles = np.zeros(counts.sum(), WORK_TILE)
    tiles["sequence"] = np.repeat(np.arange(own.size), counts)
    tiles["first_row"] = (np.arange(tiles.size) - np.repeat(counts.cumsum() - counts, counts)) * block_q
    of = own[tiles["sequence"]]
    rows = np.minimum(of["queries"] - tiles["first_row"], block_q)
    position = tiles["first_row"] + of["shift"]
    first, _ = row_bounds(position, left, right)
    _, last = row_bounds(position + rows - 1, left, right)
    seen = np.clip(last + 1, 0, of["keys"]) - np.clip(first, 0, of["keys"])
    return tiles[np.argsort(-np.maximum(seen, 0) * rows, kind="stable")]
