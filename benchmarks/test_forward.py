"""Forward attention by every route over the shared shapes.

python -m pytest benchmarks -q --benchmark-json=bench.json
"""

import time

import numba
import numpy as np
import pytest

import flash_numba
from benchmarks.cuda import resident
from flash_numba.bench import baselines
from flash_numba.bench.ceilings import cpu_count, fma_peak
from flash_numba.bench.shapes import DTYPES, square

ROUNDS_AT_LEAST, ROUNDS_AT_MOST = 7, 50


def cpu(q, k, v, causal):
    return flash_numba.attention(q, k, v, causal=causal, backend="cpu")


def cuda(start, wait):
    """One call on arrays that are on the GPU already, and its end."""
    start()
    wait()


# Row of the table: what is called, and on how many threads (None: on a GPU, which no CPU ceiling bounds).
ROWS = {
    "NumPy one-shot": (baselines.one_shot, cpu_count()),
    "NumPy online": (baselines.online, cpu_count()),
    "CPU serial": (cpu, 1),
    "CPU parallel": (cpu, cpu_count()),
    "CUDA": (cuda, None),
}


@pytest.fixture
def all_threads_after():
    yield
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def measure(benchmark, shape, dtype, row, no_cuda):
    attend, threads = ROWS[row]
    if threads is None and no_cuda:
        pytest.skip(no_cuda)
    if threads is not None:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    inputs = shape.inputs(DTYPES[dtype])
    arguments = resident(*inputs, causal=shape.causal) if threads is None else (*inputs, shape.causal)
    attend(*arguments)
    start = time.perf_counter()
    attend(*arguments)
    once = time.perf_counter() - start
    # A round takes at least a millisecond, so that the clock's step and the round's own cost don't count.
    iterations = max(1, int(1e-3 / once))
    rounds = int(np.clip(0.5 / (once * iterations), ROUNDS_AT_LEAST, ROUNDS_AT_MOST))

    # The ceiling at the time of the figure: shared machines change theirs from minute to minute.
    peaks = [fma_peak(threads)] if threads else []
    benchmark.pedantic(attend, arguments, rounds=rounds, iterations=iterations)
    peaks += [fma_peak(threads)] if threads else []

    gflops = 1e-9 * shape.flops / benchmark.stats.stats.median
    peak = float(np.mean(peaks)) if threads else None
    benchmark.extra_info.update(
        shape=shape.name,
        backend=row,
        dtype=dtype,
        threads=threads,
        flops=shape.flops,
        gflops=gflops,
        peak_gflops=peak,
        share_of_peak=gflops / peak if peak else None,
    )


@pytest.mark.parametrize("row", ROWS)
def test_float32(benchmark, shape, row, no_cuda, all_threads_after):
    measure(benchmark, shape, "float32", row, no_cuda)


@pytest.mark.parametrize("row", ["CPU serial", "CPU parallel", "CUDA"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(benchmark, dtype, row, no_cuda, all_threads_after):
    measure(benchmark, square(1, 8, 1024, 64)[0], dtype, row, no_cuda)
