"""How kernel code is compiled: float semantics, and helpers that cost no more than their part of the kernel.

Numba optimises every function on its own, and emits machine code for it, before it does both again for the caller that
all helpers are linked into. Kernels here are dozens of small functions called from one another only, so that work is
wasted: `HELPER` functions are compiled to plain LLVM IR and optimised once, inside their kernel. That takes the first
float32 call from 9 to 5 seconds on a cold cache, for the same code.
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering

# Without "nnan" and "ninf", which would make x == -inf and x != x false; without "reassoc", so that the same bits come
# out of every copy of a formula.
MATH = {"fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy"}


class LinkedLibrary(JITCodeLibrary):
    """Code to be linked into another library: not linked, optimised or turned into machine code by itself."""

    def add_llvm_module(self, ll_module):
        self._final_module.link_in(ll_module)

    def finalize(self):
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._finalized = True

    def with_callees(self):
        """This library and all that its code calls, directly or not, for the kernel to link each of them once."""
        libraries = {self: None}
        for library in self._linking_libraries:
            libraries |= dict.fromkeys(library.with_callees() if isinstance(library, LinkedLibrary) else [library])
        return list(libraries)


@register_pass(mutates_CFG=False, analysis_only=False)
class OfferHelper(LoweringPass):
    """Make the function known to its callers, which Numba does along with machine code."""

    _name = "flash_numba_offer_helper"

    def __init__(self):
        super().__init__()

    def run_pass(self, state):
        # Numba knows a compiled function by the C function to call from Python. A helper has none: any other C function
        # of its own will do.
        own = [state.cr.fndesc.qualname].index
        state.cr = state.cr._replace(cfunc=own)
        state.targetctx.insert_user_function(own, state.cr.fndesc, state.library.with_callees())
        return True


# Passes of Numba's that find nothing to do in plain functions of numbers and pointers: 0.3 s a kernel. (IR legalization
# marks where variables end, for reference counts, which these functions don't have.)
IDLE = {
    "WithLifting",
    "GenericRewrites",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineClosureLikes",
    "InlineInlinables",
    "InlineOverloads",
    "FindLiterallyCalls",
    "LiteralPropagationSubPipelinePass",
    "LiteralUnroll",
    "NopythonRewrites",
    "NoPythonSupportedFeatureValidation",
    "AnnotateTypes",
    "DumpParforDiagnostics",
    "IRLegalization",
}


class HelperCompiler(Compiler):
    def define_pipelines(self):
        state = self.state
        state.flags.no_compile = True
        if state.library is None:
            state.library = LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.passes = [each for each in passes.passes if each[0].__name__ not in IDLE]
        passes.add_pass_after(OfferHelper, NativeLowering)
        passes.finalize()
        return [passes]


@register_pass(mutates_CFG=False, analysis_only=False)
class KeepApart(LoweringPass):
    """Keep LLVM from inlining the function."""

    _name = "flash_numba_keep_apart"

    def __init__(self):
        super().__init__()

    def run_pass(self, state):
        state.library.get_function(state.cr.fndesc.llvm_func_name).add_function_attribute("noinline")
        return True


class StageCompiler(HelperCompiler):
    def define_pipelines(self):
        (passes,) = super().define_pipelines()
        passes.add_pass_after(KeepApart, OfferHelper)
        passes.finalize()
        return [passes]


# Functions called from compiled code only: also without entries for Python and C.
HELPER = MATH | {
    "pipeline_class": HelperCompiler,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "no_rewrites": True,
    "_nrt": False,  # nothing is allocated, so nothing is counted
}
# Those that loop over a tile. Each is a function of its own in the kernel too: inlined into one large body, their
# constants and pointers no longer fit the registers, which costs 6 % of the speed.
STAGE = HELPER | {"pipeline_class": StageCompiler}
