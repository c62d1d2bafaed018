"""What the tensor-core kernel takes of a multiprocessor, assembled by `ptxas`: registers, spills, shared memory.

Registers decide how many thread blocks run side by side, and one spilled in the loop over the keys costs more than any
rule. So the figures are pinned: a change that moves them shows here, and what it gains goes into the table.
"""

import re

import pytest

pytest.importorskip("numba_cuda", reason="the extra test-cuda isn't installed")

from cuda_ptx import ptx_of

from flash_numba.dtypes import BFLOAT16, BOOL, FLOAT16
from flash_numba.gpu.compile import assemble, find_assembler
from flash_numba.gpu.rules import Rules
from flash_numba.gpu.tensor_tiling import SIZES, choose_tiling
from flash_numba.gpu.tensorcore import make_kernel
from flash_numba.gpu.tiling import shared_limit

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(find_assembler() is None, reason="no ptxas")]

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
PLAIN, EVERY = Rules(), Rules(softcap=True, alibi=True, bias=BFLOAT16, mask=BOOL, dropout=True)
MOST = {64: 168, 128: 255}  # registers: three thread blocks of four warps a multiprocessor, and two

# Registers of a thread and bytes of shared memory of a thread block, by head dimension; ptxas 13.0.88, bfloat16.
TABLE = {
    (64, PLAIN, AMPERE): (167, 36864),
    (96, PLAIN, AMPERE): (232, 53248),
    (128, PLAIN, AMPERE): (255, 69632),
    (192, PLAIN, AMPERE): (194, 102400),
    (256, PLAIN, AMPERE): (224, 135168),
    (64, PLAIN, HOPPER): (168, 36864),
    (96, PLAIN, HOPPER): (234, 53248),
    (128, PLAIN, HOPPER): (255, 69632),
    (192, PLAIN, HOPPER): (200, 102400),
    (256, PLAIN, HOPPER): (229, 135168),
    (64, PLAIN, BLACKWELL): (168, 36864),
    (96, PLAIN, BLACKWELL): (246, 53248),
    (128, PLAIN, BLACKWELL): (255, 69632),
    (192, PLAIN, BLACKWELL): (198, 102400),
    (256, PLAIN, BLACKWELL): (227, 135168),
    (64, EVERY, HOPPER): (205, 36864),
    (96, EVERY, HOPPER): (200, 53248),
    (128, EVERY, HOPPER): (231, 69632),
}


def resources(kernel, cc):
    """The kernel's PTX, registers, and bytes of stack, spilled stores and spilled loads."""
    ptx = ptx_of(kernel, cc)
    log = assemble(ptx, cc).log
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return ptx, int(re.search(r"Used (\d+) registers", log)[1]), tuple(map(int, spilled.groups()))


def name(x):
    return {PLAIN: "plain", EVERY: "every rule", AMPERE: "sm_80", HOPPER: "sm_90", BLACKWELL: "sm_100"}.get(x, f"D={x}")


@pytest.mark.parametrize(("dim", "rules", "cc"), TABLE, ids=name)
def test_resources(dim, rules, cc):
    kernel = make_kernel(choose_tiling(BFLOAT16, dim, rules, cc), rules)
    ptx, registers, spilled = resources(kernel, cc)
    assert spilled == (0, 0, 0)
    assert ".local" not in ptx
    assert not re.search(r"\tcall\b|\{ // callseq", ptx), "a function call in the kernel"
    assert registers <= MOST.get(dim, 255) or rules is not PLAIN
    assert (registers, kernel.shared_bytes) == TABLE[dim, rules, cc]


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("rules", [PLAIN, EVERY], ids=name)
@pytest.mark.parametrize("dim", SIZES)
def test_a_thread_block_fits_the_shared_memory_of_every_gpu(dim, rules, cc):
    tiling = choose_tiling(FLOAT16, dim, rules, cc)
    assert tiling.shared_bytes <= shared_limit(cc)
    assert tiling.rows % (16 * tiling.warps) == 0
