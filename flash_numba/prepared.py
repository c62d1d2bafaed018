"""Calls seen before: repeated calls of the same shapes and rules skip the checks and the planning.

A small call is over in microseconds, checking and describing it takes a hundred. What depends on shapes, strides,
dtypes and plain rules only is kept from the first such call; a later one fills in five addresses.
"""

from typing import Any, NamedTuple

import numpy as np

from .problem import address

PLAIN = {type(None), bool, int, float, str}
LIMIT = 512  # calls remembered; all are forgotten when there are more

_known: dict[tuple, "Prepared"] = {}


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


def is_plain(*arguments: Any) -> bool:
    """Whether arguments are of types that compare by value and can't change: only such calls are remembered."""
    return all(type(argument) in PLAIN for argument in arguments)


def window_items(window: Any) -> tuple:
    """What `is_plain` has to look at for a window."""
    return window if type(window) is tuple else (window,)


def recall(key: tuple) -> Prepared | None:
    return _known.get(key)


def remember(key: tuple, prepared: Prepared) -> None:
    if len(_known) >= LIMIT:
        _known.clear()
    _known[key] = prepared
