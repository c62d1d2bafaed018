"""SIMD lanes for Numba: the lane type, its operators, and how scalars become lanes.

A `Lanes` value holds one number per query row (in decode: per key), in the vector registers of one register tile.
Operators, comparisons and `ops.select` on it are single instructions; everything else (`exp2` and so on) is written in
Python on top, in `cpu/primitives.py`.
"""

import operator

from llvmlite import ir
from numba.core import types
from numba.core.typeconv import Conversion
from numba.core.typing import signature
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model, type_callable

from ... import ops
from .registers import REGISTER_TILE

I32, I64 = ir.IntType(32), ir.IntType(64)
LLVM_FLOAT = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
SAME_SIZE_INT = {types.float32: types.int32, types.float64: types.int64}


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


def choose(builder, lanes, mask, x, y):
    return builder.select(mask, x, y)


# Constants, as everything that decides what is compiled (`code_digest.py`).
ARITHMETIC = {  # on floats, on integers
    (operator.add, operator.iadd): ("fadd", "add"),
    (operator.sub, operator.isub): ("fsub", "sub"),
    (operator.mul, operator.imul): ("fmul", "mul"),
    (operator.truediv, operator.itruediv): ("fdiv", None),
    (operator.and_, operator.iand): (None, "and_"),
    (operator.or_, operator.ior): (None, "or_"),
    (operator.xor, operator.ixor): (None, "xor"),
    (operator.lshift, operator.ilshift): (None, "shl"),
    (operator.rshift, operator.irshift): (None, "ashr"),
}
COMPARISONS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
for _operators, _names in ARITHMETIC.items():
    for _operator in _operators:
        register_operator(_operator, 2, same_lanes, arithmetic(*_names))
for _operator, _sign in COMPARISONS.items():
    register_operator(_operator, 2, mask_lanes, comparison(_sign))
register_operator(operator.neg, 1, same_lanes, arithmetic("fneg", "neg"))
register_operator(ops.select, 3, select_lanes, elementwise(choose))


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


# -- scalars and lanes -------------------------------------------------------------------------------------------------


def tile_lanes(pointer):
    """The lanes of one register tile of the pointer's type."""
    return Lanes(pointer.dtype, REGISTER_TILE.width(pointer.dtype), REGISTER_TILE.register(pointer.dtype))


@intrinsic
def lane_numbers(typingctx, like, first):
    """first, first + 1, ...: the number of each lane of the register tile of `like`, from `first` on."""
    lanes = tile_lanes(like)
    integers = lanes.of(types.int32)

    def codegen(context, builder, sig, args):
        start = splat(builder, integers, context.cast(builder, args[1], sig.args[1], integers.dtype))
        steps = [range(p * integers.register, (p + 1) * integers.register) for p in range(integers.parts)]
        return join(builder, integers, [builder.add(start, ir.Constant(start.type, list(step))) for step in steps])

    return integers(like, types.intp), codegen


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


@intrinsic
def tile_width(typingctx, pointer):
    """How many query rows one register tile of the pointer's type holds, a constant."""
    width = REGISTER_TILE.width(pointer.dtype)
    return types.intp(pointer), lambda context, builder, sig, args: I64(width)


@intrinsic
def register_width(typingctx, pointer):
    """Lanes in one vector register of the pointer's type, a constant."""
    width = REGISTER_TILE.register(pointer.dtype)
    return types.intp(pointer), lambda context, builder, sig, args: I64(width)
