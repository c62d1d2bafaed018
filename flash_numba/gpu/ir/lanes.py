"""A number whose literals take its own type, and how instructions get their code: LLVM IR of single numbers.

Plain Numba takes a literal for a float64 and widens what it meets: `float32 * 0.5` becomes float64 arithmetic, at a
32nd of the speed. So formulas are called with a `Lane`: `lane(x)` makes one, `scalar(x)` gives the number back. Under
Numba's simulator a kernel is plain Python on NumPy scalars, which behave so by themselves, and both return what they
are given.
"""

import inspect
import operator

from llvmlite import ir
from numba import types
from numba.core.typeconv import Conversion

from .. import SIMULATED

if not SIMULATED:
    from numba.cuda import extending
    from numba.cuda.typing import Signature

I32, I64 = ir.IntType(32), ir.IntType(64)
LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: I32,
    types.int64: I64,
    types.boolean: ir.IntType(1),
}


def instruction(typer, emit):
    """Give a plain Python function, which stands as it is in the simulator, its meaning in compiled code.

    typer: the signature, `typer(*types) -> (return type, argument types)` or None where the types aren't taken.
    emit: the code, `emit(builder, return type, argument types, *values) -> value`, or `(context, builder, ...)` for
    one that has a parameter named `context`.
    """
    with_context = "context" in inspect.signature(emit).parameters

    def decorate(function):
        if SIMULATED:
            return function

        def typed(typingctx, *args):
            found = typer(*args)
            if found is None:
                return None
            result, arguments = found

            def codegen(context, builder, sig, values):
                first = (context, builder) if with_context else (builder,)
                value = emit(*first, sig.return_type, sig.args, *values)
                return context.get_dummy_value() if value is None else value

            return Signature(result, arguments, None), codegen

        names = ", ".join(inspect.signature(function).parameters)  # Numba looks at the names of the parameters
        typed_by_name = eval(f"lambda typingctx, {names}: typed(typingctx, {names})", {"typed": typed})
        typed_by_name.__name__, typed_by_name.__module__ = function.__name__, function.__module__
        typed_by_name.__doc__ = function.__doc__
        return extending.intrinsic(typed_by_name)

    return decorate


# -- a number and its instructions -------------------------------------------------------------------------------------


class Lane(types.Type):
    """One number of `dtype`: float32, float64, int32, int64, or boolean for what comparisons give."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Lane({dtype})")

    def can_convert_from(self, typingctx, other):
        """Numbers take the lane's type; integer and boolean lanes turn into float lanes. Nothing widens a lane."""
        to_float = isinstance(other, Lane) and is_float(self) and not is_float(other)
        return Conversion.safe if isinstance(other, (types.Number, types.Boolean)) or to_float else None


def is_float(lane):
    return isinstance(lane.dtype, types.Float)


def call(builder, name, result, *args):
    """A call of a function that NVVM or its library knows by name."""
    kind = ir.FunctionType(result, [x.type for x in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


@instruction(lambda x: (Lane(types.unliteral(x)), (types.unliteral(x),)), lambda builder, result, given, x: x)
def lane(x):
    """A number as the formulas take it."""
    return x


@instruction(lambda x: (x.dtype, (x,)), lambda builder, result, given, x: x)
def scalar(x):
    """The number that a formula gave."""
    return x


def _larger(builder, result, given, a, b):
    name = "llvm.nvvm.fmax.f" if result == types.float32 else "llvm.nvvm.fmax.d"
    return call(builder, name, a.type, a, b)


@instruction(lambda a, b: (a, (a, a)), _larger)
def larger(a, b):
    """The larger one of two floats in one instruction; of a number and a NaN the number.

    Not `ops.maximum`, which keeps a NaN that comes second, as `scores.with_bias` wants it.
    """
    return a if a > b or b != b else b


# -- how operations on lanes are typed, and their code -----------------------------------------------------------------


def common(*args):
    """The lane that mixed operands share."""
    lanes = [a for a in args if isinstance(a, Lane)]
    if not lanes or not all(isinstance(a, (Lane, types.Number, types.Boolean)) for a in args):
        return None
    return max(lanes, key=lambda t: (is_float(t), t.dtype != types.boolean))


def register(operation, arity, typer, emit):
    """Tell numba-cuda the type and the code of a primitive operation or an operator on lanes."""
    typers = {1: lambda a: typer(a), 2: lambda a, b: typer(a, b), 3: lambda a, b, c: typer(a, b, c)}
    extending.type_callable(operation)(lambda context: typers[arity])

    def codegen(context, builder, sig, args):
        return emit(builder, sig.args[-1], *args)

    extending.lower_builtin(operation, *[Lane] * arity)(codegen)


def same_lane(*args):
    kind = common(*args)
    return kind and Signature(kind, (kind,) * len(args), None)


def mask_lane(*args):
    kind = common(*args)
    return kind and Signature(Lane(types.boolean), (kind,) * len(args), None)


def float_lane(x):
    return Signature(x, (x,), None) if isinstance(x, Lane) and is_float(x) else None


def select_lane(mask, a, b):
    kind = common(a, b)
    return kind and Signature(kind, (Lane(types.boolean), kind, kind), None)


def arithmetic(on_floats, on_ints):
    return lambda builder, kind, *args: getattr(builder, on_floats if is_float(kind) else on_ints)(*args)


def comparison(sign):
    def emit(builder, kind, x, y):
        if not is_float(kind):
            return builder.icmp_signed(sign, x, y)
        return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, x, y)  # NaN != NaN

    return emit


SAME_SIZE = {
    "int": {types.float32: types.int32, types.float64: types.int64},
    "float": {types.int32: types.float32, types.int64: types.float64},
}


def bits_as(target):
    def typer(x):
        return Signature(Lane(SAME_SIZE[target][x.dtype]), (x,), None) if isinstance(x, Lane) else None

    def emit(builder, kind, x):
        return builder.bitcast(x, LLVM[SAME_SIZE[target][kind.dtype]])

    return typer, emit


def half_lane(bits):
    """The type of `dtypes.float16_to_float32`."""
    return Signature(Lane(types.float32), (bits,), None) if isinstance(bits, Lane) else None


def widen_half(builder, kind, bits):
    return call(builder, "llvm.convert.from.fp16.f32", ir.FloatType(), builder.trunc(bits, ir.IntType(16)))


def by_size(of_32_bits, of_64_bits):
    """A call of one function for float32 and of another for float64."""
    return lambda builder, kind, x: call(builder, of_32_bits if kind.dtype == types.float32 else of_64_bits, x.type, x)


def divide(builder, kind, x, y):
    return call(builder, "llvm.nvvm.div.approx.f", x.type, x, y) if kind.dtype == types.float32 else builder.fdiv(x, y)


def negate(builder, kind, x):
    """Not fneg: LLVM 7, which NVVM is for most GPUs, has none."""
    return builder.fsub(x.type(-0.0), x) if is_float(kind) else builder.neg(x)


def choose(builder, kind, mask, a, b):
    return builder.select(mask, a, b)


def multiply_high(builder, kind, x, y):
    return call(builder, "llvm.nvvm.mulhi.ui", x.type, x, y)


def install():
    """Tell numba-cuda about lanes, the operators on them, and what turns into them."""

    @extending.register_model(Lane)
    class LaneModel(extending.core_models.PrimitiveModel):
        def __init__(self, dmm, fe_type):
            super().__init__(dmm, fe_type, LLVM[fe_type.dtype])

    for function, inplace, names in (
        (operator.add, operator.iadd, ("fadd", "add")),
        (operator.sub, operator.isub, ("fsub", "sub")),
        (operator.mul, operator.imul, ("fmul", "mul")),
        (operator.and_, operator.iand, (None, "and_")),
        (operator.or_, operator.ior, (None, "or_")),
        (operator.xor, operator.ixor, (None, "xor")),
        (operator.lshift, operator.ilshift, (None, "shl")),
        (operator.rshift, operator.irshift, (None, "ashr")),
    ):
        register(function, 2, same_lane, arithmetic(*names))
        register(inplace, 2, same_lane, arithmetic(*names))
    for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
        register(getattr(operator, name), 2, mask_lane, comparison(sign))
    register(operator.neg, 1, same_lane, negate)
    for division in (operator.truediv, operator.itruediv):  # to 2 ulp in float32; IEEE's is a call
        register(division, 2, same_lane, divide)

    @extending.lower_cast(types.Number, Lane)
    @extending.lower_cast(types.Boolean, Lane)
    def number_to_lane(context, builder, fromty, toty, value):
        return context.cast(builder, value, fromty, toty.dtype)

    @extending.lower_cast(Lane, Lane)
    def int_or_mask_to_float(context, builder, fromty, toty, value):
        if fromty == toty:
            return value
        convert = builder.uitofp if fromty.dtype == types.boolean else builder.sitofp
        return convert(value, LLVM[toty.dtype])


if not SIMULATED:
    install()
