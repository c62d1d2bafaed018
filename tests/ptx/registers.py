"""Registers and operands: each register is an array with a value a lane, each operand a view of one or a constant.

An operand is looked up once, when an instruction is decoded; what is returned then always shows the current values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import Unsupported
from .parser import Kernel
from .races import WARP

Mask = Any  # which lanes take part: a boolean array, or True for all (what NumPy's `where=` takes)
Array = np.ndarray
POISON = 0xA5  # bytes of registers that nothing was written to

DTYPES: dict[str, np.dtype] = {
    **{f"{kind}{8 * size}": np.dtype(f"{code}{size}") for size in (1, 2, 4, 8) for kind, code in ("bu", "uu", "si")},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(np.bool_),
    # formats without arithmetic here: their bits
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "tf32": np.dtype(np.uint32),
}


def dtype_of(kind: str) -> np.dtype:
    if kind not in DTYPES:
        raise Unsupported(f"type .{kind}")
    return DTYPES[kind]


def bits_of(size: int) -> np.dtype:
    return np.dtype(f"u{size}")


class Registers:
    """The registers of `count` lanes, and everything else that an operand can name."""

    def __init__(self, kernel: Kernel, count: int) -> None:
        self.count = count
        self.arrays: dict[str, Array] = {}
        self.special: dict[str, Array] = {}  # %tid.x and the like, set by the machine
        self.symbols: dict[str, Array] = {}  # addresses of variables
        by_size: dict[int, list[str]] = {}
        for name, kind in kernel.registers.items():
            by_size.setdefault(dtype_of(kind).itemsize if kind != "pred" else 0, []).append(name)
        self.stores = []
        for size, names in by_size.items():
            store = np.zeros((len(names), count), bits_of(size) if size else np.bool_)
            self.stores.append(store)
            self.arrays |= dict(zip(names, store, strict=True))

    def reset(self) -> None:
        """Registers hold no zeros at the start, and predicates no common value."""
        for store in self.stores:
            if store.dtype == np.bool_:
                store[...] = np.arange(self.count) % 2
            else:
                store.view(np.uint8)[...] = POISON

    # ---- sources

    def source(self, token: str, kind: str) -> Array:
        """The operand's bits as `kind`: an array with a value a lane, or one of no dimension."""
        dtype = dtype_of(kind)
        array = self.arrays.get(token)
        if array is None:
            array = self.special.get(token)
        if array is None:
            array = self.symbols.get(token)
        if array is None:
            return immediate(token, dtype)
        if array.dtype == dtype:
            return array
        if np.bool_ in (array.dtype, dtype):
            raise Unsupported(f"{token} taken as .{kind}")
        if array.dtype.itemsize == dtype.itemsize:
            return array.view(dtype)
        if array.dtype.itemsize < dtype.itemsize:
            raise Unsupported(f"{token} is narrower than .{kind}")
        ratio = array.dtype.itemsize // dtype.itemsize
        return array.view(dtype)[::ratio] if array.ndim else array.reshape(1).view(dtype)[0:1].reshape(())

    def sources(self, token: str, kind: str) -> list[Array]:
        """Of an operand like {%r1, %r2}, or of a single one."""
        return [self.source(name, kind) for name in names_in(token)]

    def predicate(self, token: str) -> Callable[[], Array]:
        """A predicate's values, negated where it is written with an exclamation mark."""
        values = self.source(token.lstrip("!"), "pred")
        return (lambda: ~values) if token.startswith("!") else (lambda: values)

    # ---- targets

    def target(self, token: str, kind: str) -> Array:
        """The register as an array of `kind` to write into; it has to be as wide."""
        if token == "_":
            return np.empty(self.count, dtype_of(kind))
        array = self.arrays.get(token)
        if array is None:
            raise Unsupported(f"{token} is no register")
        dtype = dtype_of(kind)
        if array.dtype == dtype:
            return array
        if array.dtype.itemsize != dtype.itemsize or np.bool_ in (array.dtype, dtype):
            raise Unsupported(f"{token} taken as .{kind}")
        return array.view(dtype)

    def widened(self, token: str, kind: str) -> Array:
        """A register that may be wider than what is written to it, which is then extended: as ld and cvt do."""
        dtype = dtype_of(kind)
        array = self.arrays.get(token)
        if array is None or array.dtype == np.bool_ or array.dtype.itemsize <= dtype.itemsize:
            return self.target(token, kind)
        return array.view(f"{'i' if dtype.kind == 'i' else 'u'}{array.dtype.itemsize}")


def names_in(token: str) -> list[str]:
    return [name.strip() for name in token.strip("{} ").split(",")]


def immediate(token: str, dtype: np.dtype) -> Array:
    """A constant: an integer, or a float by its bits (0f3F800000, 0d3FF0000000000000)."""
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", token):
        value = np.array(int(match[1], 16), np.uint32)
        return value.view(dtype if dtype.itemsize == 4 else np.float32).astype(dtype)
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", token):
        value = np.array(int(match[1], 16), np.uint64)
        return value.view(dtype if dtype.itemsize == 8 else np.float64).astype(dtype)
    if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", token):
        raise Unsupported(f"operand {token}")
    number = int(token.rstrip("U"), 0)
    if dtype == np.bool_:
        return np.array(number != 0)
    bits = np.array(number % (1 << 8 * dtype.itemsize), bits_of(dtype.itemsize))
    return bits.view(dtype)


def special_registers(grid_block: tuple[int, int, int], count: int) -> dict[str, Array]:
    """The registers that depend on a thread's place in its block alone."""
    threads = int(np.prod(grid_block))
    thread = np.arange(count) % threads
    lane = (thread % WARP).astype(np.uint64)
    x, y, _ = grid_block
    ones = np.uint64(0xFFFFFFFF)
    values = {
        "%tid.x": thread % x,
        "%tid.y": thread // x % y,
        "%tid.z": thread // (x * y),
        "%laneid": lane,
        "%warpid": thread // WARP,
        "%lanemask_eq": np.uint64(1) << lane,
        "%lanemask_lt": (np.uint64(1) << lane) - np.uint64(1),
        "%lanemask_le": (np.uint64(2) << lane) - np.uint64(1),
        "%lanemask_gt": ones & ~((np.uint64(2) << lane) - np.uint64(1)),
        "%lanemask_ge": ones & ~((np.uint64(1) << lane) - np.uint64(1)),
    }
    values |= {f"%ntid.{axis}": np.asarray(n) for axis, n in zip("xyz", grid_block, strict=True)}
    values["WARP_SZ"] = np.asarray(WARP)
    values["%nwarpid"] = np.asarray(threads // WARP)
    return {name: value.astype(np.uint32) for name, value in values.items()}
