"""The table that CI prints, from pytest-benchmark's JSON: python -m benchmarks.table bench.json [--markdown]"""

import argparse
import json
from pathlib import Path

from benchmarks.cuda import NOT_MEASURED, origin, recorded_seconds
from flash_numba.bench import ceilings
from flash_numba.bench.tables import markdown, milliseconds, percent, show

BASELINE = "NumPy one-shot"
CUDA_ROW = "CUDA"


def off_the_record(report: dict, shape: str, dtype: str) -> str:
    """What stands in a CUDA cell where there is no GPU: the time last recorded on one, marked, if there is any."""
    seconds = recorded_seconds(report["machine_info"]["flash_numba"]["recorded"], shape, dtype)
    return NOT_MEASURED if seconds is None else f"{milliseconds(seconds)} (recorded)"


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
            rows.append([shape, dtype, CUDA_ROW, off_the_record(report, shape, dtype), "", "", ""])
    return rows


DETAIL_HEADINGS = ["shape", "dtype", "backend", "ms", "GFLOP/s", "of the peak", "over NumPy one-shot"]


def side_by_side(report: dict) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: a shape a line, a backend a column, in milliseconds."""
    no_cuda = report["machine_info"]["flash_numba"]["no_cuda"]
    problems = measured(report)
    backends = list(dict.fromkeys(backend for entries in problems.values() for backend in entries))
    if CUDA_ROW not in backends:
        backends.append(CUDA_ROW)

    def cell(shape: str, dtype: str, backend: str) -> str:
        entry = problems[shape, dtype].get(backend)
        if entry is not None:
            return milliseconds(entry["stats"]["median"])
        return off_the_record(report, shape, dtype) if no_cuda and backend == CUDA_ROW else ""

    rows = [[shape, dtype, *(cell(shape, dtype, backend) for backend in backends)] for shape, dtype in problems]
    return ["shape", "dtype", *(f"{backend}, ms" for backend in backends)], rows


def about(report: dict) -> str:
    """The machine and the versions, in a line."""
    of = report["machine_info"]["flash_numba"]
    return (
        f"{ceilings.about(of)}; Python {of['python']}, Numba {of['numba']}, NumPy {of['numpy']}; "
        f"{of['gpu'] or of['no_cuda'] + '; ' + origin(of['recorded'])}"
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
