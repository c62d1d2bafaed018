"""The gradient on the CPU, from the call to the arrays that the kernel adds to, and from those to the caller's shapes.

The kernel makes a gradient for each batch element and key head, which are summed here over what the caller's arrays
share. The others it writes where they are to stay.
"""

import math

import numpy as np

from ..arguments import heads_view
from ..backend import GradientCall, Progress, rounded
from ..call import Call, GradCall
from ..reference import Gradients


def computed(gradient: GradientCall, progress: Progress | None) -> Gradients:
    """The gradients that have a format, in it, shaped as their arguments."""
    given, asked = gradient.given, gradient.formats
    q, k, v, bias, sinks = (given[name] for name in ("q", "k", "v", "bias", "sinks"))
    bshd = given["layout"] == "bshd"
    call = gradient.call
    dtype = call.lse.dtype
    key_heads = math.lcm(call.k.shape[-3], call.v.shape[-3])  # both may differ: a head of each for either
    grad = GradCall(
        call=call,
        dout=gradient.dout,
        dlse=gradient.dlse,
        dq=zeros_for(q, call.q.shape[-3], call, bshd) if "q" in asked else None,
        dk=zeros_for(k, key_heads, call, bshd) if "k" in asked else None,
        dv=zeros_for(v, key_heads, call, bshd) if "v" in asked else None,
        dbias=np.zeros(padded(np.shape(bias), call.operands[0].ndim), dtype) if "bias" in asked else None,
        dsinks=np.zeros_like(call.sinks, dtype) if "sinks" in asked else None,
    )
    if call.lse.size:
        from . import backward_launch  # not before the first call: it starts Numba

        backward_launch.run(grad, progress)
    return rounded(
        Gradients(
            dq=None if grad.dq is None else shaped_as(q, grad.dq, bshd),
            dk=None if grad.dk is None else shaped_as(k, grad.dk, bshd),
            dv=None if grad.dv is None else shaped_as(v, grad.dv, bshd),
            dbias=None if grad.dbias is None else grad.dbias.reshape(np.shape(bias)),
            dsinks=None if grad.dsinks is None else summed_sinks(grad.dsinks, np.shape(sinks)),
        ),
        asked,
    )


def zeros_for(x: np.ndarray, heads: int, call: Call, bshd: bool) -> np.ndarray:
    """(batch axes, heads, rows, columns), in the layout of `x` where that is of the same size."""
    own = heads_view(x, bshd).shape
    shape = (*call.q.shape[:-3], heads, *own[-2:])
    dtype = call.lse.dtype
    return heads_view(np.zeros(x.shape, dtype), bshd) if own == shape else np.zeros(shape, dtype)


def padded(shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """A shape with axes of length 1 to the left, as broadcasting has it."""
    return (1,) * (axes - len(shape)) + shape


def shaped_as(x: np.ndarray, dx: np.ndarray, bshd: bool) -> np.ndarray:
    """What `zeros_for(x, ...)` gave, filled, as the derivative by `x`."""
    dx = sum_to(dx, heads_view(x, bshd).shape)
    dx = dx[(0,) * (4 - x.ndim)]
    return dx.swapaxes(-3, -2) if bshd and x.ndim > 2 else dx


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`x` summed over the axes along which an array of `shape` was repeated to give it."""
    if x.shape == shape:
        return x
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def summed_sinks(dsinks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sinks' gradient, from one for each batch element and head: (H,), or all of them in the shape given."""
    return dsinks.sum(axis=0) if len(shape) == 1 else dsinks.reshape(shape)
