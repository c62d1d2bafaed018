"""The CUDA backend's way from a call to a launch with its real kernels, without a GPU: `-m cuda`, with numba-cuda."""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fake_cuda import DlpackThing, FakeApi

import flash_numba
from flash_numba import code_digest, disk_cache, recurrence
from flash_numba.gpu import cubins, driver, launch, plan
from flash_numba.gpu.arguments import ARGUMENTS
from flash_numba.gpu.compile import Kernel, to_ptx

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="the extra test-cuda isn't installed"),
]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def in_new_process(code, **environment):
    """Run code in a fresh interpreter; its standard output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import importlib.util\n" + textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parent,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- end to end, on Numba's simulator ----------------------------------------------------------------------------------


def test_public_calls_on_the_simulator():
    """NumPy arrays copied, and "device" arrays of two kinds, through every public call that takes them."""
    code = """
        import sys, numpy as np, flash_numba
        from fake_cuda import DeviceThing, DlpackThing, values
        from flash_numba import attention, attention_partial, attention_varlen
        sys.setswitchinterval(1e-4)  # threads wait for one another at barriers
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, 2, 9, 8), dtype="f4")
        k, v = rng.standard_normal((2, 2, 1, 21, 8), dtype="f4")
        def close(got, want):
            for a, b in zip(got, want):
                assert a.shape == b.shape, (a.shape, b.shape)
                np.testing.assert_allclose(values(a) if hasattr(a, "_layout") else a, b, rtol=2e-6, atol=2e-6)
        kept = lambda x: np.ascontiguousarray(x.swapaxes(1, 2))
        rules = {"causal": True, "kv_lengths": [21, 13], "alibi_slopes": [0.1, 0.2], "return_lse": True}
        want = attention(q, k, v, **rules, backend="reference")
        close(attention(q, k, v, **rules, backend="cuda"), want)
        out, lse = attention(*(DlpackThing(kept(x), kind=2) for x in (q, k, v)), **rules, layout="bshd")
        close((out, lse), (want[0].swapaxes(1, 2), want[1]))

        mask, rules = rng.random((21,)) < 0.5, {"q_offset": 3, "k_offset": 2, "causal": True}
        want = attention_partial(q, k, v, mask=mask, **rules)
        close(attention_partial(*map(DeviceThing, (q, k, v)), mask=DeviceThing(mask), **rules), want)

        x = rng.standard_normal((12, 1, 8), dtype="f4")
        ends, options = (np.array([0, 3, 3, 10]), [0, 4, 6, 11]), {"sinks": [0.3], "return_lse": True, "causal": True}
        want = attention_varlen(x, x, x, *ends, **options, backend="reference")
        close(attention_varlen(x, x, x, *ends, **options, backend="cuda"), want)
        close(attention_varlen(*[DeviceThing(x)] * 3, *map(DeviceThing, map(np.array, ends)), **options), want)

        one = attention(q[:1, :, :1], k[:1], v[:1], backend="cuda", return_lse=True)  # decoding
        close(one, attention(q[:1, :, :1], k[:1], v[:1], backend="reference", return_lse=True))
        x, y, z = (DeviceThing(kept(a)) for a in (q, k, v))
        options = {"layout": "bshd", "sinks": rng.standard_normal((2, 2)), "causal": True, "kv_total": 21}
        ours, theirs = flash_numba.AttentionStream(x, **options), flash_numba.AttentionStream(x.array, **options)
        close(ours.result(), theirs.result())
        x.array[...] = 0  # a stream has a copy of its own
        for part in (slice(0, 5), slice(5, 5), slice(5, 21)):
            chunk = [np.ascontiguousarray(a.array[:, part]) for a in (y, z)]
            ours.absorb(*map(DeviceThing, chunk)), theirs.absorb(*chunk)
        close(ours.result(), theirs.result())
        outs = [rng.standard_normal((3, 5, 4), dtype="f4") for _ in range(3)]
        lses = [rng.standard_normal((3, 5), dtype="f4") for _ in range(3)]
        lses[1][:, 2], outs[1][:, 2] = -np.inf, np.nan  # a part without a key changes nothing, whatever it holds
        sinks = [0.3, -0.2, 4.0]
        close(flash_numba.merge([*map(DeviceThing, outs)], [*map(DeviceThing, lses)], sinks=sinks),
              flash_numba.merge(outs, lses, sinks=sinks))
        empty = attention(q[:, :, :0], k, v, backend="cuda")
        assert empty.shape == (2, 2, 0, 8)
        print(flash_numba.info(*np.zeros((3, 100, 8)), backend="cuda"), flash_numba.info()["GPU"])
    """
    printed = in_new_process(code, NUMBA_ENABLE_CUDASIM="1")
    assert "the simulator has no tensor cores" in printed
    assert "Numba's simulator" in printed


def test_copies_keep_the_whole_contract_on_the_simulator():
    """Streams and merges of arrays in host memory, which no public call has done on a GPU so far."""
    code = """
        import sys, numpy as np, flash_numba
        from flash_numba import backends, stream
        from flash_numba.gpu.backend import Copies
        sys.setswitchinterval(1e-4)
        rng = np.random.default_rng(0)
        q, (k, v) = rng.standard_normal((2, 2, 5, 8), dtype="f4"), rng.standard_normal((2, 2, 2, 11, 8), dtype="f4")
        rules = {"causal": True, "kv_total": 11, "sinks": rng.standard_normal((2, 2)), "alibi_slopes": [0.1, 0.2]}
        def close(got, want):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
        def streamed():
            whole = flash_numba.AttentionStream(q, **rules)
            for part in (slice(0, 4), slice(4, 11)):
                whole.absorb(k[..., part, :], v[..., part, :])
            return whole.result()
        want = streamed()
        stream.choose = lambda name, **arrays: backends.choose("cuda", **arrays)
        close(streamed(), want)
        outs, lses = rng.standard_normal((2, 3, 5, 4), dtype="f4"), rng.standard_normal((2, 3, 5), dtype="f4")
        sinks, out, lse = rng.standard_normal((1, 3)), np.empty((3, 5, 4), "f4"), np.empty((3, 5), "f4")
        Copies().merge([*outs], [*lses], sinks, out, lse)
        close((out, lse), flash_numba.merge(outs, lses, sinks=sinks[0]))
        seen = []
        flash_numba.attention(q, k, v, backend="cuda", progress=lambda *of: seen.append(of))
        print(seen, Copies().remembers(np.ndarray))
    """
    assert in_new_process(code, NUMBA_ENABLE_CUDASIM="1").strip() == "[(1, 1)] False"


# -- which kernel, and why ---------------------------------------------------------------------------------------------


def qkv(queries, keys, dim=64, dtype=BFLOAT16, heads=8, kv_heads=2):
    return [np.zeros((1, h, n, dim), dtype) for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]


@pytest.fixture
def fake(monkeypatch):
    """A GPU that keeps what it is asked, and kernels that nobody compiles."""
    api = FakeApi()
    monkeypatch.setattr(driver, "_found", driver.Driver(api))
    monkeypatch.setattr(launch, "_loaded", {})
    asked = []
    monkeypatch.setattr(cubins, "machine_code", lambda kernel, cc: asked.append(kernel) or (b"cubin", "attend"))
    api.asked = asked
    return api


def test_what_tensor_cores_take_and_what_not(fake):
    def kernel(arrays, **options):
        found = flash_numba.info(*arrays, backend="cuda", **options)
        return found["kernel"], found.get("not tensor-core", "")

    assert kernel(qkv(300, 300), causal=True)[0] == "tensor-core"
    assert kernel(qkv(300, 300, dtype=np.float16, dim=128))[0] == "tensor-core"
    name, reason = kernel(qkv(300, 300, dtype=np.float32))
    assert name == "tile"
    assert "float32" in reason
    name, reason = kernel(qkv(300, 300, dim=72))
    assert name == "tile"
    assert "72" in reason
    assert kernel(qkv(1, 3000))[0] == "decode"


def test_old_gpus_have_no_tensor_cores_for_it(monkeypatch, fake):
    monkeypatch.setattr(driver, "_found", driver.Driver(FakeApi(cc=(7, 5))))
    found = flash_numba.info(*qkv(300, 300), backend="cuda")
    assert (found["kernel"], "8.0" in found["not tensor-core"]) == ("tile", True)


def test_rows_that_do_not_start_at_16_bytes_go_to_the_tile_kernel(fake):
    q, k, v = map(DlpackThing, qkv(300, 300))
    assert flash_numba.info(q, k, v)["kernel"] == "tensor-core"
    raw = np.zeros(q.array.size + 64, BFLOAT16)
    first = next(n for n in range(64) if raw[n:].__array_interface__["data"][0] % 16 == 2)
    odd = DlpackThing(raw[first : first + q.array.size].reshape(q.array.shape))
    found = flash_numba.info(odd, k, v)
    assert found["kernel"] == "tile"
    assert "16 bytes" in found["not tensor-core"]
    # two batch axes, of which the outer one's stride is in the table of sequences only
    apart = np.zeros((2, 3, 8, 300, 64), BFLOAT16)
    outer = 300 * 64 * 4 + 8
    spread = DlpackThing(np.lib.stride_tricks.as_strided(apart, apart.shape, (outer, *apart.strides[1:])))
    found = flash_numba.info(spread, spread, spread)
    assert found["kernel"] == "tile"
    assert "q, k, v aren't multiples of 16 bytes apart" in found["not tensor-core"]


def test_without_a_gpu_calls_are_planned_for_one(monkeypatch):
    monkeypatch.setattr(driver, "_found", None)

    def none():
        raise driver.BackendError("no NVIDIA driver found: install one")

    monkeypatch.setattr(driver, "_open", none)
    found = flash_numba.info(*qkv(300, 300), backend="cuda", causal=True)
    assert found["GPU"] == "none: no NVIDIA driver found: install one"
    assert found["planned for"] == "compute capability 9.0"
    assert found["kernel"] == "tensor-core"
    assert flash_numba.info()["GPU"] == "none: no NVIDIA driver found: install one"
    with pytest.raises(RuntimeError, match="no NVIDIA driver found"):
        flash_numba.attention(*qkv(3, 3), backend="cuda")


@pytest.mark.parametrize("call", ["plain", "packed", "decode"])
def test_a_launch_gets_what_was_planned(fake, call):
    q, k, v = qkv(300, 300)
    if call == "packed":
        x = np.zeros((300, 8, 64), BFLOAT16)
        flash_numba.attention_varlen(x, x[:, :2], x[:, :2], [0, 70, 300], [0, 10, 90], backend="cuda")
        found = None
    else:
        q = q[:, :, :1] if call == "decode" else q
        found = flash_numba.info(q, k, v, backend="cuda")
        flash_numba.attention(q, k, v, backend="cuda")
    (started,), (kernel,) = fake.started, fake.asked
    assert len(started.parameters) == ARGUMENTS.itemsize
    record = np.frombuffer(started.parameters, ARGUMENTS)[0]
    assert started.threads == (kernel.threads, 1, 1)
    assert started.shared_bytes == kernel.shared_bytes
    assert started.grid == kernel.grid(record)
    if found:
        assert found["thread blocks"].startswith(f"{np.prod(started.grid)} of {kernel.threads} threads")
    else:
        rows = [70, 230]
        assert record["work_tile_count"] == sum(-(-n // kernel.rows) for n in rows)
    if call == "decode":
        assert record["splits"] * record["split_keys"] >= 300


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="builds a stand-in libcuda")
def test_the_real_bindings_are_called_as_they_want_to_be(tmp_path):
    """With a library in place of the driver's that keeps memory on the host and says what it is asked."""
    source = Path(__file__).parent / "fake_libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", tmp_path / "libcuda.so.1", source], check=True)
    code = """
        import numpy as np, flash_numba
        from fake_cuda import DeviceThing
        from flash_numba.gpu import cubins, driver
        cubins.machine_code = lambda kernel, cc: (b"\\x7fELF code", "attend")
        print(flash_numba.info()["GPU"], flush=True)
        q = np.zeros((1, 2, 300, 64), "f4")
        copied = flash_numba.attention(q, q, q, backend="cuda", alibi_slopes=[1.0, 2.0])
        there = flash_numba.attention(*[DeviceThing(q)] * 3)
        decoded = flash_numba.attention(q[:, :, :1], q, q, backend="cuda")
        print([out.ravel()[:4].tolist() for out in (copied, driver.find().read(there), decoded)])
    """
    printed = in_new_process(code, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    assert printed[0] == "Stub GPU (compute capability 9.0, 132 multiprocessors, 1 GiB)"
    assert printed[-1] == str([[0.0, 1.0, 2.0, 3.0]] * 3)
    launches = [line for line in printed if line.startswith("launch")]
    assert len(launches) == 3
    for line in launches:
        assert " block 128 1 1 shared " in line
        assert f" stream 1 bytes {ARGUMENTS.itemsize} first " in line
    assert launches[0].split(" first ")[0] == launches[1].split(" first ")[0]
    assert printed.count("load ELF  0 0") == 2
    assert any(line.startswith("attribute 8 ") for line in printed)  # more than 48 KiB of shared memory


# -- compiling, and the cache ------------------------------------------------------------------------------------------


def tiny(value=7):
    """A kernel that compiles in a moment."""
    from flash_numba.gpu.ir.memory import store_int64

    def kernel(p):
        store_int64(p.out, p.keys + value)

    kernel.__module__ = store_int64.__module__  # of the library: what lies here is no part of its code
    return Kernel("tiny", kernel, 32, 0, lambda record: (1, 1, 1), 1)


def test_parameters_are_the_bytes_of_the_record():
    ptx = to_ptx(tiny(), (9, 0))
    entry = ptx[ptx.index(".entry attend(") : ptx.index(")", ptx.index(".entry attend("))]
    kinds = [line.split()[1] for line in entry.splitlines() if ".param" in line]
    assert set(kinds) <= {".u64", ".b64", ".f64"}
    assert 8 * len(kinds) == ARGUMENTS.itemsize


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "log", log := [])
    monkeypatch.setattr(disk_cache, "lost", {})
    return log


@pytest.mark.parametrize("assembler", ["link", "ptxas"])
def test_ptx_is_assembled_by_what_there_is(monkeypatch, assembler):
    if assembler == "ptxas":

        def refuse(ptx, cc):
            raise RuntimeError("no nvJitLink")

        monkeypatch.setattr(cubins, "link", refuse)
    elif importlib.util.find_spec("nvidia.cu13") is None or not list(
        Path(importlib.util.find_spec("nvidia.cu13").submodule_search_locations[0]).glob("lib/libnvJitLink*")
    ):
        pytest.skip("nvJitLink isn't installed")
    else:
        monkeypatch.setattr(cubins, "assemble", None)
    assert cubins.to_cubin(to_ptx(tiny(), (9, 0)), (9, 0)).startswith(b"\x7fELF")


def test_without_an_assembler_the_error_names_packages(monkeypatch):
    def refuse(*_):
        raise RuntimeError("not here")

    monkeypatch.setattr(cubins, "link", refuse)
    monkeypatch.setattr(cubins, "assemble", refuse)
    with pytest.raises(driver.BackendError, match=r"pip install nvidia-nvjitlink.*not here; not here"):
        cubins.to_cubin("", (9, 0))


def test_link_errors_are_quoted():
    with pytest.raises(RuntimeError, match="nvJitLink"):
        cubins.link("nonsense", (9, 0))


def test_second_call_compiles_nothing_and_damage_is_repaired(cache, monkeypatch, tmp_path):
    first = cubins.machine_code(tiny(), (9, 0))
    (path,) = (tmp_path / "cache").glob("*.kernel")
    assert path.name.startswith("tiny_sm_90-")
    compiled = []
    monkeypatch.setattr(cubins, "to_ptx", lambda kernel, cc: compiled.append(kernel.name) or to_ptx(kernel, cc))
    assert cubins.machine_code(tiny(), (9, 0)) == first
    assert compiled == []
    assert [line.split()[0] for line in cache] == ["saved", "loaded"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    cubins.machine_code(tiny(), (9, 0))
    assert compiled == ["tiny"]
    assert disk_cache.load(path)[:4] == b"\x7fELF"
    assert cubins.machine_code(tiny(), (8, 0)) != first  # another compute capability is another file
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 2
    monkeypatch.setattr(cubins, "version_of", lambda package: "another")
    cubins.machine_code(tiny(), (9, 0))
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 3


def test_a_folder_that_cannot_be_written_does_not_matter(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert cubins.machine_code(tiny(), (9, 0))[0].startswith(b"\x7fELF")
    assert "no cache" in cache[0]


def test_concurrent_processes_share_the_cache(tmp_path):
    code = """
        import sys; sys.path.insert(0, ".")
        from test_cuda_launch import cubins, tiny
        cubins.machine_code(tiny(), (9, 0))
        print(cubins.disk_cache.log[-1].split()[0])
    """
    script = "import importlib.util\n" + textwrap.dedent(code)
    environment = os.environ | {"FLASH_NUMBA_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=-1, cwd=Path(__file__).parent)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=240)[0].decode().split() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert ["saved"] in said
    assert not list(tmp_path.glob("*.tmp"))
    assert len(list(tmp_path.glob("*.kernel"))) == 1
    assert in_new_process(code, FLASH_NUMBA_CACHE_DIR=str(tmp_path)).split() == ["loaded"]


@pytest.mark.parametrize("kernel", ["tile", "decode", "tensorcore", "merge"])
def test_the_key_follows_every_module_that_a_kernel_is_made_of(kernel, monkeypatch):
    module = f"flash_numba.gpu.{kernel}"
    importlib.import_module(module)
    modules = code_digest.modules_of(module)
    names = {name.removeprefix("flash_numba.") for name in modules}
    assert {"recurrence", "dtypes", "gpu.elements", "gpu.primitives", "gpu.ir.lanes", "gpu.ir.memory"} <= names
    if kernel != "merge":
        assert {"geometry", "scores", "dropout", "gpu.loading", "gpu.rules"} <= names
    before = cubins.digest(module)
    for name in modules:
        with monkeypatch.context() as change:
            change.setattr(sys.modules[name], "ONE_MORE_CONSTANT", 1.5, raising=False)
            assert cubins.digest(module) != before, name
    for function in (recurrence.lse, sys.modules["flash_numba.gpu.ir.lanes"].install):
        code = function.__code__
        with monkeypatch.context() as change:
            change.setattr(function, "__code__", code.replace(co_consts=(*code.co_consts, "one more")))
            assert cubins.digest(module) != before, function
    assert cubins.digest(module) == before


def test_warmup_compiles_for_the_gpu(fake):
    seen = []
    names = flash_numba.warmup(
        ["float16", np.float32], backend="cuda", head_dims=64, progress=lambda done, total, name: seen.append(name)
    )
    assert sorted(kernel.name for kernel in fake.asked) == sorted(names)
    assert len(names) >= 3  # decoding and the rest, and the rest on tensor cores or not
    assert seen == [*names, ""]
    flash_numba.attention(*qkv(300, 300, dtype=np.float16), backend="cuda")
    assert len(fake.asked) == len(names)  # what was warmed up is what is used


# -- the benchmark's parts ---------------------------------------------------------------------------------------------


def test_the_fragment_check_finds_wrong_layouts(monkeypatch):
    """On the PTX interpreter: right as it is, and wrong where two registers of a fragment change places."""
    from ptx import GlobalMemory, Machine, parse

    from benchmarks import gpu_checks

    def products(change):
        kernel = gpu_checks.layout_kernel("bfloat16")
        (code,) = parse(change(to_ptx(kernel, (9, 0)))).values()
        a, b, want = gpu_checks.layout_inputs("bfloat16")
        memory, record = GlobalMemory(1 << 20), np.zeros((), ARGUMENTS)
        for name, array in (("q", a), ("k", np.ascontiguousarray(b.T)), ("v", b)):
            record[name] = memory.place(array).__array_interface__["data"][0]
        results = [memory.place(np.zeros_like(want), "write") for _ in range(2)]
        record["out"], record["lse"] = (x.__array_interface__["data"][0] for x in results)
        Machine(code, (32, 1, 1), kernel.shared_bytes, 1).launch((1, 1, 1), record.tobytes(), memory)
        return [(x == want).all() for x in results]

    assert products(lambda ptx: ptx) == [True, True]
    assert products(lambda ptx: ptx.replace(".x4.trans.", ".x4.")) == [True, False]


class Events:
    """Events of the fake driver, of a clock that runs a millisecond a call."""

    def __init__(self, api):
        self.api, self.marks = api, {}
        api.cuEventCreate = lambda flags: (0, len(self.marks) + object().__hash__())
        api.cuEventRecord = self.record
        api.cuEventSynchronize = lambda event: (0,)
        api.cuEventElapsedTime = lambda a, b: (0, self.marks[b] - self.marks[a])

    def record(self, event, stream):
        self.marks[event] = len(self.api.started)
        return (0,)


def test_figures_come_from_launches(fake, monkeypatch):
    from benchmarks import gpu, gpu_timing

    fake.multiprocessors = 2  # as what is read to measure the memory grows with them
    events = Events(fake)
    handles = iter(range(100))
    fake.cuEventCreate = lambda flags: (0, next(handles))
    clock = gpu_timing.Clock(driver.find())
    limits = gpu_timing.limits(driver.find(), clock, None)
    assert limits["float32_flops"] == pytest.approx(8 * 2 * 256 * 16 * 2 * 4096 / 1e-3)
    shape = gpu_timing.square(512, 64, True, 512)
    timed = gpu_timing.time_call(shape, "bfloat16", clock, None)
    assert (timed.seconds, timed.torch_seconds, timed.kernel) == (pytest.approx(1e-3), None, "tensor-core")
    decode = gpu_timing.time_call(gpu_timing.decoding(2, 8, 2, 1000, 64), "bfloat16", clock, None)
    assert decode.kernel == "decode"
    tile = gpu_timing.time_call(shape, "float32", clock, None)
    assert tile.kernel == "tile"
    overhead = gpu_timing.overhead(driver.find(), None)
    assert 0 < overhead["launch"] < 1e-2
    figures = {
        "device": "Fake GPU", "cuda": "none", "torch": None, "date": "2026-11-29", "commit": "0123456789ab",
        "conformance": {"passed": 3}, "limits": limits, "forward": [timed._asdict()], "decode": [decode._asdict()],
        "tile": [tile._asdict()], "overhead": overhead, "rows": {},
    }  # fmt: skip
    text = gpu.section(figures)
    for words in ("Fake GPU", "2026-11-29", "0123456789ab", "tensor-core", "us a call", "of a plain read"):
        assert words in text
    assert events.marks


def test_conformance_on_a_device_tells_right_from_wrong(fake, monkeypatch):
    """The fake GPU computes nothing: every case that has a result fails, and none is passed over in silence."""
    from benchmarks import gpu_checks

    cases = [case for case in gpu_checks.device_cases() if case.cost < 5e4][:12]
    monkeypatch.setattr(gpu_checks, "compile_ahead", lambda kernels, cc, workers, deadline: list(kernels))
    outcome = gpu_checks.run_cases(cases, driver.find().gpu(0), 60, 1)
    assert len(outcome.failed) + outcome.passed == 12
    assert outcome.left_out == 0
    assert len(outcome.failed) >= 11
    assert plan.KERNELS.keys() <= outcome.kernels.keys()


def test_kernels_are_compiled_ahead_in_other_processes(cache, tmp_path):
    """From the name of a case to a file in the cache."""
    from benchmarks import gpu_checks

    cases = [case for case in gpu_checks.device_cases() if case.dtype == np.float32 and case.q[-1] == 8]
    case = max(cases, key=lambda case: case.cost)
    want = gpu_checks.planned(case, (9, 0)).kernel
    kernels = {want.name: case.name, "broken": "no such case"}
    assert sorted(gpu_checks.compile_ahead(kernels, (9, 0), 1, time.monotonic() + 120)) == ["broken", want.name]
    assert len(list((tmp_path / "cache").glob(f"{want.name}_sm_90-*.kernel"))) == 1


def test_a_whole_run_of_the_benchmark(fake, monkeypatch, tmp_path):
    """On the fake GPU, with its checks taken for passed: figures, README and the CPU's table fit one another."""
    from benchmarks import gpu, gpu_checks, gpu_timing
    from benchmarks.cuda import recorded, recorded_seconds

    Events(fake)
    fake.multiprocessors = 2
    handles = iter(range(100))
    fake.cuEventCreate = lambda flags: (0, next(handles))
    shape = gpu_timing.square(512, 64, True, 512)
    for name, shapes in (("FORWARD", [shape]), ("TILE", [shape]), ("DECODE", [gpu_timing.decoding(2, 8, 2, 1000, 64)])):
        monkeypatch.setattr(gpu_timing, name, shapes)
    monkeypatch.setattr(gpu_timing, "SETS", {"short": [shape], "main": []})
    monkeypatch.setattr(gpu_checks, "check_layouts", lambda gpus: None)
    outcome = gpu_checks.Outcome(7, [], 2, {"tile": 7})
    monkeypatch.setattr(gpu_checks, "run_cases", lambda *of: outcome)
    monkeypatch.setattr(gpu, "why_no_cuda", lambda: None)
    monkeypatch.setattr(gpu, "optional_torch", lambda: None)
    readme, figures = tmp_path / "README.md", tmp_path / "figures.json"
    readme.write_text(f"{gpu.BEGIN}\n{gpu.END}\n")
    gpu.main(["--readme", str(readme), "--json", str(figures)])
    assert "Fake GPU" in readme.read_text()
    assert "7 conformance cases passed" in readme.read_text()
    assert recorded_seconds(recorded(figures), shape.name, "float32") == pytest.approx(1e-3)
    monkeypatch.setattr(gpu_checks, "run_cases", lambda *of: outcome._replace(failed=["one: off by 3"]))
    readme.write_text("untouched")
    with pytest.raises(SystemExit, match="one: off by 3"):
        gpu.main(["--readme", str(readme), "--json", str(figures)])
    assert readme.read_text() == "untouched"
