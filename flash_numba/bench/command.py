"""What `flash-numba bench` does, apart from its options."""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import ceilings, tables
from .driver import Problem, Progress, Report, Rounds, measure_all
from .peers import PEERS
from .shapes import GRADIENT_SETS, SETS


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    patience: int  # seconds to wait for two threads to have two cores
    read_bytes: int  # of the array whose reading is the memory's ceiling


FULL = Effort(7, ceilings.PATIENCE, ceilings.GIB)
QUICK = Effort(3, 5, ceilings.GIB // 4)


def chosen_peers(words: str | None) -> list[str]:
    """Names from a list with commas; None is all, "none" none.

    Raises:
        ValueError: a name that isn't one.
    """
    if words is None:
        return list(PEERS)
    names = [] if words == "none" else [word.strip() for word in words.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"--peers takes {', '.join(PEERS)} or none, got {', '.join(map(repr, unknown))}")
    return names


def chosen_problems(shapes: str, dtypes: Iterable[str], causal: bool | None) -> list[Problem]:
    """The problems of a set: causal ones, others, or both. Decoding is in all: a mask hides nothing from one row."""
    return [
        (shape, dtype)
        for dtype in dtypes
        for shape in (*SETS.get(shapes, ()), *GRADIENT_SETS.get(shapes, ()))
        if causal is None or shape.decoding or shape.causal == causal
    ]


class Run(NamedTuple):
    """What was measured, and where."""

    date: str
    machine: dict[str, Any]
    threads: int
    rounds: int
    limits: dict[str, Any]  # `ceilings.measure`
    report: Report


def measure(
    problems: list[Problem], peers: list[str], effort: Effort, threads: int | None, passive: bool, progress: Progress
) -> Run:
    """The ceilings first, then every problem."""
    threads = threads or ceilings.cpu_count()
    progress("the machine's ceilings")
    Rounds(threads, effort.patience, strict=False).begin()  # in a period that counts, if there is one
    limits = ceilings.measure(effort.read_bytes, threads)
    report = measure_all(problems, peers, effort.rounds, threads, effort.patience, False, passive, progress)
    return Run(datetime.date.today().isoformat(), ceilings.machine(), threads, effort.rounds, limits, report)


def headline(run: Run) -> list[str]:
    """The machine, its ceilings and the versions, a line each."""
    about, limits = run.machine, run.limits
    fma = [f"{name} {limit(peaks, 'GFLOP/s')}" for name, peaks in limits["fma_gflops"].items()]
    return [
        f"{ceilings.about(about)}, {about['system']}; Python {about['python']}, Numba {about['numba']}",
        f"ceilings: FMA {', '.join(fma)}; reading {limit(limits['read_gbps'], 'GB/s')}",
        ", ".join(f"{name} {version}" for name, version in run.report.versions.items()),
    ]


def limit(by_threads: dict[int, float], unit: str) -> str:
    """ "117 GFLOP/s on 1 thread, 232 on 2"."""
    (first, value), *others = by_threads.items()
    more = "".join(f", {value:.3g} on {count}" for count, value in others)
    return f"{value:.3g} {unit} on {first} thread{'s' * (first > 1)}{more}"


def print_run(run: Run) -> None:
    """A table a dtype, and what the figures leave out."""
    print(*headline(run), sep="\n")
    by_dtype: dict[str, tables.Rows] = {}
    for result in run.report.results:
        by_dtype.setdefault(result.dtype, []).extend(tables.rows_of(result))
    for dtype, rows in by_dtype.items():
        title = f"{dtype}, {run.threads} thread{'s' * (run.threads > 1)}, medians of {run.rounds} rounds in turn"
        tables.show(title, tables.HEADINGS, rows, text_columns=2, group=1)
    print("of the ceiling: of the FMA peak or, decoding, of reading K and V once")
    print("extra MB: a call's peak memory over inputs and output")
    for line in tables.notes(run.report):
        print(line)


def as_json(run: Run) -> dict[str, Any]:
    """Every figure; times in seconds, ceilings in GFLOP/s and GB/s."""
    return {
        "date": run.date,
        "machine": run.machine,
        "threads": run.threads,
        "rounds": run.rounds,
        "ceilings": run.limits,
        "versions": run.report.versions,
        "missing": run.report.missing,
        "results": [result.as_json() for result in run.report.results],
    }


def write_json(run: Run, path: Path) -> None:
    path.write_text(json.dumps(as_json(run), indent=1) + "\n")


def write_plot(run: Run, path: Path) -> None:
    """Needs matplotlib."""
    from . import plot

    subtitle = f"{ceilings.about(run.machine)}, {run.threads} threads, {run.date}"
    plot.draw(run.report.results, run.limits, path, subtitle)
