"""What the library found on this machine, how it would do a call, and compiling ahead."""

import importlib.util
import platform
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ._version import __version__
from .arguments import DTYPE_NAMES, check_choice
from .backend import NO_NUMBA_CUDA
from .backends import choose
from .checked import checked_call
from .dtypes import CODES
from .rules import BACKENDS, OPTION, RULES, WARMUP_BACKENDS

# Options of `attention` that say nothing of how it would be done.
IGNORED = tuple(rule.name for rule in RULES if "attention" in rule.calls and rule.kind == OPTION)


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
    progress: Callable[[int, int, str], None] | None = None,
) -> list[str]:
    """Compile the kernels for these dtypes now, or load them, so that later calls and processes find them ready.

    Args:
        dtypes: Of q, one or several; on the CPU, float32, float16 and bfloat16 share their kernels.
        backend: "cpu", or "cuda" for the kernels of the first GPU.
        head_dims: On a GPU, which compiles a kernel for each: head dimensions, of keys and values alike.
        gradients: The kernels of `attention_grad` too, which runs on the CPU only.
        progress: Called with kernels done, their number, and the name of the next one.

    Returns:
        The names of the kernels.

    Raises:
        TypeError: a dtype that `attention` doesn't take.
        RuntimeError: backend="cuda" and no GPU to use; it says what is missing.
    """
    check_choice("backend", backend, WARMUP_BACKENDS)
    chosen: list[Any] = []
    for item in [dtypes] if isinstance(dtypes, (str, type, np.dtype)) else list(dtypes):
        try:
            dtype = np.dtype(ml_dtypes.bfloat16 if item == "bfloat16" else item)
        except TypeError:
            dtype = None
        if dtype not in CODES:
            raise TypeError(f"dtypes must be among {DTYPE_NAMES}, got {item!r}")
        chosen.append(dtype)
    dims = [head_dims] if isinstance(head_dims, int) else list(head_dims)
    jobs = choose(backend).compile_jobs(chosen, dims, gradients)
    for done, (name, job) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), name)
        job()
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    return [name for name, _ in jobs]
