"""Checks of the public calls' arguments: each returns its argument in the one form that the rest of the library takes.

Every error names the argument, quotes what was passed and says what is allowed.
"""

import math
import reprlib
from typing import Any

import numpy as np

from .backend import HOST_TYPES
from .dtypes import BOOL, CODES, EIGHT_BIT, format_code
from .geometry import UNLIMITED

DTYPE_NAMES = ", ".join(dtype.name for dtype in CODES)
EIGHT_BIT_NAMES = ", ".join(dtype.name for dtype in EIGHT_BIT)
MAX_LENGTH = 2**31 - 1  # queries or keys
MAX_POSITION = 2**40


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    # of the same type, as 1 == True, and an array would compare elementwise
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def plain_array(name: str, x: Any, allowed: str) -> np.ndarray:
    """Whatever NumPy takes for an array; one on a GPU in the form that its backend has given it."""
    if not isinstance(x, HOST_TYPES):
        from .gpu.arrays import DeviceArray, device_of

        if type(x) is DeviceArray:
            return x  # type: ignore[return-value]
        if device_of(x) is not None:
            raise TypeError(f"{name} lies on a GPU, which this call doesn't take; copy it to the host")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored; pass its data, and mask= for the keys")
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is PyTorch's
        raise TypeError(f"{name} must be {allowed}, as NumPy reads them, got {type(x).__name__}: {error}") from None


def native(dtype: np.dtype) -> np.dtype:
    """In this machine's byte order; as it is where it has none, as NumPy's strings of any length."""
    try:
        return dtype.newbyteorder("=")
    except TypeError:
        return dtype


def attention_input(name: str, x: Any, allow_eight_bit: bool = False) -> np.ndarray:
    """q, k or v as an array of at least two axes."""
    allowed = f"{DTYPE_NAMES}, {EIGHT_BIT_NAMES}" if allow_eight_bit else DTYPE_NAMES
    array = plain_array(name, x, f"an array of {allowed}")
    dtype = native(array.dtype)
    if dtype not in CODES and not (allow_eight_bit and dtype in EIGHT_BIT):
        given = f"{array.dtype} of shape {array.shape}" if array is x or array.dtype != object else type(x).__name__
        raise TypeError(f"{name} must be an array of {allowed}, got {given}")
    if array.ndim < 2:
        raise ValueError(f"{name} must have at least 2 axes, (rows, columns), got shape {array.shape}")
    return array


def common_dtype(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.dtype:
    """The dtype that all three share, 8-bit keys and values apart, in this machine's byte order."""
    dtype = q.dtype.newbyteorder("=")
    if any(x.dtype.newbyteorder("=") not in (dtype, *EIGHT_BIT) for x in (k, v)):
        raise TypeError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return dtype


def number(name: str, value: Any, allowed: str) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be {allowed}, got {reprlib.repr(value)}") from None


def scale_factor(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(max(dim, 1))
    value = number("scale", scale, "a finite number or None")
    if not math.isfinite(value):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return value


def thread_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    allowed = "an integer of at least 1 or None"
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        count = int(value.__index__())
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be {allowed}, got {reprlib.repr(value)}") from None
    if count < 1:
        raise ValueError(f"{name} must be {allowed}, got {reprlib.repr(value)}")
    return count


def softcap_value(softcap: float | None) -> float:
    """The cap, or 0 for none."""
    if softcap is None:
        return 0.0
    value = number("softcap", softcap, "a positive finite number or None")
    if not 0 < value < math.inf:
        raise ValueError(f"softcap must be a positive finite number or None, got {softcap!r}")
    return value


def window_sides(window: Any, causal: bool | str) -> tuple[int, int]:
    """(left, right), unlimited sides as `UNLIMITED`; a causal mask is a window that ends at the row's own position."""
    allowed = "None or two integers (left, right) of at least 0, where None or -1 is unlimited"
    try:
        left, right = (None, None) if window is None else window
        sides = [UNLIMITED if side is None or side == -1 else side.__index__() for side in (left, right)]
    except (TypeError, ValueError, AttributeError):
        raise TypeError(f"window must be {allowed}, got {window!r}") from None
    if min(sides) < 0:
        raise ValueError(f"window must be {allowed}, got {window!r}")
    left, right = (min(side, UNLIMITED) for side in sides)
    return left, 0 if causal else right


def dropout_rate(dropout: float, seed: Any, training: bool) -> tuple[float, int]:
    """(probability, 64-bit seed); (0, 0) where nothing is dropped."""
    rate = number("dropout", dropout, "a number from 0 to below 1")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be a number from 0 to below 1, got {dropout!r}")
    if rate == 0 or not training:
        return 0.0, 0
    allowed = "an integer from 0 to 2**64 - 1 or a numpy.random.Generator"
    if isinstance(seed, np.random.Generator):
        return rate, int(seed.integers(0, 2**64, dtype=np.uint64))
    if seed is None:
        raise ValueError(f"seed must be given where dropout > 0, {allowed}, got None")
    try:
        value = seed.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"seed must be {allowed}, got {seed!r}") from None
    if not 0 <= value < 2**64:
        raise ValueError(f"seed must be {allowed}, got {seed!r}")
    return rate, value


def array_of_shape(name: str, x: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An output, or a derivative by it."""
    array = attention_input(name, x)
    if array.shape != shape:
        raise ValueError(f"{name} must have the output's shape, {shape}, got {array.shape}")
    return array


def per_row(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A log-sum-exp of each row, or a derivative by it: contiguous, in the accumulation format."""
    array = plain_array(name, x, "a float32 or float64 array")
    if native(array.dtype) not in (np.float32, np.float64):
        raise TypeError(f"{name} must be a float32 or float64 array, got {array.dtype} of shape {array.shape}")
    if array.shape != shape:
        raise ValueError(f"{name} must have the log-sum-exp's shape (heads before rows), {shape}, got {array.shape}")
    return np.asarray(array, dtype, order="C")


def names_among(name: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    wanted = f"a sequence of names among {', '.join(map(repr, allowed))}"
    if isinstance(value, str):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    try:
        names = tuple(value)
    except TypeError:
        raise TypeError(f"{name} must be {wanted}, got {value!r}") from None
    if any(item not in allowed for item in names):
        raise ValueError(f"{name} must be {wanted}, got {names!r}")
    return names


def check_integer_seed(seed: Any) -> None:
    if isinstance(seed, np.random.Generator):
        raise TypeError(
            f"seed must be an integer, the same for all calls that belong together, as a generator draws another for "
            f"each, got {seed!r}"
        )


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


def bias_and_mask(bias: Any, mask: Any, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Bias and mask, as far as given, as views of shape (..., H, S_q, S_kv), floats before booleans.

    A boolean bias is a mask and a float mask is one more bias, as PyTorch has it.
    """
    operands = []
    for name, operand in (("bias", bias), ("mask", mask)):
        if operand is None:
            continue
        array = plain_array(name, operand, f"boolean or one of {DTYPE_NAMES}")
        if format_code(array.dtype) is None:
            raise TypeError(
                f"{name} must be boolean (True keeps a key) or one of {DTYPE_NAMES} (added to the scores), "
                f"got {array.dtype} of shape {array.shape}"
            )
        try:
            operands.append(np.broadcast_to(array, shape))
        except ValueError:
            wanted = f"(..., H, S_q, S_kv) = {shape}"
            raise ValueError(f"{name} must broadcast to {wanted}, got shape {array.shape}") from None
    return sorted(operands, key=lambda operand: format_code(operand.dtype) == BOOL)


def per_head(name: str, value: Any, batch: tuple[int, ...], heads: int, heads_name: str) -> np.ndarray | None:
    """Numbers given for one head each, for all batch elements or each: float64 of shape (B, heads)."""
    if value is None:
        return None
    allowed = f"({heads_name},) = ({heads},) or (B, {heads_name}) = {(*batch, heads)}"
    array = plain_array(name, value, f"floats of shape {allowed}")
    if array.dtype.kind not in "fiu" and array.dtype not in CODES:
        raise TypeError(f"{name} must be floats of shape {allowed}, got {array.dtype}: {reprlib.repr(value)}")
    array = array.astype(np.float64)
    size = math.prod(batch)
    if array.shape not in ((heads,), (size, heads), (*batch, heads)):
        raise ValueError(f"{name} must have shape {allowed}, got {array.shape}")
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1, heads), (size, heads)))


def head_scales(name: str, value: Any, batch: tuple[int, ...], heads: int) -> np.ndarray | None:
    """A scale for all, each key head, or each batch element and key head."""
    if value is not None and plain_array(name, value, "a number or an array of floats").ndim == 0:
        value = np.full(heads, number(name, value, "a number or an array of floats"))
    return per_head(name, value, batch, heads, "H_kv")


def per_batch(name: str, value: Any, batch: tuple[int, ...], low: int, high: int) -> np.ndarray | None:
    """Integers from low to high, one for all batch elements or one each: int64 of shape (B,)."""
    if value is None:
        return None
    array = plain_array(name, value, "integers")
    size = math.prod(batch)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, one or one each of {size} batch elements, got {value!r}")
    if array.shape not in ((), (size,), batch):
        raise ValueError(f"{name} must be one integer or of shape {(size,)}, got shape {array.shape}")
    if array.size and (array.min() < low or array.max() > high):
        raise ValueError(f"{name} must lie from {low} to {high}, got {value!r}")
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (size,)).astype(np.int64))


def key_count(name: str, value: Any) -> int:
    """A number of keys, or the index of one."""
    allowed = f"an integer from 0 to {MAX_POSITION}"
    try:
        count = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be {allowed}, got {value!r}") from None
    if not 0 <= count <= MAX_POSITION:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return count


def cumulative_lengths(name: str, value: Any, total: int) -> np.ndarray:
    """Where packed sequences start, and the end of the last: int64 of shape (sequences + 1,)."""
    array = plain_array(name, value, "a 1-D int32 or int64 array")
    quoted = reprlib.repr(array.tolist())
    if array.dtype.kind != "i" or array.dtype.itemsize not in (4, 8) or array.ndim != 1 or array.size == 0:
        raise TypeError(
            f"{name} must be a 1-D int32 or int64 array of sequences + 1 offsets, "
            f"got {array.dtype} of shape {array.shape}"
        )
    array = array.astype(np.int64)
    if array[0] != 0:
        raise ValueError(f"{name} must start at 0, got {quoted}")
    if (np.diff(array) < 0).any():
        raise ValueError(f"{name} must not decrease, got {quoted}")
    if array[-1] > total:
        raise ValueError(f"{name} must end at or before {total}, the number of rows, got {quoted}")
    return array


def output_array(out: Any, shape: tuple[int, ...], kind: Any = np.ndarray) -> np.ndarray:
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError("out is a masked array, whose mask would hide the result; pass its data")
    if not isinstance(out, kind) or native(out.dtype) not in CODES:
        given = f"{out.dtype} array" if isinstance(out, kind) else type(out).__name__
        raise TypeError(f"out must be a NumPy array of {DTYPE_NAMES}, got {given}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    if out.size and overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.strides} for shape {out.shape}")
    return out


def overlaps_itself(x: Any) -> bool:
    """Whether some elements of an array share bytes."""
    size = reach = x.dtype.itemsize
    axes = sorted([(abs(stride), n) for stride, n in zip(x.strides, x.shape, strict=True) if n > 1])
    steps_over = True  # whether each axis steps over all that the smaller ones reach
    for stride, n in axes:
        steps_over = steps_over and stride >= reach
        reach += (n - 1) * stride
    if steps_over:
        return False
    if axes[0][0] == 0 or math.prod(x.shape) * size > reach:
        return True
    starts = np.zeros(1, np.int64)  # rare: axes that reach into each other, and may still miss
    for stride, n in axes:
        starts = np.add.outer(starts, stride * np.arange(n)).ravel()
    return bool(np.diff(np.sort(starts)).min() < size)


def can_write_in_place(out: np.ndarray, dtype: np.dtype, inputs: list) -> bool:
    """Whether a kernel may write to `out` as it goes: a format it writes, and no overlap with what it still reads."""
    if (out.dtype.newbyteorder("=") == np.float64) != (dtype == np.float64):
        return False
    return not any(np.may_share_memory(out, x) for x in inputs)
