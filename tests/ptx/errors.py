"""What the interpreter finds wrong with a kernel: one exception a kind, which knows where it happened."""

from __future__ import annotations

import numpy as np


class PTXError(RuntimeError):
    """A fault of a kernel. `line`, `instruction`, `thread` and `block` say where, as far as there is one place."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.lane = lane  # of the machine; becomes `thread` and `block`
        self.line: int | None = None
        self.instruction: str | None = None
        self.thread: tuple[int, int, int] | None = None
        self.block: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        place = []
        if self.thread is not None:
            place.append(f"thread {self.thread} of block {self.block}")
        if self.line is not None:
            place.append(f"PTX line {self.line}: {self.instruction}")
        return "; ".join([self.message, *place])


class Unsupported(PTXError):
    """The interpreter doesn't know this."""


class OutOfBounds(PTXError):
    """An address outside what may be read or written there."""


class Misaligned(PTXError):
    """An address that isn't a multiple of the size of the access."""


class Uninitialised(PTXError):
    """Memory read that was never written."""


class Divergence(PTXError):
    """A warp-wide instruction reached without some of the threads that take part in it."""


class Deadlock(PTXError):
    """Threads wait for others that never come."""


class Race(PTXError):
    """Shared memory accessed by two threads, one of them writing, with no barrier between; or written out twice."""


class InFlight(PTXError):
    """The target of a cp.async accessed before its group was waited for."""


def first(condition: np.ndarray) -> int:
    """Index of the first true element; for an array of several columns, of its row."""
    return int(np.flatnonzero(condition.reshape(len(condition), -1).any(axis=1))[0])
