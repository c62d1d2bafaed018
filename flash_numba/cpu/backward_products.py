"""The gradient's products whose lanes run along the head dimension: dV, dK and dQ are added to row by row.

Rows of Q, dO and K lie as they came, (row, column), a whole number of vector registers apart, and so do the sums. The
other factor is a block of P or dS, (key, row).
"""

from numba import njit

from .compile import STAGE
from .formats import transpose
from .ir.lanes import register_width
from .ir.memory import address_of, move, prefetch
from .ir.products import product_step
from .ir.registers import REGISTER_TILE

STEP = REGISTER_TILE.rows
PANEL = 1 << (
    REGISTER_TILE.vectors.bit_length() - 1
)  # vector registers of a step along the head dimension: divide it well
key_step, key_step_narrow, key_step_1, key_step_1_narrow = (
    product_step(m, registers, across=False, blend="sum") for m in (STEP, 1) for registers in (PANEL, 1)
)
query_step, query_step_narrow, query_step_1, query_step_1_narrow = (
    product_step(m, registers, across=True, blend="sum") for m in (STEP, 1) for registers in (PANEL, 1)
)


@njit(**STAGE)
def add_to_key_tile(c, c_stride, a, a_stride, b, b_stride, rows):
    """The full step, apart from all others: pointers that go through the same loop leave it on the stack."""
    key_step(c, c_stride, a, a_stride, b, b_stride, rows, c)


@njit(**STAGE)
def add_to_query_tile(c, c_stride, a, a_stride, b, b_stride, keys):
    query_step(c, c_stride, a, a_stride, b, b_stride, keys, c)


@njit(**STAGE)
def add_key_gradients(c, c_stride, a, a_stride, b, b_stride, keys, columns, row_ranges):
    """C[key, c] += sum_row A[key, row] B[row, c], over the rows that see one of a step's keys."""
    n, column = register_width(c), 0
    while column < columns:
        wide = columns - column > (PANEL - 1) * n
        for key in range(0, keys, STEP):
            start, stop = row_ranges[key // STEP * 2], row_ranges[key // STEP * 2 + 1]
            rows, rest = stop - start, min(STEP, keys - key)
            to, of = move(c, key * c_stride + column), move(a, key * a_stride + start)
            by = move(b, start * b_stride + column)
            if rows <= 0:
                continue
            for j in range(STEP, 2 * STEP):  # the next step's sums, which may lie in main memory
                prefetch(address_of(move(to, j * c_stride)))
                prefetch(address_of(move(to, j * c_stride + n)))
            if rest == STEP and wide:
                add_to_key_tile(to, c_stride, of, a_stride, by, b_stride, rows)
            elif rest == STEP:
                key_step_narrow(to, c_stride, of, a_stride, by, b_stride, rows, c)
            else:
                for j in range(rest):
                    to_j, of_j = move(to, j * c_stride), move(of, j * a_stride)
                    if wide:
                        key_step_1(to_j, c_stride, of_j, a_stride, by, b_stride, rows, c)
                    else:
                        key_step_1_narrow(to_j, c_stride, of_j, a_stride, by, b_stride, rows, c)
        column += PANEL * n if wide else n


@njit(**STAGE)
def add_query_gradients(c, c_stride, a, a_stride, b, b_stride, rows, columns, keys):
    """C[row, c] += sum_key A[key, row] B[key, c]"""
    n, column = register_width(c), 0
    while column < columns:
        wide = columns - column > (PANEL - 1) * n
        by = move(b, column)
        row = 0
        while row < rows:
            to, of = move(c, row * c_stride + column), move(a, row)
            if row + STEP <= rows:
                if wide:
                    add_to_query_tile(to, c_stride, of, a_stride, by, b_stride, keys)
                else:
                    query_step_narrow(to, c_stride, of, a_stride, by, b_stride, keys, c)
                row += STEP
            else:
                if wide:
                    query_step_1(to, c_stride, of, a_stride, by, b_stride, keys, c)
                else:
                    query_step_1_narrow(to, c_stride, of, a_stride, by, b_stride, keys, c)
                row += 1
        column += PANEL * n if wide else n


@njit(**STAGE)
def add_seen(c, c_stride, a, weights, m_stride, k_stride, b, b_stride, count, depth, columns, total):
    """C[m, c] += sum_k A[m, k] B[k, c] over the pairs that aren't marked as hidden in P: 0 * NaN would leak. Rare."""
    for m in range(count):
        for column in range(columns):
            total[column] = 0
        for k in range(depth):
            at = m * m_stride + k * k_stride
            if not weights[at] < 0:
                for column in range(columns):
                    total[column] += a[at] * b[k * b_stride + column]
        for column in range(columns):
            c[m * c_stride + column] += total[column]


@njit(**STAGE)
def fill(to, count, value):
    for i in range(count):
        to[i] = value


@njit(**STAGE)
def add_bias_gradient(to, row_stride, column_stride, staging, gradients, stride, rows, keys):
    """dS of a row tile onto the bias's gradient; a stride of 0 is an axis that the bias repeats along."""
    transpose(staging, keys, gradients, stride, keys, rows)
    if column_stride == 0:
        for r in range(rows):
            total = staging[r * keys]
            for j in range(1, keys):
                total += staging[r * keys + j]
            to[r * row_stride] += total
        return
    if row_stride == 0:
        for r in range(1, rows):
            for j in range(keys):
                staging[j] += staging[r * keys + j]
        rows = 1
    for r in range(rows):
        row = move(to, r * row_stride)
        if column_stride == 1:
            for j in range(keys):
                row[j] += staging[r * keys + j]
        else:
            for j in range(keys):
                row[j * column_stride] += staging[r * keys + j]
