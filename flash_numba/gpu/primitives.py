"""What the primitive operations of `ops.py` mean in a CUDA thread, and the formulas that kernels may call.

Under Numba's simulator the operations are those of `ops.py` themselves.
"""

import inspect

from .. import dropout, dtypes, geometry, ops, recurrence, scores
from . import SIMULATED
from .ir import lanes
from .ir.lanes import lane, larger, scalar  # noqa: F401  (what every kernel takes from here)

if not SIMULATED:
    from numba.cuda import extending


def formulas(module):
    """The functions that a module defines itself."""
    return [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]


def device(function):
    """Let kernels call a plain Python function; it is inlined there."""
    return function if SIMULATED else extending.register_jitable(forceinline=True)(function)


def install():
    """Tell numba-cuda what the operations are on lanes, and let kernels call the formulas."""
    lanes.register(ops.select, 3, lanes.select_lane, lanes.choose)
    lanes.register(ops.mul_high, 2, lanes.same_lane, lanes.multiply_high)
    lanes.register(ops.as_int, 1, *lanes.bits_as("int"))
    lanes.register(ops.as_float, 1, *lanes.bits_as("float"))
    # approximate to 2 ulp, subnormals to 0, -inf to 0, NaN to NaN
    lanes.register(ops.exp2, 1, lanes.float_lane, lanes.by_size("llvm.nvvm.ex2.approx.ftz.f", "__nv_exp2"))
    lanes.register(ops.log2, 1, lanes.float_lane, lanes.by_size("llvm.nvvm.lg2.approx.f", "__nv_log2"))
    lanes.register(ops.tanh, 1, lanes.float_lane, lanes.by_size("__nv_tanhf", "__nv_tanh"))
    # GPUs have an instruction for this formula
    lanes.register(dtypes.float16_to_float32, 1, lanes.half_lane, lanes.widen_half)

    modules = recurrence, scores, geometry, dtypes, dropout
    for formula in (ops.maximum, *(f for module in modules for f in formulas(module))):
        if formula is not dtypes.float16_to_float32:
            device(formula)


if not SIMULATED:
    install()
