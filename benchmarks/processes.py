"""What shows in fresh processes only: memory, the time to import, and the first call with a cold and a warm cache."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.verdicts import Result
from flash_numba.bench.shapes import MEMORY

ROOT = Path(__file__).resolve().parent.parent


def fresh(code: str, **environment: str) -> str:
    """What a fresh Python prints that runs `code` in the repository's root."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process failed:\n{done.stderr}")
    return done.stdout.strip()


# --- memory -----------------------------------------------------------------------------------------------------------

PEAK_MEMORY = """
import flash_numba
from flash_numba.bench.shapes import MEMORY, square

def peak_kb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

tiny = square(1, 1, 16, 64)[0].inputs()
inputs = MEMORY.inputs()
flash_numba.attention(*tiny)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
flash_numba.attention(*tiny)
before = peak_kb()
out = flash_numba.attention(*inputs)
print(1024 * (peak_kb() - before) - out.nbytes)
"""


GRADIENT_PEAK_MEMORY = """
import flash_numba
from flash_numba.bench.shapes import MEMORY, square
from flash_numba.bench.worker import status

def operands(shape):
    q, k, v = shape.inputs()
    return shape.dout(), q, k, v, *flash_numba.attention(q, k, v, return_lse=True)

tiny, long = operands(square(1, 1, 16, 64)[0]), operands(MEMORY)
flash_numba.attention_grad(*tiny)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
flash_numba.attention_grad(*tiny)
before = status("VmHWM")
gradients = flash_numba.attention_grad(*long)
print(status("VmHWM") - before - sum(dx.nbytes for dx in gradients[:3]))
"""


def memory(rounds: int) -> list[Result]:
    """Peak resident memory of a long call over a tiny one in the same process, less the output (the inputs are there
    before). Everything that a long call needs first counts: scratch, threads, code loaded from the disk cache."""
    return peak_of(PEAK_MEMORY, f"peak memory over inputs and output, {MEMORY.name}", 8.0)


def gradient_memory(rounds: int) -> list[Result]:
    """The same of the gradient, less the three gradients."""
    return peak_of(GRADIENT_PEAK_MEMORY, f"peak memory of the gradient over inputs and outputs, {MEMORY.name}", 32.0)


def peak_of(code: str, what: str, target: float) -> list[Result]:
    if not Path("/proc/self/clear_refs").exists():
        return [Result(what, None, "MB", target, False, "needs Linux's /proc/self/clear_refs")]
    fresh(code)  # fills the disk cache: compiling isn't part of the figure
    values = [1e-6 * int(fresh(code)) for _ in range(3)]
    return [Result(what, statistics.median(values), "MB", target, False)]


# --- import -----------------------------------------------------------------------------------------------------------

IMPORT = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def import_time(rounds: int) -> list[Result]:
    """How much longer `import flash_numba` takes than `import numba`, each in fresh processes, alternated."""
    taken: dict[str, list[float]] = {"numba": [], "flash_numba": []}
    for _ in range(rounds + 1):
        for module, values in taken.items():
            values.append(float(fresh(IMPORT.format(module=module))))
    # The first one of each read the files from disk.
    numba_alone, ours = (statistics.median(values[1:]) for values in taken.values())
    note = f"{ours:.3f} against {numba_alone:.3f} s"
    return [Result("import flash_numba over import numba", ours - numba_alone, "s", 0.15, False, note)]


# --- first calls ------------------------------------------------------------------------------------------------------

# What any program pays that compiles one function with Numba, however small.
NUMBA_START = """
import time
start = time.perf_counter()
import numba
numba.njit(lambda x: x + 1)(1)
print(time.perf_counter() - start)
"""

FIRST_CALL = """
import time
start = time.perf_counter()
import numpy as np, flash_numba
q = np.ones({shape}, np.float32)
flash_numba.attention(q, q, q)
print(time.perf_counter() - start)
from flash_numba.cpu.kernel_cache import log
print(*log, sep="\\n")
"""

# One that the serial entry takes, and one that is worth threads.
FIRST_CALLS = {"serial": (1, 1, 16, 64), "parallel": (1, 8, 512, 64)}

FURTHER_DTYPES = """
import time
import numpy as np, ml_dtypes, flash_numba
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
    q = np.ones((1, 8, 512, 64), dtype)
    start = time.perf_counter()
    flash_numba.attention(q, q, q)
    print(time.perf_counter() - start)
"""


def cache_in(folder: str) -> dict[str, str]:
    """The environment in which nothing is cached anywhere else."""
    return {"FLASH_NUMBA_CACHE_DIR": folder, "NUMBA_CACHE_DIR": folder}


def cold(code: str, times: int) -> list[list[float]]:
    """What a fresh process prints, in numbers, so many times, each with an empty disk cache."""
    printed = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            printed.append([float(line) for line in fresh(code, **cache_in(folder)).splitlines() if line[:1].isdigit()])
    return printed


def first_call(rounds: int) -> list[Result]:
    """A fresh process's first call: over Numba's own start with a warm disk cache, and outright with a cold one."""
    results = []
    for entry, shape in FIRST_CALLS.items():
        code = FIRST_CALL.format(shape=shape)
        with tempfile.TemporaryDirectory() as folder:
            fresh(code, **cache_in(folder))
            numba_alone, warm, logged = [], [], []
            for _ in range(rounds):
                numba_alone.append(float(fresh(NUMBA_START)))
                taken, *log = fresh(code, **cache_in(folder)).splitlines()
                warm.append(float(taken))
                logged.append(log)
        start, first = statistics.median(numba_alone), statistics.median(warm)
        hits = all(log and all(line.startswith("loaded") for line in log) for log in logged)
        found = f"{len(logged[0])} kernels from the cache" if hits else f"no cache hit: {logged[0]}"
        note = f"{first:.2f} against {start:.2f} s, {found}"
        outright = statistics.median(values[0] for values in cold(code, 3))
        results += [
            Result(f"first call ({entry}), warm disk cache, over Numba's start", first - start, "s", 0.2, False, note),
            Result(f"first call ({entry}), cold disk cache", outright, "s", 4.0, False),
        ]
    _, *further = zip(*cold(FURTHER_DTYPES, 3), strict=True)
    for dtype, values in zip(("float16", "bfloat16", "float64"), further, strict=True):
        seconds = statistics.median(values)
        results.append(Result(f"first {dtype} call after others, cold disk cache", seconds, "s", 2.5, False))
    return results
