"""How a GPU would do a call, and compiling for it ahead: what `info` and `warmup` say and do of GPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..call import Call
from ..interface import checked_call
from ..places import HOST, BackendError
from . import driver, launch
from .place import Copies

ASSUMED = (9, 0)  # the compute capability that calls are planned for where there is no GPU
PLAIN_RULES: dict[str, Any] = {
    "causal": False, "window": None, "scale": None, "softcap": None, "alibi_slopes": None, "dropout": 0.0, "seed": None,
    "training": True, "k_scale": None, "v_scale": None, "layout": "bhsd",
}  # fmt: skip


def facts(call: Call, place: Any) -> dict[str, str]:
    """Which kernel would take a checked call, why, and how it would be cut."""
    driver.check_installed()  # the kernels can't even be imported without
    found = {}
    try:
        gpus = driver.find() if place is HOST else place.driver
        gpu = driver.usable(gpus, 0 if place is HOST else place.device)
        found["GPU"] = str(gpu)
    except BackendError as error:
        gpus = driver.Nowhere(ASSUMED)
        gpu = gpus.gpu(0)
        found["GPU"] = f"none: {error}"
        found["planned for"] = f"compute capability {ASSUMED[0]}.{ASSUMED[1]}"
    if place is HOST:
        call, _ = Copies(driver.Nowhere(gpu.cc)).there(call)
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
        found["keys"] = f"{splits} shares of {keys}"
        found["scratch"] = f"{of.workspace_bytes / 1024:.0f} KiB"
    found["accumulates in"] = str(call.lse.dtype)
    found["copies"] = "to the GPU and back" if place is HOST else "none"
    return found


def compile_jobs(dtypes: list[np.dtype], head_dims: list[int]) -> list[tuple[str, Callable[[], Any]]]:
    """Names of the kernels that the first GPU takes for dtypes and head dimensions, and what compiles or loads each."""
    gpus = driver.find()
    gpu = driver.usable(gpus, 0)
    jobs: dict[str, Callable[[], Any]] = {}
    for dtype in dtypes:
        for dim in head_dims:
            for queries in (1, 1024):  # decoding, and the rest
                q, k = np.empty((1, 1, queries, dim), dtype), np.empty((1, 1, 1024, dim), dtype)
                call, _ = checked_call(q, k, k, **PLAIN_RULES)
                there, _ = Copies(driver.Nowhere(gpu.cc)).there(call)
                plan, _, _ = launch.plan_call(there, gpu.cc, gpus.simulated)
                jobs.setdefault(plan.kernel.name, partial(launch.load, plan.kernel, gpus, 0))
    return list(jobs.items())
