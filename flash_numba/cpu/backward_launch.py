"""Running a gradient call: the gradients are described as a problem of their own, then it goes like any call."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .. import recurrence
from ..addresses import address
from ..backend import Progress
from ..call import Call, GradCall, flops
from ..problem import describe, in_base_2
from ..scores import LOG2E
from . import launch
from .backward_plan import chained_tiles, plan_backward
from .plan import SimdSizes, up_to
from .work import work

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
            work=GRADIENT_FLOPS * work(call, table.size),
            limit=call.threads,
        ),
        tuple(problem[name] for name in ("q", "k", "v", "out", "lse")),
        [grad, dk, dv, delta, alive, gradients, gradients_alive, table, done],
        progress,
    )


def is_shared(dbias: np.ndarray | None, call: Call) -> bool:
    """Whether heads or batch elements have a bias in common, and so its gradient."""
    return dbias is not None and dbias.shape[:-2] != call.operands[0].shape[:-2]


def fill_sink_gradients(grad: GradCall, delta: np.ndarray) -> None:
    """A sink has a probability in each of its rows, p, but no value: its derivative is the sum of -p * delta.

    A sink of -inf isn't there, and has none.
    """
    call = grad.call
    assert grad.dsinks is not None
    assert call.sinks is not None
    assert call.out is not None
    dtype = delta.dtype
    sinks = in_base_2(call.sinks, dtype).astype(dtype)  # (B, H), or (sequences, H)
    if call.cu_seqlens_q is None:
        rows = slice(None)
        sinks = sinks[..., None]
    else:
        rows = slice(call.cu_seqlens_q[-1])
        sinks = np.repeat(sinks, np.diff(call.cu_seqlens_q), axis=0).T
    of_lse = np.zeros_like(delta) if grad.dlse is None else -grad.dlse
    shape = (-1, *call.lse.shape[-2:])
    lse, delta, of_lse = (x.reshape(shape)[..., rows] for x in (call.lse, delta, of_lse))
    with np.errstate(all="ignore"):  # NaN is passed on, and small probabilities underflow
        lse = lse * dtype.type(LOG2E)
        if not np.isfinite(delta).all():  # dout may hold anything where a row sees no key
            out = call.out.reshape(*shape, call.out.shape[-1])[..., rows, :]
            delta = np.where((lse <= sinks) & ~(out != 0).any(axis=-1), of_lse, delta)
        of_rows = recurrence.score_gradient(recurrence.probability(sinks, lse), 0, delta)
        of_rows = np.where(sinks == -np.inf, 0, of_rows)
        if call.cu_seqlens_q is None:
            grad.dsinks[:] = of_rows.sum(axis=-1)
        else:
            some = np.diff(call.cu_seqlens_q) > 0  # sequences that have rows to sum over
            if some.any():
                grad.dsinks[some] = np.add.reduceat(of_rows[0], call.cu_seqlens_q[:-1][some], axis=-1).T


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
