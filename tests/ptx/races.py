"""Who touched which piece of shared memory, and when: finds accesses that no barrier puts in order.

Each cell remembers its last writer and the readers since, with the time. Time is the number of barriers so far; two
accesses of different threads are in order if their block's barrier lies between them, or both are of one warp and a
bar.warp.sync of the whole warp does. Threads run in lock step here, but what is checked is whether any other order of
execution could see something else. (The PTX ISA's memory model, chapter 8, asks for no more than that.)
"""

from __future__ import annotations

import numpy as np

from .errors import InFlight, Race, Uninitialised, first

WARP = 32
NOBODY = -1
NEVER = np.iinfo(np.int32).max
"""Write time of a cell that can't be read yet: never written, or by a cp.async under way. Later than any barrier."""


def one_by_one(cells: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells (lanes, cells of each), each with its lane."""
    return cells.reshape(-1), np.repeat(lanes, cells.shape[1])


class Tracker:
    """`cells` cells a block, in blocks of `threads` threads; lanes are numbered across blocks.

    A writer is a lane, or one of the numbers beyond the last lane: `several` for lanes that wrote the same value at
    once, `atomics` for any number of atomic accesses. Of readers the lowest and the highest lane are known, which tells
    whether there is any but one, and whether all are of one warp. Reads are noted down first and only looked at when
    something is written before the next barrier.
    """

    def __init__(self, blocks: int, threads: int, cells: int) -> None:
        self.threads, self.lanes = threads, blocks * threads
        self.several, self.atomics = self.lanes, self.lanes + WARP
        total = blocks * cells
        self.writer = np.full(total, NOBODY, np.int32)
        self.write_time = np.full(total, NEVER, np.int32)
        self.in_flight = np.zeros(total, bool)
        self.low_reader = np.full(total, self.lanes, np.int32)
        self.high_reader = np.full(total, NOBODY, np.int32)
        self.read_time = np.full(total, -1, np.int32)
        self.now = 0
        self.barrier_time = np.zeros(self.lanes, np.int32)  # of the block's latest barrier, for each lane
        self.warp_time = np.zeros(self.lanes // WARP, np.int32)
        self.notes: list[tuple[int, np.ndarray, np.ndarray]] = []  # time, cells, lanes of reads

    def barrier(self, blocks: np.ndarray) -> None:
        """All threads of these blocks (a mask) have passed a barrier."""
        self.now += 1
        self.barrier_time.reshape(-1, self.threads)[blocks] = self.now
        if blocks.all():
            self.notes.clear()

    def warp_barrier(self, warps: np.ndarray) -> None:
        """All threads of these warps (a mask) have passed a bar.warp.sync."""
        self.now += 1
        self.warp_time[warps] = self.now

    def _ordered(self, low: np.ndarray, high: np.ndarray, time: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Whether accesses until `time` by lanes from low to high surely come before one by `lanes` now."""
        warp = lanes // WARP
        in_warp = (low // WARP == warp) & (high // WARP == warp) & (time < self.warp_time[warp])
        return (time < self.barrier_time[lanes]) | in_warp | ((low == lanes) & (high == lanes))

    def _name(self, low: int, high: int) -> str:
        if low >= self.several:
            return "several threads" if low == self.several else "an atomic operation"
        return f"thread {low % self.threads}" if low == high else "several threads"

    # ---- reads

    def read(self, cells: np.ndarray, lanes: np.ndarray) -> None:
        """Cells are (lanes, cells of each)."""
        count = cells.shape[1]
        times = self.write_time[cells[:, 0]] if count == 1 else self.write_time[cells].max(axis=1)
        if (times >= self.barrier_time[lanes]).any():
            self._check_read(*one_by_one(cells, lanes))
        self.notes.append((self.now, cells, lanes))

    def _check_read(self, cells: np.ndarray, lanes: np.ndarray) -> None:
        self._check_flight(cells, lanes, "reads")
        writer = self.writer[cells]
        if (never := writer == NOBODY).any():
            raise Uninitialised("reads shared memory that was never written", lanes[first(never)])
        if (race := ~self._ordered(writer, writer, self.write_time[cells], lanes)).any():
            at = first(race)
            by = self._name(writer[at], writer[at])
            raise Race(f"reads what {by} wrote with no barrier between", lanes[at])

    def _check_flight(self, cells: np.ndarray, lanes: np.ndarray, verb: str) -> None:
        if (flying := self.in_flight[cells]).any():
            raise InFlight(f"{verb} what a cp.async is writing, before its group was waited for", lanes[first(flying)])

    def _look_at_notes(self) -> None:
        """Bring the readers of each cell up to date."""
        while self.notes:
            time = self.notes[0][0]
            alike = [note for note in self.notes if note[0] == time]  # in order of time, so these come first
            del self.notes[: len(alike)]
            pairs = [one_by_one(cells, lanes) for _, cells, lanes in alike]
            cells, lanes = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
            low, high = self.low_reader[cells], self.high_reader[cells]
            forgotten = cells[self._ordered(low, high, self.read_time[cells], lanes)]
            self.low_reader[forgotten], self.high_reader[forgotten] = self.lanes, NOBODY
            np.minimum.at(self.low_reader, cells, lanes.astype(np.int32))
            np.maximum.at(self.high_reader, cells, lanes.astype(np.int32))
            self.read_time[cells] = time

    # ---- writes

    def _check_write(self, cells: np.ndarray, lanes: np.ndarray, atomic: bool) -> None:
        self._look_at_notes()
        self._check_flight(cells, lanes, "writes over")
        writer, low, high = self.writer[cells], self.low_reader[cells], self.high_reader[cells]
        race = (writer != NOBODY) & ~self._ordered(writer, writer, self.write_time[cells], lanes)
        if atomic:
            race &= writer != self.atomics
        if race.any():
            at = first(race)
            by = self._name(writer[at], writer[at])
            raise Race(f"writes over what {by} wrote with no barrier between", lanes[at])
        race = (high != NOBODY) & ~self._ordered(low, high, self.read_time[cells], lanes)
        if race.any():
            at = first(race)
            raise Race(f"writes over what {self._name(low[at], high[at])} read with no barrier between", lanes[at])

    def write(self, cells: np.ndarray, lanes: np.ndarray, atomic: bool = False) -> bool:
        """True if several lanes write to one cell at once, which only writes of one value may."""
        cells, lanes = one_by_one(cells, lanes)
        self._check_write(cells, lanes, atomic)
        self.writer[cells] = self.atomics if atomic else lanes
        self.write_time[cells] = self.now
        shared = self.writer[cells] != lanes
        if atomic or not shared.any():
            return False
        self.writer[cells[shared]] = self.several
        return True

    def begin_copy(self, cells: np.ndarray, lanes: np.ndarray) -> None:
        cells, lanes = one_by_one(cells, lanes)
        self._check_write(cells, lanes, atomic=False)
        self.writer[cells] = lanes
        if (shared := self.writer[cells] != lanes).any():
            raise Race("several threads copy to one place", lanes[first(shared)])
        self.write_time[cells] = NEVER
        self.in_flight[cells] = True

    def end_copy(self, cells: np.ndarray, lanes: np.ndarray) -> None:
        """The group was waited for: to the copying thread written now, to others from the next barrier on."""
        cells, lanes = one_by_one(cells, lanes)
        self.in_flight[cells] = False
        self.writer[cells] = lanes
        self.write_time[cells] = self.now
