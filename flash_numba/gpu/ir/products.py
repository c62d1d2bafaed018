"""The steps that both matrix products are made of: vectors out of shared memory, multiplied into a thread's registers.

Each is one function with everything that it does to registers written out, so that no accumulator's place in an array
depends on the compiler's willingness to unroll a loop.
"""

import numpy as np
from llvmlite import ir
from numba import types

from .lanes import I64, LLVM, instruction
from .memory import SIZES, element, vector_load

REAL_BYTES = {LLVM[dtype]: SIZES[dtype] for dtype in (types.float32, types.float64)}


def load_vector(builder, pointer, offset, real):
    """The floats of the 16 bytes that are `offset` elements behind a pointer, as LLVM values."""
    values = vector_load(builder, builder.gep(pointer, [I64(offset)], inbounds=True), real, 16 // REAL_BYTES[real])
    return [builder.extract_value(values, i) for i in range(len(values.type))]


def multiply_add(builder, pointer, index, a, b, unless=None):
    """pointer[index] += a * b, rounded once; not where the LLVM value `unless` is true."""
    place = builder.gep(pointer, [I64(index)], inbounds=True)
    fma = builder.module.declare_intrinsic("llvm.fma", [a.type], ir.FunctionType(a.type, [a.type] * 3))
    before = builder.load(place)
    after = builder.call(fma, [a, b, before])
    builder.store(after if unless is None else builder.select(unless, before, after), place)


# A key that a row doesn't see weighs -0.0. It is 0 to every product, but where V may hold NaN or infinity, the product
# has to be left out: 0 * NaN would leak.


def is_hidden(builder, weight):
    """Whether a weight is -0.0, as an LLVM value."""
    bits = ir.IntType(8 * REAL_BYTES[weight.type])
    return builder.icmp_signed("==", builder.bitcast(weight, bits), bits(-(1 << (bits.width - 1))))


def add_seen(total, weight, products):
    """On arrays, `total + products` but where the weight is -0.0."""
    return np.where((weight == 0) & np.signbit(weight), total, total + products)


def score_step(rows, keys, row_stride, key_stride):
    """A function for one vector of dimensions: `step(s, shared, q, k)`.

    s[r * keys + c] += sum_i shared[q + r * row_stride + i] * shared[k + c * key_stride + i] for a thread's rows r and
    keys c, with i along a vector of 16 bytes.
    """

    def emit(context, builder, kind, given, s, shared, q, k):
        real = LLVM[given[0].dtype]
        s = element(context, builder, given[0], s, I64(0))
        q, k = (element(context, builder, given[1], shared, i) for i in (q, k))
        of_rows = [load_vector(builder, q, r * row_stride, real) for r in range(rows)]
        for c in range(keys):
            for i, b in enumerate(load_vector(builder, k, c * key_stride, real)):
                for r in range(rows):
                    multiply_add(builder, s, r * keys + c, of_rows[r][i], b)

    def step(s, shared, q, k):
        vector = 16 // shared.itemsize
        a = shared[q + np.arange(rows)[:, None] * row_stride + np.arange(vector)]
        b = shared[k + np.arange(keys)[:, None] * key_stride + np.arange(vector)]
        for i in range(vector):
            s.reshape(rows, keys)[...] += a[:, i, None] * b[None, :, i]

    return instruction(
        lambda s, shared, q, k: (types.void, (s, shared, types.intp, types.intp)),
        emit,
    )(step)


def value_step(rows, vectors, first, row_stride, key_stride, vector_stride, seen=False):
    """A function for one vector of keys: `step(o, shared, p, v)`.

    o[first + n * rows + r] += sum_j shared[p + r * row_stride + j] * shared[v + j * key_stride + column n] for a
    thread's rows r and columns n, which are `vectors` vectors of 16 bytes, `vector_stride` apart; j along a vector.
    seen: leave out what is hidden.
    """

    def emit(context, builder, kind, given, o, shared, p, v):
        real = LLVM[given[0].dtype]
        o = element(context, builder, given[0], o, I64(first))
        p, v = (element(context, builder, given[1], shared, i) for i in (p, v))
        of_rows = [load_vector(builder, p, r * row_stride, real) for r in range(rows)]
        for j in range(len(of_rows[0])):
            hidden = [is_hidden(builder, weights[j]) if seen else None for weights in of_rows]
            for n in range(vectors):
                values = load_vector(builder, v, j * key_stride + n * vector_stride, real)
                for i, b in enumerate(values):
                    for r in range(rows):
                        multiply_add(builder, o, (n * len(values) + i) * rows + r, of_rows[r][j], b, hidden[r])

    def step(o, shared, p, v):
        vector = 16 // shared.itemsize
        columns = (np.arange(vectors)[:, None] * vector_stride + np.arange(vector)).ravel()
        for j in range(vector):
            a, b = shared[p + np.arange(rows) * row_stride + j], shared[v + j * key_stride + columns]
            total = o[first : first + columns.size * rows].reshape(-1, rows)
            total[...] = add_seen(total, a, b[:, None] * a) if seen else total + b[:, None] * a

    return instruction(
        lambda o, shared, p, v: (types.void, (o, shared, types.intp, types.intp)),
        emit,
    )(step)


def dot_step(rows, row_stride):
    """A function for one vector of dimensions of one key: `step(s, shared, q, values)`.

    s[r] += sum_i shared[q + r * row_stride + i] * values[i]
    """

    def emit(context, builder, kind, given, s, shared, q, values):
        real = LLVM[given[0].dtype]
        s, values = (element(context, builder, t, x, I64(0)) for t, x in ((given[0], s), (given[3], values)))
        q = element(context, builder, given[1], shared, q)
        for r in range(rows):
            for i, a in enumerate(load_vector(builder, q, r * row_stride, real)):
                multiply_add(builder, s, r, a, builder.load(builder.gep(values, [I64(i)], inbounds=True)))

    def step(s, shared, q, values):
        a = shared[q + np.arange(rows)[:, None] * row_stride + np.arange(values.size)]
        for i in range(values.size):
            s += a[:, i] * values[i]

    return instruction(
        lambda s, shared, q, values: (types.void, (s, shared, types.intp, values)),
        emit,
    )(step)


def outer_step(rows, vector, first, key, seen=False):
    """A function for one vector of V's columns: `step(o, p, values)`.

    o[first + n * rows + r] += p[r * vector + key] * values[n]; seen: leave out what is hidden.
    """

    def emit(context, builder, kind, given, o, p, values):
        o, p, values = (element(context, builder, t, x, I64(0)) for t, x in zip(given, (o, p, values), strict=True))
        weights = [builder.load(builder.gep(p, [I64(r * vector + key)], inbounds=True)) for r in range(rows)]
        hidden = [is_hidden(builder, weight) if seen else None for weight in weights]
        for n in range(vector):
            value = builder.load(builder.gep(values, [I64(n)], inbounds=True))
            for r in range(rows):
                multiply_add(builder, o, first + n * rows + r, weights[r], value, hidden[r])

    def step(o, p, values):
        total, a = o[first : first + vector * rows].reshape(-1, rows), p[key::vector]
        total[...] = add_seen(total, a, values[:, None] * a) if seen else total + values[:, None] * a

    return instruction(lambda o, p, values: (types.void, (o, p, values)), emit)(step)
