"""What the library found on this machine, how it would do a call, and compiling ahead."""

import importlib.util
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from .arguments import check_choice
from .call import Call
from .interface import BACKENDS, checked_call, flops
from .places import HOST, NO_NUMBA_CUDA, PLAIN, choose
from .problem import describe

KERNELS = ("forward", "decode")


class Info(dict):
    """Facts by name; prints as a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:{width}}  {value}" for name, value in self.items())


def info(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Info:
    """What was found on this machine; with q, k and v, how `attention(q, k, v, **options)` would be done, and why.

    Nothing is compiled or computed.

    Returns:
        An `Info`: a dictionary of names and values that prints as a table.

    Raises:
        ValueError, TypeError: as `attention`; some but not all of q, k and v.
    """
    if q is None and k is None and v is None:
        return machine()
    if q is None or k is None or v is None:
        raise ValueError("info needs all of q, k and v, or none of them")
    return of_call(q, k, v, options)


def machine() -> Info:
    import numba  # in the functions here, as starting Numba takes longer than all the rest of an import

    from . import __version__
    from .cpu import kernel_cache
    from .cpu.ir import registers

    tile = registers.REGISTER_TILE
    found = Info()
    found["flash_numba"] = __version__
    found["python"] = platform.python_version()
    found["numba"] = f"{numba.__version__} (LLVM target {registers.CPU_NAME})"
    found["numpy"] = np.__version__
    found["ml_dtypes"] = ml_dtypes.__version__
    found["SIMD"] = f"{tile.bits} bits, register tile of {tile.rows} x {tile.vectors} registers"
    found["threads"] = f"{numba.get_num_threads()} of {numba.config.NUMBA_NUM_THREADS}"
    try:
        found["threading layer"] = numba.threading_layer()
    except ValueError:
        found["threading layer"] = f"not started yet ({numba.config.THREADING_LAYER})"
    folder = kernel_cache.private_folder()
    found["kernel cache"] = str(folder) if folder else f"none: {kernel_cache.log[-1]}"
    if importlib.util.find_spec("numba_cuda") is None:  # as `gpu` isn't even imported then
        found["GPU"] = f"none: {NO_NUMBA_CUDA}"
    else:
        from .gpu import driver

        found.update(driver.facts())
    return found


def of_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Info:
    for name in ("return_lse", "progress"):
        options.pop(name, None)
    backend = options.pop("backend", "auto")
    check_choice("backend", backend, BACKENDS)
    rules: dict[str, Any] = {
        "causal": False, "window": None, "scale": None, "softcap": None, "alibi_slopes": None, "dropout": 0.0,
        "seed": None, "training": True, "k_scale": None, "v_scale": None, "layout": "bhsd",
    }  # fmt: skip
    place = HOST  # for arrays in host memory, and "cuda": a GPU isn't needed to plan for one
    if backend != "cuda" or not all(isinstance(x, PLAIN) for x in (q, k, v)):
        arrays = {name: options.get(name) for name in ("bias", "mask", "out")}
        place = choose(backend, q=q, k=k, v=v, **arrays)
    call, _ = checked_call(q, k, v, **rules | options, place=place)
    if place is not HOST or backend == "cuda":
        from .gpu import planned

        return Info(planned.facts(call, place))
    return on_cpu(call)


def on_cpu(call: Call) -> Info:
    from .cpu import launch, plan

    problem, _alive = describe(call)
    dtype = call.lse.dtype
    kernel, parameters = launch.choose_kernel(problem, dtype)
    items, few = int(parameters["tiles"]), plan.FEW_QUERIES
    work = flops(call)
    found = Info()
    if kernel == "decode":
        found["kernel"] = f"decode: at most {few} queries a head, lanes run along the head dimension"
        found["rows"] = f"{int(problem['queries'])} queries x {int(min(problem['k_group'], problem['v_group']))} heads"
        found["keys"] = (
            f"{int(parameters['splits'])} KV splits of {plan.SPLIT_KEYS}, blocks of {int(parameters['block_k'])}"
        )
    else:
        found["kernel"] = f"forward: more than {few} queries a head, a lane is a query row"
        found["rows"] = f"tiles of {int(parameters['block_q'])}, in register tiles of {launch.simd_sizes(dtype).tile}"
        found["keys"] = f"blocks of {int(parameters['block_k'])}"
    found["accumulates in"] = str(dtype)
    for name, array in (("k", call.k), ("v", call.v)):
        in_place = array.dtype == dtype and array.strides[-1] == dtype.itemsize
        found[name] = "read in place" if in_place else f"{array.dtype} or strided columns: converted block by block"
    threads = launch.threads_for(work, items)
    reason = f"{work / 1e6:.3g} MFLOP" + (
        f", at most {launch.SERIAL_FLOPS / 1e6:g} run serially" if threads == 1 else ""
    )
    found["threads"] = f"{threads} for {items} items ({reason})"
    found["scratch"] = f"{int(parameters['end']) * threads / 1024:.0f} KiB"
    return found


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
    from .arguments import DTYPE_NAMES
    from .dtypes import CODES

    check_choice("backend", backend, ("cpu", "cuda"))
    chosen: list[Any] = []
    for item in [dtypes] if isinstance(dtypes, (str, type, np.dtype)) else list(dtypes):
        try:
            dtype = np.dtype(ml_dtypes.bfloat16 if item == "bfloat16" else item)
        except TypeError:
            dtype = None
        if dtype not in CODES:
            raise TypeError(f"dtypes must be among {DTYPE_NAMES}, got {item!r}")
        chosen.append(dtype)
    if backend == "cuda":
        from .gpu import planned

        jobs = planned.compile_jobs(chosen, [head_dims] if isinstance(head_dims, int) else list(head_dims))
    else:
        jobs = compile_jobs(chosen, KERNELS + ("backward",) * gradients)
    for done, (name, job) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), name)
        job()
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    return [name for name, _ in jobs]


def compile_jobs(dtypes: list[Any], kernels: tuple[str, ...]) -> list[tuple[str, Callable[[], Any]]]:
    """Names of the CPU's kernels for dtypes of q, and what compiles or loads each."""
    from .cpu import launch

    jobs: list[tuple[str, Callable[[], Any]]] = [("threads", launch.parallel_driver)]
    for wide in sorted({np.dtype(np.float64 if dtype == np.float64 else np.float32) for dtype in dtypes}, key=str):
        jobs += [(f"{kernel} {wide}", partial(launch.worker_address, kernel, wide)) for kernel in kernels]
    return jobs
