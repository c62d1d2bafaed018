"""What `flash-numba bench` does, apart from its options."""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ceilings, tables
from .driver import Problem, Progress, Report, Rounds, measure_all
from .peers import PEERS
from .shapes import SETS

QUICK_ROUNDS, FULL_ROUNDS = 3, 7
QUICK_PATIENCE = 5  # seconds


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
    """The problems of a set: causal ones, others, or both."""
    return [
        (shape, dtype)
        for dtype in dtypes
        for shape in SETS[shapes]
        if causal is None or shape.causal == causal or (shape.decoding and not causal)
    ]


def measure(
    problems: list[Problem],
    peers: list[str],
    rounds: int,
    threads: int | None,
    patience: int,
    progress: Progress,
) -> dict[str, Any]:
    """Ceilings first, then every problem: `{"date", "machine", "threads", "rounds", "ceilings", "report"}`."""
    progress("the machine's ceilings")
    Rounds(threads or ceilings.cpu_count(), patience, strict=False).begin()  # in a period that counts, if there is one
    limits = ceilings.measure(threads=threads)
    report = measure_all(problems, peers, rounds, threads, patience, strict=False, progress=progress)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": ceilings.machine(),
        "threads": threads or ceilings.cpu_count(),
        "rounds": rounds,
        "ceilings": limits,
        "report": report,
    }


def headline(run: dict[str, Any]) -> list[str]:
    """The machine, its ceilings and the versions, a line each."""
    about, limits, report = run["machine"], run["ceilings"], run["report"]
    fma = [f"{name} {limit(peaks, 'GFLOP/s')}" for name, peaks in limits["fma_gflops"].items()]
    return [
        f"{ceilings.about(about)}, {about['system']}; Python {about['python']}, Numba {about['numba']}",
        f"ceilings: FMA {', '.join(fma)}; reading {limit(limits['read_gbps'], 'GB/s')}",
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]


def limit(by_threads: dict[int, float], unit: str) -> str:
    """ "117 GFLOP/s on 1 thread, 232 on 2"."""
    (first, value), *others = by_threads.items()
    more = "".join(f", {value:.3g} on {count}" for count, value in others)
    return f"{value:.3g} {unit} on {first} thread{'s' * (first > 1)}{more}"


def print_run(run: dict[str, Any]) -> None:
    report: Report = run["report"]
    print(*headline(run), sep="\n")
    by_dtype: dict[str, tables.Rows] = {}
    for result in report.results:
        by_dtype.setdefault(result.dtype, []).extend(tables.rows_of(result))
    for dtype, rows in by_dtype.items():
        title = f"{dtype}, {run['threads']} threads, medians of {run['rounds']} rounds in turn"
        tables.show(title, tables.HEADINGS, rows, text_columns=2, group=1)
    print(
        "of the ceiling: the FMA peak, or, decoding, reading K and V once. extra MB: a call's peak over inputs and "
        "output."
    )
    for line in tables.notes(report):
        print(line)


def as_json(run: dict[str, Any]) -> dict[str, Any]:
    report: Report = run["report"]
    return {
        **{key: value for key, value in run.items() if key != "report"},
        "versions": report.versions,
        "missing": report.missing,
        "results": [result.as_json() for result in report.results],
    }


def write_json(run: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(as_json(run), indent=1) + "\n")


def write_plot(run: dict[str, Any], path: Path) -> None:
    """Needs matplotlib."""
    from . import plot

    subtitle = f"{ceilings.about(run['machine'])}, {run['threads']} threads, {run['date']}"
    plot.draw(run["report"].results, run["ceilings"], path, subtitle)
