"""What the library found on this machine, how it would do a call, and compiling ahead."""

import importlib.util
import platform
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from . import disk_cache
from ._version import __version__
from .arguments import DTYPE_NAMES, check_choice, native
from .backend import NO_NUMBA_CUDA
from .backends import choose
from .checked import checked_call
from .dtypes import CODES
from .progress import reported
from .rules import BACKENDS, OPTION, RULES, WARMUP_BACKENDS

# Options of `attention` that say nothing of how it would be done.
IGNORED = tuple(rule.name for rule in RULES if "attention" in rule.calls and rule.kind == OPTION)


class NotKeptWarning(RuntimeWarning):
    """Kernels were compiled for this process only."""


class Info(dict):
    """Facts by name; prints as a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:{width}}  {value}" for name, value in self.items())


def info(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Info:
    """What was found on this machine; with q, k and v, how `attention(q, k, v, **options)` would be done, and why.

    Nothing is compiled or computed, and with backend="cuda" no GPU is needed: the call is then planned for one of
    compute capability 9.0.

    Args:
        q: As for `attention`, (..., H, S_q, D), or None for the machine.
        k: (..., H_kv, S_kv, D).
        v: (..., H_kv, S_kv, D_v).
        **options: The keywords of `attention`, with the same defaults: causal, window, scale, softcap, bias, mask,
            alibi_slopes, sinks, q_lengths, kv_lengths, q_offset, dropout, seed, training, k_scale, v_scale, layout,
            out, backend and threads. return_lse and progress are taken too, and make no difference.

    Returns:
        An `Info`: a dictionary of names and values that prints as a table. Of the machine: versions, SIMD width,
        threads, the cache of compiled kernels, GPUs. Of a call: the kernel and why others don't take it, rows and keys
        of its blocks, the accumulation format, what is converted or copied, threads or thread blocks, and scratch.

    Raises:
        ValueError: as `attention`; some but not all of q, k and v.
        TypeError: as `attention`; options that it doesn't have.
        RuntimeError: backend="cuda" without numba-cuda, or arrays on a GPU that can't be used.
    """
    if q is None and k is None and v is None:
        return machine()
    if q is None or k is None or v is None:
        raise ValueError("info needs all of q, k and v, or none of them")
    return of_call(q, k, v, options)


def machine() -> Info:
    from .cpu import backend  # in the functions here, as starting Numba takes longer than all the rest of an import

    cpu = backend.machine()
    found = Info()
    found["flash_numba"] = __version__
    found["python"] = platform.python_version()
    found["numba"] = cpu.pop("numba")
    found["numpy"] = np.__version__
    found["ml_dtypes"] = ml_dtypes.__version__
    found.update(cpu)
    if importlib.util.find_spec("numba_cuda") is None:  # as `gpu` isn't even imported then
        found["GPU"] = f"none: {NO_NUMBA_CUDA}"
    else:
        from .gpu import driver

        found.update(driver.facts())
    return found


def of_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Info:
    name = options.get("backend", "auto")
    check_choice("backend", name, BACKENDS)
    arrays = {array: options.get(array) for array in ("bias", "mask", "out")}
    backend = choose(name, q=q, k=k, v=v, **arrays)
    call, _ = checked_call(q, k, v, backend, **{x: value for x, value in options.items() if x not in IGNORED})
    return Info(backend.facts(call))


def warmup(
    dtypes: Any = (np.float32,),
    *,
    backend: str = "cpu",
    head_dims: Any = (64, 128),
    gradients: bool = False,
    progress: bool | Callable[[int, int, str], None] | None = None,
) -> list[str]:
    """Compile the kernels for these dtypes now, or load them, so that later calls and processes find them ready.

    Args:
        dtypes: Of q, one or several, PyTorch's too; on the CPU, float32, float16 and bfloat16 share their kernels.
        backend: "cpu", or "cuda" for the kernels of the first GPU.
        head_dims: On a GPU, which compiles a kernel for each: head dimensions, of keys and values alike.
        gradients: The kernels of `attention_grad` too, which runs on the CPU only.
        progress: True for a bar, as in `attention`, or what is called with kernels done, their number, and the name of
            the next one.

    Returns:
        The names of the kernels.

    Warns:
        NotKeptWarning: (a RuntimeWarning) kernels are ready in this process, but can't be kept on disk for others; it
            says why.

    Raises:
        TypeError: a dtype that `attention` doesn't take, or a head dimension that isn't an integer.
        ValueError: a head dimension below 1, an unknown backend.
        RuntimeError: backend="cuda" and no GPU to use, or a compiler that is switched off; it says what is missing.
        ImportError: `progress=True` without rich.
    """
    check_choice("backend", backend, WARMUP_BACKENDS)
    jobs = choose(backend).compile_jobs(chosen_dtypes(dtypes), chosen_dims(head_dims), gradients)
    with reported(progress, "compiling") as report:
        for done, (name, job) in enumerate(jobs):
            if report is not None:
                report(done, len(jobs), name)
            job()
        if report is not None:
            report(len(jobs), len(jobs), "")
    if why := not_kept():
        warnings.warn(why, NotKeptWarning, stacklevel=2)
    return [name for name, _ in jobs]


def not_kept() -> str | None:
    """Why kernels that this process has compiled aren't on disk, if there are any."""
    for why in disk_cache.lost.values():
        return f"kernels were compiled, but can't be kept for other processes: {why}"
    return None


def chosen_dtypes(dtypes: Any) -> list[np.dtype]:
    """Of `warmup`: one or several, or what names them."""
    if dtypes is None or isinstance(dtypes, (str, type, np.dtype)) or not hasattr(dtypes, "__iter__"):
        dtypes = [dtypes]
    chosen = []
    for item in dtypes:
        name = item
        if type(item).__name__ == "dtype" and str(item).startswith("torch."):  # known without PyTorch
            name = str(item).removeprefix("torch.")
        try:
            dtype = None if name is None else native(np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name))
        except TypeError:
            dtype = None
        if dtype is None or dtype not in CODES:
            raise TypeError(f"dtypes must be one or several of {DTYPE_NAMES}, got {item!r}")
        chosen.append(dtype)
    return chosen


def chosen_dims(head_dims: Any) -> list[int]:
    """Of `warmup`: one or several."""
    allowed = "one or several integers of at least 1"
    try:
        dims = [x.__index__() for x in ([head_dims] if hasattr(head_dims, "__index__") else head_dims)]
    except (TypeError, AttributeError):
        raise TypeError(f"head_dims must be {allowed}, got {head_dims!r}") from None
    if min(dims, default=1) < 1:
        raise ValueError(f"head_dims must be {allowed}, got {head_dims!r}")
    return dims
