"""Instructions that Numba has no name for, as inline PTX: tensor cores, and the copies and loads that feed them.

Numbers are as in the PTX ISA: a fragment is what one thread of a warp holds of a matrix,
16-bit elements two to an int32, the one with the lower index in the lower half.
"""

from llvmlite import ir
from numba import types

from .lanes import instruction

F32, I32, I64 = types.float32, types.int32, types.int64
LLVM = {F32: ir.FloatType(), I32: ir.IntType(32), I64: ir.IntType(64)}
CONSTRAINT = {F32: "f", I32: "r", I64: "l"}


def ptx(template, results=(), operands=(), memory=True):
    """Decorates a function whose parameters are the operands; its results stand first among the template's $0, $1...

    memory: whether the instruction reads or writes memory, so that its place among others that do matters.
    """
    constraints = ["=" + CONSTRAINT[x] for x in results] + [CONSTRAINT[x] for x in operands]
    constraints += ["~{memory}"] * memory
    if not results:
        kind, llvm_kind = types.void, ir.VoidType()
    elif len(results) == 1:
        kind, llvm_kind = results[0], LLVM[results[0]]
    else:
        kind, llvm_kind = types.UniTuple(results[0], len(results)), ir.LiteralStructType([LLVM[x] for x in results])

    def emit(builder, result, given, *values):
        function = ir.FunctionType(llvm_kind, [LLVM[x] for x in operands])
        value = builder.call(ir.InlineAsm(function, template, ",".join(constraints), side_effect=memory), values)
        if len(results) < 2:
            return None if not results else value
        values = ir.Constant(ir.ArrayType(LLVM[results[0]], len(results)), ir.Undefined)
        for i in range(len(results)):
            values = builder.insert_value(values, builder.extract_value(value, i), i)
        return values

    return instruction(lambda *given: (kind, tuple(operands)), emit)


# -- matrices ----------------------------------------------------------------------------------------------------------

MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)


@ptx(MMA.format("f16"), [F32] * 4, [I32] * 6 + [F32] * 4, memory=False)
def mma_float16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """A (16 rows, 16) times B (16, 8 columns) plus C, accumulated in float32, by one warp.

    With g = lane // 4 and t = lane % 4, a thread holds of A the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8) and (g + 8,
    2t + 8) and their right neighbours; of B the pairs (2t, g), (2t + 8, g) and the ones below; of C and the result
    (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
    """
    raise NotImplementedError


@ptx(MMA.format("bf16"), [F32] * 4, [I32] * 6 + [F32] * 4, memory=False)
def mma_bfloat16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """`mma_float16` for bfloat16."""
    raise NotImplementedError


LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{$0, $1, $2, $3}}, [$4];"


@ptx(LDMATRIX.format(""), [I32] * 4, [I32])
def load_matrices(address):
    """Four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives where row i % 8 of matrix i // 8 is.

    A thread gets (lane // 4, 2 (lane % 4)) of each and its right neighbour: fragments of A, and of B where B's columns
    lie in memory as rows.
    """
    raise NotImplementedError


@ptx(LDMATRIX.format(".trans"), [I32] * 4, [I32])
def load_transposed_matrices(address):
    """`load_matrices` with each matrix transposed: fragments of B where its rows lie in memory as rows."""
    raise NotImplementedError


@ptx("cvt.rn.f16x2.f32 $0, $2, $1;", [I32], [F32, F32], memory=False)
def pack_float16(low, high):
    """Two float32 rounded to nearest even as a pair of float16."""
    raise NotImplementedError


@ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", [I32], [F32, F32], memory=False)
def pack_bfloat16(low, high):
    """Two float32 rounded to nearest even as a pair of bfloat16."""
    raise NotImplementedError


# -- shared memory, by 32-bit addresses --------------------------------------------------------------------------------


def _shared_address(context, builder, result, given, array):
    data = context.make_array(given[0])(context, builder, array).data
    pointer = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
    return builder.ptrtoint(pointer, ir.IntType(32))


@instruction(lambda array: (I32, (array,)), _shared_address)
def shared_address(array):
    """Where an array in shared memory starts."""
    raise NotImplementedError


@ptx("ld.shared.b32 $0, [$1];", [I32], [I32])
def load_shared(address):
    """The int32 at an address."""
    raise NotImplementedError


@ptx("st.shared.b32 [$0], $1;", [], [I32, I32])
def store_shared(address, value):
    """An int32 to an address."""
    raise NotImplementedError


@ptx("ld.shared.b64 $0, [$1];", [I64], [I32])
def load_shared_long(address):
    """The int64 at an address."""
    raise NotImplementedError


@ptx("st.shared.b64 [$0], $1;", [], [I32, I64])
def store_shared_long(address, value):
    """An int64 to an address."""
    raise NotImplementedError


@ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [I32] * 4, [I32])
def load_shared_four(address):
    """The four int32 at an address that is a multiple of 16."""
    raise NotImplementedError


# -- copies that run while the thread goes on --------------------------------------------------------------------------


@ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [I32, I64, I32])
def copy_async(shared, address, count):
    """16 bytes from global to shared memory: `count` of them, 0 to 16, and zeros. With 0 the address isn't read."""
    raise NotImplementedError


@ptx("cp.async.commit_group;")
def commit_copies():
    """Make a group of the copies started since the last one."""
    raise NotImplementedError


@ptx("cp.async.wait_group 0;")
def wait_for_copies():
    """Wait for all groups of this thread. Others' copies are there only after a barrier."""
    raise NotImplementedError


@ptx("cp.async.wait_group 1;")
def wait_for_all_but_last_copies():
    """Wait for all groups of this thread except the newest."""
    raise NotImplementedError


# What is computed from these is computed anew, not kept in registers from an earlier place or moved out of a loop.


@ptx("mov.u32 $0, %ctaid.x;", [I32])
def block_index():
    """The thread block's number."""
    raise NotImplementedError


@ptx("mov.u32 $0, %tid.x;", [I32])
def thread_index():
    """The thread's number in its block."""
    raise NotImplementedError


# -- global memory -----------------------------------------------------------------------------------------------------


@ptx("st.global.v2.f32 [$0], {$1, $2};", [], [I64, F32, F32])
def store_pair(address, a, b):
    """Two float32 to an address that is a multiple of 8."""
    raise NotImplementedError


@ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [I64] + [I32] * 4)
def store_four(address, a, b, c, d):
    """Four int32 to an address that is a multiple of 16."""
    raise NotImplementedError


# -- registers ---------------------------------------------------------------------------------------------------------


@ptx("mov.b64 $0, $1;", [I64], [I64])
def fresh(x):
    """The same number, of which the compiler doesn't know where it comes from.

    What is derived from it in a loop is computed there, instead of once before it and held in registers throughout.
    """
    return x
