"""The project's targets for the CPU forward, each next to what is measured here and now.

    python -m benchmarks.targets [--only speed,memory,...] [--rounds 7] [--json]

A speed is a share of the FMA peak of the same minute: every round measures the peak on one and on two threads next to
the kernel, and a round whose two threads reach less than 1.7 times one doesn't count (both cores were one then).
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

import flash_numba
from benchmarks.ceilings import PATIENCE, TWO_THREADS_AT_LEAST, cpu_count, fma_peak, machine
from benchmarks.shapes import DTYPES, LONG, MEMORY, Shape, square
from flash_numba import reference

ROOT = Path(__file__).resolve().parent.parent

THREADS = 2


class Result(NamedTuple):
    """One target: `value` None says that it couldn't be measured, and `note` why."""

    what: str
    value: float | None
    unit: str
    target: float
    at_least: bool
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def spread(values: list[float]) -> str:
    """How far the middle half of the rounds lies apart, where that passes 10 % of the median."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    apart = (upper - lower) / statistics.median(values)
    return f"spread {100 * apart:.0f} %" if apart > 0.1 else ""


def seconds(call, *arguments, **keywords) -> float:
    start = time.perf_counter()
    call(*arguments, **keywords)
    return time.perf_counter() - start


# --- speed ------------------------------------------------------------------------------------------------------------

SHARE_TARGETS = {False: 0.65, True: 0.55}
HALF_PRECISION_TARGET = 0.85


def speed(rounds: int) -> list[Result]:
    """Share of the two-thread FMA peak in float32, and the 16-bit types' speed over float32's."""
    cases = [(shape, dtype) for shape in LONG for dtype in ("float32", "float16", "bfloat16")]
    if min(cpu_count(), numba.config.NUMBA_NUM_THREADS) < THREADS:
        return speed_results(cases, [], [], 0, f"needs {THREADS} cores")
    numba.set_num_threads(THREADS)
    inputs = {dtype: LONG[0].inputs(DTYPES[dtype]) for dtype in DTYPES}

    def attend(case):
        shape, dtype = case
        return seconds(flash_numba.attention, *inputs[dtype], causal=shape.causal, backend="cpu")

    for case in cases:
        attend(case)
    times, peaks, dropped = [], [], 0
    while len(times) < rounds and dropped < PATIENCE:
        one, two = fma_peak(1), fma_peak(THREADS)
        if two < TWO_THREADS_AT_LEAST * one:
            dropped += 1
            time.sleep(1.0)  # such a period lasts a while
            continue
        times.append({case: attend(case) for case in cases})
        peaks.append(two)
    return speed_results(cases, times, peaks, dropped)


def speed_results(cases, times, peaks, dropped: int, reason: str = "") -> list[Result]:
    if len(times) < 2:
        reason = reason or f"{dropped} rounds under {TWO_THREADS_AT_LEAST} times one thread: the period doesn't count"
    results = []
    for shape, dtype in cases:
        if dtype == "float32":
            what = f"share of the FMA peak, {shape.name}, float32, {THREADS} threads"
            values = [1e-9 * shape.flops / taken[shape, dtype] / peak for taken, peak in zip(times, peaks, strict=True)]
            target = SHARE_TARGETS[shape.causal]
        else:
            what = f"{dtype} over float32 speed, {shape.name}"
            values = [taken[shape, "float32"] / taken[shape, dtype] for taken in times]
            target = HALF_PRECISION_TARGET
        if len(values) < 2:
            results.append(Result(what, None, "%", 100 * target, True, reason))
            continue
        notes = [spread(values)]
        if dtype == "float32":
            gflops = 1e-9 * shape.flops / statistics.median(taken[shape, dtype] for taken in times)
            notes.insert(0, f"{gflops:.0f} of {statistics.median(peaks):.0f} GFLOP/s")
        if dropped:
            notes.append(f"{dropped} rounds didn't count")
        note = ", ".join(filter(None, notes))
        results.append(Result(what, 100 * statistics.median(values), "%", 100 * target, True, note))
    return results


# --- fresh processes --------------------------------------------------------------------------------------------------


def fresh(code: str, **environment: str) -> str:
    """What a fresh Python prints that runs `code` in the repository's root."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process failed:\n{done.stderr}")
    return done.stdout.strip()


PEAK_MEMORY = """
import numpy as np, flash_numba
from benchmarks.shapes import MEMORY, square

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


def memory(rounds: int) -> list[Result]:
    """Peak resident memory of a long call over a tiny one in the same process, less the output (the inputs are there
    before). Everything that a long call needs first counts: scratch, threads, code loaded from the disk cache."""
    what, target = f"peak memory over inputs and output, {MEMORY.name}", 16.0
    if not Path("/proc/self/clear_refs").exists():
        return [Result(what, None, "MB", target, False, "needs Linux's /proc/self/clear_refs")]
    fresh(PEAK_MEMORY)  # fills the disk cache: compiling isn't part of the figure
    values = [1e-6 * int(fresh(PEAK_MEMORY)) for _ in range(3)]
    return [Result(what, statistics.median(values), "MB", target, False)]


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


def cache_in(folder: str) -> dict[str, str]:
    """The environment in which nothing is cached anywhere else."""
    return {"FLASH_NUMBA_CACHE_DIR": folder, "NUMBA_CACHE_DIR": folder}


def first_call(rounds: int) -> list[Result]:
    """A fresh process's first call: over Numba's own start with a warm disk cache, and outright with a cold one."""
    results = []
    for entry, shape in FIRST_CALLS.items():
        code = FIRST_CALL.format(shape=shape)
        cold = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(float(fresh(code, **cache_in(folder)).splitlines()[0]))
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
        results += [
            Result(f"first call ({entry}), warm disk cache, over Numba's start", first - start, "s", 0.3, False, note),
            Result(f"first call ({entry}), cold disk cache", statistics.median(cold), "s", 5.0, False),
        ]
    return results


# --- numbers ----------------------------------------------------------------------------------------------------------


def error(rounds: int) -> list[Result]:
    """The largest error against float64, over that of NumPy's one-shot formula in float32: the worst case."""
    worst, note = 0.0, ""
    # Long ones too: errors of sums grow with their length, and not alike in both.
    grouped = Shape("", 2, 4, 2, 100, 1000, 40, True)
    for shape in (*square(1, 8, 1024, 64), *square(1, 2, 4096, 64), square(1, 2, 2048, 128)[0], grouped):
        for logits, factor in (("standard normal", 1.0), ("large", 8.0)):
            q, k, v = shape.inputs()
            q = (factor * q).astype(np.float32)
            exact = reference.attention(q, k, v, causal=shape.causal)
            by_head = [np.repeat(x, shape.H // shape.H_kv, axis=1) for x in (k, v)]
            one_shot, _ = reference.one_shot_attention(q, *by_head, causal=shape.causal)
            ours = np.abs(flash_numba.attention(q, k, v, causal=shape.causal) - exact).max()
            numpys = np.abs(one_shot - exact).max()
            if ours / numpys > worst:
                worst = ours / numpys
                note = f"{ours:.1e} against {numpys:.1e}: {tuple(shape[1:])}, {logits} logits"
    return [Result("largest float32 error over NumPy's one-shot", worst, "x", 2.0, False, note)]


DIGESTS = """
from benchmarks.targets import digests
print(*digests())
"""


def digests() -> list[str]:
    """A digest of each output, over dtypes and causal; each is large enough that threads share it."""
    return [
        hashlib.sha256(flash_numba.attention(*inputs, causal=causal).tobytes()).hexdigest()
        for inputs, causal in bit_cases(1)
    ]


def bit_cases(batch: int):
    shape = square(8, 4, 1024, 64)[0]
    for dtype in ("float32", "float16", "bfloat16"):
        inputs = [x[:batch] for x in shape.inputs(DTYPES[dtype])]
        yield from ((inputs, causal) for causal in (False, True))


def same_bits(rounds: int) -> list[Result]:
    """How many outputs differ in any bit between one and two threads, and between a batch of one and of eight."""
    differ, compared = 0, 0
    most = numba.config.NUMBA_NUM_THREADS
    numba.set_num_threads(1)
    serial = digests()
    others = [fresh(DIGESTS, NUMBA_NUM_THREADS=count).split() for count in ("1", "2")]
    if most > 1:
        numba.set_num_threads(2)
        others.append(digests())
    numba.set_num_threads(most)
    for other in others:
        compared += len(other)
        differ += sum(a != b for a, b in zip(serial, other, strict=True))
    for inputs, causal in bit_cases(8):
        together = flash_numba.attention(*inputs, causal=causal)
        for item, batched in enumerate(together):
            alone = flash_numba.attention(*(x[item] for x in inputs), causal=causal)
            compared += 1
            differ += alone.tobytes() != batched.tobytes()
    note = f"{compared} comparisons: serial, 1 and 2 threads, batch of 1 and of 8"
    return [Result("outputs that differ in any bit", float(differ), "", 0.0, False, note)]


# --- the list ---------------------------------------------------------------------------------------------------------

GROUPS = {
    "speed": speed,
    "memory": memory,
    "error": error,
    "import": import_time,
    "first-call": first_call,
    "bits": same_bits,
}


def written(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.{0 if unit in ('%', '') else 2}f} {unit}".strip()


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(GROUPS), help=f"which of {', '.join(GROUPS)} (default all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 2 (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    groups = options.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only takes {', '.join(GROUPS)}; got {', '.join(sorted(unknown))}")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2; got {options.rounds}")

    progress = Console(stderr=True)
    results = []
    for group in groups:
        with progress.status(f"measuring: {group}"):
            results += GROUPS[group](options.rounds)
    about = machine()
    if options.json:
        rows = [{**result._asdict(), "met": result.met} for result in results]
        print(json.dumps({"machine": about, "results": rows}, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    title = f"{about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, Numba {about['numba']}"
    table = Table(title=title, title_justify="left")
    for heading in ("target", "measured", "wanted", "", "note"):
        table.add_column(heading, justify="right" if heading == "measured" else "left")
    for result in results:
        wanted = ("at least " if result.at_least else "at most ") + written(result.target, result.unit)
        table.add_row(result.what, written(result.value, result.unit), wanted, result.verdict, result.note)
    console.print(table)


if __name__ == "__main__":
    main()
