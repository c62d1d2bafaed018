"""Measure, and write the README's performance section and its picture: python -m benchmarks.report README.md

Only what stands between the two marker comments is replaced, and nothing in it is written by hand. The figures are
those of `flash-numba bench`: each library in a process of its own, asked in turn, with the ceilings in between.
"""

import argparse
import datetime
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_numba.bench import ceilings, plot
from flash_numba.bench.command import chosen_peers, limit
from flash_numba.bench.driver import Measurement, Problem, Report, Rounds, UncountedError, measure_all
from flash_numba.bench.peers import OURS, PEERS
from flash_numba.bench.shapes import DECODE, GRADIENT, LENGTHS, LONG, MAIN
from flash_numba.bench.tables import markdown, milliseconds, percent, spread_note, times

ROOT = Path(__file__).resolve().parent.parent

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"

HALVES = ("float16", "bfloat16")
PREFILL: list[Problem] = [
    *((shape, "float32") for shape in MAIN),
    *((shape, dtype) for dtype in HALVES for shape in LONG),
]
DECODING: list[Problem] = [
    *((shape, "float32") for shape in DECODE),
    *((DECODE[1], dtype) for dtype in HALVES),
]
TRAINING: list[Problem] = [(shape, "float32") for shape in GRADIENT]
PICTURE: list[Problem] = [(shape, "float32") for shape in LENGTHS]

NAMES = {"numpy": "NumPy", "torch": "torch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "jax": "JAX"}


def cell(result: Measurement, library: str) -> str:
    """A peer's milliseconds, and how many times as fast we are."""
    if library not in result.seconds:
        return ""
    return f"{with_spread(result, library)} ({times(result.ratio(library))})"


def with_spread(result: Measurement, library: str) -> str:
    note = spread_note(result, library)
    return milliseconds(result.median(library)) + (f" {note}" if note else "")


def table(results: list[Measurement], peers: list[str], what: str, ceiling: str) -> str:
    """A line a problem: our time, speed and share of the ceiling, and each peer's time and ratio."""
    headings = [what, "dtype", f"{OURS}, ms", results[0].unit, ceiling]
    headings += [f"{NAMES.get(name, name)}, ms" for name in peers]
    rows = [
        [
            result.shape.name.removeprefix("decode-").removesuffix("-grad").replace("-causal", ", causal"),
            result.dtype,
            with_spread(result, OURS),
            f"{result.speed():.1f}",
            percent(result.share()),
            *(cell(result, name) for name in peers),
        ]
        for result in results
    ]
    return markdown(headings, rows, text_columns=2)


def over(results: list[Measurement], peers: list[str]) -> str:
    """The geometric mean over each peer, in words."""
    parts = []
    for name in peers:
        ratios = [result.ratio(name) for result in results if name in result.seconds]
        if ratios:
            parts.append(f"{times(statistics.geometric_mean(ratios))} over {NAMES.get(name, name)}")
    return ", ".join(parts)


def section(
    report: Report, limits: dict[str, Any], about: dict[str, Any], threads: int, rounds: int, date: str, picture: str
) -> str:
    """The Markdown between the markers, markers left out."""
    peers = [name for name in report.versions if name != OURS]
    training = [result for result in report.results if result.shape.gradient]
    prefill = [result for result in report.results if not (result.shape.decoding or result.shape.gradient)]
    decoding = [result for result in report.results if result.shape.decoding]
    single = [result for result in prefill if result.dtype == "float32"]
    others = ", ".join(f"{NAMES.get(name, name)} {report.versions[name]}" for name in peers)
    intro = (
        f"Measured on {date}: {ceilings.about(about)}, {about['system']}, {threads} threads, Python {about['python']}, "
        f"Numba {about['numba']}; against {others}. Ceilings: float32 FMA "
        f"{limit(limits['fma_gflops']['float32'], 'GFLOP/s')}; reading memory {limit(limits['read_gbps'], 'GB/s')}."
    )
    parts = [intro]
    if picture:
        parts.append(f"![Time a call and share of the FMA peak against sequence length]({picture})")
    if prefill:
        parts.append(table(prefill, peers, "batch x heads x tokens x D", "of the FMA peak"))
    for words, causal in (("Without the causal mask", False), ("with it", True)):
        means = over([result for result in single if result.shape.causal == causal], peers)
        if means:
            parts.append(f"Geometric mean in float32, {words.lower()}: {means}.")
    if decoding:
        parts.append("One new token against a cache of keys and values (query heads/key heads where they differ):")
        parts.append(table(decoding, peers, "batch x heads x keys x D", "of a plain read"))
    if training:
        parts.append("Forward and gradient, as a training step has them:")
        parts.append(table(training, peers, "batch x heads x tokens x D", "of the FMA peak"))
    parts.append(
        f"Medians of {rounds} rounds; each library in a process of its own, asked in turn, idle thread pools passive; "
        "half of the middle half's spread where that passes 10 %; in brackets how many times as fast flash_numba "
        "is. FLOPs are those of the two matrix products, of seven with the gradient, half of them when causal. The "
        "ceiling is that of the same round: the FMA peak, or a plain read of as many bytes as K and V have. NumPy "
        "is the one-shot formula, in place (`flash_numba/bench/baselines.py`); the other calls are in "
        "`flash_numba/bench/peers.py`."
    )
    parts.append(
        "Written by `python -m benchmarks.report README.md`; `flash-numba bench` measures the same on your machine."
    )
    return "\n\n".join(parts)


def rewrite(text: str, new_section: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between the markers replaced; everything else to the letter."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the file needs one {begin} and after it one {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{new_section}\n{end}{after}"


def contents(file: Path) -> str:
    """The text with its line ends as they are."""
    return file.read_bytes().decode()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "README.md", help="default: the README")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 2 (default 7)")
    parser.add_argument("--peers", default="numpy,torch", help=f"of {', '.join(PEERS)} (default %(default)s)")
    parser.add_argument("--picture-peers", help="those in the picture (default: the same)")
    parser.add_argument("--picture", type=Path, help="the PNG (default: docs/speed.png beside the file)")
    parser.add_argument("--no-picture", action="store_true", help="leave the picture, and its link, out")
    parser.add_argument("--print", action="store_true", help="print the section and leave the file alone")
    options = parser.parse_args(arguments)
    try:
        peers = chosen_peers(options.peers)
        drawn = peers if options.picture_peers is None else chosen_peers(options.picture_peers)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2; got {options.rounds}")
    if not options.print:
        rewrite(contents(options.file), "")  # a file without markers is refused before the minutes of measuring
    picture = None if options.no_picture else options.picture or options.file.parent / "docs" / "speed.png"
    try:
        text = measured_section(peers, drawn, options.rounds, picture, options.file.parent)
    except UncountedError as error:
        sys.exit(str(error))
    if options.print:
        print(text)
    else:
        options.file.write_bytes(rewrite(contents(options.file), text).encode())


def measured_section(peers: list[str], drawn: list[str], rounds: int, picture: Path | None, folder: Path) -> str:
    """Measure everything, draw the picture, write the section."""
    from rich.console import Console

    threads, date = ceilings.cpu_count(), datetime.date.today().isoformat()
    with Console(stderr=True).status("measuring the ceilings") as status:

        def progress(title: str) -> Callable[[str], None]:
            return lambda words: status.update(f"{title}: {words}")

        Rounds(threads).begin()  # in a period that counts
        limits = ceilings.measure()
        report = measure_all(PREFILL + DECODING + TRAINING, peers, rounds, threads, progress=progress("tables"))
        link = ""
        if picture is not None:
            lengths = measure_all(PICTURE, drawn, rounds, threads, progress=progress("picture"))
            subtitle = f"{ceilings.about(ceilings.machine())}, {threads} threads, {date}"
            picture.parent.mkdir(parents=True, exist_ok=True)
            plot.draw(lengths.results, limits, picture, subtitle)
            link = Path(os.path.relpath(picture, folder)).as_posix()
    return section(report, limits, ceilings.machine(), threads, rounds, date, link)


if __name__ == "__main__":
    main()
