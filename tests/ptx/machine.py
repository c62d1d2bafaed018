"""Executes a kernel: the threads of several thread blocks in lock step, each instruction once for all of them.

Threads that are at the same basic block run it together. The block with the lowest number goes first, so threads that
took different ways meet again where the compiler put the ways together (it numbers blocks in that order). A warp-wide
instruction with part of its threads missing, and a barrier that some threads never reach, are faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import arithmetic, bits, convert, load_store, tensor, warp
from .errors import Deadlock, Divergence, PTXError, Unsupported
from .memory import LOCAL_WINDOW, SHARED_WINDOW, GlobalMemory, LocalMemory, SharedMemory
from .parser import Block, Instruction, Kernel
from .races import WARP
from .registers import Array, Mask, Registers, special_registers

Step = Callable[[Mask], None]
Place = tuple[int, int, int]  # of a thread or a block
Builder = Callable[[Instruction, "Machine"], Step]
BUILDERS: dict[str, Builder] = (
    arithmetic.BUILDERS | bits.BUILDERS | convert.BUILDERS | load_store.BUILDERS | tensor.BUILDERS | warp.BUILDERS
)


@dataclass
class Counts:
    """What a launch took."""

    instructions: int = 0
    """Executed, each once however many threads did."""
    lines: set[int] = field(default_factory=set)
    """Of the PTX, which some thread came to."""


class Machine:
    """A kernel decoded for thread blocks of one size; `at_once` of them are executed together."""

    max_instructions = 10**7  # of a launch

    def __init__(self, kernel: Kernel, block: Place, shared_bytes: int = 0, at_once: int = 8) -> None:
        self.kernel, self.shape, self.at_once = kernel, block, at_once
        self.threads = int(np.prod(block))
        if self.threads % WARP:
            raise Unsupported(f"blocks of {self.threads} threads, not a multiple of {WARP}")
        self.count = self.threads * at_once
        self.registers = Registers(kernel, self.count)
        self.registers.special |= special_registers(block, self.count)
        for name in ("%ctaid.x", "%ctaid.y", "%ctaid.z"):
            self.registers.special[name] = np.zeros(self.count, np.uint32)
        for name in ("%nctaid.x", "%nctaid.y", "%nctaid.z"):
            self.registers.special[name] = np.zeros((), np.uint32)
        self._lay_out(shared_bytes)
        self.all_lanes = np.arange(self.count)
        self.memory = GlobalMemory(0)
        self.blocks = [self._decode(block) for block in kernel.blocks]

    # ---- memory

    def _lay_out(self, dynamic: int) -> None:
        """Addresses of the kernel's variables, and where in the parameter block each parameter lies."""
        symbols, variables = self.registers.symbols, self.kernel.variables
        sizes = {"shared": 0, "local": 0}
        for space in sizes:
            # what the launch gives the size of comes last
            for variable in sorted(variables.get(space, ()), key=lambda v: v.size == 0):
                offset = sizes[space] + -sizes[space] % max(variable.align, 16 if variable.size == 0 else 1)
                symbols[variable.name] = np.array(offset, np.uint64)
                sizes[space] = offset + variable.size
        self.shared_size, self.local_size = sizes["shared"] + dynamic, sizes["local"]
        self.registers.special["%dynamic_smem_size"] = np.array(dynamic, np.uint32)
        self.registers.special["%total_smem_size"] = np.array(self.shared_size, np.uint32)
        for space in ("global", "const"):
            for variable in variables.get(space, ()):
                symbols[variable.name] = np.zeros((), np.uint64)
        offset = 0
        for parameter in self.kernel.parameters:
            offset += -offset % parameter.align
            symbols[parameter.name] = np.array(offset, np.uint64)
            offset += parameter.size
        self.parameters = np.zeros(offset, np.uint8)
        self.cell = load_store.smallest_shared_access(self.kernel)

    def _set_parameters(self, arguments: bytes | Sequence[int | float | np.generic]) -> None:
        if isinstance(arguments, bytes):
            packed = arguments
        else:
            packed = b""
            for parameter, value in zip(self.kernel.parameters, arguments, strict=True):
                packed += bytes(-len(packed) % parameter.align)
                if isinstance(value, float):
                    value = np.float64(value) if parameter.size == 8 else np.float32(value)
                whole = isinstance(value, (int, np.integer))
                raw = int(value).to_bytes(8, "little", signed=value < 0) if whole else value.tobytes()  # type: ignore
                packed += raw[: parameter.size]
        if len(packed) != len(self.parameters):
            raise ValueError(f"{len(packed)} bytes of parameters, the kernel takes {len(self.parameters)}")
        self.parameters[...] = np.frombuffer(packed, np.uint8)

    # ---- decoding

    def _decode(self, block: Block) -> list[Step]:
        return [self._step(one) for one in block.instructions if not one.ends_a_block]

    def _step(self, instruction: Instruction) -> Step:
        builder = BUILDERS.get(instruction.opcode[0])
        try:
            if builder is None:
                raise Unsupported(f"instruction {'.'.join(instruction.opcode)}")
            step = builder(instruction, self)
        except PTXError as error:
            raise self._placed(error, instruction) from None
        if instruction.guard is None:
            return step
        predicate = self.registers.predicate(instruction.guard)

        def guarded(mask: Mask) -> None:
            taken = self.narrowed(mask, predicate())
            if taken is not None:
                step(taken)

        return guarded

    # ---- masks

    def narrowed(self, mask: Mask, condition: Array) -> Mask | None:
        """The lanes of `mask` where `condition` holds: None if there is none."""
        taken = condition if mask is True else condition & mask
        if taken.ndim == 0:
            taken = np.full(self.count, bool(taken))
        if not taken.any():
            return None
        return True if taken.all() else taken.copy() if taken is condition else taken

    def lanes(self, mask: Mask) -> Array:
        return self.all_lanes if mask is True else np.flatnonzero(mask)

    def whole_warps(self, mask: Mask, members: Array | None = None) -> None:
        """Each warp with a lane in `mask` has to have all of it there, or `members` of it, but for those that ended."""
        if mask is True and (members is None or (members.ndim == 0 and members == warp.EVERY_LANE)):
            return
        here: Array = np.broadcast_to(np.asarray(mask), self.count).reshape(-1, WARP)
        wanted = here.any(axis=1, keepdims=True) & ~self.ended.reshape(-1, WARP)
        if members is not None:
            named = np.broadcast_to(members, self.count).reshape(-1, WARP)
            bit = (named >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1) == 1
            if (outside := here & ~bit).any():
                raise Divergence("executed by a thread that its member mask doesn't name", int(outside.argmax()))
            # every lane here has to name the same lanes, and those have to be here
            agreed = np.where(here, named, 0).max(axis=1)
            if (differ := here & (named != agreed[:, None])).any():
                raise Divergence("threads of a warp name different members", int(differ.argmax()))
            wanted &= (agreed[:, None] >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1) == 1
        if (missing := wanted & ~here).any():
            lane = int(missing.argmax())
            with_it = int(here[lane // WARP].argmax())
            raise Divergence(f"reached without thread {lane % self.threads} of its warp", lane // WARP * WARP + with_it)

    # ---- running

    def launch(
        self,
        grid: Place,
        arguments: bytes | Sequence[int | float | np.generic],
        memory: GlobalMemory,
        *,
        backwards: bool = False,
    ) -> Counts:
        """Run all blocks of the grid, `at_once` at a time, the last ones first if `backwards`."""
        self.memory, self.counts = memory, Counts()
        self.reached: set[int] = set()
        self._set_parameters(arguments)
        for space in ("global", "const"):
            for variable in self.kernel.variables.get(space, ()):
                content = np.frombuffer(variable.data or bytes(variable.size), np.uint8)
                view = memory.place(content, "read" if space == "const" else "update")
                self.registers.symbols[variable.name][...] = memory.base + memory.offset_of(view)
        for axis, n in zip("xyz", grid, strict=True):
            self.registers.special[f"%nctaid.{axis}"][...] = n
        numbers = list(itertools.product(*(range(n) for n in reversed(grid))))
        if backwards:
            numbers.reverse()
        with np.errstate(all="ignore"):
            for start in range(0, len(numbers), self.at_once):
                self._run([(x, y, z) for z, y, x in numbers[start : start + self.at_once]])
        blocks = [self.kernel.blocks[at] for at in self.reached]
        self.counts.lines.update(one.line for block in blocks for one in block.instructions)
        return self.counts

    def _run(self, blocks: list[Place]) -> None:
        self.block_numbers = blocks
        self.registers.reset()
        present = np.repeat(np.arange(self.at_once) < len(blocks), self.threads)
        numbers = np.array(blocks + [blocks[-1]] * (self.at_once - len(blocks)), np.uint32)
        for axis, name in enumerate("xyz"):
            self.registers.special[f"%ctaid.{name}"][...] = np.repeat(numbers[:, axis], self.threads)
        self.shared = SharedMemory(self.at_once, self.threads, self.shared_size, self.cell)
        self.local = LocalMemory(self.count, self.local_size)
        self.ended = ~present
        groups: dict[int, Mask] = {0: True if present.all() else present}
        waiting: dict[int, Array] = {}
        while groups:
            at = min(groups)
            mask = groups.pop(at)
            if at == len(self.blocks):
                self.ended |= mask
                continue
            self._execute(at, mask, groups, waiting)
        for at, mask in waiting.items():
            if mask.any():
                raise self._deadlock(at, mask)
        self.shared.check_finished()

    def _execute(self, at: int, mask: Mask, groups: dict[int, Mask], waiting: dict[int, Array]) -> None:
        code = self.blocks[at]
        self.counts.instructions += len(code)
        self.reached.add(at)
        if self.counts.instructions > self.max_instructions:
            raise PTXError(f"still running after {self.max_instructions} instructions")
        done = 0
        try:
            for step in code:
                step(mask)
                done += 1
        except PTXError as error:
            raise self._placed(error, self.kernel.blocks[at].instructions[done]) from None
        last = self.kernel.blocks[at].instructions[-1]
        rest = mask
        if last.ends_a_block:
            kind = last.opcode[0]
            if kind in ("bar", "barrier"):
                self._barrier(at, mask, last, groups, waiting)
                return
            taken: Mask | None = mask
            if last.guard is not None:
                taken = self.narrowed(mask, self.registers.predicate(last.guard)())
                rest = self._without(mask, taken)
            else:
                rest = None
            if taken is not None:
                if kind in ("ret", "exit"):
                    self.ended = self.ended | taken
                elif kind == "trap":
                    raise self._placed(PTXError("trap", int(self.lanes(taken)[0])), last)
                elif kind == "brx":
                    self._indexed_branch(taken, last, groups)
                else:
                    self._join(groups, self.kernel.labels[last.operands[0]], taken)
        if rest is not None:
            self._join(groups, at + 1, rest)

    def _without(self, mask: Mask, taken: Mask | None) -> Mask | None:
        if taken is None:
            return mask
        if taken is True:
            return None
        rest = ~taken & mask
        return rest if rest.any() else None

    def _join(self, groups: dict[int, Mask], at: int, mask: Mask) -> None:
        if at in groups:
            mask = groups[at] | mask
            mask = True if np.all(mask) else mask
        groups[at] = mask

    def _indexed_branch(self, mask: Mask, instruction: Instruction, groups: dict[int, Mask]) -> None:
        index = self.registers.source(instruction.operands[0], "u32")
        targets = self.kernel.branch_targets[instruction.operands[1]]
        for number, label in enumerate(targets):
            taken = self.narrowed(mask, np.broadcast_to(index == number, self.count))
            if taken is not None:
                self._join(groups, self.kernel.labels[label], taken)

    def _per_block(self, lanes: Array) -> Array:
        return lanes.reshape(-1, self.threads)

    def _barrier(
        self, at: int, mask: Mask, instruction: Instruction, groups: dict[int, Mask], waiting: dict[int, Array]
    ) -> None:
        try:
            predicate = warp.check_barrier(instruction, self)
            if predicate is not None:
                raise Unsupported("a guarded barrier")
            self.whole_warps(mask)
            arrived: Array = np.broadcast_to(np.asarray(mask), self.count)
            others = [place for place, there in waiting.items() if place != at and there.any()]
            arrived = arrived | waiting.get(at, False)
            complete: Array = np.logical_and.reduce(self._per_block(arrived), axis=1)
            for place in others:
                both = self._per_block(waiting[place]).any(axis=1) & self._per_block(arrived).any(axis=1)
                if both.any():
                    line = self.kernel.blocks[place].instructions[-1].line
                    lane = int(np.flatnonzero(arrived & np.repeat(both, self.threads))[0])
                    raise Deadlock(f"threads of one block wait at different barriers, here and in line {line}", lane)
            released = np.repeat(complete, self.threads)
            waiting[at] = arrived & ~released
            if complete.any():
                self.shared.tracker.barrier(complete)
                warp.reduce_at_barrier(instruction, self, released)
                self._join(groups, at + 1, True if released.all() else released)
        except PTXError as error:
            raise self._placed(error, instruction) from None

    # ---- faults

    def _deadlock(self, at: int, mask: Array) -> PTXError:
        instruction = self.kernel.blocks[at].instructions[-1]
        lane = int(np.flatnonzero(mask)[0])
        number = lane // self.threads
        own = slice(number * self.threads, (number + 1) * self.threads)
        ended = int(self.ended[own].sum())
        return self._placed(
            Deadlock(f"{int(mask[own].sum())} threads of the block wait, {ended} have ended", lane), instruction
        )

    def _placed(self, error: PTXError, instruction: Instruction) -> PTXError:
        error.line, error.instruction = instruction.line, instruction.text
        if error.lane is not None and hasattr(self, "block_numbers"):
            lane, (x, y, _) = int(error.lane), self.shape
            thread = lane % self.threads
            error.thread = (thread % x, thread // x % y, thread // (x * y))
            error.block = self.block_numbers[lane // self.threads]
        return error

    # ---- what builders ask for

    def generic_window(self, space: str) -> int:
        return {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
