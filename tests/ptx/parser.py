"""PTX text to kernels: parameters, variables, registers, and instructions cut into basic blocks.

Source: the PTX ISA, chapters 4 (syntax), 5 (state spaces) and 9.3 (guards). What isn't understood is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import Unsupported

BITS = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}
ENDS_A_BLOCK = {"bra", "brx", "ret", "exit", "bar", "barrier", "trap"}


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 add.s32 %r1, %r2, 3;` is opcode ("add", "s32"), operands ("%r1", "%r2", "3"), guard "!%p1"."""

    line: int
    text: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None = None

    @property
    def ends_a_block(self) -> bool:
        return self.opcode[0] in ENDS_A_BLOCK and self.opcode[:2] != ("bar", "warp")


@dataclass(frozen=True)
class Variable:
    """A named piece of memory, or a parameter. Size 0: as large as the launch says."""

    name: str
    align: int
    size: int
    data: bytes = b""


@dataclass(frozen=True)
class Block:
    """A basic block: threads that enter it together leave it together."""

    instructions: tuple[Instruction, ...]


@dataclass
class Kernel:
    """One `.entry`. Names of registers declared in an inner scope carry a suffix that makes them unique."""

    name: str
    parameters: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    """Name to type without its dot: "pred", "b32", "f32" and so on."""
    variables: dict[str, list[Variable]] = field(default_factory=dict)
    """By state space: "shared", "local", "global", "const"."""
    blocks: list[Block] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Label to the number of the block that it stands before."""
    branch_targets: dict[str, list[str]] = field(default_factory=dict)

    @property
    def instructions(self) -> Iterator[Instruction]:
        return (instruction for block in self.blocks for instruction in block.instructions)


def without_comments(text: str) -> str:
    """The same text, with every line where it was."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|common|weak)\s+)*\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+\d+\s*)?)?"
    r"(?P<name>[\w$]+)(?P<array>(?:\[\d*\])*)\s*(?:=\s*(?P<value>.*))?$",
    re.S,
)


def parse_variable(text: str) -> tuple[str, Variable]:
    """State space and variable of a declaration like `.shared .align 16 .b8 tile[4096]`."""
    match = VARIABLE.match(text.strip())
    if match is None:
        raise Unsupported(f"declaration not understood: {text.strip()[:120]}")
    width = int(re.sub(r"\D", "", match["type"])) // 8
    sizes = [int(n or 0) for n in re.findall(r"\[(\d*)\]", match["array"])]
    size = width
    for n in sizes:
        size *= n
    data = b""
    if match["value"]:
        items = re.findall(r"0[xX][0-9a-fA-F]+|-?\d+|[A-Za-z_$][\w$]*", match["value"])
        if not all(re.match(r"-?\d", item) for item in items):
            raise Unsupported(f"initial value not understood: {text.strip()[:120]}")
        data = b"".join((int(x, 0) % (1 << 8 * width)).to_bytes(width, "little") for x in items).ljust(size, b"\0")
    return match["space"], Variable(match["name"], int(match["align"] or width), size, data)


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a module, by name."""
    text = without_comments(text)
    kernels: dict[str, Kernel] = {}
    module_variables: dict[str, list[Variable]] = {}
    outside, start = [], 0
    for match in re.finditer(r"\.(entry|func)\b", text):
        if match.start() < start:
            continue
        opening = text.index("{", match.end())
        closing = matching_brace(text, opening)
        outside.append(text[start : match.start()])
        start = closing + 1
        if match[1] == "func":
            continue  # a call of it is refused where it is called
        head = re.match(r"\s*([\w$]+)\s*\((.*?)\)", text[match.end() : opening], re.S)
        head = head or re.match(r"\s*([\w$]+)()", text[match.end() : opening])
        assert head is not None
        kernel = Kernel(head[1])
        kernel.parameters = [parse_variable(p)[1] for p in head[2].split(",") if p.strip()]
        line = 1 + text.count("\n", 0, opening)
        parse_body(kernel, text[opening + 1 : closing], line)
        kernels[kernel.name] = kernel
    outside.append(text[start:])
    for statement in ";".join(outside).split(";"):
        declaration = re.search(r"\.(global|const|shared)\b.*", statement, re.S)
        if declaration:
            space, variable = parse_variable(declaration[0])
            module_variables.setdefault(space, []).append(variable)
    for kernel in kernels.values():
        for space, variables in module_variables.items():
            kernel.variables.setdefault(space, []).extend(variables)
    return kernels


def matching_brace(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise Unsupported("a body without its closing brace")


def statements(body: str, line: int) -> Iterator[tuple[int, str]]:
    """Line and text of each statement; "{", "}" and "label:" are statements of their own."""
    at = 0
    for match in re.compile(r"\s*(?:([{}])|([\w$]+\s*:(?!:))|([^;]*);)").finditer(body):
        piece = match[1] or match[2] or match[3] or ""
        begin = match.start() + len(match[0]) - len(match[0].lstrip())
        line += body.count("\n", at, begin)
        at = begin
        if piece.strip():
            yield line, piece.strip()


OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse_body(kernel: Kernel, body: str, first_line: int) -> None:
    scopes: list[dict[str, str]] = [{}]
    scope_count = 0
    code: list[Instruction] = []
    labels: dict[str, int] = {}

    def renamed(text: str) -> str:
        names = {name: unique for scope in scopes for name, unique in scope.items()}
        return re.sub(r"[%\w$]+", lambda m: names.get(m[0], m[0]), text) if names else text

    def declare(kind: str, names: str) -> None:
        for name in (n.strip() for n in names.split(",")):
            several = re.match(r"(.*)<(\d+)>$", name)
            for one in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
                unique = one if len(scopes) == 1 else f"{one}${scope_count}"
                if unique != one:
                    scopes[-1][one] = unique
                kernel.registers[unique] = kind

    for line, statement in statements(body, first_line):
        if statement == "{":
            scope_count += 1
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S):
            declare(match[1], match[2])
        elif match := re.match(r"([\w$]+)\s*:$", statement):
            labels[match[1]] = len(code)
        elif match := re.match(r"\.branchtargets\s+(.*)", statement, re.S):
            label = next(name for name, at in reversed(labels.items()) if at == len(code))
            kernel.branch_targets[label] = [name.strip() for name in match[1].split(",")]
        elif re.match(r"(\.extern\s+)?\.(shared|local|global|const)\b", statement):
            space, variable = parse_variable(statement)
            kernel.variables.setdefault(space, []).append(variable)
        elif statement.startswith("."):
            if re.match(r"\.(param|callprototype|calltargets)\b", statement):
                raise Unsupported(f"calls are not supported: PTX line {line}: {' '.join(statement.split())}")
        else:
            code.append(parse_instruction(line, renamed(statement)))
    cut_into_blocks(kernel, code, labels)


def parse_instruction(line: int, statement: str) -> Instruction:
    try:
        return Instruction(line, *parts_of(statement))
    except Unsupported as error:
        error.line, error.instruction = line, " ".join(statement.split())
        raise


@functools.lru_cache(maxsize=1 << 15)  # most of a kernel is alike in a slightly different one
def parts_of(statement: str) -> tuple[str, tuple[str, ...], tuple[str, ...], str | None]:
    """An instruction's text, opcode, operands and guard."""
    text = " ".join(statement.split())
    match = re.match(r"(?:@(!?[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
    if match is None:
        raise Unsupported("not understood")
    guard, opcode, operands = match.groups()
    if opcode.split(".")[0] == "call":
        raise Unsupported("calls are not supported")
    return text, tuple(opcode.split(".")), tuple(OPERAND.findall(operands)), guard


def cut_into_blocks(kernel: Kernel, code: list[Instruction], labels: dict[str, int]) -> None:
    """Blocks begin at labels, and behind branches and barriers."""
    leaders = {0, *labels.values(), *(i + 1 for i, one in enumerate(code) if one.ends_a_block)}
    starts = sorted(at for at in leaders if at < len(code))
    number = {at: i for i, at in enumerate(starts)}
    number[len(code)] = len(starts)
    kernel.blocks = [Block(tuple(code[a:b])) for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    kernel.labels = {name: number[at] for name, at in labels.items()}
