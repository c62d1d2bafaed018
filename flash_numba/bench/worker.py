"""A library in a process of its own: `python -m flash_numba.bench.worker LIBRARY THREADS`.

It speaks JSON, a line a message. First it says `{"version": ...}`, or `{"missing": why}` and ends. Then it answers

    {"prepare": [*shape, dtype]}   {"peak_bytes": ..., "error": ...} once the problem is ready, or {"refused": why}
    {"turn": null}                 {"seconds": ...} of a call: the mean of as many as fill a few milliseconds
    {"errors": null}               {"max": ..., "rms": ...} against float64 on the problem itself

and ends when its input does.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from . import baselines
from .peers import LIBRARIES, Call, Prepare, Refused, in_one
from .shapes import DTYPES, Shape

# What a timed turn takes at least, so that neither the clock's step nor the way there and back counts.
TURN_SECONDS = 5e-3
# Calls shorter than this come after an untimed one: threads sleep and caches hold another library's arrays when a turn
# begins, which is no part of the figure, nor of the ceiling's.
WARM_BELOW = 50e-3
# How long to wait at most for a library's threads to fall asleep after its turn.
SETTLED_WITHIN = 0.2

# A library whose result is further from the exact one computes something else. Wide enough for sums kept in 16 bits.
ERROR_AT_MOST = {"float64": 1e-6, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}


class Turns:
    """A library with one problem at a time in front of it."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._call: Call | None = None
        self._problem: tuple[Shape, str] | None = None
        self._once = 0.0

    def prepare(self, shape: Shape, dtype: str) -> dict[str, Any]:
        """Get ready for a problem: the peak memory of its first call, and the error of a small one of its kind."""
        self._call = None  # its memory goes before the next one's comes
        try:
            error = check(self._prepare, shape.small(), dtype)
            call = self._prepare(shape, dtype)
            peak = peak_memory(call.run, shape.result_bytes(DTYPES[dtype]))
        except Refused as why:
            return {"refused": str(why)}
        except Exception as error:  # whatever a library raises for what it doesn't take
            return {"refused": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        self._call, self._problem, self._once = call, (shape, dtype), seconds(call.run)
        return {"peak_bytes": peak, "error": error}

    def turn(self) -> dict[str, Any]:
        assert self._call is not None
        run = self._call.run
        if self._once < WARM_BELOW:
            run()
        repeats = max(1, int(TURN_SECONDS / self._once))
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        taken = time.perf_counter() - start
        settle()
        return {"seconds": taken / repeats}

    def errors(self) -> dict[str, Any]:
        """The largest error of the problem's output, and the root of the mean of the squares."""
        assert self._call is not None
        assert self._problem is not None
        off = difference(self._call, *self._problem)
        return {"max": float(np.abs(off).max()), "rms": float(np.sqrt(np.mean(off**2)))}


def settle() -> None:
    """Wait until this process's threads sleep: a pool that spins on would take the cores from whoever is next.

    OpenBLAS's does for 25 ms, whatever the environment says about others.
    """
    deadline = time.perf_counter() + SETTLED_WITHIN
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(2e-3)
        if time.process_time() - before < 2e-4:
            return


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def check(prepare: Prepare, shape: Shape, dtype: str) -> float:
    """The largest error against float64 on a small problem, which also compiles what later calls use."""
    error = float(np.abs(difference(prepare(shape, dtype), shape, dtype)).max())
    if not error <= ERROR_AT_MOST[dtype]:
        raise Refused(f"its result is off by {error:.1e}")
    return error


def difference(call: Call, shape: Shape, dtype: str) -> np.ndarray:
    """A call's output, or gradients, less the exact ones."""
    q, k, v = (x.astype(np.float64) for x in shape.inputs(DTYPES[dtype]))
    if shape.gradient:
        dout = shape.dout(DTYPES[dtype]).astype(np.float64)
        exact = in_one(baselines.one_shot_grad(q, k, v, dout, shape.causal))
    else:
        exact = baselines.one_shot(q, k, v, shape.causal)
    return call.as_array(call.run()).astype(np.float64) - exact


def peak_memory(run: Callable[[], Any], result_bytes: int) -> int | None:
    """Bytes that a call needs at its peak over those in use before it, its result left out; None but on Linux.

    The first call of its size: later ones find the scratch that many libraries keep.
    """
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        run()
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: what is free goes back, or the call would take it unseen
    try:
        clear.write_text("5")  # the peak starts anew
    except OSError:
        run()
        return None
    before = status("VmRSS")
    run()
    return max(0, status("VmHWM") - before - result_bytes)


def status(name: str) -> int:
    """A line of the process's memory figures, in bytes."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def serve(library: str, threads: int, questions: TextIO, answers: TextIO) -> None:
    """Answer questions until there are no more."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        version, prepare = LIBRARIES[library](threads)
    except ImportError as missing:
        say({"missing": str(missing)})
        return
    say({"version": version})
    turns = Turns(prepare)
    for line in questions:
        ((kind, about),) = json.loads(line).items()
        if kind == "prepare":
            *shape, dtype = about
            say(turns.prepare(Shape(*shape), dtype))
        else:
            say({"turn": turns.turn, "errors": turns.errors}[kind]())


def main() -> None:
    warnings.simplefilter("ignore")  # of other libraries, to people who can't change them
    # Libraries print when they like: only answers go to the driver, the rest to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    library, threads = sys.argv[1:]
    serve(library, int(threads), sys.stdin, answers)


if __name__ == "__main__":
    main()
