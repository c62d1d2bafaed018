"""Running a gradient call: the gradients are described as a problem of their own, then it goes like any call."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from .. import recurrence
from ..addresses import address
from ..call import Call, GradCall, flops
from ..problem import describe
from ..scores import LOG2E
from . import launch
from .backward_plan import chained_tiles, plan_backward
from .launch import Progress
from .plan import SimdSizes, up_to

GRADIENT_FLOPS = 2.5  # over the forward's: five matrix products where it has two


def run(grad: GradCall, progress: Progress | None = None) -> None:
    """Fill the gradients of a call in, whose arrays hold 0."""
    dtype = grad.call.lse.dtype
    simd = launch.simd_sizes(dtype)
    delta = np.zeros_like(grad.call.lse) if grad.dlse is None else np.negative(grad.dlse)
    dk, dv = whole_registers(grad.dk, simd), whole_registers(grad.dv, simd)
    if grad.call.k.shape[-2] > 0:
        run_kernel(grad, dk, dv, delta, simd, progress)
    for own, filled in ((grad.dk, dk), (grad.dv, dv)):
        if own is not None and filled is not None and own is not filled:
            own[...] = filled[..., : own.shape[-1]]
    if grad.dsinks is not None:
        assert grad.call.sinks is not None
        fill_sink_gradients(grad, delta)


def whole_registers(array: np.ndarray | None, simd: SimdSizes) -> np.ndarray | None:
    """An array to add dK or dV to, whose rows end with a whole vector register."""
    if array is None or array.shape[-1] % simd.register == 0:
        return array
    return np.zeros((*array.shape[:-1], up_to(simd.register, array.shape[-1])), array.dtype)


def run_kernel(grad, dk, dv, delta, simd: SimdSizes, progress: Progress | None) -> None:
    call = grad.call
    dtype = call.lse.dtype
    problem, alive = describe(call)
    gradients, gradients_alive = describe_gradients(grad, dk, dv, delta)
    parameters = plan_backward(problem, simd)
    if call.cu_seqlens_q is None:
        queries = np.full(int(problem["batch"]), int(problem["queries"]))
    else:
        queries = np.diff(call.cu_seqlens_q)
    heads, block_q = int(problem["heads"]), int(parameters["block_q"])
    group = heads // math.lcm(call.k.shape[-3], call.v.shape[-3])
    table = chained_tiles(-(-queries // block_q), heads, group, block_q)
    if is_shared(grad.dbias, call):  # every work tile may add to what any other adds to: one chain
        table["previous"] = np.arange(-1, table.size - 1)
        parameters["walks_all"] = 1
    done = np.zeros(table.size, np.int64)
    parameters["tiles"] = table.size
    parameters["table"], parameters["progress"], parameters["gradient"] = (
        address(table),
        address(done),
        address(gradients),
    )

    worker = launch.worker_address("backward", dtype)
    launch.start(
        launch.Launch(
            worker=worker,
            serial=launch.SERIAL_CALL(worker),
            words=launch.words_of(problem, parameters),
            tiles=table.size,
            scratch_bytes=int(parameters["end"]),
            groups=0,
            workspace_bytes=0,
            flops=GRADIENT_FLOPS * flops(call),
        ),
        tuple(problem[name] for name in ("q", "k", "v", "out", "lse")),
        [grad, dk, dv, delta, alive, gradients, gradients_alive, table, done],
        progress,
    )


def is_shared(dbias: np.ndarray | None, call: Call) -> bool:
    """Whether heads or batch elements have a bias in common, and so its gradient."""
    return dbias is not None and dbias.shape[:-2] != call.operands[0].shape[:-2]


def fill_sink_gradients(grad: GradCall, delta: np.ndarray) -> None:
    """A sink has a probability in each of its rows, p, but no value: its derivative is the sum of -p * delta."""
    call = grad.call
    assert grad.dsinks is not None
    assert call.sinks is not None
    assert call.out is not None
    sinks = (call.sinks * LOG2E).astype(delta.dtype)[..., None]
    lse = call.lse * delta.dtype.type(LOG2E)
    of_lse = np.zeros_like(delta) if grad.dlse is None else -grad.dlse
    if call.cu_seqlens_q is None:
        lse, delta, of_lse = (x.reshape(*sinks.shape[:2], -1) for x in (lse, delta, of_lse))
        rows = [(b, slice(None)) for b in range(len(sinks))]
    else:
        rows = [(0, slice(*ends)) for ends in pairwise(call.cu_seqlens_q)]
    with np.errstate(invalid="ignore"):  # NaN is passed on
        for own, sink, (b, own_rows) in zip(grad.dsinks, sinks, rows, strict=True):
            at = b, slice(None), own_rows
            own_lse, own_delta = lse[at], delta[at]
            if not np.isfinite(own_delta).all():  # dout may hold anything where a row sees no key
                out = call.out.reshape(-1, *call.out.shape[-3:])[at]
                own_delta = np.where((own_lse <= sink) & ~(out != 0).any(axis=-1), of_lse[at], own_delta)
            p = recurrence.probability(sink, own_lse)
            own[:] = recurrence.score_gradient(p, 0, own_delta).sum(axis=-1)


def describe_gradients(grad: GradCall, dk, dv, delta: np.ndarray) -> tuple[np.ndarray, list]:
    """The gradients as a `PROBLEM`: dq, dk, dv and dbias stand where q, k, v and bias do, dout for out, delta for lse.

    What isn't asked for has the address 0.
    """
    call = grad.call
    arrays = {"q": grad.dq, "k": dk, "v": dv}
    stand_ins: dict[str, Any] = {
        name: getattr(call, name) if array is None else array for name, array in arrays.items()
    }
    operands = [] if grad.dbias is None else [np.broadcast_to(grad.dbias, call.operands[0].shape)]
    none: dict[str, Any] = dict.fromkeys(("slopes", "sinks", "k_scales", "v_scales"))
    problem, alive = describe(replace(call, **stand_ins, **none, out=grad.dout, lse=delta, operands=operands))
    for name, array in arrays.items():
        if array is None:
            problem[name] = 0
    return problem, alive
