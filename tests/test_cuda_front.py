"""The CUDA backend up to the kernel, without numba-cuda: arrays, backends, errors, launches on a fake driver."""

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import DeviceThing, DlpackThing, FakeApi, values

import flash_numba
from flash_numba import attention, attention_partial, attention_varlen, backends, reference
from flash_numba.gpu import arrays, dlpack, driver
from flash_numba.gpu.arrays import DeviceArray, Foreign
from flash_numba.scores import LOG2E

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def at(array):
    """A `DeviceArray` over an array's memory, as if it lay on a GPU."""
    address = array.__array_interface__["data"][0]
    return DeviceArray.at(
        dlpack.Contents(address, array.shape, array.strides, array.dtype, 0, dlpack.CUDA, False), array
    )


def qkv(queries=20, keys=33, heads=4, kv_heads=2, dim=16, dtype=np.float32, batch=(1,)):
    rng = np.random.default_rng(0)
    shapes = (*batch, heads, queries, dim), (*batch, kv_heads, keys, dim), (*batch, kv_heads, keys, dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


# -- NumPy input stays away from the GPU -------------------------------------------------------------------------------


def test_numpy_input_imports_nothing_of_cuda():
    code = """
        import importlib.util, sys, numpy as np, flash_numba
        q = np.ones((1, 2, 20, 16), "f4")
        flash_numba.attention(q, q, q), flash_numba.attention(q.tolist(), q.tolist(), q.tolist(), causal=True)
        flash_numba.attention_varlen(q[0], q[0], q[0], [0, 2], [0, 2])
        flash_numba.attention_partial(q, q, q, q_offset=0), flash_numba.info(q, q, q)
        names = "numba.cuda", "numba_cuda", "cuda.", "flash_numba.gpu"
        print([name for name in sys.modules if (name + ".").startswith(names)])
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


# -- DLPack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bool", "int32", "int64"])
def test_dlpack_capsules_of_numpy_are_read(dtype):
    array = np.zeros((2, 3, 8), dtype)[:, ::-1, 1::2]
    of = dlpack.contents(dlpack.export(array, None))
    assert of[:4] == (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
    assert (of.device_type, of.device) == (dlpack.CPU, 0)
    assert of.read_only is False


def test_versions_and_read_only_arrays():
    class Old:  # no max_version
        def __dlpack__(self, *, stream=None):
            return np.zeros(3).__dlpack__()

    assert dlpack.contents(dlpack.export(Old(), 1)).shape == (3,)
    array = np.zeros((3, 4))
    array.flags.writeable = False
    versioned = array.__dlpack__(max_version=(1, 1))
    assert dlpack.contents(versioned).read_only


@pytest.mark.parametrize("dtype", [BFLOAT16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float32])
def test_own_capsules_say_what_they_hold(dtype):
    array = np.zeros((4, 6), dtype)[:, ::2]
    of = at(array).contents()
    assert dlpack.contents(dlpack.capsule(array, of)) == of


def test_own_memory_lives_until_the_consumer_lets_go():
    class Own:
        __dlpack_device__ = staticmethod(lambda: (dlpack.CPU, 0))

        def __dlpack__(self, **_):
            array = np.arange(6.0).reshape(2, 3)
            of = at(array).contents()._replace(device_type=dlpack.CPU)
            return dlpack.capsule(array, of)

    before = len(dlpack._exported)
    taken = np.from_dlpack(Own())
    gc.collect()
    np.testing.assert_array_equal(taken, [[0, 1, 2], [3, 4, 5]])
    assert len(dlpack._exported) == before + 1
    del taken
    gc.collect()
    assert len(dlpack._exported) == before
    unused = Own().__dlpack__()
    assert len(dlpack._exported) == before + 1
    del unused
    gc.collect()
    assert len(dlpack._exported) == before


def test_what_dlpack_cannot_say_is_refused():
    with pytest.raises(TypeError, match="code 5 of 64 bits"):
        dlpack.contents(dlpack.export(np.zeros(3, np.complex64), None))
    with pytest.raises(TypeError, match="no unused DLPack capsule but int"):
        dlpack.contents(3)
    used = np.zeros(3).__dlpack__()
    np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: used, __dlpack_device__=lambda: (1, 0)))
    with pytest.raises(TypeError, match="no unused DLPack capsule"):
        dlpack.contents(used)


# -- device arrays as the checks see them ------------------------------------------------------------------------------


def test_views_move_addresses_as_numpy_does():
    array = np.zeros((3, 4, 5, 6), BFLOAT16)
    for view in (
        lambda x: x[None, 1:, ..., ::-1, 2],
        lambda x: x.swapaxes(-3, -2)[2],
        lambda x: x[2, 3, 4, 5],
        lambda x: np.broadcast_to(x[0], (7, 4, 5, 6)),
    ):
        want, got = view(array), view(at(array))
        want = want if isinstance(want, np.ndarray) else array[2, 3, 4, 5, ...]
        assert (got.shape, got.strides, got.dtype) == (want.shape, want.strides, want.dtype)
        assert got.address == want.__array_interface__["data"][0]
    assert np.may_share_memory(at(array[0]), at(array))
    assert not np.may_share_memory(at(array[0]), at(array[1]))


def test_elements_are_never_read():
    """At an address of another machine's memory every element would crash the process."""
    of = dlpack.Contents(0x7F1234567000, (2, 3, 4, 5), (120, 40, 10, 2), BFLOAT16, 1, dlpack.CUDA, False)
    array = DeviceArray.at(of, None)
    assert repr(array) == "<bfloat16 array of shape (2, 3, 4, 5) on GPU 1>"
    assert array[1, 2, 3, 4].address == of.address + 120 + 80 + 30 + 8
    for read in (np.asarray, np.sum, np.copy, lambda x: np.add(x, 1), lambda x: x[[0, 1]], lambda x: x[x]):
        with pytest.raises(TypeError):
            read(array)
    empty = DeviceArray.at(dlpack.Contents(0, (0, 3), (6, 2), BFLOAT16, 0, dlpack.CUDA, False), None)
    assert empty.size == 0


class Memory:
    """What `Foreign` asks of a driver."""

    simulated = False

    def __init__(self):
        self.waited = []

    def synchronize(self, stream):
        self.waited.append(stream)

    def device_of(self, address):
        return 3


def foreign(x):
    return Foreign(Memory(), lambda array: array).view("q", x, dlpack.LEGACY_STREAM)


def test_cuda_array_interface():
    array = np.zeros((3, 4, 8), np.float16)
    got = foreign(DeviceThing(array[:, ::2]))
    assert (got.address, got.shape, got.dtype) == (array.__array_interface__["data"][0], (3, 2, 8), np.float16)
    assert got.strides == array[:, ::2].strides
    assert got.device == 3
    assert foreign(DeviceThing(array)).strides == array.strides
    assert not foreign(DeviceThing(array, data=(array.ctypes.data, True))).flags.writeable
    memory = Memory()
    Foreign(memory, None).view("q", DeviceThing(array, stream=7), 1)
    assert memory.waited == [7]
    with pytest.raises(TypeError, match="q has dtype complex64"):
        foreign(DeviceThing(np.zeros((2, 2), np.complex64)))
    with pytest.raises(TypeError, match="q is a masked array"):
        foreign(DeviceThing(array, mask=array))


def test_dlpack_arrays_are_asked_for_the_default_stream():
    thing = DlpackThing(np.zeros((3, 4), BFLOAT16), device=2)
    got = foreign(thing)
    assert (got.device, got.dtype, got.shape) == (2, BFLOAT16, (3, 4))
    assert thing.asked == [1]


def test_what_lies_on_a_gpu():
    array = np.zeros((2, 3))
    assert arrays.device_of(DeviceThing(array)) is not None
    assert arrays.device_of(DlpackThing(array)) == (2, 0)
    assert arrays.device_of(DlpackThing(array, kind=13, device=1)) == (13, 1)
    assert arrays.device_of(at(array)) == (2, 0)
    for host in (
        array,
        array.tolist(),
        3,
        None,
        DlpackThing(array, kind=1),
        DlpackThing(array, kind=3),
        memoryview(b"1"),
    ):
        assert arrays.device_of(host) is None


# -- choosing a backend ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    """A fake GPU driver, which every call finds."""
    api = FakeApi()
    monkeypatch.setattr(driver, "_found", driver.Driver(api))
    return api


def test_host_and_device_arrays_do_not_mix(fake):
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"q, v on a GPU and k in host memory can't be mixed: copy k to the GPU"):
        attention(DeviceThing(q), k, DeviceThing(v))
    with pytest.raises(TypeError, match="mask in host memory"):
        attention(*map(DeviceThing, (q, k, v)), mask=np.ones((20, 33), bool))
    with pytest.raises(TypeError, match="out in host memory"):
        attention(*map(DeviceThing, (q, k, v)), out=q)
    with pytest.raises(TypeError, match="q, k in host memory"):
        attention_varlen(q[0], k[0], DeviceThing(v[0]), [0, 3], [0, 3])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_device_arrays_and_a_host_backend(fake, backend):
    with pytest.raises(
        TypeError, match=rf"backend='{backend}' takes arrays in host memory, q and k and v lie on a GPU"
    ):
        attention(*map(DeviceThing, qkv()), backend=backend)


def test_several_gpus(fake):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="one GPU, got q: 0, k: 1, v: 0"):
        attention(DlpackThing(q), DlpackThing(k, device=1), DlpackThing(v))


def test_a_call_that_does_not_take_device_arrays_says_so(fake):
    q, k, v = qkv()
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="lies on a GPU, which this call doesn't take; copy it to the host"):
        flash_numba.attention_grad(DeviceThing(out), *map(DeviceThing, (q, k, v, out, lse)))


def test_streams_and_merges_do_not_mix_either(fake):
    q, k, v = qkv()
    on_host, on_gpu = flash_numba.AttentionStream(q), flash_numba.AttentionStream(DeviceThing(q))
    with pytest.raises(TypeError, match="k and v must lie on q's GPU"):
        on_gpu.absorb(k, v)
    with pytest.raises(TypeError, match="k lies on a GPU"):
        on_host.absorb(DeviceThing(k), DeviceThing(v))
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"outs\[0\] on a GPU and outs\[1\], lses\[0\], lses\[1\] in host memory"):
        flash_numba.merge([DeviceThing(out), out], [lse, lse])


def test_the_checks_are_the_same(fake):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q and k must have the same head dimension"):
        attention(*map(DeviceThing, (q, k[..., :8].copy(), v)))
    with pytest.raises(ValueError, match="window must be"):
        attention(*map(DeviceThing, (q, k, v)), window=(-3, 1))
    with pytest.raises(ValueError, match="mask must broadcast"):
        attention(*map(DeviceThing, (q, k, v)), mask=DeviceThing(np.ones((3, 3), bool)))
    with pytest.raises(ValueError, match="out must have shape"):
        attention(*map(DeviceThing, (q, k, v)), out=DeviceThing(q[..., :8].copy()))
    with pytest.raises(TypeError, match="must share one dtype"):
        attention(DeviceThing(q.astype("f8")), DeviceThing(k), DeviceThing(v))
    with pytest.raises(TypeError, match="byte order"):
        attention(*(DeviceThing(x.astype(">f4")) for x in (q, k, v)))


# -- what is missing, and what would help ------------------------------------------------------------------------------


def open_fake(api, bindings="13.0.3"):
    return driver.open_driver(api, bindings)


def test_errors_say_what_is_missing():
    class Missing:
        def cuInit(self, flags):
            class DynamicLibNotFoundError(RuntimeError): ...

            raise DynamicLibNotFoundError("many\nlines")

    with pytest.raises(driver.BackendError, match="no NVIDIA driver found: install one, 580 or newer"):
        open_fake(Missing())
    hidden = FakeApi()
    hidden.init_status = 100
    with pytest.raises(driver.BackendError, match=r"CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        open_fake(hidden)
    with pytest.raises(driver.BackendError, match=r"finds no GPU; CUDA_VISIBLE_DEVICES"):
        open_fake(FakeApi(count=0))
    with pytest.raises(
        driver.BackendError, match=r"supports CUDA 12\.4, cuda-bindings 13\.0\.3 needs 13\.0: update.*\[cuda12\]"
    ):
        open_fake(FakeApi(version=12040))
    with pytest.raises(driver.BackendError, match=r"supports CUDA 11\.8(?!.*cuda12)"):
        open_fake(FakeApi(version=11080))
    assert open_fake(FakeApi(version=13000), "13.5.0").count == 1  # minor versions fit each other
    assert open_fake(FakeApi(version=13000), "12.9.4").count == 1
    with pytest.raises(driver.BackendError, match=r"Fake GPU \(compute capability 7\.0.*too old.*7\.5"):
        driver.usable(open_fake(FakeApi(cc=(7, 0))), 0)


@pytest.fixture
def nothing_installed(monkeypatch):
    found = driver.importlib.util.find_spec
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: None if name == "numba_cuda" else found(name))
    monkeypatch.setattr(driver, "_found", None)


def test_without_numba_cuda(nothing_installed, tmp_path):
    q, k, v = qkv()
    for call in (
        lambda: attention(q, k, v, backend="cuda"),
        lambda: attention_varlen(*(x[0].swapaxes(0, 1) for x in (q, k, v)), [0, 4], [0, 2], backend="cuda"),
        lambda: flash_numba.info(q, k, v, backend="cuda"),
        lambda: flash_numba.warmup(backend="cuda"),
        lambda: attention(*map(DeviceThing, (q, k, v))),
    ):
        with pytest.raises(
            RuntimeError, match=r"numba-cuda isn't installed: pip install .flash_numba\[cuda\].*\[cuda12\]"
        ):
            call()
    assert flash_numba.info()["GPU"].startswith("none: numba-cuda isn't installed: pip install")
    from typer.testing import CliRunner

    from flash_numba.cli import app

    shown = CliRunner().invoke(app, ["warmup", "--backend", "cuda"])
    assert shown.exit_code == 2
    assert "numba-cuda isn't installed" in shown.output
    archive = tmp_path / "x.npz"
    np.savez(archive, q=q, k=k, v=v)
    shown = CliRunner().invoke(app, ["run", str(archive), "-o", str(tmp_path / "out.npy"), "--backend", "cuda"])
    assert shown.exit_code == 2
    assert "flash-numba: numba-cuda isn't installed" in shown.output
    assert not (tmp_path / "out.npy").exists()


def test_info_names_the_gpu(fake, monkeypatch):
    monkeypatch.setattr(driver, "version_of", lambda name: "1.2" if name == "numba-cuda" else None)
    facts = driver.facts()
    assert facts["GPU"] == "Fake GPU (compute capability 9.0, 132 multiprocessors, 1 GiB)"
    assert facts["CUDA"] == "driver for CUDA 13.0, numba-cuda 1.2"


def test_backends_are_named():
    with pytest.raises(ValueError, match="'auto', 'cpu', 'cuda', 'reference', got 'gpu'"):
        attention(*qkv(), backend="gpu")
    assert backends.choose("auto", q=np.zeros(3), k=[1.0], v=None).name == "cpu"


# -- the driver --------------------------------------------------------------------------------------------------------


def test_shared_memory_is_asked_for_beyond_48_kb(fake):
    gpus = driver.find()
    gpus.load(b"small", "attend", 128, 48 * 1024, 0)
    assert not fake.allowed_shared
    gpus.load(b"large", "attend", 128, 100 * 1024, 0)
    assert list(fake.allowed_shared.values()) == [100 * 1024]
    with pytest.raises(driver.BackendError, match=r"wants 300000 bytes of shared memory.*has 232448"):
        gpus.load(b"huge", "attend", 128, 300000, 0)
    assert fake.contexts == []


def test_the_context_is_the_arrays_device_and_is_put_back(monkeypatch):
    api = FakeApi(count=2)
    gpus = driver.Driver(api)
    loaded = gpus.load(b"code", "attend", 64, 0, 1)
    words = np.array([7, dlpack.CUDA, 0, 0, 0, 0, 0, 8])  # a parameter, and where it lies
    words[1:7] = 1, words.ctypes.data, 2, words.ctypes.data + 56, 0, 0
    for before in ([], [100], [101]):
        api.contexts = list(before)
        gpus.start(loaded, (2, 3, 1), words.ctypes.data + 8, 1, 5)
        assert api.contexts == before
        assert api.started[-1] == ("attend", (2, 3, 1), (64, 1, 1), 0, 5, words[:1].tobytes(), 101)
    api.contexts = [101]
    api.log.clear()
    gpus.start(loaded, (1, 1, 1), words.ctypes.data + 8, 1, 5)
    assert api.log == ["cuCtxGetCurrent", "cuLaunchKernel"]
    with pytest.raises(driver.BackendError, match="CUDA_ERROR_INVALID_VALUE: what it means"):
        gpus.start(loaded, (0, 1, 1), words.ctypes.data + 8, 1, 5)


def test_memory_is_given_back(fake):
    gpus = driver.find()
    address, kept = gpus.allocate(100, 0)
    assert address in fake.memory
    del kept
    gc.collect()
    assert address not in fake.memory


# -- launches ----------------------------------------------------------------------------------------------------------


def compute(parameters):
    """In place of a kernel: the call that a block of parameters describes, by the oracle on the memory it points to."""
    from flash_numba.gpu.arguments import ARGUMENTS

    p = np.frombuffer(parameters, ARGUMENTS)[0]
    formats = {0: np.dtype("f4"), 1: np.dtype("f2"), 2: BFLOAT16, 3: np.dtype("f8"), 6: np.dtype(bool)}

    def array(name, *shape):
        of = p[name] if name != "lse" else p["lse"]
        dtype = formats[int(p[f"{name}_format"])]
        strides = [int(p[f"{name}_{axis}"]) for axis in ("batch", "head", "row", "column")]
        contents = dlpack.Contents(int(of), shape, tuple(strides), dtype, 0, dlpack.CPU, False)
        return np.asarray(arrays._At(contents)).view(dtype)

    def numbers(name, heads):
        if not p[f"{name}s"]:
            return None
        strides = int(p[f"{name}_batch"]), int(p[f"{name}_head"])
        of = dlpack.Contents(int(p[f"{name}s"]), (int(p["batch"]), heads), strides, np.dtype("f8"), 0, 1, False)
        return np.asarray(arrays._At(of)).view("f8")

    batch, heads, queries, keys = (int(p[name]) for name in ("batch", "heads", "queries", "keys"))
    q = array("q", batch, heads, queries, int(p["dim"]))
    k = array("k", batch, heads // int(p["k_group"]), keys, int(p["dim"]))
    v = array("v", batch, heads // int(p["v_group"]), keys, int(p["value_dim"]))
    slopes = numbers("slope", heads)  # to base 2, like scores
    rules = {"scale": float(p["scale"]) / LOG2E, "alibi_slopes": None if slopes is None else slopes / LOG2E}
    rules["window"] = (min(int(p["left"]), 2**30), min(int(p["right"]), 2**30))
    if p["mask"]:
        rules["mask"] = array("mask", batch, heads, queries, keys)
    out, lse = reference.attention(q, k, v, return_lse=True, q_offset=int(p["shift"]), **rules)
    array("out", batch, heads, queries, int(p["value_dim"]))[...] = out
    of = dlpack.Contents(
        int(p["lse"]), lse.shape, (int(p["lse_batch"]), int(p["lse_head"]), 4), np.dtype("f4"), 0, 1, False
    )
    np.asarray(arrays._At(of)).view("f4")[...] = lse


@pytest.fixture
def gpu(fake, monkeypatch):
    """The fake driver with a kernel: what is launched is computed by the oracle."""
    pytest.importorskip("numba.cuda")
    from flash_numba.gpu import cubins, launch
    from flash_numba.gpu.compile import Kernel
    from flash_numba.gpu.plan import Plan

    kernel = Kernel("fake", None, 128, 64 * 1024, lambda record: (int(record["row_tiles"] * record["heads"]), 1, 1), 16)
    monkeypatch.setattr(launch, "choose", lambda *of: Plan("tile", kernel, {"decode": "a fake"}, None))
    monkeypatch.setattr(cubins, "machine_code", lambda kernel, cc: (b"cubin", "attend"))
    monkeypatch.setattr(launch, "_loaded", {})
    fake.kernel = compute
    return fake


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.2, "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}])
def test_arrays_of_the_host_are_copied_once_each_way(gpu, options):
    q, k, v = qkv()
    out, lse = attention(q, k, v, backend="cuda", return_lse=True, **options)
    want, want_lse = attention(q, k, v, backend="reference", return_lse=True, **options)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    (started,) = gpu.started
    assert (started.entry, started.grid, started.shared_bytes) == ("attend", (8, 1, 1), 64 * 1024)
    tables = "alibi_slopes" in options
    assert gpu.log.count("cuMemcpyHtoDAsync") == 3 + tables
    assert gpu.log.count("cuMemcpyDtoH") == 2
    gc.collect()
    assert not gpu.memory
    assert gpu.contexts == []


def test_a_broadcast_mask_is_copied_as_it_is(gpu):
    q, k, v = qkv(batch=(3,))
    mask = np.random.default_rng(1).random((20, 33)) < 0.5
    copied = []
    original = gpu.cuMemcpyHtoDAsync
    gpu.cuMemcpyHtoDAsync = lambda target, source, count, stream: (
        copied.append(count) or original(target, source, count, stream)
    )
    out = np.zeros(q.shape, ">f4")
    assert attention(q, k[:, :, ::-1], v.astype(">f4"), mask=mask, backend="cuda", out=out) is out
    np.testing.assert_array_equal(out, attention(q, k[:, :, ::-1], v, mask=mask, backend="reference"))
    assert copied == [q.nbytes, k.nbytes, v.nbytes, mask.nbytes]


@pytest.mark.parametrize("thing", [DeviceThing, DlpackThing])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_device_arrays_are_read_where_they_lie(gpu, thing, layout):
    q, k, v = qkv()
    want, want_lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
    given = [np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bshd" else x for x in (q, k, v)]
    out, lse = attention(*map(thing, given), causal=True, layout=layout, return_lse=True)
    assert type(out) is type(lse) is DeviceArray
    np.testing.assert_array_equal(values(out).swapaxes(1, 2) if layout == "bshd" else values(out), want)
    np.testing.assert_array_equal(values(lse), want_lse)
    assert "cuMemcpyHtoDAsync" not in gpu.log
    assert "cuMemcpyDtoH" not in gpu.log
    assert gpu.log[-1] == "cuStreamSynchronize"
    one = attention(*(thing(x[0, 0]) for x in (q, k, v)))
    assert one.shape == (20, 16)


def test_results_of_an_unknown_library_are_taken_further(gpu):
    q, k, v = map(DeviceThing, qkv())
    out = attention(q, k, v)
    again = attention(out, k, v)
    np.testing.assert_array_equal(values(again), attention(values(out), k.array, v.array, backend="reference"))
    assert out.__cuda_array_interface__["data"][0] == out.address
    assert dlpack.contents(out.__dlpack__(stream=1)).device_type == dlpack.CUDA


def test_out_is_written_and_returned(gpu):
    q, k, v = map(DeviceThing, qkv())
    out = DeviceThing(np.zeros((1, 4, 20, 16), np.float16))
    assert attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.array, attention(q.array, k.array, v.array, backend="reference").astype("f2"))
    with pytest.raises(ValueError, match="not overlap an input"):
        attention(q, k, v, out=q)
    frozen = type("ArrayImpl", (DeviceThing,), {"__module__": "jaxlib._jax"})
    with pytest.raises(TypeError, match="got one of JAX"):
        attention(q, k, v, out=frozen(out.array))


def test_numbers_may_lie_on_either_side(gpu):
    q, k, v = map(DeviceThing, qkv())
    slopes = np.array([0.1, 0.2, 0.3, 0.4])
    want = attention(q.array, k.array, v.array, alibi_slopes=slopes, backend="reference")
    np.testing.assert_array_equal(values(attention(q, k, v, alibi_slopes=slopes)), want)
    np.testing.assert_array_equal(values(attention(q, k, v, alibi_slopes=DeviceThing(slopes))), want)


def test_partial_runs_there_too(gpu):
    q, k, v = qkv(dtype=np.float16)
    out, _ = attention_partial(*map(DeviceThing, (q, k, v)), q_offset=0, k_offset=0)
    assert out.dtype == np.float32


def test_misaligned_arrays_are_refused(gpu):
    q, k, v = qkv()
    raw = np.zeros(q.nbytes + 1, np.uint8)
    odd = np.ndarray(q.shape, q.dtype, raw, 1)
    with pytest.raises(ValueError, match="q must lie at multiples of 4 bytes on a GPU"):
        attention(DeviceThing(odd), DeviceThing(k), DeviceThing(v))


def test_packed_sequences_and_the_rows_behind_them(gpu):
    gpu.kernel = None
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv())
    attention_varlen(*map(DeviceThing, (q, k, v)), np.array([0, 5, 18]), [0, 20, 30], sinks=[0.1, 0.2, 0.3, 0.4])
    from flash_numba.gpu.arguments import ARGUMENTS
    from flash_numba.problem import SEQUENCE, WORK_TILE

    p = np.frombuffer(gpu.started[0].parameters, ARGUMENTS)[0]
    own = np.frombuffer(ctypes.string_at(int(p["sequences"]), 3 * SEQUENCE.itemsize), SEQUENCE) if gpu.memory else None
    assert (p["batch"], p["work_tile_count"]) == (3, 3)
    assert own is None or own["queries"].tolist() == [5, 13, 2]
    assert WORK_TILE.itemsize == 16


# -- PyTorch and CuPy, by stand-ins: what is asked of them, and that repeated calls ask for little ---------------------


class Device(int):
    """torch.device: of a number, and hashable."""

    index = property(int)


CPU_DEVICE = Device(-1)


class Tensor:
    """As much of a CUDA tensor as is looked at, over host memory."""

    def __init__(self, array, dtype, device):
        self.array, self.dtype, self.device = array, dtype, device
        self.requires_grad = False
        self.shape = array.shape

    def __dlpack_device__(self):
        return (1, 0) if self.device == CPU_DEVICE else (2, self.device.index)

    def __array__(self, dtype=None, copy=None):
        assert self.device == CPU_DEVICE
        return self.array

    def stride(self):
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def is_neg(self):
        return False

    def reshape(self, shape):
        return Tensor(self.array.reshape(shape), self.dtype, self.device)

    def copy_(self, source):
        self.array[...] = source.array


class FakeTorch:
    """The module torch, with its dtypes by name."""

    def __init__(self):
        self.Tensor = Tensor
        self.made = []
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 70 + device)
        self.dtypes = {
            name: f"torch.{name}" for name in ("float32", "float16", "bfloat16", "float64", "bool", "float8_e5m2")
        }
        for name, dtype in self.dtypes.items():
            setattr(self, name, dtype)
        self.uint8 = "torch.uint8"

    def device(self, kind, index):
        return Device(index)

    def is_grad_enabled(self):
        return True

    def empty(self, shape, dtype, device):
        self.made.append(shape)
        names = {theirs: name for name, theirs in self.dtypes.items()} | {self.uint8: "uint8"}
        plain = BFLOAT16 if names[dtype] == "bfloat16" else np.dtype(names[dtype])
        return Tensor(np.empty(shape, plain), dtype, device)


@pytest.fixture
def torch(gpu, monkeypatch):
    module = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.delitem(flash_numba.prepared.FORMS, Tensor, raising=False)
    yield module
    flash_numba.prepared.FORMS.pop(Tensor, None)


def tensors(*given):
    return [Tensor(x, f"torch.{x.dtype.name}", Device(0)) for x in given]


def test_tensors_run_on_their_current_stream(torch, gpu):
    q, k, v = qkv()
    out, lse = attention(*tensors(q, k, v), causal=True, return_lse=True)
    want, want_lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
    assert type(out) is type(lse) is Tensor
    np.testing.assert_array_equal(out.array, want)
    np.testing.assert_array_equal(lse.array, want_lse)
    assert gpu.started[0].stream == 70
    assert "cuStreamSynchronize" not in gpu.log


def test_repeated_calls_only_allocate_and_launch(torch, gpu):
    q, k, v = qkv(batch=(2, 3))  # two batch axes need a table
    given = tensors(q, k, v)
    gpu.kernel = None
    for _ in range(2):
        attention(*given, causal=True)
    gpu.log.clear()
    gpu.contexts = [100]
    torch.made.clear()
    out, lse = attention(*given, causal=True, return_lse=True)
    assert gpu.log == ["cuCtxGetCurrent", "cuLaunchKernel"]
    assert torch.made == [(2, 3, 4, 20, 16), (2, 3, 4, 20)]
    assert (out.shape, lse.shape) == ((2, 3, 4, 20, 16), (2, 3, 4, 20))
    first, last = gpu.started[0], gpu.started[-1]
    assert last._replace(parameters=b"", context=0) == first._replace(parameters=b"", context=0)
    words = np.frombuffer(last.parameters, np.int64)[:5]
    assert words.tolist() == [x.data_ptr() for x in (*given, out, lse)]


def test_remembered_calls_are_told_apart(torch, gpu):
    q, k, v = qkv(dim=24)
    for _ in range(3):
        attention(*tensors(q, k, v))
    # the same shapes and strides at an address that vectors of 16 bytes can't be read from
    raw = np.empty(q.size + 1, np.float32)
    shifted = raw[1:].reshape(q.shape)
    shifted[...] = q
    gpu.log.clear()
    out = attention(*tensors(shifted, k, v))
    assert "cuLaunchKernel" in gpu.log
    np.testing.assert_array_equal(out.array, attention(q, k, v, backend="reference"))
    want = attention(q, k, v, causal=True, backend="reference")
    np.testing.assert_array_equal(attention(*tensors(q, k, v), causal=True).array, want)


def test_tensors_in_host_memory_are_told_apart_from_those_on_a_gpu(torch, gpu):
    q, k, v = qkv()
    want = attention(q, k, v, backend="reference")
    on_cpu = [Tensor(x, "torch.float32", CPU_DEVICE) for x in (q, k, v)]
    for _ in range(3):
        np.testing.assert_array_equal(attention(*tensors(q, k, v)).array, want)
        out = attention(*on_cpu)
        assert type(out) is np.ndarray
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_tensors_that_gradients_are_wanted_of_are_refused(torch, gpu):
    q, k, v = tensors(*qkv())
    for _ in range(2):
        attention(q, k, v)
    q.requires_grad = True
    with pytest.raises(TypeError, match=r"q requires grad.*q.detach\(\)"):
        attention(q, k, v)


def test_tensors_and_other_arrays_do_not_mix(torch, gpu):
    q, k, v = qkv()
    with pytest.raises(TypeError, match="one library, got q: test_cuda_front, k: fake_cuda"):
        attention(*tensors(q), DeviceThing(k), DeviceThing(v))


def test_out_of_another_precision_is_copied_by_the_library(torch, gpu):
    q, k, v = tensors(*qkv())
    (out,) = tensors(np.zeros((1, 4, 20, 16)))
    assert attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.array, attention(q.array, k.array, v.array, backend="reference"))
