"""Arithmetic, comparison and selection: add, mul, fma, div, min, setp, selp, ex2 and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import floats
from .errors import Unsupported
from .parser import Instruction
from .registers import Array, Mask, dtype_of

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step

ROUNDINGS = ("rn", "rz", "rm", "rp")


def allow(instruction: Instruction, *modifiers: str) -> None:
    """Refuse an instruction with a modifier that isn't one of these; the last part is the type."""
    unknown = set(instruction.opcode[1:-1]) - set(modifiers)
    if unknown:
        raise Unsupported(f"modifier .{min(unknown)} of {instruction.opcode[0]}")


def elementwise(
    instruction: Instruction,
    machine: Machine,
    function: Callable[..., Array],
    kinds: str | list[str] | None = None,
    result: str | None = None,
) -> Step:
    """The step that puts `function` of the operands behind the first into the first. `kinds`: types of the operands."""
    kind = instruction.opcode[-1]
    names = instruction.operands[1:]
    kinds = [kinds or kind] * len(names) if isinstance(kinds, str) or kinds is None else kinds
    sources = [machine.registers.source(name, one) for name, one in zip(names, kinds, strict=True)]
    target = machine.registers.target(instruction.operands[0], result or kind)
    if isinstance(function, np.ufunc):

        def in_place(mask: Mask) -> None:
            function(*sources, out=target, where=mask, casting="unsafe")

        return in_place

    def step(mask: Mask) -> None:
        np.copyto(target, function(*sources), where=mask, casting="unsafe")

    return step


def with_float_modifiers(instruction: Instruction, function: Callable[..., Array]) -> Callable[..., Array]:
    """.ftz and .sat around a function of floats."""
    flushes = "ftz" in instruction.opcode and instruction.opcode[-1] == "f32"
    saturates = "sat" in instruction.opcode
    if not flushes and not saturates:
        return function

    def modified(*operands: Array) -> Array:
        result = function(*map(floats.flush, operands)) if flushes else function(*operands)
        result = floats.saturate(result) if saturates else result
        return floats.flush(result) if flushes else result

    return modified


def rounding_of(instruction: Instruction) -> str:
    return next((part for part in instruction.opcode if part in ROUNDINGS), "rn")


def is_float(kind: str) -> bool:
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        raise Unsupported(f"arithmetic in .{kind}: kernels compute in float32")
    return kind in ("f32", "f64")


# ---- the four operations


def add_or_subtract(instruction: Instruction, machine: Machine) -> Step:
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    subtracts = name == "sub"
    if not is_float(kind):
        allow(instruction)
        return elementwise(instruction, machine, np.subtract if subtracts else np.add)
    allow(instruction, *ROUNDINGS, "ftz", "sat")
    mode = rounding_of(instruction)
    if mode == "rn" and len(instruction.opcode) <= 2 + ("rn" in instruction.opcode):
        return elementwise(instruction, machine, np.subtract if subtracts else np.add)
    if kind == "f64" and mode != "rn":
        raise Unsupported(f"rounding .{mode} of f64")

    def function(a: Array, b: Array) -> Array:
        b = -b if subtracts else b
        return a + b if kind == "f64" else floats.add32(a, b, mode)

    return elementwise(instruction, machine, with_float_modifiers(instruction, function))


WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a product of integers."""
    size, signed = a.dtype.itemsize, a.dtype.kind == "i"
    if size < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * size}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(8 * size)).astype(a.dtype)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    middle = (x & low) * (y & low) >> half
    cross = (x >> half) * (y & low) + middle
    other = (x & low) * (y >> half) + (cross & low)
    high = (x >> half) * (y >> half) + (cross >> half) + (other >> half)
    if signed:  # of two's complements, less what their signs added
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.astype(a.dtype)


def multiply(instruction: Instruction, machine: Machine) -> Step:
    kind = instruction.opcode[-1]
    if is_float(kind):
        allow(instruction, *ROUNDINGS, "ftz", "sat")
        mode = rounding_of(instruction)
        if kind == "f64" and mode != "rn":
            raise Unsupported(f"rounding .{mode} of f64")

        def function(a: Array, b: Array) -> Array:
            return a * b if kind == "f64" else floats.multiply32(a, b, mode)

        return elementwise(instruction, machine, with_float_modifiers(instruction, function))
    allow(instruction, "lo", "hi", "wide")
    if "wide" in instruction.opcode:
        wide = dtype_of(WIDER[kind])
        return elementwise(instruction, machine, lambda a, b: a.astype(wide) * b.astype(wide), result=WIDER[kind])
    return elementwise(instruction, machine, multiply_high if "hi" in instruction.opcode else np.multiply)


def multiply_add(instruction: Instruction, machine: Machine) -> Step:
    kind = instruction.opcode[-1]
    if is_float(kind):
        allow(instruction, *ROUNDINGS, "ftz", "sat")
        mode = rounding_of(instruction)
        if kind == "f64" and mode != "rn":
            raise Unsupported(f"rounding .{mode} of f64")
        flushed = "ftz" in instruction.opcode
        fused = floats.fma64 if kind == "f64" else lambda a, b, c: floats.fma32(a, b, c, mode, flushed)
        return elementwise(instruction, machine, with_float_modifiers(instruction, fused))
    allow(instruction, "lo", "hi", "wide")
    if "wide" in instruction.opcode:
        wide = dtype_of(WIDER[kind])
        function = lambda a, b, c: a.astype(wide) * b.astype(wide) + c  # noqa: E731
        return elementwise(instruction, machine, function, kinds=[kind, kind, WIDER[kind]], result=WIDER[kind])
    high = "hi" in instruction.opcode
    return elementwise(instruction, machine, lambda a, b, c: (multiply_high(a, b) if high else a * b) + c)


def truncated_division(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient towards zero and remainder; of a division by zero, what the device happens to give: all bits, and a."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    x, y = (np.where(n < 0, -n, n).astype(unsigned) for n in (a, b))
    quotient = x // np.maximum(y, unsigned.type(1))
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) != (b < 0), -quotient, quotient)
    quotient = np.where(b == 0, ~unsigned.type(0), quotient).astype(a.dtype)
    return quotient, (a - quotient * b).astype(a.dtype)


def divide(instruction: Instruction, machine: Machine) -> Step:
    kind = instruction.opcode[-1]
    if is_float(kind):
        allow(instruction, "rn", "approx", "full", "ftz")
        function = floats.approximate_divide if "approx" in instruction.opcode else np.divide
        return elementwise(instruction, machine, with_float_modifiers(instruction, function))
    allow(instruction)
    which = ("div", "rem").index(instruction.opcode[0])
    return elementwise(instruction, machine, lambda a, b: truncated_division(a, b)[which])


def smaller_or_larger(instruction: Instruction, machine: Machine) -> Step:
    larger = instruction.opcode[0] == "max"
    if not is_float(instruction.opcode[-1]):
        allow(instruction)
        return elementwise(instruction, machine, np.maximum if larger else np.minimum)
    allow(instruction, "ftz", "NaN")
    if "NaN" in instruction.opcode:
        function: Callable[..., Array] = np.maximum if larger else np.minimum
    else:  # a NaN loses
        function = np.fmax if larger else np.fmin
    if len(instruction.operands) == 4:
        two = function
        function = lambda a, b, c: two(two(a, b), c)  # noqa: E731
    return elementwise(instruction, machine, with_float_modifiers(instruction, function))


def negate_or_absolute(instruction: Instruction, machine: Machine) -> Step:
    is_float(instruction.opcode[-1])
    allow(instruction, "ftz")
    function = {"neg": np.negative, "abs": np.abs}[instruction.opcode[0]]
    return elementwise(instruction, machine, with_float_modifiers(instruction, function))


def copy_sign(instruction: Instruction, machine: Machine) -> Step:
    allow(instruction)
    return elementwise(instruction, machine, lambda sign, size: np.copysign(size, sign))


def function_of_one(instruction: Instruction, machine: Machine) -> Step:
    """ex2, lg2, rcp, sqrt, rsqrt, tanh, sin, cos."""
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    is_float(kind)
    allow(instruction, "approx", "rn", "ftz")
    function = floats.FUNCTIONS[name]
    if kind == "f64":
        if name not in ("rcp", "sqrt", "rsqrt"):
            raise Unsupported(f"{name} of f64")
        if "approx" in instruction.opcode:
            exact = function
            function = lambda x: floats.upper_half(exact(x))  # noqa: E731
    return elementwise(instruction, machine, with_float_modifiers(instruction, function))


# ---- comparison and selection

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
CONNECTIVES = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """With floats, a comparison fails if one of them is NaN, or holds if its name ends in u."""
    if not is_float(kind):
        return COMPARISONS[name]
    if name in ("num", "nan"):
        ordered = name == "num"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) != ordered
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in COMPARISONS and name not in ("lo", "ls", "hi", "hs"):
        return COMPARISONS[name]
    plain = COMPARISONS[name.removesuffix("u")]
    return lambda a, b: plain(a, b) | np.isnan(a) | np.isnan(b)


def set_predicate(instruction: Instruction, machine: Machine) -> Step:
    """setp.lt.and.s32 %p1|%p2, a, b, %p3: the second is set as if the comparison had come out the other way."""
    kind = instruction.opcode[-1]
    name, *rest = [part for part in instruction.opcode[1:-1] if part != "ftz"]
    flushes = "ftz" in instruction.opcode and kind == "f32"
    registers = machine.registers
    a, b = (registers.source(token, kind) for token in instruction.operands[1:3])
    targets = [registers.target(token, "pred") for token in instruction.operands[0].split("|")]
    compare = comparison(name, kind)
    connective = CONNECTIVES[rest[0]] if rest else None
    third = registers.predicate(instruction.operands[3]) if connective else None
    if not rest and not flushes and len(targets) == 1 and isinstance(compare, np.ufunc):
        return lambda mask: compare(a, b, out=targets[0], where=mask)

    def step(mask: Mask) -> None:
        holds = compare(floats.flush(a), floats.flush(b)) if flushes else compare(a, b)
        both = [holds, ~holds][: len(targets)]
        if connective is not None and third is not None:
            both = [connective(one, third()) for one in both]
        for target, value in zip(targets, both, strict=True):
            np.copyto(target, value, where=mask)

    return step


def set_value(instruction: Instruction, machine: Machine) -> Step:
    """set.lt.u32.f32 d, a, b: all bits, or 1.0, where the comparison holds."""
    name, result, kind = instruction.opcode[1], instruction.opcode[-2], instruction.opcode[-1]
    if instruction.opcode[2:-2] not in ((), ("ftz",)):
        raise Unsupported(".".join(instruction.opcode))
    compare = comparison(name, kind)
    a, b = (machine.registers.source(token, kind) for token in instruction.operands[1:3])
    target = machine.registers.target(instruction.operands[0], result)
    yes = np.float32(1) if result == "f32" else ~np.uint32(0).astype(dtype_of(result))
    flushes = "ftz" in instruction.opcode

    def step(mask: Mask) -> None:
        holds = compare(floats.flush(a), floats.flush(b)) if flushes else compare(a, b)
        np.copyto(target, np.where(holds, yes, target.dtype.type(0)), where=mask)

    return step


def choose(a: Array, b: Array, first: Array) -> Array:
    return np.where(first, a, b)


def select(instruction: Instruction, machine: Machine) -> Step:
    allow(instruction)
    kind = instruction.opcode[-1]
    return elementwise(instruction, machine, choose, kinds=[kind, kind, "pred"])


def float_property(instruction: Instruction, machine: Machine) -> Step:
    """testp.finite.f32 p, a and its kin."""
    kind, name = instruction.opcode[-1], instruction.opcode[1]
    tiny = np.finfo(dtype_of(kind)).smallest_normal
    functions: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda a: ~np.isnan(a),
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < tiny),
    }
    return elementwise(instruction, machine, functions[name], result="pred")


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(("add", "sub"), add_or_subtract),
    "mul": multiply,
    **dict.fromkeys(("mad", "fma"), multiply_add),
    **dict.fromkeys(("div", "rem"), divide),
    **dict.fromkeys(("min", "max"), smaller_or_larger),
    **dict.fromkeys(("neg", "abs"), negate_or_absolute),
    "copysign": copy_sign,
    **dict.fromkeys(floats.FUNCTIONS, function_of_one),
    "setp": set_predicate,
    "set": set_value,
    "selp": select,
    "testp": float_property,
}
