"""Measure, and write the README's performance section: python -m benchmarks.report README.md [--rounds 7]

Only what stands between the two marker comments is replaced, and nothing in it is written by hand. Each library runs in
a process of its own, so that no idle thread pool of another spins beside it; a driver asks them in turn, round after
round, and takes the machine's ceilings in between.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.ceilings import (
    PATIENCE,
    TWO_THREADS_AT_LEAST,
    cpu_count,
    fma_peak,
    machine,
    read_bandwidth,
)
from benchmarks.shapes import DTYPES, FULL, LONG, Shape
from benchmarks.table import markdown, milliseconds, percent

ROOT = Path(__file__).resolve().parent.parent

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"

# What a timed turn takes at least, so that neither the clock's step nor the way there and back counts.
TURN_SECONDS = 5e-3


# --- the libraries: each function runs in its own process, and returns its version and `prepare(shape, dtype)`, which
# --- returns a call without arguments, or None where the library doesn't take the problem


def flash_numba_cpu():
    import flash_numba

    def prepare(shape, dtype):
        inputs = shape.inputs(DTYPES[dtype])
        return lambda: flash_numba.attention(*inputs, causal=shape.causal, backend="cpu")

    return getattr(flash_numba, "__version__", ""), prepare


def numpy_one_shot():
    from benchmarks import baselines

    def prepare(shape, dtype):
        if dtype not in ("float32", "float64"):
            return None
        inputs = shape.inputs(DTYPES[dtype])
        return lambda: baselines.one_shot(*inputs, shape.causal)

    return np.__version__, prepare


def torch_sdpa():
    import torch

    torch.set_num_threads(cpu_count())

    def prepare(shape, dtype):
        inputs = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in shape.inputs()]
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(*inputs, is_causal=shape.causal, enable_gqa=shape.H_kv < shape.H)

    return torch.__version__, prepare


LIBRARIES = {"flash_numba": flash_numba_cpu, "NumPy": numpy_one_shot, "torch SDPA": torch_sdpa}


def serve(library: str) -> None:
    """A worker's life: say the version, then answer each line: a problem to prepare, or null for a timed turn."""
    version, prepare = LIBRARIES[library]()
    print(json.dumps(version), flush=True)
    call, repeats = None, 1
    for line in sys.stdin:
        problem = json.loads(line)
        if problem is None:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            print((time.perf_counter() - start) / repeats, flush=True)
            continue
        *shape, dtype = problem
        call = prepare(Shape(*shape), dtype)
        if call is not None:
            call()
            start = time.perf_counter()
            call()
            repeats = max(1, int(TURN_SECONDS / (time.perf_counter() - start)))
        print(json.dumps(call is not None), flush=True)


class Worker:
    """A library in a process of its own; `version` is None where it can't be imported."""

    def __init__(self, library: str):
        # Pools that wait by sleeping: a spinning one would take the cores from whoever's turn is next.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "benchmarks.report", "--serve", library]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.version = json.loads(self.process.stdout.readline() or "null")

    def ask(self, question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with exit status {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# --- the driver


class Measurement(NamedTuple):
    """A problem's medians: seconds by library, and the ceiling of the same rounds (GFLOP/s, or GB/s when decoding)."""

    shape: Shape
    dtype: str
    seconds: dict[str, float]
    spread: dict[str, float]
    ceiling: float

    @property
    def decoding(self) -> bool:
        return self.shape.S_q == 1

    @property
    def speed(self) -> float:
        """Our GFLOP/s, or GB/s of K and V when decoding."""
        work = self.shape.kv_bytes(DTYPES[self.dtype]) if self.decoding else self.shape.flops
        return 1e-9 * work / self.seconds["flash_numba"]


class UncountedError(RuntimeError):
    """The machine gave its two threads one core's worth: nothing measured then is a figure."""


def measure(workers: dict[str, Worker], shape: Shape, dtype: str, rounds: int) -> Measurement:
    threads = cpu_count()
    taking_part = {name: worker for name, worker in workers.items() if worker.ask([*shape, dtype])}
    taken: dict[str, list[float]] = {name: [] for name in taking_part}
    ceilings: list[float] = []
    uncounted = 0
    while len(ceilings) < rounds:
        one, many = fma_peak(1), fma_peak(threads)
        if threads > 1 and many < TWO_THREADS_AT_LEAST * one:
            uncounted += 1
            if uncounted > PATIENCE:
                raise UncountedError(
                    f"{threads} threads reached under {TWO_THREADS_AT_LEAST} times one thread's FMA peak in "
                    f"{uncounted} tries: this period doesn't count, measure again later"
                )
            time.sleep(1.0)
            continue
        for name, worker in taking_part.items():
            taken[name].append(worker.ask(None))
        if shape.S_q == 1:
            ceilings.append(read_bandwidth(threads, shape.kv_bytes(DTYPES[dtype]), repeats=5))
        else:
            ceilings.append(many)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return Measurement(
        shape,
        dtype,
        medians,
        {name: interquartile(values) / medians[name] for name, values in taken.items()},
        statistics.median(ceilings),
    )


def interquartile(values: list[float]) -> float:
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower


PROBLEMS = [
    *((shape, "float32") for shape in FULL),
    *((shape, dtype) for shape in LONG for dtype in ("float16", "bfloat16")),
]


def measure_all(rounds: int, problems=PROBLEMS, progress=lambda words: None):
    """A `Measurement` for each problem, and the version of each library that took part."""
    workers = {name: Worker(name) for name in LIBRARIES}
    try:
        present = {name: worker for name, worker in workers.items() if worker.version is not None}
        if "flash_numba" not in present:
            raise RuntimeError("flash_numba can't be imported; the worker's message is above")
        results = []
        for count, (shape, dtype) in enumerate(problems, 1):
            progress(f"{count} of {len(problems)}: {shape.name}, {dtype}")
            results.append(measure(present, shape, dtype, rounds))
        return results, {name: worker.version for name, worker in present.items()}
    finally:
        for worker in workers.values():
            worker.close()


# --- the section


def with_spread(result: Measurement, library: str) -> str:
    """Milliseconds, and how far the middle half of the rounds lies apart where that passes 10 %."""
    apart = result.spread[library]
    return milliseconds(result.seconds[library]) + (f" (±{50 * apart:.0f} %)" if apart > 0.1 else "")


def section(results: list[Measurement], versions: dict[str, str], ceilings: dict, about: dict, rounds: int, date: str):
    """The Markdown between the markers, markers left out."""
    peers = [name for name in versions if name != "flash_numba"]
    headings = ["shape (B x H x S x D)", "dtype", "flash_numba, ms", "speed", "of the ceiling"]
    headings += [f"{name}, ms" for name in peers] + [f"over {name}" for name in peers]
    rows = []
    for result in results:
        ours = result.seconds["flash_numba"]
        rows.append(
            [
                result.shape.name,
                result.dtype,
                with_spread(result, "flash_numba"),
                f"{result.speed:.1f} {'GB/s' if result.decoding else 'GFLOP/s'}",
                percent(result.speed / result.ceiling),
            ]
            + [with_spread(result, name) if name in result.seconds else "" for name in peers]
            + [f"{result.seconds[name] / ours:.1f}x" if name in result.seconds else "" for name in peers]
        )
    fma = ", ".join(f"{value:.0f} GFLOP/s on {count}" for count, value in ceilings["fma_gflops"]["float32"].items())
    read = ", ".join(f"{value:.0f} GB/s on {count}" for count, value in ceilings["read_gbps"].items())
    others = ", ".join(f"{name} {versions[name]}" for name in peers)
    intro = (
        f"Measured on {date}: {about['cpu']} ({about['llvm_cpu']}; {', '.join(about['simd'])}), "
        f"{about['cores']} cores, {about['system']}, Python {about['python']}, Numba {about['numba']}; "
        f"against {others}. "
        f"Ceilings by thread count: float32 FMA {fma}; reading memory {read}."
    )
    method = (
        f"Medians of {rounds} rounds, {about['cores']} threads; each library in its own process, alternated, idle "
        "thread pools passive; the middle half's spread where it passes 10 %. FLOPs are those of the two matrix "
        "products, half of them when causal. The ceiling is the FMA peak, or, decoding, a plain read of as many bytes "
        "as K and V have, both from the same rounds. NumPy is the one-shot formula, in place "
        "(`benchmarks/baselines.py`)."
    )
    rerun = "Written by `python -m benchmarks.report README.md`; `python -m benchmarks.targets` gives the targets."
    return "\n\n".join([intro, markdown(headings, rows, text_columns=2), method, rerun])


def rewrite(text: str, new_section: str) -> str:
    """`text` with what stands between the markers replaced; everything else to the letter."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file needs one {BEGIN} and after it one {END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{new_section}\n{END}{after}"


def contents(file: Path) -> str:
    """The text with its line ends as they are."""
    return file.read_bytes().decode()


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console

    from benchmarks import ceilings

    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "README.md", help="default: the README")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 2 (default 7)")
    parser.add_argument("--print", action="store_true", help="print the section and leave the file alone")
    parser.add_argument("--serve", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        try:
            serve(options.serve)
        except ModuleNotFoundError as missing:
            if missing.name not in ("torch",):
                raise
        return
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2; got {options.rounds}")
    if not options.print:
        rewrite(contents(options.file), "")  # a file without markers is refused before the minutes of measuring

    with Console(stderr=True).status("measuring the ceilings") as status:
        limits = ceilings.measure()
        try:
            results, versions = measure_all(options.rounds, progress=status.update)
        except UncountedError as error:
            sys.exit(str(error))
    new_section = section(results, versions, limits, machine(), options.rounds, datetime.date.today().isoformat())
    if options.print:
        print(new_section)
    else:
        options.file.write_bytes(rewrite(contents(options.file), new_section).encode())


if __name__ == "__main__":
    main()
