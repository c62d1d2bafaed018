"""The tile kernel and the decode kernel without a GPU: in Numba's simulator, assembled, and bank by bank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.cuda
pytest.importorskip("numba_cuda", reason="the extra cuda isn't installed")

from flash_numba.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64  # noqa: E402
from flash_numba.gpu import decode, tile, tiling  # noqa: E402
from flash_numba.gpu.compile import assemble, find_assembler, to_ptx  # noqa: E402
from flash_numba.gpu.decode_tiling import DecodeBlock, decode_tiling  # noqa: E402
from flash_numba.problem import PROBLEM  # noqa: E402

TESTS = Path(__file__).parent


def test_conformance_in_the_simulator():
    """In processes of their own, as Numba reads the environment once; two, as one would keep one core busy only."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-x", str(TESTS / "cuda_simulator.py"), "-k"]
    running = [
        subprocess.Popen(
            [*command, part], env=environment, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for part in ("test_rules", "not test_rules")
    ]
    said = [process.communicate()[0].decode() for process in running]
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-5000:]


# -- registers, spills, local memory, float64 --------------------------------------------------------------------------

# Registers of a thread at most, and thread blocks that have room on a multiprocessor with them.
RESOURCES = {
    ("tile", 64, FLOAT32, 1, (8, 0)): (168, 3),
    ("tile", 128, FLOAT32, 1, (8, 0)): (255, 2),
    ("decode", 64, FLOAT32, 1, (9, 0)): (168, 3),
    ("decode", 128, FLOAT16, 4, (9, 0)): (168, 3),
    ("decode", 128, BFLOAT16, 8, (8, 0)): (255, 1),
}
# what converts scalars once, and compares those that may be absent with 0
SCALAR_FLOAT64 = {"ld.global", "mov", "mul", "min", "max", "cvt.rn.f32", "setp.eq", "setp.neu", "rcp.rn"}


def problem_of(dim, form, group):
    problem = np.zeros((), PROBLEM)
    problem["dim"] = problem["value_dim"] = dim
    for name in "qkv":
        problem[f"{name}_format"] = form
    problem["heads"] = problem["k_group"] = problem["v_group"] = group
    problem["batch"] = problem["queries"] = problem["out"] = 1
    return problem


@pytest.mark.parametrize("name", RESOURCES, ids=lambda name: "-".join(map(str, name)))
def test_kernels_stay_in_registers(name):
    module, dim, form, group, cc = name
    kernel = {"tile": tile, "decode": decode}[module].specialise(problem_of(dim, form, group), cc)
    registers, blocks = RESOURCES[name]
    assert kernel.blocks == blocks
    ptx = to_ptx(kernel, cc)
    float64 = {op for op in re.findall(r"\s([a-z][\w.]*)\.f64\s", ptx) if not op.startswith((".", "ld.param"))}
    assert float64 <= SCALAR_FLOAT64, float64 - SCALAR_FLOAT64
    assert not re.search(r"\b(ld|st)\.local|\bcall\b", ptx)
    if find_assembler() is None:
        pytest.skip("no ptxas")
    for target in {cc, (9, 0)}:
        log = assemble(ptx, target).log
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
        assert int(re.search(r"Used (\d+) registers", log)[1]) <= registers


# -- shared memory: a warp's accesses of 4 bytes, and each quarter's of 16, meet no bank twice -------------------------


def conflicts(addresses, size):
    """How many times more than once some bank has to answer the threads of a warp, for accesses of `size` bytes."""
    worst = 0
    at_once = min(32, 128 // size)
    for first in range(0, 32, at_once):
        lines = {}
        for address in addresses[first : first + at_once]:
            for word in range(int(address) // 4, (int(address) + size) // 4):
                lines.setdefault(word % 32, set()).add(word)
        worst = max(worst, *(len(words) for words in lines.values()))
    return worst - 1


TILINGS = [
    tiling.tile_tiling(accumulator, thread_tile, *dims)
    for accumulator in (tiling.FLOAT32_ACCUMULATOR, tiling.FLOAT64_ACCUMULATOR)
    for thread_tile in tile.THREAD_TILES[accumulator.itemsize]
    for dims in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
]


@pytest.mark.parametrize(
    "of", TILINGS, ids=lambda of: f"{of.accumulator.real}-{of.dim}-{of.value_dim}-{of.thread_tile}"
)
def test_the_tile_kernel_meets_no_bank_twice(of):
    size, vector, threads_x = of.accumulator.itemsize, of.accumulator.vector, of.thread_tile.threads_x
    t = np.arange(32)
    ty, tx = t // threads_x, t % threads_x
    in_row, per_row = of.piece // vector, of.columns // vector
    accesses = {
        "Q": (ty * of.q_stride, 16),
        "K": (tx * of.k_stride, 16),
        "P": (ty * of.p_stride, 16),
        "V": (tx * vector, 16),
        "weights": (ty * of.p_stride + tx, size),
        "maxima": (ty * threads_x + tx, size),
        "maxima read": (ty * threads_x, 16),
        "output": (ty * of.out_stride + tx * vector, 16),
        "V stored": (t // per_row * of.columns + t % per_row * vector, 16),
    }
    if of.piece % (8 * vector) == 0:  # else a row of K doesn't end where a quarter of a warp does
        accesses["K stored"] = (t // in_row * of.k_stride + t % in_row * vector, 16)
    assert {name: conflicts(at * size, width) for name, (at, width) in accesses.items()} == dict.fromkeys(accesses, 0)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("form", [FLOAT16, FLOAT32, FLOAT64])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_decode_meets_no_bank_twice(rows, form, dim):
    accumulator = tiling.FLOAT64_ACCUMULATOR if form == FLOAT64 else tiling.FLOAT32_ACCUMULATOR
    of = decode_tiling(accumulator, DecodeBlock(rows, 64), dim, dim, (form, form))
    size, t = accumulator.itemsize, np.arange(32)
    of_row = 64 // rows
    accesses = {
        "K": (t * of.k_stride, 16),
        "V": (t // of.across * accumulator.vector * of.v_stride + t % of.across * 16, 16),
        "scores": (t * size, size),
        "scores of a row": ((t // of_row * of.score_stride + t % of_row) * size, size),
    }
    if of.across % 8:  # else a quarter of a warp has two keys
        del accesses["V"]
    assert {name: conflicts(at, width) for name, (at, width) in accesses.items()} == dict.fromkeys(accesses, 0)
