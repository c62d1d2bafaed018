"""The state spaces: global memory that the caller shares with the kernel, shared memory with its checks, local memory.

Each space loads and stores for some lanes at once: `addresses` and `lanes` are arrays with an entry a lane, values have
a column for each element of a vector access. An access that would be a fault on a device, or luck, is an exception.
"""

from __future__ import annotations

import numpy as np

from .errors import InFlight, Misaligned, OutOfBounds, Race, Uninitialised, first
from .races import NOBODY, Tracker

# Generic addresses of shared and local memory: windows where no host has memory of its own.
SHARED_WINDOW = 0x7F00_0000_0000_0000
LOCAL_WINDOW = 0x7E00_0000_0000_0000
WINDOW_BYTES = 1 << 32

ALIGNMENT = 256  # arrays keep their addresses modulo this
GAP = 1 << 16  # bytes between arrays that nobody may touch, at least: more than a tile of rows
POISON = 0xFF  # NaN in every float format

# What may be done with a byte of global memory.
READABLE, WRITABLE, WRITTEN, ONCE = 1, 2, 4, 8


def check_alignment(addresses: np.ndarray, size: int, lanes: np.ndarray) -> None:
    if size > 1 and (wrong := addresses & addresses.dtype.type(size - 1)).any():
        at = first(wrong)
        raise Misaligned(f"address {int(addresses[at]):#x} isn't a multiple of {size}", lanes[at])


class GlobalMemory:
    """Memory of the host that a kernel may use: arrays in one arena with forbidden bytes between them.

    An array that `place` returns is a NumPy array at the address that the kernel is given: no copy in or out.
    """

    def __init__(self, size: int = 1 << 24) -> None:
        size += -size % ALIGNMENT
        whole = np.zeros(size + ALIGNMENT, np.uint8)
        skip = -whole.ctypes.data % ALIGNMENT
        self.bytes = whole[skip : skip + size]
        self.state = np.zeros(size, np.uint8)
        self.base = self.bytes.ctypes.data
        self.top = GAP

    def place(self, array: np.ndarray, access: str = "read") -> np.ndarray:
        """A copy of `array`, with its strides and its address modulo 256, for the kernel to "read" or "update".

        "write": nothing can be read before it is written, nothing written twice; the array holds `POISON` till then.
        Bytes between the elements of a strided array are forbidden as well.
        """
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (self.base, self.base)
        start = self.top + (low - self.top) % ALIGNMENT
        offset = start + (array.__array_interface__["data"][0] - low if array.size else 0)
        self.top = start + (high - low) + GAP
        if self.top > len(self.bytes):
            raise MemoryError(f"the arena of {len(self.bytes)} bytes is full")
        state = np.lib.stride_tricks.as_strided(
            self.state[offset:], (*array.shape, array.itemsize), (*array.strides, 1), writeable=True
        )
        view = np.ndarray(array.shape, array.dtype, self.bytes, offset, array.strides)
        if array.size:
            state[...] = {"read": READABLE, "update": READABLE | WRITABLE, "write": WRITABLE | ONCE}[access]
            if access == "write":
                self.bytes[start : start + high - low] = POISON
            else:
                view[...] = array
        return view

    def reserve(self, size: int) -> int:
        """Address of `size` bytes that the kernel may write and then read: a workspace."""
        view = self.place(np.zeros(size, np.uint8), "update")
        offset = self.offset_of(view)
        self.state[offset : offset + size] = WRITABLE
        self.bytes[offset : offset + size] = POISON
        return self.base + offset

    def offset_of(self, view: np.ndarray) -> int:
        return view.__array_interface__["data"][0] - self.base

    def unwritten(self, view: np.ndarray) -> np.ndarray:
        """Which elements of a contiguous or strided array placed for "write" the kernel hasn't written."""
        state = np.lib.stride_tricks.as_strided(self.state[self.offset_of(view) :], view.shape, view.strides)
        return (state & WRITTEN) == 0

    def index(self, addresses: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        check_alignment(addresses, size, lanes)
        offsets = addresses - np.uint64(self.base)  # one below the base wraps round
        if (beyond := offsets > np.uint64(len(self.bytes) - size)).any():
            at = first(beyond)
            raise OutOfBounds(f"global address {int(addresses[at]):#x} is in no array", lanes[at])
        return offsets.astype(np.int64)

    def _checked(
        self, addresses: np.ndarray, dtype: np.dtype, count: int, lanes: np.ndarray, need: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size = dtype.itemsize * count
        index = self.index(addresses, size, lanes) // size
        states = self.state.view(f"u{dtype.itemsize}").reshape(-1, count)
        found = states[index]
        every = found.dtype.type(need * (0x0101010101010101 >> (64 - 8 * dtype.itemsize)))
        if (lacking := (found & every) != every).any():
            at = first(lacking)
            known = found[at].view(np.uint8)
            what = f"{size} bytes at global address {int(addresses[at]):#x}"
            if need == WRITABLE:
                raise OutOfBounds(f"write of {what}: read-only, or in no array", lanes[at])
            if known.all():
                raise Uninitialised(f"read of {what}: never written", lanes[at])
            raise OutOfBounds(f"read of {what}: in no array", lanes[at])
        return index, states, found

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int, lanes: np.ndarray) -> np.ndarray:
        index, _, _ = self._checked(addresses, dtype, count, lanes, READABLE)
        return self.bytes.view(dtype).reshape(-1, count)[index]

    def store(self, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray, atomic: bool = False) -> None:
        count = values.shape[1]
        index, states, found = self._checked(addresses, values.dtype, count, lanes, WRITABLE)
        twice = found & found.dtype.type(ONCE | WRITTEN)
        if not atomic and (wrong := twice == ONCE | WRITTEN).any():
            at = first(wrong)
            raise Race(f"a second write to global address {int(addresses[at]):#x}", lanes[at])
        each = found.dtype.type((READABLE | WRITTEN) * (0x0101010101010101 >> (64 - 8 * values.itemsize)))
        states[index] = found | each
        self.bytes.view(values.dtype).reshape(-1, count)[index] = values


class SharedMemory:
    """Shared memory of several thread blocks, `size` bytes each, at addresses from 0 in each."""

    def __init__(self, blocks: int, threads: int, size: int, cell: int) -> None:
        self.size, self.threads, self.cell = size, threads, cell
        self.stride = max(ALIGNMENT, size + -size % ALIGNMENT)
        self.bytes = np.full(blocks * self.stride, POISON, np.uint8)
        self.tracker = Tracker(blocks, threads, self.stride // cell)
        # cp.async writes under way: lanes, the group of each, where to, and what
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.groups = np.zeros(blocks * threads, np.int64)  # how many groups each lane has committed

    def index(self, addresses: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        check_alignment(addresses, size, lanes)
        if (beyond := addresses > np.uint64(max(self.size - size, 0))).any() or size > self.size:
            at = first(beyond) if beyond.any() else 0
            what = f"{size} bytes at shared address {int(addresses[at]):#x}"
            raise OutOfBounds(f"{what}: a block has {self.size} bytes", lanes[at])
        return addresses.astype(np.int64) + lanes // self.threads * self.stride

    def cells(self, index: np.ndarray, size: int) -> np.ndarray:
        """The tracker's cells of an access, a row a lane."""
        return (index // self.cell)[:, None] + np.arange(size // self.cell)

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int, lanes: np.ndarray) -> np.ndarray:
        size = dtype.itemsize * count
        index = self.index(addresses, size, lanes)
        self.tracker.read(self.cells(index, size), lanes)
        return self.bytes.view(dtype).reshape(-1, count)[index // size]

    def store(self, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray, atomic: bool = False) -> None:
        count, size = values.shape[1], values.itemsize * values.shape[1]
        index = self.index(addresses, size, lanes)
        several = self.tracker.write(self.cells(index, size), lanes, atomic)
        memory = self.bytes.view(values.dtype).reshape(-1, count)
        memory[index // size] = values
        if several:
            bits = values.view(f"u{values.itemsize}")
            kept = self.bytes.view(bits.dtype).reshape(-1, count)[index // size]
            if (lost := kept != bits).any():
                raise Race("several threads write different values to one place", lanes[first(lost)])

    def load_atomically(self, addresses: np.ndarray, dtype: np.dtype, lanes: np.ndarray) -> np.generic:
        """What one lane's atomic operation finds: the tracker hears of it by the store that follows."""
        index = self.index(addresses, dtype.itemsize, lanes)
        if (self.tracker.writer[self.cells(index, dtype.itemsize)] == NOBODY).any():
            raise Uninitialised("an atomic operation on shared memory that was never written", lanes[0])
        return self.bytes.view(dtype)[index // dtype.itemsize][0]

    # ---- asynchronous copies

    def begin_copy(self, addresses: np.ndarray, data: np.ndarray, lanes: np.ndarray) -> None:
        """cp.async: `data` (lanes, bytes) will be there once the group is waited for."""
        size = data.shape[1]
        index = self.index(addresses, size, lanes)
        self.tracker.begin_copy(self.cells(index, size), lanes)
        self.bytes.reshape(-1, size)[index // size] = POISON
        self.copies.append((lanes, self.groups[lanes], index, data))

    def wait_for_copies(self, lanes: np.ndarray, but: int) -> None:
        """cp.async.wait_group: all groups of these lanes but the `but` latest are complete; -1: really all copies."""
        waiting = np.zeros(len(self.groups), bool)
        waiting[lanes] = True
        remaining = []
        for owners, groups, index, data in self.copies:
            done = waiting[owners] & (groups < self.groups[owners] - but)
            if done.any():
                size = data.shape[1]
                self.tracker.end_copy(self.cells(index[done], size), owners[done])
                self.bytes.reshape(-1, size)[index[done] // size] = data[done]
            if not done.all():
                left = ~done
                remaining.append((owners[left], groups[left], index[left], data[left]))
        self.copies = remaining

    def check_finished(self) -> None:
        """A block that ends while its copies are under way may overwrite the next one's memory."""
        if self.copies:
            raise InFlight("a thread ends with a cp.async that it never waited for", self.copies[0][0][0])


class LocalMemory:
    """Each lane's own memory."""

    def __init__(self, lanes: int, size: int) -> None:
        self.size = size
        self.stride = size + -size % 16
        self.bytes = np.full(lanes * self.stride, POISON, np.uint8)
        self.written = np.zeros(lanes * self.stride, bool)

    def index(self, addresses: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        check_alignment(addresses, size, lanes)
        if (beyond := addresses > np.uint64(max(self.size - size, 0))).any() or size > self.size:
            at = first(beyond) if beyond.any() else 0
            raise OutOfBounds(f"local address {int(addresses[at]):#x}: a thread has {self.size} bytes", lanes[at])
        return addresses.astype(np.int64) + lanes * self.stride

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int, lanes: np.ndarray) -> np.ndarray:
        size = dtype.itemsize * count
        index = self.index(addresses, size, lanes) // size
        if (missing := ~self.written.reshape(-1, size)[index]).any():
            raise Uninitialised("read of local memory that was never written", lanes[first(missing)])
        return self.bytes.view(dtype).reshape(-1, count)[index]

    def store(self, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray, atomic: bool = False) -> None:
        count, size = values.shape[1], values.itemsize * values.shape[1]
        index = self.index(addresses, size, lanes) // size
        self.written.reshape(-1, size)[index] = True
        self.bytes.view(values.dtype).reshape(-1, count)[index] = values
