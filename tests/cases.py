"""The problems every backend is tested on: named, made from a seeded generator, each with its cost.

`CASES` covers the plain call: causal, scale, mask, shapes, dtypes, memory layouts, NaN and infinities. `RULE_CASES`
covers the score rules (window, softcap, bias, ALiBi, sinks, lengths, offsets, dropout, 8-bit K and V), each pair of
them at least once. A slow backend takes the cases up to a cost of its choice; `features` tells whether it still meets
all.
"""

import itertools
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flash_numba.bench.shapes import FULL

DTYPES = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = DTYPES
FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """One call. Shapes are (..., H, S, D) even where `layout` has the arrays passed as (..., S, H, D)."""

    name: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: np.dtype = FLOAT32
    kv_dtype: np.dtype | None = None
    options: Callable[[np.random.Generator, "Case"], dict[str, Any]] | None = None
    """Keyword arguments, from a generator and the case."""
    special: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
    """Writes NaN, infinities and the like into q, k and v."""
    view: Callable[[np.ndarray], np.ndarray] | None = None
    """The same array (or one of its shape and dtype) in another place in memory."""
    layout: str = "bhsd"
    about: tuple[str, ...] = ()
    """What the case is there for; with the dtype and the layout these are its features."""

    @property
    def heads(self) -> int:
        return self.q[-3] if len(self.q) > 2 else 1

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (*self.q[:-1], self.k[-2])

    @property
    def cost(self) -> int:
        """Score elements times columns of Q and V, at least 1."""
        return max(1, math.prod(self.scores_shape) * (self.q[-1] + self.v[-1]) // 2)

    @property
    def features(self) -> frozenset[str]:
        kinds = {self.dtype.name, self.layout, *self.about}
        return frozenset(kinds | {self.kv_dtype.name} if self.kv_dtype else kinds)

    def arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """q, k, v and the keyword arguments, the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        kv_dtype = self.kv_dtype or self.dtype
        arrays = [rng.standard_normal(self.q).astype(self.dtype)]
        arrays += [rng.standard_normal(shape).astype(kv_dtype) for shape in (self.k, self.v)]
        options = {} if self.options is None else self.options(rng, self)
        if self.special is not None:
            self.special(*arrays)
        if self.layout == "bshd":
            arrays = [x if x.ndim == 2 else np.ascontiguousarray(np.swapaxes(x, -2, -3)) for x in arrays]
            options["layout"] = "bshd"
        if self.view is not None:
            arrays = [self.view(x) for x in arrays]
        return (*arrays, options)


def self_attention(name, *, batch=1, heads=2, kv_heads=None, rows=65, keys=130, dim=16, value_dim=None, **rest):
    """A case of 4-D arrays."""
    kv_heads = kv_heads or heads
    return Case(
        name=name,
        q=(batch, heads, rows, dim),
        k=(batch, kv_heads, keys, dim),
        v=(batch, kv_heads, keys, value_dim or dim),
        **rest,
    )


def fixed(**options):
    return lambda rng, case: dict(options)


def combined(*builders):
    """The options of several builders; a later one replaces what an earlier one gave under the same name."""

    def build(rng, case):
        options = {}
        for builder in builders:
            options |= builder(rng, case)
        return options

    return build


CAUSAL = {"full": fixed(), "causal": fixed(causal=True), "top-left": fixed(causal="top-left")}


# ---- lengths, head dimensions, heads

LENGTHS = [
    (0, 0), (0, 3), (3, 0), (1, 1), (1, 64), (1, 300), (3, 1), (3, 63), (63, 65), (64, 64), (65, 63), (65, 64),
    (113, 203), (203, 113),
]  # fmt: skip


def length_cases():
    for (rows, keys), (causal, options), dtype in itertools.product(LENGTHS, CAUSAL.items(), DTYPES):
        about = [causal, "lengths"]
        about += ["no rows"] * (rows == 0) + ["no keys"] * (keys == 0) + ["one row"] * (rows == 1)
        about += ["S_q < S_kv"] * (rows < keys) + ["S_q > S_kv"] * (rows > keys)
        yield self_attention(
            f"{rows}x{keys}-{causal}-{dtype}",
            rows=rows,
            keys=keys,
            dim=24,
            dtype=dtype,
            options=options,
            about=tuple(about),
        )
    for (causal, options), dtype in itertools.product(CAUSAL.items(), DTYPES):
        yield self_attention(
            f"1023x1024-{causal}-{dtype}",
            heads=1,
            rows=1023,
            keys=1024,
            dim=16,
            dtype=dtype,
            options=options,
            about=("long",),
        )
    yield self_attention("1024x1023-causal", heads=1, rows=1024, keys=1023, options=CAUSAL["causal"], about=("long",))
    yield self_attention("2x2100-decode", heads=1, rows=2, keys=2100, options=CAUSAL["causal"], about=("long",))


def benchmark_cases():
    """The benchmarks' shapes, with one K/V head of one batch, where the oracle needs less than a second for them."""
    for shape in FULL:
        if max(shape.S_q, shape.S_kv) <= 1024:
            options = CAUSAL["causal" if shape.causal else "full"]
            yield self_attention(
                f"benchmark-{shape.name}", heads=shape.H // shape.H_kv, kv_heads=1, rows=shape.S_q, keys=shape.S_kv,
                dim=shape.D, options=options, about=("benchmark",),
            )  # fmt: skip


DIMS = [1, 3, 40, 64, 80, 96, 128, 192, 256, 512, 576]
DIMS_AND_VALUE_DIMS = [(1, 7), (3, 1), (16, 17), (40, 128), (64, 32), (192, 128), (576, 512)]


def dim_cases():
    for dim, dtype in itertools.product(DIMS, DTYPES):
        # Cheap enough for slow backends where the dimension allows it, more than one block of keys where it doesn't.
        rows, keys = (21, 50) if dim < 64 else (65, 150)
        yield self_attention(
            f"D{dim}-{dtype}",
            heads=1,
            rows=rows,
            keys=keys,
            dim=dim,
            dtype=dtype,
            options=CAUSAL["causal"],
            about=("D",),
        )
    for (dim, value_dim), dtype in itertools.product(DIMS_AND_VALUE_DIMS, DTYPES):
        yield self_attention(
            f"D{dim}-Dv{value_dim}-{dtype}", heads=1, rows=30, keys=140, dim=dim, value_dim=value_dim, dtype=dtype,
            about=("D_v != D",),
        )  # fmt: skip


def head_cases():
    def case(name, q, k, v, *about):
        return Case(name, q, k, v, options=CAUSAL["causal"], about=("heads", *about))

    yield case("gqa-8/2", (2, 8, 37, 16), (2, 2, 53, 16), (2, 2, 53, 16), "GQA")
    yield case("gqa-6/3-one-row", (2, 6, 1, 16), (2, 3, 53, 16), (2, 3, 53, 16), "GQA")
    yield case("gqa-32/4-many-keys", (1, 32, 1, 64), (1, 4, 1000, 64), (1, 4, 1000, 64), "GQA")
    yield case("mqa-5", (2, 5, 37, 16), (2, 1, 53, 16), (2, 1, 53, 16), "MQA")
    yield case("one-v-head", (2, 4, 9, 8), (2, 4, 11, 8), (2, 1, 11, 8), "MQA")
    yield case("2-D", (37, 16), (53, 16), (53, 8), "2-D")
    yield case("3-D", (4, 37, 16), (2, 53, 16), (2, 53, 8), "3-D")
    yield case("5-D", (2, 3, 2, 17, 8), (2, 3, 1, 21, 8), (2, 3, 1, 21, 8), "5-D")
    yield case("6-D", (2, 1, 3, 2, 5, 8), (2, 1, 3, 2, 7, 8), (2, 1, 3, 2, 7, 8), "5-D")
    yield case("kv-of-one-batch", (3, 2, 17, 8), (1, 2, 21, 8), (3, 2, 21, 8), "broadcast")
    yield case("kv-without-batch", (3, 4, 17, 8), (2, 21, 8), (2, 21, 8), "broadcast")
    yield case("kv-2-D", (3, 4, 17, 8), (21, 8), (21, 8), "broadcast")
    yield case("kv-5-D-broadcast", (2, 3, 2, 17, 8), (3, 2, 21, 8), (2, 1, 1, 21, 8), "broadcast", "5-D")
    yield case("no-batch", (0, 2, 17, 8), (0, 2, 21, 8), (0, 2, 21, 8), "broadcast")
    bshd = [
        self_attention("bshd", batch=2, heads=4, kv_heads=2, rows=37, keys=53, dim=16, options=CAUSAL["causal"]),
        Case("bshd-3-D", (4, 37, 16), (2, 53, 16), (2, 53, 8)),
        Case("bshd-2-D", (37, 16), (53, 16), (53, 8)),
        Case("bshd-5-D", (2, 3, 2, 17, 8), (1, 3, 1, 21, 8), (2, 3, 2, 21, 8)),
        self_attention("bshd-mask", batch=2, heads=4, rows=37, keys=53, dim=8, options=mask_like(2, 4, 37, 53)),
    ]
    yield from (replace(case, layout="bshd", about=("heads",)) for case in bshd)


# ---- masks


def mask_like(*shape, keep=0.6):
    return lambda rng, case: {"mask": rng.random(shape) < keep}


def hidden_rows(rng, case):
    """Rows without a key, at the start, at the end and in a stretch longer than a block."""
    rows, keys = case.scores_shape[-2:]
    mask = rng.random((rows, keys)) < 0.5
    mask[[0, -1]] = mask[rows // 4 : rows // 2] = False
    return {"mask": mask}


def hidden_first_keys(rng, case):
    """The first blocks of keys hidden from every row, or from some: what comes later must not start from garbage."""
    mask = np.ones(case.scores_shape[-2:], bool)
    mask[:, : case.k[-2] // 2] = False
    mask[::3, : case.k[-2] - 2] = False
    mask[1::3] = True
    return {"mask": mask}


def isolated_keys(rng, case):
    """One key a row, another one each: whole tiles are hidden, and those that aren't keep a single place."""
    rows, keys = case.scores_shape[-2:]
    return {"mask": np.arange(keys) == (np.arange(rows)[:, None] * 37) % keys}


def strided_mask(rng, case):
    rows, keys = case.scores_shape[-2:]
    return {"mask": (rng.random((keys, 2 * rows)) < 0.6)[::-1, ::2].T}


def mask_cases():
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "rows": 37, "keys": 53, "dim": 8}
    for mask in [
        (2, 4, 37, 53), (1, 4, 37, 53), (2, 1, 37, 53), (1, 1, 37, 53), (2, 1, 1, 53), (2, 4, 1, 53), (2, 4, 37, 1),
        (1, 1, 1, 1), (4, 37, 53), (4, 1, 53), (37, 53), (37, 1), (1, 53), (53,), (1,), (),
    ]:  # fmt: skip
        name = "mask-" + ("x".join(str(n) for n in mask) or "scalar")
        options = mask_like(*mask, keep=0.6 if math.prod(mask) > 1 else 1.1)
        yield self_attention(name, **shape, options=options, about=("mask",))
        yield self_attention(
            name + "-causal",
            **shape,
            options=combined(options, CAUSAL["causal"]),
            about=("mask", "causal mask"),
        )
    for dtype in DTYPES:
        yield self_attention(
            f"mask-{dtype}", rows=65, keys=203, dtype=dtype, options=mask_like(65, 203), about=("mask",)
        )
    for name, mask in [
        ("all-kept", mask_like(300, 420, keep=1.1)), ("all-hidden", mask_like(300, 420, keep=-1)),
        ("hidden-rows", hidden_rows), ("hidden-first-keys", hidden_first_keys), ("isolated-keys", isolated_keys),
        ("strided", strided_mask),
    ]:  # fmt: skip
        for causal in ("full", "causal", "top-left"):
            options = combined(mask, CAUSAL[causal])
            yield self_attention(f"{name}-{causal}", rows=300, keys=420, dim=8, options=options, about=("mask",))
        if name not in ("all-kept", "all-hidden"):
            yield self_attention(f"{name}-small", rows=20, keys=30, dim=8, options=mask, about=("mask", name))
    for name, keep in [("all-kept", 1.1), ("all-hidden", -1)]:
        yield self_attention(
            f"{name}-small", rows=20, keys=30, dim=8, options=mask_like(20, 30, keep=keep), about=("mask", name)
        )
    yield Case("mask-2-D", (37, 8), (53, 8), (53, 8), options=mask_like(37, 53), about=("mask",))
    yield Case("mask-3-D", (4, 37, 8), (4, 53, 8), (4, 53, 8), options=mask_like(4, 1, 53), about=("mask",))
    yield Case(
        "mask-5-D",
        (2, 3, 2, 17, 8),
        (2, 3, 2, 21, 8),
        (2, 3, 2, 21, 8),
        options=mask_like(3, 1, 17, 21),
        about=("mask",),
    )


# ---- NaN and infinities, at places that are seen, masked, or at the edge of a block


def put(array, value, row, column=None):
    """A function that writes `value` into one row of q, k or v (0, 1, 2), in one column or all."""

    def write(*arrays):
        arrays[array][..., row, slice(None) if column is None else column] = value

    return write


def put_all(*writes):
    def write(*arrays):
        for one in writes:
            one(*arrays)

    return write


def hide_key(key):
    """Row i sees every key but `key`, except for row 5, which sees that one too."""

    def build(rng, case):
        mask = np.ones(case.scores_shape[-2:], bool)
        mask[:, key] = False
        mask[5, key] = True
        return {"mask": mask}

    return build


def non_finite_cases():
    places = {
        "v47": put(2, NAN, 47, 3),
        "v47-row": put(2, NAN, 47),
        "v0": put(2, NAN, 0, 0),
        "v-last": put(2, NAN, -1, 1),
        "v-inf": put(2, INF, 47, 3),
        "v-minus-inf": put(2, -INF, 47, 3),
        "v-both-infs": put_all(put(2, INF, 20, 3), put(2, -INF, 47, 3)),
        "v-everywhere": put(2, NAN, slice(None)),
        "k47": put(1, NAN, 47, 3),
        "k-inf": put(1, INF, 47, 3),
        "k-minus-inf": put(1, -INF, 47, 3),
        "k-everywhere": put(1, NAN, slice(None), 0),
        "q47": put(0, NAN, 47, 3),
        "q-inf": put(0, INF, 47, 3),
        "q-minus-inf-row": put(0, -INF, 47),
        "q-and-v": put_all(put(0, NAN, 10, 0), put(2, NAN, 30, 0)),
    }
    for name, special in places.items():
        for causal, options in CAUSAL.items():
            yield self_attention(
                f"nan-{name}-{causal}", rows=64, keys=64, dim=8, options=options, special=special, about=("non-finite",)
            )
    for dtype in DTYPES:
        yield self_attention(
            f"nan-v300-{dtype}", heads=1, rows=420, keys=420, dim=24, dtype=dtype, options=CAUSAL["causal"],
            special=put(2, NAN, 300, 3), about=("non-finite",),
        )  # fmt: skip
        yield self_attention(
            f"nan-hidden-{dtype}", heads=1, rows=65, keys=150, dim=24, dtype=dtype, options=hide_key(130),
            special=put_all(put(2, NAN, 130, 3), put(1, NAN, 130, 0)), about=("non-finite", "NaN under a mask"),
        )  # fmt: skip
    small = {"heads": 1, "rows": 20, "keys": 30, "dim": 8}
    yield self_attention(
        "nan-hidden-small",
        **small,
        options=hide_key(13),
        special=put(2, NAN, 13),
        about=("non-finite", "NaN under a mask"),
    )
    yield self_attention(
        "nan-hidden-from-all", **small, options=mask_like(20, 30, keep=-1), about=("non-finite", "NaN under a mask"),
        special=put_all(put(0, NAN, slice(None)), put(1, NAN, slice(None)), put(2, NAN, slice(None))),
    )  # fmt: skip
    # A score of -inf in every place a row sees: an empty row, not NaN.
    yield self_attention(
        "minus-inf-scores", **small, special=put_all(put(0, 1, slice(None), 0), put(1, -INF, slice(None), 0)),
        about=("non-finite", "scores of -inf"),
    )  # fmt: skip
    # The same where V isn't finite: it isn't multiplied by the weights of 0.
    yield self_attention(
        "minus-inf-scores-of-inf", **small, about=("non-finite", "scores of -inf"),
        special=put_all(put(0, 1, slice(None), 0), put(1, -INF, slice(None), 0), put(2, INF, 1, 2), put(2, NAN, 2, 1)),
    )  # fmt: skip
    yield self_attention(
        "minus-inf-scores-of-inf-decode", heads=2, rows=2, keys=30, dim=8, about=("non-finite", "scores of -inf"),
        special=put_all(put(0, 1, slice(None), 0), put(1, -INF, slice(None), 0), put(2, INF, 1, 2), put(2, NAN, 2, 1)),
    )  # fmt: skip
    yield self_attention(
        "minus-inf-scores-first", heads=1, rows=20, keys=300, dim=8, about=("non-finite", "scores of -inf"),
        special=put_all(put(0, 1, slice(None), 0), put(1, -INF, slice(250), 0)),
    )  # fmt: skip


# ---- scale, size of the logits


def times(factor_q, factor_k=1.0, factor_v=1.0):
    """q, k and v multiplied in place, rounded to their dtype."""

    def write(*arrays):
        for x, factor in zip(arrays, (factor_q, factor_k, factor_v), strict=True):
            x[...] = (x.astype(np.float64) * factor).astype(x.dtype)

    return write


def growing_scores(q, k, v):
    """Scores that grow with the key, so that every block moves the maximum of every row."""
    q[...] = 1
    k[...] = np.linspace(-3, 3, k.shape[-2])[:, None].astype(k.dtype)


def growing_values(q, k, v):
    """Values from 1e-20 to 1e3: under a causal mask the first rows are tiny, and must be as exact as the last."""
    v[...] *= np.logspace(-20, 3, v.shape[-2], dtype=v.dtype)[:, None]


def scale_cases():
    scales = {"0": 0.0, "minus-0.5": -0.5, "4": 4.0, "30": 30.0, "int": 2, "numpy": np.float32(0.3), "tiny": 1e-30}
    for (name, scale), causal in itertools.product(scales.items(), ("full", "causal")):
        options = combined(fixed(scale=scale), CAUSAL[causal])
        yield self_attention(f"scale-{name}-{causal}", rows=30, keys=40, dim=8, options=options, about=("scale",))
    for scale, dtype in itertools.product((0.0, -1.0, 10.0), DTYPES):
        yield self_attention(
            f"scale-{scale}-{dtype}",
            heads=1,
            rows=65,
            keys=203,
            dtype=dtype,
            options=fixed(scale=scale),
            about=("scale",),
        )
    for dtype in DTYPES:
        shape = {"heads": 1, "rows": 20, "keys": 300, "dtype": dtype}
        yield self_attention(f"large-logits-{dtype}", **shape, special=times(8, 4), about=("large logits",))
        yield self_attention(f"growing-logits-{dtype}", **shape, special=growing_scores, about=("large logits",))
        yield self_attention(f"large-values-{dtype}", **shape, special=times(1, 1, 1e4), about=("large values",))
        yield self_attention(f"small-values-{dtype}", **shape, special=times(1, 1, 1e-4), about=("small values",))
    yield self_attention(
        "rows-of-many-sizes",
        rows=40,
        keys=50,
        special=growing_values,
        options=CAUSAL["causal"],
        about=("small values",),
    )


# ---- memory: the same numbers (or, for stride 0, numbers of the same shape) elsewhere


def every_second_column(x):
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def padded_rows(x):
    """Rows that stand an odd number of bytes apart: strides that aren't a multiple of the item size."""
    padded = np.zeros(x.shape[:-1], np.dtype([("row", x.dtype, x.shape[-1:]), ("padding", np.uint8)]))["row"]
    padded[...] = x
    return padded


def off_by_one_byte(x):
    moved = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def flipped(*axes):
    return lambda x: np.flip(np.flip(x, axes).copy(), axes)


def stored_as(*order):
    """Stored with its axes in another order."""
    return lambda x: np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def repeated(*axes):
    """One slice along `axes`, repeated by a stride of 0."""
    return lambda x: np.broadcast_to(x[tuple(slice(1) if axis in axes else slice(None) for axis in range(4))], x.shape)


def big_endian(x):
    # ml_dtypes' formats have no other byte order.
    return x if x.dtype == BFLOAT16 else x.astype(x.dtype.newbyteorder(">"))


VIEWS = {
    "every-second-column": every_second_column,
    "padded-rows": padded_rows,
    "off-by-one-byte": off_by_one_byte,
    "read-only": read_only,
    "flipped-batch": flipped(0),
    "flipped-heads": flipped(1),
    "flipped-rows": flipped(2),
    "flipped-columns": flipped(3),
    "flipped": flipped(0, 1, 2, 3),
    "fortran": np.asfortranarray,
    "columns-first": stored_as(0, 1, 3, 2),
    "rows-first": stored_as(2, 0, 1, 3),
    "repeated-batch": repeated(0),
    "repeated-head": repeated(1),
    "repeated-row": repeated(2),
    "repeated-column": repeated(3),
    "repeated": repeated(0, 1, 2, 3),
    "big-endian": big_endian,
}


def memory_cases():
    for (name, view), dtype in itertools.product(VIEWS.items(), DTYPES):
        yield self_attention(
            f"{name}-{dtype}", batch=2, heads=4, kv_heads=2, rows=29, keys=37, dim=8, dtype=dtype, view=view,
            options=CAUSAL["causal"], about=("memory", name),
        )  # fmt: skip
        # Equal keys and values give equal rounding errors, which add up instead of averaging out as the bands expect:
        # only a short sum of those.
        keys = 30 if name in ("repeated-row", "repeated") else 300
        yield self_attention(
            f"{name}-long-{dtype}", heads=1, rows=70, keys=keys, dim=40, dtype=dtype, view=view, about=("memory", name)
        )


MEMORY_CASES = list(memory_cases())
CASES = [
    *length_cases(),
    *benchmark_cases(),
    *dim_cases(),
    *head_cases(),
    *mask_cases(),
    *non_finite_cases(),
    *scale_cases(),
    *MEMORY_CASES,
]


# ---- score rules: `attention`'s further keywords, each pair of them at least once


def alibi_slopes(heads):
    return 2.0 ** -np.linspace(1, 8, heads)


def full_bias(rng, case):
    return {"bias": rng.standard_normal(case.scores_shape).astype(np.float32)}


def half_mask(rng, case):
    return {"mask": rng.random(case.scores_shape[-2:]) < 0.6}


def of_keys(name, values):
    """A bias or a mask of the keys alone, one for each batch element: (B, 1, 1, S_kv)."""
    return lambda rng, case: {name: values(rng, (case.q[0], 1, 1, case.k[-2]))}


def bias_with_masks(rng, case):
    """Float biases in which -inf hides a key, every key of a row for some rows."""
    bias = rng.standard_normal(case.scores_shape[-2:]).astype(np.float32)
    bias[rng.random(bias.shape) < 0.4] = -INF
    bias[3:4] = -INF
    return {"bias": bias}


def lengths_of(axis, name):
    return lambda rng, case: {name: rng.integers(0, case.scores_shape[axis] + 1, case.q[0])}


# What a later rule gives replaces an earlier one's under the same name.
RULES: dict[str, Callable[[np.random.Generator, Case], dict[str, Any]]] = {
    "causal": fixed(causal=True),
    "top-left": fixed(causal="top-left"),
    "window": fixed(window=(9, 4)),
    "window-left": fixed(window=(7, None)),
    "window-right": fixed(window=(-1, 3)),
    "scale": fixed(scale=-0.7),
    "softcap": fixed(softcap=1.5),
    "alibi": lambda rng, case: {"alibi_slopes": alibi_slopes(case.heads)},
    "alibi-batch": lambda rng, case: {"alibi_slopes": rng.uniform(0, 0.5, (case.q[0], case.heads))},
    "bias": full_bias,
    "bias-keys-float16": of_keys("bias", lambda rng, shape: rng.standard_normal(shape).astype(np.float16)),
    "bias-with-masks": bias_with_masks,
    "mask": half_mask,
    "mask-keys": of_keys("mask", lambda rng, shape: rng.random(shape) < 0.6),
    "sinks": lambda rng, case: {"sinks": rng.standard_normal(case.heads).astype(np.float32)},
    "q-lengths": lengths_of(-2, "q_lengths"),
    "kv-lengths": lengths_of(-1, "kv_lengths"),
    "q-offset": lambda rng, case: {"q_offset": rng.integers(0, 30, case.q[0])},
    "dropout": fixed(dropout=0.3, seed=2**40 + 7),
    "float8": lambda rng, case: {"k_scale": 0.5, "v_scale": rng.uniform(0.5, 2, case.k[-3])},
}


def rule_case(name, *rules, **rest):
    options = combined(*(RULES[rule] for rule in rules))
    if "float8" in rules:
        rest["kv_dtype"] = FLOAT8[zlib.crc32(name.encode()) % 2]
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "rows": 37, "keys": 53, "dim": 16}
    return self_attention(name, **(shape | rest), options=options, about=rules)


def pair_cases():
    """Every rule alone, every pair; the dtype changes from one to the next, so that each rule meets every dtype.

    All of it for many query rows and for few, and each rule for few with more keys than one thread takes.
    """
    alone, pairs = [*itertools.combinations(RULES, 1)], [*itertools.combinations(RULES, 2)]
    sizes = {"": {}, "-few": {"rows": 5}, "-few-long": {"rows": 3, "keys": 2100}}
    for size, shape in sizes.items():
        for number, rules in enumerate(alone if size == "-few-long" else alone + pairs):
            dtype = (FLOAT32, FLOAT64, FLOAT16, FLOAT32, BFLOAT16)[number % 5]
            if "float8" in rules and dtype == FLOAT64:
                dtype = FLOAT32
            yield rule_case("+".join(rules) + f"-{dtype}{size}", *rules, dtype=dtype, **shape)


# ---- faults of other libraries, by name


def lowest_rows(dtype):
    """Rows of the lowest finite number: a mean of V, not an empty row."""

    def build(rng, case):
        bias = rng.standard_normal(case.scores_shape[-2:]).astype(dtype)
        bias[2:9] = np.finfo(dtype).min
        bias[4, ::2] = -INF
        return {"bias": bias}

    return build


def padding_as(name, dtype):
    """What Hugging Face passes: (B, 1, 1, S_kv), 0 where a key counts and the lowest number where it is padding."""

    def build(rng, case):
        kept = np.arange(case.k[-2]) < np.array([[case.k[-2] - 20], [5]])
        return {name: np.where(kept, 0.0, float(np.finfo(dtype).min)).astype(dtype)[:, None, None]}

    return build


def hidden_first_keys_by_bias(rng, case):
    mask = hidden_first_keys(rng, case)["mask"]
    return {"bias": np.where(mask, rng.standard_normal(mask.shape), -INF).astype(np.float32)}


def nan_bias_under_mask(rng, case):
    return {"bias": np.full((1, case.k[-2]), NAN), "mask": np.zeros(case.scores_shape[-2:], bool)}


def nan_bias_in_a_row(rng, case):
    rows, keys = case.scores_shape[-2:]
    return {"bias": np.where(np.arange(rows)[:, None] == 5, NAN, np.zeros((rows, keys)))}


def key_hidden_by_bias(rng, case):
    return {"bias": np.where(np.arange(case.k[-2]) == 50, -INF, 0.0)}


BIAS_SHAPES = [
    (2, 4, 37, 53), (1, 4, 37, 53), (2, 1, 37, 53), (2, 1, 1, 53), (2, 4, 37, 1), (4, 37, 53), (4, 1, 53), (37, 53),
    (37, 1), (53,), (),
]  # fmt: skip


def fault_cases():
    for dtype in DTYPES:
        low = np.float32 if dtype == BFLOAT16 else dtype
        yield replace(rule_case(f"rows-of-finfo-min-{dtype}", dtype=dtype), options=lowest_rows(low))
        for name in ("bias", "mask"):
            case = rule_case(f"padding-by-finfo-min-in-{name}-{dtype}", dtype=dtype)
            yield replace(case, options=padding_as(name, low))
    for shape in BIAS_SHAPES:
        name = "x".join(map(str, shape)) or "scalar"
        bias = lambda rng, case, shape=shape: {"bias": rng.standard_normal(shape)}  # noqa: E731
        yield replace(rule_case(f"bias-{name}", "bias"), options=bias)
    for rows, keys in ((20, 50), (50, 20)):
        sizes = {"rows": rows, "keys": keys}
        for causal in ("causal", "top-left"):
            yield rule_case(f"alibi-{causal}-{rows}x{keys}", causal, "alibi", **sizes)
            yield rule_case(f"window-{causal}-{rows}x{keys}", causal, "window", **sizes)
        yield rule_case(f"alibi-{rows}x{keys}", "alibi", **sizes)
        yield rule_case(f"window-{rows}x{keys}", "window", **sizes)
    long = {"rows": 20, "keys": 300}
    yield replace(rule_case("first-keys-hidden-by-bias", **long), options=hidden_first_keys_by_bias)
    right_padded = combined(fixed(causal=True), lambda rng, case: {"q_lengths": [7, 30], "kv_lengths": [7, 30]})
    yield replace(rule_case("right-padded-causal", rows=30, keys=30), options=right_padded)
    late = fixed(window=(3, 0), causal=True, q_offset=280)
    yield replace(rule_case("window-beyond-the-first-blocks", **long), options=late)
    yield replace(rule_case("window-seen-by-no-row", rows=20, keys=30), options=fixed(window=(2, 0), q_offset=100))
    before = fixed(causal=True, q_offset=[-25, -10])
    yield replace(rule_case("rows-before-the-first-key", rows=20, keys=30), options=before)
    yield replace(rule_case("bias-nan-under-mask"), options=nan_bias_under_mask)
    yield replace(rule_case("bias-nan-in-a-row"), options=nan_bias_in_a_row)
    hidden = put_all(put(1, NAN, 50), put(2, NAN, 50))
    yield replace(rule_case("nan-hidden-by-bias", special=hidden), options=key_hidden_by_bias)
    for name in ("softcap", "alibi", "window", "kv-lengths", "sinks", "dropout", "mask", "bias-with-masks"):
        yield rule_case(f"nan-seen-with-{name}", name, special=put_all(put(1, NAN, 20), put(2, NAN, 30, 3)))
        yield rule_case(f"infinities-with-{name}", name, special=put_all(put(1, INF, 20, 0), put(2, -INF, 30, 3)))
    yield rule_case("nan-beyond-kv-lengths", "kv-lengths", special=put_all(put(1, NAN, -1), put(2, NAN, -1)))
    yield rule_case("nan-outside-window", "window", "causal", special=put(2, NAN, 10, 3))
    zero_times_infinity = put_all(put(0, 0, slice(5)), put(1, INF, slice(20, 25), 3), put(2, INF, 40))
    yield replace(rule_case("zero-times-infinity", special=zero_times_infinity), options=fixed(causal=True))
    yield replace(rule_case("scale-0-times-infinity", special=zero_times_infinity), options=fixed(scale=0.0))
    yield replace(rule_case("softcap-of-large-logits", special=times(100)), options=fixed(softcap=30.0, causal=True))
    yield replace(rule_case("one-row-of-all-rules", rows=1, keys=300), options=combined(
        fixed(causal=True, window=(200, 0), softcap=5.0), RULES["alibi"], RULES["sinks"], lengths_of(-1, "kv_lengths")
    ))  # fmt: skip


RULE_CASES = [*pair_cases(), *fault_cases()]
