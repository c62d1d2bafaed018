"""The public calls: check the arguments, make a `Call` of them, hand it to a backend."""

from typing import Any

import numpy as np

from . import arguments as check
from .backend import Array, Backend, PreparedCall, Progress
from .backends import choose
from .call import Call
from .checked import checked_call, checked_packed_call, finished, lse_of
from .prepared import recall, remember
from .progress import reported
from .rules import BACKENDS, LAYOUTS


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
    out: Array | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    threads: int | None = None,
    progress: bool | Progress | None = None,
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
        threads: How many threads to use at most, at least 1; None for all that Numba has, or as many as OMP_NUM_THREADS
            says. Nothing to a GPU.
        progress: True for a bar on stderr or in a notebook (by rich, of the extra `cli`), or what is called about ten
            times a second while the call runs, with work tiles done and their number; on a GPU once, when the work is
            queued. False and None are none.

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
        RuntimeError: there is no GPU to use, or Numba's compiler is switched off; it says what is missing.
        ImportError: `progress=True` without rich.
        KeyboardInterrupt: within a second of Ctrl-C, for calls from the main thread. `out` is then partly written.

    Formula: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; streamed as in Dao 2023 (arXiv:2307.08691),
    section 3.1. The rules' sources stand in `scores.py` and `dropout.py`.
    """
    key, kept = recall(
        q, k, v, causal, window, scale, softcap, bias, mask, alibi_slopes, sinks, q_lengths, kv_lengths, q_offset,
        dropout, k_scale, v_scale, layout, out, backend, threads, progress,
    )  # fmt: skip
    if kept is not None:
        out, lse = kept.run(q, k, v)
        return (out, lse) if return_lse else out
    check.check_choice("backend", backend, BACKENDS)
    chosen = choose(backend, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
    call, result = checked_call(
        q, k, v, chosen, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, sinks=sinks, q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset,
        dropout=dropout, seed=seed, training=training, k_scale=k_scale, v_scale=v_scale, layout=layout, out=out,
        threads=threads,
    )  # fmt: skip
    repeated = chosen.remembers(type(q))
    with reported(progress, "attention") as report:
        prepared = compute(call, chosen, report, key is not None and repeated)
    if key is not None and repeated:
        remember(key, prepared.remembered(result, lse_of(call, result)))
    out, lse = finished(call, result, layout, chosen)
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
    out: Array | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Any:
    """Attention of packed sequences of any lengths, each on its own: sequence b of q attends to sequence b of k and v.

    Args:
        q: (total_q, H, D), the sequences one after the other.
        k: (total_k, H_kv, D).
        v: (total_k, H_kv, D_v).
        cu_seqlens_q: Where the sequences of q start, and where the last ends: (sequences + 1,) int32 or int64, from 0,
            not decreasing. Equal neighbours are an empty sequence. Rows behind the last offset give 0 and -inf.
        cu_seqlens_k: Likewise of k and v.
        alibi_slopes: (H,) or (sequences, H), and `sinks` likewise.
        k_scale: One number, (H_kv,) or (sequences, H_kv), and `v_scale` likewise.
        out: (total_q, H, D_v).

    The other arguments are `attention`'s, and so are the dtypes; positions, and the indices of dropout, count within a
    sequence.

    Returns:
        The output, (total_q, H, D_v) in q's dtype (or `out`), and with `return_lse` the natural-log LSE, (H, total_q)
        in float32 (float64 for float64).

    Raises:
        ValueError: as `attention`; offsets that don't start at 0, decrease, or lie beyond the rows, or of another
            number of sequences for q than for k.
        TypeError: as `attention`; offsets that aren't int32 or int64.
        RuntimeError, ImportError, KeyboardInterrupt: as `attention`.

    Formula: that of `attention` for each sequence; packed as in flash-attn's `flash_attn_varlen_func`.
    """
    check.check_choice("backend", backend, BACKENDS)
    chosen = choose(backend, q=q, k=k, v=v, out=out)
    call, result = checked_packed_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, chosen, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout=dropout, seed=seed, training=training, k_scale=k_scale,
        v_scale=v_scale, out=out, threads=threads,
    )  # fmt: skip
    with reported(progress, "attention_varlen") as report:
        compute(call, chosen, report)
    out, lse = finished(call, result, "bshd", chosen)
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
    progress: bool | Progress | None = None,
) -> tuple[Array, Array]:
    """Attention to some of the keys, to be put together with the rest by `merge`.

    Args:
        q: Queries, (..., H, S_q, D), of any dtype that `attention` takes, in host memory or on a GPU.
        k: Some of the keys, (..., H_kv, S_part, D).
        v: Their values, (..., H_kv, S_part, D_v).
        q_offset: Position of row 0 in the whole sequence, one integer or (B,).
        k_offset: Index of the first key given in the whole sequence. Dropout counts from both.
        bias: For the keys given, broadcastable to (..., H, S_q, S_part), as `mask`; `kv_lengths` counts among them too.
        seed: For dropout, an integer: a generator would draw another for each part.

    The other arguments are `attention`'s. Sinks are left out: they are added once, by `merge`.

    Returns:
        (out, lse): the output, (..., H, S_q, D_v), and the natural-log LSE, (..., H, S_q) whatever the layout, both in
        the accumulation format, float32 (float64 for float64), as arrays of q's library. A row that sees none of these
        keys gives 0 and -inf.

    Raises:
        ValueError: as `attention`; a negative `k_offset`.
        TypeError: as `attention`; a generator as `seed`.
        RuntimeError, ImportError, KeyboardInterrupt: as `attention`.

    Formula: that of `attention` over the keys given, as in split-KV decoding (Dao et al. 2023, "Flash-Decoding for
    long-context inference").
    """
    chosen = choose("auto", q=q, k=k, v=v, bias=bias, mask=mask)
    check.check_integer_seed(seed)
    call, result = checked_call(
        q, k, v, chosen, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, q_lengths=q_lengths, kv_lengths=kv_lengths, q_offset=q_offset, k_offset=k_offset,
        dropout=dropout, seed=seed, training=training, k_scale=k_scale, v_scale=v_scale, layout=layout, partial=True,
    )  # fmt: skip
    with reported(progress, "attention_partial") as report:
        compute(call, chosen, report)
    return finished(call, result, layout, chosen)


def merge(outs: Any, lses: Any, *, sinks: Any = None, layout: str = "bhsd") -> tuple[Array, Array]:
    """Attention to all keys from attention to parts of them, each key in one part: exact for any split.

    Args:
        outs: Outputs of `attention_partial` in the order of their keys, each (..., H, S_q, D_v), of any 16- to 64-bit
            dtype; all parts in host memory or all on one GPU.
        lses: Their natural-log LSEs, each (..., H, S_q), float32 or float64. A part without a key has -inf, and changes
            nothing.
        sinks: (H,), logits in natural units, added here, once.
        layout: Of the outputs, "bhsd" or "bshd".

    Returns:
        (out, lse): the output, (..., H, S_q, D_v) in the dtype of the first part's, and the LSE, (..., H, S_q), in
        float64 if any part's is, else float32. Sums are taken in the format of that LSE, in the order of the parts.

    Raises:
        ValueError: no parts, not as many outs as lses, or shapes that don't fit.
        TypeError: parts that aren't arrays, or of another dtype, or some in host memory and some on a GPU; on a GPU,
            float64 outs with float32 lses or the other way round.

    Formula: `recurrence.merge`: m = max(m_a, m_b), l = l_a exp(m_a - m) + l_b exp(m_b - m) and O likewise, as in
    split-KV decoding (Dao et al. 2023, "Flash-Decoding for long-context inference").
    """
    check.check_choice("layout", layout, LAYOUTS)
    try:
        outs, lses = list(outs), list(lses)
        by_name = {f"outs[{n}]": x for n, x in enumerate(outs)} | {f"lses[{n}]": x for n, x in enumerate(lses)}
        chosen = choose("auto", **by_name)
        outs = [check.attention_input("outs", chosen.take(out)) for out in outs]
        lses = [check.plain_array("lses", chosen.take(lse), "float32 or float64 arrays") for lse in lses]
    except TypeError as error:
        raise TypeError(f"outs and lses must be sequences of arrays: {error}") from None
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be as many, and at least one, got {len(outs)} and {len(lses)}")
    if any(lse.dtype not in (np.float32, np.float64) for lse in lses):
        raise TypeError(f"lses must be float32 or float64, got {[str(lse.dtype) for lse in lses]}")
    bshd = layout == "bshd" and outs[0].ndim > 2
    parts = [out.swapaxes(-3, -2) if bshd else out for out in outs]
    for out, lse in zip(parts, lses, strict=True):
        if out.shape != parts[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"outs must be of one shape and lses of theirs without the last axis (heads before rows), "
                f"got {[x.shape for x in outs]} and {[x.shape for x in lses]}"
            )
    heads = parts[0].shape[-3] if parts[0].ndim > 2 else 1
    sink = check.per_head("sinks", chosen.numbers(sinks), (1,), heads, "H")
    result = chosen.empty(outs[0].shape, outs[0].dtype)
    lse = chosen.empty(lses[0].shape, np.result_type(*(lse.dtype for lse in lses)))
    chosen.merge(parts, lses, sink, result.swapaxes(-3, -2) if bshd else result, lse)
    return chosen.give(result), chosen.give(lse)


def compute(call: Call, backend: Backend, progress: Progress | None = None, repeated: bool = False) -> PreparedCall:
    """Have a backend do a call; returns what it prepared. repeated: that is to be remembered."""
    backend.supports(call).require()
    prepared = backend.prepare(call, repeated)
    prepared.run(progress)
    return prepared
