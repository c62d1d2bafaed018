"""Compiled kernels on disk: one checksummed file a kernel, no index, replaced atomically.

Whatever goes wrong (a full disk, a damaged file, another process at the same time) means compiling again, never an
error. What a file may be used for is in its name: a digest of the code that the kernel is made of (`code_digest.py`),
and of whatever else changes the machine code.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

CHECKSUM = 32  # bytes of SHA-256 ahead of the payload

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


def file_name(kernel: str, *key: object) -> str:
    """Of a kernel, for a key."""
    return f"{kernel}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.kernel"


def load(path: Path) -> bytes | None:
    """A file's payload; None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.append(f"not loaded {path.name}: {error!r}")
        return None
    if hashlib.sha256(data[CHECKSUM:]).digest() != data[:CHECKSUM]:
        log.append(f"not loaded {path.name}: its checksum is wrong")
        return None
    return data[CHECKSUM:]


def save(path: Path, payload: bytes) -> None:
    """Write a file whole, or raise OSError and leave the folder as it was."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    log.append(f"saved {path.name}")
