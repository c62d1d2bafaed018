"""Calls that somebody waits for: with a progress callback, or long. What goes wrong in one reaches the caller.

A call that is cut short leaves its output as it was, which tells it from one that ran to its end, however fast or slow.
"""

import threading
import time

import numba
import numpy as np
import pytest

from flash_numba import attention, attention_grad
from flash_numba.cpu import launch


class Stopped(Exception):
    pass


def stop(done, total):
    """A progress callback that fails in the middle of the call."""
    raise Stopped(done, total)


def test_a_call_is_cut_short_within_a_work_tile():
    """A single one, of so many keys that it takes seconds: the callback fails after the first tenth of a second."""
    q, k = np.ones((192, 1), np.float32), np.broadcast_to(np.float32(1), (2**25, 1))
    out = np.full(q.shape, np.nan, np.float32)
    attention(q, k[:99], k[:99])
    with pytest.raises(Stopped) as stopped:
        attention(q, k, k, out=out, progress=stop)
    assert stopped.value.args[1] == 1  # work tile
    assert np.isnan(out).all()


def test_an_error_in_the_progress_callback_ends_the_call():
    """Before the last of its work tiles: the first rows of each head are computed last."""
    x = np.broadcast_to(np.float32(1), (64, 32768, 64))
    out = np.full(x.shape, np.nan, np.float32)
    attention(x[:, :30], x[:, :30], x[:, :30])
    with pytest.raises(Stopped):
        attention(x, x, x, out=out, progress=stop)
    assert np.isnan(out[:, 0]).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("gradient", [False, True])
def test_an_error_of_the_call_itself_reaches_the_caller(monkeypatch, threads, gradient):
    """It happens in the helper thread, which computes while this one waits."""
    x = np.ones((2, 40, 8), np.float32)
    out, lse = attention(x, x, x, return_lse=True)

    def fail(*of):
        raise MemoryError("of the helper")

    monkeypatch.setattr(launch, "threads_for", lambda flops, tiles, asked=None: threads)
    monkeypatch.setattr(launch, "run_parallel", fail)
    monkeypatch.setattr(launch, "SERIAL_CALL", lambda worker: fail)
    seen = []
    call, arrays = (attention_grad, (x, x, x, x, out, lse)) if gradient else (attention, (x, x, x))
    with pytest.raises(MemoryError, match="of the helper"):
        call(*arrays, progress=lambda *of: seen.append(of))
    assert not seen or seen[-1][0] < seen[-1][1]  # nor is it said to be done


def test_workqueue_gets_one_call_at_a_time(monkeypatch):
    """It aborts the process otherwise. Here without it: a driver that would notice."""
    inside, most = [], []

    def driver(*of):
        inside.append(of)
        most.append(len(inside))
        time.sleep(0.01)  # time for another to come in, were it let
        inside.pop()

    monkeypatch.setattr(launch.numba, "threading_layer", lambda: "workqueue")
    team = numba.config.NUMBA_NUM_THREADS
    callers = [threading.Thread(target=launch.run_parallel, args=(driver, n, 0, 0, 0, 0, 2, team)) for n in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most == [1] * 5
