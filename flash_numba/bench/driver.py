"""Asks the workers in turn, round after round, and takes the machine's ceilings in between.

One library runs at a time, so that a shared machine's good and bad minutes meet all of them alike, and every figure is
set against the ceiling, and against the other libraries, of its own round.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from .ceilings import PATIENCE, TWO_THREADS_AT_LEAST, cpu_count, fma_peak, read_speed
from .peers import LIBRARIES, OURS, threads_in_environment
from .shapes import DTYPES, Shape

T = TypeVar("T")
Problem = tuple[Shape, str]
Progress = Callable[[str], object]


class WorkerError(RuntimeError):
    """A library's process ended before its time."""


class UncountedError(RuntimeError):
    """The machine gave its two threads one core's worth: nothing measured then is a figure."""


class Worker:
    """A library in a process of its own; `version` is None where it can't be started, and `missing` says why."""

    def __init__(self, library: str, threads: int, passive: bool = True) -> None:
        environment = {**os.environ, **threads_in_environment(threads, passive)}
        for held_back in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # to an older CPU's kernels, which isn't its speed
            environment.pop(held_back, None)
        self.library = library
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flash_numba.bench.worker", library, str(threads)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the driver, which ends its workers
        )
        try:
            first = self._answer()
        except WorkerError as error:  # it died of its import
            first = {"missing": str(error)}
        self.version: str | None = first.get("version")
        self.missing: str = first.get("missing", "")

    def ask(self, kind: str, about: Any = None) -> dict[str, Any]:
        questions = stream(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it ended: the missing answer says so
            questions.write(json.dumps({kind: about}) + "\n")
            questions.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = stream(self.process.stdout).readline()
        if not answer:
            raise WorkerError(f"{self.library}'s process ended with exit status {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End it, in the middle of a call if need be."""
        with contextlib.suppress(BrokenPipeError):
            stream(self.process.stdin).close()
        self.process.terminate()
        self.process.wait()
        stream(self.process.stdout).close()


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


# --- figures ----------------------------------------------------------------------------------------------------------


def interquartile(values: Sequence[float]) -> float:
    """How far the middle half lies apart, as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / statistics.median(values)


@dataclass
class Measurement:
    """One problem: seconds a call of each library, round by round, and the ceiling of each round."""

    shape: Shape
    dtype: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    ceilings: list[float] = field(default_factory=list)  # GFLOP/s, or GB/s of reading as many bytes as K and V have
    peak_bytes: dict[str, int | None] = field(default_factory=dict)  # over inputs and output
    errors: dict[str, float] = field(default_factory=dict)  # against float64, on a small problem of the kind
    refused: dict[str, str] = field(default_factory=dict)  # why a library took no part
    counted: bool = True  # False: two threads had one core's worth

    @property
    def unit(self) -> str:
        return "GB/s" if self.shape.decoding else "GFLOP/s"

    @property
    def work(self) -> float:
        """1e9 FLOPs, or 1e9 bytes of K and V when decoding."""
        return 1e-9 * (self.shape.kv_bytes(DTYPES[self.dtype]) if self.shape.decoding else self.shape.flops)

    def median(self, library: str = OURS) -> float:
        return statistics.median(self.seconds[library])

    def spread(self, library: str = OURS) -> float:
        return interquartile(self.seconds[library])

    def speed(self, library: str = OURS) -> float:
        """In `unit`."""
        return self.work / self.median(library)

    def share(self, library: str = OURS) -> float:
        """Speed over the ceiling, the median of the rounds."""
        shares = zip(self.seconds[library], self.ceilings, strict=True)
        return statistics.median(self.work / taken / ceiling for taken, ceiling in shares)

    def ratio(self, library: str) -> float:
        """How many times as long as ours a library takes, the median of the rounds."""
        pairs = zip(self.seconds[library], self.seconds[OURS], strict=True)
        return statistics.median(other / own for other, own in pairs)

    def as_json(self) -> dict[str, Any]:
        libraries = {
            library: {
                "seconds": taken,
                "median": self.median(library),
                "spread": self.spread(library),
                "speed": self.speed(library),
                "share": self.share(library),
                "ratio": self.ratio(library) if OURS in self.seconds else None,
                "peak_bytes": self.peak_bytes.get(library),
                "error": self.errors.get(library),
            }
            for library, taken in self.seconds.items()
        }
        return {
            "shape": self.shape._asdict(),
            "dtype": self.dtype,
            "unit": self.unit,
            "ceilings": self.ceilings,
            "counted": self.counted,
            "libraries": libraries,
            "refused": self.refused,
        }


class Report(NamedTuple):
    """What a run measured: a `Measurement` a problem, each library's version, and why others are missing."""

    results: list[Measurement]
    versions: dict[str, str]
    missing: dict[str, str]


# --- rounds -----------------------------------------------------------------------------------------------------------


class Rounds:
    """Rounds in which the machine gives every thread a core; those in which it doesn't are waited out, or taken again.

    After more than `patience` of them in a row it gives up if `strict`; else `counted` is False from then on.
    """

    def __init__(self, threads: int, patience: int = PATIENCE, strict: bool = True) -> None:
        self.threads, self.patience, self.strict = threads, patience, strict
        self.dropped = 0
        self.counted = True
        self._in_a_row = 0

    def begin(self) -> float:
        """Wait until a round can count; the FMA peak of all threads then.

        Raises:
            UncountedError: it never could, if `strict`.
        """
        while (peak := self._peak()) is None:
            time.sleep(1.0)  # such a period lasts a while
        return peak

    def take(self, turns: Callable[[], T]) -> tuple[T, float]:
        """What `turns` returns in a round that counted from start to end, and the mean of the FMA peaks there.

        Raises:
            UncountedError: as `begin`.
        """
        while True:
            before = self.begin()
            result = turns()
            if (after := self._peak()) is not None:
                self._in_a_row = 0
                return result, (before + after) / 2

    def _peak(self) -> float | None:
        """The FMA peak of all threads, or None where they have fewer cores and that isn't to be put up with."""
        one, many = (fma_peak(count, seconds=0.01, repeats=3) for count in (1, self.threads))
        if self.threads == 1 or many >= TWO_THREADS_AT_LEAST * one or not self.counted:
            return many
        self.dropped += 1
        self._in_a_row += 1
        if self._in_a_row <= self.patience:
            return None
        if self.strict:
            raise UncountedError(
                f"{self.threads} threads reached under {TWO_THREADS_AT_LEAST} times one thread's FMA peak "
                f"{self._in_a_row} times in a row: this period doesn't count, measure again later"
            )
        self.counted = False
        return many


def measure(workers: dict[str, Worker], problem: Problem, count: int, rounds: Rounds) -> Measurement:
    """One problem by every worker, `count` times in turn, every other round the other way about.

    A peer whose process dies is taken out of `workers`.
    """
    shape, dtype = problem
    result = Measurement(shape, dtype)

    def ask(name: str, kind: str, about: Any = None) -> dict[str, Any]:
        try:
            return workers[name].ask(kind, about)
        except WorkerError as error:
            if name == OURS:
                raise
            workers.pop(name).close()
            result.seconds.pop(name, None)
            return {"refused": str(error)}

    for name in list(workers):
        answer = ask(name, "prepare", [*shape, dtype])
        if "refused" in answer:
            result.refused[name] = answer["refused"]
        else:
            result.peak_bytes[name], result.errors[name] = answer["peak_bytes"], answer["error"]
            result.seconds[name] = []
    words = np.ones(shape.kv_bytes(DTYPES[dtype]) // 8, np.uint64) if shape.decoding else None

    def turns() -> tuple[dict[str, float], float]:
        taken: dict[str, float] = {}
        for name in list(result.seconds)[:: -1 if len(result.ceilings) % 2 else 1]:
            answer = ask(name, "turn")
            if "refused" in answer:
                result.refused[name] = answer["refused"]
            else:
                taken[name] = answer["seconds"]
        return taken, 0.0 if words is None else read_speed(words, rounds.threads, repeats=5)

    while len(result.ceilings) < count:
        (taken, read), peak = rounds.take(turns)
        for name, seconds in taken.items():
            if name in result.seconds:
                result.seconds[name].append(seconds)
        result.ceilings.append(peak if words is None else read)
    result.counted = rounds.counted
    return result


def measure_all(
    problems: Iterable[Problem],
    libraries: Iterable[str] = LIBRARIES,
    count: int = 7,
    threads: int | None = None,
    patience: int = PATIENCE,
    strict: bool = True,
    passive: bool = True,
    progress: Progress = lambda words: None,
) -> Report:
    """Every problem by every library that is installed, this one first.

    Args:
        problems: (shape, name of the dtype).
        libraries: Names in `peers.LIBRARIES`.
        count: Rounds a problem.
        threads: Of every library and of the ceilings; None is all cores.
        patience: Seconds to wait for two threads to have two cores.
        strict: Whether to give up then, or to go on with figures that say so (`Measurement.counted`).
        passive: Whether idle threads sleep, or wait as each library likes: calls of microseconds then wake none.
        progress: Called with what is being done.

    Raises:
        UncountedError: the machine didn't have two cores for two threads, if `strict`.
        WorkerError: a library's process died.
    """
    problems, threads = list(problems), threads or cpu_count()
    rounds = Rounds(threads, patience, strict)
    workers: dict[str, Worker] = {}
    try:
        for name in dict.fromkeys((OURS, *libraries)):
            progress(f"starting {name}")
            workers[name] = Worker(name, threads, passive)
        present = {name: worker for name, worker in workers.items() if worker.version is not None}
        if OURS not in present:
            raise WorkerError(workers[OURS].missing)
        results = []
        for number, (shape, dtype) in enumerate(problems, 1):
            progress(f"{number} of {len(problems)}: {shape.name}, {dtype}")
            results.append(measure(present, (shape, dtype), count, rounds))
        versions = {name: worker.version or "" for name, worker in present.items()}
        missing = {name: worker.missing for name, worker in workers.items() if name not in present}
        return Report(results, versions, missing)
    finally:
        for worker in workers.values():
            worker.close()
