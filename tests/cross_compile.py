"""Compile a kernel for other CPUs: `python cross_compile.py OUTPUT KERNEL DTYPE TRIPLE CPU FEATURES [...]`.

Numba takes its target from the machine it runs on, so this gives `flash_numba.cpu.ir.registers` the first target's
name, from which the register tile follows, lets Numba write the kernel's LLVM IR, and runs the IR through Numba's own
passes and LLVM's code generator for each target. The assembly goes to OUTPUT/CPU.s.
"""

import re
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba import types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen


class Emitted(Exception):
    """All assembly is written: there is nothing to run."""


def target_machine(triple, cpu, features):
    """As Numba's JIT makes one for its own machine."""
    x86 = triple.startswith("x86")
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="static" if x86 else "default", codemodel="jitdefault", jit=True
    )


def retarget(text, triple, machine):
    """The same IR for another CPU.

    Numba's reference counting has been through this machine's code generator, which left its own intrinsics in it: only
    the declarations are kept, since kernels hardly call it.
    """
    text = re.sub(
        r"define [^\n]*@(NRT_(?:inc|dec)ref)\([^\n]*\{\n.*?\n\}", r"declare fastcc void @\1(ptr)", text, flags=re.S
    )
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    return module


def main(output, kernel, dtype, *targets):
    targets = list(zip(*[iter(targets)] * 3, strict=True))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    JITCPUCodegen.magic_tuple = lambda self: targets[0]

    import importlib

    from flash_numba.cpu.compile import MATH
    from flash_numba.cpu.ir import registers

    optimize = JITCodeLibrary._optimize_final_module

    def emit(library):
        text = str(library._final_module)
        if not re.search(r'define [^\n]*@"?cfunc\._ZN11flash_numba', text):  # of what the kernel calls, as it is
            optimize(library)
            return
        codegen = library._codegen
        for triple, cpu, features in targets:
            assert registers.choose_register_tile(triple, features) == registers.REGISTER_TILE, cpu
            machine = target_machine(triple, cpu, features)
            library._final_module = retarget(text, triple, machine)
            codegen._tm = machine  # which the passes ask for costs
            optimize(library)
            Path(output, f"{cpu}.s").write_text(machine.emit_assembly(library._final_module))
        raise Emitted

    JITCodeLibrary._optimize_final_module = emit
    function = getattr(importlib.import_module(f"flash_numba.cpu.{kernel}"), kernel)
    signature = types.void(types.intp, types.intp, types.CPointer(getattr(types, dtype)))
    try:
        CFunc(function, (signature.args, signature.return_type), locals={}, options=MATH).compile()
    except Emitted:
        return
    sys.exit("the kernel's module never came by")


if __name__ == "__main__":
    main(*sys.argv[1:])
