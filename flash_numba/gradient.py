"""The gradient of attention: the public calls `attention_grad` and `attention_varlen_grad`."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from .backend import Array, Backend, GradientCall, Progress
from .backends import choose
from .call import Call
from .checked import checked_call, checked_packed_call, lse_of
from .dtypes import CODES
from .progress import reported
from .reference import Gradients
from .rules import BACKENDS
from .rules import GRADIENTS as NEED


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
    threads: int | None = None,
    progress: bool | Progress | None = None,
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
        backend: "auto", "cpu", or "reference" (whole-matrix NumPy in float64, for checking). "cuda", and arrays on a
            GPU, aren't taken yet.
        progress: True for a bar, or what is called about ten times a second while the call runs, with work tiles done
            and their number, as in `attention`.

    The other arguments are `attention`'s.

    Returns:
        `Gradients(dq, dk, dv, dbias, dsinks)`. Each has the shape and the dtype of its argument (q's dtype for 8-bit k
        and v), summed over what that is shared along: the query heads of a key head, axes along which k, v, bias or
        sinks are broadcast. Those of 8-bit k and v are by the numbers stored, before `k_scale` and `v_scale`. None
        stands for one that `need` leaves out, for dbias without a bias of floats, and for dsinks without sinks. (A
        float `mask` has no gradient: pass a learnt bias as `bias`.)
        A row that sees no key has no part in any gradient, and a key hidden from a row none in that row's, whatever
        they hold. Sums are taken in float32 (float64 for float64). Same bits for any number of threads and batches.

    Raises:
        ValueError: as `attention`; dout, out, lse or dlse of another shape, unknown names in `need`, backend="cuda".
        TypeError: as `attention`; dout, out, lse or dlse of another dtype, arrays on a GPU, a generator as `seed`.
        ImportError: `progress=True` without rich.
        KeyboardInterrupt: within a second of Ctrl-C, for calls from the main thread.

    Formula: Dao et al. 2022 (arXiv:2205.14135), appendix B.2; streamed as in Dao 2023 (arXiv:2307.08691), algorithm 2.
    p = exp(s - lse), delta = sum(dout * out) - dlse for each row, ds = p * (dout v^T - delta). Since p comes from the
    LSE alone, it is as exact as that: scores of 1e6 and more, as a bias can make them, lose digits of p in float32.
    """
    check_options(backend, seed)
    chosen = choose(backend, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, bias=bias, mask=mask)
    call, result = checked_call(
        q, k, v, chosen, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, sinks=sinks, q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset,
        k_offset=k_offset, dropout=dropout, seed=seed, training=training, k_scale=k_scale, v_scale=v_scale,
        layout=layout, threads=threads,
    )  # fmt: skip
    given = {
        "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, "bias": bias, "mask": mask,
        "sinks": sinks, "layout": layout,
    }  # fmt: skip
    return computed(call, result, given, need, chosen, progress)


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
    threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Gradients:
    """The exact gradient of `attention_varlen`, from its output and LSE.

    Args:
        dout: Derivative of a loss by `out`, (total_q, H, D_v).
        q: (total_q, H, D), as the forward call had it, like k, v, the offsets and the keywords.
        out: (total_q, H, D_v), what `attention_varlen` returned.
        lse: (H, total_q), likewise.
        dlse: (H, total_q), the loss's derivative by it, if it has one.

    The other arguments are `attention_grad`'s, and so are the dtypes.

    Returns:
        `Gradients(dq, dk, dv, None, dsinks)`, dsinks in the shape of `sinks`, (H,) or (sequences, H); rows and keys
        behind the last offset have gradients of 0.

    Raises:
        ValueError, TypeError: as `attention_grad` and `attention_varlen`.
        ImportError, KeyboardInterrupt: as `attention_grad`.

    Formula: that of `attention_grad` for each sequence.
    """
    check_options(backend, seed)
    chosen = choose(backend, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
    call, result = checked_packed_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, chosen, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout=dropout, seed=seed, training=training, k_scale=k_scale,
        v_scale=v_scale, threads=threads,
    )  # fmt: skip
    given = {
        "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, "bias": None, "mask": None,
        "sinks": sinks, "layout": "bshd",
    }  # fmt: skip
    return computed(call, result, given, need, chosen, progress)


# -- from a checked forward call to one of its gradient ----------------------------------------------------------------


def check_options(backend: str, seed: Any) -> None:
    check.check_choice("backend", backend, BACKENDS)
    check.check_integer_seed(seed)


def computed(
    call: Call,
    result: Array,
    given: dict[str, Any],
    need: Collection[str],
    backend: Backend,
    progress: bool | Progress | None,
) -> Gradients:
    """The gradients of a forward call, by a backend. result: an array like the forward's output."""
    backend.supports(call, gradient=True).require()
    bshd, wide, row_shape = given["layout"] == "bshd", call.lse.dtype, lse_of(call, result).shape
    q, k, v = (np.asarray(given[name]) for name in ("q", "k", "v"))
    dout, out = (check.array_of_shape(name, given[name], result.shape) for name in ("dout", "out"))
    lse = check.per_row("lse", given["lse"], row_shape, wide)
    dlse = None if given["dlse"] is None else check.per_row("dlse", given["dlse"], row_shape, wide)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    gradient = GradientCall(
        call=replace(call, out=check.heads_view(out, bshd), lse=lse.reshape(call.lse.shape)),
        dout=check.heads_view(dout, bshd),
        dlse=None if dlse is None else dlse.reshape(call.lse.shape),
        given=given | arrays,
        formats=formats_of(need, call, q, k, v, given["bias"], given["sinks"]),
    )
    with reported(progress, "gradient") as report:
        return backend.gradient(gradient, report)


def formats_of(need: Collection[str], call: Call, q, k, v, bias, sinks) -> dict[str, np.dtype]:
    """The dtype of each gradient that is asked for and exists."""
    need = check.names_among("need", need, NEED)
    formats = {}
    for name, x in zip(NEED, (q, k, v, bias, sinks), strict=True):
        if x is None or name not in need:
            continue
        dtype = check.native(np.asarray(x).dtype)
        if name == "bias" and dtype == np.bool_:
            continue
        if dtype not in CODES:
            dtype = call.lse.dtype if name == "sinks" else call.q.dtype.newbyteorder("=")
        formats[name] = dtype
    return formats
