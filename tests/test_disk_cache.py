"""Where compiled kernels are kept, whom they are taken from, and what is said where they can't be."""

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import flash_numba
from flash_numba import cli, diagnosis, disk_cache
from flash_numba.cpu.backend import CPU

POSIX = hasattr(os, "getuid")
pytestmark = pytest.mark.skipif(not POSIX, reason="users and modes of files")
NAME, PAYLOAD = "kernel-0.kernel", b"machine code"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's cache, where nothing is yet."""
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("FLASH_NUMBA_SHARED_CACHE_DIR", raising=False)
    monkeypatch.setattr(disk_cache, "log", [])
    monkeypatch.setattr(disk_cache, "lost", {})
    return tmp_path / "own"


@pytest.fixture
def shared(own, tmp_path, monkeypatch):
    """A shared one, with a kernel."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    disk_cache.save(folder / NAME, PAYLOAD)
    monkeypatch.setenv("FLASH_NUMBA_SHARED_CACHE_DIR", str(folder))
    return folder


def blocked(folder):
    """A file where the folder should be: not even root can write there."""
    folder.write_text("in the way")


def in_new_process(code, **environment):
    """What it prints."""
    code = textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout


# ---- where


@pytest.mark.parametrize("variable", ["FLASH_NUMBA_CACHE_DIR", "FLASH_NUMBA_SHARED_CACHE_DIR"])
def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch, own, variable):
    (tmp_path / "home" / "kernels").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "~/kernels")
    folder = disk_cache.private_folder() if variable == "FLASH_NUMBA_CACHE_DIR" else disk_cache.shared_folder()
    assert folder == tmp_path / "home" / "kernels"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    monkeypatch.setenv(variable, "~nobody-of-this-name/kernels")
    assert disk_cache.private_folder() is None or disk_cache.shared_folder() is None
    assert "home" in disk_cache.why_not()
    assert [path.name for path in tmp_path.iterdir()] in (["home"], ["home", "own"], ["own", "home"])


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="XDG's specification")
@pytest.mark.parametrize(
    ("named", "folder"), [("relative", "home/.cache"), ("", "home/.cache"), (None, "home/.cache"), ("/x", "/x")]
)
def test_a_relative_xdg_cache_home_is_ignored(tmp_path, monkeypatch, named, folder):
    monkeypatch.delenv("FLASH_NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert disk_cache.cache_folder() == tmp_path / folder / "flash_numba"
    assert not list(tmp_path.iterdir())


# ---- a cache that others may write to, or that is another user's


def test_info_says_whose_cache_it_is(own, monkeypatch):
    own.mkdir()
    user = os.getuid()
    assert flash_numba.info()["kernel cache"] == str(own)
    assert "shared kernel cache" not in flash_numba.info()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    said = flash_numba.info()["kernel cache"]
    assert said == (
        f"none: {own} belongs to another user ({user}, you are {user + 1}): to read what lies there, name it in "
        "FLASH_NUMBA_SHARED_CACHE_DIR"
    )
    assert said in " ".join(CliRunner().invoke(cli.app, ["info"]).stdout.split())
    monkeypatch.undo()
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(own))
    own.chmod(0o775)
    assert flash_numba.info()["kernel cache"] == f"none: others may write to {own}: chmod go-w {own}"


def test_info_says_why_a_shared_cache_isnt_read(shared, monkeypatch):
    assert flash_numba.info()["shared kernel cache"] == str(shared)
    shared.chmod(0o777)
    assert flash_numba.info()["shared kernel cache"] == f"none: others may write to {shared}"
    monkeypatch.setenv("FLASH_NUMBA_SHARED_CACHE_DIR", str(shared / "missing"))
    assert flash_numba.info()["shared kernel cache"] == f"none: there is no folder {shared / 'missing'}"
    assert not (shared / "missing").exists()


def test_info_says_which_shared_kernels_cant_be_read(shared, monkeypatch):
    """`warmup` leaves them to their owner alone."""
    disk_cache.save(shared / "kernel-1.kernel", PAYLOAD)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != NAME)
    assert flash_numba.info()["shared kernel cache"] == f"{shared}, of which you may not read 1 of 2 kernels"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shared)
    assert flash_numba.info()["shared kernel cache"] == f"{shared}, of which you may not read any"
    monkeypatch.undo()
    monkeypatch.setenv("FLASH_NUMBA_SHARED_CACHE_DIR", str(shared))
    (shared / NAME).chmod(0o622)
    assert flash_numba.info()["shared kernel cache"] == f"{shared}, of which you may not read 1 of 2 kernels"


def status(user, mode):
    return os.stat_result((mode, 0, 0, 1, user, 0, 0, 0, 0, 0))


def test_root_and_the_user_are_trusted(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for user in (0, 1000):
        for mode in (0o755, 0o500, 0o700, 0o444):
            disk_cache.check_trust(Path("x"), status(user, mode))
        for mode in (0o775, 0o757, 0o722, 0o666):
            with pytest.raises(PermissionError, match="others may write to x"):
                disk_cache.check_trust(Path("x"), status(user, mode))
    for user in (1, 1001, 65534):
        with pytest.raises(PermissionError, match=rf"x belongs to another user \({user}\)"):
            disk_cache.check_trust(Path("x"), status(user, 0o700))


# ---- the shared cache


def test_a_shared_kernel_is_read_and_nothing_is_written(shared, own):
    before = {path: path.read_bytes() for path in shared.iterdir()}
    assert disk_cache.find(NAME) == PAYLOAD
    assert disk_cache.find("kernel-1.kernel") is None
    disk_cache.keep("kernel-1.kernel", b"other code")
    assert {path: path.read_bytes() for path in shared.iterdir()} == before
    assert [path.name for path in own.iterdir()] == ["kernel-1.kernel"]
    assert disk_cache.find("kernel-1.kernel") == b"other code"


def test_the_own_cache_comes_first_unless_it_is_damaged(shared, own):
    disk_cache.keep(NAME, b"my own")
    assert disk_cache.find(NAME) == b"my own"
    (own / NAME).write_bytes(b"damaged")
    assert disk_cache.find(NAME) == PAYLOAD


def test_a_shared_cache_is_read_without_a_cache_of_ones_own(shared, own):
    blocked(own)
    assert disk_cache.find(NAME) == PAYLOAD


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_shared_kernel_that_others_could_write_isnt_read(shared, what, monkeypatch):
    path = shared / NAME if what == "file" else shared
    path.chmod(path.stat().st_mode | 0o020)
    assert disk_cache.find(NAME) is None
    assert f"others may write to {path}" in disk_cache.log[-1]
    path.chmod(path.stat().st_mode & ~0o022)
    assert disk_cache.find(NAME) == PAYLOAD
    if os.getuid() == 0:  # only root can give files away
        os.chown(path, 12345, -1)
        assert disk_cache.find(NAME) is None
        assert "belongs to another user (12345)" in disk_cache.log[-1]


def test_a_damaged_shared_kernel_isnt_read(shared):
    (shared / NAME).write_bytes(hashlib.sha256(b"x").digest() + b"y")
    assert disk_cache.find(NAME) is None


def test_a_process_takes_its_kernels_from_a_shared_cache(tmp_path):
    """With a cache of its own, and where none can be written: then warmup has nothing to warn of."""
    flash_numba.warmup()
    (tmp_path / "blocked").write_text("")
    code = """
        import flash_numba
        from flash_numba import disk_cache
        flash_numba.warmup()
        print(sorted(line.split("-")[0] for line in disk_cache.log if line.split()[0] in ("loaded", "saved")))
    """
    source = str(disk_cache.cache_folder())
    for own in ("own", "blocked"):
        environment = {"FLASH_NUMBA_CACHE_DIR": str(tmp_path / own), "FLASH_NUMBA_SHARED_CACHE_DIR": source}
        said = in_new_process(code, **environment)
        assert said == "['loaded decode_float32', 'loaded drive', 'loaded forward_float32']\n"
    assert not list((tmp_path / "own").iterdir())


# ---- a cache that can't be written


def compiles(monkeypatch, save=None):
    """Makes `warmup` compile one small kernel."""
    jobs = [("small", lambda: disk_cache.keep(NAME, PAYLOAD))]
    monkeypatch.setattr(CPU, "compile_jobs", lambda *_: jobs)


def test_warmup_warns_where_nothing_is_kept(own, monkeypatch):
    compiles(monkeypatch)
    assert flash_numba.warmup() == ["small"]
    blocked_at = own.with_name("blocked")
    blocked(blocked_at)
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(blocked_at))
    with pytest.warns(diagnosis.NotKeptWarning, match=rf"can't be kept for other processes: .*{blocked_at}"):
        assert flash_numba.warmup() == ["small"]


def test_warmup_warns_of_a_full_disk(own, monkeypatch):
    def full(path, payload):
        raise OSError(28, os.strerror(28))

    compiles(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(disk_cache, "save", full)
        with pytest.warns(RuntimeWarning, match=os.strerror(28)):
            flash_numba.warmup()
    flash_numba.warmup()  # it is kept now


def test_the_command_doesnt_say_ready_where_nothing_is_kept(own, monkeypatch):
    compiles(monkeypatch)
    done = CliRunner().invoke(cli.app, ["warmup"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "ready: small\n", "")
    blocked_at = own.with_name("blocked")
    blocked(blocked_at)
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(blocked_at))
    done = CliRunner().invoke(cli.app, ["warmup"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("flash-numba: kernels were compiled, but can't be kept for other processes: ")
    assert str(blocked_at) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_says_so_of_real_kernels(tmp_path):
    (tmp_path / "blocked").write_text("")
    command = [sys.executable, "-m", "flash_numba.cli", "warmup", "--dtype", "float32"]
    environment = os.environ | {"FLASH_NUMBA_CACHE_DIR": str(tmp_path / "blocked")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout) == (1, "")
    assert "can't be kept" in run.stderr


# ---- a compiler that is switched off

WITHOUT_COMPILER = {
    "attention": "attention(q, q, q)",
    "few queries": "attention(q[:, :1], q, q)",
    "attention_grad": "attention_grad(q, q, q, q, q, q[..., 0])",
    "stream": "AttentionStream(q).absorb(q, q)",
    "warmup": "warmup()",
}


@pytest.mark.parametrize("call", WITHOUT_COMPILER)
def test_without_a_compiler_the_error_says_what_to_do(call):
    code = f"""
        import numpy as np
        from flash_numba import *
        q = np.zeros((2, 20, 8), np.float32)
        for _ in range(2):
            try:
                {WITHOUT_COMPILER[call]}
            except RuntimeError as error:
                print(type(error).__name__, error)
    """
    said = in_new_process(code, NUMBA_DISABLE_JIT="1").splitlines()
    assert len(said) == 2
    for line in said:
        assert line.startswith("BackendError NUMBA_DISABLE_JIT is set")
        assert "unset it" in line
        assert 'backend="reference"' in line


def test_without_a_compiler_the_rest_works():
    code = """
        import numpy as np
        from flash_numba import *
        q = np.random.default_rng(0).standard_normal((2, 20, 8))
        print(info()["kernels"])
        info(q, q, q)
        parts = [reference.attention(q, x, x, return_lse=True) for x in (q[:, :9], q[:, 9:])]
        out, _ = merge(*zip(*parts))
        print(np.abs(out - attention(q, q, q, backend="reference")).max() < 1e-12)
    """
    said = in_new_process(code, NUMBA_DISABLE_JIT="1").splitlines()
    assert said == ["none: NUMBA_DISABLE_JIT is set, which leaves backend='reference'", "True"]


@pytest.mark.parametrize("command", ["run", "check", "warmup"])
def test_commands_without_a_compiler(command, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((20, 8), np.float32))
    arguments = {
        "run": [*[str(tmp_path / "x.npy")] * 3, "-o", str(tmp_path / "out.npy")],
        "check": ["--size", "20", "--dtype", "float32"],
    }
    run = subprocess.run(
        [sys.executable, "-m", "flash_numba.cli", command, *arguments.get(command, [])],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("flash-numba: NUMBA_DISABLE_JIT is set")
    assert run.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
