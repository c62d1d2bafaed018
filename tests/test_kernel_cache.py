"""Compiled kernels on disk: what a file may be used for is in its name, and it is whole or isn't there."""

import importlib
import os
import sys
from types import SimpleNamespace

import llvmlite
import numba
import numpy as np
import pytest
from numba.core import config

from flash_numba import disk_cache
from flash_numba.cpu import kernel_cache, launch

FORWARD = "flash_numba.cpu.forward"


@pytest.fixture
def digest():
    importlib.import_module(FORWARD)
    return lambda: kernel_cache.digest(FORWARD)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (numba, "__version__"), (llvmlite, "__version__"), (np, "__version__"), (sys, "version"),
        *((config, name) for name in kernel_cache.COMPILER_SETTINGS),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)  # fmt: skip
def test_whatever_changes_machine_code_is_in_the_digest(monkeypatch, digest, of, name):
    before = digest()
    assert hasattr(of, name)
    monkeypatch.setattr(of, name, "another")
    assert digest() != before
    monkeypatch.undo()
    assert digest() == before


def test_a_file_is_of_one_kernel_signature_and_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path))
    importlib.import_module(FORWARD)

    def name_of(kernel="forward_float32", signature="void(int64)", cpu="znver4", features="+avx2", triple="x86_64"):
        target = SimpleNamespace(magic_tuple=lambda: (triple, cpu, features))
        return kernel_cache.KernelCache(kernel, FORWARD)._file(signature, target)

    changed = [
        {"kernel": "forward_float64"}, {"signature": "void(int32)"}, {"cpu": "znver3"}, {"features": "+avx2,+fma"},
        {"triple": "aarch64"},
    ]  # fmt: skip
    names = [name_of(), *(name_of(**change) for change in changed)]
    assert len(set(names)) == len(names)
    assert name_of() == names[0]
    monkeypatch.setattr(kernel_cache, "digest", lambda module: "of other code")
    assert name_of() != names[0]


def test_numba_tells_which_cpu_it_compiles_for():
    """What the file's name relies on."""
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    assert codegen._get_host_cpu_name() in codegen.magic_tuple()


@pytest.mark.parametrize("name", ["forward", "decode", "backward"])
def test_a_kernel_is_kept_under_the_digest_of_its_own_module(monkeypatch, name):
    """Not of that which its outermost loop is made in, which knows nothing of what is called in it."""
    asked = []

    class Cache(kernel_cache.KernelCache):
        def __init__(self, name, module):
            asked.append((name, module))
            super().__init__(name, module)

    monkeypatch.setattr(launch, "KernelCache", Cache)
    monkeypatch.setattr(launch, "_workers", {})
    launch.worker_address(name, np.dtype(np.float32))
    assert asked == [(f"{name}_float32", f"flash_numba.cpu.{name}")]


def test_a_changed_kernel_is_compiled_again(monkeypatch):
    """Each kernel's name on disk follows every function of its own module."""
    for name in ("forward", "decode", "backward"):
        module = importlib.import_module(f"flash_numba.cpu.{name}")
        before = kernel_cache.digest(module.__name__)
        compiled = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
        functions = [x.py_func for x in compiled if hasattr(x, "py_func")]
        assert len(functions) > 9
        for function in functions:
            code = function.__code__
            with monkeypatch.context() as change:
                change.setattr(function, "__code__", code.replace(co_consts=(*code.co_consts, "one more")))
                assert kernel_cache.digest(module.__name__) != before, function


@pytest.mark.parametrize("step", ["replace", "fdopen"])
def test_a_file_that_cannot_be_replaced_stays_whole(monkeypatch, tmp_path, step):
    path = tmp_path / "x.kernel"
    disk_cache.save(path, b"before")

    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as failing:
        failing.setattr(os, step, full)
        with pytest.raises(OSError, match="space"):
            disk_cache.save(path, b"after")
    assert disk_cache.load(path) == b"before"
    assert list(tmp_path.iterdir()) == [path]
    disk_cache.save(path, b"after")
    assert disk_cache.load(path) == b"after"


def test_a_file_appears_whole(monkeypatch, tmp_path):
    """Nobody sees a part of it under its name."""
    path, seen = tmp_path / "x.kernel", []
    monkeypatch.setattr(os, "replace", lambda a, b, do=os.replace: (seen.append(path.exists()), do(a, b)))
    disk_cache.save(path, b"x" * 100_000)
    assert seen == [False]
    assert disk_cache.load(path) == b"x" * 100_000


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="file modes")
@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_a_folder_that_anybody_else_may_write_to_is_not_used(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("FLASH_NUMBA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(mode)
    assert disk_cache.private_folder() is None
    for private in (0o700, 0o750, 0o755):
        tmp_path.chmod(private)
        assert disk_cache.private_folder() == tmp_path
