"""Arguments that lie about themselves: what looks alike but isn't, and what other libraries let slip."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import flash_numba
from flash_numba import AttentionStream, attention, attention_grad, attention_partial, attention_varlen, merge, prepared
from flash_numba.cpu.backend import CPU


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def qkv():
    return normal(2, 4, 9, 16), normal(2, 2, 13, 16, seed=1), normal(2, 2, 13, 16, seed=2)


# ---- repeated calls are remembered by value: nothing that changes or only compares equal may be taken for another


class Mutable:
    """A number that can change, like a learnable parameter."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_changes_is_read_at_every_call(qkv, name):
    number = Mutable(0.1)
    attention(*qkv, **{name: number})
    number.value = 5.0
    np.testing.assert_array_equal(attention(*qkv, **{name: number}), attention(*qkv, **{name: 5.0}))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"window": (3, 0)}, {"window": (3.0, 0.0)}),
        ({"scale": 1.0}, {"scale": 1 + 0j}),
        ({"softcap": 2.0}, {"softcap": 2 + 0j}),
        ({"causal": True}, {"causal": 1}),
        ({}, {"dropout": np.array([0.0, 0.0])}),
    ],
)
def test_checks_dont_depend_on_calls_before(qkv, good, bad):
    attention(*qkv, **good)
    attention(*qkv, **good)
    with pytest.raises((TypeError, ValueError)):
        attention(*qkv, **bad)


def test_remembered_calls_follow_memory_strides_and_layout():
    q = normal(1, 6, 6, 16)
    for view in (q, q[..., ::-1], q.transpose(0, 2, 1, 3), q[:, ::-1], np.asfortranarray(q), q.astype(">f4"), q.copy()):
        for layout in ("bhsd", "bshd"):
            for causal in (False, True, "top-left"):
                for _ in range(2):  # the second time it is remembered
                    got = attention(view, view, view, causal=causal, layout=layout)
                    want = attention(view, view, view, causal=causal, layout=layout, backend="reference")
                    np.testing.assert_allclose(got, want, atol=2e-6)


def test_not_more_than_so_many_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 3)
    for n in range(1, 9):
        x = normal(n, 4)
        attention(x, x, x)
    assert len(prepared._known) <= 3


def test_the_oldest_remembered_call_is_forgotten(monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 3)
    monkeypatch.setattr(prepared, "_known", {})
    for n in (1, 2, 3, 1, 4):
        x = normal(n, 4)
        attention(x, x, x)
    assert [key[0][0] for key in prepared._known] == [(2, 4), (3, 4), (4, 4)]


# ---- bad input gets an error that names it


MASKED = np.ma.masked_array(np.ones(13, bool), [0] + [1] * 12)
RAGGED = [[1], [1, 2]]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask": MASKED}, "mask"),
        ({"bias": np.ma.masked_array(np.ones(13))}, "bias"),
        ({"mask": RAGGED}, "mask"),
        ({"bias": RAGGED}, "bias"),
        ({"q_lengths": RAGGED}, "q_lengths"),
        ({"k_scale": RAGGED}, "k_scale"),
        ({"alibi_slopes": np.ones(4) * 1j}, "alibi_slopes"),
        ({"alibi_slopes": ["1"] * 4}, "alibi_slopes"),
        ({"scale": 10**400}, "scale"),
        ({"scale": "0.5"}, "scale"),
        ({"dropout": np.array([0.1, 0.2])}, "dropout"),
        ({"dropout": 0.2, "seed": np.array([3, 4])}, "seed"),
        ({"progress": 3}, "progress"),
        ({"out": np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (2, 4, 9, 16), (0, 0, 0, 4))}, "out"),
    ],
)
def test_errors_name_the_argument(qkv, options, name):
    with pytest.raises((TypeError, ValueError), match=name):
        attention(*qkv, **options)


def test_errors_of_other_calls(qkv):
    q, k, v = qkv
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        attention_varlen(normal(10, 4, 16), normal(12, 2, 16), normal(12, 2, 16), RAGGED, [0, 1])
    with pytest.raises(TypeError, match="k_offset"):
        attention_partial(q, k, v, q_offset=4, k_offset=np.array([1, 2]))
    with pytest.raises(ValueError, match="causal"):
        AttentionStream(q, causal=np.array([1, 2]), kv_total=3)
    with pytest.raises(ValueError, match="kv_total=5"):
        AttentionStream(q, kv_total=5).absorb(k, v)
    with pytest.raises(TypeError, match="float32"):
        flash_numba.warmup(["nope"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_masked_arrays_are_refused(qkv, number):
    arrays = list(qkv)
    arrays[number] = np.ma.masked_array(arrays[number])
    with pytest.raises(TypeError, match=f"{'qkv'[number]} is a masked array"):
        attention(*arrays)


def test_a_masked_output_is_refused(qkv):
    """It would keep its mask, and hide the result."""
    out = np.ma.masked_array(np.zeros_like(qkv[0]), mask=True)
    with pytest.raises(TypeError, match="out is a masked array, whose mask would hide the result"):
        attention(*qkv, out=out)
    packed, lengths = [x[0].swapaxes(0, 1) for x in qkv], [0, len(qkv[0][0, 0])]
    with pytest.raises(TypeError, match="out is a masked array"):
        attention_varlen(*packed, *[np.array(lengths)] * 2, out=out[0].swapaxes(0, 1))


STRINGS = np.array([["1", "2"]], np.dtypes.StringDType())


OF_ARRAYS = (
    *("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "q_offset", "out", "scale"),
    *("k_scale", "v_scale", "dout", "lse", "dlse", "outs", "lses", "cu_seqlens_q", "cu_seqlens_k", "dtypes"),
)


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_strings_of_any_length_are_refused(qkv, name):
    """NumPy's StringDType, which has no byte order."""
    q, k, v = qkv
    out, lse = attention(q, k, v, return_lse=True)
    packed = dict(zip("qkv", (x[0].swapaxes(0, 1) for x in qkv), strict=True))
    offsets = {"cu_seqlens_q": np.array([0, 1]), "cu_seqlens_k": np.array([0, 1])}
    gradient = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    calls = [
        (attention, {"q": q, "k": k, "v": v}, "q k v bias mask alibi_slopes sinks q_lengths kv_lengths q_offset out"
         " k_scale v_scale scale"),
        (attention_varlen, {**packed, **offsets}, "q k v out cu_seqlens_q cu_seqlens_k sinks"),
        (attention_grad, gradient, "dout q k v out lse dlse bias mask sinks"),
        (AttentionStream, {"q": q}, "q sinks q_offset"),
        (AttentionStream(q).absorb, {"k": k, "v": v}, "k v bias mask"),
        (merge, {"outs": [out], "lses": [lse]}, "outs lses sinks"),
        (flash_numba.warmup, {}, "dtypes"),
    ]  # fmt: skip
    tried = 0
    for call, arguments, names in calls:
        if name in names.split():
            bad = [STRINGS] if name in ("outs", "lses") else STRINGS.dtype if name == "dtypes" else STRINGS
            tried += 1
            with pytest.raises(TypeError, match=name) as raised:
                call(**arguments | {name: bad})
            assert "ByteOrder" not in str(raised.value)
    assert tried


def test_lengths_are_checked_against_what_they_count():
    q, k, v = normal(2, 9, 8), normal(2, 7, 8, seed=1), normal(2, 7, 8, seed=2)
    with pytest.raises(ValueError, match="kv_lengths must lie from 0 to 7"):
        attention(q, k, v, kv_lengths=8)
    with pytest.raises(ValueError, match="q_lengths must lie from 0 to 7"):
        attention(k, q, q, q_lengths=8)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_an_output_that_repeats_any_axis_is_refused(axis):
    x = normal(2, 2, 2, 2)
    strides = [0 if n == axis else stride for n, stride in enumerate(x.strides)]
    with pytest.raises(ValueError, match="out must not overlap itself"):
        attention(x, x, x, out=np.lib.stride_tricks.as_strided(x.copy(), x.shape, strides))


@pytest.mark.parametrize(
    ("strides", "overlaps"),
    [
        ((128, 32, 32, 4), True),  # two axes in one
        ((64, 32, 16, 2), True),  # half an element
        ((16, 12, 8, 4), True),
        ((32, 16, 12, 4), True),  # of which two elements are one
        ((32, 16, -12, 4), True),
        ((-32, 16, 8, -4), False),
        ((4, 8, 16, 32), False),
        ((48, 96, 8, 12), False),  # 0 and 12, 8 and 20: axes that reach into each other
        ((64, 200, 24, 4), False),
    ],
)
def test_an_output_whose_elements_share_bytes_is_refused(strides, overlaps):
    x = normal(2, 2, 2, 2)
    memory = np.zeros(1000, np.uint8)
    out = np.ndarray(x.shape, x.dtype, memory, 400, strides)
    if overlaps:
        with pytest.raises(ValueError, match="out must not overlap itself"):
            attention(x, x, x, out=out)
    else:
        assert attention(x, x, x, out=out) is out
        np.testing.assert_array_equal(out, attention(x, x, x))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_an_output_over_an_operand_is_computed_aside(name):
    """Two heads of 8 rows: the first one's output lies where the second one's operand is still to be read."""
    q, k, v = (normal(2, 8, 8, seed=n) for n in range(3))
    memory = np.zeros(2 * 8 * 8, np.float32)
    operand = memory.view(bool)[:128].reshape(2, 8, 8) if name == "mask" else memory.reshape(2, 8, 8)
    operand[...] = normal(2, 8, 8, seed=3) > 0 if name == "mask" else normal(2, 8, 8, seed=3)
    want = attention(q, k, v, **{name: operand.copy()})
    np.testing.assert_array_equal(attention(q, k, v, **{name: operand}, out=memory.reshape(2, 8, 8)), want)


def test_an_output_in_foreign_byte_order_is_written_in_it():
    for dtype in (np.float64, np.float32):
        q, k, v = (normal(2, 20, 8, seed=n).astype(dtype) for n in range(3))
        out = np.empty(q.shape, q.dtype.newbyteorder(">"))
        assert attention(q, k, v, out=out) is out
        np.testing.assert_array_equal(out.astype(dtype), attention(q, k, v))


def test_merge_keeps_the_finest_format(qkv):
    out, lse = attention_partial(*qkv, q_offset=0)
    for lses in ([lse, lse.astype(np.float64)], [lse.astype(np.float64), lse]):
        assert merge([out, out], lses)[1].dtype == np.float64
    assert merge([out, out], [lse, lse])[1].dtype == np.float32


def test_merge_checks_its_parts(qkv):
    out, lse = attention_partial(*qkv, q_offset=0)
    for outs, lses in (([out.astype(int)], [lse]), ([out], [lse.astype(int)]), ([out], [lse + 0j]), (None, None)):
        with pytest.raises(TypeError, match=r"outs|lses"):
            merge(outs, lses)
    nothing = np.full_like(lse, -np.inf)
    np.testing.assert_array_equal(merge([out, out * np.nan], [lse, nothing])[0], merge([out], [lse])[0])


def test_a_numpy_bool_is_a_bool(qkv):
    np.testing.assert_array_equal(attention(*qkv, causal=np.True_), attention(*qkv, causal=True))


class dtype:
    """As PyTorch's is, which needn't be imported."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


@pytest.fixture
def compiled(monkeypatch):
    """The dtypes that `warmup` would compile kernels for."""
    seen = []
    monkeypatch.setattr(CPU, "compile_jobs", lambda self, dtypes, dims, gradients: seen.extend(dtypes) or [])
    return seen


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "given",
    [*(getattr(np, name) for name in ("float64", "float32", "float16")), ml_dtypes.bfloat16, float]
    + ["float64", "float32", "float16", "bfloat16"]
    + [np.dtype(name) for name in ("float64", ">f4", "bfloat16")]
    + [dtype(name) for name in ("float64", "float32", "float16", "bfloat16")],
    ids=repr,
)
def test_dtypes_that_are_warmed_up(compiled, given, several):
    flash_numba.warmup([given] if several else given)
    name = getattr(given, "name", None) or getattr(given, "__name__", given)
    assert compiled == [np.dtype({"float": "float64"}.get(name, name))]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "given",
    [None, 3, 3.5, "nope", "int32", np.int32, int, str, object(), dtype("int8"), dtype("float8_e5m2"), np.dtype("V2")],
    ids=repr,
)
def test_dtypes_that_are_not(compiled, given, several):
    with pytest.raises(TypeError, match=r"dtypes must be one or several of float64, .*bfloat16, got ") as raised:
        flash_numba.warmup([np.float32, given] if several else given)
    assert str(raised.value).endswith(f"got {given!r}")
    assert not compiled


@pytest.mark.parametrize(
    ("given", "error"),
    [
        *((x, TypeError) for x in (None, "64", 64.0, [64, None], object())),
        *((x, ValueError) for x in (0, [64, -1])),
    ],
    ids=repr,
)
def test_head_dims_that_are_refused(compiled, given, error):
    with pytest.raises(error, match="head_dims must be one or several integers of at least 1, got "):
        flash_numba.warmup(head_dims=given)
    flash_numba.warmup(head_dims=np.int64(64))
    assert len(compiled) == 1


def test_one_dtype_may_be_warmed_up_by_name():
    assert flash_numba.warmup("float32") == flash_numba.warmup(["float32"]) == flash_numba.warmup(np.float32)
    assert flash_numba.warmup("bfloat16") == flash_numba.warmup("float16")


def test_overflow_of_a_smaller_output_is_infinity_without_a_warning(qkv):
    q, k, v = (x.astype(np.float64) for x in qkv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = attention(q, k, np.full_like(v, 1e6), out=np.empty(q.shape, np.float16))
    assert np.isposinf(out).all()


def test_run_refuses_to_overwrite_its_input(tmp_path):
    from flash_numba.cli import app

    x = normal(5, 8)
    files = [tmp_path / f"{name}.npy" for name in "qkv"]
    for file in files:
        np.save(file, x)
    np.savez(tmp_path / "all.npz", q=x, k=x, v=x)
    for arguments in (
        [*files, "-o", files[0]],
        [tmp_path / "all.npz", "-o", tmp_path / "all.npz"],
        [*files, "-o", tmp_path / "out.npy", "--lse", files[1]],
    ):
        result = CliRunner().invoke(app, ["run", *map(str, arguments)])
        assert result.exit_code == 2
        assert "would be overwritten" in result.output
    assert not (tmp_path / "out.npy").exists()
    np.testing.assert_array_equal(np.load(files[0]), x)


def test_run_refuses_one_file_for_two_results_however_it_is_named(tmp_path):
    from flash_numba.cli import app

    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    np.savez(tmp_path / "all.npz", **dict.fromkeys("qkv", normal(5, 8)))
    for lse in ("out.npy", "d/../out.npy", "link/out.npy"):
        named = ["-o", tmp_path / "out.npy", "--lse", tmp_path / lse]
        result = CliRunner().invoke(app, ["run", *map(str, [tmp_path / "all.npz", *named])])
        assert result.exit_code == 2
        assert "named for the output and for the log-sum-exp" in result.output


def test_an_output_without_elements_is_taken():
    """NumPy gives such arrays strides of 0."""
    q = np.zeros((2, 5, 0, 31), np.float32)
    out = np.zeros_like(q)
    assert flash_numba.attention(q, q, q, out=out) is out
