"""Partial results put together on a GPU, the twin of `cpu/merge.py`: one thread for each number of the output."""

from math import inf
from typing import Any

import numpy as np
from numba import cuda, int64

from .. import recurrence
from ..addresses import address_of
from ..dtypes import ALL_CODES
from ..problem import AXES, PROBLEM, in_base_2, strides_of
from ..scores import LOG2E
from .arguments import pack
from .compile import Kernel
from .ir.memory import load_int64
from .loading import number_of
from .primitives import lane, scalar
from .tiling import FLOAT32_ACCUMULATOR, FLOAT64_ACCUMULATOR, Accumulator

THREADS = 256

# One part. Its output's rows are queries, columns as V's; the LSE has a number a row.
PART = np.dtype([("out", np.int64), ("out_format", np.int64), ("lse", np.int64), ("lse_format", np.int64),
                 *strides_of("out"), *strides_of("lse", axes=AXES[:3])])  # fmt: skip
PART_BYTES = PART.itemsize
(OUT_FORMAT, LSE, LSE_FORMAT, OUT_BATCH, OUT_HEAD, OUT_ROW, OUT_COLUMN, LSE_BATCH, LSE_HEAD, LSE_ROW) = (
    PART.fields[name][1]  # type: ignore[index]
    for name in PART.names[1:]  # type: ignore[index]
)


def build(accumulator: Accumulator) -> Any:
    """The kernel. p.q is a table of PART records, p.splits their number; they come in the order of their keys."""
    real, read, write = accumulator.real, accumulator.read, accumulator.write
    own_format, itemsize = accumulator.own_format, accumulator.itemsize

    def merge(p):
        index = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
        if index < p.batch * p.heads * p.queries * p.value_dim:
            column, row = index % p.value_dim, index // p.value_dim
            i, h, b = row % p.queries, row // p.queries % p.heads, row // p.queries // p.heads
            m, l, o = lane(real(-inf)), lane(real(0.0)), lane(real(0.0))
            for n in range(p.splits):
                part = p.q + n * PART_BYTES
                at = load_int64(part + LSE) + b * load_int64(part + LSE_BATCH) + h * load_int64(part + LSE_HEAD)
                lse = lane(read(at + i * load_int64(part + LSE_ROW), load_int64(part + LSE_FORMAT)))
                m, l, alpha, beta = recurrence.merge(m, l, lse * LOG2E, lane(real(1.0)))
                o = alpha * o
                if scalar(lse) != -inf:  # else whatever its output holds
                    at = load_int64(part) + b * load_int64(part + OUT_BATCH) + h * load_int64(part + OUT_HEAD)
                    at += i * load_int64(part + OUT_ROW) + column * load_int64(part + OUT_COLUMN)
                    o = o + beta * lane(read(at, load_int64(part + OUT_FORMAT)))
            sink = real(number_of(p.sinks, p.sink_batch, p.sink_head, b, h, -inf))
            lse, factor = recurrence.finalize(m, l, lane(sink))
            out = p.out + b * p.out_batch + h * p.out_head + i * p.out_row + column * p.out_column
            write(out, p.out_format, scalar(recurrence.normalized(o, l, factor)))
            if column == 0:
                write(p.lse + row * itemsize, own_format, scalar(lse))

    return merge


def grid(record: np.ndarray) -> tuple[int, int, int]:
    count = record["batch"] * record["heads"] * record["queries"] * record["value_dim"]
    return int(-(-count // THREADS)), 1, 1


def specialise(wide: bool) -> Kernel:
    accumulator = FLOAT64_ACCUMULATOR if wide else FLOAT32_ACCUMULATOR
    return Kernel(f"merge_{accumulator.real}", build(accumulator), THREADS, 0, grid, 1)


def four_axes(x: Any) -> Any:
    """The array as (batch, heads, rows, columns); several batch axes have to be one in memory."""
    while x.ndim < 4:
        x = x[None]
    for axis in range(x.ndim - 5, -1, -1):
        if x.shape[axis] > 1 and x.strides[axis] != x.strides[axis + 1] * x.shape[axis + 1]:
            raise ValueError(f"outs must have batch axes that are one in memory on a GPU, got strides {x.strides}")
    return x


def describe(outs: list[Any], lses: list[Any], out: Any, lse: Any, sinks: np.ndarray | None) -> tuple[np.ndarray, list]:
    """The `ARGUMENTS` record of a merge, and the host tables that it points to."""
    parts = np.zeros(len(outs), PART)
    for part, x, own in zip(parts, outs, lses, strict=True):
        x, own = four_axes(x), four_axes(own[..., None])
        part["out"], part["lse"] = address_of(x), address_of(own)
        part["out_format"], part["lse_format"] = ALL_CODES[x.dtype], ALL_CODES[own.dtype]
        for name, array, axes in (("out", x, AXES), ("lse", own, AXES[:3])):
            for axis, stride in zip(axes, array.strides[-4:], strict=False):
                part[f"{name}_{axis}"] = stride
    problem = np.zeros((), PROBLEM)
    to = four_axes(out)
    *batch, problem["heads"], problem["queries"], problem["value_dim"] = to.shape
    problem["batch"] = np.prod(batch)
    problem["out"], problem["lse"], problem["out_format"] = address_of(to), address_of(lse), ALL_CODES[out.dtype]
    for axis, stride in zip(AXES, to.strides[-4:], strict=True):
        problem[f"out_{axis}"] = stride
    problem["q"] = address_of(parts)
    tables = [parts]
    if sinks is not None:
        sinks = in_base_2(sinks, lse.dtype)
        problem["sinks"], (of_batch, problem["sink_head"]) = address_of(sinks), sinks.strides
        problem["sink_batch"] = of_batch if len(sinks) > 1 else 0
        tables.append(sinks)
    return pack(problem, splits=len(outs)), tables
