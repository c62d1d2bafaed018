"""Check and measure the CUDA backend on the first GPU, in under four minutes: python -m benchmarks.gpu

Checks the layouts of tensor-core fragments and the conformance cases on the device, then times the forward and decode
next to PyTorch's flash attention where torch is installed, the tile kernel, and the launch; prints everything, and
writes `benchmarks/gpu_figures.json` and the README's GPU section, with device, date and commit. A wrong layout or a
failing case ends the run before anything is written.

    --no-write        print only
    --readme-only     write the README's section from the figures on disk, without a GPU
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cuda import RECORDED, origin, recorded, why_no_cuda
from benchmarks.report import rewrite
from flash_numba.bench.tables import markdown, milliseconds, percent, times

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
CASE_SECONDS = 100.0  # for the conformance cases; compiling their kernels takes most of it
# What is to be reached on an H200 (issue 5): at least, or at most for the launch.
FORWARD_RATIO, TILE_SHARE, DECODE_SHARE, LAUNCH_SECONDS = 0.9, 0.35, 0.8, 15e-6


def commit() -> str:
    """Of the working tree, with + where it was changed since; a copy without its history is told by the environment."""
    if given := os.environ.get("FLASH_NUMBA_COMMIT"):
        return given
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()[:12] + "+" * bool(changed.stdout.strip())


def optional_torch() -> Any:
    """PyTorch with a GPU, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def measure(case_seconds: float) -> dict[str, Any]:
    """All figures, for JSON. AssertionError where the GPU computes something wrong."""
    from benchmarks import gpu_checks, gpu_timing
    from flash_numba.gpu import driver

    began = time.monotonic()
    gpus = driver.find()
    gpu = driver.usable(gpus, 0)
    torch = optional_torch()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {words}", flush=True)

    say(f"{gpu}; {driver.facts()['CUDA']}; {'torch ' + torch.__version__ if torch else 'no torch'}")
    gpu_checks.check_layouts(gpus)
    say("fragments lie as gpu/ptx.py says")
    outcome = gpu_checks.run_cases(gpu_checks.device_cases(), gpu, case_seconds, os.cpu_count() or 1, say)
    say(f"conformance: {outcome.passed} passed, {len(outcome.failed)} failed, {outcome.left_out} left out for time")
    assert not outcome.failed, "conformance cases fail on this GPU:\n" + "\n".join(outcome.failed[:20])

    clock = gpu_timing.Clock(gpus)
    figures: dict[str, Any] = {
        "device": gpu.name,
        "compute_capability": list(gpu.cc),
        "cuda": driver.facts()["CUDA"],
        "torch": torch.__version__ if torch else None,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "conformance": {"passed": outcome.passed, "left_out": outcome.left_out, "kernels": outcome.kernels},
        "limits": gpu_timing.limits(gpus, clock, torch),
    }
    say(f"limits: {figures['limits']}")
    for part, shapes, dtype in (
        ("forward", gpu_timing.FORWARD, "bfloat16"),
        ("decode", gpu_timing.DECODE, "bfloat16"),
        ("tile", gpu_timing.TILE, "float32"),
    ):
        figures[part] = []
        for shape in shapes:
            timed = gpu_timing.time_call(shape, dtype, clock, torch)
            figures[part].append(timed._asdict())
            theirs = f", torch {milliseconds(timed.torch_seconds)} ms" if timed.torch_seconds else ""
            say(f"{timed.shape} {dtype}, {timed.kernel}: {milliseconds(timed.seconds)} ms{theirs}")
    figures["overhead"] = gpu_timing.overhead(gpus, torch)
    figures["rows"] = gpu_timing.rows(clock)
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


# ---- as tables


def forward_table(figures: dict[str, Any]) -> str:
    """TFLOP/s, and how many times as fast as torch."""
    limit = figures["limits"]
    peak = max(limit["mma_flops"], limit.get("matmul_flops", 0.0))
    rows = []
    for of in figures["forward"]:
        theirs = of["torch_seconds"]
        rows.append(
            [
                of["shape"].replace("-causal", ", causal"),
                of["kernel"],
                milliseconds(of["seconds"]),
                f"{1e-12 * of['flops'] / of['seconds']:.0f}",
                percent(of["flops"] / of["seconds"] / peak),
                f"{1e-12 * of['flops'] / theirs:.0f}" if theirs else "",
                times(theirs / of["seconds"]) if theirs else "",
            ]
        )
    headings = ["batch x heads x tokens x D", "kernel", "ms", "TFLOP/s", "of the peak", "torch, TFLOP/s", "over torch"]
    return markdown(headings, rows, text_columns=2)


def decode_table(figures: dict[str, Any]) -> str:
    rows = []
    for of in figures["decode"]:
        theirs = of["torch_seconds"]
        speed = of["bytes"] / of["seconds"]
        rows.append(
            [
                of["shape"].removeprefix("decode-"),
                of["kernel"],
                milliseconds(of["seconds"]),
                f"{1e-9 * speed:.0f}",
                percent(speed / figures["limits"]["read_bytes"]),
                times(theirs / of["seconds"]) if theirs else "",
            ]
        )
    headings = ["batch x heads/key heads x keys x D", "kernel", "ms", "GB/s", "of a plain read", "over torch"]
    return markdown(headings, rows, text_columns=2)


def tile_table(figures: dict[str, Any]) -> str:
    rows = [
        [
            of["shape"].replace("-causal", ", causal"),
            of["kernel"],
            milliseconds(of["seconds"]),
            f"{1e-12 * of['flops'] / of['seconds']:.1f}",
            percent(of["flops"] / of["seconds"] / figures["limits"]["float32_flops"]),
        ]
        for of in figures["tile"]
    ]
    return markdown(["float32", "kernel", "ms", "TFLOP/s", "of the FMA peak"], rows, text_columns=2)


def verdicts(figures: dict[str, Any]) -> list[str]:
    """Each target next to what was measured: the worst of the problems that it is about."""
    found = []
    long = [
        of["torch_seconds"] / of["seconds"]
        for of in figures["forward"]
        if of["dim"] == 128 and of["tokens"] >= 2048 and of["torch_seconds"]
    ]
    if long:
        found.append(f"D = 128 from 2048 tokens: at least {min(long):.2f}x torch (target {FORWARD_RATIO}x)")
    share = min(of["flops"] / of["seconds"] for of in figures["tile"]) / figures["limits"]["float32_flops"]
    found.append(f"tile kernel in float32: at least {percent(share)} of the FMA peak (target {percent(TILE_SHARE)})")
    share = min(of["bytes"] / of["seconds"] for of in figures["decode"]) / figures["limits"]["read_bytes"]
    found.append(f"decode: at least {percent(share)} of a plain read (target {percent(DECODE_SHARE)})")
    taken = figures["overhead"].get("torch_tensors", figures["overhead"]["launch"])
    found.append(f"launch: {1e6 * taken:.1f} us a call (target at most {1e6 * LAUNCH_SECONDS:.0f})")
    return found


def section(figures: dict[str, Any] | None) -> str:
    """The README's GPU section, markers left out."""
    if figures is None:
        return (
            "**What has run where.** No GPU was at hand so far: the kernels have run in Numba's simulator, their PTX "
            "in an interpreter that the tests bring along and through NVIDIA's assembler, but never on a device; the "
            "launch code has run against a stand-in for the driver. So GPU speed is not measured yet. `python -m "
            "benchmarks.gpu` checks and measures all of it where there is a GPU, and writes its figures here."
        )
    limit = figures["limits"]
    peaks = [
        f"float32 FMA {1e-12 * limit['float32_flops']:.0f} TFLOP/s",
        f"`mma.sync` {1e-12 * limit['mma_flops']:.0f}",
    ]
    if "matmul_flops" in limit:
        peaks.append(f"torch's matrix product {1e-12 * limit['matmul_flops']:.0f}")
    peaks.append(f"reading memory {1e-9 * limit['read_bytes']:.0f} GB/s")
    against = f"; against torch {figures['torch']}, flash backend" if figures["torch"] else ""
    cases = figures["conformance"]
    intro = (
        f"Measured on {figures['date']} at commit {figures['commit']}: {figures['device']}, {figures['cuda']}"
        f"{against}. Limits: {', '.join(peaks)}. {cases['passed']} conformance cases passed there."
    )
    bullets = "\n".join(f"- {line}" for line in verdicts(figures))
    tables = forward_table(figures), "Decoding:", decode_table(figures), "CUDA cores:", tile_table(figures)
    return "\n\n".join([intro, *tables, bullets, "Written by `python -m benchmarks.gpu`."])


def write_readme(figures: dict[str, Any] | None, file: Path) -> None:
    text = file.read_bytes().decode()
    file.write_bytes(rewrite(text, section(figures), BEGIN, END).encode())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=RECORDED, help="the figures (default: benchmarks/gpu_figures.json)"
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="default: the README")
    parser.add_argument(
        "--case-seconds", type=float, default=CASE_SECONDS, help="for conformance (default %(default)s)"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--readme-only", action="store_true", help="write the README from the figures on disk")
    options = parser.parse_args(arguments)
    if options.readme_only:
        write_readme(recorded(options.json), options.readme)
        return
    if reason := why_no_cuda():
        sys.exit(f"{reason}. {origin(recorded(options.json))}")
    try:
        figures = measure(options.case_seconds)
    except AssertionError as error:
        sys.exit(str(error))
    print(section(figures))
    if not options.no_write:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        write_readme(figures, options.readme)


if __name__ == "__main__":
    main()
