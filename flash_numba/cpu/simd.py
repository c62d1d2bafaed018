"""SIMD lanes for Numba: the one file with LLVM IR.

A `Lanes` value holds one number per query row, in the vector registers of one register tile. Operators, comparisons
and `ops.select` on it are single instructions; everything else (`exp2` and so on) is written in Python on top, in
`lanes.py`. `load` and `store` move a row of lanes; `product_step` is the register-tile step that all matrix products
are made of. The bottom of the file has what a launch needs: raw addresses, records, atomics, calls by address.
"""

import operator
import os
from typing import NamedTuple

from llvmlite import ir
from numba import from_dtype
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.core.typeconv import Conversion
from numba.core.typing import signature
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model, type_callable

from .. import ops

I32, I64 = ir.IntType(32), ir.IntType(64)
LLVM_FLOAT = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
SAME_SIZE_INT = {types.float32: types.int32, types.float64: types.int64}


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
TILE = choose_register_tile(_triple, _features)


class Lanes(types.Type):
    """`width` values of `dtype` (boolean: a mask) in `width // register` vector registers; a scalar if both are 1."""

    def __init__(self, dtype, width=1, register=1):
        self.dtype, self.width, self.register = dtype, width, register
        super().__init__(name=f"Lanes({dtype},{width}/{register})")

    def can_convert_from(self, typingctx, other):
        """Scalars are broadcast; integer and mask lanes turn into float lanes. Nothing widens a lane."""
        scalar = isinstance(other, (types.Number, types.Boolean))
        to_float = isinstance(other, Lanes) and other.of(self.dtype) == self and isinstance(self.dtype, types.Float)
        if scalar or (to_float and not isinstance(other.dtype, types.Float)):
            return Conversion.safe
        return None

    def of(self, dtype):
        return Lanes(dtype, self.width, self.register)

    @property
    def parts(self):
        return self.width // self.register

    def llvm(self):
        if self.dtype == types.boolean:
            element = ir.IntType(1)
        else:
            element = LLVM_FLOAT.get(self.dtype) or ir.IntType(self.dtype.bitwidth)
        return element if self.register == 1 else ir.VectorType(element, self.register)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        register = fe_type.llvm()
        super().__init__(dmm, fe_type, register if fe_type.parts == 1 else ir.ArrayType(register, fe_type.parts))


def split(builder, lanes, value):
    return [value] if lanes.parts == 1 else [builder.extract_value(value, i) for i in range(lanes.parts)]


def join(builder, lanes, registers):
    if lanes.parts == 1:
        return registers[0]
    value = ir.Constant(ir.ArrayType(lanes.llvm(), lanes.parts), ir.Undefined)
    for i, register in enumerate(registers):
        value = builder.insert_value(value, register, i)
    return value


def splat(builder, lanes, scalar):
    """The scalar in every lane of one register."""
    if lanes.register == 1:
        return scalar
    undefined = ir.Constant(lanes.llvm(), ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(I32, lanes.register), [0] * lanes.register)
    )


# -- operators -------------------------------------------------------------------------------------------------------


def elementwise(emit):
    """Code that applies `emit(builder, lanes of the operands, *registers)` register by register."""

    def codegen(context, builder, sig, args):
        columns = zip(*[split(builder, t, a) for t, a in zip(sig.args, args, strict=True)], strict=True)
        return join(builder, sig.return_type, [emit(builder, sig.args[-1], *column) for column in columns])

    return codegen


def common(*args):
    """The lanes that mixed operands share: a Python or NumPy scalar takes the lane's type, never widens it."""
    lanes = [a for a in args if isinstance(a, Lanes)]
    if not lanes or not all(isinstance(a, (Lanes, types.Number, types.Boolean)) for a in args):
        return None
    return max(lanes, key=lambda t: (isinstance(t.dtype, types.Float), t.dtype != types.boolean))


def register_operator(fn, arity, typer, codegen):
    wrappers = {1: lambda a: typer(a), 2: lambda a, b: typer(a, b), 3: lambda a, b, c: typer(a, b, c)}
    type_callable(fn)(lambda context: wrappers[arity])
    lower_builtin(fn, *[Lanes] * arity)(codegen)


def same_lanes(*args):
    lanes = common(*args)
    return lanes and signature(lanes, *[lanes] * len(args))


def mask_lanes(*args):
    lanes = common(*args)
    return lanes and signature(lanes.of(types.boolean), *[lanes] * len(args))


def select_lanes(mask, a, b):
    lanes = common(a, b)
    return lanes and signature(lanes, lanes.of(types.boolean), lanes, lanes)


def bits_as(target):
    def typer(a):
        if isinstance(a, Lanes):
            dtypes = SAME_SIZE_INT if target == "int" else {i: f for f, i in SAME_SIZE_INT.items()}
            return signature(a.of(dtypes[a.dtype]), a)
        return None

    def codegen(context, builder, sig, args):
        to = sig.return_type
        return join(builder, to, [builder.bitcast(p, to.llvm()) for p in split(builder, sig.args[0], args[0])])

    return typer, codegen


def is_float(lanes):
    return isinstance(lanes.dtype, types.Float)


def arithmetic(on_floats, on_ints):
    return elementwise(lambda b, lanes, *regs: getattr(b, on_floats if is_float(lanes) else on_ints)(*regs))


def comparison(sign):
    def emit(builder, lanes, x, y):
        if not is_float(lanes):
            return builder.icmp_signed(sign, x, y)
        compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered  # NaN != NaN holds, the rest doesn't
        return compare(sign, x, y)

    return elementwise(emit)


for _fn, _inplace, _names in (
    (operator.add, operator.iadd, ("fadd", "add")),
    (operator.sub, operator.isub, ("fsub", "sub")),
    (operator.mul, operator.imul, ("fmul", "mul")),
    (operator.truediv, operator.itruediv, ("fdiv", None)),
    (operator.and_, operator.iand, (None, "and_")),
    (operator.or_, operator.ior, (None, "or_")),
    (operator.xor, operator.ixor, (None, "xor")),
    (operator.lshift, operator.ilshift, (None, "shl")),
    (operator.rshift, operator.irshift, (None, "ashr")),
):
    register_operator(_fn, 2, same_lanes, arithmetic(*_names))
    register_operator(_inplace, 2, same_lanes, arithmetic(*_names))
for _fn, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    register_operator(getattr(operator, _fn), 2, mask_lanes, comparison(_sign))
register_operator(operator.neg, 1, same_lanes, arithmetic("fneg", "neg"))
register_operator(ops.select, 3, select_lanes, elementwise(lambda b, lanes, mask, x, y: b.select(mask, x, y)))


def emit_mul_high(builder, lanes, x, y):
    wide = ir.VectorType(I64, lanes.register) if lanes.register > 1 else I64
    product = builder.mul(builder.zext(x, wide), builder.zext(y, wide))
    half = ir.Constant(wide, [32] * lanes.register) if lanes.register > 1 else I64(32)
    return builder.trunc(builder.lshr(product, half), x.type)


register_operator(ops.mul_high, 2, same_lanes, elementwise(emit_mul_high))
register_operator(ops.as_int, 1, *bits_as("int"))
register_operator(ops.as_float, 1, *bits_as("float"))


@lower_cast(types.Number, Lanes)
@lower_cast(types.Boolean, Lanes)
def broadcast_scalar(context, builder, fromty, toty, value):
    return join(builder, toty, [splat(builder, toty, context.cast(builder, value, fromty, toty.dtype))] * toty.parts)


@lower_cast(Lanes, Lanes)
def int_or_mask_to_float(context, builder, fromty, toty, value):
    if fromty == toty:
        return value
    convert = builder.uitofp if fromty.dtype == types.boolean else builder.sitofp
    return join(builder, toty, [convert(part, toty.llvm()) for part in split(builder, fromty, value)])


def across_lanes(combine):
    """A function that combines all lanes of a value to one scalar, pair by pair."""

    def codegen(context, builder, sig, args):
        lanes = sig.args[0]
        registers = split(builder, lanes, args[0])
        while len(registers) > 1:
            registers = [combine(builder, *registers[:2]), *registers[2:]]
        value, n = registers[0], lanes.register
        while n > 1:
            n //= 2
            halves = [ir.Constant(ir.VectorType(I32, n), list(range(start, start + n))) for start in (0, n)]
            value = combine(builder, *[builder.shuffle_vector(value, value, half) for half in halves])
        return builder.extract_element(value, I32(0))

    @intrinsic
    def reduce(typingctx, lanes):
        return lanes.dtype(lanes), codegen

    return reduce


some_bits = across_lanes(lambda builder, a, b: builder.or_(a, b))
common_bits = across_lanes(lambda builder, a, b: builder.and_(a, b))
sum_of_lanes = across_lanes(lambda builder, a, b: builder.fadd(a, b))
top_of_lanes = across_lanes(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def swap_bytes(typingctx, x):
    """A scalar integer with its bytes in the other order."""

    def codegen(context, builder, sig, args):
        return builder.call(builder.module.declare_intrinsic("llvm.bswap", [args[0].type]), args)

    return x(x), codegen


# -- memory ----------------------------------------------------------------------------------------------------------


def tile_lanes(pointer):
    """The lanes of one register tile of the pointer's type."""
    return Lanes(pointer.dtype, TILE.width(pointer.dtype), TILE.register(pointer.dtype))


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


@intrinsic
def row_numbers(typingctx, like, first):
    """first, first + 1, ...: the row number in each lane of the register tile of `like`."""
    lanes = tile_lanes(like)
    integers = lanes.of(types.int32)

    def codegen(context, builder, sig, args):
        start = splat(builder, integers, context.cast(builder, args[1], sig.args[1], integers.dtype))
        steps = [range(p * integers.register, (p + 1) * integers.register) for p in range(integers.parts)]
        return join(builder, integers, [builder.add(start, ir.Constant(start.type, list(step))) for step in steps])

    return integers(like, types.intp), codegen


def exchange(builder, a, b, n, step):
    """Exchange the off-diagonal quarters of each square of 2 * step in two registers of n lanes."""
    low = [c if not c & step else n + c - step for c in range(n)]
    high = [c + step if not c & step else n + c for c in range(n)]
    return [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, n), order)) for order in (low, high)]


@intrinsic
def transpose_block(typingctx, to, to_stride, source, stride):
    """to[c * to_stride + r] = source[r * stride + c] for a register's square: log2 of its size shuffles each."""
    n = TILE.register(source.dtype)
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


@intrinsic
def register_width(typingctx, pointer):
    """Lanes in one vector register of the pointer's type, a constant."""
    width = TILE.register(pointer.dtype)
    return types.intp(pointer), lambda context, builder, sig, args: I64(width)


BYTES = Lanes(types.int8, TILE.bits // 8, TILE.bits // 8)


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
def tile_width(typingctx, pointer):
    """How many query rows one register tile of the pointer's type holds, a constant."""
    width = TILE.width(pointer.dtype)
    return types.intp(pointer), lambda context, builder, sig, args: I64(width)


@intrinsic
def lanes_of(typingctx, like, scalar):
    """The scalar in every lane of the register tile of `like`."""
    lanes = tile_lanes(like)
    return lanes(like, scalar), lambda context, builder, sig, args: broadcast_scalar(
        context, builder, sig.args[1], lanes, args[1]
    )


@intrinsic
def itemsize(typingctx, pointer):
    """Bytes of an element, a constant."""
    return types.intp(pointer), lambda context, builder, sig, args: I64(sig.args[0].dtype.bitwidth // 8)


@intrinsic
def real(typingctx, like, scalar):
    """A scalar in the dtype of the pointer `like`."""
    dtype = like.dtype
    return dtype(like, scalar), lambda context, builder, sig, args: context.cast(builder, args[1], sig.args[1], dtype)


@intrinsic
def lane(typingctx, scalar):
    """A scalar as a lone lane, on which literals don't change the type (float32 * 0.5 stays float32)."""
    return Lanes(scalar)(scalar), lambda context, builder, sig, args: args[0]


@intrinsic
def scalar(typingctx, lane):
    """A lone lane as a Numba scalar."""
    return lane.dtype(lane), lambda context, builder, sig, args: args[0]


def multiply_add(builder, a, b, c):
    """a * b + c in one register, fused where the CPU can."""
    if not TILE.fma:
        return builder.fadd(c, builder.fmul(a, b))
    bits = {ir.FloatType(): 32, ir.DoubleType(): 64}[a.type.element]
    name = f"llvm.fma.v{a.type.count}f{bits}"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(fma, [a, b, c])


STORED = {"float16": ir.HalfType(), "bfloat16": ir.IntType(16)}


def register_addresses(builder, dtype, pointer, at, count, stored=None):
    """The addresses of `count` neighbouring registers' worth of elements, from element number `at` of a pointer."""
    step = TILE.register(dtype)
    to = ir.VectorType(STORED.get(stored, LLVM_FLOAT[dtype]), step).as_pointer()
    return [builder.bitcast(builder.gep(pointer, [builder.add(at, I64(n * step))]), to) for n in range(count)]


def load_register(builder, address, stored=None):
    """One vector register from an address of `register_addresses`, brought to float32 from how it is stored."""
    value = builder.load(address)
    value.align = 2 if stored else {ir.FloatType(): 4, ir.DoubleType(): 8}[value.type.element]
    if stored is None:
        return value
    count = value.type.count
    if stored == "float16":
        return builder.fpext(value, ir.VectorType(ir.FloatType(), count))
    integers = ir.VectorType(I32, count)
    bits = builder.shl(builder.zext(value, integers), ir.Constant(integers, [16] * count))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), count))


def product_step(rows, registers, across, blend=None, stored=None):
    """The step that every matrix product is made of: `P[m, lanes] = sum_k A[m, k] * B[k, lanes]`, kept in registers.

    `rows` numbers m and `registers` vector registers of lanes. A[m, k] is `A[m + k * a_stride]` if `across`, else
    `A[m * a_stride + k]`; rows of B and C lie `b_stride` and `c_stride` elements apart. The step writes `C = P`, or
    with `blend` `C = alpha * C + P`, where alpha has a number for each lane ("lanes") or for each row ("rows"), or is 1
    ("sum"): the old output is rescaled and each block summed from zero, which keeps rounding errors from growing with
    the number of keys. Sums run in the order of k, fused, for any shape of the step, so the bits of a number in C
    don't depend on it. `stored`: B holds float16 or bfloat16, as a pointer to their bits, converted in registers.
    """

    def codegen(context, builder, sig, args):
        C, c_stride, A, a_stride, B, b_stride, depth, alpha = args
        dtype = sig.args[0].dtype
        lanes = Lanes(dtype, TILE.register(dtype), TILE.register(dtype))
        vector = lanes.llvm()

        def aligned(instruction):
            instruction.align = dtype.bitwidth // 8
            return instruction

        def advance(k, sums, unroll):
            sums = list(sums)
            for u in range(unroll):
                at = builder.add(k, I64(u))
                start = builder.mul(at, b_stride)
                from_b = register_addresses(builder, dtype, B, start, registers, stored)
                b = [load_register(builder, p, stored) for p in from_b]
                for m in range(rows):
                    along = [I64(m), builder.mul(at, a_stride)] if across else [at, builder.mul(a_stride, I64(m))]
                    a = splat(builder, lanes, builder.load(builder.gep(A, [builder.add(*along)])))
                    for n in range(registers):
                        i = m * registers + n
                        sums[i] = multiply_add(builder, a, b[n], sums[i])
            return sums

        def loop(start, stop, sums, unroll):
            """`for k in range(start, stop, unroll)` with the sums as loop-carried registers."""
            entry, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.cbranch(builder.icmp_signed("<", start, stop), body, done)
            builder.position_at_end(body)
            k = builder.phi(I64)
            carried = [builder.phi(vector) for _ in sums]
            new = advance(k, carried, unroll)
            k_next = builder.add(k, I64(unroll))
            builder.cbranch(builder.icmp_signed("<", k_next, stop), body, done)
            k.add_incoming(start, entry)
            k.add_incoming(k_next, body)
            builder.position_at_end(done)
            out = [builder.phi(vector) for _ in sums]
            for phi, result, before, after in zip(carried, out, sums, new, strict=True):
                phi.add_incoming(before, entry)
                phi.add_incoming(after, body)
                result.add_incoming(before, entry)
                result.add_incoming(after, body)
            return out

        even = builder.and_(depth, I64(-2))
        sums = loop(I64(0), even, [vector(None)] * (rows * registers), 2)
        sums = loop(even, depth, sums, 1)
        targets = [
            p
            for m in range(rows)
            for p in register_addresses(builder, dtype, C, builder.mul(c_stride, I64(m)), registers)
        ]
        if blend == "lanes":
            row = register_addresses(builder, dtype, alpha, I64(0), registers)
            factors = [aligned(builder.load(p)) for p in row] * rows
        elif blend == "rows":
            scalars = [builder.load(builder.gep(alpha, [I64(m)])) for m in range(rows)]
            factors = [splat(builder, lanes, a) for a in scalars for _ in range(registers)]
        if blend == "sum":
            old = [aligned(builder.load(p)) for p in targets]
            sums = [builder.fadd(before, value) for before, value in zip(old, sums, strict=True)]
        elif blend:
            sums = [
                multiply_add(builder, a, aligned(builder.load(p)), value)
                for a, p, value in zip(factors, targets, sums, strict=True)
            ]
        for p, value in zip(targets, sums, strict=True):
            aligned(builder.store(value, p))
        return context.get_dummy_value()

    @intrinsic
    def step(typingctx, C, c_stride, A, a_stride, B, b_stride, depth, alpha):
        return types.void(C, types.intp, A, types.intp, B, types.intp, types.intp, alpha), codegen

    return step


def dot_step(rows, stored=None):
    """A step `C[m, j] = sum_k A[j, k] * B[m, k]` for `rows` m and as many j as make it a register's worth of numbers.

    Lanes run along k, whose number is whole registers; the sums of the lanes come out of a tree of shuffles and
    additions, in an order that depends on neither m, j nor `rows`. A is read in the order of memory, which the CPU's
    own prefetcher follows: 28 GB/s a thread on Zen 4, where rows read side by side, or asked for ahead, come at 12 to
    16. It holds floats or, converted in registers, what `stored` says.
    """

    def codegen(context, builder, sig, args):
        C, c_stride, A, a_stride, B, b_stride, depth = args
        dtype = sig.args[0].dtype
        n = TILE.register(dtype)
        keys = max(1, n // rows)
        vector = ir.VectorType(LLVM_FLOAT[dtype], n)
        starts = [builder.mul(b_stride, I64(m)) for m in range(rows)]

        def products(j):
            """Row j of A times each row of B, lane by lane, in one loop over k."""
            first = builder.mul(a_stride, I64(j))
            entry, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(body)
            builder.position_at_end(body)
            k = builder.phi(I64)
            sums = [builder.phi(vector) for _ in range(rows)]
            (from_a,) = register_addresses(builder, dtype, A, builder.add(first, k), 1, stored)
            a = load_register(builder, from_a, stored)
            from_b = [register_addresses(builder, dtype, B, builder.add(start, k), 1)[0] for start in starts]
            new = [multiply_add(builder, a, load_register(builder, p), s) for p, s in zip(from_b, sums, strict=True)]
            k_next = builder.add(k, I64(n))
            builder.cbranch(builder.icmp_signed("<", k_next, depth), body, done)
            k.add_incoming(I64(0), entry)
            k.add_incoming(k_next, body)
            for phi, value in zip(sums, new, strict=True):
                phi.add_incoming(vector(None), entry)
                phi.add_incoming(value, body)
            builder.position_at_end(done)
            return new

        def paired(values, step):
            pairs = zip(values[::2], values[1::2], strict=True)
            return [builder.fadd(*exchange(builder, x, y, n, step)) for x, y in pairs]

        def summed(j, keys):
            """The sums of rows j to j + keys of A; sum number (key, m) stands in lane number (key, m)."""
            if keys == 1:
                values, step = products(j), 1
                while len(values) > 1 and step < n:
                    values, step = paired(values, step), 2 * step
                return values, step
            (low,), step = summed(j, keys // 2)
            (high,), _ = summed(j + keys // 2, keys // 2)
            return paired([low, high], step), 2 * step

        values, _ = summed(0, keys)
        part = ir.VectorType(LLVM_FLOAT[dtype], keys).as_pointer()
        for i, value in enumerate(values):
            by_row = [key * rows + m for m in range(n // keys) for key in range(keys)]
            if keys > 1:
                value = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, n), by_row))
            for m in range(n // keys):
                own = [I32(m * keys + key) for key in range(keys)]
                piece = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, keys), own))
                to = builder.gep(C, [builder.mul(c_stride, I64(i * (n // keys) + m))])
                builder.store(piece, builder.bitcast(to, part)).align = dtype.bitwidth // 8
        return context.get_dummy_value()

    @intrinsic
    def step(typingctx, C, c_stride, A, a_stride, B, b_stride, depth):
        return types.void(C, types.intp, A, types.intp, B, types.intp, types.intp), codegen

    return step


# -- addresses, records, threads -------------------------------------------------------------------------------------


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


@intrinsic
def take_ticket(typingctx, address):
    """Atomically add 1 to the integer at an address; the value before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), I64(1), "monotonic")

    return types.intp(types.intp), codegen


@intrinsic
def finish_ticket(typingctx, address):
    """`take_ticket` that also makes everything written before visible to whoever takes a later one."""

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
def call_worker(typingctx, function, problem, control, scratch):
    """Call the C function `void f(int64, int64, int64)` at an address."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen
