"""From the arguments of a public call to a checked `Call`, and from its results to what the caller gets."""

from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from . import rules as record
from .backend import Array, Backend
from .call import Call


def checked_call(
    q: Any,
    k: Any,
    v: Any,
    backend: Backend,
    *,
    sequences: tuple[int, ...] | None = None,
    partial: bool = False,
    **rules: Any,
) -> tuple[Call, Array]:
    """The arguments of a public call, checked: `(call, result)`, result being the array to return.

    sequences: (count,) of packed sequences, which stand where batch elements do. partial: the output is to be kept in
    the accumulation format. rules: those of `rules.OF_A_CALL` that aren't at their defaults.
    """
    given = record.complete(rules)
    layout, causal = given["layout"], given["causal"]
    check.check_choice("layout", layout, record.LAYOUTS)
    causal = bool(causal) if isinstance(causal, np.bool_) else causal
    check.check_choice("causal", causal, record.CAUSAL)
    q, k, v = backend.take(q), backend.take(k), backend.take(v)
    for name in record.TAKEN:
        if given[name] is not None:
            given[name] = backend.take(given[name])
    out = given["out"]
    q, k, v = check.attention_input("q", q), check.attention_input("k", k, True), check.attention_input("v", v, True)
    dtype = check.common_dtype(q, k, v)
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    bshd = layout == "bshd"
    check.check_shapes(q, k, v, bshd)
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        result = backend.empty(shape, wide if partial else dtype)
    else:
        result = check.output_array(out, shape, backend.array)
    q_view, k_view, v_view = (check.heads_view(x, bshd) for x in (q, k, v))
    *batch, heads, queries, dim = q_view.shape
    keys = k_view.shape[-2]
    lead = tuple(batch) if sequences is None else sequences
    sizes = record.Sizes(lead, heads, k_view.shape[-3], v_view.shape[-3], queries, keys, dim)
    fields = {field: make(name, given[name], sizes) for field, name, make in record.VALUES}
    for field, name, make in record.READ:
        if given[name] is not None:
            fields[field] = make(name, backend.numbers(given[name]), sizes)
    left, right = check.window_sides(given["window"], causal)
    rate, seed = check.dropout_rate(given["dropout"], given["seed"], given["training"])
    operands = check.bias_and_mask(given["bias"], given["mask"], (*(lead if q.ndim > 3 else ()), heads, queries, keys))
    in_place = out is None or check.can_write_in_place(result, dtype, [q, k, v, *operands])
    target = result if in_place else backend.empty(shape, wide)
    call = Call(
        q=q_view,
        k=k_view,
        v=v_view,
        out=check.heads_view(target, bshd),
        lse=backend.empty(q_view.shape[:-1], wide),
        left=left,
        right=right,
        top_left=causal == "top-left",
        operands=[operand if operand.ndim > 3 else operand[None] for operand in operands],
        dropout=rate,
        seed=seed,
        **fields,
    )
    return call, result


def checked_packed_call(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, backend: Backend, **rules: Any
) -> tuple[Call, Array]:
    """The arguments of a public call on packed sequences, checked, as `checked_call` does it."""
    q, k, v = backend.take(q), backend.take(k), backend.take(v)
    cu_seqlens_q, cu_seqlens_k = backend.numbers(cu_seqlens_q), backend.numbers(cu_seqlens_k)
    q, k, v = check.attention_input("q", q), check.attention_input("k", k, True), check.attention_input("v", v, True)
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v must be (total, H, D), got {q.shape}, {k.shape} and {v.shape}")
    starts: dict[str, Any] = {
        "cu_seqlens_q": check.cumulative_lengths("cu_seqlens_q", cu_seqlens_q, q.shape[0]),
        "cu_seqlens_k": check.cumulative_lengths("cu_seqlens_k", cu_seqlens_k, k.shape[0]),
    }
    count = starts["cu_seqlens_q"].size - 1
    if starts["cu_seqlens_k"].size - 1 != count:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same number of sequences, "
            f"got {count} and {starts['cu_seqlens_k'].size - 1}"
        )
    call, result = checked_call(q, k, v, backend, layout="bshd", sequences=(count,), **rules)
    return replace(call, **starts), result


def lse_of(call: Call, result: Array) -> Array:
    """A call's LSE without the axes that a 2-D or 3-D q, and so its result, doesn't have."""
    return call.lse[(0,) * (4 - result.ndim)]


def finished(call: Call, result: Array, layout: str, backend: Backend) -> tuple[Any, Any]:
    """(out, lse) as the caller gets them, the output copied where it was computed aside."""
    assert call.out is not None
    if not np.may_share_memory(call.out, result):
        backend.copy(check.heads_view(result, layout == "bshd"), call.out)
    return backend.give(result), backend.give(lse_of(call, result))
