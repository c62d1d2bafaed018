"""The commands as a user meets them: results, exit status, one line for whatever is wrong, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

import flash_numba
from flash_numba import bands, check, cli, interface, reference

SAMPLE = Path(__file__).parent.parent / "examples" / "minilm_qkv.npz"
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (30, 50, 50))


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def run(*arguments):
    """A `run` that succeeds; its summary line."""
    result = invoke("run", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    return result.stdout


def run_fails(*arguments):
    """A `run` that doesn't; its message, which is one line, with exit status 2 and no traceback."""
    result = invoke("run", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("flash-numba: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def qkv(tmp_path):
    """Q, K and V in one archive; nothing else may be in the folder after a failure."""
    path = tmp_path / "in" / "qkv.npz"
    path.parent.mkdir()
    np.savez(path, q=Q, k=K, v=V)
    return path


@pytest.fixture
def out(tmp_path):
    """Where to write to: a folder that is empty so far."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.npy"


@pytest.fixture
def threads_restored():
    """For what calls `--threads`, which holds for the process."""
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


# ---- run


def test_the_sample_runs(out):
    """What README runs: q, k and v of a real model."""
    summary = run(SAMPLE, "-o", out)
    q, k, v = np.load(SAMPLE).values()
    assert q.shape == k.shape == v.shape == (1, 12, len(q[0, 0]), 32)
    assert f"{q.shape} float16" in summary
    assert "GFLOP/s" in summary
    truth = bands.exact(q, k, v)
    assert (np.abs(np.load(out) - truth.out) <= bands.limit(q.dtype, truth)).all()


def test_the_library_prints_nothing(capfd):
    flash_numba.attention(Q, K, V, progress=lambda done, total: None)
    assert capfd.readouterr() == ("", "")


OPTIONS = {
    "": {},
    "--causal": {"causal": True},
    "--causal bottom-right": {"causal": True},
    "--causal=bottom-right": {"causal": True},
    "--causal top-left": {"causal": "top-left"},
    "--scale 0.1 --backend cpu": {"scale": 0.1},
    "--scale -2 --backend reference --threads 1": {"scale": -2.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("threads_restored")
def test_options_reach_attention(qkv, out, options):
    run(*options.split(), qkv, "-o", out)
    expected = reference.attention(Q, K, V, **OPTIONS[options])
    np.testing.assert_allclose(np.load(out), expected, atol=1e-5)


def test_bare_causal_before_a_file_takes_no_value(qkv, out):
    run("-o", out, "--causal", qkv)
    np.testing.assert_allclose(np.load(out), reference.attention(Q, K, V, causal=True), atol=1e-5)


def test_mask_layout_and_lse(qkv, out, tmp_path):
    mask = RNG.random((30, 50)) < 0.5
    np.save(tmp_path / "mask.npy", mask)
    np.savez(tmp_path / "masks.npz", keep=mask)
    expected, lse = reference.attention(Q, K, V, mask=mask, return_lse=True)
    for arguments in (["--mask", tmp_path / "mask.npy"], ["--mask", tmp_path / "masks.npz", "--mask-name", "keep"]):
        run(qkv, "-o", out, "--lse", tmp_path / "lse.npz", *arguments)
        np.testing.assert_allclose(np.load(out), expected, atol=1e-5)
        np.testing.assert_allclose(np.load(tmp_path / "lse.npz")["lse"], lse, atol=1e-5)

    np.savez(qkv, q=Q.swapaxes(1, 2), k=K.swapaxes(1, 2), v=V.swapaxes(1, 2))
    run(qkv, "-o", out, "--lse", tmp_path / "lse.npy", "--layout", "bshd", "--mask", tmp_path / "mask.npy")
    np.testing.assert_allclose(np.load(out), expected.swapaxes(1, 2), atol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "lse.npy"), lse, atol=1e-5)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_archives_with_other_names(tmp_path, out, suffix):
    path = tmp_path / f"model{suffix}"
    arrays = {"layer.0.query": Q, "layer.0.key": K, "layer.0.value": V}
    if suffix == ".npz":
        np.savez_compressed(path, **arrays)
    else:
        safetensors.numpy.save_file(arrays, path)
    run(path, "--q", "layer.0.query", "--k", "layer.0.key", "--v", "layer.0.value", "-o", out)
    np.testing.assert_allclose(np.load(out), reference.attention(Q, K, V), atol=1e-5)


def test_three_files_and_every_output_format(tmp_path, out):
    for name, x in zip("qkv", (Q, K, V), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    for suffix, load in ((".npy", np.load), (".npz", np.load), (".safetensors", safetensors.numpy.load_file)):
        path = out.with_suffix(suffix)
        run(*(tmp_path / f"{name}.npy" for name in "qkv"), "-o", path)
        loaded = load(path) if suffix == ".npy" else load(path)["out"]
        np.testing.assert_allclose(loaded, reference.attention(Q, K, V), atol=1e-5)
    assert len(list(out.parent.iterdir())) == 3


def test_bfloat16(tmp_path, out):
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (Q, K, V))
    expected = flash_numba.attention(q, k, v)
    safetensors.numpy.save_file({"q": q, "k": k, "v": v}, tmp_path / "qkv.safetensors")
    run(tmp_path / "qkv.safetensors", "-o", out.with_suffix(".safetensors"))
    assert safetensors.numpy.load_file(out.with_suffix(".safetensors"))["out"].tobytes() == expected.tobytes()
    np.savez(tmp_path / "qkv.npz", q=q, k=k, v=v)
    run(tmp_path / "qkv.npz", "--dtype", "bfloat16", "-o", out)
    assert np.load(out).view(ml_dtypes.bfloat16).tobytes() == expected.tobytes()
    assert "--dtype bfloat16" in run_fails(tmp_path / "qkv.npz", "-o", out)


def test_progress_shows_on_a_terminal(qkv, out, monkeypatch):
    calls = []

    def attention(*arguments, progress=None, **keywords):
        if progress is not None:
            progress(1, 4)
            calls.append(progress)
        return flash_numba.attention(*arguments, **keywords)

    monkeypatch.setattr(interface, "attention", attention)
    run(qkv, "-o", out)
    assert not calls
    monkeypatch.setattr(cli.Console, "is_terminal", True)
    result = invoke("run", qkv, "-o", out)
    assert calls
    assert "25%" in result.stderr
    assert "out.npy" in result.stderr
    assert result.stdout.count("\n") == 1


# ---- what is wrong with a run


def test_files_that_cannot_be_read(qkv, out, tmp_path):
    content = qkv.read_bytes()
    (tmp_path / "in" / "short.npz").write_bytes(content[: len(content) // 2])
    np.savez(tmp_path / "in" / "objects.npz", q=np.array([{}, []], dtype=object), k=K, v=V)
    np.savez(tmp_path / "in" / "integers.npz", q=Q.astype(int), k=K, v=V)
    np.savez(tmp_path / "in" / "flat.npz", q=Q.ravel(), k=K, v=V)
    for name, reason in (
        ("missing.npz", "no such file"),
        ("short.npz", "zip"),
        ("objects.npz", "pickle"),
        ("integers.npz", "int64"),
        ("flat.npz", "(..., S, D)"),
    ):
        message = run_fails(tmp_path / "in" / name, "-o", out)
        assert name in message
        assert reason in message
    assert "no array 'x'" in run_fails(qkv, "-o", out, "--q", "x")
    assert "no such file" in run_fails(qkv, "-o", out, "--mask", tmp_path / "mask.npy")
    assert "mask is bool" in run_fails(qkv, "-o", out, "--mask", qkv, "--mask-name", "q")
    assert "2 files" in run_fails(qkv, qkv, "-o", out)
    np.save(tmp_path / "q.npy", Q)
    assert "three" in run_fails(tmp_path / "q.npy", "-o", out)
    assert not list(out.parent.iterdir())


def test_arguments_that_attention_refuses(qkv, out, tmp_path):
    np.savez(tmp_path / "in" / "odd.npz", q=Q, k=K[..., :5], v=V)
    np.savez(tmp_path / "in" / "mixed.npz", q=Q, k=K.astype(np.float16), v=V)
    np.save(tmp_path / "mask.npy", np.ones((7, 7), bool))
    for arguments in (
        [tmp_path / "in" / "odd.npz"],
        [tmp_path / "in" / "mixed.npz"],
        [qkv, "--scale", "nan"],
        [qkv, "--layout", "sbhd"],
        [qkv, "--backend", "tpu"],
        [qkv, "--mask", tmp_path / "mask.npy"],
    ):
        assert str(arguments[0]) in run_fails(*arguments, "-o", out)
    assert "1000000" in run_fails(qkv, "-o", out, "--threads", "1000000")
    assert not list(out.parent.iterdir())


def test_places_that_cannot_be_written_to(qkv, out, monkeypatch):
    assert "no folder" in run_fails(qkv, "-o", out.parent / "missing" / "out.npy")
    assert "no folder" in run_fails(qkv, "-o", out, "--lse", out.parent / "missing" / "lse.npy")
    assert "must end in" in run_fails(qkv, "-o", out.with_suffix(".txt"))
    assert "log-sum-exp" in run_fails(qkv, "-o", out, "--lse", out.parent / "." / "out.npy")
    out.write_text("an older file")

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("flash_numba.files.reserve", full)
    assert os.strerror(28) in run_fails(qkv, "-o", out)
    assert [p.read_text() for p in out.parent.iterdir()] == ["an older file"]


def test_too_little_memory(qkv, out, monkeypatch):
    def attention(*_, **__):
        raise MemoryError

    monkeypatch.setattr(interface, "attention", attention)
    assert "memory" in run_fails(qkv, "-o", out)
    assert not list(out.parent.iterdir())


def test_usage_errors():
    assert invoke("run").exit_code == 2
    assert invoke("run", SAMPLE).exit_code == 2
    assert invoke("run", SAMPLE, "-o", "x.npy", "--causal=middle").exit_code == 2
    assert invoke("check", "--dtype", "int8").exit_code == 2
    assert invoke("fly").exit_code == 2


# ---- as a process


def start(*arguments, **options):
    command = [sys.executable, "-m", "flash_numba.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def start_long(tmp_path, out):
    """Starts a `run` that takes a minute, and waits until it is in the middle of its work."""
    started = []

    def begin(**options):
        long = tmp_path / "zeros.npy"
        np.lib.format.open_memmap(long, "w+", np.float32, (2**17, 64))
        heard = {
            n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM)
        }  # nohup has it ignore them
        try:
            process = start("run", long, long, long, "-o", out, "--threads", 1, **options)
        finally:
            for n, handler in heard.items():
                signal.signal(n, handler)
        started.append(process)
        deadline = time.monotonic() + 60
        while not list(out.parent.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        assert process.poll() is None
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_nohup_is_heeded(start_long):
    process = start_long(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.terminate()
    process.wait(timeout=30)
    assert process.returncode == 143


def test_the_next_run_removes_what_a_killed_one_left(start_long, out, qkv):
    process = start_long()
    (left,) = out.parent.iterdir()
    assert f"-{process.pid}-" in left.name
    run(qkv, "-o", out)
    assert left.exists()  # it is still being written
    out.unlink()
    process.kill()
    process.wait(timeout=30)
    assert left.exists()
    run(qkv, "-o", out)
    assert [path.name for path in out.parent.iterdir()] == ["out.npy"]


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="whose file names are Unicode")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_file_name_that_cant_be_printed(qkv, out, encoding):
    """One that isn't UTF-8, and one that the output's encoding has no characters for, as output, input and mask."""
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    for name in (b"\xff\xfc.npy", "\N{SNOWMAN}.npy".encode()):
        path = os.path.join(os.fsencode(out.parent), name)
        command = [sys.executable, "-m", "flash_numba.cli", "run", os.fsencode(qkv), "-o", path]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=240)
        assert (done.returncode, done.stderr) == (0, b"")
        assert f".npy: {Q.shape} float32" in done.stdout.decode()
        assert os.path.exists(path)
        for more in ([path], [os.fsencode(qkv), path, b"-o", path], [os.fsencode(qkv), b"--mask", path, b"-o", path]):
            command = [sys.executable, "-m", "flash_numba.cli", "run", *more, "-o", os.fsencode(out)]
            done = subprocess.run(command, env=environment, capture_output=True, timeout=240)
            assert done.returncode == 2
            assert b"Traceback" not in done.stderr
            assert done.stderr.startswith(b"flash-numba: ")
        os.unlink(path)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted(start_long, out, number, status):
    """Ctrl-C, a scheduler's SIGTERM and a closed terminal, in the middle of a minute's work: over at once, and nothing
    stays behind."""
    process = start_long()
    process.send_signal(number)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - sent < 5
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert not list(out.parent.iterdir())


def test_without_typer_one_line_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    process = start("--version", env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])})
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (2, "")
    assert stderr == 'flash-numba: typer is not installed; pip install "flash_numba[cli]"\n'


def test_version():
    stdout, _ = start("--version").communicate()
    assert stdout == f"flash-numba {flash_numba.__version__}\n"


# ---- check


def test_check_reports_every_case():
    result = invoke("check", "--size", "20", "--size", "33", "--dtype", "float32", "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["seed"] == 0
    rows = report["measurements"]
    assert len(rows) == 2 * 2 * 2 * len(check.COMPARISONS)
    assert {(row["comparison"], row["dtype"], row["keys"], row["logits"]) for row in rows} == {
        (comparison, dtype, size, logits)
        for comparison in check.COMPARISONS
        for dtype in ("float32", "bfloat16")
        for size in (20, 33)
        for logits in check.LOGITS
    }
    assert all(row["abs_max"] <= row["abs_band"] and row["rel_max"] <= row["rel_band"] for row in rows)


def test_check_prints_a_table():
    result = invoke("check", "--size", "20", "--head-dim", "16", "--seed", "5")
    assert result.exit_code == 0
    for word in ("float64", "bfloat16", "online", "kernel", "dk", "head_dim 16", "seed 5", "within their bands"):
        assert word in result.stdout
    assert "…" not in result.stdout


def test_check_fails_when_a_band_is_broken(monkeypatch):
    def attention(q, k, v, **keywords):
        out, lse = flash_numba.attention(q, k, v, **keywords)
        out[0, 0, 0] = np.nan
        return out, lse

    monkeypatch.setattr(interface, "attention", attention)
    result = invoke("check", "--size", "20", "--dtype", "float32")
    assert result.exit_code == 1
    assert "BROKEN" in result.stdout
    assert "2 of 10 lines" in result.stdout
    result = invoke("check", "--size", "20", "--dtype", "float32", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert [row["ok"] for row in report["measurements"]] == 2 * [True, False, True, True, True]
    assert report["measurements"][1]["abs_max"] is None
