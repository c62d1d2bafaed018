"""Conversions: cvt between all integer and float types, and cvta between address spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import floats
from .arithmetic import ROUNDINGS
from .errors import Unsupported
from .parser import Instruction
from .registers import Array, Mask, dtype_of

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOATS = ("f16", "bf16", "f32", "f64")
ENCODE: dict[str, Callable[[Array], Array]] = {"f16": floats.to_float16, "bf16": floats.to_bfloat16}
DECODE: dict[str, Callable[[Array], Array]] = {"f16": floats.from_float16, "bf16": floats.from_bfloat16}


def convert(instruction: Instruction, machine: Machine) -> Step:
    target_kind, kind = instruction.opcode[-2:]
    modifiers = set(instruction.opcode[1:-2])
    if unknown := modifiers - {*ROUNDINGS, *TO_INTEGER, "ftz", "sat", "rna", "relu", "satfinite"}:
        raise Unsupported(f"modifier .{min(unknown)} of cvt")
    if target_kind in ("f16x2", "bf16x2"):
        function = pair_of(target_kind, kind, modifiers)
    elif target_kind in FLOATS:
        function = to_float(target_kind, kind, modifiers)
    elif kind in FLOATS:
        function = to_integer(target_kind, kind, modifiers)
    else:
        function = between_integers(target_kind, kind, modifiers)
    registers = machine.registers
    sources = [registers.source(token, kind) for token in instruction.operands[1:]]
    target = registers.widened(instruction.operands[0], target_kind)
    return lambda mask: np.copyto(target, function(*sources), where=mask, casting="unsafe")


def pair_of(target: str, kind: str, modifiers: set[str]) -> Callable[..., Array]:
    """Two numbers into one register: the first operand becomes the upper half."""
    if kind in floats.FLOAT8 and target == "f16x2":
        table = floats.FLOAT8[kind].view(np.uint16).astype(np.uint32)
        return lambda codes: table[codes >> 8] << np.uint32(16) | table[codes & 255]
    if kind != "f32" or modifiers - {"rn", "ftz", "relu"}:
        raise Unsupported(f"cvt {'.'.join(sorted(modifiers))} to {target} from {kind}")
    encode = ENCODE[target.removesuffix("x2")]
    relu = "relu" in modifiers

    def function(upper: Array, lower: Array) -> Array:
        if relu:
            upper, lower = (np.where(x < 0, np.float32(0), x) for x in (upper, lower))
        return encode(upper).astype(np.uint32) << np.uint32(16) | encode(lower).astype(np.uint32)

    return function


def to_float(target: str, kind: str, modifiers: set[str]) -> Callable[[Array], Array]:
    directed = next((m for m in modifiers if m in ("rz", "rm", "rp")), None)
    integral = next((TO_INTEGER[m] for m in modifiers if m in TO_INTEGER), None)
    saturates, flushes = "sat" in modifiers, "ftz" in modifiers
    if directed and (target != "f32" or kind != "f64") and kind in FLOATS:
        raise Unsupported(f"cvt.{directed} to {target} from {kind}")

    def function(x: Array) -> Array:
        if kind in DECODE:
            x = DECODE[kind](x)
        if flushes and kind == "f32":
            x = floats.flush(x)
        if integral is not None:
            x = integral(x)
        if saturates:
            x = floats.saturate(x)
        if target in ENCODE:
            return ENCODE[target](x.astype(np.float64) if kind == "f64" and target == "f16" else x.astype(np.float32))
        if directed and kind in FLOATS:
            x = floats.round_to_float32(x, directed)
        elif directed:
            x = directed_from_integer(x, dtype_of(target), directed)
        result = x.astype(dtype_of(target))
        return floats.flush(result) if flushes and target == "f32" else result

    return function


def directed_from_integer(x: Array, dtype: np.dtype, mode: str) -> Array:
    """An integer as a float that isn't beyond it, in the direction asked for."""
    nearest = x.astype(dtype)
    infinity = dtype.type(np.inf)
    # compared as integers: a float of this size is one
    whole = np.array([int(n) for n in np.atleast_1d(nearest)], object).reshape(x.shape)
    exact = np.array([int(n) for n in np.atleast_1d(x)], object).reshape(x.shape)
    high, low = (whole > exact).astype(bool), (whole < exact).astype(bool)
    if mode == "rz":
        high, low = high & (x > 0), low & (x < 0)
    down, up = np.nextafter(nearest, -infinity), np.nextafter(nearest, infinity)
    return np.where(high & (mode != "rp"), down, np.where(low & (mode != "rm"), up, nearest))


def to_integer(target: str, kind: str, modifiers: set[str]) -> Callable[[Array], Array]:
    rounding = next((m for m in modifiers if m in TO_INTEGER), None)
    if target == "tf32" or rounding is None:
        raise Unsupported(f"cvt to {target} from {kind} with {sorted(modifiers)}")
    decode, flushes = DECODE.get(kind), "ftz" in modifiers

    def function(x: Array) -> Array:
        x = decode(x) if decode else floats.flush(x) if flushes and kind == "f32" else x
        return floats.to_integer(x, dtype_of(target), rounding, kind == "f64")

    return function


def between_integers(target: str, kind: str, modifiers: set[str]) -> Callable[[Array], Array]:
    if modifiers - {"sat"}:
        raise Unsupported(f"cvt to {target} from {kind} with {sorted(modifiers)}")
    dtype = dtype_of(target)
    if "sat" not in modifiers:
        return lambda x: x.astype(dtype)
    limits, own = np.iinfo(dtype), np.iinfo(dtype_of(kind))
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return lambda x: np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(dtype)


def convert_address(instruction: Instruction, machine: Machine) -> Step:
    """cvta.shared: to a generic address; cvta.to.shared: back."""
    space = instruction.opcode[-2]
    if space not in ("shared", "local", "global", "const", "param"):
        raise Unsupported(f"address space {space}")
    if space == "param":
        raise Unsupported("the generic address of a parameter")
    window = np.uint64(machine.generic_window(space))
    source = machine.registers.source(instruction.operands[1], "u64")
    target = machine.registers.target(instruction.operands[0], "u64")
    function = np.subtract if "to" in instruction.opcode else np.add

    def step(mask: Mask) -> None:
        function(source, window, out=target, where=mask)

    return step


BUILDERS: dict[str, Builder] = {"cvt": convert, "cvta": convert_address}
