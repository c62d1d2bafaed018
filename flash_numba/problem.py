"""The problem: one record that describes a call, which the kernels of every backend read.

It is a NumPy structured record, so that a kernel on either target reads named fields from one address instead of taking
fifty arguments, and no array type multiplies the number of compiled specialisations. An address of 0 means "none".
"""

import math
from typing import NamedTuple

import numpy as np

from .addresses import address, address_of
from .call import Call
from .dropout import round_keys
from .dtypes import FLOAT32_MAX, FLOAT64_MAX, format_code
from .scores import LOG2E

_int, _float = np.int64, np.float64

# Up to so many queries a head, decode kernels take a call: from there on the forward kernels' lanes are filled well.
FEW_QUERIES = 16

AXES = ("batch", "head", "row", "column")


def strides_of(*names: str, axes: tuple[str, ...] = AXES) -> list[tuple]:
    """Fields for the byte strides of arrays: `q_batch`, `q_head` and so on."""
    return [(f"{name}_{axis}", _int) for name in names for axis in axes]


# What one batch element, or one packed sequence, has of its own: byte offsets, lengths, and where row 0 stands.
SEQUENCE = np.dtype(
    [
        ("q", _int),
        ("k", _int),
        ("v", _int),
        ("out", _int),
        ("lse", _int),
        ("bias", _int),
        ("mask", _int),
        ("queries", _int),
        ("keys", _int),
        ("shift", _int),
        ("row_index", _int),
    ]
)

# Where a work tile (a block of query rows of one head) starts, for calls whose sequences differ in length.
WORK_TILE = np.dtype([("sequence", _int), ("first_row", _int)])

PROBLEM = np.dtype(
    [
        # addresses of the first element
        ("q", _int),
        ("k", _int),
        ("v", _int),
        ("out", _int),  # none: a stream accumulates into its saved (m, l, O), nothing is written out
        ("lse", _int),
        # two operands of the scores, each a float bias or a boolean mask by its format, bias standing for the first
        ("bias", _int),
        ("mask", _int),
        # byte strides; a row of q, out, bias and mask is a query, one of k and v a key. (One field each: an array of
        # strides in a record costs Numba more to compile than all fields.)
        *strides_of("q", "k", "v", "out", "bias", "mask"),
        *strides_of("lse", "slope", "sink", "k_scale", "v_scale", axes=("batch", "head")),
        # dtypes.format_code of each
        ("q_format", _int),
        ("k_format", _int),
        ("v_format", _int),
        ("out_format", _int),
        ("bias_format", _int),
        ("mask_format", _int),
        # sizes
        ("batch", _int),
        ("heads", _int),
        ("k_group", _int),  # query heads per key head
        ("v_group", _int),  # query heads per value head
        ("queries", _int),  # of out and of a stream's state: rows beyond a sequence's own are written as empty
        ("keys", _int),
        ("dim", _int),
        ("value_dim", _int),
        # rules; logarithms are to base 2 in the kernels, so log2(e) is folded in here
        ("scale", _float),
        ("softcap", _float),  # 0: none
        ("shift", _int),  # row i stands at position i + shift, counted from the first key given (scores.py)
        ("left", _int),  # a row sees the keys from position - left to position + right
        ("right", _int),
        # float64 arrays with a number for each batch element and head (key head: k_scales, v_scales); slopes and sinks
        # are to base 2 too
        ("slopes", _int),  # ALiBi
        ("sinks", _int),
        ("k_scales", _int),
        ("v_scales", _int),
        # dropout: a key is kept where its random 32-bit word reaches the threshold
        ("drop_below", _int),
        ("keep_factor", _float),  # 0: no dropout
        ("round_keys", _int, 20),  # dropout.round_keys
        ("row_index", _int),  # index of row 0 and of key 0 among the random words
        ("key_index", _int),
        # tables, for calls that need them: SEQUENCE a batch element, WORK_TILE a work tile of each head
        ("sequences", _int),
        ("work_tiles", _int),
        ("work_tile_count", _int),
        # a stream's state between calls
        ("state", _int),
    ],
    align=True,
)


# Fields that hold the address of a table, which `describe` makes in host memory; a GPU is given copies.
TABLES = ("slopes", "sinks", "k_scales", "v_scales", "sequences", "work_tiles")
# The 64-bit words of an array's four strides.
STRIDES_AT = {
    name: slice(PROBLEM.fields[f"{name}_batch"][1] // 8, PROBLEM.fields[f"{name}_column"][1] // 8 + 1)  # type: ignore[index]
    for name in ("q", "k", "v", "out", "bias", "mask")
}


class Head(NamedTuple):
    """A query head as kernels have read it from the record: where its arrays start, its lengths, its own numbers.

    What a kernel doesn't ask of it is dead code there.
    """

    b: int  # batch element, or packed sequence
    h: int
    q: int  # addresses of row 0; of k and v those of the key head that it shares
    k: int
    v: int
    out: int
    lse: int
    bias: int
    mask: int
    queries: int
    keys: int
    shift: int  # row i stands at position i + shift
    row_index: int  # of row 0 among the random words
    scale: float  # of the scores, to base 2, times that of 8-bit keys
    v_scale: float
    slope: float  # of ALiBi, to base 2; 0 without
    sink: float  # to base 2; -inf without


def describe(call: Call) -> tuple[np.ndarray, list[np.ndarray]]:
    """The `PROBLEM` record of a call, and what else has to stay alive while a kernel reads it."""
    *batch, heads, queries, dim = call.q.shape
    keys, value_dim = call.v.shape[-2:]
    words = np.zeros(PROBLEM.itemsize // 8, np.int64)
    problem = words.view(PROBLEM).reshape(())
    views = {"q": call.q, "k": call.k, "v": call.v}
    if call.out is not None:
        views["out"] = call.out
    bias_or_mask = {"mask" if operand.dtype == np.bool_ else "bias": operand for operand in call.operands}
    if len(call.operands) == 2:
        bias_or_mask = dict(zip(("bias", "mask"), call.operands, strict=True))
    strides = {"lse": call.lse.strides}
    for name, array in (views | bias_or_mask).items():
        strides[name] = np.broadcast_to(array, (*batch, *array.shape[-3:])).strides
        problem[name] = address_of(array)
        problem[f"{name}_format"] = known_format(name, array.dtype)
        words[STRIDES_AT[name]] = strides[name][-4:]  # all at once: a field by its name takes 0.4 us
    problem["lse"] = address_of(call.lse)
    problem["lse_batch"], problem["lse_head"] = call.lse.strides[-3:-1]

    problem["batch"], problem["heads"] = math.prod(batch), heads
    problem["k_group"], problem["v_group"] = heads // call.k.shape[-3], heads // call.v.shape[-3]
    problem["queries"], problem["keys"], problem["dim"], problem["value_dim"] = queries, keys, dim, value_dim
    limit = finite_limit(call.lse.dtype)
    problem["scale"] = min(max(call.scale * LOG2E, -limit), limit)  # saturates: 0 * inf would make NaN of a query of 0
    # a smaller cap makes all scores alike, a larger one makes no difference, and 1 / cap would leave the format
    smallest, largest = (1e-30, 1e30) if call.lse.dtype == np.float32 else (1e-290, 1e290)
    problem["softcap"] = call.softcap and min(max(call.softcap * LOG2E, smallest), largest)
    problem["left"], problem["right"] = call.left, call.right
    alive = []
    for name, numbers in (
        ("slope", call.slopes),
        ("sink", call.sinks),
        ("k_scale", call.k_scales),
        ("v_scale", call.v_scales),
    ):
        if numbers is not None:
            prepared = in_base_2 if name in ("slope", "sink") else saturated
            numbers = prepared(numbers, call.lse.dtype)
            problem[f"{name}s"] = address(numbers)
            problem[f"{name}_batch"], problem[f"{name}_head"] = numbers.strides
            alive.append(numbers)
    if call.dropout > 0:
        problem["drop_below"] = math.floor(call.dropout * 2**32)
        problem["keep_factor"] = 1 / (1 - call.dropout)
        problem["round_keys"] = round_keys(call.seed)
    problem["key_index"] = call.k_offset

    if call.cu_seqlens_q is not None:
        own = packed_sequences(call, strides)
    elif len(batch) > 1 or any(x is not None for x in (call.q_lengths, call.kv_lengths, call.q_offset)):
        own = batch_sequences(call, strides)
    else:
        problem["shift"] = (0 if call.top_left else keys - queries) - call.k_offset
        return problem, alive
    problem["batch"], problem["sequences"] = own.size, address(own)
    return problem, [*alive, own]


def known_format(name: str, dtype: np.dtype) -> int:
    """The code of an array's format. TypeError for one that kernels don't read: they would take it for another."""
    code = format_code(dtype)
    if code is None:
        raise TypeError(f"{name} has a format that no kernel reads: {dtype}")
    return code


def finite_limit(dtype: np.dtype) -> float:
    """The largest finite number of a kernel's floats."""
    return FLOAT32_MAX if dtype == np.float32 else FLOAT64_MAX


def saturated(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Finite numbers within what stays finite in a kernel's floats when it is brought to base 2."""
    limit = finite_limit(dtype)
    return np.where(np.isfinite(numbers), np.clip(numbers, -limit / LOG2E, limit / LOG2E), numbers)


def in_base_2(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Slopes, or sinks, for scores that are to base 2. Saturates: a finite number must not become infinite."""
    with np.errstate(all="ignore"):
        return saturated(numbers, dtype) * LOG2E


def batch_sequences(call: Call, strides: dict[str, tuple[int, ...]]) -> np.ndarray:
    """A `SEQUENCE` record for each batch element."""
    *batch, _, queries, _ = call.q.shape
    own = np.zeros(math.prod(batch), SEQUENCE)
    steps = np.indices(batch, sparse=True)
    for name, of_axes in strides.items():
        offsets = sum((step * stride for step, stride in zip(steps, of_axes, strict=False)), np.zeros(batch, np.int64))
        own[name] = offsets.ravel()
    own["queries"] = queries if call.q_lengths is None else call.q_lengths
    own["keys"] = call.k.shape[-2] if call.kv_lengths is None else call.kv_lengths
    if call.q_offset is not None:
        own["shift"] = call.q_offset
        own["row_index"] = call.q_offset * call.counts_from_offset
    elif not call.top_left:
        own["shift"] = own["keys"] - own["queries"]
    own["shift"] -= call.k_offset
    return own


def packed_sequences(call: Call, strides: dict[str, tuple[int, ...]]) -> np.ndarray:
    """A `SEQUENCE` record for each packed sequence."""
    q_starts, k_starts = call.cu_seqlens_q, call.cu_seqlens_k
    assert q_starts is not None
    assert k_starts is not None
    own = np.zeros(q_starts.size - 1, SEQUENCE)
    for name, starts in (("q", q_starts), ("k", k_starts), ("v", k_starts), ("out", q_starts)):
        own[name] = starts[:-1] * strides[name][-2]
    own["lse"] = q_starts[:-1] * strides["lse"][-1]
    own["queries"], own["keys"] = np.diff(q_starts), np.diff(k_starts)
    if not call.top_left:
        own["shift"] = own["keys"] - own["queries"]
    return own
