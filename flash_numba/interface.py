"""The public calls: check the arguments, describe the call as a `Problem`, hand it to a backend."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import reference
from .dtypes import CODES, format_code
from .problem import PROBLEM

Progress = Callable[[int, int], None]

LOG2E = math.log2(math.e)
BACKENDS = ("auto", "cpu", "reference")
LAYOUTS = ("bhsd", "bshd")
DTYPE_NAMES = ", ".join(dtype.name for dtype in CODES)
MAX_LENGTH = 2**29  # positions are 32-bit integers in the kernels, with room for a row's shift


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    mask: Any = None,
    layout: str = "bhsd",
    out: np.ndarray | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Any:
    """Exact attention, `softmax(scale * q k^T) v`, streamed: the score matrix is never held in memory.

    Args:
        q: Queries, (..., H, S_q, D); 2-D is one head. Anything `np.asarray` makes a float array of. Strides are honoured.
        k: Keys, (..., H_kv, S_kv, D). H must be a multiple of H_kv: query heads share key heads in contiguous groups
            (GQA; MQA for H_kv = 1). Axes left of the heads broadcast against q's.
        v: Values, (..., H_kv, S_kv, D_v).
            All three are float64, float32, float16 or bfloat16 (`ml_dtypes.bfloat16`), alike, in either byte order.
        causal: True lets row i see keys j <= i + S_kv - S_q (aligned at the bottom right, as in flash-attn);
            "top-left" keys j <= i (as in PyTorch and JAX).
        scale: Factor of the scores, any finite number; 1 / sqrt(D) if None.
        mask: Boolean, broadcastable to (..., H, S_q, S_kv); True keeps a key. Never materialised.
        layout: "bhsd" for (..., H, S, D), or "bshd" for (..., S, H, D) as in flash-attn; of q, k, v and out alike.
        out: Array to write to, (..., H, S_q, D_v) in the same layout, of any dtype above. May overlap an input.
        return_lse: Also return the log-sum-exp of each row.
        backend: "auto", "cpu", or "reference" (whole-matrix NumPy in float64, for checking).
        progress: Called about ten times a second while the call runs, with work items done and their number.

    Returns:
        The output, (..., H, S_q, D_v) in q's dtype (or `out`); with `return_lse` also the natural-log LSE,
        (..., H, S_q) whatever the layout, in float32 (float64 for float64). A row that sees no key gives 0 and -inf.
        Sums are taken in float32 (float64 for float64). Same bits for any number of threads and batches.

    Raises:
        ValueError: shapes that don't fit, a scale that isn't finite, an unknown layout, causal or backend, an `out` of
            the wrong shape.
        TypeError: dtypes that aren't taken or are mixed, a mask that isn't boolean.
        KeyboardInterrupt: within a second of Ctrl-C, for calls from the main thread. `out` is then partly written.

    Formula: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; streamed as in Dao 2023 (arXiv:2307.08691), section 3.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("backend", backend, BACKENDS)
    check_choice("causal", causal, (False, True, "top-left"))
    q, k, v = operand("q", q), operand("k", k), operand("v", v)
    dtype = common_dtype(q, k, v)
    scale = checked_scale(scale, q.shape[-1])
    bshd = layout == "bshd"
    check_shapes(q, k, v, bshd)
    shape = (*q.shape[:-1], v.shape[-1])
    result = np.empty(shape, dtype) if out is None else checked_out(out, shape)
    target = result
    if out is not None and not can_write_in_place(out, dtype, (q, k, v, mask)):
        target = np.empty(shape, np.float64 if dtype == np.float64 else np.float32)

    q, k, v, view = [heads_view(x, bshd) for x in (q, k, v, target)]
    rows = q.shape[:-1]
    mask = None if mask is None else heads_view(broadcast_mask(mask, rows, k.shape[-2], result.ndim), False)
    lse = np.empty(rows, np.float64 if dtype == np.float64 else np.float32)
    if backend == "reference":
        exact, exact_lse = reference.attention(q, k, v, causal=causal, scale=scale, mask=mask, return_lse=True)
        view[...], lse[...] = exact, exact_lse
    elif lse.size:
        run_on_cpu(q, k, v, mask, view, lse, causal, scale, progress)
    if target is not result:
        result[...] = target
    return (result, lse.reshape(rows[4 - result.ndim :] if result.ndim < 4 else rows)) if return_lse else result


def run_on_cpu(q, k, v, mask, out, lse, causal, scale, progress) -> None:
    """Describe the call as a `Problem` and run it; all arrays are (batch axes, heads, rows, columns)."""
    from .cpu import launch  # not before the first call: it starts Numba

    *batch, heads, queries, dim = q.shape
    keys, value_dim = v.shape[-2:]
    problem = np.zeros((), PROBLEM)
    offsets = np.zeros((math.prod(batch), 5), np.int64)
    for column, (name, array) in enumerate({"q": q, "k": k, "v": v, "mask": mask, "out": out}.items()):
        if array is None:
            continue
        strides = np.broadcast_to(array, (*batch, *array.shape[-3:])).strides
        problem[name] = launch.address(array)
        problem[f"{name}_strides"] = strides[-4:]
        if name != "mask":
            problem[f"{name}_format"] = format_code(array.dtype)
        if len(batch) > 1:  # no one stride need lead from batch to batch
            steps = np.indices(batch, sparse=True)
            offsets[:, column] = np.ravel(sum(step * stride for step, stride in zip(steps, strides, strict=False)))
    if len(batch) > 1:
        problem["batch_offsets"] = launch.address(offsets)
    problem["lse"] = launch.address(lse)
    problem["batch"], problem["heads"] = len(offsets), heads
    problem["k_group"], problem["v_group"] = heads // k.shape[-3], heads // v.shape[-3]
    problem["queries"], problem["keys"], problem["dim"], problem["value_dim"] = queries, keys, dim, value_dim
    limit = float(np.finfo(lse.dtype).max)
    problem["scale"] = min(max(scale * LOG2E, -limit), limit)
    problem["shift"] = {False: keys, True: keys - queries, "top-left": 0}[causal]
    flops = 2.0 * (dim + value_dim) * keys * lse.size
    launch.run(problem, lse.dtype, flops, (q, k, v, mask, out, lse, offsets), progress)


# -- arguments ---------------------------------------------------------------------------------------------------------


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    # an exact type, as 1 == True and an array would compare elementwise
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def operand(name: str, x: Any) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored; pass x.data, and mask= for the keys")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of {DTYPE_NAMES}, got {type(x).__name__}: {error}") from None
    if format_code(array.dtype) is None:
        raise TypeError(f"{name} must be an array of {DTYPE_NAMES}, got {array.dtype} of shape {array.shape}")
    if array.ndim < 2:
        raise ValueError(f"{name} must have at least 2 axes, (rows, columns), got shape {array.shape}")
    return array


def common_dtype(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.dtype:
    """The dtype that all three share, in this machine's byte order."""
    native = [x.dtype.newbyteorder("=") for x in (q, k, v)]
    if len(set(native)) > 1:
        raise TypeError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return native[0]


def checked_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(max(dim, 1))
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a finite number or None, got {scale!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return value


def check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray, bshd: bool) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, layout={'bshd' if bshd else 'bhsd'!r}"
    (*q_batch, heads, queries, dim), (*k_batch, k_heads, keys, k_dim), (*v_batch, v_heads, v_keys, value_dim) = (
        heads_view(x, bshd).shape for x in (q, k, v)
    )
    if k_dim != dim:
        raise ValueError(f"q and k must have the same head dimension (last axis): {shapes}")
    if v_keys != keys:
        raise ValueError(f"k and v must have the same number of keys: {shapes}")
    if dim == 0 or value_dim == 0:
        raise ValueError(f"head dimensions must be at least 1: {shapes}")
    if k_heads != v_heads and 1 not in (k_heads, v_heads):
        raise ValueError(f"k and v must have the same number of heads, or one of them a single head: {shapes}")
    for name, shared in (("k", k_heads), ("v", v_heads)):
        if shared == 0 or heads % shared:
            raise ValueError(f"q's number of heads must be a multiple of {name}'s, {heads} isn't of {shared}: {shapes}")
    for name, leading in (("k", k_batch), ("v", v_batch)):
        try:
            fits = np.broadcast_shapes(tuple(q_batch), tuple(leading)) == tuple(q_batch)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"the axes of {name} left of the heads must broadcast to q's: {shapes}")
    if max(queries, keys) > MAX_LENGTH:
        raise ValueError(f"at most {MAX_LENGTH} queries and keys are supported: {shapes}")


def heads_view(x: np.ndarray, bshd: bool) -> np.ndarray:
    """The array as (batch axes, heads, rows, columns) with at least one batch axis, without a copy."""
    if x.ndim == 2:
        return x[None, None]
    if bshd:
        x = x.swapaxes(-3, -2)
    return x if x.ndim > 3 else x[None]


def broadcast_mask(mask: Any, rows: tuple[int, ...], keys: int, ndim: int) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"mask must be boolean (True keeps a key), got {mask.dtype} of shape {mask.shape}")
    shape = (*rows, keys) if ndim > 3 else (*rows, keys)[4 - ndim :]
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"mask must broadcast to (..., H, S_q, S_kv) = {shape}, got shape {mask.shape}") from None


def checked_out(out: Any, shape: tuple[int, ...]) -> np.ndarray:
    if not isinstance(out, np.ndarray) or format_code(out.dtype) is None:
        kind = f"{out.dtype} array" if isinstance(out, np.ndarray) else type(out).__name__
        raise TypeError(f"out must be a NumPy array of {DTYPE_NAMES}, got {kind}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    return out


def can_write_in_place(out: np.ndarray, dtype: np.dtype, inputs: tuple) -> bool:
    """Whether a kernel may write to `out` as it goes: no overlap with what it still reads, and a format it writes."""
    if (out.dtype.newbyteorder("=") == np.float64) != (dtype == np.float64):
        return False
    return not any(x is not None and np.may_share_memory(out, x) for x in inputs)
