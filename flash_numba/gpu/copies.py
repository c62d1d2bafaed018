"""Copies from global to shared memory that run while the thread goes on; in Numba's simulator, made at once."""

import ctypes

from numba import types

from . import SIMULATED
from .ir import ptx
from .primitives import device

int32 = types.int32

if SIMULATED:

    def copy_chunk(shared, i, address, count):
        """16 bytes at an address to shared[i] and on, an int32 array: `count` of them, 0 to 16, and zeros."""
        line = bytearray(16)
        line[:count] = (ctypes.c_char * int(count)).from_address(int(address)).raw
        shared[i : i + 4] = memoryview(line).cast("i")

    def commit_copies():
        """Make a group of the copies started since the last one."""

    def wait_for_all_but_last_copies():
        """Wait for all groups of this thread except the newest. Others' copies are there only after a barrier."""

    def wait_for_copies():
        """Wait for all of them."""

else:
    commit_copies = ptx.commit_copies
    wait_for_copies = ptx.wait_for_copies
    wait_for_all_but_last_copies = ptx.wait_for_all_but_last_copies

    @device
    def copy_chunk(shared, i, address, count):
        ptx.copy_async(int32(ptx.shared_address(shared) + 4 * i), address, int32(count))
