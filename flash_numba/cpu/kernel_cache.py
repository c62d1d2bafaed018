"""Compiled CPU kernels on disk (`disk_cache.py`), in place of Numba's own cache.

That one misses for kernels that hold intrinsics, and its key leaves out functions in other files. Here the key has the
digest of all code that a kernel is made of (`code_digest.py`), the versions, and the CPU.
"""

import pickle
import sys

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from .. import code_digest, disk_cache
from ..backend import BackendError
from ..disk_cache import log, private_folder

COMPILER_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "ENABLE_AVX", "DEBUGINFO_DEFAULT")


def require_compiler() -> None:
    """BackendError where Numba compiles nothing."""
    if config.DISABLE_JIT:
        raise BackendError(
            "NUMBA_DISABLE_JIT is set, and kernels have to be compiled: unset it and start Python again, or call with "
            'backend="reference"'
        )


def digest(module: str) -> str:
    """Of the code that a module's kernel is compiled from, and of everything else that changes the machine code."""
    settings = [str(getattr(config, name, None)) for name in COMPILER_SETTINGS]
    facts = numba.__version__, llvmlite.__version__, np.__version__, sys.version, settings
    return code_digest.of_code(module, facts)


class KernelCache(_Cache):
    """Numba's cache interface over one folder of kernels."""

    def __init__(self, name: str, module: str) -> None:
        """module: which the kernel is defined in."""
        require_compiler()
        self._name = name
        self._digest = digest(module)

    cache_path = property(lambda self: str(private_folder()))

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def _file(self, sig, codegen) -> str:
        return disk_cache.file_name(self._name, self._digest, str(sig), codegen.magic_tuple())

    def load_overload(self, sig, target_context):
        target_context.refresh()
        name = self._file(sig, target_context.codegen())
        payload = disk_cache.find(name)
        if payload is None:
            return None
        try:
            kernel = CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception as error:
            log.append(f"not loaded {name}: {error!r}")
            return None
        log.append(f"loaded {name}")
        return kernel

    def save_overload(self, sig, data) -> None:
        name = self._file(sig, data.library.codegen)
        try:
            payload = dumps(data._reduce())
        except Exception as error:
            log.append(f"not saved {name}: {error!r}")
            disk_cache.lost[name] = repr(error)
        else:
            disk_cache.keep(name, payload)
