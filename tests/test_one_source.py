"""One source: the same formulas as Python floats, NumPy arrays, a lone compiled lane and a register tile of lanes."""

import itertools
import math
import re

import ml_dtypes
import numpy as np
import pytest
from numba import njit, types
from numba.core.ccallback import CFunc

from flash_numba import attention, dropout, dtypes, geometry, ops, recurrence, reference, scores
from flash_numba.cpu import forward
from flash_numba.cpu.compile import MATH
from flash_numba.cpu.ir.lanes import lane, lane_numbers, lanes_of, scalar, tile_width
from flash_numba.cpu.ir.memory import load, pointer_to, store
from flash_numba.cpu.ir.registers import REGISTER_TILE

AWKWARD = [0.0, -0.0, 1.0, -1.0, 0.5, -126.0, -126.4, -126.6, -127.5, -150.0, -1e30, -math.inf, math.nan]
REALS = {np.float32: types.float32, np.float64: types.float64}
NUMBERS = {**REALS, np.int32: types.int32}


def rows_of_lanes(formula, arity):
    """formula on row j of `arity` columns that stand `rows` rows apart."""
    return {
        1: njit(lambda a, j, rows: formula(load(a, j))),
        2: njit(lambda a, j, rows: formula(load(a, j), load(a, rows + j))),
        3: njit(lambda a, j, rows: formula(load(a, j), load(a, rows + j), load(a, 2 * rows + j))),
        4: njit(lambda a, j, n: formula(load(a, j), load(a, n + j), load(a, 2 * n + j), load(a, 3 * n + j))),
    }[arity]


def lone_lanes(formula, arity):
    """The same for a single number each."""
    return {
        1: njit(lambda a, i, n: formula(lane(a[i]))),
        2: njit(lambda a, i, n: formula(lane(a[i]), lane(a[n + i]))),
        3: njit(lambda a, i, n: formula(lane(a[i]), lane(a[n + i]), lane(a[2 * n + i]))),
        4: njit(lambda a, i, n: formula(lane(a[i]), lane(a[n + i]), lane(a[2 * n + i]), lane(a[3 * n + i]))),
    }[arity]


def on_tile(formula, *columns):
    """Apply a formula of lanes to columns of numbers through whole register tiles, and through lone lanes."""
    kind = NUMBERS[columns[0].dtype.type]
    at, width = pointer_to(kind), REGISTER_TILE.width(kind)
    n = -(-columns[0].size // width) * width
    padded = np.ones((len(columns), n), columns[0].dtype)
    for row, column in zip(padded, columns, strict=True):
        row[: column.size] = column
    out = np.zeros((2, n), columns[0].dtype)
    tile, lone = rows_of_lanes(formula, len(columns)), lone_lanes(formula, len(columns))

    @njit(**MATH)
    def run(a, o, n):
        a, o = at(a), at(o)
        rows = n // tile_width(a)
        for j in range(rows):
            store(tile(a, j, rows), o, j)
        for i in range(n):
            o[n + i] = scalar(lone(a, i, n))

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


def units(got, exact):
    """Errors in units of the last place of the exact number."""
    return np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(got.dtype)).astype(np.float64)


@pytest.mark.parametrize("dtype", REALS)
def test_tanh_on_lanes(dtype):
    rng = np.random.default_rng(4)
    small = np.concatenate([np.logspace(-30, 1.5, 4000), rng.random(4000) * 10, [0.0, 20.0, 1e30, np.inf]])
    x = np.concatenate([small, -small, [np.nan]]).astype(dtype)
    exact = np.tanh(x.astype(np.longdouble)).astype(np.float64)
    tile, lone = on_tile(njit(lambda x: ops.tanh(x)), x)
    np.testing.assert_array_equal(tile, lone)
    assert np.isnan(tile[-1])
    if dtype is np.float32:
        assert units(tile[:-1], exact[:-1]).max() <= 4.5
    else:
        assert np.abs(tile[:-1] - exact[:-1]).max() <= 3e-16
    assert np.abs(tile[:-1]).max() <= 1
    half = small.size
    np.testing.assert_array_equal(tile[:half], -tile[half:-1])  # odd


@pytest.mark.parametrize("dtype", REALS)
def test_score_rules_agree_on_numpy_and_lanes(dtype):
    """Each formula of scores.py, with the special values that its rule has a meaning for."""
    rng = np.random.default_rng(5)
    close = {"rtol": 1e-6 if dtype is np.float32 else 1e-14}
    s = np.concatenate([rng.standard_normal(200) * 20, AWKWARD]).astype(dtype)

    cap = np.concatenate([rng.uniform(0.1, 60, 200), np.full(len(AWKWARD), 30.0)]).astype(dtype)
    for got in on_tile(njit(lambda s, cap: scores.softcapped(s, cap, 1.0 / cap)), s, cap):
        np.testing.assert_allclose(got, scores.softcapped(s, cap, 1 / cap), **close)
        exact = cap.astype(np.float64) * np.tanh(s.astype(np.float64) / cap)
        np.testing.assert_allclose(got, exact, rtol=5e-7 if dtype is np.float32 else 1e-14, atol=1e-15)

    slope, p, j = (rng.uniform(0, 1, s.size).astype(dtype), *rng.integers(-50, 500, (2, s.size)).astype(dtype))
    exact = s.astype(np.float64) - slope.astype(np.float64) * np.abs(p - j)
    for got in on_tile(njit(lambda s, slope, p, j: scores.with_alibi(s, slope, p, j)), s, slope, p, j):
        np.testing.assert_allclose(got, scores.with_alibi(s, slope, p, j), **close, atol=100 * np.finfo(dtype).eps)
        np.testing.assert_allclose(got, exact, rtol=close["rtol"], atol=500 * np.finfo(dtype).eps)

    limits = np.finfo(dtype)
    special = [-np.inf, limits.min, limits.min / 2, limits.min / 1.5, -1e9, 0.0, np.nan]
    bias = np.concatenate([rng.standard_normal(s.size - len(special)) * 5, special]).astype(dtype)
    plain = np.concatenate([s[: -len(special)], np.full(len(special), 2.5)]).astype(dtype)
    lowest = np.full_like(s, limits.min)
    with np.errstate(over="ignore", invalid="ignore"):
        want = scores.with_bias(plain, bias, lowest)
        exact = plain + np.maximum(bias.astype(np.float64) * scores.LOG2E, limits.min)
        exact[bias == -np.inf] = -np.inf
    for got in on_tile(njit(lambda s, bias, lowest: scores.with_bias(s, bias, lowest)), plain, bias, lowest):
        np.testing.assert_allclose(got, want, **close)
        np.testing.assert_allclose(got, exact, rtol=close["rtol"], atol=20 * limits.eps)
        assert got[-len(special)] == -np.inf  # a mask
        assert np.isfinite(got[1 - len(special) : -1]).all()  # numbers, however low
    hidden = np.full_like(s, np.nan)
    hidden[::2] = 1
    for got in on_tile(njit(lambda s, seen: scores.hide(s, seen == 1.0)), s, hidden):
        np.testing.assert_array_equal(got, scores.hide(s, hidden == 1))
        np.testing.assert_array_equal(got, np.where(hidden == 1, s, -np.inf))


@pytest.mark.parametrize("dtype", [np.int32, *REALS])
def test_between_includes_both_ends(dtype):
    j, first, last = (x.ravel().astype(dtype) for x in np.meshgrid(*[np.arange(-3, 4)] * 3))
    want = (first <= j) & (j <= last)
    np.testing.assert_array_equal(geometry.between(j, first, last), want)
    one_or_nothing = njit(lambda j, first, last: ops.select(geometry.between(j, first, last), j * 0 + 1, j * 0))
    for got in on_tile(one_or_nothing, j, first, last):
        np.testing.assert_array_equal(got == 1, want)


def test_ranges_of_keys_are_those_between():
    """What some row of a tile sees, and what every one does, by trying all keys."""
    for first, last, left, right, keys in itertools.product(range(-3, 7), range(-3, 9), range(4), range(4), (0, 1, 5)):
        if last < first:
            continue
        seen = [[geometry.between(j, p - left, p + right) for j in range(keys)] for p in range(first, last + 1)]
        some, every = np.any(seen, axis=0), np.all(seen, axis=0)
        visible = geometry.visible_keys(first, last, left, right, 0, keys)
        assert 0 <= visible.start <= visible.stop <= max(keys, visible.start)
        assert [j for j in range(keys) if visible.start <= j < visible.stop] == list(np.flatnonzero(some))
        assert [j for j in range(keys) if visible.full_start <= j < visible.full_stop] == list(np.flatnonzero(every))
        part = geometry.visible_keys(first, last, left, right, 2, max(2, keys))  # of a KV split, or of a block
        assert [j for j in range(2, keys) if part.start <= j < part.stop] == list(np.flatnonzero(some[2:]) + 2)


def test_no_rows_see_no_key():
    visible = geometry.visible_keys(3, 2, geometry.UNLIMITED, geometry.UNLIMITED, 0, 9)
    assert visible.start >= visible.stop


def test_blocks_of_keys_and_what_a_tile_sees_of_them():
    """Every key that some row sees lies in a block that is visited; the state of a block is that of its keys."""
    for first, last, left, right, keys in itertools.product(
        range(-3, 7), range(-3, 9), (0, 2, 9), (0, 2, 9), (0, 1, 5, 9)
    ):
        if last < first:
            continue
        seen = [[geometry.between(j, p - left, p + right) for j in range(keys)] for p in range(first, last + 1)]
        some, every = np.any(seen, axis=0), np.all(seen, axis=0)
        visible = geometry.visible_keys(first, last, left, right, 0, keys)
        visited, block = [], geometry.next_block(visible, 0, 4)
        while block < visible.stop:
            assert block % 4 == 0
            visited.append(block)
            block = geometry.next_block(visible, block + 4, 4)
        for start in range(0, keys, 4):
            state = geometry.block_state(visible, start, start + 4)
            assert (start in visited) == some[start : start + 4].any() == (state != geometry.SKIP)
            # a block that ends with the last key isn't full: what fills it up is no key
            assert (state == geometry.FULL) == (start + 4 <= keys and every[start : start + 4].all())


# ---- the dropout generator

KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32, 10 rounds: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(x):
    return np.asarray(x, np.int64).astype(np.uint32).view(np.int32)


def test_mul_high_on_numpy_and_lanes():
    rng = np.random.default_rng(6)
    edges = signed([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xD2511F53])
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    a, b = (np.concatenate([x, signed(rng.integers(0, 2**32, 200))]) for x in (a, b))
    want = [int(x) * int(y) >> 32 for x, y in zip(a.view(np.uint32), b.view(np.uint32), strict=True)]
    np.testing.assert_array_equal(ops.mul_high(a, b).view(np.uint32), want)
    for got in on_tile(njit(lambda a, b: ops.mul_high(a, b)), a, b):
        np.testing.assert_array_equal(got.view(np.uint32), want)
    constant = dropout.MULTIPLIER_0
    want = [int(x) * 0xD2511F53 >> 32 for x in a.view(np.uint32)]
    for got in on_tile(njit(lambda a: ops.mul_high(a, constant)), a):
        np.testing.assert_array_equal(got.view(np.uint32), want)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_on_numpy(counter, key, words):
    keys = dropout.round_keys(key[0] + (key[1] << 32))
    assert all(-(2**31) <= k < 2**31 for k in keys)
    got = dropout.philox(*(signed([c]) for c in counter), signed(keys))
    assert tuple(int(w.view(np.uint32)[0]) for w in got) == words


def test_philox_on_lanes():
    """A known answer and random counters, as NumPy and the oracle have them."""
    rng = np.random.default_rng(7)
    known, key, _ = KNOWN_ANSWERS[-1]
    keys = signed(dropout.round_keys(key[0] + (key[1] << 32)))
    counters = np.concatenate([signed(known)[:, None], signed(rng.integers(0, 2**32, (4, 100)))], axis=1)
    want = dropout.philox(*counters, keys)
    oracle = reference.philox(counters.view(np.uint32), key)
    keys_at, address = pointer_to(types.int32), keys.ctypes.data
    for word in range(4):
        np.testing.assert_array_equal(want[word].view(np.uint32), oracle[word])
        formula = njit(lambda a, b, c, d: dropout.philox(a, b, c, d, keys_at(address))[word])  # noqa: B023
        for got in on_tile(formula, *counters):
            np.testing.assert_array_equal(got, want[word])


def test_words_are_compared_as_unsigned_numbers():
    word, threshold = (x.ravel() for x in np.meshgrid(*[signed([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])] * 2))
    want = word.view(np.uint32) >= threshold.view(np.uint32)
    np.testing.assert_array_equal(dropout.kept(word, threshold), want)
    for got in on_tile(njit(lambda w, t: ops.select(dropout.kept(w, t), w * 0 + 1, w * 0)), word, threshold):
        np.testing.assert_array_equal(got == 1, want)


def test_merge_brings_two_states_together():
    m, l, alpha_a, alpha_b = recurrence.merge(3.0, 2.0, 5.0, 1.5)
    assert (m, l, alpha_a, alpha_b) == (5.0, 2.0 * 2**-2 + 1.5, 2**-2, 1.0)
    assert recurrence.merge(-math.inf, 0.0, -math.inf, 0.0) == (-math.inf, 0.0, 0.0, 0.0)  # two empty states stay empty


@pytest.mark.parametrize("dtype", REALS)
def test_rounding_factor_is_an_exponential(dtype):
    rounding = np.array([0.0, 1e-8, -3e-4, 0.0199, -0.0199, 0.02, -0.5, np.nan, np.inf], dtype)
    want = np.where(np.abs(rounding) < 0.02, np.exp(-rounding.astype(np.float64)), 1.0)
    np.testing.assert_allclose(recurrence.rounding_factor(rounding), want, rtol=2e-6)
    for got in on_tile(njit(recurrence.rounding_factor), rounding):
        np.testing.assert_allclose(got, want, rtol=2e-6)


def test_each_key_has_a_word_of_its_counter():
    j, words = np.arange(9), [np.full(9, n) for n in (10, 11, 12, 13)]
    np.testing.assert_array_equal(dropout.word_of_key(*words, j), 10 + j % 4)


def test_integer_lanes_count_rows():
    out = np.zeros(REGISTER_TILE.width(types.float32), np.float32)
    at = pointer_to(types.float32)

    @njit(**MATH)
    def run(o):
        o = at(o)
        store(
            ops.select(
                geometry.between(10, lane_numbers(o, -100), lane_numbers(o, 7)), lanes_of(o, 1.0), lanes_of(o, 0.0)
            ),
            o,
            0,
        )

    run(out.ctypes.data)
    np.testing.assert_array_equal(out, np.arange(7, 7 + out.size) >= 10)


def same_numbers(a, b):
    """Equal, any NaN equal to any other; as float32, since NumPy compares NaN of ml_dtypes as different."""
    with np.errstate(invalid="ignore"):  # a signalling NaN warns on ARM
        a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_array_equal(a, b)


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
    with np.errstate(invalid="ignore"):
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
    if not REGISTER_TILE.fma or "vfmadd" not in assembly:
        pytest.skip("assembly of another CPU")
    per_step = REGISTER_TILE.rows * REGISTER_TILE.vectors
    blocks = re.split(r"\n(?=\.LBB\w+:)", assembly)
    loops = [b for b in blocks if len(re.findall(r"vfmadd\w+ps", b)) == 2 * per_step]  # two keys a turn
    assert len(loops) >= 2, "one for the scores, one for the values"
    for loop in loops:
        assert "(%rsp" not in loop, loop
        assert "cvtss2sd" not in loop
    # nor has the function that turns scores into weights any double in it
    functions = re.split(r"\n(?=_ZN\w+:)", assembly)
    (weights,) = [f for f in functions if f.startswith("_ZN") and "scores_to_weights" in f.split(":")[0]]
    assert len(re.findall(r"vfmadd\w+ps", weights)) >= 6 * REGISTER_TILE.vectors
    assert not re.search(r"v\w+(sd|pd)\s", weights)
