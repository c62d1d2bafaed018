"""The progress of a call: what `progress=` may be, and the bar that True shows, by rich (the extra `cli`)."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

# Seconds between two drawings of the bar. Each one in a notebook is a message to the browser, and a line in its file.
TERMINAL_PAUSE, NOTEBOOK_PAUSE = 0.1, 0.5


NOBODY: AbstractContextManager = nullcontext()


def reported(progress: Any, title: str) -> AbstractContextManager:
    """Whom a call reports to while it runs: `progress` itself, a bar for True, nobody for False and None.

    Raises:
        TypeError: something else.
        ImportError: a bar without rich.
    """
    if progress is None:
        return NOBODY
    if callable(progress):
        return nullcontext(progress)
    if not isinstance(progress, (bool, np.bool_)):
        raise TypeError(f"progress must be True for a bar, callable, False or None, got {progress!r}")
    return bar(title) if progress else NOBODY


@contextmanager
def bar(title: str) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on stderr or in a notebook: a callable of (done, total, ...). It goes when it is full.

    Where stderr is neither terminal nor notebook, one line is written at the end.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        raise ImportError('progress=True needs rich: pip install "flash_numba[cli]"', name="rich") from None
    console = Console(stderr=True)
    pause = NOTEBOOK_PAUSE if console.is_jupyter else TERMINAL_PAUSE
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    # drawn by the calls below: a thread of rich's would draw ten times a second, in notebooks too
    shown = Progress(
        *columns, console=console, auto_refresh=False, transient=console.is_terminal or console.is_jupyter,
        redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    drawn = -pause

    def report(done: int, total: int, *_: Any) -> None:
        nonlocal drawn
        now = time.monotonic()
        due = now - drawn >= pause
        shown.update(task, completed=done, total=total, refresh=due)
        if due:
            drawn = now

    with shown:
        task = shown.add_task(title, total=None)
        yield report
        shown.update(task, total=1, completed=1)  # the call is over
