"""Targets next to what is measured, and calls of this process timed in turn."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flash_numba.bench.driver import Rounds, UncountedError, interquartile


class Result(NamedTuple):
    """One target. `value` None: it couldn't be measured, and `note` says why. `target` None: it is only reported."""

    what: str
    value: float | None
    unit: str
    target: float | None
    at_least: bool
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        if self.value is not None and self.target is None:
            return "reported"
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def written(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.{0 if unit in ('%', '') else 2}f} {unit}".strip()


def spread(values: list[float]) -> str:
    """How far the middle half of the rounds lies apart, where that passes 10 % of the median."""
    apart = interquartile(values)
    return f"spread {100 * apart:.0f} %" if apart > 0.1 else ""


def joined(*notes: str) -> str:
    return ", ".join(filter(None, notes))


class Timed(NamedTuple):
    """Seconds of each call, round by round, with the FMA peak of each round; or why there are none."""

    seconds: dict[str, list[float]]
    peaks: list[float]
    reason: str = ""
    dropped: int = 0

    def ratios(self, name: str, to: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]

    def note(self, values: list[float], *more: str) -> str:
        return joined(*more, spread(values), f"{self.dropped} rounds didn't count" if self.dropped else "")

    def result(
        self,
        what: str,
        values: Callable[[], list[float]],
        unit: str,
        target: float | None,
        at_least: bool,
        note: Callable[[], str] = str,
        shown: Callable[[float], float] = float,
    ) -> Result:
        """The median of what each round gives, as a target: `shown` of it. All are asked only if there are rounds."""
        if self.reason:
            return Result(what, None, unit, target, at_least, self.reason)
        figures = values()
        return Result(what, shown(statistics.median(figures)), unit, target, at_least, self.note(figures, note()))


# A turn of short calls takes this long, so that the clock's step doesn't count.
TURN_SECONDS = 10e-3


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int, threads: int) -> Timed:
    """Time every call once a round, in rounds that count only. Each is called once before, to compile and warm up."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(TURN_SECONDS / timed(call, 1)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    peaks: list[float] = []
    gate = Rounds(threads)
    try:
        for turn in range(rounds):
            order = list(calls)[:: -1 if turn % 2 else 1]
            times, peak = gate.take(lambda: {name: timed(calls[name], repeats[name]) for name in order})  # noqa: B023
            peaks.append(peak)
            for name, value in times.items():
                taken[name].append(value)
    except UncountedError as error:
        return Timed({}, [], str(error), gate.dropped)
    return Timed(taken, peaks, "", gate.dropped)


def timed(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, the mean of so many."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)
