"""The project's targets on a CPU, each next to what is measured here and now.

    python -m benchmarks.targets [--only speed,rules,limits,...] [--peers torch,onnxruntime] [--rounds 7] [--json]

A speed is a share of the FMA peak of the same minute: every round measures the peak on one and on two threads next to
the kernel, and a round whose two threads reach less than 1.7 times one doesn't count (both cores were one then).
"""

import argparse
import hashlib
import json
import os

import numba
import numpy as np

import flash_numba
from benchmarks import gradients, limits, processes, rules
from benchmarks.processes import fresh
from benchmarks.verdicts import Result, Timed, in_turn, written
from flash_numba import reference
from flash_numba.bench.ceilings import about, cpu_count, machine
from flash_numba.bench.command import chosen_peers
from flash_numba.bench.shapes import DTYPES, LONG, Shape, square
from flash_numba.bench.tables import show

THREADS = 2

# --- speed: the two plain shapes in this process, for a quick look; `limits` has the whole list -----------------------

HALVES = ("float16", "bfloat16")
# 16-bit formats may take 1.08 times as long as float32.
HALF_PRECISION_TARGET = 100 / 1.08


def speed_cases() -> list[tuple[Shape, str]]:
    return [(shape, dtype) for shape in LONG for dtype in ("float32", *HALVES)]


def name_of(shape: Shape, dtype: str) -> str:
    return f"{shape.name}, {dtype}"


def speed(rounds: int) -> list[Result]:
    """Share of the two-thread FMA peak in float32, and the 16-bit types' speed over float32's."""
    if min(cpu_count(), numba.config.NUMBA_NUM_THREADS) < THREADS:
        return speed_results(Timed({}, [], f"needs {THREADS} cores"))
    numba.set_num_threads(THREADS)
    inputs = {dtype: LONG[0].inputs(DTYPES[dtype]) for dtype in ("float32", *HALVES)}
    calls = {
        name_of(shape, dtype): lambda shape=shape, dtype=dtype: flash_numba.attention(
            *inputs[dtype], causal=shape.causal, backend="cpu"
        )
        for shape, dtype in speed_cases()
    }
    return speed_results(in_turn(calls, rounds, THREADS))


def speed_results(timed: Timed) -> list[Result]:
    results = []
    for shape, dtype in speed_cases():
        own, single = name_of(shape, dtype), name_of(shape, "float32")
        if dtype != "float32":
            results.append(
                timed.result(
                    f"{dtype} over float32 speed, {shape.name}",
                    lambda own=own, single=single: [100 * ratio for ratio in timed.ratios(single, own)],
                    "%",
                    HALF_PRECISION_TARGET,
                    True,
                )
            )
            continue

        def shares(own=own, shape=shape) -> list[float]:
            turns = zip(timed.seconds[own], timed.peaks, strict=True)
            return [100e-9 * shape.flops / taken / peak for taken, peak in turns]

        def note(own=own, shape=shape) -> str:
            gflops = 1e-9 * shape.flops / float(np.median(timed.seconds[own]))
            return f"{gflops:.0f} of {np.median(timed.peaks):.0f} GFLOP/s"

        what = f"share of the FMA peak, {own}, {THREADS} threads"
        results.append(timed.result(what, shares, "%", limits.share_target(shape), True, note))
    return results


# --- numbers ----------------------------------------------------------------------------------------------------------


def error(rounds: int) -> list[Result]:
    """The largest error against float64, over that of NumPy's one-shot formula in float32: the worst case."""
    worst, note = 0.0, ""
    # Long ones too: errors of sums grow with their length, and not alike in both.
    grouped = Shape("", 2, 4, 2, 100, 1000, 40, True)
    for shape in (*square(1, 8, 1024, 64), *square(1, 2, 4096, 64), square(1, 2, 2048, 128)[0], grouped):
        for logits, factor in (("standard normal", 1.0), ("large", 8.0)):
            q, k, v = shape.inputs()
            q = (factor * q).astype(np.float32)
            exact = reference.attention(q, k, v, causal=shape.causal)
            by_head = [np.repeat(x, shape.H // shape.H_kv, axis=1) for x in (k, v)]
            one_shot, _ = reference.one_shot_attention(q, *by_head, causal=shape.causal)
            ours = np.abs(flash_numba.attention(q, k, v, causal=shape.causal) - exact).max()
            numpys = np.abs(one_shot - exact).max()
            if ours / numpys > worst:
                worst = ours / numpys
                note = f"{ours:.1e} against {numpys:.1e}: {tuple(shape[1:])}, {logits} logits"
    return [Result("largest float32 error over NumPy's one-shot", worst, "x", 2.0, False, note)]


DIGESTS = """
from benchmarks.targets import digests
print(*digests())
"""


def digests() -> list[str]:
    """A digest of each output, over dtypes and causal; each is large enough that threads share it."""
    return [
        hashlib.sha256(flash_numba.attention(*inputs, causal=causal).tobytes()).hexdigest()
        for inputs, causal in bit_cases(1)
    ]


def bit_cases(batch: int):
    shape = square(8, 4, 1024, 64)[0]
    for dtype in ("float32", *HALVES):
        inputs = [x[:batch] for x in shape.inputs(DTYPES[dtype])]
        yield from ((inputs, causal) for causal in (False, True))


def same_bits(rounds: int) -> list[Result]:
    """How many outputs differ in any bit between one and two threads, and between a batch of one and of eight."""
    differ, compared = 0, 0
    most = numba.config.NUMBA_NUM_THREADS
    numba.set_num_threads(1)
    serial = digests()
    others = [fresh(DIGESTS, NUMBA_NUM_THREADS=count).split() for count in ("1", "2")]
    if most > 1:
        numba.set_num_threads(2)
        others.append(digests())
    numba.set_num_threads(most)
    for other in others:
        compared += len(other)
        differ += sum(a != b for a, b in zip(serial, other, strict=True))
    for inputs, causal in bit_cases(8):
        together = flash_numba.attention(*inputs, causal=causal)
        for item, batched in enumerate(together):
            alone = flash_numba.attention(*(x[item] for x in inputs), causal=causal)
            compared += 1
            differ += alone.tobytes() != batched.tobytes()
    note = f"{compared} comparisons: serial, 1 and 2 threads, batch of 1 and of 8"
    return [Result("outputs that differ in any bit", float(differ), "", 0.0, False, note)]


# --- the list ---------------------------------------------------------------------------------------------------------

GROUPS = {
    "speed": speed,
    "memory": processes.memory,
    "error": error,
    "import": processes.import_time,
    "first-call": processes.first_call,
    "bits": same_bits,
    "rules": rules.rules,
    "prefill": limits.prefill,
    "decode": limits.decoding,
    "small": limits.small,
    "front": limits.front,
    "threads": limits.threads,
    "tails": limits.tails,
    "errors": limits.errors,
    "gradient-speed": gradients.speed,
    "gradient-torch": gradients.over_torch,
    "gradient-errors": gradients.errors,
    "gradient-memory": processes.gradient_memory,
    "gradient-bits": gradients.same_bits,
}
# Names for several of them; those that take minutes aren't in the default.
SETS = {
    "default": ["speed", "memory", "error", "import", "first-call", "bits"],
    "limits": ["prefill", "decode", "small", "front", "threads", "first-call", "memory", "tails", "errors"],
    "gradients": ["gradient-speed", "gradient-torch", "gradient-errors", "gradient-memory", "gradient-bits"],
}


def chosen(words: str) -> list[str]:
    """The groups that a list with commas names, each once.

    Raises:
        ValueError: a name that isn't one.
    """
    names = [name for word in words.split(",") for name in SETS.get(word, [word])]
    if unknown := sorted(set(names) - set(GROUPS)):
        raise ValueError(f"--only takes {', '.join([*GROUPS, *SETS])}; got {', '.join(unknown)}")
    return list(dict.fromkeys(names))


def wanted(result: Result) -> str:
    if result.target is None:
        return ""
    return ("at least " if result.at_least else "at most ") + written(result.target, result.unit)


HEADINGS = ["target", "measured", "wanted", "", "note"]


def rows_of(results: list[Result]) -> list[list[str]]:
    return [
        [result.what, written(result.value, result.unit), wanted(result), result.verdict, result.note]
        for result in results
    ]


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="default", help=f"of {', '.join([*GROUPS, *SETS])}; commas between several")
    parser.add_argument("--peers", default=",".join(limits.PEERS), help="next to whom, or none (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 2 (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        groups = chosen(options.only)
        limits.PEERS[:] = chosen_peers(options.peers)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2; got {options.rounds}")
    # Numba's idle threads sleep, as those of every library in a process of its own do: the peak is measured in between.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    progress = Console(stderr=True)
    results = []
    for group in groups:
        with progress.status(f"measuring: {group}"):
            results += GROUPS[group](options.rounds)
    of = machine()
    if options.json:
        rows = [{**result._asdict(), "met": result.met} for result in results]
        print(json.dumps({"machine": of, "results": rows}, indent=2))
    else:
        show(f"{about(of)}, Numba {of['numba']}", HEADINGS, rows_of(results), text_columns=1, left=(2, 3, 4))


if __name__ == "__main__":
    main()
