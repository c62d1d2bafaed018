"""The CPU as a backend (`backend.py`): from a checked call to the kernels' launch."""

import os
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .._version import __version__
from ..addresses import address
from ..backend import YES, GradientCall, HostArrays, Job, Progress, Support
from ..call import Call, flops
from ..problem import PROBLEM, SEQUENCE, describe
from ..reference import Gradients
from ..work_tiles import packed_work_tiles
from . import neighbours
from .gradient import computed
from .merge import merge

KERNELS = ("forward", "decode")
SHIFT, KEY_INDEX = (PROBLEM.fields[name][1] // 8 for name in ("shift", "key_index"))  # type: ignore[index]

# The kernels are imported in the functions below, not before the first call: it starts Numba.


class CPU(HostArrays):
    """Compiled kernels on arrays in host memory."""

    name = "cpu"

    def supports(self, call: Call, gradient: bool = False) -> Support:
        return YES

    def remembers(self, kind: type) -> bool:
        return kind is np.ndarray  # another library's array has been converted

    def prepare(self, call: Call, repeated: bool = False) -> "Prepared":
        if call.cu_seqlens_q is not None and call.out is not None:  # rows behind the last sequence
            end = call.cu_seqlens_q[-1]
            call.out[..., end:, :], call.lse[..., end:] = 0, -np.inf
        return prepare(call, None)

    def merge(self, outs: list, lses: list, sinks: np.ndarray | None, out: np.ndarray, lse: np.ndarray) -> None:
        merge(outs, lses, sinks, out, lse)

    def gradient(self, gradient: GradientCall, progress: Progress | None = None) -> Gradients:
        return computed(gradient, progress)

    def stream(self) -> "State":
        return State()

    def facts(self, call: Call) -> dict[str, str]:
        return facts(call)

    def compile_jobs(self, dtypes: list[np.dtype], head_dims: list[int], gradients: bool) -> list[Job]:
        from . import launch

        jobs: list[Job] = [("threads", launch.parallel_driver)]
        for wide in sorted({np.dtype(np.float64 if dtype == np.float64 else np.float32) for dtype in dtypes}, key=str):
            kernels = KERNELS + ("backward",) * gradients
            jobs += [(f"{kernel} {wide}", partial(launch.worker_address, kernel, wide)) for kernel in kernels]
        return jobs


class Prepared(NamedTuple):
    """A call that was planned (`backend.PreparedCall`)."""

    start: Any  # launch.start
    launch: Any  # launch.Launch; None where there is nothing to compute
    addresses: tuple[int, ...]  # of q, k, v, out and lse
    tables: list  # which the launch points to
    alive: Any  # the call, and what else has to live while it runs

    def run(self, progress: Progress | None = None) -> None:
        if self.launch is not None:
            self.start(self.launch, self.addresses, self, progress)

    def remembered(self, out: np.ndarray, lse: np.ndarray) -> "Remembered | None":
        if self.launch is None:
            return None
        return Remembered(self.start, self.launch, self.tables, out.shape, out.dtype, lse.shape, lse.dtype)


class Remembered(NamedTuple):
    """A call without its arrays (`backend.Remembered`)."""

    start: Any  # launch.start
    launch: Any  # launch.Launch
    tables: list  # which the launch points to
    shape: tuple[int, ...]  # of out
    dtype: np.dtype
    lse_shape: tuple[int, ...]
    lse_dtype: np.dtype

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.empty(self.shape, self.dtype), np.empty(self.lse_shape, self.lse_dtype)
        addresses = address(q), address(k), address(v), address(out), address(lse)
        self.start(self.launch, addresses, (q, k, v, out, lse, self))
        return out, lse


def prepare(call: Call, state: np.ndarray | None) -> Prepared:
    """Plan a call; with the state of a stream, one that accumulates into it, and writes only if there is an output."""
    if call.lse.size == 0:
        return Prepared(None, None, (), [], call)
    from . import launch

    problem, tables = describe(call)
    if call.cu_seqlens_q is not None:
        tiles = packed_work_tiles(tables[-1], launch.rows_per_work_tile(call), call.left, call.right)
        problem["work_tiles"], problem["work_tile_count"] = address(tiles), tiles.size
        tables.append(tiles)
    if state is not None:
        problem["state"] = address(state)
    addresses: Any = tuple(problem[name] for name in ("q", "k", "v", "out", "lse"))
    planned = launch.prepare(problem, call)
    return Prepared(launch.start, planned, addresses, tables, (call, state))


class State:
    """What a stream keeps (`backend.StreamState`): (m, l, O) of every row in the kernel's own order.

    Chunks are accumulated into it in place, so one that is interrupted leaves it half updated.
    """

    def __init__(self) -> None:
        self._saved: np.ndarray | None = None
        self._wide = np.dtype(np.float32)  # what it accumulates in
        self._prepared: Prepared | None = None  # the last chunk, and what others like it are run with
        self._launch: Any = None
        self._count = 0  # its keys
        self._chunk: dict[str, Any] = {}  # what the result's call has of the last chunk
        self._interrupted = False

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, or for a process that may run on another CPU: not what points to this one's arrays."""
        self._check()
        planned = {"_prepared": None, "_launch": None, "_count": 0}
        return {**self.__dict__, **planned, "_layout": None if self._saved is None else layout(self._wide)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        there = state.pop("_layout")
        self.__dict__.update(state)
        if there is not None and there != layout(self._wide):
            raise ValueError(f"the stream's state is of another version or CPU: {there}; here {layout(self._wide)}")

    def absorb(self, call: Call) -> bool:
        self._check()
        no_keys = {name: np.empty_like(np.take(x, [], axis=-2)) for name, x in (("k", call.k), ("v", call.v))}
        # a value's scale is applied when rows are written
        self._chunk = {**no_keys, "k_scales": call.k_scales, "v_scales": call.v_scales}
        if call.lse.size == 0:
            return False
        from . import launch

        if self._saved is None:
            self._saved, self._wide = launch.new_state(call), call.lse.dtype
        self._interrupted = True
        self._prepared = prepare(replace(call, out=None), self._saved)
        self._launch, self._count = self._prepared.launch, call.k.shape[-2]
        self._prepared.run()
        self._interrupted = False
        return True

    def absorb_alike(self, k: np.ndarray, v: np.ndarray) -> None:
        self._check()
        last = self._prepared
        assert last is not None
        self._interrupted = True
        self._launch = following_keys(self._launch, last.tables, self._count)
        q, _, _, _, lse = last.addresses
        last.start(self._launch, (q, address(k), address(v), 0, lse), (last, k, v))
        self._interrupted = False

    def result(self, call: Call) -> None:
        self._check()
        prepare(replace(call, **self._chunk), self._saved).run()

    def _check(self) -> None:
        if self._interrupted:
            raise RuntimeError("the stream's last absorb was interrupted, or still runs in another thread")


def layout(wide: np.dtype) -> str:
    """What the order of a stream's state depends on, besides shapes."""
    from . import launch

    return f"flash_numba {__version__}, {wide} in {launch.simd_sizes(wide)}"


def following_keys(launch: Any, tables: list, count: int) -> Any:
    """The launch for the keys that come `count` keys after those of a launch; its tables are moved on in place."""
    words = launch.words.copy()
    words[SHIFT] -= count
    words[KEY_INDEX] += count
    for table in tables:
        if table.dtype == SEQUENCE:
            table["shift"] -= count
    return launch._replace(words=words)


# -- for `info` --------------------------------------------------------------------------------------------------------


def facts(call: Call) -> dict[str, str]:
    """Which kernel would take a checked call, why, and how it would be cut."""
    from . import launch, plan

    problem, _alive = describe(call)
    dtype = call.lse.dtype
    kernel, parameters = launch.choose_kernel(problem, dtype)
    tiles, few, block_k = int(parameters["tiles"]), plan.FEW_QUERIES, int(parameters["block_k"])
    work = flops(call)
    found = {}
    if kernel == "decode":
        found["kernel"] = f"decode: at most {few} queries a head, lanes run along the head dimension"
        found["rows"] = f"{int(problem['queries'])} queries x {int(min(problem['k_group'], problem['v_group']))} heads"
        found["keys"] = f"{int(parameters['splits'])} KV splits of {int(parameters['split_keys'])}, blocks of {block_k}"
    else:
        found["kernel"] = f"forward: more than {few} queries a head, a lane is a query row"
        found["rows"] = f"tiles of {int(parameters['block_q'])}, in register tiles of {launch.simd_sizes(dtype).tile}"
        found["keys"] = f"blocks of {block_k}"
    found["accumulates in"] = str(dtype)
    for name, array in (("k", call.k), ("v", call.v)):
        in_place = array.dtype == dtype and array.strides[-1] == dtype.itemsize
        found[name] = "read in place" if in_place else f"{array.dtype} or strided columns: converted block by block"
    threads = launch.threads_for(work, tiles, call.threads)
    reason = f"{work / 1e6:.3g} MFLOP"
    if work <= launch.SERIAL_FLOPS:
        reason += f", at most {launch.SERIAL_FLOPS / 1e6:g} run serially"
    elif threads < tiles:
        reason += f"; {thread_limit(call.threads)}"
    found["threads"] = f"{threads} for {tiles} work tiles ({reason})"
    found["scratch"] = f"{int(parameters['end']) * threads / 1024:.0f} KiB"
    return found


def thread_limit(asked: int | None = None) -> str:
    """How many of Numba's threads a call may have, and why not all of them."""
    import numba

    from . import launch

    most, has = launch.thread_limit(asked), numba.config.NUMBA_NUM_THREADS
    text = f"{most} of {has}"
    if neighbours.why_forked():
        return f"{text}: {neighbours.why_forked()}"
    if most == asked:
        return f"{text}: threads={asked}"
    if most == has:
        return text
    return f"{text}: OMP_NUM_THREADS={most}" if most == launch.ENVIRONMENT_LIMIT else f"{text}: numba.set_num_threads"


def machine() -> dict[str, str]:
    """What was found of the CPU, its threads and the cache of its kernels."""
    import numba

    from .. import disk_cache
    from .ir import registers

    tile = registers.REGISTER_TILE
    found = {"numba": f"{numba.__version__} (LLVM target {registers.CPU_NAME})"}
    found["SIMD"] = f"{tile.bits} bits, register tile of {tile.rows} x {tile.vectors} registers"
    found["threads"] = thread_limit()
    found["threading layer"] = neighbours.layer() or f"not started yet ({numba.config.THREADING_LAYER})"
    if numba.config.DISABLE_JIT:
        found["kernels"] = "none: NUMBA_DISABLE_JIT is set, which leaves backend='reference'"
    found["kernel cache"] = str(disk_cache.private_folder() or f"none: {disk_cache.why_not()}")
    if os.environ.get("FLASH_NUMBA_SHARED_CACHE_DIR"):
        found["shared kernel cache"] = disk_cache.shared_cache()
    return found
