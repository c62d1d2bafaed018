"""Moves and operations on bits: mov, and, shl, shf, bfe, bfi, prmt, lop3, popc, clz and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import allow, elementwise
from .errors import Unsupported
from .parser import Instruction
from .registers import Array, Mask, bits_of, dtype_of, names_in

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step


def move(instruction: Instruction, machine: Machine) -> Step:
    """mov.b32 d, a; with {a, b} for one of them it joins narrower registers into one, or parts one."""
    allow(instruction)
    kind = instruction.opcode[-1]
    target, source = instruction.operands
    registers = machine.registers
    if source.startswith("{"):
        parts = names_in(source)
        size = dtype_of(kind).itemsize // len(parts)
        pieces = [registers.source(name, f"b{8 * size}") for name in parts]
        joined = registers.target(target, kind).view(bits_of(size)).reshape(machine.count, len(parts))

        def join(mask: Mask) -> None:
            together = [np.array(piece) for piece in pieces]  # the target may be among them
            for column, piece in enumerate(together):
                np.copyto(joined[:, column], piece, where=mask)

        return join
    if target.startswith("{"):
        parts = names_in(target)
        size = dtype_of(kind).itemsize // len(parts)
        whole = registers.source(source, kind)
        targets = [registers.target(name, f"b{8 * size}") for name in parts]

        def part(mask: Mask) -> None:
            columns = np.array(whole).reshape(-1, 1).view(bits_of(size))
            for column, one in enumerate(targets):
                np.copyto(one, columns[:, column], where=mask)

        return part
    # an address fits a register of 32 bits, too
    value, into = registers.source(source, kind), registers.target(target, kind)
    return lambda mask: np.copyto(into, value, where=mask)


def logic(instruction: Instruction, machine: Machine) -> Step:
    allow(instruction)
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
    if any(name.startswith("!") for name in instruction.operands):
        raise Unsupported("a negated operand")
    return elementwise(instruction, machine, functions[instruction.opcode[0]])


def shift(instruction: Instruction, machine: Machine) -> Step:
    """Amounts beyond the width shift everything out."""
    allow(instruction)
    kind = instruction.opcode[-1]
    dtype = dtype_of(kind)
    width = 8 * dtype.itemsize
    left = instruction.opcode[0] == "shl"

    def function(a: Array, amount: Array) -> Array:
        inside = np.minimum(amount, width - 1).astype(dtype)
        if not left and dtype.kind == "i":
            return a >> inside
        shifted = a << inside if left else a >> inside
        return np.where(amount < width, shifted, dtype.type(0))

    return elementwise(instruction, machine, function, kinds=[kind, "u32"])


def funnel_shift(instruction: Instruction, machine: Machine) -> Step:
    """shf.l: the upper word of {b, a} shifted left; shf.r: the lower word of it shifted right."""
    allow(instruction, "l", "r", "wrap", "clamp")
    wraps, left = "wrap" in instruction.opcode, "l" in instruction.opcode
    half = np.uint64(32)

    def function(a: Array, b: Array, amount: Array) -> Array:
        n = (amount & np.uint32(31) if wraps else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        both = b.astype(np.uint64) << half | a.astype(np.uint64)
        return ((both << n) >> half if left else both >> n).astype(np.uint32)

    return elementwise(instruction, machine, function)


def extract_field(instruction: Instruction, machine: Machine) -> Step:
    """bfe d, a, position, length: zero- or sign-extended."""
    allow(instruction)
    kind = instruction.opcode[-1]
    dtype = dtype_of(kind)
    width = 8 * dtype.itemsize

    def function(a: Array, position: Array, length: Array) -> Array:
        position, length = (
            np.minimum(n & np.uint32(255), np.uint32(width)).astype(np.int64) for n in (position, length)
        )
        wide = a.astype(np.int64) if dtype.kind == "i" else a
        start = np.minimum(position, width - 1)
        value = wide >> start.astype(wide.dtype)
        value = np.where(position < width, value, wide >> wide.dtype.type(width - 1) if dtype.kind == "i" else 0)
        value = value.astype(wide.dtype)
        kept = np.minimum(length, width)
        if dtype.kind == "i":  # the field's own sign, or the number's where the field reaches beyond it
            kept = np.where(position + kept > width, np.maximum(width - start, 1), kept)
            up = (64 - np.maximum(kept, 1)).astype(np.int64)
            value = (value << up) >> up
        else:
            down = np.minimum(kept, width - 1).astype(dtype)
            value = np.where(kept < width, value & ((dtype.type(1) << down) - dtype.type(1)), value)
        return np.where(length == 0, 0, value).astype(dtype)

    return elementwise(instruction, machine, function, kinds=[kind, "u32", "u32"])


def insert_field(instruction: Instruction, machine: Machine) -> Step:
    """bfi d, a, b, position, length: the lowest bits of a into b."""
    allow(instruction)
    kind = instruction.opcode[-1]
    dtype = dtype_of(kind)
    width = 8 * dtype.itemsize

    def function(a: Array, b: Array, position: Array, length: Array) -> Array:
        position, length = (np.minimum(n & np.uint32(255), np.uint32(width)) for n in (position, length))
        one, everything = dtype.type(1), ~dtype.type(0)
        short = np.minimum(length, width - 1).astype(dtype)
        field = np.where(length < width, (one << short) - one, everything)
        at = np.minimum(position, width - 1).astype(dtype)
        mask = np.where(position < width, field << at, dtype.type(0))
        return (b & ~mask) | ((a << at) & mask)

    return elementwise(instruction, machine, function, kinds=[kind, kind, "u32", "u32"])


def permute_bytes(instruction: Instruction, machine: Machine) -> Step:
    """prmt.b32 d, a, b, selector: each nibble picks a byte of {b, a}, its upper bit the byte's sign instead."""
    allow(instruction)

    def function(a: Array, b: Array, selector: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
        for i in range(4):
            nibble = selector >> np.uint32(4 * i) & np.uint32(15)
            place = (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = (both >> place & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return result

    return elementwise(instruction, machine, function)


def logic_of_three(instruction: Instruction, machine: Machine) -> Step:
    """lop3.b32 d, a, b, c, table: bit 4a + 2b + c of the table, for each bit."""
    allow(instruction)
    table = int(instruction.operands[4], 0)
    inner = Instruction(
        instruction.line, instruction.text, instruction.opcode, instruction.operands[:4], instruction.guard
    )

    def function(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return elementwise(inner, machine, function)


def highest_bit(a: Array) -> Array:
    """Number of the highest bit that is 1, or -1."""
    found = np.full(a.shape, -1, np.int32)
    rest, at = a.astype(np.uint64), np.zeros(a.shape, np.int32)
    for step in (32, 16, 8, 4, 2, 1):
        upper = rest >> np.uint64(step)
        at = np.where(upper != 0, at + step, at)
        rest = np.where(upper != 0, upper, rest)
    return np.where(a != 0, at, found)


def count_bits(instruction: Instruction, machine: Machine) -> Step:
    """popc and clz, to a register of 32 bits; brev."""
    allow(instruction)
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    width = 8 * dtype_of(kind).itemsize
    unsigned = f"u{width}"

    def reverse(a: Array) -> Array:
        octets = np.ascontiguousarray(np.atleast_1d(a)).view(np.uint8).reshape(-1, width // 8)
        turned = np.packbits(np.unpackbits(octets, axis=1)[:, ::-1], axis=1)
        return turned.view(bits_of(width // 8)).reshape(a.shape)

    if name == "brev":
        return elementwise(instruction, machine, reverse)
    if name == "popc":
        return elementwise(instruction, machine, np.bitwise_count, kinds=unsigned, result="u32")
    return elementwise(instruction, machine, lambda a: width - 1 - highest_bit(a), kinds=unsigned, result="u32")


def find_bit(instruction: Instruction, machine: Machine) -> Step:
    """bfind: the highest bit that differs from the sign; -1 where there is none."""
    allow(instruction, "shiftamt")
    kind = instruction.opcode[-1]
    width = 8 * dtype_of(kind).itemsize
    amount = "shiftamt" in instruction.opcode

    def function(a: Array) -> Array:
        magnitude = np.where(a < 0, ~a, a).astype(bits_of(width // 8))
        at = highest_bit(magnitude)
        return np.where((at >= 0) & amount, width - 1 - at, at)

    return elementwise(instruction, machine, function, result="s32")


BUILDERS: dict[str, Builder] = {
    "mov": move,
    **dict.fromkeys(("and", "or", "xor", "not"), logic),
    **dict.fromkeys(("shl", "shr"), shift),
    "shf": funnel_shift,
    "bfe": extract_field,
    "bfi": insert_field,
    "prmt": permute_bytes,
    "lop3": logic_of_three,
    **dict.fromkeys(("popc", "clz", "brev"), count_bits),
    "bfind": find_bit,
}
