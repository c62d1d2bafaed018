"""A PTX interpreter: runs the code that numba-cuda emits with NumPy, and checks what a GPU would not.

    memory = GlobalMemory()
    x, out = memory.place(x), memory.place(np.empty_like(x), "write")
    run(ptx, grid=(4, 1, 1), block=(128, 1, 1), arguments=[x.ctypes.data, out.ctypes.data], memory=memory)

The text is parsed (`parser.py`) and each instruction turned into a NumPy step over registers that hold a value a thread
(`registers.py`, `arithmetic.py`, `bits.py`, `convert.py`, `load_store.py`, `warp.py`, `tensor.py`; floating point in
`floats.py`); `machine.py` runs the steps for several thread blocks in lock step. `memory.py` checks bounds, alignment
and what was never written, `races.py` the order of accesses to shared memory. A fault is a `PTXError` that names the
instruction, its line, and a thread (`errors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import (
    Deadlock,
    Divergence,
    InFlight,
    Misaligned,
    OutOfBounds,
    PTXError,
    Race,
    Uninitialised,
    Unsupported,
)
from .machine import Counts, Machine
from .memory import GlobalMemory
from .parser import Kernel, parse

__all__ = [
    "Counts",
    "Deadlock",
    "Divergence",
    "GlobalMemory",
    "InFlight",
    "Kernel",
    "Machine",
    "Misaligned",
    "OutOfBounds",
    "PTXError",
    "Race",
    "Uninitialised",
    "Unsupported",
    "parse",
    "run",
]


def run(
    ptx: str | Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: bytes | Sequence[int | float | np.generic],
    memory: GlobalMemory,
    *,
    shared_bytes: int = 0,
    at_once: int = 8,
) -> Counts:
    """Launch the only kernel of a module, with `shared_bytes` of dynamic shared memory.

    `arguments` are numbers, one a parameter, or the bytes of the whole parameter block. `at_once` thread blocks run
    together, then the next ones.
    """
    if isinstance(ptx, str):
        (ptx,) = parse(ptx).values()
    at_once = min(at_once, max(1, int(np.prod(grid))))
    return Machine(ptx, block, shared_bytes, at_once).launch(grid, arguments, memory)
