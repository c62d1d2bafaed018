"""Memory: ld, st, atom, red, and cp.async."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import OutOfBounds, PTXError, Unsupported, first
from .memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .parser import Instruction, Kernel
from .registers import Array, Mask, dtype_of, names_in

if TYPE_CHECKING:
    from .machine import Builder, Machine, Step

SPACES = ("global", "shared", "local", "param", "const")
# What orders or caches accesses: nothing to do for threads in lock step.
IGNORED = re.compile(
    r"volatile|relaxed|acquire|release|acq_rel|sc|gpu|sys|cta|cluster|nc|ca|cg|cs|cv|lu|wb|wt|unified|weak"
    r"|L[12]::\w+|level::\w+"
)
SIZES = {"v2": 2, "v4": 4, "v8": 8}


def space_of(instruction: Instruction) -> str:
    """The state space; "" for a generic address. `shared::cta` is `shared`."""
    names = [part.split("::")[0] for part in instruction.opcode[1:]]
    return next((name for name in names if name in SPACES), "")


def check_modifiers(instruction: Instruction, *more: str) -> None:
    for part in instruction.opcode[1:-1]:
        if part.split("::")[0] in SPACES or part in SIZES or part in more or IGNORED.fullmatch(part):
            continue
        raise Unsupported(f"modifier .{part} of {instruction.opcode[0]}")


def smallest_shared_access(kernel: Kernel) -> int:
    """The bytes that the race tracker can take as one: no access to shared memory is smaller or lies across two."""
    sizes = [16]
    for one in kernel.instructions:
        name = one.opcode[0]
        if name in ("ld", "st", "atom", "red") and space_of(one) in ("shared", ""):
            vector = next((SIZES[part] for part in one.opcode if part in SIZES), 1)
            sizes.append(dtype_of(one.opcode[-1]).itemsize * vector)
        elif name == "cp":
            sizes += [int(n) for n in one.operands[2:3] if n.isdigit()]
    return min(sizes)


def address_of(token: str, machine: Machine) -> Callable[[], Array]:
    """The values of an operand like [%rd1+16], as uint64, an entry a lane."""
    match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?(?:0[xX][\da-fA-F]+|\d+)))?\s*\]", token)
    if match is None:
        raise Unsupported(f"address {token}")
    name, offset = match[1], int(match[2] or "0", 0)
    registers = machine.registers
    array = registers.arrays.get(name)
    base = registers.source(name, f"u{8 * array.itemsize}" if array is not None else "u64")
    constant = np.uint64(offset % (1 << 64))
    if base.ndim == 0:
        return lambda: np.full(machine.count, base.astype(np.uint64) + constant)
    return lambda: base.astype(np.uint64) + constant


def memory_of(space: str, machine: Machine) -> Any:
    return machine.memory if space in ("global", "const") else getattr(machine, space)


def split_by_window(addresses: Array) -> list[tuple[str, Array, np.uint64]]:
    """Space, which of the generic addresses lie in it, and what to subtract from them."""
    shared = addresses - np.uint64(SHARED_WINDOW) < np.uint64(WINDOW_BYTES)
    local = addresses - np.uint64(LOCAL_WINDOW) < np.uint64(WINDOW_BYTES)
    return [
        ("shared", shared, np.uint64(SHARED_WINDOW)),
        ("local", local, np.uint64(LOCAL_WINDOW)),
        ("global", ~(shared | local), np.uint64(0)),
    ]


def load_from(space: str, machine: Machine, addresses: Array, dtype: np.dtype, count: int, lanes: Array) -> Array:
    if space:
        return memory_of(space, machine).load(addresses, dtype, count, lanes)
    result = np.empty((len(lanes), count), dtype)
    for name, inside, window in split_by_window(addresses):
        if inside.any():
            memory = memory_of(name, machine)
            result[inside] = memory.load(addresses[inside] - window, dtype, count, lanes[inside])
    return result


def store_to(space: str, machine: Machine, addresses: Array, values: Array, lanes: Array) -> None:
    if space:
        memory_of(space, machine).store(addresses, values, lanes)
        return
    for name, inside, window in split_by_window(addresses):
        if inside.any():
            memory_of(name, machine).store(addresses[inside] - window, values[inside], lanes[inside])


def load(instruction: Instruction, machine: Machine) -> Step:
    check_modifiers(instruction)
    kind, space = instruction.opcode[-1], space_of(instruction)
    dtype = dtype_of(kind)
    names = names_in(instruction.operands[0])
    if any(name != "_" and name not in machine.registers.arrays for name in names):
        raise Unsupported(f"target {instruction.operands[0]}")
    targets = [machine.registers.widened(name, kind) for name in names]
    if space == "param":
        return load_parameter(instruction, machine, targets, dtype)
    addresses = address_of(instruction.operands[1], machine)

    def step(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        values = load_from(space, machine, addresses()[lanes], dtype, len(targets), lanes)
        for column, target in enumerate(targets):
            target[slice(None) if mask is True else lanes] = values[:, column]

    return step


def load_parameter(instruction: Instruction, machine: Machine, targets: list[Array], dtype: np.dtype) -> Step:
    """From the launch's parameter block, at an address that is known beforehand."""
    match = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", instruction.operands[1])
    if match is None:
        raise Unsupported("a parameter's address in a register")
    start, within = int(machine.registers.symbols[match[1]]), int(match[2] or 0)
    size = next(p.size for p in machine.kernel.parameters if p.name == match[1])
    if within + dtype.itemsize * len(targets) > size:
        raise OutOfBounds(f"byte {within} of a parameter of {size} bytes")
    places = [start + within + dtype.itemsize * i for i in range(len(targets))]
    values = [machine.parameters[at : at + dtype.itemsize].view(dtype) for at in places]

    def step(mask: Mask) -> None:
        for target, value in zip(targets, values, strict=True):
            np.copyto(target, value, where=mask)

    return step


def store(instruction: Instruction, machine: Machine) -> Step:
    check_modifiers(instruction)
    kind, space = instruction.opcode[-1], space_of(instruction)
    if space in ("param", "const"):
        raise Unsupported(f"a store to {space}")
    sources = machine.registers.sources(instruction.operands[1], kind)
    addresses = address_of(instruction.operands[0], machine)
    dtype = dtype_of(kind)

    def step(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        values = np.empty((len(lanes), len(sources)), dtype)
        for column, source in enumerate(sources):
            values[:, column] = source[lanes] if source.ndim else source
        store_to(space, machine, addresses()[lanes], values, lanes)

    return step


# ---- atomic operations: one thread after the other, in the order of lanes

ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": lambda old, x: min(old, x),
    "max": lambda old, x: max(old, x),
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: old.dtype.type(0) if old >= x else old + old.dtype.type(1),
    "dec": lambda old, x: x if old == 0 or old > x else old - old.dtype.type(1),
}


def atomic(instruction: Instruction, machine: Machine) -> Step:
    """atom d, [a], b (and c, of cas); red [a], b."""
    name, kind, space = instruction.opcode[0], instruction.opcode[-1], space_of(instruction) or "global"
    operation = next((part for part in instruction.opcode if part in ATOMIC or part == "cas"), "")
    check_modifiers(instruction, *ATOMIC, "cas", "noftz")
    if not operation or kind not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64"):
        raise Unsupported(".".join(instruction.opcode))
    operands = instruction.operands
    target = machine.registers.target(operands[0], kind) if name == "atom" else None
    address, *values = operands[1:] if name == "atom" else operands
    addresses = address_of(address, machine)
    sources = [machine.registers.source(value, kind) for value in values]
    dtype = dtype_of(kind)

    def step(mask: Mask) -> None:
        where = addresses()
        for lane in machine.lanes(mask):
            memory, at, one = memory_of(space, machine), where[lane : lane + 1], np.array([lane])
            given = [source[lane] if source.ndim else source[()] for source in sources]
            if space == "shared":
                old = memory.load_atomically(at, dtype, one)
            else:
                old = memory.load(at, dtype, 1, one)[0, 0]
            if operation == "cas":
                new = given[1] if old == given[0] else old
            else:
                new = ATOMIC[operation](old, given[0])
            memory.store(at, np.array([[new]], dtype), one, atomic=True)
            if target is not None:
                target[lane] = old

    return step


# ---- asynchronous copies


def copy(instruction: Instruction, machine: Machine) -> Step:
    """cp.async from global to shared memory, and the groups that such copies are waited for in."""
    opcode = instruction.opcode
    if opcode[1:2] != ("async",) or "mbarrier" in opcode or "bulk" in opcode:
        raise Unsupported(".".join(opcode))
    if "commit_group" in opcode:

        def commit(mask: Mask) -> None:
            machine.shared.groups[machine.lanes(mask)] += 1

        return commit
    if "wait_group" in opcode or "wait_all" in opcode:
        but = int(instruction.operands[0]) if "wait_group" in opcode else -1
        return lambda mask: machine.shared.wait_for_copies(machine.lanes(mask), but)
    return begin_copy(instruction, machine)


def begin_copy(instruction: Instruction, machine: Machine) -> Step:
    """cp.async.cg.shared.global [to], [from], size, bytes to take (the rest is zeros)."""
    for part in instruction.opcode[2:]:
        if part.split("::")[0] not in ("ca", "cg", "shared", "global", "L2"):
            raise Unsupported(f"modifier .{part} of cp.async")
    size = int(instruction.operands[2])
    if size not in ((16,) if "cg" in instruction.opcode else (4, 8, 16)) or len(instruction.operands) > 4:
        raise Unsupported("this form of cp.async")
    to, source = (address_of(token, machine) for token in instruction.operands[:2])
    taken = machine.registers.source(instruction.operands[3], "u32") if len(instruction.operands) > 3 else None

    def step(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        data = np.zeros((len(lanes), size), np.uint8)
        wanted = np.full(len(lanes), size) if taken is None else np.broadcast_to(taken, machine.count)[lanes]
        if (more := wanted > size).any():
            raise PTXError(f"cp.async of more bytes than {size}", int(lanes[first(more)]))
        from_where = source()[lanes]
        for count in np.unique(wanted):
            if count:  # byte by byte, as a count may be any
                rows = np.flatnonzero(wanted == count)
                step_size = np.dtype(f"u{min(8, int(count) & -int(count))}")
                n = int(count) // step_size.itemsize
                at = from_where[rows]
                machine.memory.index(at, size, lanes[rows])  # alignment is that of a whole copy
                values = [
                    machine.memory.load(at + np.uint64(i * step_size.itemsize), step_size, 1, lanes[rows])
                    for i in range(n)
                ]
                data[rows, :count] = np.hstack(values).view(np.uint8)
        machine.shared.begin_copy(to()[lanes], data, lanes)

    return step


def nothing(instruction: Instruction, machine: Machine) -> Step:
    """Fences, prefetches and naps."""
    return lambda mask: None


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(("ld", "ldu"), load),
    "st": store,
    **dict.fromkeys(("atom", "red"), atomic),
    "cp": copy,
    **dict.fromkeys(("membar", "fence", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "pmevent"), nothing),
}
