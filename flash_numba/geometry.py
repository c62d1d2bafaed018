"""Which keys a tile of query rows visits, written once as plain functions of integers (see `ops.py`).

A row stands at a position; positions and key indices count from the same key. Causal masks, sliding windows and lengths
make one range of keys a row. Every key loop of every kernel asks these functions, so a further mask structure (a table
of blocks, packed documents) is one more answer of `next_block` and `block_state`:

    visible = visible_keys(first_position, last_position, left, right, 0, keys)
    first = next_block(visible, 0, size)
    while first < visible.stop:
        ...                                    # load, score, recur; mask where block_state(...) isn't FULL
        first = next_block(visible, first + size, size)
"""

from typing import NamedTuple

SKIP, PARTLY, FULL = range(3)  # what a tile of rows sees of a block of keys: nothing, some, all of it by every row

UNLIMITED = 2**42  # a window's side without a limit, larger than the distance of any two positions
FAR = 2**30  # a bound that no key of a block reaches, for 32-bit integers


class VisibleKeys(NamedTuple):
    """The keys start <= j < stop that some row of a tile sees; full_start <= j < full_stop are seen by every row."""

    start: int
    stop: int
    full_start: int
    full_stop: int


def key_range(start, stop, full_start, full_stop):
    """The `VisibleKeys` of four numbers: the one place that makes one, for whoever gives it another field."""
    return VisibleKeys(start, stop, full_start, full_stop)


def row_bounds(position, left, right):
    """The first and the last key that the row at a position sees, before there being keys at all is looked at."""
    return position - left, position + right


def between(j, first, last):
    """Whether key j lies in the range that a row sees: causal masks and sliding windows alike."""
    return (j >= first) & (j <= last)


def visible_keys(first_position, last_position, left, right, start, stop):
    """The `VisibleKeys` among the keys start to stop for rows at neighbouring positions; none for no rows."""
    first, full_stop = row_bounds(first_position, left, right)
    full_start, last = row_bounds(last_position, left, right)
    if last_position < first_position:
        last = first - 1
    first = max(start, min(stop, first))
    return key_range(first, max(first, min(stop, last + 1)), max(start, full_start), min(stop, full_stop + 1))


def next_block(visible, key, size):
    """Where the first block of keys starts that isn't skipped, from the block of `key` on; `visible.stop` is the end.

    Blocks start at multiples of `size`, so that the bits of a row don't depend on the rows that share its tile.
    """
    key = max(key, visible.start)
    return key // size * size if key < visible.stop else visible.stop


def block_state(visible, start, stop):
    """SKIP, PARTLY or FULL: what the rows see of the keys start to stop."""
    if max(start, visible.start) >= min(stop, visible.stop):
        return SKIP
    return FULL if visible.full_start <= start and stop <= visible.full_stop else PARTLY
