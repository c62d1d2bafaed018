"""Kernels broken on purpose: what the interpreter is there to find, it finds.

Each mutant is the PTX of a real kernel with one instruction changed, as a slip in the source would change it. It has to
be caught, by a check of the interpreter or by a result that isn't the oracle's; the kernel as it is has to pass.
"""

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda isn't installed")

from cuda_ptx import Interpreted, attend, eager_limit
from ptx import PTXError

from flash_numba import reference
from flash_numba.gpu import decode, tensorcore, tile

pytestmark = pytest.mark.cuda


class Call(NamedTuple):
    """A call with what is right, and how far off a result may be."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    options: dict
    out: np.ndarray
    lse: np.ndarray
    limit: np.ndarray

    def is_right(self, out: np.ndarray, lse: np.ndarray) -> bool:
        with np.errstate(invalid="ignore"):
            near = np.abs(out.astype(np.float64) - self.out) <= self.limit
            near_lse = np.abs(lse - self.lse) <= 1e-5
        out_right = near | (np.isnan(out) & np.isnan(self.out)) | (out == self.out)
        lse_right = near_lse | (np.isnan(lse) & np.isnan(self.lse)) | (lse == self.lse)
        return bool(out_right.all() and lse_right.all())


def make_call(rows: int, keys: int, dim: int, dtype: type, special: bool = False, **options) -> Call:
    """special: with NaN and infinities, which send the kernel through its careful ways."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((1, 1, rows, dim), *2 * [(1, 1, keys, dim)]))
    if special:
        v[..., keys // 2, 3], v[..., keys - 3, 5] = np.nan, np.inf
        q[..., rows // 3, 0] = -np.inf
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
    limit = np.full(out.shape, 1e-5) if dtype is np.float32 else eager_limit(np.dtype(dtype), out, q, k, v, **options)
    return Call((q, k, v), options, out, lse, limit)


# ---- changes


class Mutant(NamedTuple):
    name: str
    place: re.Match  # in the PTX
    replacement: str

    def __call__(self, ptx: str) -> str:
        assert ptx[self.place.start() : self.place.end()] == self.place[0]
        return ptx[: self.place.start()] + self.replacement + ptx[self.place.end() :]


class Code(NamedTuple):
    """PTX, and the lines of it that the calls come to."""

    ptx: str
    lines: set[int]


def line_of(ptx: str, place: re.Match) -> int:
    return ptx.count("\n", 0, place.start()) + 1


def places(code: Code, pattern: str, count: int | None = None) -> list[re.Match]:
    """Where an instruction stands that is executed; `count` of the places, spread evenly, or all of them."""
    found = [place for place in re.finditer(pattern, code.ptx) if line_of(code.ptx, place) in code.lines]
    assert found, f"no {pattern} in the kernel"
    if count is None or count >= len(found):
        return found
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def mutants(
    code: Code, name: str, pattern: str, change: str | Callable[[re.Match], str], count: int | None = None
) -> Iterator[Mutant]:
    for place in places(code, pattern, count):
        line = line_of(code.ptx, place)
        replacement = place.expand(change) if isinstance(change, str) else change(place)
        yield Mutant(f"{name}, line {line}", place, replacement)


REGISTERS = r"\{(%\w+), ?(%\w+), ?(%\w+), ?(%\w+)\}"
MMA = rf"(mma\.sync\.\S+)\s+{REGISTERS}, {REGISTERS}, \{{(%\w+), ?(%\w+)\}}, {REGISTERS};"


SYNCHRONISATION = ("a barrier dropped", "a warp's barrier dropped", "a wait")


def synchronisation(code: Code) -> Iterator[Mutant]:
    """Each barrier, wait and commit left out, one at a time."""
    yield from mutants(code, "a barrier dropped", r"bar\.sync\s+0;", "")
    if "bar.warp.sync" in code.ptx:
        yield from mutants(code, "a warp's barrier dropped", r"bar\.warp\.sync\s+-1;", "")
    if "cp.async" in code.ptx:
        weaker = r"wait_group\s+(\d);"
        yield from mutants(code, "a wait dropped", r"cp\.async\.wait_group\s+\d;", "")
        yield from mutants(code, "a wait for one group less", weaker, lambda it: f"wait_group {int(it[1]) + 1};")
        yield from mutants(code, "a commit dropped", r"cp\.async\.commit_group;", "")


def of_tensor_cores(code: Code) -> Iterator[Mutant]:
    yield from mutants(code, "A's middle registers exchanged", MMA, mma(a=(6, 8, 7, 9)), 2)
    yield from mutants(code, "B's registers exchanged", MMA, mma(b=(11, 10)), 2)
    yield from mutants(code, "sums in exchanged registers", MMA, mma(d=(3, 2, 4, 5)), 2)
    yield from mutants(code, "rows 8 on left out", MMA, mma(a=(6, 6, 8, 8)), 2)
    yield from mutants(code, "the other 16-bit format", r"(mma\S+)\.f16\.f16\.f32", r"\1.bf16.bf16.f32", 2)
    yield from mutants(code, "a matrix loaded without .trans", r"(ldmatrix\S+)\.trans", r"\1", 2)
    yield from mutants(code, "a matrix loaded with .trans", r"(ldmatrix\S+\.x4)\.shared", r"\1.trans.shared", 2)
    yield from mutants(
        code, "packed halves exchanged", r"(cvt\.rn\.f16x2\S+\s+%\w+), (%\w+), (%\w+);", r"\1, \3, \2;", 2
    )
    yield from mutants(code, "a wrong shuffle distance", r"(shfl\.sync\.bfly\.b32\s+\S+ %\w+), %\w+,", r"\1, 4,", 2)
    copy = r"(cp\.async\.cg\.shared\.global\s+)\[(%\w+)\], \[(%\w+)\], 16, (%\w+);"
    yield from mutants(code, "a copy's bound left out", copy, r"\1[\2], [\3], 16;", 4)
    yield from mutants(code, "a copy from 16 bytes on", copy, r"\1[\2], [\3+16], 16, \4;", 2)
    yield from mutants(code, "a copy to 16 bytes on", copy, r"\1[\2+16], [\3], 16, \4;", 2)
    yield from mutants(code, "a matrix from 16 bytes on", r"(ldmatrix[^[]*)\[(%\w+)\]", r"\1[\2+16]", 2)
    weight = r"(ex2\.approx\.ftz\.f32\s+%\w+), (%\w+);"
    yield from mutants(code, "a weight twice as large", weight, r"add.f32 \2, \2, 0f3F800000; \1, \2;", 2)


def of_threads(code: Code) -> Iterator[Mutant]:
    """Of the kernels without tensor cores."""
    yield from mutants(code, "a tile stored elsewhere", r"(st\.shared\S+\s+)\[(%\w+)([^]]*)\]", aside, 4)
    yield from mutants(code, "a product left out", r"fma\.rn\.f32\s+(%\w+), %\w+, %\w+, (%\w+);", r"mov.f32 \1, \2;", 4)


def aside(place: re.Match) -> str:
    """16 bytes beyond."""
    offset = int(place[3] or "0") + 16
    return f"{place[1]}[{place[2]}+{offset}]"


def mma(d=(2, 3, 4, 5), a=(6, 7, 8, 9), b=(10, 11), c=(12, 13, 14, 15)):
    """An mma whose registers are these groups of the match."""

    def change(place: re.Match) -> str:
        lists = (", ".join(place[i] for i in group) for group in (d, a, b, c))
        return f"{place[1]} {', '.join(f'{{{one}}}' for one in lists)};"

    return change


def unmutated(module: ModuleType, calls: list[Call]) -> Code:
    """The kernel's PTX, which passes every call."""
    texts, lines = set(), set()
    for call in calls:
        place = Interpreted(module)
        assert call.is_right(*attend(place, *call.arrays, return_lse=True, **call.options))
        texts.add(place.ptx)
        lines |= place.counts.lines
    (ptx,) = texts
    return Code(ptx, lines)


def is_caught(module: ModuleType, calls: list[Call], mutant: Mutant) -> bool:
    for call in calls:
        try:
            result = attend(Interpreted(module, mutant), *call.arrays, return_lse=True, **call.options)
        except PTXError:
            return True
        if not call.is_right(*result):
            return True
    return False


def survivors(module: ModuleType, calls: list[Call], *kinds: Callable[[Code], Iterator[Mutant]]) -> Iterator[str]:
    """The mutants that nothing notices."""
    code = unmutated(module, calls)
    for kind in kinds:
        for mutant in kind(code):
            if not is_caught(module, calls, mutant):
                yield mutant.name


def assert_caught(surviving: Iterator[str], spare: int) -> None:
    """All but so many barriers and waits that order nothing in these calls which others leave open."""
    names = list(surviving)
    assert not [name for name in names if not name.startswith(SYNCHRONISATION)]
    assert len(names) <= spare, names


def test_mutants_of_the_tensor_core_kernel_are_caught():
    calls = [
        make_call(128, 200, 64, np.float16, causal=True, sinks=np.array([0.5])),
        # without a mask, as its -inf would turn errors into NaN, which sends the kernel through its careful way
        make_call(128, 128, 64, np.float16, sinks=np.array([0.5])),
        make_call(3, 3, 64, np.float16),
        make_call(128, 140, 64, np.float16, special=True, scale=-0.1, window=(90, 40), sinks=np.array([0.5])),
    ]
    # Spare: the first barrier of each two with which a warp writes its rows out; and wait and barrier behind the last
    # block of keys, as nothing is under way then.
    assert_caught(survivors(tensorcore, calls, synchronisation, of_tensor_cores), spare=7)


def test_mutants_of_the_tile_kernel_are_caught():
    calls = [
        make_call(128, 128, 16, np.float32),
        make_call(40, 150, 16, np.float32, causal=True),
        make_call(40, 40, 16, np.float32, special=True),
    ]
    assert_caught(survivors(tile, calls, synchronisation, of_threads), spare=2)


def test_mutants_of_decode_are_caught():
    calls = [make_call(4, 600, 16, np.float32, causal=True), make_call(4, 40, 16, np.float32, special=True)]
    # One of the spare ones orders the states in global memory before the counter, which isn't tracked.
    assert_caught(survivors(decode, calls, synchronisation, of_threads), spare=4)
