"""The two matrix products of `decode`, for K and V in every format.

K and V pass through once and are used by few rows each, so a converted copy would cost more than the products: what an
instruction or two convert is read as it is stored. Other formats, and rows that don't fill registers, go through a
block small enough for the first cache.
"""

from numba import njit, types
from numba.extending import overload

from ..dtypes import BFLOAT16
from .compile import HELPER, STAGE
from .formats import uint16_at
from .ir.lanes import itemsize, register_width
from .ir.memory import move, pointer_like, touch
from .ir.products import dot_step, product_step
from .ir.registers import REGISTER_TILE
from .loading import load_padded, readable_as_stored, readable_in_place, row_address, stride_of
from .plan import CONVERTED, LINE, ROWS

# Query rows by registers of columns of a step for the values. With 16 registers, 4 x 4 would spill.
TALL, WIDE = (4 if REGISTER_TILE.rows * REGISTER_TILE.vectors >= 16 else 2), 4
LOW, LONG = TALL // 2, 8
GROUP = 16  # keys whose values are read for all query rows while they are in the first cache


# -- with whole registers ----------------------------------------------------------------------------------------------


def keys_multiplier(stored=None):
    """A stage `S[row, key] = sum_t Q[row, t] K[key, t]` for K of the kernel's floats, or of what `stored` says."""
    dots, row_dots = dot_step(ROWS, stored), dot_step(1, stored)

    @njit(**STAGE)
    def multiply_keys(s, s_stride, k, k_stride, q, rows, keys, dim):
        n = register_width(s)
        if rows == 1:
            for j in range(0, keys, n):
                row_dots(move(s, j), s_stride, move(k, j * k_stride), k_stride, q, dim, dim)
            return
        step = max(1, n // ROWS)
        for j0 in range(0, keys, n):  # so few that all rows find them in the first cache
            for r in range(0, rows, ROWS):
                for j in range(j0, j0 + n, step):
                    to = move(s, r * s_stride + j)
                    dots(to, s_stride, move(k, j * k_stride), k_stride, move(q, r * dim), dim, dim)

    return multiply_keys


def values_adder(stored=None):
    """A stage `O[row, c] = alpha[row] O[row, c] + sum_j P[row, j] V[j, c]`, likewise. It leaves 1 in alpha."""
    floats = stored is None
    longest = LONG if floats or TALL > 2 else WIDE  # of 16 registers, conversions would spill some
    tall, tall_1, low, long, wide, one = (
        product_step(rows, registers, across=False, blend="rows", stored=stored)
        for rows, registers in ((TALL, WIDE), (TALL, 1), (LOW, LONG), (1, longest), (1, WIDE), (1, 1))
    )

    @njit(**STAGE)
    def add_values(o, o_stride, alpha, v, v_stride, s, s_stride, rows, keys):
        n = register_width(o)
        # V's rows in the order of memory (see `dot_step`); a format is better converted for more rows at once
        in_order = floats and o_stride % (LONG * n) == 0
        scattered = floats and rows > 1 and o_stride > WIDE * n and not in_order
        group = GROUP if rows > 1 else keys
        for j in range(0, keys, group):
            depth, v_rows = min(group, keys - j), move(v, j * v_stride)
            if scattered:
                for row in range(depth):
                    for c in range(0, o_stride, LINE // itemsize(o)):
                        touch(move(v_rows, row * v_stride + c))
            r = 0
            while r < rows:
                to, p, a, c = move(o, r * o_stride), move(s, r * s_stride + j), move(alpha, r), 0
                if in_order and r + LOW <= rows:
                    while c < o_stride:
                        low(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += LONG * n
                    r += LOW
                elif r + TALL <= rows:
                    while c + WIDE * n <= o_stride:
                        tall(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += WIDE * n
                    while c < o_stride:
                        tall_1(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += n
                    r += TALL
                else:
                    while c + longest * n <= o_stride:
                        long(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += longest * n
                    while c + WIDE * n <= o_stride:
                        wide(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += WIDE * n
                    while c < o_stride:
                        one(move(to, c), o_stride, p, s_stride, move(v_rows, c), v_stride, depth, a)
                        c += n
                    r += 1
            if j == 0:
                for r in range(rows):
                    alpha[r] = 1

    return add_values


multiply_keys, add_values = keys_multiplier(), values_adder()
# The stages that read a 16-bit format as it is stored; float16 only where the CPU converts it.
multiply_bfloat16_keys, add_bfloat16_values = keys_multiplier("bfloat16"), values_adder("bfloat16")
multiply_float16_keys, add_float16_values = multiply_bfloat16_keys, add_bfloat16_values
if REGISTER_TILE.half:
    multiply_float16_keys, add_float16_values = keys_multiplier("float16"), values_adder("float16")


# -- in every format ---------------------------------------------------------------------------------------------------


def multiply_stored_keys(s, s_stride, address, row_stride, code, q, rows, keys, dim):
    """`multiply_keys` for K of a 16-bit format."""
    raise NotImplementedError


def add_stored_values(o, o_stride, alpha, address, row_stride, code, s, s_stride, rows, keys):
    """`add_values` for V of a 16-bit format."""
    raise NotImplementedError


@overload(multiply_stored_keys, jit_options=HELPER)
def _multiply_stored_keys(s, s_stride, address, row_stride, code, q, rows, keys, dim):
    if s.dtype != types.float32:
        return lambda s, s_stride, address, row_stride, code, q, rows, keys, dim: None

    def choose(s, s_stride, address, row_stride, code, q, rows, keys, dim):
        k, stride = uint16_at(address), row_stride // 2
        if code == BFLOAT16:
            multiply_bfloat16_keys(s, s_stride, k, stride, q, rows, keys, dim)
        else:
            multiply_float16_keys(s, s_stride, k, stride, q, rows, keys, dim)

    return choose


@overload(add_stored_values, jit_options=HELPER)
def _add_stored_values(o, o_stride, alpha, address, row_stride, code, s, s_stride, rows, keys):
    if o.dtype != types.float32:
        return lambda o, o_stride, alpha, address, row_stride, code, s, s_stride, rows, keys: None

    def choose(o, o_stride, alpha, address, row_stride, code, s, s_stride, rows, keys):
        v, stride = uint16_at(address), row_stride // 2
        if code == BFLOAT16:
            add_bfloat16_values(o, o_stride, alpha, v, stride, s, s_stride, rows, keys)
        else:
            add_float16_values(o, o_stride, alpha, v, stride, s, s_stride, rows, keys)

    return choose


@njit(**HELPER)
def multiply_keys_of_block(s, s_stride, block, k, first, q, rows, keys, padded):
    """The scores of `keys` keys from key `first` on, read where they are if format and number allow, else through
    `block`.

    Whole registers of scores are written; those beyond the last key are any numbers.
    """
    n, done = register_width(s), 0
    if k.columns == padded:
        whole = keys // n * n
        if readable_in_place(block, k, first, whole):
            at = pointer_like(block, row_address(k, first))
            multiply_keys(s, s_stride, at, stride_of(block, k), q, rows, whole, padded)
            done = whole
        elif readable_as_stored(block, k, first, whole):
            multiply_stored_keys(s, s_stride, row_address(k, first), k.row_stride, k.code, q, rows, whole, padded)
            done = whole
    for j in range(done, keys, CONVERTED):
        own = min(CONVERTED, keys - j)
        load_padded(block, k, first + j, own, padded)
        multiply_keys(move(s, j), s_stride, block, padded, q, rows, (own + n - 1) // n * n, padded)


@njit(**HELPER)
def add_values_of_block(o, alpha, block, v, first, s, s_stride, rows, keys, padded):
    """The same for the output. alpha is 1 afterwards."""
    if v.columns == padded and readable_in_place(block, v, first, keys):
        at = pointer_like(block, row_address(v, first))
        add_values(o, padded, alpha, at, stride_of(o, v), s, s_stride, rows, keys)
    elif v.columns == padded and readable_as_stored(block, v, first, keys):
        add_stored_values(o, padded, alpha, row_address(v, first), v.row_stride, v.code, s, s_stride, rows, keys)
    else:
        for j in range(0, keys, CONVERTED):
            n = min(CONVERTED, keys - j)
            load_padded(block, v, first + j, n, padded)
            add_values(o, padded, alpha, block, padded, move(s, j), s_stride, rows, n)
