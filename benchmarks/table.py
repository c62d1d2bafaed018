"""The table that CI prints, from pytest-benchmark's JSON: python -m benchmarks.table bench.json [--markdown]"""

import argparse
import json
from pathlib import Path

from flash_numba.bench import ceilings
from flash_numba.bench.tables import markdown, milliseconds, percent, show

BASELINE = "NumPy one-shot"
CUDA_ROW = "CUDA"


def word(reason: str) -> str:
    """What stands in a cell that couldn't be measured: "no GPU" of "no GPU: the driver finds no device"."""
    return reason.partition(":")[0]


def measured(report: dict) -> dict:
    """(shape, dtype) -> {backend: pytest-benchmark's entry}, in the order of the run."""
    problems: dict = {}
    for entry in report["benchmarks"]:
        about = entry["extra_info"]
        problems.setdefault((about["shape"], about["dtype"]), {})[about["backend"]] = entry
    return problems


def detail(report: dict) -> list[list[str]]:
    """One line a shape, dtype and backend: see DETAIL_HEADINGS."""
    no_cuda = report["machine_info"]["flash_numba"]["no_cuda"]
    rows = []
    for (shape, dtype), backends in measured(report).items():
        baseline = backends.get(BASELINE)
        for backend, entry in backends.items():
            about, median = entry["extra_info"], entry["stats"]["median"]
            ratio = f"{baseline['stats']['median'] / median:.2f}x" if baseline else ""
            speed = [f"{about['gflops']:.1f}", percent(about["share_of_peak"]), ratio]
            rows.append([shape, dtype, backend, milliseconds(median), *speed])
        if no_cuda and CUDA_ROW not in backends:
            rows.append([shape, dtype, CUDA_ROW, word(no_cuda), "", "", ""])
    return rows


DETAIL_HEADINGS = ["shape", "dtype", "backend", "ms", "GFLOP/s", "of the peak", "over NumPy one-shot"]


def side_by_side(report: dict) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: a shape a line, a backend a column, in milliseconds."""
    no_cuda = report["machine_info"]["flash_numba"]["no_cuda"]
    problems = measured(report)
    backends = list(dict.fromkeys(backend for entries in problems.values() for backend in entries))
    if CUDA_ROW not in backends:
        backends.append(CUDA_ROW)
    missing = {CUDA_ROW: word(no_cuda) if no_cuda else ""}
    rows = [
        [shape, dtype]
        + [
            milliseconds(entries[backend]["stats"]["median"]) if backend in entries else missing.get(backend, "")
            for backend in backends
        ]
        for (shape, dtype), entries in problems.items()
    ]
    return ["shape", "dtype", *(f"{backend}, ms" for backend in backends)], rows


def about(report: dict) -> str:
    """The machine and the versions, in a line."""
    of = report["machine_info"]["flash_numba"]
    return (
        f"{ceilings.about(of)}; Python {of['python']}, Numba {of['numba']}, NumPy {of['numpy']}; "
        f"{of['no_cuda'] or 'a GPU'}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.split(":")[0])
    parser.add_argument("report", type=Path, help="what pytest wrote with --benchmark-json")
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of a terminal's table")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text())
    headings, rows = side_by_side(report)
    if options.markdown:
        print(about(report), markdown(DETAIL_HEADINGS, detail(report), 3), markdown(headings, rows, 2), sep="\n\n")
        return
    print(about(report))
    show("Forward attention, medians", DETAIL_HEADINGS, detail(report), 3, group=2)
    show("Side by side", headings, rows, 2)


if __name__ == "__main__":
    main()
