"""What this machine can do at most: multiply-adds a second, and bytes read from memory a second.

A speed means little without them: shared machines change theirs from minute to minute. So every benchmark measures the
ceiling next to its own figure, and the measurement is short (a tenth of a second).

    python -m benchmarks.ceilings [--gib 1.0] [--json]
"""

import argparse
import json
import os
import platform
import threading
import time
from functools import cache
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# Below this, the two virtual cores are on one physical core, and figures of that period don't count.
TWO_THREADS_AT_LEAST = 1.7
# How many seconds of that to sit out.
PATIENCE = 60

GIB = 2**30


def cpu_features() -> set[str]:
    """The instruction set extensions that Numba compiles for, in LLVM's words."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


def vector_bytes() -> int:
    """Bytes of the widest vector register."""
    features = cpu_features()
    return 64 if "avx512f" in features else 32 if "avx" in features else 16


def vector_registers() -> int:
    """How many vector registers an instruction can name."""
    return 32 if "avx512f" in cpu_features() or platform.machine().lower() in ("arm64", "aarch64") else 16


@cache
def fma_chains(dtype: np.dtype):
    """`(run, chains, lanes)`: `run(state, rounds)` does x = x / 2 + 1/4 `rounds` times on each lane of each chain.

    A chain is one vector register that every round updates with one fused multiply-add. 12 or 24 of them are
    independent, more than latency times issue width on any CPU today (4 x 2 on x86, 4 x 4 on Apple's), and leave room
    for the two constants: nothing but FMAs runs, and none waits.
    """
    element = {"float32": ir.FloatType(), "float64": ir.DoubleType()}[dtype.name]
    lanes = vector_bytes() // dtype.itemsize
    chains = 3 * vector_registers() // 4
    vector = ir.VectorType(element, lanes)

    @intrinsic
    def advance(typingctx, state, rounds):
        def codegen(context, builder, signature, args):
            name = f"llvm.fma.v{lanes}f{8 * dtype.itemsize}"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
            half, quarter = (ir.Constant(vector, [value] * lanes) for value in (0.5, 0.25))
            array = context.make_array(signature.args[0])(context, builder, args[0])
            first = builder.bitcast(array.data, vector.as_pointer())
            places = [cgutils.gep_inbounds(builder, first, chain) for chain in range(chains)]
            registers = [cgutils.alloca_once(builder, vector) for _ in places]
            for place, register in zip(places, registers, strict=True):
                builder.store(builder.load(place, align=dtype.itemsize), register)
            with cgutils.for_range(builder, args[1]):
                for register in registers:
                    builder.store(builder.call(fma, [builder.load(register), half, quarter]), register)
            for place, register in zip(places, registers, strict=True):
                builder.store(builder.load(register), place, align=dtype.itemsize)
            return context.get_dummy_value()

        return types.void(state, types.intp), codegen

    @njit(types.void(types.Array(numba.from_dtype(dtype), 2, "C"), types.intp), nogil=True)
    def run(state, rounds):
        advance(state, rounds)

    return run, chains, lanes


@njit("uint64(uint64[::1])", nogil=True)
def read(words):
    """The sum of an array: integers, so that the compiler may add in any order, and the work is all reading."""
    total = np.uint64(0)
    for word in words:
        total += word
    return total


def run_together(work, threads: int) -> float:
    """Run `work(thread)` on each of so many threads at once; seconds from the common start to the last one's end.

    Threads of our own, so that no pool of Numba's or of a BLAS is woken, and left spinning, by the measurement.
    """
    if threads == 1:
        start = time.perf_counter()
        work(0)
        return time.perf_counter() - start
    starts, ends = [0.0] * threads, [0.0] * threads
    barrier = threading.Barrier(threads)

    def timed(thread):
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


def fma_peak(threads: int = 1, dtype=np.float32, seconds: float = 0.02, repeats: int = 5) -> float:
    """GFLOP/s of nothing but fused multiply-adds on so many threads: the best of `repeats` runs of about `seconds`."""
    run, chains, lanes = fma_chains(np.dtype(dtype))
    states = np.full((threads, chains, lanes), 0.5, dtype)
    rounds = 100_000
    run(states[0], rounds)
    rounds = max(rounds, int(rounds * seconds / run_together(lambda _: run(states[0], rounds), 1)))
    best = min(run_together(lambda thread: run(states[thread], rounds), threads) for _ in range(repeats))
    return 2e-9 * chains * lanes * rounds * threads / best


def read_bandwidth(threads: int = 1, nbytes: int = GIB, repeats: int = 3) -> float:
    """GB/s of reading an array of `nbytes` once, in equal parts by so many threads: the best of `repeats` passes."""
    words = np.ones(nbytes // 8, np.uint64)
    return read_speed(words, threads, repeats)


def read_speed(words: np.ndarray, threads: int, repeats: int) -> float:
    parts = np.array_split(words, threads)
    read(words[:8])
    best = min(run_together(lambda thread: read(parts[thread]), threads) for _ in range(repeats))
    return 1e-9 * words.nbytes / best


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


def machine() -> dict:
    """What a figure depends on: the CPU and the versions that compiled for it."""
    words = ("avx512f", "avx512_bf16", "avx512bf16", "avx512fp16", "avx2", "fma", "f16c", "neon", "fullfp16", "bf16")
    features = cpu_features()
    return {
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "llvm_cpu": cpu_target.target_context.codegen().magic_tuple()[1],
        "simd": [word for word in words if word in features],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def measure(nbytes: int = GIB) -> dict:
    """Every ceiling, on one thread and on all: GFLOP/s by dtype, GB/s of reading."""
    threads = sorted({1, cpu_count()})
    words = np.ones(nbytes // 8, np.uint64)
    return {
        "machine": machine(),
        "fma_gflops": {dtype: {count: fma_peak(count, dtype) for count in threads} for dtype in ("float32", "float64")},
        "read_gbps": {count: read_speed(words, count, 3) for count in threads},
        "read_bytes": nbytes,
    }


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceilings", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the array that is read (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    figures = measure(int(options.gib * GIB))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    about = figures["machine"]
    table = Table(title=f"{about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, {' '.join(about['simd'])}")
    table.add_column("ceiling")
    for count in figures["read_gbps"]:
        table.add_column(f"{count} thread" + "s" * (count > 1), justify="right")
    for dtype, peaks in figures["fma_gflops"].items():
        table.add_row(f"FMA, {dtype}, GFLOP/s", *(f"{peak:.1f}" for peak in peaks.values()))
    table.add_row(f"read {options.gib:g} GiB, GB/s", *(f"{speed:.1f}" for speed in figures["read_gbps"].values()))
    Console().print(table)


if __name__ == "__main__":
    main()
