"""What each rule costs over the plain call, and what is saved where keys are hidden."""

import hashlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

import flash_numba
from benchmarks.verdicts import Result, Timed, in_turn
from flash_numba.bench.shapes import LONG, Shape, square

THREADS = 2

WIDE = square(1, 8, 4096, 128)[0]
LONGER = square(1, 8, 8192, 64)[0]
WINDOW = 256
DOCUMENTS = 16
CHUNKS = 64
# Queries and keys of the streams: few rows against many keys, and self-attention.
STREAMS = (Shape("1x8x1024/32768x64", 1, 8, 8, 1024, 32768, 64, False), LONG[0])

# Per cent over the plain call, at D = 64 and at D = 128.
COSTS = {
    "ALiBi": (5, 5),
    "softcap": (18, 12),
    "bool mask that keeps all": (10, 10),
    "bool mask, half kept": (25, 25),
    "float bias (S, S)": (25, 25),
    "float bias (H, S, S)": (25, 25),
    "dropout": (30, 30),
}


def rules_of(shape: Shape) -> dict[str, dict[str, Any]]:
    """The keywords of each rule."""
    rng = np.random.default_rng(1)
    square_of = (shape.S_q, shape.S_kv)
    return {
        "plain": {},
        "ALiBi": {"alibi_slopes": (0.5 ** np.arange(1, shape.H + 1)).astype(np.float32)},
        "softcap": {"softcap": 30.0},
        "bool mask that keeps all": {"mask": np.ones(square_of, bool)},
        "bool mask, half kept": {"mask": rng.random(square_of, np.float32) < 0.5},
        "float bias (S, S)": {"bias": rng.standard_normal(square_of, np.float32)},
        "float bias (H, S, S)": {"bias": rng.standard_normal((shape.H, *square_of), np.float32)},
        "dropout": {"dropout": 0.1, "seed": 42},
    }


def calls_of(shape: Shape) -> dict[str, Callable[[], np.ndarray]]:
    """A call a rule."""
    q, k, v = shape.inputs()

    def call(keywords: dict[str, Any]) -> Callable[[], np.ndarray]:
        return lambda: flash_numba.attention(q, k, v, **keywords)

    return {name: call(keywords) for name, keywords in rules_of(shape).items()}


def costs(shape: Shape, column: int, rounds: int) -> list[Result]:
    """Each rule's time over the plain call's."""
    timed = in_turn(calls_of(shape), rounds, THREADS)
    return [
        cost(timed, name, "plain", f"{name} over plain, {shape.name}", targets[column])
        for name, targets in COSTS.items()
    ]


def cost(timed: Timed, name: str, to: str, what: str, target: float) -> Result:
    """How much longer a call takes than another, in per cent."""
    return timed.result(
        what,
        lambda: timed.ratios(name, to),
        "%",
        target,
        False,
        lambda: milliseconds_against(timed, name, to),
        lambda ratio: 100 * (ratio - 1),
    )


def milliseconds_against(timed: Timed, name: str, to: str) -> str:
    a, b = (1e3 * float(np.median(timed.seconds[x])) for x in (name, to))
    return f"{a:.1f} against {b:.1f} ms"


def visible_share(S: int, left: int, right: int) -> float:
    """Which share of a square score matrix a window leaves."""
    position = np.arange(S)
    seen = np.minimum(position + right, S - 1) - np.maximum(position - left, 0) + 1
    return float(seen.sum()) / S**2


def windows(rounds: int) -> list[Result]:
    """Windows against their share of the full call, and against one of half the length; documents against it too."""
    q, k, v = LONGER.inputs()
    half = tuple(x[:, :, : LONGER.S_q // 2] for x in (q, k, v))
    packed = tuple(np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    starts = np.arange(DOCUMENTS + 1, dtype=np.int32) * (LONGER.S_q // DOCUMENTS)
    both, behind = (WINDOW, WINDOW), (WINDOW, 0)
    attend = flash_numba.attention
    timed = in_turn(
        {
            "full": lambda: attend(q, k, v),
            "window": lambda: attend(q, k, v, window=both),
            "causal window": lambda: attend(q, k, v, causal=True, window=behind),
            "half as long": lambda: attend(*half, window=both),
            "documents": lambda: flash_numba.attention_varlen(*packed, starts, starts),
        },
        rounds,
        THREADS,
    )

    def over_share(name: str, sides: tuple[int, int], what: str) -> Result:
        share = visible_share(LONGER.S_q, *sides)
        return timed.result(
            f"{what} over its {100 * share:.2f} % of the full cost, {LONGER.name}",
            lambda: timed.ratios(name, "full"),
            "%",
            20,
            False,
            lambda: milliseconds_against(timed, name, "full"),
            lambda ratio: 100 * (ratio / share - 1),
        )

    return [
        over_share("window", both, f"window={both}"),
        over_share("causal window", behind, f"causal window={behind}"),
        timed.result(
            f"window={both}, S = {LONGER.S_q} off twice S = {LONGER.S_q // 2}",
            lambda: timed.ratios("window", "half as long"),
            "%",
            10,
            False,
            lambda: milliseconds_against(timed, "window", "half as long"),
            lambda ratio: 100 * abs(ratio / 2 - 1),
        ),
        timed.result(
            f"{DOCUMENTS} equal documents over full speed, {LONGER.name}",
            lambda: timed.ratios("full", "documents"),
            "x",
            12,
            True,
            lambda: milliseconds_against(timed, "documents", "full"),
        ),
    ]


def streamed(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention by a stream of equal chunks."""
    stream = flash_numba.AttentionStream(q)
    for keys, values in zip(*(np.array_split(x, CHUNKS, axis=-2) for x in (k, v)), strict=True):
        stream.absorb(keys, values)
    return stream.result()[0]


def streams(rounds: int) -> list[Result]:
    """A stream over one call."""
    results = []
    for shape in STREAMS:
        inputs = shape.inputs()
        timed = in_turn(
            {
                "one call": lambda inputs=inputs: flash_numba.attention(*inputs),
                "stream": lambda inputs=inputs: streamed(*inputs),
            },
            rounds,
            THREADS,
        )
        results.append(cost(timed, "stream", "one call", f"{CHUNKS} chunks over one call, {shape.name}", 10))
    return results


def same_bits(rounds: int) -> list[Result]:
    """How many rules give other bits on two threads than on one."""
    calls: dict[str, Callable[[], np.ndarray]] = dict(calls_of(LONG[0]))
    q, k, v = LONG[0].inputs()
    packed = tuple(np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    starts = np.arange(DOCUMENTS + 1, dtype=np.int32) * (LONG[0].S_q // DOCUMENTS)
    calls |= {
        "window": lambda: flash_numba.attention(q, k, v, window=(WINDOW, WINDOW)),
        "causal window": lambda: flash_numba.attention(q, k, v, causal=True, window=(WINDOW, 0)),
        "documents": lambda: flash_numba.attention_varlen(*packed, starts, starts),
        "stream": lambda: streamed(q, k, v),
    }
    most = numba.get_num_threads()
    differ = []
    try:
        for name, call in calls.items():
            digests = set()
            for count in (1, min(THREADS, most)):
                numba.set_num_threads(count)
                digests.add(hashlib.sha256(call().tobytes()).digest())
            if len(digests) > 1:
                differ.append(name)
    finally:
        numba.set_num_threads(most)
    note = ", ".join(differ) or f"of {len(calls)}"
    return [Result(f"rules that differ in any bit on 1 and {THREADS} threads", float(len(differ)), "", 0, False, note)]


def rules(rounds: int) -> list[Result]:
    """Every target of the rules."""
    return [
        *costs(LONG[0], 0, rounds),
        *costs(WIDE, 1, rounds),
        *windows(rounds),
        *streams(rounds),
        *same_bits(rounds),
    ]
