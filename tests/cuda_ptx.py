"""Calls of flash_numba on a GPU that is the PTX interpreter: compiled as for a device, executed by `ptx`.

`Interpreted` is a backend (`flash_numba/backend.py`) with one kernel module. It copies a call's arrays to memory where
every byte in between is forbidden, plans and compiles as `gpu/launch.py` does, and runs the PTX.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from ptx import Counts, GlobalMemory, Machine, parse

import flash_numba
from flash_numba import interface, reference
from flash_numba.addresses import address
from flash_numba.backend import YES, HostArrays, Progress, Support
from flash_numba.call import Call
from flash_numba.gpu import compile as compiling
from flash_numba.gpu import launch
from flash_numba.gpu.arguments import ARGUMENTS
from flash_numba.gpu.plan import TABLES_TO_COME, Plan, launch_geometry
from flash_numba.problem import describe
from flash_numba.work_tiles import packed_work_tiles

CC = (9, 0)
AT_ONCE = 8  # thread blocks that the interpreter runs together
_kernels: dict[tuple[str, tuple[int, int]], compiling.Kernel] = {}


@functools.cache
def _ptx_of(name: str, cc: tuple[int, int]) -> str:
    return compiling.to_ptx(_kernels[name, cc], cc)


def ptx_of(kernel: compiling.Kernel, cc: tuple[int, int] = CC) -> str:
    """A kernel's PTX, compiled once a process: it takes seconds, and several tests look at the same ones."""
    _kernels.setdefault((kernel.name, cc), kernel)
    return _ptx_of(kernel.name, cc)


@functools.lru_cache(maxsize=8)
def machine_for(ptx: str, threads: int, shared_bytes: int, at_once: int) -> Machine:
    (kernel,) = parse(ptx).values()
    return Machine(kernel, (threads, 1, 1), shared_bytes, at_once)


class Interpreted(HostArrays):
    """A GPU of the interpreter, on which `module` does every call.

    change: what is done to the PTX first, for tests that want it wrong. backwards: the last thread blocks run first.
    """

    def __init__(self, module: ModuleType, change: Callable[[str], str] | None = None, backwards: bool = False) -> None:
        self.module, self.change, self.backwards = module, change, backwards
        self.counts = Counts()
        self.ptx = ""

    name = "cuda"

    def supports(self, call: Call, gradient: bool = False) -> Support:
        return YES

    def remembers(self, kind: type) -> bool:
        return False

    def prepare(self, call: Call, repeated: bool = False) -> "Prepared":
        return Prepared(self, call)

    def compute(self, call: Call) -> None:
        if call.lse.size == 0:
            return
        assert call.out is not None
        memory = GlobalMemory(64 << 20)
        there = replace(
            call,
            q=memory.place(call.q),
            k=memory.place(call.k),
            v=memory.place(call.v),
            operands=[memory.place(term) for term in call.operands],
            out=memory.place(call.out, "write"),
            lse=memory.place(call.lse, "write"),
        )
        self.execute(there, memory)
        assert there.out is not None
        unwritten = [name for name in ("out", "lse") if memory.unwritten(getattr(there, name)).any()]
        assert not unwritten, f"not all of {unwritten} was written"
        call.out[...], call.lse[...] = there.out, there.lse

    def execute(self, call: Call, memory: GlobalMemory) -> None:
        if call.cu_seqlens_q is not None:
            call = launch.with_rows_behind(call)
        problem, alive = describe(call)
        if call.cu_seqlens_q is not None:
            problem["work_tiles"] = TABLES_TO_COME
        reason = self.module.why_not(problem, CC)
        assert reason is None, reason
        kernel = self.module.specialise(problem, CC)
        if call.cu_seqlens_q is not None:
            tiles = packed_work_tiles(alive[-1], kernel.rows, call.left, call.right)
            problem["work_tiles"], problem["work_tile_count"] = address(tiles), tiles.size
            alive.append(tiles)
        name = self.module.__name__.split(".")[-1]
        of = launch_geometry(problem, Plan({"tensorcore": "tensor-core"}.get(name, name), kernel, {}, self.module))
        record = of.record
        for field in launch.TABLES:
            for table in alive:
                if record[field] == address(table):
                    record[field] = address(memory.place(table))
                    break
        if of.workspace_bytes:
            record["workspace"] = memory.reserve(of.workspace_bytes)
        if of.counters:
            record["finished"] = address(memory.place(np.zeros(of.counters, np.int64), "update"))
        if 0 in of.grid:
            return
        ptx = ptx_of(kernel)
        if self.change is not None:
            ptx = self.change(ptx)
        self.ptx = ptx
        at_once = min(AT_ONCE, int(np.prod(of.grid)))
        machine = machine_for(ptx, kernel.threads, kernel.shared_bytes, at_once)
        assert record.dtype == ARGUMENTS
        self.counts = machine.launch(of.grid, record.tobytes(), memory, backwards=self.backwards)


class Prepared(NamedTuple):
    """A call on the interpreter (`backend.PreparedCall`)."""

    backend: Interpreted
    call: Call

    def run(self, progress: Progress | None = None) -> None:
        self.backend.compute(self.call)

    def remembered(self, out: np.ndarray, lse: np.ndarray) -> None:
        return None


@contextmanager
def calls_on(backend: Interpreted) -> Iterator[None]:
    """`flash_numba`'s public calls take place there."""
    before = interface.choose
    interface.choose = lambda name, **arrays: backend  # type: ignore[assignment]
    try:
        yield
    finally:
        interface.choose = before


def attend(backend: Interpreted, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`flash_numba.attention` there."""
    with calls_on(backend):
        return flash_numba.attention(q, k, v, **options)


def eager_error(dtype: np.dtype, q: Any, k: Any, v: Any, **rules: Any) -> float:
    """The largest error of attention with its weights and its output in `dtype`, everything else exact.

    Arrays are (..., H, S, D). A real eager version rounds its scores as well, so this is on the strict side.
    """
    with np.errstate(all="ignore"):
        truth = reference.attention(q, k, v, **rules)
        weights = reference.attention(q, k, np.eye(k.shape[-2]), **(rules | {"v_scale": None}))
        heads = q.shape[-3] if q.ndim > 2 else 1
        values = np.asarray(v).astype(np.float64)
        values = values if v.ndim == 2 else np.repeat(values, heads // v.shape[-3], axis=-3)
        seen = np.where(weights[..., None] == 0, 0.0, values[..., None, :, :]) if np.isnan(values).any() else None
        rounded = weights.astype(dtype).astype(np.float64)
        product = rounded @ values if seen is None else (rounded[..., None] * seen).sum(axis=-2)
        error = np.abs(product.astype(dtype).astype(np.float64) - truth)
    return float(np.max(error[np.isfinite(error)], initial=0.0))


def eager_limit(dtype: np.dtype, truth: np.ndarray, *arrays: Any, layout: str = "bhsd", **rules: Any) -> np.ndarray:
    """Twice that error, and two units in the last place of each output."""
    q, k, v = (np.swapaxes(x, -2, -3) if layout == "bshd" and x.ndim > 2 else x for x in arrays)
    info = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(np.nan_to_num(truth, posinf=0, neginf=0)), float(info.smallest_normal))
    ulp = 2.0 ** (np.floor(np.log2(size)) - info.nmant)
    return 2 * eager_error(dtype, q, k, v, **rules) + 2 * ulp
