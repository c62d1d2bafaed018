"""How near the forward is to the machine's limits, and to other libraries: issue by issue, the figures asked for.

The other libraries run in processes of their own (`flash_numba.bench.driver`); which of them take part is in `PEERS`.
"""

from collections.abc import Iterable

import numba
import numpy as np

import flash_numba
from benchmarks.verdicts import Result, geometric_mean, in_turn, joined, spread, timed
from flash_numba.bench.driver import Measurement, UncountedError, Worker, measure_all
from flash_numba.bench.peers import OURS
from flash_numba.bench.shapes import DECODE, LONG, MAIN, TINY, Shape, decode, square

THREADS = 2

# Who is measured beside us; NumPy and JAX take five to ten times as long, and so does the run with them.
PEERS = ["torch", "onnxruntime", "openvino"]

HALVES = ("float16", "bfloat16")


def ahead_of(library: str, result: Measurement, target: float) -> Result:
    """How many times as fast as a peer."""
    what = f"speed over {library}, {result.shape.name}, {result.dtype}"
    if library not in result.seconds:
        return Result(what, None, "x", target, True, result.refused.get(library, "not installed"))
    return Result(what, result.ratio(library), "x", target, True, against(library, result))


def against(library: str, result: Measurement) -> str:
    """Both times, and the wider spread."""
    wider = max(result.seconds[OURS], result.seconds[library], key=lambda taken: len(spread(taken)))
    return joined(f"{1e3 * result.median():.4g} against {1e3 * result.median(library):.4g} ms", spread(wider))


def share_of_ceiling(result: Measurement, target: float, of: str) -> Result:
    limit = float(np.median(result.ceilings))
    note = joined(f"{result.speed():.1f} of {limit:.1f} {result.unit}", spread(result.seconds[OURS]))
    what = f"share of {of}, {result.shape.name}, {result.dtype}"
    return Result(what, 100 * result.share(), "%", target, True, note)


def overall(library: str, results: Iterable[Measurement], target: float, of: str) -> Result:
    """The geometric mean of the ratios to a peer."""
    ratios = [result.ratio(library) for result in results if library in result.seconds]
    what = f"speed over {library}, geometric mean, {of}"
    if not ratios:
        return Result(what, None, "x", target, True, "not installed")
    return Result(what, geometric_mean(ratios), "x", target, True, f"of {len(ratios)}")


def measured(
    shapes: Iterable[Shape],
    dtypes: Iterable[str],
    rounds: int,
    passive: bool = True,
    peers: Iterable[str] | None = None,
) -> list[Measurement] | Result:
    """Every problem by us and the peers, `PEERS` if None, or why not."""
    problems = [(shape, dtype) for shape in shapes for dtype in dtypes]
    try:
        return measure_all(problems, PEERS if peers is None else peers, rounds, THREADS, passive=passive).results
    except UncountedError as error:
        return Result("figures next to other libraries", None, "", None, True, str(error))


# --- prefill ----------------------------------------------------------------------------------------------------------


def share_target(shape: Shape) -> float:
    """Per cent of the FMA peak wanted in float32."""
    if shape.causal:
        return 78 if shape.S_q >= 4096 else 70
    if shape.S_q == 512:
        return 78
    return 85 if shape.D == 128 else 82


def prefill(rounds: int) -> list[Result]:
    """Share of the FMA peak, the 16-bit formats over float32, and every peer."""
    results = measured(MAIN, ("float32", *HALVES), rounds)
    return [results] if isinstance(results, Result) else prefill_results(results)


def prefill_results(results: list[Measurement]) -> list[Result]:
    single = [result for result in results if result.dtype == "float32"]
    rows = [share_of_ceiling(result, share_target(result.shape), "the FMA peak") for result in single]
    single_of = {result.shape: result for result in single}
    rows += [over_float32(result, single_of[result.shape]) for result in results if result.dtype != "float32"]
    # Over torch: each without a causal mask, and the geometric mean with and without one.
    rows += [ahead_of("torch", result, 1.3) for result in single if not result.shape.causal]
    for causal, target in ((False, 1.5), (True, 1.6)):
        those = [result for result in single if result.shape.causal == causal]
        rows.append(overall("torch", those, target, f"float32, {'causal' if causal else 'not causal'}"))
    for dtype, target in (("bfloat16", 1.4), ("float16", 2.5)):
        those = [result for result in results if result.dtype == dtype]
        rows += [ahead_of("torch", result, target) for result in those]
        rows.append(overall("torch", those, target, dtype))
    others = dict.fromkeys(library for result in single for library in result.seconds)
    for library in others:
        if library not in (OURS, "torch"):
            rows += [ahead_of(library, result, 1.0) for result in single if library in result.seconds]
    return rows


def over_float32(result: Measurement, single: Measurement) -> Result:
    """Time over our float32 time. The two were measured a minute apart: each is set against the peak of its rounds."""
    what = f"{result.dtype} time over float32's, {result.shape.name}"
    note = joined(f"{1e3 * result.median():.4g} against {1e3 * single.median():.4g} ms", spread(result.seconds[OURS]))
    return Result(what, single.share() / result.share(), "x", 1.08, False, note)


# --- decode, small calls ----------------------------------------------------------------------------------------------

TORCH_DECODE = {"float32": 4.0, "bfloat16": 12.0, "float16": 25.0}


def decoding(rounds: int) -> list[Result]:
    """Share of a plain read of the same bytes, and every peer."""
    results = measured(DECODE, ("float32", *HALVES), rounds)
    return [results] if isinstance(results, Result) else decoding_results(results)


def decoding_results(results: list[Measurement]) -> list[Result]:
    rows = [share_of_ceiling(result, 85 if result.shape.S_kv >= 32768 else 75, "a plain read") for result in results]
    longest = decode(1, 32, 8, 32768, 128)
    rows += [ahead_of("torch", result, TORCH_DECODE[result.dtype]) for result in results if result.shape == longest]
    rows += [ahead_of("onnxruntime", result, 1.0) for result in results if "onnxruntime" in result.seconds]
    return rows


def small(rounds: int) -> list[Result]:
    """Calls of microseconds: at most 0.7 of torch's time, and ahead of ONNX Runtime.

    Waking a thread that sleeps takes longer than such a call, so it is reported too with threads that spin.
    """
    shapes = [shape for shape in TINY if not shape.causal]
    results = measured(shapes, ("float32",), rounds)
    if isinstance(results, Result):
        return [results]
    spinning = measured(shapes, ("float32",), rounds, passive=False)
    return small_results(results) + ([spinning] if isinstance(spinning, Result) else spinning_results(spinning))


def spinning_results(results: list[Measurement]) -> list[Result]:
    return [
        Result(
            f"time over {library}'s, idle threads spinning, {result.shape.name}",
            1 / result.ratio(library),
            "x",
            None,
            False,
            against(library, result),
        )
        for result in results
        for library in result.seconds
        if library != OURS
    ]


def small_results(results: list[Measurement]) -> list[Result]:
    rows = []
    for result in results:
        what = f"time over torch's, {result.shape.name}"
        if "torch" in result.seconds:
            rows.append(Result(what, 1 / result.ratio("torch"), "x", 0.7, False, against("torch", result)))
        else:
            rows.append(Result(what, None, "x", 0.7, False, "not installed"))
        rows.append(ahead_of("onnxruntime", result, 1.0))
    return rows


def front(rounds: int) -> list[Result]:
    """What a call takes before and after the kernel: a call on one number, which keeps the kernel no time.

    Of a shape seen before, and of a new one each time, which needs every check and plan.
    """
    one = np.ones((1, 1, 1, 1), np.float32)
    calls, new_shapes = 2000, 200
    keys = np.ones((1, 1, (rounds + 1) * new_shapes, 1), np.float32)
    repeated, new = [], []
    for turn in range(rounds + 1):
        repeated.append(timed(lambda: flash_numba.attention(one, one, one), calls))
        first = turn * new_shapes
        parts = [keys[:, :, : first + i + 1] for i in range(new_shapes)]
        new.append(timed(lambda: [flash_numba.attention(one, part, part) for part in parts], 1) / new_shapes)  # noqa: B023
    repeated, new = repeated[1:], new[1:]  # the first compiled
    return [
        Result(
            "a call's own time, shape seen before", 1e6 * float(np.median(repeated)), "us", 6, False, spread(repeated)
        ),
        Result("a call's own time, new shape each time", 1e6 * float(np.median(new)), "us", None, False, spread(new)),
    ]


# --- ours alone -------------------------------------------------------------------------------------------------------

# A size between two that fill registers and blocks evenly, and the nearer of those two.
TAILS = {
    "S = 1000": (square(1, 8, 1000, 64), square(1, 8, 1024, 64)),
    "D = 40": (square(1, 8, 2048, 40), square(1, 8, 2048, 32)),
    "D = 80": (square(1, 8, 2048, 80), square(1, 8, 2048, 64)),
    "D = 96": (square(1, 8, 2048, 96), square(1, 8, 2048, 128)),
}


def tails(rounds: int) -> list[Result]:
    """Speed of a size that fills nothing evenly over that of its neighbour."""
    shapes = {shape.name: shape for pairs in TAILS.values() for pair in pairs for shape in pair}
    inputs = {name: shape.inputs() for name, shape in shapes.items()}
    times = in_turn(
        {
            name: lambda name=name, shape=shape: flash_numba.attention(*inputs[name], causal=shape.causal)
            for name, shape in shapes.items()
        },
        rounds,
        THREADS,
    )
    results = []
    for words, (own, neighbour) in TAILS.items():
        for a, b in zip(own, neighbour, strict=True):
            results.append(
                times.result(
                    f"speed at {words} over {b.name}'s",
                    lambda a=a, b=b: [100 * ratio * a.flops / b.flops for ratio in times.ratios(b.name, a.name)],
                    "%",
                    85,
                    True,
                )
            )
    return results


def threads(rounds: int) -> list[Result]:
    """Two threads over one."""
    shape = LONG[0]
    what = f"{THREADS} threads over 1, {shape.name}"
    most = numba.get_num_threads()
    if most < THREADS:
        return [Result(what, None, "x", 1.9, True, f"needs {THREADS} cores")]
    inputs = shape.inputs()

    def on(count: int) -> None:
        numba.set_num_threads(count)
        flash_numba.attention(*inputs)

    try:
        times = in_turn({"one": lambda: on(1), "two": lambda: on(THREADS)}, rounds, THREADS)
    finally:
        numba.set_num_threads(most)
    return [times.result(what, lambda: times.ratios("one", "two"), "x", 1.9, True)]


# --- errors -----------------------------------------------------------------------------------------------------------

ERROR_SHAPES = (*square(1, 8, 1024, 64), *square(4, 16, 512, 64), *square(1, 8, 2048, 128), decode(1, 32, 8, 8192, 128))


def errors(rounds: int) -> list[Result]:
    """Error against float64, over torch's on the same input: the worst shape."""
    return errors_over_torch(ERROR_SHAPES, "error", 1.0)


def errors_over_torch(shapes: Iterable[Shape], of: str, target: float) -> list[Result]:
    workers: list[Worker] = []
    try:
        workers += [Worker(OURS, THREADS), Worker("torch", THREADS)]
        if workers[1].version is None:
            return [Result(f"{of} over torch's", None, "x", target, False, workers[1].missing)]
        return [row for dtype in ("float32", *HALVES) for row in errors_in(dtype, *workers, shapes, of, target)]
    finally:
        for worker in workers:
            worker.close()


def errors_in(
    dtype: str,
    ours: Worker,
    torch: Worker,
    shapes: Iterable[Shape] = ERROR_SHAPES,
    of: str = "error",
    target: float = 1.0,
) -> list[Result]:
    worst = {"max": (0.0, ""), "rms": (0.0, "")}
    for shape in shapes:
        answers = []
        for worker in (ours, torch):
            if why := worker.ask("prepare", [*shape, dtype]).get("refused"):
                return [Result(f"{of} over torch's, {dtype}", None, "x", target, False, f"{worker.library}: {why}")]
            answers.append(worker.ask("errors"))
        for kind in worst:
            own, other = (answer[kind] for answer in answers)
            worst[kind] = max(worst[kind], (own / other, f"{own:.2e} against {other:.2e}: {shape.name}"))
    # To a hundredth: in 16 bits both round the same numbers, and differ in a few of them.
    return [
        Result(f"{kind} {of} over torch's, {dtype}", round(ratio, 2), "x", target, False, note)
        for kind, (ratio, note) in worst.items()
    ]
