"""Where a call runs: on the CPU, on arrays in host memory, or on the GPU that its arrays lie on.

A place takes the arguments, allocates results and hands them back; the checks between (`arguments.py`) are the same
everywhere, as they look at shapes, dtypes and strides only.
"""

from typing import Any

import numpy as np

from .prepared import Prepared

INSTALL = 'pip install "flash_numba[cuda]" (CUDA 13, NVIDIA driver 580 or newer) or "flash_numba[cuda12]" (CUDA 12)'
NO_NUMBA_CUDA = f"numba-cuda isn't installed: {INSTALL}"
PLAIN = (type(None), np.ndarray, np.generic, bool, int, float, list, tuple)  # nothing of these lies on a GPU


class BackendError(RuntimeError):
    """The GPU can't be used; the message says why, and what would help."""


class Host:
    """The CPU."""

    array: type = np.ndarray  # what `take` gives

    def take(self, x: Any) -> Any:
        """An array argument as the checks take it."""
        return x

    def numbers(self, x: Any) -> Any:
        """An argument whose values are needed here: lengths, offsets, and numbers for each head."""
        return x

    def own(self, x: Any) -> Any:
        """A copy of what `take` gave."""
        return np.array(x)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return np.empty(shape, dtype)

    def copy(self, out: Any, source: Any) -> None:
        with np.errstate(over="ignore"):  # beyond a smaller format's range lies infinity, as in a kernel
            out[...] = source

    def give(self, array: Any) -> Any:
        """An array as the caller gets it."""
        return array

    def prepared(self, started: tuple[Any, Any, list], out: Any, lse: Any) -> Any:
        """What `started`, a call that was run, is run again with."""
        return Prepared(*started, out.shape, out.dtype, lse.shape, lse.dtype)


HOST = Host()


def choose(backend: str, **arrays: Any) -> Any:
    """The place for arrays, named as the arguments that they are.

    Raises:
        TypeError: arrays in host memory and on a GPU, of several libraries, or on a GPU for the backend "cpu".
        ValueError: arrays on several GPUs.
        BackendError: there is no GPU to use.
    """
    if backend != "cuda" and all(isinstance(x, PLAIN) for x in arrays.values()):
        return HOST
    from .gpu import place

    return place.choose(backend, arrays)
