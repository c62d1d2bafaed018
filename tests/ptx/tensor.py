"""Tensor cores: ldmatrix, stmatrix and mma, with the fragments' layouts.

A fragment is a small matrix spread over a warp. With g = lane / 4 and t = lane % 4, and two 16-bit numbers a register
(h = 0 the lower half), the PTX ISA (9.7.14.5.8, m16n8k16) says:

    A (16 x 16): register r holds row g + 8 (r % 2), columns 2t + h + 8 (r / 2)
    B (16 x 8):  register r holds rows 2t + h + 8 r of column g
    C (16 x 8):  register r holds row g + 8 (r / 2), column 2t + r % 2, in float32

Below, that is one transposition each of an array (registers, warps, g, t, h). `tests/test_ptx_interpreter.py` checks
it against the tables, element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import floats
from .errors import Unsupported
from .load_store import address_of
from .parser import Instruction
from .races import WARP
from .registers import Array, Mask, names_in

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step

HALF = np.dtype(np.uint16)
WORD = np.dtype(np.uint32)


def a_matrices(registers: Array) -> Array:
    """(warps, 16, 8 n) from (2 n, lanes) registers of two 16-bit numbers: m16n8k8 has two, m16n8k16 four."""
    count, lanes = registers.shape
    # column block, row block, warp, g, t, h
    spread = registers.view(HALF).reshape(count // 2, 2, lanes // WARP, 8, 4, 2)
    return spread.transpose(2, 1, 3, 0, 4, 5).reshape(lanes // WARP, 16, 4 * count)


def b_matrices(registers: Array) -> Array:
    """(warps, 8 n, 8) from (n, lanes) registers."""
    count, lanes = registers.shape
    spread = registers.view(HALF).reshape(count, lanes // WARP, 8, 4, 2)  # row block, warp, g, t, h
    return spread.transpose(1, 0, 3, 4, 2).reshape(lanes // WARP, 8 * count, 8)


def c_matrices(registers: Array) -> Array:
    """(warps, 16, 8) float32 from (4, lanes)."""
    lanes = registers.shape[1]
    spread = registers.reshape(2, 2, lanes // WARP, 8, 4)  # row block, column of the pair, warp, g, t
    return spread.transpose(2, 0, 3, 4, 1).reshape(lanes // WARP, 16, 8)


def c_registers(matrices: Array) -> Array:
    """(4, lanes) from (warps, 16, 8) float32: the inverse of `c_matrices`."""
    warps = len(matrices)
    return matrices.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, warps * WARP)


DECODE: dict[str, Callable[[Array], Array]] = {"f16": floats.from_float16, "bf16": floats.from_bfloat16}


def multiply(instruction: Instruction, machine: Machine) -> Step:
    """mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32 d, a, b, c, and m16n8k8: products of T, sums in float32."""
    shape, kind = instruction.opcode[3], instruction.opcode[-2]
    wanted = ("mma", "sync", "aligned", shape, "row", "col", "f32", kind, kind, "f32")
    if instruction.opcode != wanted or shape not in ("m16n8k16", "m16n8k8") or kind not in DECODE:
        raise Unsupported(".".join(instruction.opcode))
    registers, decode = machine.registers, DECODE[kind]
    targets = [registers.target(name, "f32") for name in names_in(instruction.operands[0])]
    a, b = (registers.sources(token, "b32") for token in instruction.operands[1:3])
    c = registers.sources(instruction.operands[3], "f32")
    steps = int(shape.split("k")[1]) // 8
    if (len(targets), len(a), len(b), len(c)) != (4, 2 * steps, steps, 4):
        raise Unsupported("an mma with another number of registers")

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        product = np.matmul(decode(a_matrices(together(a, machine))), decode(b_matrices(together(b, machine))))
        result = c_registers(product + c_matrices(together(c, machine)))
        for target, values in zip(targets, result, strict=True):
            np.copyto(target, values, where=mask)

    return step


def together(sources: list[Array], machine: Machine) -> Array:
    """Registers as rows of one array."""
    rows = np.empty((len(sources), machine.count), sources[0].dtype)
    for row, source in zip(rows, sources, strict=True):
        row[...] = source
    return rows


def load_matrices(instruction: Instruction, machine: Machine) -> Step:
    """ldmatrix.sync.aligned.m8n8.xN[.trans].shared.b16: lane 8 i + r gives the address of row r of matrix i."""
    count = matrix_count(instruction, "ldmatrix")
    transposed = "trans" in instruction.opcode
    targets = [machine.registers.target(name, "b32") for name in names_in(instruction.operands[0])]
    if len(targets) != count:
        raise Unsupported("an ldmatrix with another number of registers")
    addresses = address_of(instruction.operands[1], machine)
    gives_address = machine.all_lanes % WARP < 8 * count

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        lanes = machine.lanes(mask if count == 4 else mask & gives_address)
        rows = machine.shared.load(addresses()[lanes], HALF, 8, lanes).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        # row g, columns 2t and 2t + 1 to lane 4 g + t
        words = np.ascontiguousarray(rows.transpose(1, 0, 2, 3)).view(WORD).reshape(count, -1)
        for target, values in zip(targets, words, strict=True):
            target[slice(None) if mask is True else mask] = values

    return step


def matrix_count(instruction: Instruction, name: str) -> int:
    opcode = tuple(part.split("::")[0] for part in instruction.opcode if part != "trans")
    if opcode[:4] != (name, "sync", "aligned", "m8n8") or opcode[5:] != ("shared", "b16"):
        raise Unsupported(".".join(instruction.opcode))
    return int(opcode[4].removeprefix("x"))


def store_matrices(instruction: Instruction, machine: Machine) -> Step:
    """stmatrix: ldmatrix the other way round."""
    count = matrix_count(instruction, "stmatrix")
    transposed = "trans" in instruction.opcode
    addresses = address_of(instruction.operands[0], machine)
    sources = machine.registers.sources(instruction.operands[1], "b32")
    gives_address = machine.all_lanes % WARP < 8 * count

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        lanes = machine.lanes(mask & gives_address)
        words = together(sources, machine)
        if mask is not True:
            words = np.ascontiguousarray(words[:, mask])
        rows = words.view(HALF).reshape(count, -1, 8, 8).transpose(1, 0, 2, 3)
        if transposed:
            rows = rows.swapaxes(2, 3)
        machine.shared.store(addresses()[lanes], np.ascontiguousarray(rows).reshape(-1, 8), lanes)

    return step


BUILDERS: dict[str, Builder] = {"mma": multiply, "ldmatrix": load_matrices, "stmatrix": store_matrices}
