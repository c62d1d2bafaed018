"""Running a kernel: compile or load it, hand out threads and scratch, stay interruptible.

A kernel is one serial C function of three addresses (problem, launch parameters, scratch). One thread calls it
directly; several call it through one small parallel driver, which serves every kernel, and each takes the next work
tile when it is done with one. Which thread computes a work tile changes nothing in the result.
"""

import ctypes
import gc
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import llvmlite.binding.ffi
import numba
import numpy as np
from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from ..addresses import address
from ..backend import Progress
from ..call import Call, flops
from ..problem import PROBLEM, describe
from . import neighbours
from .compile import MATH
from .ir.registers import REGISTER_TILE
from .kernel_cache import KernelCache
from .parallel import drive
from .plan import (
    CANCEL,
    LAUNCH_PARAMETERS,
    LINE,
    NEXT_TILE,
    SimdSizes,
    block_rows,
    has_few_queries,
    plan_decode,
    plan_forward,
    up_to,
)
from .work import work as work_of

# FLOPs under which a second thread costs more than it brings (a parallel launch takes about 20 us).
SERIAL_FLOPS = 2e6
# What a thread does in 50 ms at most (`work.py`): longer calls run beside the calling thread, which waits and stays
# interruptible.
WATCHED_WORK = 5e9

PARAMETERS_AT = up_to(LINE, PROBLEM.itemsize)  # bytes from a call's problem to its launch parameters
WORKSPACE, FINISHED = ((PARAMETERS_AT + LAUNCH_PARAMETERS.fields[name][1]) // 8 for name in ("workspace", "finished"))  # type: ignore[index]

SERIAL_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

_lock = threading.RLock()
_workers: dict[tuple[str, np.dtype], int] = {}
_driver = None
ENVIRONMENT_LIMIT = neighbours.threads_in_environment() or sys.maxsize  # read once, as Numba reads its own
_collector_paused = False
_workqueue_lock = threading.RLock()
_in_workqueue = False  # whether the thread that holds its lock is calling the driver


_forking = ExitStack()


def _before_fork() -> None:
    """Wait for threads that compile: Numba and LLVM would stay locked in the child for good, as they were then."""
    of_llvm = getattr(llvmlite.binding.ffi.lib, "_lock", None)
    for lock in (_lock, global_compiler_lock, of_llvm):  # in the order in which compiling takes them
        if lock is not None:
            _forking.enter_context(lock)


def _after_fork_in_child() -> None:
    global _workqueue_lock, _in_workqueue, _collector_paused
    _forking.close()
    _workqueue_lock, _in_workqueue = threading.RLock(), False
    if _collector_paused:  # by a thread that isn't here to go on
        _collector_paused = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_forking.close, after_in_child=_after_fork_in_child)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Compiling makes millions of objects and little garbage; searching them for cycles takes 5 % of its time."""
    global _collector_paused
    if not gc.isenabled():
        yield
        return
    _collector_paused = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _collector_paused = False


def worker_address(name: str, dtype: np.dtype) -> int:
    """The kernel "forward" or "decode" for float32 or float64 as a C function, compiled or from the disk cache."""
    if (name, dtype) not in _workers:
        with _lock:
            signature = types.void(types.intp, types.intp, types.CPointer(numba.from_dtype(dtype)))
            module = importlib.import_module(f"flash_numba.cpu.{name}")
            function = getattr(module, name)
            kernel = CFunc(function, (signature.args, signature.return_type), locals={}, options=MATH)
            kernel._cache = KernelCache(f"{name}_{dtype}", module.__name__)  # type: ignore[attr-defined]
            with collector_paused():
                kernel.compile()
            assert kernel.address is not None
            _workers[name, dtype] = kernel.address
    return _workers[name, dtype]


def parallel_driver():
    """The compiled `drive`; Numba's threads have been started when it is there."""
    global _driver
    if _driver is None:
        with _lock:
            driver = njit(parallel=True, nogil=True)(drive)
            driver._cache = KernelCache("drive", drive.__module__)
            driver.compile(types.void(*[types.intp] * 6))
            driver.disable_compile()
            _driver = driver
    neighbours.unnest_openmp()
    return _driver


def simd_sizes(dtype: np.dtype) -> SimdSizes:
    """What a plan has to know of the CPU, for float32 or float64."""
    real = numba.from_dtype(dtype)
    return SimdSizes(REGISTER_TILE.register(real), REGISTER_TILE.width(real), dtype.itemsize)


def rows_per_work_tile(call: Call) -> int:
    return block_rows(call.q.shape[-2], simd_sizes(call.lse.dtype))


def new_state(call: Call) -> np.ndarray:
    """The state of a stream before any key, of each work tile: (-inf, 0, 0), laid out by `plan.LAUNCH_PARAMETERS`."""
    *batch, heads, queries, _ = call.q.shape
    dtype = call.lse.dtype
    parameters = plan_forward(describe(call)[0], simd_sizes(dtype))
    block_q = int(parameters["block_q"])
    state = np.zeros((math.prod(batch) * heads * -(-queries // block_q), int(parameters["state_bytes"])), np.uint8)
    maximum = int(parameters["maximum"])
    state[:, maximum : maximum + block_q * dtype.itemsize].view(dtype)[...] = -np.inf
    return state


class Launch(NamedTuple):
    """What a call needs besides the addresses of its arrays; the same for all calls of the same shapes and rules."""

    worker: int  # address of the kernel
    serial: Callable[[int, int, int], None]  # the kernel as a Python function
    words: np.ndarray  # the PROBLEM and the LAUNCH_PARAMETERS record as 64-bit integers, each in whole cache lines
    tiles: int  # work tiles
    scratch_bytes: int  # of a thread
    groups: int  # of decode, where there are several KV splits: how many groups of heads
    workspace_bytes: int  # for the states of all splits
    flops: float
    work: float  # `work.work`
    limit: int | None = None  # of threads, from the caller


def choose_kernel(problem: np.ndarray, dtype: np.dtype) -> tuple[str, np.ndarray]:
    """The kernel for a `problem.PROBLEM` record in float32 or float64, and its `plan.LAUNCH_PARAMETERS` record."""
    if has_few_queries(problem):
        return "decode", plan_decode(problem, simd_sizes(dtype))
    return "forward", plan_forward(problem, simd_sizes(dtype))


def prepare(problem: np.ndarray, call: Call) -> Launch:
    """Choose and compile the kernel for a call and its `problem.PROBLEM` record, and plan its work."""
    dtype = call.lse.dtype
    name, parameters = choose_kernel(problem, dtype)
    tiles, scratch, splits = int(parameters["tiles"]), int(parameters["end"]), int(parameters["splits"])
    groups = tiles // splits if splits > 1 else 0
    workspace_bytes = groups * splits * int(parameters["state_bytes"])
    worker, words = worker_address(name, dtype), words_of(problem, parameters)
    work = work_of(call, tiles / max(splits, 1))
    return Launch(
        worker, SERIAL_CALL(worker), words, tiles, scratch, groups, workspace_bytes, flops(call), work, call.threads
    )


def words_of(problem: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """A call's two records behind each other, as `Launch.words`."""
    words = np.zeros(PARAMETERS_AT + up_to(LINE, parameters.itemsize), np.uint8)
    for record, at in ((problem, 0), (parameters, PARAMETERS_AT)):
        words[at : at + record.itemsize] = np.frombuffer(record.tobytes(), np.uint8)
    return words.view(np.int64)


def thread_limit(asked: int | None = None) -> int:
    """How many threads a call may have, by what its caller asked for, or by the environment. Starts none."""
    if neighbours.why_forked():
        return 1
    has = numba.config.NUMBA_NUM_THREADS if neighbours.layer() is None else numba.get_num_threads()
    return min(has, asked or ENVIRONMENT_LIMIT)


def threads_for(flops: float, tiles: int, asked: int | None = None) -> int:
    """How many threads a call is worth."""
    if flops <= SERIAL_FLOPS or tiles <= 1 or asked == 1:
        return 1
    return min(thread_limit(asked), tiles)


def start(launch: Launch, addresses: tuple, keep: object, progress: Progress | None = None) -> None:
    """Run a call on the arrays q, k, v, out and lse at five addresses.

    keep: those arrays and whatever else the problem points to; they live as long as a thread may write to them.
    """
    threads = threads_for(launch.flops, launch.tiles, launch.limit)
    # one buffer: a call of a few microseconds notices every allocation
    size = launch.words.size
    buffer = np.empty(size + (threads * launch.scratch_bytes + LINE) // 8, np.int64)
    base = address(buffer)
    first = -base % LINE // 8
    words = buffer[first : first + size]
    words[:] = launch.words
    words[:5] = addresses
    at = base + 8 * first, base + 8 * first + PARAMETERS_AT, base + 8 * (first + size)
    if launch.groups:
        finished = np.zeros(launch.groups, np.int64)
        workspace = np.empty(launch.workspace_bytes + LINE, np.uint8)
        words[WORKSPACE], words[FINISHED] = up_to(LINE, address(workspace)), address(finished)
        keep = (keep, finished, workspace)

    if threads == 1 and progress is None and launch.work <= WATCHED_WORK:
        launch.serial(*at)
        return

    driver, team = (None, 1) if threads == 1 else (parallel_driver(), thread_limit(launch.limit))

    def call(alive=(buffer, keep)):
        if driver is None:
            launch.serial(*at)
        else:
            run_parallel(driver, launch.worker, *at, launch.scratch_bytes, threads, team)

    if progress is None and (launch.work <= WATCHED_WORK * threads or not in_main_thread()):
        call()
    else:
        run_watched(call, words, launch.tiles, progress)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def run_parallel(driver, worker, problem, parameters, scratch, scratch_bytes, threads, team) -> None:
    """Run the driver on some threads. team: how many of Numba's take part, so that the others aren't woken."""
    global _in_workqueue
    arguments = worker, problem, parameters, scratch, scratch_bytes, threads
    if numba.threading_layer() != "workqueue":
        run_in_team(driver, arguments, team)
        return
    with _workqueue_lock:  # workqueue aborts the process on concurrent calls
        if _in_workqueue:  # a signal handler or a finaliser interrupts this thread's own call
            SERIAL_CALL(worker)(problem, parameters, scratch)
            return
        try:
            _in_workqueue = True
            run_in_team(driver, arguments, team)
        finally:
            _in_workqueue = False


def run_in_team(driver, arguments: tuple, team: int) -> None:
    if team == numba.config.NUMBA_NUM_THREADS:
        driver(*arguments)
        return
    before = numba.get_num_threads()  # of this thread
    try:
        numba.set_num_threads(team)
        driver(*arguments)
    finally:
        numba.set_num_threads(before)


def run_watched(call: Callable[[], None], words: np.ndarray, tiles: int, progress: Progress | None) -> None:
    """Make the call in a helper thread and wait for it here, where Ctrl-C can arrive; report progress meanwhile."""
    done = threading.Event()
    failure: list[BaseException] = []

    def body():
        try:
            call()
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    helper = threading.Thread(target=body, name="flash_numba", daemon=True)
    try:
        try:
            helper.start()
        except RuntimeError:  # Python 3.12 and up start no threads while the interpreter shuts down
            body()
        while not done.wait(0.1):
            if progress is not None:
                progress(min(int(words[(PARAMETERS_AT + NEXT_TILE) // 8]), tiles), tiles)
    except BaseException:
        words[(PARAMETERS_AT + CANCEL) // 8] = 1
        if helper.ident is not None:
            done.wait()  # within milliseconds: every thread looks at the flag before each block of keys
        raise
    if failure:
        raise failure[0]
    if progress is not None:
        progress(tiles, tiles)
