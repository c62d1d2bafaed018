"""The public calls: check the arguments, describe the call as a `Problem`, hand it to a backend."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from . import recurrence, reference
from .addresses import address
from .call import Call, flops
from .places import HOST, choose
from .prepared import FORMS, is_plain, recall, remember
from .problem import describe
from .scores import LOG2E
from .work_tiles import packed_work_tiles

Progress = Callable[[int, int], None]

BACKENDS = ("auto", "cpu", "cuda", "reference")
LAYOUTS = ("bhsd", "bshd")
CAUSAL = (False, True, "top-left")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    dropout: float = 0.0,
    seed: int | np.random.Generator | None = None,
    training: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
    out: np.ndarray | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Any:
    """Exact attention, `softmax(scale * q k^T + bias) v`, streamed: the score matrix is never held in memory.

    Args:
        q: Queries, (..., H, S_q, D); 2-D is one head. Anything `np.asarray` makes a float array of, or an array on an
            NVIDIA GPU (PyTorch, CuPy, JAX, whatever has DLPack or `__cuda_array_interface__`), and then k, v, bias,
            mask and out on the same. Strides are honoured.
        k: Keys, (..., H_kv, S_kv, D). H must be a multiple of H_kv: query heads share key heads in contiguous groups
            (GQA; MQA for H_kv = 1). Axes left of the heads broadcast against q's.
        v: Values, (..., H_kv, S_kv, D_v).
            All three are float64, float32, float16 or bfloat16 (`ml_dtypes.bfloat16`), alike, in either byte order; k
            and v may also be float8_e4m3fn or float8_e5m2 (`ml_dtypes`).
        causal: True lets row i see keys j <= i + S_kv - S_q (aligned at the bottom right, as in flash-attn);
            "top-left" keys j <= i (as in PyTorch and JAX).
        window: (left, right): a row at position p sees keys p - left <= j <= p + right, within the causal mask if there
            is one. None or -1 is unlimited. p is i + S_kv - S_q, or i for "top-left", or as `q_offset` has it.
        scale: Factor of the scores, any finite number; 1 / sqrt(D) if None. Scores themselves have to stay within the
            format that is accumulated in, 3.4e38 for float32.
        softcap: Scores become softcap * tanh(score / softcap).
        bias: Added to the scores, broadcastable to (..., H, S_q, S_kv), of any dtype above; never materialised. -inf
            hides a key; other numbers, however low, don't.
        mask: Boolean, broadcastable likewise; True keeps a key. (A boolean bias is a mask, a float mask a bias.)
        alibi_slopes: (H,) or (B, H): adds -slope * |p - j| (ALiBi). B counts all axes left of the heads.
        sinks: (H,) or (B, H), logits in natural units that take part in the softmax without a key or a value.
        q_lengths: How many rows each batch element has, one integer or (B,); the rest gives empty rows.
        kv_lengths: How many keys each has; the rest isn't read. Positions count from the end of these lengths.
        q_offset: Position of row 0, one integer or (B,), instead of the alignment above. Dropout counts rows from it,
            and from 0 without it: give it for some rows or keys of a longer sequence.
        dropout: Probability that a key's weight is dropped, from 0 to below 1; kept ones are divided by 1 - dropout.
        seed: For dropout: an integer below 2**64, or a generator that it is drawn from. The same seed drops the same
            keys on every backend, in any tiling, and in the gradient.
        training: False switches dropout off.
        k_scale: Factor of k, for scaled 8-bit keys: one number, (H_kv,) or (B, H_kv).
        v_scale: Factor of v, likewise.
        layout: "bhsd" for (..., H, S, D), or "bshd" for (..., S, H, D) as in flash-attn; of q, k, v and out alike.
        out: Array to write to, (..., H, S_q, D_v) in the same layout, of any 16- to 64-bit dtype above. May overlap an
            input.
        return_lse: Also return the log-sum-exp of each row.
        backend: "auto" (where the arrays lie), "cpu", "cuda" (copies arrays in host memory to the GPU and back), or
            "reference" (whole-matrix NumPy in float64, for checking).
        progress: Called about ten times a second while the call runs, with work items done and their number; on a GPU
            once, when the work is queued.

    Returns:
        The output, (..., H, S_q, D_v) in q's dtype (or `out`), on a GPU an array of q's library; with `return_lse` also
        the natural-log LSE, (..., H, S_q) whatever the layout, in float32 (float64 for float64). A row that sees no key
        gives 0 and -inf (its sink, if there is one). Sums are taken in float32 (float64 for float64). Same bits for any
        number of threads and batches.

    Raises:
        ValueError: shapes that don't fit, numbers out of range, an unknown layout, causal or backend, dropout without
            a seed.
        TypeError: dtypes that aren't taken or are mixed, arguments of the wrong type, and arrays of the host and of a
            GPU in one call.
        RuntimeError: there is no GPU to use; it says what is missing.
        KeyboardInterrupt: within a second of Ctrl-C, for calls from the main thread. `out` is then partly written.

    Formula: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; streamed as in Dao 2023 (arXiv:2307.08691),
    section 3.1. The rules' sources stand in `scores.py` and `dropout.py`.
    """
    key, kind = None, type(q)
    if (
        kind is type(k) is type(v)
        and (kind is np.ndarray or kind in FORMS)
        and bias is mask is alibi_slopes is sinks is q_lengths is kv_lengths is q_offset is k_scale is v_scale is None
        and out is progress is None
        and is_plain(window, scale, softcap, dropout, causal, layout, backend)
        and dropout == 0
    ):
        if kind is np.ndarray:
            shapes = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
        else:
            shapes = FORMS[kind](q, k, v)  # type: ignore[assignment]
        if shapes is not None:
            key = (shapes, causal, type(causal), window, scale, softcap, layout, backend)
            prepared = recall(key)
            if prepared is not None:
                out, lse = prepared.run(q, k, v)
                return (out, lse) if return_lse else out
    check.check_choice("backend", backend, BACKENDS)
    check.check_callable("progress", progress)
    place = choose(backend, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
    if (place is HOST) != (kind is np.ndarray):  # another library's array in host memory, or NumPy's to be copied
        key = None
    call, result = checked_call(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, sinks=sinks, q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset,
        dropout=dropout, seed=seed, training=training, k_scale=k_scale, v_scale=v_scale, layout=layout, out=out,
        place=place,
    )  # fmt: skip
    if backend == "reference":
        run_reference(call, causal)
    else:
        started = run(call, progress, place=place, repeated=key is not None)
        if key is not None and started is not None:
            lse = call.lse[(0,) * (4 - result.ndim)]
            remember(key, place.prepared(started, result, lse))
    out, lse = finished(call, result, layout, place)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | np.random.Generator | None = None,
    training: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Any:
    """Attention of packed sequences of any lengths, each on its own: sequence b of q attends to sequence b of k and v.

    Args:
        q: (total_q, H, D), the sequences one after the other.
        k: (total_k, H_kv, D).
        v: (total_k, H_kv, D_v).
        cu_seqlens_q: Where the sequences of q start, and where the last ends: (sequences + 1,) int32 or int64, from 0,
            not decreasing. Equal neighbours are an empty sequence. Rows behind the last offset give 0 and -inf.
        cu_seqlens_k: Likewise of k and v.
        alibi_slopes: (H,) or (sequences, H); `sinks`, `k_scale` and `v_scale` likewise.
        out: (total_q, H, D_v).

    The other arguments are `attention`'s; positions, and the indices of dropout, count within a sequence.

    Returns:
        The output, (total_q, H, D_v), and with `return_lse` the LSE, (H, total_q).

    Raises:
        ValueError, TypeError: as `attention`; offsets that don't start at 0, decrease, or lie beyond the rows.
    """
    check.check_choice("backend", backend, BACKENDS)
    check.check_callable("progress", progress)
    rules: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "dropout": dropout, "seed": seed, "training": training, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    place = choose(backend, q=q, k=k, v=v, out=out)
    call, result = checked_packed_call(q, k, v, cu_seqlens_q, cu_seqlens_k, out=out, place=place, **rules)
    assert call.out is not None
    assert call.cu_seqlens_q is not None
    if backend == "reference":
        rules["seed"] = call.seed  # drawn once
        exact = reference.attention_varlen(q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, return_lse=True, **rules)
        call.out[0], call.lse[0] = exact[0].swapaxes(0, 1), exact[1]
    else:
        if place is HOST:  # on a GPU the kernel does it
            end = call.cu_seqlens_q[-1]
            call.out[..., end:, :], call.lse[..., end:] = 0, -np.inf
        run(call, progress, place=place)
    out, lse = finished(call, result, "bshd", place)
    return (out, lse) if return_lse else out


def attention_partial(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_offset: Any,
    k_offset: int = 0,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    training: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention to some of the keys, to be put together with the rest by `merge`.

    Args:
        q_offset: Position of row 0 in the whole sequence, one integer or (B,).
        k_offset: Index of the first key given in the whole sequence. Dropout counts from both.
        bias: For the keys given, as `mask`; `kv_lengths` counts among them too.

    The other arguments are `attention`'s. Sinks are left out: they are added once, by `merge`.

    Returns:
        (out, lse), out in the accumulation format: float32, or float64 for float64.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    place = choose("auto", q=q, k=k, v=v, bias=bias, mask=mask)
    check.check_integer_seed(seed)
    call, result = checked_call(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset, k_offset=k_offset,
        dropout=dropout, seed=seed, training=training, k_scale=k_scale, v_scale=v_scale, layout=layout, partial=True,
        place=place,
    )  # fmt: skip
    run(call, progress, place=place)
    return finished(call, result, layout, place)


def merge(outs: Any, lses: Any, *, sinks: Any = None, layout: str = "bhsd") -> tuple[np.ndarray, np.ndarray]:
    """Attention to all keys from attention to parts of them, each key in one part: exact for any split.

    Args:
        outs: Outputs of `attention_partial` in the order of their keys, each (..., H, S_q, D_v); all parts in host
            memory or all on one GPU.
        lses: Their log-sum-exps, each (..., H, S_q). A part without a key has -inf, and changes nothing.
        sinks: (H,), added here, once.
        layout: Of the outputs.

    Returns:
        (out, lse) in the format of the parts.

    Raises:
        ValueError: no parts, or shapes that don't fit.

    Formula: `recurrence.merge`, as in split-KV decoding (Dao et al. 2023, Flash-Decoding).
    """
    check.check_choice("layout", layout, LAYOUTS)
    try:
        outs, lses = list(outs), list(lses)
        parts_by_name = {f"outs[{n}]": x for n, x in enumerate(outs)} | {f"lses[{n}]": x for n, x in enumerate(lses)}
        place = choose("auto", **parts_by_name)
        outs = [check.operand("outs", place.take(out)) for out in outs]
        lses = [check.plain_array("lses", place.take(lse), "float32 or float64 arrays") for lse in lses]
    except TypeError as error:
        raise TypeError(f"outs and lses must be sequences of arrays: {error}") from None
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be as many, and at least one, got {len(outs)} and {len(lses)}")
    if any(lse.dtype not in (np.float32, np.float64) for lse in lses):
        raise TypeError(f"lses must be float32 or float64, got {[str(lse.dtype) for lse in lses]}")
    swap = layout == "bshd" and outs[0].ndim > 2
    parts = [out.swapaxes(-3, -2) if swap else out for out in outs]
    for out, lse in zip(parts, lses, strict=True):
        if out.shape != parts[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"outs must be of one shape and lses of theirs without the last axis (heads before rows), "
                f"got {[x.shape for x in outs]} and {[x.shape for x in lses]}"
            )
    dtype = np.result_type(*(lse.dtype for lse in lses))
    many = parts[0].ndim > 2
    sink = check.per_head("sinks", place.numbers(sinks), (1,), parts[0].shape[-3] if many else 1, "H")
    if place is not HOST:
        result, lse = place.empty(outs[0].shape, outs[0].dtype), place.empty(lses[0].shape, dtype)
        place.merge(parts, lses, sink, result.swapaxes(-3, -2) if swap else result, lse)
        return place.give(result), place.give(lse)
    m = np.full(lses[0].shape, -np.inf, dtype)
    l = np.zeros_like(m)
    total = np.zeros(parts[0].shape, dtype)
    with np.errstate(invalid="ignore"):  # NaN is passed on
        for out, lse in zip(parts, lses, strict=True):
            m, l, a, b = recurrence.merge(m, l, lse * dtype.type(LOG2E), dtype.type(1))
            empty = (lse == -np.inf)[..., None]  # whatever its output holds
            total = total * a[..., None] + np.where(empty, 0, out) * b[..., None]
        one_each = -np.inf if sink is None else sink[0, :, None] if many else sink[0]
        lse, factor = recurrence.finalize(m, l, np.asarray(one_each * LOG2E, dtype))
        result = (total * factor[..., None]).astype(parts[0].dtype)
    return (result.swapaxes(-3, -2) if swap else result), lse.astype(dtype)


# -- from arguments to a call ------------------------------------------------------------------------------------------


def checked_call(
    q, k, v, *, causal, window, scale, softcap, alibi_slopes, dropout, seed, training, k_scale, v_scale, layout,
    bias=None, mask=None, sinks=None, q_lengths=None, kv_lengths=None, q_offset=None, k_offset=0, out=None,
    sequences=None, partial=False, place=HOST,
) -> tuple[Call, np.ndarray]:  # fmt: skip
    """The arguments of a public call, checked: `(call, result)`, result being the array to return.

    sequences: (count,) of packed sequences, which stand where batch elements do. partial: the output is to be kept in
    the accumulation format.
    """
    check.check_choice("layout", layout, LAYOUTS)
    causal = bool(causal) if isinstance(causal, np.bool_) else causal
    check.check_choice("causal", causal, CAUSAL)
    q, k, v, bias, mask, out = (place.take(x) for x in (q, k, v, bias, mask, out))
    alibi_slopes, sinks, k_scale, v_scale, q_lengths, kv_lengths, q_offset = (
        place.numbers(x) for x in (alibi_slopes, sinks, k_scale, v_scale, q_lengths, kv_lengths, q_offset)
    )
    q, k, v = check.operand("q", q), check.operand("k", k, True), check.operand("v", v, True)
    dtype = check.common_dtype(q, k, v)
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    bshd = layout == "bshd"
    check.check_shapes(q, k, v, bshd)
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        result = place.empty(shape, wide if partial else dtype)
    else:
        result = check.output_array(out, shape, place.array)
    q_view, k_view, v_view = (check.heads_view(x, bshd) for x in (q, k, v))
    *batch, heads, queries, dim = q_view.shape
    keys = k_view.shape[-2]
    lead = tuple(batch) if sequences is None else sequences
    left, right = check.window_sides(window, causal)
    rate, random_seed = check.dropout_rate(dropout, seed, training)
    terms = check.score_terms(bias, mask, (*(lead if q.ndim > 3 else ()), heads, queries, keys))
    in_place = out is None or check.can_write_in_place(result, dtype, [q, k, v, *terms])
    target = result if in_place else place.empty(shape, wide)
    call = Call(
        q=q_view,
        k=k_view,
        v=v_view,
        out=check.heads_view(target, bshd),
        lse=place.empty(q_view.shape[:-1], wide),
        scale=check.scale_factor(scale, dim),
        left=left,
        right=right,
        softcap=check.softcap_value(softcap),
        top_left=causal == "top-left",
        operands=[term if term.ndim > 3 else term[None] for term in terms],
        slopes=check.per_head("alibi_slopes", alibi_slopes, lead, heads, "H"),
        sinks=check.per_head("sinks", sinks, lead, heads, "H"),
        k_scales=check.head_scales("k_scale", k_scale, lead, k_view.shape[-3]),
        v_scales=check.head_scales("v_scale", v_scale, lead, v_view.shape[-3]),
        q_lengths=check.per_batch("q_lengths", q_lengths, lead, 0, queries),
        kv_lengths=check.per_batch("kv_lengths", kv_lengths, lead, 0, keys),
        q_offset=check.per_batch("q_offset", q_offset, lead, -check.MAX_POSITION, check.MAX_POSITION),
        k_offset=check.key_count("k_offset", k_offset),
        dropout=rate,
        seed=random_seed,
    )
    return call, result


def checked_packed_call(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, out=None, place=HOST, **rules
) -> tuple[Call, np.ndarray]:  # fmt: skip
    """The same of packed sequences."""
    q, k, v = (place.take(x) for x in (q, k, v))
    cu_seqlens_q, cu_seqlens_k = place.numbers(cu_seqlens_q), place.numbers(cu_seqlens_k)
    q, k, v = check.operand("q", q), check.operand("k", k, True), check.operand("v", v, True)
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
    call, result = checked_call(q, k, v, layout="bshd", out=out, sequences=(count,), place=place, **rules)
    return replace(call, **starts), result


def finished(call: Call, result: Any, layout: str, place: Any = HOST) -> tuple[Any, Any]:
    """(out, lse) as the caller knows them, the output copied where it was computed aside."""
    assert call.out is not None
    if not np.may_share_memory(call.out, result):
        place.copy(check.heads_view(result, layout == "bshd"), call.out)
    lse = call.lse[(0,) * (4 - result.ndim)]  # without the axes that a 2-D or 3-D q doesn't have
    return place.give(result), place.give(lse)


def run(
    call: Call,
    progress: Progress | None = None,
    state: np.ndarray | None = None,
    place: Any = HOST,
    repeated: bool = False,
) -> Any:
    """Run a call; with `state`, that of an `AttentionStream`, bring it forward on the CPU instead of starting anew.

    Returns what another such call is run with, on the CPU `(start, launch, tables)`; None where there was nothing to
    do, or nothing is kept. repeated: it may well be run again.
    """
    if place is not HOST:
        started = place.run(call, repeated)
        if progress is not None:
            progress(1, 1)
        return started
    if call.lse.size == 0:
        return None
    from .cpu import launch  # not before the first call: it starts Numba

    problem, alive = describe(call)
    if call.cu_seqlens_q is not None:
        tiles = packed_work_tiles(alive[-1], launch.rows_per_work_tile(call), call.left, call.right)
        problem["work_tiles"], problem["work_tile_count"] = address(tiles), tiles.size
        alive.append(tiles)
    if state is not None:
        problem["state"] = address(state)
    prepared = launch.prepare(problem, call.lse.dtype, flops(call))
    addresses = tuple(problem[name] for name in ("q", "k", "v", "out", "lse"))
    launch.start(prepared, addresses, [call, alive, state], progress)
    return launch.start, prepared, alive


def run_reference(call: Call, causal: bool | str) -> None:
    exact, exact_lse = reference.attention(
        call.q, call.k, call.v, return_lse=True, causal=causal, window=(call.left, call.right), scale=call.scale,
        softcap=call.softcap or None, bias=call.operands[0] if call.operands else None,
        mask=call.operands[1] if len(call.operands) > 1 else None, alibi_slopes=call.slopes, sinks=call.sinks,
        q_lengths=call.q_lengths, kv_lengths=call.kv_lengths, q_offset=call.q_offset, k_offset=call.k_offset,
        dropout=call.dropout, seed=call.seed, k_scale=call.k_scales, v_scale=call.v_scales,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        call.lse[...] = exact_lse
        if call.out is not None:
            call.out[...] = exact
