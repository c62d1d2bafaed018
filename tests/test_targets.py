"""Lane count and register tile follow the CPU: kernels compiled for CPUs that aren't here, or run as on lesser ones."""

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import test_gradient
from cases import CASES, DTYPES, FLOAT64, RULE_CASES

from flash_numba.cpu.ir.registers import RegisterTile, choose_register_tile

ROOT = Path(__file__).resolve().parent.parent
LINUX_X86, LINUX_ARM, MAC_ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "arm64-apple-darwin"


@dataclass(frozen=True)
class Target:
    triple: str
    cpu: str
    features: str
    bits: int
    """Of the instruction set's widest vector registers, and how many there are:"""
    registers: int
    chains: int
    """Independent sums that keep the FMA units busy: latency times units."""

    @property
    def tile(self) -> RegisterTile:
        return choose_register_tile(self.triple, self.features)


# The features by which the tile is chosen; LLVM knows the rest from the CPU's name. Latencies and units are from the
# makers' optimisation guides and Agner Fog's tables.
TARGETS = {
    "skylake-avx512": Target(LINUX_X86, "skylake-avx512", "+avx2,+fma,+avx512f", bits=512, registers=32, chains=4 * 2),
    "sapphirerapids": Target(LINUX_X86, "sapphirerapids", "+avx2,+fma,+avx512f", bits=512, registers=32, chains=4 * 2),
    "znver3": Target(LINUX_X86, "znver3", "+avx2,+fma", bits=256, registers=16, chains=4 * 2),
    "haswell": Target(LINUX_X86, "haswell", "+avx2,+fma", bits=256, registers=16, chains=5 * 2),
    "x86-64": Target(LINUX_X86, "x86-64", "+sse2", bits=128, registers=16, chains=4 * 1),
    "neoverse-v1": Target(LINUX_ARM, "neoverse-v1", "+neon,+sve", bits=128, registers=32, chains=4 * 4),
    "apple-m1": Target(MAC_ARM, "apple-m1", "+neon", bits=128, registers=32, chains=4 * 4),
    "generic": Target(LINUX_ARM, "generic", "", bits=128, registers=32, chains=4 * 4),
}
LANES = {512: r"%zmm", 256: r"%ymm", 128: r"%xmm|\bv\d+\.4s|\.4s\b"}
MULTIPLY = re.compile(r"vfmadd\w+ps|fmla|mulps")

DOUBLE = re.compile(r"\bv?(?:add|sub|mul|div|fn?m(?:add|sub)\d+|cvt\w+2)[sp]d\b|\bf[a-z]+(?:\.2d\t|\t(?:d|v\d+\.2d)).*")
# What LLVM calls where an instruction set has no instruction for an operation.
LIBRARY_CALL = re.compile(
    r"\b_*(?:fmaf?|exp2?f?|log2?f?|tanhf?|powf?|fminf?|fmaxf?|gnu_[hf]2[hf]\w*"
    r"|(?:trunc|extend|float|fix|mul|u?div)\w*[shdt]i?f\w*)\b"
)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_tile_fits_the_registers(target):
    """The sums, one row of B and the broadcast of A; enough sums that no FMA waits for the one before it."""
    tile = target.tile
    assert tile.bits == target.bits
    assert tile.rows * tile.vectors + tile.vectors + 1 <= target.registers
    assert tile.rows * tile.vectors >= target.chains


# ---- the code for CPUs that aren't here


@functools.cache
def cross_compile(kernel, tile):
    """What `cross_compile.py` says, and the float32 kernel's assembly for each target of this tile, by CPU."""
    chosen = [t for t in TARGETS.values() if t.tile == tile]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if chosen[0].triple.split("-")[0] == llvm.get_process_triple().split("-")[0]:  # Numba's first passes for it as well
        environment |= {"NUMBA_CPU_NAME": chosen[0].cpu, "NUMBA_CPU_FEATURES": chosen[0].features}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [word for t in chosen for word in (t.triple, t.cpu, t.features)]
        got = subprocess.run(
            [sys.executable, "tests/cross_compile.py", folder, kernel, "float32", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return got.stderr, {path.stem: path.read_text() for path in Path(folder).glob("*.s")}


def assembly_for(target, kernel):
    said, assembly = cross_compile(kernel, target.tile)
    assert target.cpu in assembly, said
    return assembly[target.cpu]


@dataclass(frozen=True)
class Loop:
    """A loop of one basic block."""

    function: str
    lines: tuple[str, ...]

    def where(self, pattern):
        return [line for line in self.lines if re.search(pattern, line)]

    @property
    def multiplications(self):
        return self.where(MULTIPLY)

    @property
    def sums(self):
        """Registers that FMAs add to: the last operand on x86, the first on ARM."""
        operands = [re.sub(r"^\S+\s+", "", line).split(", ") for line in self.multiplications]
        return {of[0 if "fmla" in line else -1] for of, line in zip(operands, self.multiplications, strict=True)}


def functions(assembly):
    """`(name, code)` of each function; the name is mangled, with its own after the modules' and ahead of the types."""
    assembly = re.sub(r"\nL(loh|tmp)\d+:", "", assembly)  # marks for the linker on macOS
    for code in re.split(r"\n(?=_\w+:|cfunc\.)", assembly):
        label = code.partition(":")[0]
        yield re.sub(r"^_?_ZN.*?\d([a-z_]\w*?)B\dv.*", r"\1", label), code


def loops(assembly):
    for function, code in functions(assembly):
        if re.search(r"movq\s+%rsp, %rbp|(mov|add)\s+x29, sp", code):  # a frame pointer
            code = re.sub(r"\(%rbp(?=\))|\[x29", r"\g<0> of the stack", code)
        for block in re.split(r"\n(?=\.?L\w+:)", code):
            label, _, body = block.partition(":")
            lines = [line.strip() for line in body.splitlines()]
            ends = [i for i, line in enumerate(lines) if re.split(r"[\s,]+", line)[-1] == label]
            if ends:
                yield Loop(function, tuple(lines[: ends[-1] + 1]))


PRODUCTS = {
    "forward": ("multiply_keys", "add_values"),
    "decode": ("add_values",),
    "backward": ("multiply_keys", "add_to_key_tile", "add_to_query_tile"),
}


def sums_of(tile, function):
    """How many sums the loops of a product keep. Along the head dimension, as many registers as divide it well."""
    if function.endswith("_tile"):
        return tile.rows * (1 << (tile.vectors.bit_length() - 1))
    return tile.rows * tile.vectors


STACK = re.compile(r"%rsp|\[sp|of the stack")


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize("cpu", TARGETS)
def test_products_stay_in_wide_registers(cpu, kernel):
    """The loops over k with a full tile of sums: nothing but wide FMAs, on enough registers, none of them spilled."""
    target = TARGETS[cpu]
    tile, assembly = target.tile, assembly_for(target, kernel)
    for function in PRODUCTS[kernel]:
        sums = 8 if kernel == "decode" else sums_of(tile, function)
        full = [x for x in loops(assembly) if x.function.endswith(function)]
        full = [x for x in full if len(x.multiplications) >= 2 * sums]  # two steps a turn
        assert full, f"{function} has no loop of {sums} sums"
        if tile.fma:
            assert max(len(x.sums) for x in full) >= sums
        for loop in full:
            code, count = "\n".join(loop.lines), len(loop.multiplications)
            assert all(re.search(LANES[tile.bits], line) for line in loop.multiplications), code
            # without FMA a product takes a register of its own, which 16 don't always have
            assert len(loop.where(STACK)) <= (0 if tile.fma else count / 4), code
            # on ARM a broadcast takes the place of an FMA; multiplying "by element" is free
            if kernel == "forward":
                assert len(loop.where(r"^(ld1r|dup)")) <= count / 16, code


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_operation_becomes_a_library_call(target, kernel):
    """16-bit formats in and out without F16C, exp2, rounding: everything is arithmetic that each target has."""
    assert not LIBRARY_CALL.findall(assembly_for(target, kernel))


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_float32_stays_float32(target, kernel):
    """A literal that Numba takes for a float64 would double the time of what it meets."""
    assembly = assembly_for(target, kernel)
    inner = {"forward": "scores_to_weights", "decode": "weigh_row", "backward": "score_gradients"}[kernel]
    products = tuple(PRODUCTS[kernel])
    checked = [code for name, code in functions(assembly) if name.endswith((inner, *products))]
    formats = 2 + target.tile.half if kernel == "decode" else 1  # a stage for each that is read as it is stored
    assert len(checked) == 1 + len(products) * formats
    for code in checked:
        assert len(MULTIPLY.findall(code)) >= 6
        assert not DOUBLE.findall(code), code


def test_library_calls_are_recognised():
    calls = "\tcallq\tfmaf\n\tbl\t_exp2f\n\tmovabsq\t$__gnu_h2f_ieee, %rax\n\tcallq\t__truncsfhf2\n\tb\t__extendhfsf2\n"
    assert len(LIBRARY_CALL.findall(calls)) == 5
    assert (
        len(DOUBLE.findall("\tcvtss2sd\t%xmm0, %xmm0\n\tvmulpd\t%ymm0\n\tfcvt\td0, s0\n\tfmul.2d\tv0, v1, v2\n")) == 4
    )
    assert not LIBRARY_CALL.findall("\tvfmadd231ps\t%ymm1, %ymm2, %ymm0\n\tfmul\tv0.4s, v1.4s, v2.4s\n")


# ---- lesser x86 CPUs than this one: the real kernels

LESSER = {
    "haswell": ("+sse4.2,+avx,+avx2,+fma", {"avx2", "fma"}),
    "x86-64": ("+sse2", {"sse2"}),
}


def compact_cases():
    """Test ids that meet every rule in float32 and in float64, every dtype, odd head dimensions and tails."""
    names = [f"D{dim}-{dtype}" for dim in (1, 40, 64, 96) for dtype in DTYPES]
    names += [f"113x203-{causal}-{dtype}" for causal in ("causal", "top-left") for dtype in DTYPES]
    names += ["gqa-8/2", "gqa-32/4-many-keys", "hidden-rows-causal", "rows-of-many-sizes", "2x2100-decode"]
    names += [f"nan-{place}-{dtype}" for place in ("v300", "hidden") for dtype in DTYPES]
    known = {case.name for case in CASES}
    assert known.issuperset(names)
    rule_names, met = [], set()
    for case in RULE_CASES:
        new = {(rule, case.dtype == FLOAT64) for rule in case.about} - met
        if new:
            met |= new
            rule_names.append(case.name)
    yield from (f"tests/test_conformance.py::TestCpu::test_case[{name}]" for name in names)
    yield from (f"tests/test_conformance.py::TestCpu::test_rule_case[{name}]" for name in rule_names)
    affordable = [case.name for case in test_gradient.GRADIENT_CASES if case.cost <= test_gradient.TestCpu.max_cost]
    differentiated = {name for name, count in Counter(affordable).items() if count == 1}  # pytest numbers the others
    in_float32 = [name for name in (*names, *rule_names) if name in differentiated and "float64" not in name]
    yield from (f"tests/test_gradient.py::TestCpu::test_case[{name}]" for name in in_float32)


@pytest.mark.skipif(not llvm.get_process_triple().startswith("x86_64"), reason="runs x86-64 code")
@pytest.mark.parametrize("cpu", LESSER)
def test_lesser_cpu_conforms(cpu, tmp_path):
    features, needed = LESSER[cpu]
    host = llvm.get_host_cpu_features()
    if not all(host.get(name) for name in needed):
        pytest.skip(f"this CPU hasn't {needed}")
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "FLASH_NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }

    def run(*command):
        got = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert got.returncode == 0, got.stdout + got.stderr
        return got.stdout

    tile = choose_register_tile(LINUX_X86, features)
    assert run(
        "-c", "from flash_numba.cpu.ir.registers import REGISTER_TILE; print(tuple(REGISTER_TILE))"
    ).strip() == str(tuple(tile))
    ids = list(compact_cases())
    formats = ["tests/test_one_source.py", "-k", "TestCpu or exp2 or 16_bit"]
    out = run("-m", "pytest", "-W", "error", *ids, *formats)
    assert int(re.search(r"(\d+) passed", out)[1]) > len(ids)
