"""What a CUDA thread knows of itself and does together with the others of its block.

In Numba's simulator the names of `numba.cuda` mean something in the module of the kernel only; these do anywhere.
"""

import threading

from numba import cuda

from . import SIMULATED
from .primitives import device

SHARED_ALIGNMENT = None if SIMULATED else 16  # of shared memory, in bytes: what loads of vectors need

if SIMULATED:

    def thread_index():
        """The thread's number within its block."""
        return threading.current_thread().threadIdx.x

    def block_index():
        """The number of the thread's block."""
        return threading.current_thread().blockIdx.x

    def barrier():
        """Wait for all threads of the block; what they have written to memory before can be read then."""
        threading.current_thread().syncthreads()

    def barrier_or(x):
        """The same; whether the int32 isn't 0 in one of them."""
        return threading.current_thread().syncthreads_or(x)

    def publish():
        """Make what this thread has written known to other blocks before what it writes next."""

else:
    barrier, barrier_or = cuda.syncthreads, cuda.syncthreads_or

    @device
    def publish():
        cuda.threadfence()

    @device
    def thread_index():
        return cuda.threadIdx.x

    @device
    def block_index():
        return cuda.blockIdx.x
