"""From a kernel in Python to PTX and machine code, for any compute capability, with or without a GPU or a driver."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numba import cuda, types

from .arguments import ARGUMENTS, NAMES, Arguments


class Kernel(NamedTuple):
    """One specialisation of a kernel, and how it is launched."""

    name: str  # of the specialisation: the same name is the same code
    function: Callable[[Any], None]  # takes one `Arguments`
    threads: int  # of a thread block
    shared_bytes: int  # of dynamic shared memory
    grid: Callable[[Any], tuple[int, int, int]]  # thread blocks, of an `ARGUMENTS` record
    rows: int  # query rows of a thread block: of a table of work tiles
    blocks: int = 1  # thread blocks that a multiprocessor should hold at least: bounds the registers of a thread


def _numba_type(dtype: np.dtype) -> types.Type:
    if dtype.subdtype:
        base, (count,) = dtype.subdtype
        return types.UniTuple(_numba_type(base), count)
    return types.float64 if dtype.kind == "f" else types.int64


SIGNATURE = (types.NamedTuple([_numba_type(ARGUMENTS[name]) for name in NAMES], Arguments),)

ENTRY = "attend"  # what every kernel is called in its PTX; numba-cuda's own name spells the whole signature
_lock = threading.RLock()


class _Target(NamedTuple):
    """Stands for a device where numba-cuda asks the current one for its compute capability only."""

    compute_capability: tuple[int, int]


@contextmanager
def compiling_for(cc: tuple[int, int]) -> Iterator[None]:
    """What numba-cuda lacks to compile without a device, supplied for the time of a compile and then taken away.

    A function called from a kernel is compiled for the current device's capability, so one is needed even for PTX.
    numba-cuda 0.30 registers `np.row_stack`, which NumPy 2.5 has no more.
    """
    from numba.cuda import dispatcher

    missing = {} if hasattr(np, "row_stack") else {"row_stack": np.vstack}
    with _lock, patch.object(dispatcher, "get_current_device", lambda: _Target(cc)), patch.dict(np.__dict__, missing):
        yield


def to_ptx(kernel: Kernel, cc: tuple[int, int]) -> str:
    """The kernel's PTX for a compute capability.

    Without numba-cuda's `fastmath`: it lets LLVM assume that there is no infinity and no NaN, which the recurrence
    stands on. What it would gain is had otherwise: multiplications and additions are fused as they are (`fma`), and
    exp2 and log2 are the approximate instructions (`primitives.py`).
    """
    with compiling_for(cc):
        ptx, _ = cuda.compile(
            kernel.function,
            SIGNATURE,
            device=False,
            abi="numba",
            cc=cc,
            launch_bounds=(kernel.threads, kernel.blocks),
        )
    (name,) = re.findall(r"\.entry\s+([\w$]+)", ptx)
    return ptx.replace(name, ENTRY)


def architecture(cc: tuple[int, int]) -> str:
    """`sm_90` for (9, 0)."""
    return f"sm_{cc[0]}{cc[1]}"


class Assembled(NamedTuple):
    """Machine code, and what the assembler says of it."""

    cubin: bytes
    log: str


def find_assembler() -> str | None:
    """Where `ptxas` is: of the nvidia-cuda-nvcc package, of CUDA_HOME, or on the search path."""
    places = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    package = importlib.util.find_spec("nvidia")
    places += sorted(map(str, (Path(p) / "cu13" for p in package.submodule_search_locations or ()))) if package else []
    for place in filter(None, places):
        if found := shutil.which("ptxas", path=str(Path(place) / "bin")):
            return found
    return shutil.which("ptxas")


def assemble(ptx: str, cc: tuple[int, int], *options: str) -> Assembled:
    """PTX to machine code by `ptxas`, without a GPU or a driver. RuntimeError if it isn't there or fails."""
    ptxas = find_assembler()
    if ptxas is None:
        raise RuntimeError("no ptxas found; it comes with `pip install nvidia-cuda-nvcc`")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={architecture(cc)}", *options, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas failed for {architecture(cc)}: {log.strip()}")
        return Assembled(target.read_bytes(), log)
