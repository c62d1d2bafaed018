"""One source: the same formulas as Python floats, NumPy arrays, a lone compiled lane and a register tile of lanes."""

import math
import re

import ml_dtypes
import numpy as np
import pytest
from numba import njit, types
from numba.core.ccallback import CFunc

from flash_numba import attention, dtypes, ops, recurrence, scores
from flash_numba.cpu import forward
from flash_numba.cpu.compile import MATH
from flash_numba.cpu.simd import TILE, lane, lanes_of, load, pointer_to, row_numbers, scalar, store, tile_width

AWKWARD = [0.0, -0.0, 1.0, -1.0, 0.5, -126.0, -126.4, -126.6, -127.5, -150.0, -1e30, -math.inf, math.nan]
REALS = {np.float32: types.float32, np.float64: types.float64}


def on_tile(formula, *columns):
    """Apply a formula of lanes to columns of numbers through whole register tiles, and through lone lanes."""
    dtype = columns[0].dtype.type
    at = pointer_to(REALS[dtype])
    arity, width = len(columns), TILE.width(REALS[dtype])
    n = -(-columns[0].size // width) * width
    padded = np.ones((arity, n), dtype)
    for row, column in zip(padded, columns, strict=True):
        row[: column.size] = column
    out = np.zeros((2, n), dtype)
    if arity == 1:

        @njit(**MATH)
        def run(a, o, n):
            a, o = at(a), at(o)
            for j in range(n // tile_width(a)):
                store(formula(load(a, j)), o, j)
            for i in range(n):
                o[n + i] = scalar(formula(lane(a[i])))
    else:

        @njit(**MATH)
        def run(a, o, n):
            a, o = at(a), at(o)
            rows = n // tile_width(a)
            for j in range(rows):
                store(formula(load(a, j), load(a, rows + j)), o, j)
            for i in range(n):
                o[n + i] = scalar(formula(lane(a[i]), lane(a[n + i])))

    run(padded.ctypes.data, out.ctypes.data, n)
    return out[0, : columns[0].size], out[1, : columns[0].size]


@pytest.mark.parametrize("dtype", REALS)
def test_exp2_on_lanes(dtype):
    rng = np.random.default_rng(0)
    x = np.concatenate([AWKWARD, -np.logspace(-30, 2.1, 500), -rng.random(5000) * 130, rng.random(100)]).astype(dtype)
    exact = np.exp2(x.astype(np.float64))
    tile, lone = on_tile(njit(lambda x: ops.exp2(x)), x)
    np.testing.assert_array_equal(tile, lone)  # NaN included
    low = -126.0 if dtype is np.float32 else -1022.0
    normal = x >= low
    assert np.max(np.abs(tile[normal] / exact[normal] - 1)) <= (1e-7 if dtype is np.float32 else 4e-16)
    assert np.all(tile[x < low - 0.51] == 0)
    assert np.array_equal(np.isnan(tile), np.isnan(x))
    assert np.all(tile[x == 0] == 1)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x7FC12345])
def test_exp2_keeps_every_kind_of_nan(bits):
    x = np.full(64, np.uint32(bits)).view(np.float32)
    tile, lone = on_tile(njit(lambda x: ops.exp2(x)), x)
    assert np.isnan(tile).all()
    assert np.isnan(lone).all()


def run_recurrence(m, l, blocks, top, total):
    for s in blocks:
        m, ref, alpha = recurrence.advance(m, top(s))
        l = alpha * l + total(s, ref)
    return m, l


def test_recurrence_as_floats_arrays_and_kernel():
    """The log-sum-exp of the same scores: Python floats, NumPy, and the compiled kernel (q = 1, k = score)."""
    rng = np.random.default_rng(1)
    s = rng.standard_normal((3, 5)).astype(np.float32) * 5  # three blocks of five keys
    exact = np.log2(np.exp2(s.astype(np.float64)).sum())
    m, l = run_recurrence(
        -math.inf, 0.0, s.tolist(), max, lambda block, ref: sum(recurrence.weight(x, ref) for x in block)
    )
    assert recurrence.lse(m, l) / recurrence.LN2 == pytest.approx(exact, rel=1e-14)
    column = s.astype(np.float64)
    m, l = run_recurrence(
        np.float64(-np.inf), 0.0, column, np.max, lambda block, ref: recurrence.weight(block, ref).sum()
    )
    assert recurrence.lse(m, l) / recurrence.LN2 == pytest.approx(exact, rel=1e-14)
    q, k = np.ones((1, 1), np.float32), s.reshape(-1, 1)
    _, lse = attention(q, k, k, scale=recurrence.LN2, return_lse=True)
    assert lse[0] / recurrence.LN2 == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", REALS)
def test_formulas_agree_on_numpy_and_lanes(dtype):
    rng = np.random.default_rng(2)
    m = np.concatenate([rng.standard_normal(100) * 9, [-np.inf, -np.inf, 3.0, np.nan]]).astype(dtype)
    top = np.concatenate([rng.standard_normal(100) * 9, [-np.inf, 2.0, -np.inf, 1.0]]).astype(dtype)
    close = {"rtol": 3e-7 if dtype is np.float32 else 1e-15}
    for part in range(3):
        for got in on_tile(njit(lambda m, top: recurrence.advance(m, top)[part]), m, top):  # noqa: B023
            with np.errstate(invalid="ignore"):
                np.testing.assert_allclose(got, recurrence.advance(m, top)[part], **close)
    l = np.concatenate([rng.random(100) * 50 + 1, [0.0, 1.0, np.nan, np.inf]]).astype(dtype)
    for got in on_tile(njit(lambda l: recurrence.finish(l)), l):
        np.testing.assert_allclose(got, recurrence.finish(l), **close)
    seen = np.arange(l.size) % 2 == 0
    np.testing.assert_array_equal(scores.hide(l, seen), np.where(seen, l, -np.inf))


def test_merge_weights_bring_two_states_together():
    a, b = (3.0, 2.0), (5.0, 1.5)
    m, alpha_a, alpha_b = recurrence.merge_weights(a[0], b[0])
    assert m == 5.0
    assert alpha_a * a[1] + alpha_b * b[1] == 2.0 * 2**-2 + 1.5
    assert recurrence.merge_weights(-math.inf, -math.inf)[1:] == (0.0, 0.0)  # two empty states stay empty


def test_integer_lanes_count_rows():
    out = np.zeros(TILE.width(types.float32), np.float32)
    at = pointer_to(types.float32)

    @njit(**MATH)
    def run(o):
        o = at(o)
        store(
            ops.select(scores.between(10, row_numbers(o, -100), row_numbers(o, 7)), lanes_of(o, 1.0), lanes_of(o, 0.0)),
            o,
            0,
        )

    run(out.ctypes.data)
    np.testing.assert_array_equal(out, np.arange(7, 7 + out.size) >= 10)


def same_numbers(a, b):
    """Equal, any NaN equal to any other; as float32, since NumPy compares NaN of ml_dtypes as different."""
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_in_and_out(name):
    dtype = np.dtype(name if name == "float16" else ml_dtypes.bfloat16)
    bits = np.arange(65536, dtype=np.int32)
    numbers = bits.astype(np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        wide = getattr(dtypes, f"{name}_to_float32")(bits)
        same_numbers(wide, numbers.astype(np.float32))
        back = getattr(dtypes, f"float32_to_{name}")(wide).astype(np.uint16).view(dtype)
    same_numbers(back, numbers)
    # and through the kernel: one key, so that the output is that key's value
    one, v = np.ones((1, 1), dtype), numbers.reshape(1, -1)
    same_numbers(attention(one, one, v)[0], numbers)
    same_numbers(attention(one, one, v[:, ::-1])[0], numbers[::-1])  # strided: the other way in
    swapped = v.astype(dtype.newbyteorder("S")) if name == "float16" else v
    same_numbers(attention(one, one, swapped)[0], numbers)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_to_16_bits(name):
    """Ties, subnormals and overflow, against NumPy's and ml_dtypes' own rounding."""
    dtype = np.dtype(name if name == "float16" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(3)
    halves = rng.integers(0, 65536, 20000, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        nearby = np.concatenate([halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf)])
        ties = (halves[:-1] + halves[1:]) / 2
        limits = np.float32([65503.9, 65519.99, 65520, 65536, 1e9, 2**-24, 2**-25, 2**-26, 2**-14, 3.4e38, -0.0])
        x = np.concatenate([nearby, ties, limits, -limits, rng.standard_normal(20000).astype(np.float32)])
        expected = x.astype(dtype)
        formula = getattr(dtypes, f"float32_to_{name}")(x.view(np.float32)).astype(np.uint16).view(dtype)
    same_numbers(formula, expected)
    one, out = np.ones((1, 1), np.float32), np.empty((1, x.size), dtype)
    attention(one, one, x.reshape(1, -1), out=out)
    same_numbers(out[0], expected)


def test_inner_loops_keep_accumulators_in_registers():
    """In the code of both products: a loop of nothing but register FMAs, no stack traffic, no conversion to double."""
    signature = types.void(types.intp, types.intp, types.CPointer(types.float32))
    kernel = CFunc(forward.forward, (signature.args, signature.return_type), locals={}, options=MATH)
    kernel.compile()
    assembly = kernel._library.get_asm_str()
    if not TILE.fma or "vfmadd" not in assembly:
        pytest.skip("assembly of another CPU")
    per_step = TILE.rows * TILE.vectors
    blocks = re.split(r"\n(?=\.LBB\w+:)", assembly)
    loops = [b for b in blocks if len(re.findall(r"vfmadd\w+ps", b)) == 2 * per_step]  # two keys a turn
    assert len(loops) >= 2, "one for the scores, one for the values"
    for loop in loops:
        assert not re.search(r"\((%rsp|%rbp)", loop), loop
        assert "cvtss2sd" not in loop
    # nor has the function that turns scores into weights any double in it
    functions = re.split(r"\n(?=_ZN\w+:)", assembly)
    (weights,) = [f for f in functions if f.startswith("_ZN") and "scores_to_weights" in f.split(":")[0]]
    assert len(re.findall(r"vfmadd\w+ps", weights)) >= 6 * TILE.vectors
    assert not re.search(r"v\w+(sd|pd)\s", weights)
