"""What this machine can do at most: multiply-adds a second, and bytes read from memory a second.

A speed means little without them: shared machines change theirs from minute to minute. So every benchmark measures the
ceiling next to its own figure, and the measurement is short (a tenth of a second).
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import overload

from ..cpu.compile import MATH
from ..cpu.ir.memory import load, pointer_to, store
from ..cpu.ir.registers import CPU_NAME, REGISTER_TILE

# Below this, the two virtual cores are on one physical core, and figures of that period don't count.
TWO_THREADS_AT_LEAST = 1.7
# How many seconds of that to sit out.
PATIENCE = 60

GIB = 2**30


# --- multiply-adds ----------------------------------------------------------------------------------------------------

# The rows of lanes that the kernels' register tile accumulates in. They are independent, and their registers are no
# fewer than latency times issue width on any CPU today (4 x 2 on x86, 4 x 4 on Apple's), so none waits for another.
ROWS = tuple(range(REGISTER_TILE.rows))


def load_rows(state, rows):
    """The rows of lanes as a tuple. Numba unrolls no loop over values that differ in type; it takes tuples apart."""
    raise NotImplementedError


def multiply_add(values):
    """x / 2 + 1/4 of each row: one fused multiply-add a register."""
    raise NotImplementedError


def store_rows(values, state, rows):
    """Write the rows back, without which LLVM would drop the work."""
    raise NotImplementedError


@overload(load_rows, jit_options=MATH)
def _load_rows(state, rows):
    if len(rows) == 1:
        return lambda state, rows: (load(state, rows[0]),)
    return lambda state, rows: (load(state, rows[0]),) + load_rows(state, rows[1:])  # noqa: RUF005 Numba has no *


@overload(multiply_add, jit_options=MATH)
def _multiply_add(values):
    if len(values) == 1:
        return lambda values: (values[0] * 0.5 + 0.25,)
    return lambda values: (values[0] * 0.5 + 0.25,) + multiply_add(values[1:])  # noqa: RUF005


@overload(store_rows, jit_options=MATH)
def _store_rows(values, state, rows):
    if len(values) == 1:
        return lambda values, state, rows: store(values[0], state, rows[0])

    def first_and_rest(values, state, rows):
        store(values[0], state, rows[0])
        store_rows(values[1:], state, rows[1:])

    return first_and_rest


@cache
def fma_chains(dtype: np.dtype) -> tuple[Any, int, int]:
    """`(run, chains, lanes)`: `run(state, rounds)` does x = x / 2 + 1/4 `rounds` times on each lane of each chain.

    It runs on the lane type that the kernels are made of, so it compiles to what they could reach at most: a loop of
    nothing but multiply-adds on registers.
    """
    real = numba.from_dtype(dtype)
    pointer = pointer_to(real)

    @njit(types.void(types.Array(real, 2, "C"), types.intp), nogil=True, **MATH)
    def run(state, rounds):
        rows = pointer(state.ctypes.data)
        values = load_rows(rows, ROWS)
        for _ in range(rounds):
            values = multiply_add(values)
        store_rows(values, rows, ROWS)

    return run, REGISTER_TILE.rows, REGISTER_TILE.width(real)


def fma_peak(threads: int = 1, dtype: Any = np.float32, seconds: float = 0.02, repeats: int = 5) -> float:
    """GFLOP/s of nothing but fused multiply-adds on so many threads: the best of `repeats` runs of about `seconds`."""
    run, chains, lanes = fma_chains(np.dtype(dtype))
    states = np.full((threads, chains, lanes), 0.5, dtype)
    rounds = 100_000
    run(states[0], rounds)
    rounds = max(rounds, int(rounds * seconds / run_together(lambda _: run(states[0], rounds), 1)))
    best = min(run_together(lambda thread: run(states[thread], rounds), threads) for _ in range(repeats))
    return 2e-9 * chains * lanes * rounds * threads / best


# --- reading ----------------------------------------------------------------------------------------------------------


@njit("uint64(uint64[::1])", nogil=True)
def read(words):
    """The sum of an array: integers, so that the compiler may add in any order, and the work is all reading."""
    total = np.uint64(0)
    for word in words:
        total += word
    return total


def read_bandwidth(threads: int = 1, nbytes: int = GIB, repeats: int = 3) -> float:
    """GB/s of reading an array of `nbytes` once, in equal parts by so many threads: the best of `repeats` passes."""
    return read_speed(np.ones(nbytes // 8, np.uint64), threads, repeats)


def read_speed(words: np.ndarray, threads: int, repeats: int) -> float:
    """The same of an array of uint64 that is there already."""
    parts = np.array_split(words, threads)
    read(words[:8])
    best = min(run_together(lambda thread: read(parts[thread]), threads) for _ in range(repeats))
    return 1e-9 * words.nbytes / best


def run_together(work: Callable[[int], object], threads: int) -> float:
    """Run `work(thread)` on each of so many threads at once; seconds from the common start to the last one's end.

    Threads of our own, so that no pool of Numba's or of a BLAS is woken, and left spinning, by the measurement.
    """
    if threads == 1:
        start = time.perf_counter()
        work(0)
        return time.perf_counter() - start
    starts, ends = [0.0] * threads, [0.0] * threads
    barrier = threading.Barrier(threads)

    def timed(thread: int) -> None:
        barrier.wait()
        starts[thread] = time.perf_counter()
        work(thread)
        ends[thread] = time.perf_counter()

    crew = [threading.Thread(target=timed, args=(thread,)) for thread in range(threads)]
    for member in crew:
        member.start()
    for member in crew:
        member.join()
    return max(ends) - min(starts)


# --- the machine ------------------------------------------------------------------------------------------------------


def cpu_features() -> set[str]:
    """The instruction set extensions that Numba compiles for, in LLVM's words."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


def cpu_name() -> str:
    """The CPU's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What a figure depends on: the CPU and the versions that compiled for it."""
    words = ("avx512f", "avx512_bf16", "avx512bf16", "avx512fp16", "avx2", "fma", "f16c", "neon", "fullfp16", "bf16")
    features = cpu_features()
    return {
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "llvm_cpu": CPU_NAME,
        "simd": [word for word in words if word in features],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def about(of: dict[str, Any]) -> str:
    """A `machine()` in a line."""
    return f"{of['cpu']} ({of['llvm_cpu']}), {of['cores']} cores, {' '.join(of['simd'])}"


def measure(nbytes: int = GIB, threads: int | None = None) -> dict[str, Any]:
    """Every ceiling, on one thread and on `threads` (None: all): GFLOP/s by dtype, GB/s of reading."""
    counts = sorted({1, threads or cpu_count()})
    words = np.ones(nbytes // 8, np.uint64)
    return {
        "fma_gflops": {dtype: {count: fma_peak(count, dtype) for count in counts} for dtype in ("float32", "float64")},
        "read_gbps": {count: read_speed(words, count, 3) for count in counts},
        "read_bytes": nbytes,
    }
