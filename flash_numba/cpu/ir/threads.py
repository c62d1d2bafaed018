"""What threads share: counters, flags, and calls of a kernel by its address."""

import os

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import I32, I64


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
