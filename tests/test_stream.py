"""Attention in parts: AttentionStream, attention_partial and merge are exact for any cut of the keys."""

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
import textwrap
import tracemalloc

import numba
import numpy as np
import pytest
from cases import DTYPES, FLOAT8, FLOAT32, FLOAT64, RULES, rule_case
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from test_conformance import assert_within, expect_call, normal, same_bits

from flash_numba import AttentionStream, attention, attention_partial, merge, reference
from flash_numba.cpu import launch

INF, NAN = math.inf, math.nan

PER_CHUNK = ("bias", "mask")  # of the keys absorbed, not of the stream
# Lengths and offsets are in the tests of their own.
PART_RULES = sorted(set(RULES) - {"top-left", "q-lengths", "kv-lengths", "q-offset"})

# Where to cut a number of keys: anywhere, several times at the same place, or into chunks of one size.
cuts = st.one_of(
    st.lists(st.floats(0, 1), max_size=6).map(lambda places: lambda n: sorted(int(place * n) for place in places)),
    st.sampled_from([1, 2, 7, 64, 128]).map(lambda size: lambda n: [*range(size, n, size)]),
)


def key_axis(x, layout):
    return -3 if layout == "bshd" and x.ndim > 2 else -2


def take(x, start, stop, axis):
    """The keys start to stop; all of a bias or a mask that is the same for all keys."""
    if x.shape[axis] == 1 and axis == -1:
        return x
    return x[(..., slice(start, stop), *[slice(None)] * (-axis - 1))]


def in_chunks(k, v, places, layout="bhsd", **per_chunk):
    """(start, k, v, {bias, mask}) of the chunks between the places."""
    keys = k.shape[key_axis(k, layout)]
    for start, stop in itertools.pairwise([0, *places, keys]):
        parts = [take(x, start, stop, key_axis(x, layout)) for x in (k, v)]
        yield start, *parts, {name: take(np.asarray(x), start, stop, -1) for name, x in per_chunk.items()}


def split(options):
    """What a stream takes, and what each chunk of it does."""
    return (
        {name: value for name, value in options.items() if name not in PER_CHUNK},
        {name: value for name, value in options.items() if name in PER_CHUNK},
    )


def problem(seed, names, dtype, rows, keys, layout="bhsd"):
    """q, k, v and options that use the rules of those names."""
    if "float8" in names and dtype == FLOAT64:
        dtype = FLOAT32
    case = rule_case(f"stream-{seed}", *sorted(names), rows=rows, keys=keys, dtype=dtype, layout=layout)
    q, k, v, options = case.arguments()
    options.pop("layout", None)
    return q, k, v, options


def streamed(q, k, v, places, layout="bhsd", **options):
    of_stream, per_chunk = split(options)
    whole = AttentionStream(q, layout=layout, **of_stream)
    for _, k_part, v_part, own in in_chunks(k, v, places, layout, **per_chunk):
        assert whole.absorb(k_part, v_part, **own) is whole
    return whole


def assert_right(got, dtype, q, k, v, factor=1, **options):
    want = expect_call(dtype, q, k, v, **options)
    assert_within("out", got[0], want.out, factor * want.out_limit)
    assert_within("lse", got[1], want.lse, factor * want.lse_limit)


# ---- a stream is exact for any cut


@fuzz(50)
@given(
    seed=st.integers(0, 2**32),
    names=st.sets(st.sampled_from(PART_RULES), max_size=5),
    cut=cuts,
    rows=st.sampled_from([1, 20, 67, 200]),
    keys=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["bhsd", "bshd"]),
    offset=st.one_of(st.none(), st.integers(-20, 320)),
)
def test_any_cut_gives_the_whole(seed, names, cut, rows, keys, dtype, layout, offset):
    """Positions come from kv_total, and then dropout counts rows from 0, or from q_offset, and then both do."""
    q, k, v, options = problem(seed, names, dtype, rows, keys, layout)
    position = {"kv_total": keys} if offset is None else {"q_offset": offset}
    whole = streamed(q, k, v, cut(keys), layout, **options, **position)
    assert whole.keys == keys
    out, lse = whole.result()
    assert out.dtype == q.dtype
    assert lse.dtype == (FLOAT64 if q.dtype == FLOAT64 else FLOAT32)
    position = {} if offset is None else {"q_offset": offset}
    assert_right((out, lse), q.dtype, q, k, v, layout=layout, **options, **position)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["scale", "causal", "window", "softcap", "alibi", "sinks", "bias", "mask", "dropout"])
def test_chunks_of_whole_blocks_give_the_bits_of_one_call(dtype, name):
    """128 keys are a block of one call too, so that nothing but the state's way to memory and back differs."""
    q, k, v, options = problem(1, {name}, dtype, rows=210, keys=500)
    out, lse = attention(q, k, v, **options, return_lse=True)
    for places in ([], [128, 256, 384], [256], [0, 384, 384]):
        got = streamed(q, k, v, places, kv_total=500, **options).result()
        assert same_bits(got[0], out)
        assert same_bits(got[1], lse)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape"),
    [
        ((30, 8), (50, 8), (50, 5)),
        ((4, 30, 8), (2, 50, 8), (2, 50, 5)),
        ((2, 6, 30, 8), (2, 2, 50, 8), (2, 1, 50, 5)),
        ((2, 3, 4, 30, 8), (3, 2, 50, 8), (2, 1, 1, 50, 5)),
        ((2, 2, 0, 8), (2, 2, 50, 8), (2, 2, 50, 8)),
        ((0, 2, 30, 8), (0, 2, 50, 8), (0, 2, 50, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_shapes(q_shape, k_shape, v_shape, layout):
    q, k, v = normal(*q_shape), normal(*k_shape, seed=1), normal(*v_shape, seed=2)
    if layout == "bshd":
        q, k, v = (x if x.ndim == 2 else np.ascontiguousarray(x.swapaxes(-3, -2)) for x in (q, k, v))
    options = {"causal": True, "layout": layout}
    got = streamed(q, k, v, [0, 1, 20, 20], kv_total=50, **options).result()
    want = attention(q, k, v, **options, return_lse=True)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_top_left_counts_from_the_first_key():
    """As `attention` has it, whatever the number of keys."""
    q, k, v = normal(2, 20, 8), normal(2, 50, 8), normal(2, 50, 8)
    want = attention(q, k, v, causal="top-left", return_lse=True)
    got = streamed(q, k, v, [7, 30], causal="top-left", q_offset=0).result()
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-6)
    got = streamed(q, k, v, [7, 30], causal="top-left", kv_total=50).result()
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kv_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_chunks_with_scales(dtype, kv_dtype):
    q = normal(2, 4, 70, 16, dtype=dtype)
    k, v = (normal(2, 2, 70, 16, dtype=kv_dtype, seed=n) for n in (1, 2))
    options = {"k_scale": 0.5, "v_scale": np.array([[0.5, 2.0], [3.0, 4.0]]), "causal": True}
    got = streamed(q, k, v, [1, 2, 40], kv_total=70, **options).result()
    assert got[0].dtype == dtype
    assert_right(got, dtype, q, k, v, **options)


def test_sinks_are_added_once():
    sinks = np.array([0.5, 30.0], np.float32)
    q, k, v = (normal(1, 2, 5, 8, seed=n) for n in range(3))
    whole = AttentionStream(q, sinks=sinks)
    for at in range(5):
        whole.absorb(k[:, :, at : at + 1], v[:, :, at : at + 1])
        seen = slice(at + 1)
        want = reference.attention(q, k[:, :, seen], v[:, :, seen], sinks=sinks, return_lse=True)
        for _ in range(2):
            out, lse = whole.result()
            np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse, want[1], rtol=1e-6)


def test_result_before_any_key():
    q = normal(2, 4, 5, 8)
    out, lse = AttentionStream(q).result()
    assert same_bits(out, np.zeros_like(q))
    assert same_bits(lse, np.full((2, 4, 5), -INF, np.float32))
    sinks = np.arange(4.0)
    for empty in (False, True):
        whole = AttentionStream(q, sinks=sinks)
        if empty:
            whole.absorb(q[:, :, :0], normal(2, 4, 0, 3))
        out, lse = whole.result()
        assert out.shape == (2, 4, 5, 3 if empty else 8)
        assert (out == 0).all()
        np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_changes_nothing_of_what_follows(dtype):
    q, k, v, options = problem(5, {"sinks", "mask", "dropout"}, dtype, rows=210, keys=300)
    of_stream, per_chunk = split(options)
    looked_at, left_alone = (AttentionStream(q, kv_total=300, causal=True, **of_stream) for _ in range(2))
    for _, k_part, v_part, own in in_chunks(k, v, [30, 128, 131, 290], **per_chunk):
        first, again = looked_at.result(), looked_at.result()
        kept = [x.copy() for x in first]
        for own_stream in (looked_at, left_alone):
            own_stream.absorb(k_part, v_part, **own)
        for x, y, z in zip(first, again, kept, strict=True):
            assert same_bits(x, y)
            assert same_bits(x, z)  # nor does what follows change a result
    for x, y in zip(looked_at.result(), left_alone.result(), strict=True):
        assert same_bits(x, y)


def test_queries_are_the_streams_own():
    q, k, v = (normal(2, 30, 8, seed=n) for n in range(3))
    want = AttentionStream(q).absorb(k, v).result()
    whole = AttentionStream(q)
    q[...] = NAN
    assert same_bits(whole.absorb(k, v).result()[0], want[0])


@pytest.mark.parametrize("count", [6, 5])
def test_more_keys_than_announced_are_refused(count):
    """In a chunk like the last one, and in another; what was absorbed before stays."""
    q, k, v = (normal(20, 8, seed=n) for n in range(3))
    whole = AttentionStream(q[:5], causal=True, kv_total=10).absorb(k[:6], v[:6])
    with pytest.raises(ValueError, match="kv_total=10"):
        whole.absorb(k[6 : 6 + count], v[6 : 6 + count])
    want = reference.attention(q[:5], k[:10], v[:10], causal=True)
    got = whole.absorb(k[6:10], v[6:10]).result()[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_generator_is_drawn_from_once():
    q, k, v = (normal(2, 40, 8, seed=n) for n in range(3))
    rng, twin = np.random.default_rng(3), np.random.default_rng(3)
    got = streamed(q, k, v, [11, 20], dropout=0.5, seed=rng).result()[0]
    np.testing.assert_allclose(got, attention(q, k, v, dropout=0.5, seed=twin), rtol=1e-5, atol=1e-6)
    assert rng.bit_generator.state == twin.bit_generator.state


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba has one thread here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(monkeypatch, dtype):
    monkeypatch.setattr(launch, "SERIAL_FLOPS", 0)
    q, k, v, options = problem(2, {"alibi", "sinks", "bias-with-masks", "dropout"}, dtype, rows=210, keys=300)
    before = numba.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            numba.set_num_threads(threads)
            results.append(streamed(q, k, v, [3, 140, 141], kv_total=300, **options).result())
    finally:
        numba.set_num_threads(before)
    for other in results[1:]:
        assert same_bits(other[0], results[0][0])
        assert same_bits(other[1], results[0][1])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_reaches_the_rows_that_see_it_and_no_other(bad):
    q, k, v = (normal(40, 8, seed=n) for n in range(3))
    clean = streamed(q, k, v, [10, 11], causal=True, kv_total=40).result()[0]
    v[10, 3] = k[30, 0] = bad
    got = streamed(q, k, v, [10, 11], causal=True, kv_total=40).result()[0]
    assert same_bits(got[:10], clean[:10])
    with np.errstate(invalid="ignore"):
        want = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got[10:30], want[10:30], rtol=1e-5, atol=1e-6)


# ---- memory


def test_memory_does_not_depend_on_how_many_keys_there_are(monkeypatch):
    monkeypatch.setattr(launch, "SERIAL_FLOPS", INF)  # one scratch
    q, k, v = normal(8, 256, 32), normal(8, 64, 32), normal(8, 64, 32)
    whole = AttentionStream(q, causal=True, kv_total=64 * 200).absorb(k, v)
    tracemalloc.start()
    try:
        for _ in range(20):
            whole.absorb(k, v)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(150):
            whole.absorb(k, v)
        held_later, peak_later = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One chunk's k and v have 130 000 bytes; Python's free lists fill up by a hundred or so a call.
    assert held_later - held < 60_000
    assert peak_later - peak < 60_000
    assert peak < 1_500_000  # the state and scratch; the scores of one chunk take 500 000, of all keys 90 MB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA exempts file mappings on Linux")
def test_keys_and_values_from_a_file_larger_than_memory(tmp_path):
    """Of a file of zeros, one value is read as what it adds to the mean, and one key takes all the weight."""
    code = """
        import resource, sys
        import numpy as np
        from flash_numba import AttentionStream
        keys, dim, chunk = 2**18, 64, 2**14  # 64 MiB each of K and V
        files = [np.memmap(f"{sys.argv[1]}/{name}", np.float32, "w+", shape=(1, keys, dim)) for name in "kv"]
        k, v = files
        v[0, 5 * chunk + 7, 3] = keys
        v[0, 15 * chunk + 9, 4] = 5
        k[0, 15 * chunk + 9, 1] = 40
        k.flush(), v.flush()
        k, v = (np.memmap(f.filename, np.float32, "r", shape=f.shape) for f in files)
        q = np.zeros((1, 3, dim), np.float32)
        q[0, 1, 1], q[0, 2, 2] = 8, 8
        AttentionStream(q).absorb(k[:, :chunk], v[:, :chunk]).result()  # compiles
        used = next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + 2**24,) * 2)
        try:
            np.array(k)
        except MemoryError:
            print("too large to load")
        stream = AttentionStream(q)
        for start in range(0, keys, chunk):
            stream.absorb(k[:, start : start + chunk], v[:, start : start + chunk])
        out, lse = stream.result()
        even = np.zeros(dim)
        even[3], even[4] = 1, 5 / keys
        np.testing.assert_allclose(out[0, [0, 2]], [even, even], rtol=1e-4)
        one = np.zeros(dim)
        one[4] = 5
        np.testing.assert_allclose(out[0, 1], one, atol=1e-4)
        np.testing.assert_allclose(lse[0], [np.log(keys), 40, np.log(keys)], rtol=1e-5)
        print("right")
    """
    got = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(tmp_path)],
        env=os.environ | {"NUMBA_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert got.returncode == 0, got.stderr
    assert got.stdout.split("\n")[:2] == ["too large to load", "right"]


# ---- bad input, and what interrupts a stream


@pytest.mark.parametrize("rule", [{"causal": True}, {"window": (3, None)}, {"alibi_slopes": [0.5, 0.5]}])
def test_a_rule_of_positions_needs_one(rule):
    q = normal(2, 5, 8)
    with pytest.raises(ValueError, match=r"q_offset or kv_total.*causal=.*window=.*alibi_slopes="):
        AttentionStream(q, **rule)
    with pytest.raises(ValueError, match=r"q_offset and kv_total exclude each other, got 3 and 9"):
        AttentionStream(q, q_offset=3, kv_total=9, **rule)


BAD_STREAM = {
    "kv_total negative": ({"kv_total": -1}, ValueError, ("kv_total", "-1", "0")),
    "kv_total a fraction": ({"kv_total": 2.5}, TypeError, ("kv_total", "2.5", "integer")),
    "q_offset a fraction": ({"q_offset": 0.5}, TypeError, ("q_offset", "0.5", "integer")),
    "q 1-D": ({"q": normal(8)}, ValueError, ("q", "(8,)", "2")),
    "q of integers": ({"q": np.ones((2, 5, 8), int)}, TypeError, ("q", "int64", "float32")),
    "scale": ({"scale": NAN}, ValueError, ("scale", "nan", "finite")),
    "softcap": ({"softcap": 0}, ValueError, ("softcap", "0", "positive")),
    "dropout": ({"dropout": 1.0, "seed": 1}, ValueError, ("dropout", "1.0", "below 1")),
    "seed": ({"dropout": 0.5}, ValueError, ("seed", "dropout", "None")),
    "sinks": ({"sinks": [1.0, 2.0, 3.0]}, ValueError, ("sinks", "(3,)", "(2,)")),
    "alibi_slopes": ({"alibi_slopes": [1.0], "q_offset": 0}, ValueError, ("alibi_slopes", "(1,)", "(2,)")),
    "window": ({"window": (-2, 1), "q_offset": 0}, ValueError, ("window", "(-2, 1)", "-1")),
    "causal": ({"causal": "left", "q_offset": 0}, ValueError, ("causal", "'left'", "'top-left'")),
    "layout": ({"layout": "sbhd"}, ValueError, ("layout", "'sbhd'", "'bshd'")),
}


@pytest.mark.parametrize("name", BAD_STREAM)
def test_a_bad_stream_is_refused_at_once(name):
    changed, error, words = BAD_STREAM[name]
    call = {"q": normal(2, 5, 8)} | changed
    with pytest.raises(error) as raised:
        AttentionStream(call.pop("q"), **call)
    assert all(word in str(raised.value) for word in words), str(raised.value)


BAD_CHUNKS = {
    "k of another D": ((normal(2, 3, 9), normal(2, 3, 8)), {}, ValueError, ("k", "(2, 3, 9)")),
    "v of another length": ((normal(2, 3, 8), normal(2, 4, 8)), {}, ValueError, ("v", "(2, 4, 8)")),
    "v of another D_v": ((normal(2, 3, 8), normal(2, 3, 9)), {}, ValueError, ("v", "8", "9")),
    "k of another dtype": ((normal(2, 3, 8, dtype=FLOAT64), normal(2, 3, 8)), {}, TypeError, ("float64", "float32")),
    "bias of all keys": ((normal(2, 3, 8),) * 2, {"bias": np.zeros((5, 7))}, ValueError, ("bias", "(5, 7)")),
    "mask of integers": ((normal(2, 3, 8),) * 2, {"mask": np.ones((5, 3), int)}, TypeError, ("mask", "int64")),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_a_bad_chunk_is_refused_and_leaves_the_stream_as_it_was(name):
    arrays, options, error, words = BAD_CHUNKS[name]
    q, k, v = (normal(2, 5, 8, seed=n) for n in range(3))
    whole = AttentionStream(q).absorb(k, v)
    before = whole.result()
    with pytest.raises(error) as raised:
        whole.absorb(*arrays, **options)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert whole.keys == 5
    assert same_bits(whole.result()[0], before[0])
    untouched = AttentionStream(q).absorb(k, v).absorb(k, v)
    assert same_bits(whole.absorb(k, v).result()[0], untouched.result()[0])


@pytest.mark.parametrize("count", [5, 3])
def test_a_stream_whose_absorb_was_interrupted_is_refused(monkeypatch, count):
    """Some rows have the chunk then and some don't; after a chunk like the last one, and after another."""
    q, k, v = (normal(2, 5, 8, seed=n) for n in range(3))
    whole = AttentionStream(q).absorb(k, v)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(launch, "start", interrupted)
        patched.setattr(whole._state, "_prepared", whole._state._prepared._replace(start=interrupted))
        with pytest.raises(KeyboardInterrupt):
            whole.absorb(k[:, :count].copy(), v[:, :count].copy())
    for use in (lambda: whole.absorb(k, v), whole.result):
        with pytest.raises(RuntimeError, match="interrupted"):
            use()


# ---- copies

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "oldest pickle": lambda x: pickle.loads(pickle.dumps(x, 2)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("absorbed", [0, 1, 2, 3])
def test_a_copied_stream_goes_on_independently(how, dtype, layout, absorbed):
    """Both have the bits of a stream of their own; 2 and more chunks, so that some are absorbed like the one before."""
    shape = (2, 20, 8) if layout == "bhsd" else (20, 2, 8)
    q = normal(*shape, dtype=dtype)
    chunks = [(normal(*shape, seed=n, dtype=dtype), normal(*shape, seed=n + 50, dtype=dtype)) for n in range(8)]
    rules = {"layout": layout, "causal": True, "kv_total": 200, "sinks": [1.0, -1.0], "dropout": 0.3, "v_scale": 2.0}
    common, own, other = chunks[:absorbed], chunks[3:5], chunks[5:8]

    def alone(parts):
        stream = AttentionStream(q, seed=np.random.default_rng(5), **rules)
        for part in parts:
            stream.absorb(*part)
        return stream.result()

    stream = AttentionStream(q, seed=np.random.default_rng(5), **rules)
    for part in common:
        stream.absorb(*part)
    copied = COPIES[how](stream)
    assert copied.keys == stream.keys
    for one, two in itertools.zip_longest(own, other):
        copied.absorb(*two)
        if one:
            stream.absorb(*one)
    for got, parts in ((stream, common + own), (copied, common + other)):
        assert all(same_bits(x, y) for x, y in zip(got.result(), alone(parts), strict=True))


def test_a_stream_copied_while_it_absorbs_is_refused():
    stream = AttentionStream(normal(2, 5, 8)).absorb(normal(2, 5, 8), normal(2, 5, 8))
    stream._state._interrupted = True
    for way in COPIES.values():
        with pytest.raises(RuntimeError, match="interrupted, or still runs"):
            way(stream)


def test_a_stream_of_another_cpu_is_refused(monkeypatch):
    """Its state lies in the order of that one's registers."""
    stream = AttentionStream(normal(2, 5, 8)).absorb(normal(2, 5, 8), normal(2, 5, 8))
    pickled, empty = pickle.dumps(stream), pickle.dumps(AttentionStream(normal(2, 5, 8)))
    sizes = launch.simd_sizes(FLOAT32)
    monkeypatch.setattr(launch, "simd_sizes", lambda dtype: sizes._replace(tile=2 * sizes.tile))
    with pytest.raises(ValueError, match=rf"another version or CPU.*tile={sizes.tile},.*here.*tile={2 * sizes.tile},"):
        pickle.loads(pickled)
    assert pickle.loads(empty).keys == 0  # nothing lies anywhere yet


def test_a_stream_on_a_gpu_is_not_copied():
    stream = AttentionStream(normal(2, 5, 8))
    stream._backend = type("OnGPU", (), {"array": type("DeviceArray", (), {})})()
    for way in COPIES.values():
        with pytest.raises(TypeError, match="a stream on a GPU can't be copied or pickled"):
            way(stream)


def test_a_stream_says_what_it_is():
    q = normal(2, 5, 8)
    assert repr(AttentionStream(q)) == "<AttentionStream: q float32 (2, 5, 8), 0 keys absorbed>"
    stream = AttentionStream(q, kv_total=9, causal=True, window=(3, None), sinks=[1.0, 2.0], scale=0.5)
    assert repr(stream.absorb(q, q)) == (
        "<AttentionStream: q float32 (2, 5, 8), 5 of 9 keys absorbed, causal=True, window=(3, None), scale=0.5, "
        "sinks=array of shape (2,)>"
    )
    stream = AttentionStream(q, q_offset=4, dropout=0.5, seed=7, layout="bshd", alibi_slopes=np.ones(5))
    assert repr(stream).endswith(
        "absorbed, alibi_slopes=array of shape (5,), dropout=0.5, seed=7, layout='bshd', q_offset=4>"
    )


# ---- attention_partial and merge


def partials(q, k, v, places, layout="bhsd", **options):
    of_call, per_chunk = split(options)
    return [
        attention_partial(q, k_part, v_part, k_offset=start, layout=layout, **of_call, **own)
        for start, k_part, v_part, own in in_chunks(k, v, places, layout, **per_chunk)
    ]


@fuzz(50)
@given(
    seed=st.integers(0, 2**32),
    names=st.sets(st.sampled_from(PART_RULES), max_size=5),
    cut=cuts,
    rows=st.sampled_from([1, 20, 67]),
    keys=st.integers(0, 200),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["bhsd", "bshd"]),
    offset=st.integers(-20, 220),
)
def test_partials_of_any_cut_merge_to_the_whole(seed, names, cut, rows, keys, dtype, layout, offset):
    q, k, v, options = problem(seed, names, dtype, rows, keys, layout)
    sinks = options.pop("sinks", None)
    parts = partials(q, k, v, cut(keys), layout, q_offset=offset, **options)
    wide = FLOAT64 if q.dtype == FLOAT64 else FLOAT32
    assert {x.dtype for part in parts for x in part} == {wide}
    outs, lses = zip(*parts, strict=True)
    got = merge(outs, lses, sinks=sinks, layout=layout)
    assert [x.dtype for x in got] == [wide, wide]
    # normalising each part and weighing it by its log-sum-exp rounds once more each
    assert_right(got, wide, q, k, v, factor=2, layout=layout, q_offset=offset, sinks=sinks, **options)


def test_lengths_of_a_part_count_among_its_keys():
    q, k, v = normal(3, 2, 20, 8), normal(3, 2, 30, 8), normal(3, 2, 30, 8)
    lengths = np.array([0, 14, 30])
    rules = {"causal": True, "q_lengths": [20, 3, 0], "q_offset": [5, 20, 0]}
    parts = [
        attention_partial(
            q, k[:, :, at], v[:, :, at], k_offset=at.start, kv_lengths=np.clip(lengths - at.start, 0, 12), **rules
        )
        for at in (slice(0, 12), slice(12, 24), slice(18, 30))
    ]
    # the last part has 6 keys of the part before: a length hides them from neither end, so take them off
    parts[2] = attention_partial(
        q, k[:, :, 24:], v[:, :, 24:], k_offset=24, kv_lengths=np.clip(lengths - 24, 0, 6), **rules
    )
    got = merge(*zip(*parts, strict=True))
    want = reference.attention(q, k, v, kv_lengths=lengths, return_lse=True, **rules)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_a_partial_needs_its_position():
    q = normal(2, 5, 8)
    with pytest.raises(TypeError, match="q_offset"):
        attention_partial(q, q, q)
    with pytest.raises(ValueError, match=r"k_offset.*-1"):
        attention_partial(q, q, q, q_offset=0, k_offset=-1)
    with pytest.raises(TypeError, match=r"k_offset.*0\.5"):
        attention_partial(q, q, q, q_offset=0, k_offset=0.5)


def test_merge_by_hand():
    """Weights of 1 and 3 in all: a quarter and three quarters; a sink of weight 4 halves both."""
    outs, lses = np.array([[[0.0]], [[4.0]]]), np.log([[1.0], [3.0]])
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, [[3]])
    np.testing.assert_allclose(lse, [math.log(4)])
    out, lse = merge(outs, lses, sinks=[math.log(4)])
    np.testing.assert_allclose(out, [[1.5]])
    np.testing.assert_allclose(lse, [math.log(8)])
    out, lse = merge(outs[:1], lses[:1] + 700)  # beyond exp's range
    np.testing.assert_allclose(out, [[0]])
    np.testing.assert_allclose(lse, [700])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_parts_without_a_key_change_no_bit(dtype):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 2, 5, 4)).astype(dtype)
    lses = (10 * rng.standard_normal((3, 2, 5))).astype(dtype)
    lses[0, 1] = lses[1, :, 2] = lses[:, 0, 3] = -INF
    outs[lses == -INF] = 0
    nothing = np.zeros_like(outs[0]), np.full_like(lses[0], -INF)
    want = merge(outs, lses)
    assert (want[0][0, 3] == 0).all()
    assert want[1][0, 3] == -INF
    places = ([0], [1, 1], [3], [0, 2, 3])
    for at in places:
        got = merge(np.insert(outs, at, nothing[0], 0), np.insert(lses, at, nothing[1], 0))
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])
    got = merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert same_bits(got[0], nothing[0])
    assert same_bits(got[1], nothing[1])
    sinks = np.array([1.0, -2.0])
    np.testing.assert_allclose(merge([nothing[0]], [nothing[1]], sinks=sinks)[1], [[1.0] * 5, [-2.0] * 5], rtol=1e-6)


def test_merging_is_associative_up_to_rounding():
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((6, 2, 5, 4)), 10 * rng.standard_normal((6, 2, 5))
    lses[2, 0] = -INF
    outs[2, 0] = 0
    want = reference.merge_partials(outs, lses)
    for cut in range(7):
        halves = [merge(outs[at], lses[at]) for at in (slice(cut), slice(cut, None)) if len(outs[at])]
        got = merge(*zip(*halves, strict=True))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-13)


def test_merge_passes_nan_on():
    outs, lses = np.ones((3, 2, 4, 2)), np.zeros((3, 2, 4))
    outs[1, 0, 1, 0] = lses[1, 1, 2] = NAN
    out, lse = merge(outs, lses)
    where = np.zeros((2, 4, 2), bool)
    where[0, 1, 0] = where[1, 2] = True
    np.testing.assert_array_equal(np.isnan(out), where)
    np.testing.assert_array_equal(np.isnan(lse), [[False] * 4, [False, False, True, False]])
    np.testing.assert_allclose(out[~where], 1)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge_in_any_shape_and_layout(shape, layout):
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((4, *shape)), rng.standard_normal((4, *shape[:-1]))
    sinks = rng.standard_normal(shape[-3] if len(shape) > 2 else 1)
    want = reference.merge_partials(outs, lses, sinks=sinks)
    if layout == "bshd" and len(shape) > 2:
        outs = outs.swapaxes(-3, -2)
    out, lse = merge(list(outs), list(lses), sinks=sinks, layout=layout)
    if layout == "bshd" and len(shape) > 2:
        out = out.swapaxes(-3, -2)
    np.testing.assert_allclose(out, want[0], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, want[1], rtol=1e-13)


@pytest.mark.parametrize(
    ("outs", "lses", "options", "words"),
    [
        ([], [], {}, ("at least one", "0 and 0")),
        ([normal(5, 4)], [normal(5), normal(5)], {}, ("as many", "1 and 2")),
        ([normal(5, 4), normal(6, 4)], [normal(5), normal(6)], {}, ("one shape", "(5, 4)", "(6, 4)")),
        ([normal(2, 5, 4)], [normal(5, 2)], {}, ("(2, 5, 4)", "(5, 2)", "heads before rows")),
        ([normal(2, 5, 4)], [normal(2, 5)], {"sinks": [1.0, 2.0, 3.0]}, ("sinks", "(3,)", "(2,)")),
        ([normal(2, 5, 4)], [normal(2, 5)], {"layout": "sbhd"}, ("layout", "'sbhd'")),
    ],
    ids=str,
)
def test_bad_merges_are_refused(outs, lses, options, words):
    with pytest.raises(ValueError, match=r"outs|sinks|layout") as raised:
        merge(outs, lses, **options)
    assert all(word in str(raised.value) for word in words), str(raised.value)
