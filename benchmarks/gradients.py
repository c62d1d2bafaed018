"""How near the gradient is to the machine's limits and to torch's: the figures that issue 6 asks for."""

import hashlib

import numba
import numpy as np

import flash_numba
from benchmarks import limits
from benchmarks.processes import fresh
from benchmarks.verdicts import Result, in_turn
from flash_numba.bench.shapes import DTYPES, GRADIENT, Shape, square, with_gradient

THREADS = limits.THREADS
# One head alone, where torch has one work item for its threads.
LONG = "1x1x8192x64"


def backward_flops(shape: Shape) -> float:
    """The gradient's five products, 2.5 times the forward's two."""
    return 2.5 * shape._replace(gradient=False).flops


def speed(rounds: int) -> list[Result]:
    """Share of the FMA peak of the backward alone."""
    inputs = {}
    for shape in GRADIENT:
        q, k, v = shape.inputs()
        out, lse = flash_numba.attention(q, k, v, causal=shape.causal, return_lse=True)
        inputs[shape] = shape.dout(), q, k, v, out, lse
    calls = {
        shape.name: lambda shape=shape: flash_numba.attention_grad(*inputs[shape], causal=shape.causal)
        for shape in GRADIENT
    }
    numba.set_num_threads(THREADS)
    timed = in_turn(calls, rounds, THREADS)
    results = []
    for shape in GRADIENT:

        def shares(shape=shape) -> list[float]:
            turns = zip(timed.seconds[shape.name], timed.peaks, strict=True)
            return [100e-9 * backward_flops(shape) / taken / peak for taken, peak in turns]

        def note(shape=shape) -> str:
            taken = float(np.median(timed.seconds[shape.name]))
            gflops = 1e-9 * backward_flops(shape) / taken
            return f"{1e3 * taken:.4g} ms, {gflops:.0f} of {np.median(timed.peaks):.0f} GFLOP/s"

        target = None if shape.name.startswith(LONG) else 52 if shape.causal else 62
        what = f"share of the FMA peak, backward alone, {shape.name}"
        results.append(timed.result(what, shares, "%", target, True, note))
    return results


def over_torch(rounds: int) -> list[Result]:
    """Forward and backward together, over torch's."""
    results = limits.measured(GRADIENT, ("float32",), rounds, peers=["torch"])
    if isinstance(results, Result):
        return [results]
    return [limits.ahead_of("torch", result, 1.8 if result.shape.name.startswith(LONG) else 1.3) for result in results]


ERROR_SHAPES = with_gradient(*square(1, 4, 1024, 64), *square(4, 2, 512, 64), *square(1, 2, 1024, 128))


def errors(rounds: int) -> list[Result]:
    """Error of forward and backward against float64, over torch's on the same input: the worst shape."""
    return limits.errors_over_torch(ERROR_SHAPES, "gradient error", 2.0)


DIGESTS = """
from benchmarks.gradients import digests
print(*digests())
"""


def gradients_of(shape: Shape, dtype: str, batch: slice = slice(None)) -> flash_numba.Gradients:
    q, k, v, dout = (x[batch] for x in (*shape.inputs(DTYPES[dtype]), shape.dout(DTYPES[dtype])))
    out, lse = flash_numba.attention(q, k, v, causal=shape.causal, return_lse=True)
    return flash_numba.attention_grad(dout, q, k, v, out, lse, causal=shape.causal)


def bit_cases() -> list[tuple[Shape, str]]:
    """Many heads for the threads, and one that they share."""
    shapes = (*square(1, 4, 1024, 64), *square(1, 1, 2048, 64))
    return [(shape, dtype) for shape in shapes for dtype in ("float32", *limits.HALVES)]


def digests() -> list[str]:
    """A digest of the three gradients of each."""
    return [
        hashlib.sha256(b"".join(dx.tobytes() for dx in gradients_of(*case)[:3])).hexdigest() for case in bit_cases()
    ]


def same_bits(rounds: int) -> list[Result]:
    """How many gradients differ in any bit between one and two threads, and between a batch of one and of eight."""
    one, two = (fresh(DIGESTS, NUMBA_NUM_THREADS=count).split() for count in ("1", "2"))
    differ, compared = sum(a != b for a, b in zip(one, two, strict=True)), len(one)
    for dtype in ("float32", *limits.HALVES):
        for shape in square(8, 2, 512, 64):
            together = gradients_of(shape, dtype)
            for item in range(shape.B):
                alone = gradients_of(shape, dtype, slice(item, item + 1))
                for dx, of_all in zip(alone[:3], together[:3], strict=True):
                    compared += 1
                    differ += dx[0].tobytes() != of_all[item].tobytes()
    note = f"{compared} comparisons: 1 and 2 threads, batch of 1 and of 8"
    return [Result("gradients that differ in any bit", float(differ), "", 0.0, False, note)]
