"""Threads, forks, Ctrl-C, memory, and the kernel cache on disk."""

import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest

from flash_numba import attention, code_digest
from flash_numba.cpu import kernel_cache

POSIX = hasattr(os, "fork")


def qkv(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


def in_new_process(code, **environment):
    """Run code in a fresh interpreter; its standard output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def threads():
    """Set the number of threads, and put it back."""
    before = numba.get_num_threads()
    yield numba.set_num_threads
    numba.set_num_threads(before)


# -- same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_for_any_thread_count_and_batch(threads, dtype, causal):
    q, k, v = qkv(8, 2, 300, 64, dtype=dtype)
    threads(1)
    serial, serial_lse = attention(q, k, v, causal=causal, return_lse=True)
    threads(numba.config.NUMBA_NUM_THREADS)
    parallel, parallel_lse = attention(q, k, v, causal=causal, return_lse=True)
    np.testing.assert_array_equal(serial, parallel)
    np.testing.assert_array_equal(serial_lse, parallel_lse)
    for b in range(8):
        np.testing.assert_array_equal(attention(q[b], k[b], v[b], causal=causal), serial[b])
    np.testing.assert_array_equal(attention(q[3:4, 1:], k[3:4, 1:], v[3:4, 1:], causal=causal), serial[3:4, 1:])


def test_calls_from_many_threads_at_once():
    calls = [qkv(1, 2, 200, 32, seed=seed) for seed in range(8)]
    expected = [attention(*call) for call in calls]
    got = [None] * len(calls)

    def work(i):
        for _ in range(5):
            got[i] = attention(*calls[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_threading_layers_take_concurrent_calls(layer):
    code = """
        import threading, numpy as np, numba, flash_numba
        q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype("f4")
        expected = flash_numba.attention(q, q, q)
        def work():
            for _ in range(20):
                assert np.array_equal(flash_numba.attention(q, q, q), expected)
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(numba.threading_layer())
    """
    try:
        assert in_new_process(code, NUMBA_THREADING_LAYER=layer).strip() == layer
    except AssertionError as error:
        if "threading layer" in str(error):
            pytest.skip(f"no {layer} here")
        raise


@pytest.mark.skipif(not POSIX, reason="no fork here")
def test_child_forked_after_a_parallel_call():
    code = """
        import os, warnings, numpy as np, flash_numba
        q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype("f4")
        expected = flash_numba.attention(q, q, q)
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking with threads about
        pid = os.fork()
        if pid == 0:
            os._exit(0 if np.array_equal(flash_numba.attention(q, q, q), expected) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert np.array_equal(flash_numba.attention(q, q, q), expected)
    """
    assert in_new_process(code).strip() == "0"


# -- interruption and progress -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not POSIX, reason="sends a signal to itself")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ctrl_c_ends_a_long_call(threads, num_threads):
    threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    attention(*qkv(1, 2, 16, 64))
    long = [np.broadcast_to(x, (1, 64, 16384, 64)) for x in qkv(1, 1, 16384, 64)]  # half a minute and more
    sent = []

    def interrupt():
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        attention(*long)
    assert time.perf_counter() - sent[0] < 1.0
    # nothing is left running or broken
    q, k, v = qkv(1, 2, 64, 64)
    assert np.isfinite(attention(q, k, v)).all()
    assert "flash_numba" not in [t.name for t in threading.enumerate()]


def test_progress_reaches_the_end():
    seen = []
    attention(*qkv(1, 8, 2048, 64), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(seen))


def test_an_error_in_the_progress_callback_ends_the_call():
    def fail(done, total):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        attention(*qkv(1, 64, 8192, 64), progress=fail)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_far_below_the_score_matrix():
    """Peak over a warmed process: inputs and output plus little. The scores alone would take 256 MiB."""
    code = """
        import numpy as np, flash_numba
        def peak():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
        rng = np.random.default_rng(0)
        small = rng.standard_normal((1, 1, 64, 64), dtype="f4")
        flash_numba.attention(small, small, small)
        q, k, v = (rng.standard_normal((1, 1, 8192, 64), dtype="f4") for _ in range(3))
        out = np.zeros_like(q)
        big = rng.standard_normal((1, 2, 512, 64), dtype="f4")
        flash_numba.attention(big, big, big)
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        flash_numba.attention(q, k[:, :, ::-1], v.astype(">f4"), out=out)
        print(peak() - before)
    """
    assert float(in_new_process(code)) < 16 + 2  # MiB; and 2 for the big-endian copy the test makes itself


# -- disk cache --------------------------------------------------------------------------------------------------------

CALL = """
    import numpy as np, flash_numba
    from flash_numba.cpu import kernel_cache
    q = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype("f4")
    out = flash_numba.attention(q, q, q)
    assert np.abs(out - flash_numba.attention(q, q, q, backend="reference")).max() < 1e-5
    print(" ".join(line.split()[0] + line.split()[1].split("-")[0] for line in kernel_cache.log))
"""


def test_second_process_compiles_nothing(tmp_path):
    folder = str(tmp_path / "cache")
    assert in_new_process(CALL, FLASH_NUMBA_CACHE_DIR=folder).split() == ["savedforward_float32", "saveddrive"]
    assert in_new_process(CALL, FLASH_NUMBA_CACHE_DIR=folder).split() == ["loadedforward_float32", "loadeddrive"]
    # damaged files, each in its own way, are compiled again and replaced
    for path in tmp_path.glob("cache/*.kernel"):
        data = bytearray(path.read_bytes())
        if "forward" in path.name:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        else:
            path.write_bytes(data[:100])
    words = in_new_process(CALL, FLASH_NUMBA_CACHE_DIR=folder).split()
    assert [w for w in words if w.startswith("saved")] == ["savedforward_float32", "saveddrive"]
    assert in_new_process(CALL, FLASH_NUMBA_CACHE_DIR=folder).split() == ["loadedforward_float32", "loadeddrive"]


def test_concurrent_processes_share_the_cache(tmp_path):
    environment = os.environ | {"FLASH_NUMBA_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(CALL)
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=-1) for _ in range(3)]
    assert [process.wait(240) for process in running] == [0, 0, 0]
    for process in running:
        process.stdout.close()
    assert not list(tmp_path.glob("*.tmp"))
    assert in_new_process(CALL, FLASH_NUMBA_CACHE_DIR=str(tmp_path)).split() == ["loadedforward_float32", "loadeddrive"]


@pytest.mark.skipif(not POSIX, reason="file modes")
def test_a_folder_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert kernel_cache.private_folder() is None
    tmp_path.chmod(0o700)
    assert kernel_cache.private_folder() == tmp_path
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("in the way")
    assert kernel_cache.private_folder() is None


FORWARD = "flash_numba.cpu.forward"
PRINT_DIGEST = f"import {FORWARD}; from flash_numba.cpu import kernel_cache; print(kernel_cache.digest('{FORWARD}'))"


def digest_in_new_process(path, code=PRINT_DIGEST):
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    elsewhere = Path(path).parent  # as what lies in the working directory would be imported first
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=True).stdout


def copy_of_package(to):
    """Where the library's files are copied to, as something that isn't on the path yet."""
    source = Path(kernel_cache.__file__).parent.parent
    shutil.copytree(source, to / "flash_numba", ignore=shutil.ignore_patterns("__pycache__"))
    return to


def change_a_formula(folder):
    path = folder / "flash_numba" / "recurrence.py"
    text = path.read_text()
    assert "return LN2 * (m + " in text
    path.write_text(text.replace("return LN2 * (m + ", "return LN2 * (2 * m + "))


def test_digest_follows_every_module_that_a_kernel_is_made_of(monkeypatch):
    importlib.import_module(FORWARD)
    modules = code_digest.modules_of(FORWARD)
    names = {name.removeprefix("flash_numba.") for name in modules}
    assert {"recurrence", "scores", "geometry", "dropout", "dtypes", "ops", "cpu.forward", "cpu.loading"} <= names
    assert {"cpu.rules", "cpu.operands", "cpu.formats", "cpu.primitives", "cpu.ir.lanes", "cpu.ir.products"} <= names
    before = kernel_cache.digest(FORWARD)
    assert kernel_cache.digest(FORWARD) == before
    for name in modules:
        module = sys.modules[name]
        with monkeypatch.context() as change:
            change.setattr(module, "ONE_MORE_CONSTANT", 1.5, raising=False)
            assert kernel_cache.digest(FORWARD) != before, name
        functions = [f for f in map(code_digest.function_of, vars(module).values()) if f and f.__module__ == name]
        for function in functions:
            code = function.__code__
            with monkeypatch.context() as change:
                change.setattr(function, "__code__", code.replace(co_consts=(*code.co_consts, "one more")))
                assert kernel_cache.digest(FORWARD) != before, function
    assert kernel_cache.digest(FORWARD) == before


def test_digest_follows_what_a_function_has_closed_over():
    def made(rows):
        def step(x):
            return x * rows

        return step

    module = ModuleType("flash_numba.made")
    made.__module__ = "flash_numba.made"
    seen = set()
    with pytest.MonkeyPatch.context() as change:
        change.setitem(sys.modules, "flash_numba.made", module)
        for rows in (4, 8, 8.0):
            module.step = made(rows)
            module.step.__module__ = "flash_numba.made"
            seen.add(code_digest.of_code("flash_numba.made", ()))
    assert len(seen) == 3


def test_digest_is_of_the_code_in_memory(tmp_path):
    """Not of source files, which may have been edited since: the next process would be served what they say no more."""
    package = copy_of_package(tmp_path / "files")
    before = digest_in_new_process(package)
    edit = f"import {FORWARD}; open({str(package / 'flash_numba' / 'recurrence.py')!r}, 'a').write('more = 1'); "
    assert digest_in_new_process(package, edit + PRINT_DIGEST) == before
    assert digest_in_new_process(package) != before


def test_digest_of_a_package_in_an_archive(tmp_path):
    """Where there are no source files to look at."""
    package = copy_of_package(tmp_path / "files")
    first = shutil.make_archive(str(tmp_path / "first"), "zip", package)
    change_a_formula(package)
    second = shutil.make_archive(str(tmp_path / "second"), "zip", package)
    assert digest_in_new_process(first) == digest_in_new_process(first)
    assert digest_in_new_process(first) != digest_in_new_process(second)
    assert digest_in_new_process(second) == digest_in_new_process(package)


def test_import_starts_neither_numba_nor_the_kernels():
    code = """
        import sys, flash_numba
        print([name for name in ("numba", "llvmlite", "flash_numba.cpu.launch", "typer") if name in sys.modules])
    """
    assert in_new_process(code).strip() == "[]"
