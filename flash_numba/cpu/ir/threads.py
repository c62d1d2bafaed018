"""What threads share: counters, flags, and calls of a kernel by its address; and how a thread rounds."""

import os

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import I32, I64
from .registers import TRIPLE

# Bits of the register that says how a thread computes with floats: whether it takes subnormal numbers for 0, those that
# it reads and those that come out.
X86_FLUSHES, ARM_FLUSHES = 0x8040, 1 << 24


@intrinsic
def next_tile(typingctx, address):
    """Atomically add 1 to the integer at an address; the value before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), I64(1), "monotonic")

    return types.intp(types.intp), codegen


@intrinsic
def count_finished(typingctx, address):
    """`next_tile` that also makes everything written before visible to whoever takes a later one."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), I64(1), "acq_rel")

    return types.intp(types.intp), codegen


@intrinsic
def read_flag(typingctx, address):
    """Atomically read the integer at an address, which the compiler may not hoist out of a loop."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "monotonic", 8)

    return types.intp(types.intp), codegen


@intrinsic
def read_progress(typingctx, address):
    """`read_flag` after which everything is visible that was written before a `publish` of the value read."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.intp(types.intp), codegen


@intrinsic
def publish(typingctx, address, value):
    """Atomically write the integer at an address, after everything written before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def give_way(typingctx):
    """Let another thread have the processor, if one waits for it: there may be more threads than processors."""

    def codegen(context, builder, sig, args):
        if os.name == "posix":
            function = ir.FunctionType(I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_worker(typingctx, function, problem, parameters, scratch):
    """Call the C function `void f(int64, int64, int64)` at an address."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


def float_state(builder, new=None):
    """Read the thread's register of how floats are computed, as an int64, or write it; None on other CPUs."""
    call = builder.call
    if TRIPLE.startswith("x86"):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte])
        with builder.goto_entry_block():
            memory = builder.alloca(I32)
        if new is not None:
            builder.store(builder.trunc(new, I32), memory)
        name = "llvm.x86.sse.stmxcsr" if new is None else "llvm.x86.sse.ldmxcsr"
        call(cgutils.get_or_insert_function(builder.module, kind, name), [builder.bitcast(memory, byte)])
        return builder.zext(builder.load(memory), I64)
    if TRIPLE.startswith(("aarch64", "arm64")):
        if new is None:
            kind, arguments, name = ir.FunctionType(I64, []), [], "llvm.aarch64.get.fpcr"
        else:
            kind, arguments, name = ir.FunctionType(ir.VoidType(), [I64]), [new], "llvm.aarch64.set.fpcr"
        return call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
    return None


@intrinsic
def keep_subnormals(typingctx, keep):
    """Have the thread compute with subnormal numbers, or flush them to 0; what `restore_float_state` needs.

    A thread may have been told to flush them (`torch.set_flush_denormal`), and others not: results must not depend on
    which thread computes a tile.
    """

    def codegen(context, builder, sig, args):
        before = float_state(builder)
        if before is None:
            return I64(0)
        flushes = I64(X86_FLUSHES if TRIPLE.startswith("x86") else ARM_FLUSHES)
        kept, flushed = builder.and_(before, builder.not_(flushes)), builder.or_(before, flushes)
        float_state(builder, builder.select(args[0], kept, flushed))
        return before

    return types.intp(types.boolean), codegen


@intrinsic
def restore_float_state(typingctx, before):
    def codegen(context, builder, sig, args):
        float_state(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), codegen
