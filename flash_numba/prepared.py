"""Calls seen before: repeated calls of the same shapes and rules skip the checks and the planning.

A small call is over in microseconds, checking and describing it takes a hundred. What depends on shapes, strides,
dtypes and plain rules only is kept from the first such call; a later one fills in five addresses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .addresses import address
from .problem import PROBLEM, SEQUENCE

PLAIN, SIDES = {type(None), bool, int, float, str}, {type(None), int}
SHIFT, KEY_INDEX = (PROBLEM.fields[name][1] // 8 for name in ("shift", "key_index"))  # type: ignore[index]
LIMIT = 512  # calls remembered; all are forgotten when there are more

# For classes of device arrays that have been seen: what tells three of them, q, k and v, apart from others.
FORMS: dict[type, Callable[[Any, Any, Any], tuple | None]] = {}

_known: dict[tuple, Any] = {}


class Prepared(NamedTuple):
    """A call without its arrays."""

    start: Any  # cpu.launch.start
    launch: Any  # cpu.launch.Launch
    alive: list  # tables that the launch points to
    shape: tuple[int, ...]  # of out
    dtype: np.dtype
    lse_shape: tuple[int, ...]
    lse_dtype: np.dtype

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.empty(self.shape, self.dtype), np.empty(self.lse_shape, self.lse_dtype)
        addresses = address(q), address(k), address(v), address(out), address(lse)
        self.start(self.launch, addresses, (q, k, v, out, lse, self))
        return out, lse


def following_keys(launch: Any, tables: list, count: int) -> Any:
    """The launch for the keys that come `count` keys after those of a launch; its tables are moved on in place."""
    words = launch.words.copy()
    words[SHIFT] -= count
    words[KEY_INDEX] += count
    for table in tables:
        if table.dtype == SEQUENCE:
            table["shift"] -= count
    return launch._replace(words=words)


def is_plain(window: Any, *arguments: Any) -> bool:
    """Whether arguments are of types that compare by value and can't change: only such calls are remembered."""
    for x in arguments:  # not all(...), which takes three times as long
        if type(x) not in PLAIN:
            return False
    if type(window) is tuple:
        return all(type(side) in SIDES for side in window)
    return type(window) in SIDES


def recall(key: tuple) -> Any:
    return _known.get(key)


def remember(key: tuple, prepared: Any) -> None:
    if len(_known) >= LIMIT:
        _known.clear()
    _known[key] = prepared
