"""Compiled kernels on disk: one checksummed file a kernel, no index, replaced atomically.

Numba's own cache misses for kernels that hold intrinsics, and its key leaves out functions in other files. Here the
key has the digest of every source file that a kernel is made of, the versions, and the CPU. Whatever goes wrong (a full
disk, a damaged file, a Numba that pickles differently) means compiling again, never an error.
"""

import hashlib
import os
import pickle
import sys
import tempfile
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

CHECKSUM = 32  # bytes of SHA-256 ahead of the payload
SOURCES = ("ops.py", "recurrence.py", "scores.py", "dropout.py", "dtypes.py", "problem.py", "cpu/*.py")
COMPILER_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "ENABLE_AVX", "DEBUGINFO_DEFAULT")

log: list[str] = []  # what was loaded, saved or refused in this process, for tests and for reports of trouble


def cache_folder() -> Path:
    """`$FLASH_NUMBA_CACHE_DIR`, else the user's own cache folder."""
    if chosen := os.environ.get("FLASH_NUMBA_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flash_numba"


def private_folder() -> Path | None:
    """The cache folder, if nobody else can write to it: what lies there is executed."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.append(f"no cache: {error}")
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        log.append(f"no cache: {folder} belongs to somebody else or others may write to it")
        return None
    return folder


def digest() -> str:
    """Of the sources that kernels are compiled from, and of everything else that changes the code."""
    h = hashlib.sha256()
    package = Path(__file__).parent.parent
    for pattern in SOURCES:
        for path in sorted(package.glob(pattern)):
            h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    settings = [str(getattr(config, name, None)) for name in COMPILER_SETTINGS]
    h.update(repr((numba.__version__, llvmlite.__version__, np.__version__, sys.version, settings)).encode())
    return h.hexdigest()


class KernelCache(_Cache):
    """Numba's cache interface over one folder of kernels."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = private_folder()
        self._digest = digest()

    cache_path = property(lambda self: str(self._folder))

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def _file(self, folder: Path, sig, codegen) -> Path:
        key = repr((self._digest, str(sig), codegen.magic_tuple())).encode()
        return folder / f"{self._name}-{hashlib.sha256(key).hexdigest()[:32]}.kernel"

    def load_overload(self, sig, target_context):
        if self._folder is None:
            return None
        target_context.refresh()
        path = self._file(self._folder, sig, target_context.codegen())
        try:
            data = path.read_bytes()
            if hashlib.sha256(data[CHECKSUM:]).digest() != data[:CHECKSUM]:
                raise ValueError("checksum")
            kernel = CompileResult._rebuild(target_context, *pickle.loads(data[CHECKSUM:]))
        except FileNotFoundError:
            return None
        except Exception as error:
            log.append(f"not loaded {path.name}: {error!r}")
            return None
        log.append(f"loaded {path.name}")
        return kernel

    def save_overload(self, sig, data) -> None:
        if self._folder is None:
            return
        temporary = None
        try:
            payload = dumps(data._reduce())
            path = self._file(self._folder, sig, data.library.codegen)
            handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
            log.append(f"saved {path.name}")
        except Exception as error:
            log.append(f"not saved {self._name}: {error!r}")
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
