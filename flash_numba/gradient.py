"""The gradient of attention: the public calls `attention_grad` and `attention_varlen_grad`."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from . import reference
from .call import Call, GradCall
from .dtypes import CODES
from .interface import Progress, checked_call, checked_packed_call
from .reference import Gradients

BACKENDS = ("auto", "cpu", "reference")
NEED = ("q", "k", "v", "bias", "sinks")
"""What there are gradients of, in the order of `Gradients`."""


def attention_grad(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    need: Collection[str] = NEED,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    q_offset: Any = None,
    k_offset: int = 0,
    dropout: float = 0.0,
    seed: int | None = None,
    training: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
    backend: str = "auto",
    progress: Progress | None = None,
) -> Gradients:
    """The exact gradient of `attention`, from its output and LSE: the score matrix is never held in memory.

    Call it with the arguments of the forward call; anything that differs gives the gradient of something else.

    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = attention_grad(dout, q, k, v, out, lse, causal=True)

    Args:
        dout: Derivative of a loss by `out`, in its shape, (..., H, S_q, D_v), and of any 16- to 64-bit dtype that
            `attention` takes.
        q: As the forward call had it, like k, v and the keywords that aren't described here.
        out: What `attention` returned. Of any 16- to 64-bit dtype.
        lse: What it returned with `return_lse=True`, (..., H, S_q), float32 or float64.
        dlse: Derivative of the loss by `lse`, if it has one, in the shape of `lse`, float32 or float64.
        need: Which gradients to compute, of "q", "k", "v", "bias" and "sinks"; by default all that there are. The
            bias's is as large as the bias: leave it out for one that isn't learnt.
        k_offset: Index of the first key given in the whole sequence, if these are some of the keys
            (`attention_partial`). `out` and `lse` are then those of all keys: the dq of all parts add up, and so do
            dbias and, over the parts of one row, dsinks, which a single part alone should be asked for.
        seed: For dropout, the integer that the forward call had: a generator would draw another.
        backend: "auto", "cpu", or "reference" (whole-matrix NumPy in float64, for checking).
        progress: Called about ten times a second while the call runs, with work items done and their number.

    Returns:
        `Gradients(dq, dk, dv, dbias, dsinks)`. Each has the shape and the dtype of its argument (q's dtype for 8-bit k
        and v), summed over what that is shared along: the query heads of a key head, axes along which k, v, bias or
        sinks are broadcast. Those of 8-bit k and v are by the numbers stored, before `k_scale` and `v_scale`. None
        stands for one that `need` leaves out, for dbias without a bias of floats, and for dsinks without sinks. (A
        float `mask` has no gradient: pass a learnt bias as `bias`.)
        A row that sees no key has no part in any gradient, and a key hidden from a row none in that row's, whatever
        they hold. Sums are taken in float32 (float64 for float64). Same bits for any number of threads and batches.

    Raises:
        ValueError, TypeError: as `attention`; dout, out, lse and dlse of other shapes or dtypes, unknown names in
            `need`.
        KeyboardInterrupt: within a second of Ctrl-C, for calls from the main thread.

    Formula: Dao et al. 2022 (arXiv:2205.14135), appendix B.2; streamed as in Dao 2023 (arXiv:2307.08691), algorithm 2.
    p = exp(s - lse), delta = sum(dout * out) - dlse for each row, ds = p * (dout v^T - delta). Since p comes from the
    LSE alone, it is as exact as that: scores of 1e6 and more, as a bias can make them, lose digits of p in float32.
    """
    check_backend(backend)
    check.check_callable("progress", progress)
    check.check_integer_seed(seed)
    rules: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "q_lengths": q_lengths, "kv_lengths": kv_lengths,
        "q_offset": q_offset, "k_offset": k_offset, "dropout": dropout, "seed": seed, "training": training,
        "k_scale": k_scale, "v_scale": v_scale, "layout": layout,
    }  # fmt: skip
    call, _ = checked_call(q, k, v, **rules)
    operands, dlse = checked_operands(call, dout, q, k, v, out, lse, dlse)
    formats = formats_of(need, call, q, k, v, bias, sinks)
    if backend == "reference":
        gradients = reference.attention_grad(*operands, dlse=dlse, **rules)
    else:
        gradients = computed(call, operands, dlse, bias, sinks, formats, layout, progress)
    return rounded(gradients, formats)


def attention_varlen_grad(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Any = None,
    need: Collection[str] = ("q", "k", "v", "sinks"),
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    training: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Gradients:
    """The exact gradient of `attention_varlen`, from its output and LSE.

    Args:
        dout: Derivative of a loss by `out`, (total_q, H, D_v).
        q: (total_q, H, D), as the forward call had it, like k, v, the offsets and the keywords.
        out: (total_q, H, D_v), what `attention_varlen` returned.
        lse: (H, total_q), likewise.
        dlse: (H, total_q), the loss's derivative by it, if it has one.

    The other arguments are `attention_grad`'s.

    Returns:
        `Gradients(dq, dk, dv, None, dsinks)`; rows and keys behind the last offset have gradients of 0.

    Raises:
        ValueError, TypeError: as `attention_grad` and `attention_varlen`.
    """
    check_backend(backend)
    check.check_callable("progress", progress)
    check.check_integer_seed(seed)
    rules: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "dropout": dropout, "seed": seed, "training": training, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    call, _ = checked_packed_call(q, k, v, cu_seqlens_q, cu_seqlens_k, **rules)
    operands, dlse = checked_operands(call, dout, q, k, v, out, lse, dlse)
    formats = formats_of(need, call, q, k, v, None, sinks)
    if backend == "reference":
        offsets: tuple = call.cu_seqlens_q, call.cu_seqlens_k
        gradients = reference.attention_varlen_grad(*operands, *offsets, dlse=dlse, **rules)
    else:
        gradients = computed(call, operands, dlse, None, sinks, formats, "bshd", progress)
    return rounded(gradients, formats)


# -- from arguments to a call, and back to what the caller knows -------------------------------------------------------


def check_backend(backend: str) -> None:
    if backend == "cuda":
        raise ValueError(f"backend='cuda' computes no gradients yet; it may be one of {BACKENDS}")
    check.check_choice("backend", backend, BACKENDS)


def checked_operands(call: Call, dout, q, k, v, out, lse, dlse) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """(dout, q, k, v, out, lse) and dlse as arrays that fit the call; lse and dlse in the accumulation format."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    shape = (*q.shape[:-1], v.shape[-1])
    row_shape = call.lse[(0,) * (4 - q.ndim)].shape
    dout, out = check.array_of_shape("dout", dout, shape), check.array_of_shape("out", out, shape)
    lse = check.row_numbers("lse", lse, row_shape, call.lse.dtype)
    return (dout, q, k, v, out, lse), dlse if dlse is None else check.row_numbers("dlse", dlse, row_shape, lse.dtype)


def formats_of(need: Collection[str], call: Call, q, k, v, bias, sinks) -> list[np.dtype | None]:
    """The dtype of each gradient, in the order of `Gradients`; None for one that isn't asked for or doesn't exist."""
    need = check.names_among("need", need, NEED)
    formats = []
    for name, x in zip(NEED, (q, k, v, bias, sinks), strict=True):
        dtype = None if x is None else np.asarray(x).dtype.newbyteorder("=")
        if name not in need or (name == "bias" and dtype == np.bool_):
            dtype = None
        elif dtype is not None and dtype not in CODES:
            dtype = call.lse.dtype if name == "sinks" else call.q.dtype.newbyteorder("=")
        formats.append(dtype)
    return formats


def computed(
    call: Call, operands, dlse, bias, sinks, formats: list[np.dtype | None], layout: str, progress: Progress | None
) -> Gradients:
    """The gradients that have a format, by the compiled kernel: shaped as their arguments, in the accumulation format.

    The kernel makes one for each batch element and key head, and they are summed here over what is shared. The others
    it writes where they are to stay.
    """
    dout, q, k, v, out, lse = operands
    bshd = layout == "bshd"
    call = replace(call, out=check.heads_view(out, bshd), lse=lse.reshape(call.lse.shape))
    key_heads = math.lcm(call.k.shape[-3], call.v.shape[-3])  # both may differ: a head of each for either
    asked = dict(zip(NEED, (dtype is not None for dtype in formats), strict=True))
    grad = GradCall(
        call=call,
        dout=check.heads_view(dout, bshd),
        dlse=None if dlse is None else dlse.reshape(call.lse.shape),
        dq=zeros_for(q, call.q.shape[-3], call, bshd) if asked["q"] else None,
        dk=zeros_for(k, key_heads, call, bshd) if asked["k"] else None,
        dv=zeros_for(v, key_heads, call, bshd) if asked["v"] else None,
        dbias=np.zeros(padded(np.shape(bias), call.operands[0].ndim), lse.dtype) if asked["bias"] else None,
        dsinks=np.zeros_like(call.sinks, lse.dtype) if asked["sinks"] else None,
    )
    if lse.size:
        from .cpu import backward_launch  # not before the first call: it starts Numba

        backward_launch.run(grad, progress)
    return Gradients(
        dq=None if grad.dq is None else shaped_as(q, grad.dq, bshd),
        dk=None if grad.dk is None else shaped_as(k, grad.dk, bshd),
        dv=None if grad.dv is None else shaped_as(v, grad.dv, bshd),
        dbias=None if grad.dbias is None else grad.dbias.reshape(np.shape(bias)),
        dsinks=None if grad.dsinks is None else summed_sinks(grad.dsinks, np.shape(sinks)),
    )


def zeros_for(x: np.ndarray, heads: int, call: Call, bshd: bool) -> np.ndarray:
    """(batch axes, heads, rows, columns), in the layout of `x` where that is of the same size."""
    own = check.heads_view(x, bshd).shape
    shape = (*call.q.shape[:-3], heads, *own[-2:])
    dtype = call.lse.dtype
    return check.heads_view(np.zeros(x.shape, dtype), bshd) if own == shape else np.zeros(shape, dtype)


def padded(shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """With axes of length 1 to the left, as broadcasting has it."""
    return (1,) * (axes - len(shape)) + shape


def shaped_as(x: np.ndarray, dx: np.ndarray, bshd: bool) -> np.ndarray:
    """What `zeros_for(x, ...)` gave, filled, as the derivative by `x`."""
    dx = sum_to(dx, check.heads_view(x, bshd).shape)
    dx = dx[(0,) * (4 - x.ndim)]
    return dx.swapaxes(-3, -2) if bshd and x.ndim > 2 else dx


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`x` summed over the axes along which an array of `shape` was repeated to give it."""
    if x.shape == shape:
        return x
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def summed_sinks(dsinks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """From one for each batch element and head: (H,), or all of them in the shape given."""
    return dsinks.sum(axis=0) if len(shape) == 1 else dsinks.reshape(shape)


def rounded(gradients: Gradients, formats: list[np.dtype | None]) -> Gradients:
    """Those that have a format, in it."""
    with np.errstate(over="ignore"):  # beyond a smaller format's range lies infinity, as in a kernel
        return Gradients(
            *(
                None if dx is None or dtype is None else np.asarray(dx, dtype)
                for dx, dtype in zip(gradients, formats, strict=True)
            )
        )
