"""Which kernel takes a call, why the others don't, and which thread blocks the call becomes.

As on the CPU, how work is cut depends on the call's sizes, formats and rules and on the kind of GPU only, never on how
much else there is in the batch, so that results are the same to the bit.
"""

import importlib
from typing import Any, NamedTuple

import numpy as np

from .arguments import pack
from .compile import Kernel

# Asked in this order. The tile kernel is last, as it takes whatever the others leave.
KERNELS = {"decode": "decode", "tensor-core": "tensorcore", "tile": "tile"}
ALIGNED = 16  # bytes that asynchronous copies to shared memory take at once
TABLES_TO_COME = -1  # stands for addresses of tables that depend on the kernel


class Plan(NamedTuple):
    """How a call is done."""

    name: str  # of KERNELS
    kernel: Kernel
    reasons: dict[str, str]  # why each kernel asked before this one doesn't take it
    module: Any


class LaunchGeometry(NamedTuple):
    """What a launch of a plan needs besides addresses."""

    record: np.ndarray  # arguments.ARGUMENTS
    grid: tuple[int, int, int]
    workspace_bytes: int  # for split states that thread blocks leave to one another
    counters: int  # int64 that are 0 at the start


def choose(
    problem: np.ndarray, sequences: np.ndarray | None, cc: tuple[int, int], simulated: bool = False
) -> Plan:  # fmt: skip
    """The kernel for a `problem.PROBLEM` record, with its SEQUENCE table if it has one, on a GPU.

    Raises:
        ValueError: no kernel takes the call.
    """
    reasons: dict[str, str] = {}
    for name, file in KERNELS.items():
        if simulated and name == "tensor-core":
            reasons[name] = "the simulator has no tensor cores"
            continue
        module = importlib.import_module(f".{file}", __package__)
        reason = module.why_not(problem, cc)
        if reason is None and name == "tensor-core" and sequences is not None:
            apart = [field for field in ("q", "k", "v", "out") if (sequences[field] % ALIGNED).any()]
            reason = (
                f"batch elements of {', '.join(apart)} aren't multiples of {ALIGNED} bytes apart" if apart else None
            )
        if reason is None:
            return Plan(name, module.specialise(problem, cc), reasons, module)
        reasons[name] = reason
    raise ValueError("no GPU kernel takes this call: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def launch_geometry(problem: np.ndarray, plan: Plan) -> LaunchGeometry:
    """The thread blocks of a call, when its record is complete but for the addresses of scratch."""
    fields = {"row_tiles": -(-int(problem["queries"]) // plan.kernel.rows)}
    workspace_bytes = counters = 0
    if plan.name == "decode":
        fields["splits"], fields["split_keys"] = plan.module.splits(problem)
    record = pack(problem, **fields)
    if plan.name == "decode":
        workspace_bytes, counters = plan.module.workspace_bytes(record), plan.module.counters(record)
    return LaunchGeometry(record, plan.kernel.grid(record), workspace_bytes, counters)
