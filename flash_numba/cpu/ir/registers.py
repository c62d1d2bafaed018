"""How matrix products fill the vector registers of this machine's CPU."""

from typing import NamedTuple

from numba.core import types
from numba.core.registry import cpu_target


class RegisterTile(NamedTuple):
    """How a matrix product fills the vector registers: `rows` x `vectors` accumulators of `bits` each."""

    bits: int
    rows: int
    vectors: int
    fma: bool
    half: bool = True  # whether an instruction converts float16: F16C, which comes with AVX2, or NEON's

    def register(self, dtype: types.Type) -> int:
        """Lanes in one vector register."""
        return self.bits // dtype.bitwidth

    def width(self, dtype: types.Type) -> int:
        """Query rows in one register tile."""
        return self.vectors * self.register(dtype)


def choose_register_tile(triple: str, features: str) -> RegisterTile:
    """The register tile for a CPU: the accumulators, one row of B and a broadcast have to fit in its registers."""
    have = set(features.split(","))
    if triple.startswith(("aarch64", "arm64")):
        # 32 registers. Four rows, as LLVM then multiplies by an element of a register; with more it broadcasts every
        # other number of A in the keys' product by ld1r, which on Neoverse V2 and others also takes a slot of the FMA
        # pipes: 6 for 48 FMAs at 6 x 4, which spills on a CPU that LLVM doesn't know, too. 4 x 6 spills on all.
        return RegisterTile(128, 4, 5, True)
    if "+avx512f" in have:
        # 32 registers. On Zen 4, whole forward at D = 64 and 128, in GFLOP/s of 117: 103 and 106. 8 x 3 reaches 97 and
        # 99, 6 x 4 99 and 105, 12 x 2 86 and 89.
        return RegisterTile(512, 8, 2, True)
    if {"+avx2", "+fma"} <= have:
        return RegisterTile(256, 4, 3, True)  # 16 registers
    # 16 registers, and products need some: 33 GFLOP/s on Zen 4 at D = 64 and 128, with a spill for 4 multiplications;
    # 4 x 3 with twice as many reaches 29, 4 x 2 with next to none 30, as broadcasts take two instructions here.
    return RegisterTile(128, 2, 4, False, half=False)


_triple, CPU_NAME, _features = cpu_target.target_context.codegen().magic_tuple()
REGISTER_TILE = choose_register_tile(_triple, _features)
