"""Compiled CPU kernels on disk (`disk_cache.py`), in place of Numba's own cache.

That one misses for kernels that hold intrinsics, and its key leaves out functions in other files. Here the key has the
digest of all code that a kernel is made of (`code_digest.py`), the versions, and the CPU.
"""

import pickle
import sys
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from .. import code_digest, disk_cache
from ..disk_cache import log, private_folder

COMPILER_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "ENABLE_AVX", "DEBUGINFO_DEFAULT")


def digest(module: str) -> str:
    """Of the code that a module's kernel is compiled from, and of everything else that changes the machine code."""
    settings = [str(getattr(config, name, None)) for name in COMPILER_SETTINGS]
    facts = numba.__version__, llvmlite.__version__, np.__version__, sys.version, settings
    return code_digest.of_code(module, facts)


class KernelCache(_Cache):
    """Numba's cache interface over one folder of kernels."""

    def __init__(self, name: str, module: str) -> None:
        """module: which the kernel is defined in."""
        self._name = name
        self._folder = private_folder()
        self._digest = digest(module)

    cache_path = property(lambda self: str(self._folder))

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def _file(self, folder: Path, sig, codegen) -> Path:
        return folder / disk_cache.file_name(self._name, self._digest, str(sig), codegen.magic_tuple())

    def load_overload(self, sig, target_context):
        if self._folder is None:
            return None
        target_context.refresh()
        path = self._file(self._folder, sig, target_context.codegen())
        payload = disk_cache.load(path)
        if payload is None:
            return None
        try:
            kernel = CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception as error:
            log.append(f"not loaded {path.name}: {error!r}")
            return None
        log.append(f"loaded {path.name}")
        return kernel

    def save_overload(self, sig, data) -> None:
        if self._folder is None:
            return
        try:
            disk_cache.save(self._file(self._folder, sig, data.library.codegen), dumps(data._reduce()))
        except Exception as error:
            log.append(f"not saved {self._name}: {error!r}")
