"""The register-tile steps that all matrix products are made of."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import I32, I64, LLVM_FLOAT, Lanes, splat
from .memory import exchange
from .registers import REGISTER_TILE


def multiply_add(builder, a, b, c):
    """a * b + c in one register, fused where the CPU can."""
    if not REGISTER_TILE.fma:
        return builder.fadd(c, builder.fmul(a, b))
    bits = {ir.FloatType(): 32, ir.DoubleType(): 64}[a.type.element]
    name = f"llvm.fma.v{a.type.count}f{bits}"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(fma, [a, b, c])


STORED = {"float16": ir.HalfType(), "bfloat16": ir.IntType(16)}


def register_addresses(builder, dtype, pointer, at, count, stored=None):
    """The addresses of `count` neighbouring registers' worth of elements, from element number `at` of a pointer."""
    step = REGISTER_TILE.register(dtype)
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


def counted_loop(builder, start, stop, step, sums, advance):
    """`for k in range(start, stop, step): sums = advance(k, sums)`, with the sums as loop-carried registers."""
    entry, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_signed("<", start, stop), body, done)
    builder.position_at_end(body)
    k = builder.phi(I64)
    carried = [builder.phi(value.type) for value in sums]
    new = advance(k, carried)
    k_next = builder.add(k, I64(step))
    builder.cbranch(builder.icmp_signed("<", k_next, stop), body, done)
    k.add_incoming(start, entry)
    k.add_incoming(k_next, body)
    builder.position_at_end(done)
    out = [builder.phi(value.type) for value in sums]
    for phi, result, before, after in zip(carried, out, sums, new, strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, body)
        result.add_incoming(before, entry)
        result.add_incoming(after, body)
    return out


def blended(builder, lanes, blend, sums, targets, alpha, rows, registers):
    """What `product_step` writes to its targets: the sums, or what was there before, times alpha, and the sums."""

    def before(pointer):
        value = builder.load(pointer)
        value.align = lanes.dtype.bitwidth // 8
        return value

    if blend is None:
        return sums
    if blend == "sum":
        old = [before(p) for p in targets]
        return [builder.fadd(value, total) for value, total in zip(old, sums, strict=True)]
    if blend == "lanes":
        factors = [before(p) for p in register_addresses(builder, lanes.dtype, alpha, I64(0), registers)] * rows
    else:
        numbers = [builder.load(builder.gep(alpha, [I64(m)])) for m in range(rows)]
        factors = [splat(builder, lanes, a) for a in numbers for _ in range(registers)]
    return [
        multiply_add(builder, factor, before(p), total) for factor, p, total in zip(factors, targets, sums, strict=True)
    ]


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
        lanes = Lanes(dtype, REGISTER_TILE.register(dtype), REGISTER_TILE.register(dtype))

        def unrolled(count):
            def advance(k, sums):
                sums = list(sums)
                for u in range(count):
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

            return advance

        even = builder.and_(depth, I64(-2))
        sums = counted_loop(builder, I64(0), even, 2, [lanes.llvm()(None)] * (rows * registers), unrolled(2))
        sums = counted_loop(builder, even, depth, 1, sums, unrolled(1))
        targets = [
            p
            for m in range(rows)
            for p in register_addresses(builder, dtype, C, builder.mul(c_stride, I64(m)), registers)
        ]
        written = blended(builder, lanes, blend, sums, targets, alpha, rows, registers)
        for p, value in zip(targets, written, strict=True):
            builder.store(value, p).align = dtype.bitwidth // 8
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
        n = REGISTER_TILE.register(dtype)
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
