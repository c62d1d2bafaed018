"""Between the threads of a warp (shfl, vote, match, redux, activemask), and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import Divergence, Unsupported, first
from .parser import Instruction
from .races import WARP
from .registers import Array, Mask

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step

LANE_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
EVERY_LANE = np.uint32(0xFFFFFFFF)


def ballot(condition: Array) -> Array:
    """A word a warp, from (warps, 32) booleans."""
    return (condition * LANE_BITS).sum(axis=1, dtype=np.uint32)


def of_each_lane(per_warp: Array) -> Array:
    return np.repeat(per_warp, WARP)


def by_warp(values: Array, machine: Machine) -> Array:
    return np.broadcast_to(values, machine.count).reshape(-1, WARP)


def shuffle(instruction: Instruction, machine: Machine) -> Step:
    """shfl.sync.mode.b32 d|p, a, b, c, members (the PTX ISA, 9.7.9.6): c holds the limit and the segment mask."""
    mode = instruction.opcode[2]
    if instruction.opcode[1] != "sync" or mode not in ("up", "down", "bfly", "idx"):
        raise Unsupported(".".join(instruction.opcode))
    registers, operands = machine.registers, instruction.operands
    names = operands[0].split("|")
    target = registers.target(names[0], "b32")
    valid = registers.target(names[1], "pred") if len(names) > 1 else None
    value, distance, control, members = (registers.source(token, "u32") for token in operands[1:5])
    lane = (machine.all_lanes % WARP).astype(np.int64)
    first_of_warp = machine.all_lanes - lane

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, members)
        by, limit = distance.astype(np.int64) & 31, control.astype(np.int64) & 31
        segment = control.astype(np.int64) >> 8 & 31
        low, high = lane & segment, (lane & segment) | (limit & ~segment)
        other = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (by & ~segment)}[mode]
        inside = other >= high if mode == "up" else other <= high
        source = first_of_warp + np.where(inside, other, lane)
        if mask is not True and (absent := mask & ~mask[source]).any():
            at = first(absent)
            raise Divergence(f"reads from thread {int(source[at]) % machine.threads}, which isn't there", at)
        np.copyto(target, np.broadcast_to(value, machine.count)[source], where=mask)
        if valid is not None:
            np.copyto(valid, inside, where=mask)

    return step


def vote(instruction: Instruction, machine: Machine) -> Step:
    """vote.sync.all, any, uni (predicates) or ballot (a word)."""
    if instruction.opcode[1] != "sync":
        raise Unsupported(".".join(instruction.opcode))
    mode, kind = instruction.opcode[2:4]
    target = machine.registers.target(instruction.operands[0], kind)
    condition = machine.registers.predicate(instruction.operands[1])
    members = machine.registers.source(instruction.operands[2], "u32")

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, members)
        here, holds = by_warp(np.asarray(mask), machine), by_warp(condition(), machine)
        some, every = (holds & here).any(axis=1), (holds | ~here).all(axis=1)
        result = {"any": some, "all": every, "uni": every | ~some}.get(mode)
        np.copyto(target, of_each_lane(ballot(holds & here) if result is None else result), where=mask)

    return step


def active_mask(instruction: Instruction, machine: Machine) -> Step:
    target = machine.registers.target(instruction.operands[0], "b32")

    def step(mask: Mask) -> None:
        np.copyto(target, of_each_lane(ballot(by_warp(np.asarray(mask), machine))), where=mask)

    return step


def match(instruction: Instruction, machine: Machine) -> Step:
    """match.any.sync: which members hold the same value; match.all.sync: all of them, or none."""
    mode, kind = instruction.opcode[1], instruction.opcode[-1]
    names = instruction.operands[0].split("|")
    target = machine.registers.target(names[0], "b32")
    valid = machine.registers.target(names[1], "pred") if len(names) > 1 else None
    value = machine.registers.source(instruction.operands[1], kind)
    members = machine.registers.source(instruction.operands[2], "u32")

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, members)
        here, values = by_warp(np.asarray(mask), machine), by_warp(value, machine)
        alike = (values[:, :, None] == values[:, None, :]) & here[:, None, :]
        words = (alike * LANE_BITS).sum(axis=2, dtype=np.uint32).reshape(-1)
        if mode == "all":
            everyone = of_each_lane(ballot(here))
            agreed = words == everyone
            words = np.where(agreed, everyone, np.uint32(0))
            if valid is not None:
                np.copyto(valid, agreed, where=mask)
        np.copyto(target, words, where=mask)

    return step


REDUCTIONS: dict[str, tuple[np.ufunc, Callable[[np.dtype], int]]] = {
    "add": (np.add, lambda dtype: 0),
    "min": (np.minimum, lambda dtype: int(np.iinfo(dtype).max)),
    "max": (np.maximum, lambda dtype: int(np.iinfo(dtype).min)),
    "and": (np.bitwise_and, lambda dtype: int(np.iinfo(dtype).max)),
    "or": (np.bitwise_or, lambda dtype: 0),
    "xor": (np.bitwise_xor, lambda dtype: 0),
}


def reduce_warp(instruction: Instruction, machine: Machine) -> Step:
    """redux.sync of 32-bit integers."""
    operation, kind = instruction.opcode[2], instruction.opcode[-1]
    if kind not in ("u32", "s32", "b32"):
        raise Unsupported(".".join(instruction.opcode))
    target = machine.registers.target(instruction.operands[0], kind)
    value = machine.registers.source(instruction.operands[1], kind)
    members = machine.registers.source(instruction.operands[2], "u32")
    function, neutral = REDUCTIONS[operation]

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, members)
        here = by_warp(np.asarray(mask), machine)
        values = np.where(here, by_warp(value, machine), value.dtype.type(neutral(value.dtype)))
        np.copyto(target, of_each_lane(function.reduce(values, axis=1, dtype=value.dtype)), where=mask)

    return step


# ---- barriers


def warp_barrier(instruction: Instruction, machine: Machine) -> Step:
    """bar.warp.sync. (A barrier of the block ends its basic block: the machine deals with it.)"""
    members = machine.registers.source(instruction.operands[0], "u32")

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, members)
        here, named = by_warp(np.asarray(mask), machine), by_warp(members, machine)
        machine.shared.tracker.warp_barrier(here.all(axis=1) & (named == EVERY_LANE).all(axis=1))

    return step


def check_barrier(instruction: Instruction, machine: Machine) -> str | None:
    """Refuse what isn't a barrier of the whole block; its guard, if it has one."""
    parts = [part.split("::")[0] for part in instruction.opcode if part not in ("cta", "aligned")]
    reduces = "red" in parts
    if parts[1] not in ("sync", "red"):
        raise Unsupported(".".join(instruction.opcode))
    numbers = instruction.operands[1:-1] if reduces else instruction.operands
    if numbers[0].startswith("%"):
        raise Unsupported("a barrier whose number is in a register")
    if len(numbers) > 1 and numbers[1] != str(machine.threads):
        raise Unsupported("a barrier for a part of the block")
    return instruction.guard


def reduce_at_barrier(instruction: Instruction, machine: Machine, released: Array) -> None:
    """bar.red: popc, and, or of a predicate over the block, once all of it is there."""
    parts = [part for part in instruction.opcode if part not in ("cta", "aligned")]
    if parts[1] != "red":
        return
    operation, kind = parts[2], parts[-1]
    target = machine.registers.target(instruction.operands[0], kind)
    condition = machine.registers.predicate(instruction.operands[-1])()
    holds = np.broadcast_to(condition, machine.count).reshape(-1, machine.threads)
    result = {"popc": holds.sum(axis=1), "and": holds.all(axis=1), "or": holds.any(axis=1)}[operation]
    np.copyto(target, np.repeat(result, machine.threads), where=released, casting="unsafe")


BUILDERS: dict[str, Builder] = {
    "shfl": shuffle,
    "vote": vote,
    "activemask": active_mask,
    "match": match,
    "redux": reduce_warp,
    "bar": warp_barrier,
}
