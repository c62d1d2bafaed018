"""Calls seen before: repeated calls of the same shapes and rules skip the checks and the planning.

A small call is over in microseconds, checking and describing it takes a hundred. What depends on shapes, strides,
dtypes and plain rules only is kept from the first such call; a later one fills in five addresses.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from .backend import Remembered

BY_VALUE = {type(None), bool, int, float, str}  # types that compare by value and can't change
SIDES = {type(None), int}  # of the sides of a window
LIMIT = 512  # calls remembered; the oldest is forgotten where there would be more

# For classes of device arrays that have been seen: what tells three of them, q, k and v, apart from others.
FORMS: dict[type, Callable[[Any, Any, Any], tuple | None]] = {}

_known: dict[tuple, Remembered] = {}


def recall(
    q, k, v, causal, window, scale, softcap, bias, mask, alibi_slopes, sinks, q_lengths, kv_lengths, q_offset, dropout,
    k_scale, v_scale, layout, out, backend, threads, progress,
) -> tuple[tuple | None, Remembered | None]:  # fmt: skip
    """`(key, kept)` of a call of `attention`: what it may be remembered by, if at all, and what was kept of one alike.

    Takes all its keywords but those that are `rules.FREE`; those that are `rules.KEY` are in the key, and all others
    have to be at their defaults. (Written out for speed: a look takes less than a microsecond.)
    """
    kind = type(q)
    if not (
        kind is type(k) is type(v)
        and (kind is np.ndarray or kind in FORMS)
        and bias is mask is alibi_slopes is sinks is q_lengths is kv_lengths is q_offset is k_scale is v_scale is None
        and out is None
        and (progress is None or progress is False)
        and (threads is None or type(threads) is int)  # neither True nor 1.0, which equal 1
        and is_plain(window, scale, softcap, dropout, causal, layout, backend)
        and dropout == 0
    ):
        return None, None
    form: tuple | None
    if kind is np.ndarray:
        form = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
    else:
        form = FORMS[kind](q, k, v)
        if form is None:
            return None, None
    key = (form, causal, type(causal), window, scale, softcap, layout, backend, threads)
    return key, _known.get(key)


def is_plain(window: Any, *arguments: Any) -> bool:
    """Whether arguments compare by value and can't change: only such calls are remembered."""
    for x in arguments:  # not all(...), which takes three times as long
        if type(x) not in BY_VALUE:
            return False
    if type(window) is tuple:
        return all(type(side) in SIDES for side in window)
    return type(window) in SIDES


def form_of_chunk(k: Any, v: Any, bias: Any, mask: Any) -> tuple | None:
    """What chunks of a stream that are absorbed alike have in common; None for those that each need a look."""
    if bias is mask is None and type(k) is type(v) is np.ndarray:
        return k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype
    return None


def remember(key: tuple, kept: Remembered | None) -> None:
    if kept is None:
        return
    while len(_known) >= LIMIT:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread was quicker
            del _known[next(iter(_known))]
    _known[key] = kept
