"""Loads, stores and addresses: rows of lanes, single registers, pointers to numbers and to records."""

from llvmlite import ir
from numba import from_dtype
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import I32, I64, LLVM_FLOAT, Lanes, broadcast_scalar, join, split, tile_lanes
from .registers import REGISTER_TILE

# -- rows of lanes -----------------------------------------------------------------------------------------------------


def registers_at(builder, lanes, pointer, row):
    """The addresses of the registers that hold row number `row` of a (rows, lanes) array."""
    first = builder.mul(row, I64(lanes.width))
    to = lanes.llvm().as_pointer()
    return [
        builder.bitcast(builder.gep(pointer, [builder.add(first, I64(p * lanes.register))]), to)
        for p in range(lanes.parts)
    ]


@intrinsic
def load(typingctx, pointer, row):
    """Row number `row` of an array of rows of lanes."""
    lanes = tile_lanes(pointer)

    def codegen(context, builder, sig, args):
        registers = []
        for address in registers_at(builder, lanes, *args):
            registers.append(builder.load(address))
            registers[-1].align = lanes.dtype.bitwidth // 8
        return join(builder, lanes, registers)

    return lanes(pointer, types.intp), codegen


@intrinsic
def store(typingctx, value, pointer, row):
    """Write row number `row` of an array of rows of lanes."""
    lanes = tile_lanes(pointer)

    def codegen(context, builder, sig, args):
        for address, part in zip(registers_at(builder, lanes, *args[1:]), split(builder, lanes, args[0]), strict=True):
            builder.store(part, address).align = lanes.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(lanes, pointer, types.intp), codegen


def exchange(builder, a, b, n, step):
    """Exchange the off-diagonal quarters of each square of 2 * step in two registers of n lanes."""
    low = [c if not c & step else n + c - step for c in range(n)]
    high = [c + step if not c & step else n + c for c in range(n)]
    return [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, n), order)) for order in (low, high)]


@intrinsic
def transpose_block(typingctx, to, to_stride, source, stride):
    """to[c * to_stride + r] = source[r * stride + c] for a register's square: log2 of its size shuffles each."""
    n = REGISTER_TILE.register(source.dtype)
    vector = ir.VectorType(LLVM_FLOAT[source.dtype], n)
    align = source.dtype.bitwidth // 8

    def codegen(context, builder, sig, args):
        to, to_stride, source, stride = args

        def at(pointer, stride, i):
            return builder.bitcast(builder.gep(pointer, [builder.mul(stride, I64(i))]), vector.as_pointer())

        rows = [builder.load(at(source, stride, r)) for r in range(n)]
        for row in rows:
            row.align = align
        step = 1
        while step < n:
            new = list(rows)
            for r in range(n):
                if not r & step:
                    new[r], new[r + step] = exchange(builder, rows[r], rows[r + step], n, step)
            rows = new
            step *= 2
        for c, row in enumerate(rows):
            builder.store(row, at(to, to_stride, c)).align = align
        return context.get_dummy_value()

    return types.void(to, types.intp, source, types.intp), codegen


# -- bytes -------------------------------------------------------------------------------------------------------------

BYTES = Lanes(types.int8, REGISTER_TILE.bits // 8, REGISTER_TILE.bits // 8)


@intrinsic
def bytes_of(typingctx, scalar):
    """One vector register of the same byte."""
    return BYTES(scalar), lambda context, builder, sig, args: broadcast_scalar(
        context, builder, sig.args[0], BYTES, args[0]
    )


@intrinsic
def load_bytes(typingctx, address):
    """One vector register of bytes."""

    def codegen(context, builder, sig, args):
        value = builder.load(builder.inttoptr(args[0], BYTES.llvm().as_pointer()))
        value.align = 1
        return value

    return BYTES(types.intp), codegen


@intrinsic
def swap_bytes(typingctx, x):
    """A scalar integer with its bytes in the other order."""

    def codegen(context, builder, sig, args):
        return builder.call(builder.module.declare_intrinsic("llvm.bswap", [args[0].type]), args)

    return x(x), codegen


# -- pointers, addresses, records --------------------------------------------------------------------------------------


@intrinsic
def pointer_like(typingctx, like, address):
    """An address as a pointer of the same type as `like`."""
    return like(like, types.intp), lambda context, builder, sig, args: builder.inttoptr(args[1], args[0].type)


@intrinsic
def address_of(typingctx, pointer):
    """The address that a pointer holds."""
    return types.intp(pointer), lambda context, builder, sig, args: builder.ptrtoint(args[0], I64)


@intrinsic
def move(typingctx, pointer, elements):
    """The pointer moved by a number of elements."""
    return pointer(pointer, types.intp), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, into the second-level cache. Any address is allowed."""

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def touch(typingctx, pointer):
    """Read the element at a pointer for nothing but to have its cache line."""

    def codegen(context, builder, sig, args):
        instruction = builder.load(args[0])
        builder.asm(ir.FunctionType(ir.VoidType(), [instruction.type]), "", "r", [instruction], True)
        return context.get_dummy_value()

    return types.void(pointer), codegen


@intrinsic
def part(typingctx, pointer, count):
    """The pointer moved by a number of bytes."""

    def codegen(context, builder, sig, args):
        moved = builder.gep(builder.bitcast(args[0], ir.IntType(8).as_pointer()), [args[1]])
        return builder.bitcast(moved, args[0].type)

    return pointer(pointer, types.intp), codegen


def pointer_to(dtype):
    """A function that turns an address into a pointer to `dtype`."""

    @intrinsic
    def pointer(typingctx, address):
        to = types.CPointer(dtype)
        return to(types.intp), lambda context, builder, sig, args: builder.inttoptr(args[0], context.get_value_type(to))

    return pointer


def record_at(dtype):
    """A function that turns an address into the record of a NumPy structured dtype that lies there."""
    record = from_dtype(dtype)

    @intrinsic
    def at(typingctx, address):
        return record(types.intp), lambda context, builder, sig, args: builder.inttoptr(
            args[0], context.get_value_type(record)
        )

    return at
