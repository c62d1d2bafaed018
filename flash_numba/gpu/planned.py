"""How a GPU would do a call, and compiling for it ahead: what `info` and `warmup` say and do of GPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..backend import BackendError, HostArrays, Job
from ..call import Call
from ..checked import checked_call
from . import driver, launch

ASSUMED = (9, 0)  # the compute capability that calls are planned for where there is no GPU


def facts(
    call_on: Callable[[tuple[int, int]], Call], find: Callable[[], Any], device: int, copies: str
) -> dict[str, str]:
    """Which kernel would take a checked call, why, and how it would be cut.

    call_on: gives the call on arrays of a GPU of a compute capability. find: gives the driver. copies: what is copied.
    """
    driver.check_installed()  # the kernels can't even be imported without
    found = {}
    try:
        gpus = find()
        gpu = driver.usable(gpus, device)
        found["GPU"] = str(gpu)
    except BackendError as error:
        gpus = driver.Nowhere(ASSUMED)
        gpu = gpus.gpu(0)
        found["GPU"] = f"none: {error}"
        found["planned for"] = f"compute capability {ASSUMED[0]}.{ASSUMED[1]}"
    call = call_on(gpu.cc)
    plan, of, _ = launch.plan_call(call, gpu.cc, gpus.simulated)
    kernel = plan.kernel
    found["kernel"] = plan.name
    for name, reason in plan.reasons.items():
        found[f"not {name}"] = reason
    blocks = int(np.prod(of.grid))
    found["thread blocks"] = f"{blocks} of {kernel.threads} threads, {kernel.shared_bytes / 1024:.3g} KiB shared memory"
    found["rows"] = f"tiles of {kernel.rows}"
    if plan.name == "decode":
        splits, keys = int(of.record["splits"]), int(of.record["split_keys"])
        found["keys"] = f"{splits} KV splits of {keys}"
        found["scratch"] = f"{of.workspace_bytes / 1024:.0f} KiB"
    found["accumulates in"] = str(call.lse.dtype)
    found["copies"] = copies
    return found


def compile_jobs(
    dtypes: list[np.dtype], head_dims: list[int], gpus: Any, copies: Callable[[Call, tuple[int, int]], Call]
) -> list[Job]:
    """Names of the kernels that the first GPU takes for dtypes and head dimensions, and what compiles or loads each.

    gpus: the driver. copies: a call on host arrays as one on arrays of a GPU of a compute capability.
    """
    gpu = driver.usable(gpus, 0)
    jobs: dict[str, Callable[[], Any]] = {}
    for dtype in dtypes:
        for dim in head_dims:
            for queries in (1, 1024):  # decoding, and the rest
                q, k = np.empty((1, 1, queries, dim), dtype), np.empty((1, 1, 1024, dim), dtype)
                call, _ = checked_call(q, k, k, HostArrays())  # type: ignore[arg-type]
                plan, _, _ = launch.plan_call(copies(call, gpu.cc), gpu.cc, gpus.simulated)
                jobs.setdefault(plan.kernel.name, partial(launch.load, plan.kernel, gpus, 0))
    return list(jobs.items())
