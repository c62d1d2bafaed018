"""Remembered calls: whatever a repeated call of the same shapes differs in, its results are its own.

Each keyword of `attention` is a part of the key of remembered calls, or has to be at its default for a call to be
remembered at all, or makes no difference to what is kept. Which of the three is in the record (`rules.py`), and the
tests here go through the signature.
"""

import inspect
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from flash_numba import AttentionStream, attention, interface, prepared, reference, rules
from flash_numba.cpu import launch
from flash_numba.gpu import driver

SHAPES = [(1, 6, 6, 8), (1, 20, 20, 8)]  # for the kernel of few queries and that of many; of either layout
FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def seen(done, total):
    """A progress callback."""


class Change(NamedTuple):
    """A value of a keyword, and what else has to be given for it to matter."""

    value: object
    others: dict = {}  # noqa: RUF012


def changes(n):
    """For every keyword of `attention`, values other than the default, for n heads, queries and keys."""
    rng = np.random.default_rng(1)
    return {
        "causal": [Change(True), Change("top-left"), Change("top-left", {"kv_lengths": n - 2}), Change(np.True_)],
        "window": [Change((2, 1)), Change((2, None)), Change([2, 1])],
        "scale": [Change(0.9), Change(np.float32(0.9))],
        "softcap": [Change(0.7)],
        "bias": [Change(rng.standard_normal(n))],
        "mask": [Change(rng.random(n) < 0.5)],
        "alibi_slopes": [Change(np.linspace(0.1, 1, n))],
        "sinks": [Change(np.linspace(-1, 1, n))],
        "q_lengths": [Change(n - 3)],
        "kv_lengths": [Change(n - 2)],
        "q_offset": [Change(-2, {"causal": True})],
        "dropout": [Change(0.5, {"seed": 3})],
        "seed": [Change(4)],
        "training": [Change(False), Change(False, {"dropout": 0.5, "seed": 3})],
        "k_scale": [Change(3.0), Change(np.linspace(1, 4, n))],
        "v_scale": [Change(3.0), Change(np.linspace(1, 4, n))],
        "layout": [Change("bshd")],
        "out": [Change(np.empty((1, n, n, 8), np.float64))],
        "return_lse": [Change(True)],
        "backend": [Change("cpu"), Change("reference"), Change("cuda")],
        "threads": [Change(1), Change(np.int64(2))],
        "progress": [Change(seen)],
    }


CASES = [(name, n) for name, values in changes(6).items() for n in range(len(values))]


@pytest.fixture
def looks(monkeypatch):
    """What `attention` has looked up: (key, whether something was found)."""
    found = []

    def recall(*arguments):
        key, kept = prepared.recall(*arguments)
        found.append((key, kept is not None))
        return key, kept

    monkeypatch.setattr(prepared, "_known", {})
    monkeypatch.setattr(interface, "recall", recall)
    return found


def test_every_keyword_is_here():
    keywords = [name for name, x in inspect.signature(attention).parameters.items() if x.kind == x.KEYWORD_ONLY]
    assert list(changes(6)) == keywords


@pytest.mark.parametrize("shape", SHAPES, ids=["few", "many"])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_keyword_is_in_the_key_or_switches_remembering_off(looks, monkeypatch, name, number, shape):
    change = changes(shape[1])[name][number]
    q, k, v = (normal(*shape, seed=n) for n in range(3))
    plain = [attention(q, k, v) for _ in range(3)][-1].copy()
    (plain_key, _), (_, known) = looks[0], looks[-1]
    assert plain_key is not None
    assert known  # what is to be told apart is remembered
    called = []
    monkeypatch.setattr(driver, "find", lambda: called.append("cuda") or pytest.skip("never"))

    options = change.others | {name: change.value}
    if name == "progress":
        options["progress"] = lambda done, total: called.append(name)
    if options.get("backend") == "cuda":

        def nowhere():
            raise driver.BackendError("no GPU here")

        monkeypatch.setattr(driver, "find", nowhere)
        for _ in range(2):
            with pytest.raises(driver.BackendError, match="no GPU here"):
                attention(q, k, v, **options)
        return
    rest = {
        x: value for x, value in options.items() if x not in ("out", "return_lse", "backend", "threads", "progress")
    }
    want = reference.attention(q, k, v, **rest)
    looks.clear()
    for _ in range(2):
        result = attention(q, k, v, **options)
        got = result[0] if name == "return_lse" else result
        np.testing.assert_allclose(got, want, atol=3e-6)
        np.testing.assert_array_equal(attention(q, k, v), plain)  # and that one still has its own
    keys = [key for key, _ in looks[::2]]

    remembered = next(rule.remembered for rule in rules.RULES if rule.name == name)
    by_value = isinstance(change.value, (bool, int, float, str, tuple, type(None)))
    if remembered == rules.FREE and not change.others:
        assert set(keys) == {plain_key}
        np.testing.assert_array_equal(got, plain)
    elif remembered == rules.KEY and not change.others and by_value:
        assert None not in keys
        assert plain_key not in keys
    else:
        assert set(keys) == {None}
    if name == "out":
        assert got is change.value
    elif name == "progress":
        assert called == [name] * len(called) != []
    elif name == "return_lse":
        assert isinstance(result, tuple)
    elif name == "threads":
        np.testing.assert_array_equal(got, plain)
    elif name == "backend":
        if change.value == "reference":
            np.testing.assert_array_equal(got, want.astype(np.float32))
    elif name not in ("seed", "training"):
        assert np.abs(got - plain).max() > 1e-3  # it does matter


@pytest.mark.parametrize("shape", SHAPES, ids=["few", "many"])
@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_the_key_has_the_strides_of_each(shape, which):
    """Same shapes, and one of q, k and v as another view."""
    for view in (
        lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
        lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
        lambda x: np.repeat(x, 2, axis=-3)[:, ::2],
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[..., :1, :], x.shape),
        lambda x: x[..., ::-1, :],
    ):
        arrays = [normal(*shape, seed=n) for n in range(3)]
        attention(*arrays)
        attention(*arrays)
        arrays[which] = view(arrays[which])
        want = reference.attention(*arrays)
        for _ in range(2):
            np.testing.assert_allclose(attention(*arrays), want, atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=["few", "many"])
@pytest.mark.parametrize(
    ("which", "view"),
    [
        ("q", lambda x: x[..., :4, :]),
        ("k", lambda x: x[:, :1]),
        ("v", lambda x: x[:, :1]),
        ("v", lambda x: x[..., :5]),
        ("kv", lambda x: x[..., :3, :]),
    ],
    ids=["rows", "heads of k", "heads of v", "columns", "keys"],
)
def test_the_key_has_the_shape_of_each(shape, which, view):
    """Same strides, and some of q, k and v smaller."""
    arrays = [normal(*shape, seed=n) for n in range(3)]
    attention(*arrays)
    attention(*arrays)
    smaller = [view(x) if name in which else x for name, x in zip("qkv", arrays, strict=True)]
    assert [x.strides for x in smaller] == [x.strides for x in arrays]
    for _ in range(2):
        np.testing.assert_allclose(attention(*smaller), reference.attention(*smaller), atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=["few", "many"])
@pytest.mark.parametrize(
    ("which", "dtypes"),
    [
        ("qkv", [np.float32, ">f4"]),
        ("qkv", [np.float16, ml_dtypes.bfloat16]),
        ("k", FLOAT8),
        ("v", FLOAT8),
    ],
    ids=["byte order", "16 bits", "k", "v"],
)
def test_the_key_has_the_dtype_of_each(shape, which, dtypes):
    """Same shapes, same bytes an element."""
    for _ in range(2):
        for dtype in dtypes:
            arrays = [
                normal(*shape, seed=n).astype(dtype if name in which else np.float32) for n, name in enumerate("qkv")
            ]
            want = reference.attention(*arrays)
            for _ in range(2):
                np.testing.assert_allclose(attention(*arrays).astype(float), want, rtol=1e-2, atol=1e-5)


def test_q_alone_has_a_dtype_of_its_own():
    """With keys and values of 8 bits nothing but q tells what the output is."""
    k, v = (normal(1, 2, 20, 8, seed=n, dtype=FLOAT8[0]) for n in (1, 2))
    for dtype in (np.float16, np.dtype(ml_dtypes.bfloat16)) * 2:
        q = normal(1, 2, 20, 8).astype(dtype)
        out = attention(q, k, v)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(float), reference.attention(q, k, v), rtol=1e-2, atol=1e-5)


# ---- chunks of a stream that are like the last one


def chunks_of(k, v, which, view):
    """Two chunks of a form, of 8 keys each, and one more of which k or v is another view of the same shape."""
    parts = [[x[..., start : start + 8, :].copy() for x in (k, v)] for start in (0, 8, 16)]
    parts[2][which] = view(parts[2][which])
    return parts


@pytest.mark.parametrize("which", [0, 1], ids="kv")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
        lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
        lambda x: x[..., ::-1, :],
        lambda x: x.astype(">f4"),
        lambda x: x[:1],
    ],
    ids=["rows", "columns", "backwards", "byte order", "heads"],
)
def test_chunks_of_another_form_are_told_apart(monkeypatch, view, which):
    k, v = normal(2, 24, 8, seed=1), normal(2, 24, 8, seed=2)
    q = normal(2, 20, 8)
    parts, planned = chunks_of(k, v, which, view), []
    monkeypatch.setattr(launch, "prepare", lambda *of, do=launch.prepare: planned.append(1) or do(*of))
    stream = AttentionStream(q, causal=True, kv_total=24)
    for part in parts:
        stream.absorb(*part)
    assert len(planned) == 2  # the second chunk was absorbed as the first one
    keys, values = (
        np.concatenate([np.broadcast_to(part[n], (2, 8, 8)) for part in parts], axis=-2).astype(np.float32)
        for n in (0, 1)
    )
    want, want_lse = reference.attention(q, keys, values, causal=True, return_lse=True)
    out, lse = stream.result()
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)


@pytest.mark.parametrize("which", ["k", "v"])
def test_chunks_of_another_8_bit_dtype_are_told_apart(which):
    q = normal(2, 20, 8)
    parts = [
        [normal(2, 8, 8, seed=n + 3).astype(dtype if name == which else np.float32) for n, name in enumerate("kv")]
        for dtype in FLOAT8
    ]
    stream = AttentionStream(q)
    for part in parts:
        stream.absorb(*part)
    keys, values = (np.concatenate([part[n].astype(np.float32) for part in parts], axis=-2) for n in (0, 1))
    np.testing.assert_allclose(stream.result()[0], reference.attention(q, keys, values), atol=3e-6)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_chunk_with_an_operand_isnt_like_the_last_one(name):
    q, k, v = normal(2, 20, 8), normal(2, 8, 8, seed=1), normal(2, 8, 8, seed=2)
    operand = normal(8, seed=3) if name == "bias" else normal(8, seed=3) > 0
    stream = AttentionStream(q).absorb(k, v).absorb(k, v, **{name: operand}).absorb(k, v)
    none = np.zeros(8, np.float32) if name == "bias" else np.ones(8, bool)
    whole = {name: np.concatenate([none, operand, none])}
    want = reference.attention(q, *(np.concatenate([x] * 3, axis=-2) for x in (k, v)), **whole)
    np.testing.assert_allclose(stream.result()[0], want, atol=3e-6)
