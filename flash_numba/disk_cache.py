"""Compiled kernels on disk: one checksummed file a kernel, no index, replaced atomically.

Whatever goes wrong (a full disk, a damaged file, another process at the same time) means compiling again, never an
error. What a file may be used for is in its name: a digest of the code that the kernel is made of (`code_digest.py`),
and of whatever else changes the machine code.

Files lie in a folder that nobody but the user can write to, as what lies there is executed. A second folder, which is
only read, may be shared: one that root has filled for all users of a machine or a container image.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

CHECKSUM = 32  # bytes of SHA-256 ahead of the payload

OTHERS_WRITE = 0o022  # of a file's mode: whether its group or everybody may write to it

log: list[str] = []  # what was loaded, saved or refused in this process, for tests and for reports of trouble
lost: dict[str, str] = {}  # the kernels that this process has compiled and couldn't keep, and why


def cache_folder() -> Path:
    """`$FLASH_NUMBA_CACHE_DIR`, else the user's own cache folder. RuntimeError where there is no home folder."""
    if chosen := os.environ.get("FLASH_NUMBA_CACHE_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        named = os.environ.get("XDG_CACHE_HOME", "")
        base = named if os.path.isabs(named) else Path.home() / ".cache"  # its specification ignores relative ones
    return Path(base) / "flash_numba"


def private_folder() -> Path | None:
    """The cache folder, made if it isn't there. None if it can't be used, and the log says why."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user ({status.st_uid}, you are {os.getuid()}): "
                "to read what lies there, name it in FLASH_NUMBA_SHARED_CACHE_DIR"
            )
        if hasattr(os, "getuid") and status.st_mode & OTHERS_WRITE:
            raise PermissionError(f"others may write to {folder}: chmod go-w {folder}")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.append(f"no cache: {error}")
        return None
    return folder


def shared_folder() -> Path | None:
    """`$FLASH_NUMBA_SHARED_CACHE_DIR`, which is only read. None if it can't be used, and the log says why."""
    chosen = os.environ.get("FLASH_NUMBA_SHARED_CACHE_DIR")
    if not chosen:
        return None
    try:
        folder = Path(chosen).expanduser()
        if not folder.is_dir():
            raise NotADirectoryError(f"there is no folder {folder}")
        check_trust(folder, folder.stat())
    except (OSError, RuntimeError) as error:
        log.append(f"no shared cache: {error}")
        return None
    return folder


def check_trust(path: Path, status: os.stat_result) -> None:
    """PermissionError for what somebody besides root and the user could have written."""
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{path} belongs to another user ({status.st_uid}), who is neither you nor root")
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"others may write to {path}")


def why_not() -> str:
    """Why the folder that was just asked for isn't used."""
    return log[-1].partition(": ")[2]


def shared_cache() -> str:
    """The shared folder in a line, for `info`: which it is, and what there isn't read and why."""
    folder = shared_folder()
    if folder is None:
        return f"none: {why_not()}"
    kernels = list(folder.glob("*.kernel"))
    closed = [path for path in kernels if not is_readable(path)]
    if not os.access(folder, os.R_OK | os.X_OK) or closed:
        return f"{folder}, of which you may not read {f'{len(closed)} of {len(kernels)} kernels' if closed else 'any'}"
    return str(folder)


def is_readable(path: Path) -> bool:
    try:
        check_trust(path, path.stat())
    except OSError:
        return False
    return os.access(path, os.R_OK)


def find(name: str) -> bytes | None:
    """A kernel's payload by the name of its file, from the user's own cache or the shared one."""
    folder = private_folder()
    payload = load(folder / name) if folder else None
    if payload is None and (shared := shared_folder()):
        payload = load(shared / name, check_trust)
    if payload is not None:
        lost.pop(name, None)
    return payload


def keep(name: str, payload: bytes) -> None:
    """Save a kernel in the user's own cache, if that can be."""
    folder = private_folder()
    try:
        if folder is None:
            raise OSError(why_not())
        save(folder / name, payload)
        lost.pop(name, None)
    except OSError as error:
        lost[name] = str(error)
        if folder is not None:
            log.append(f"not saved {name}: {error!r}")


def file_name(kernel: str, *key: object) -> str:
    """Of a kernel, for a key."""
    return f"{kernel}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.kernel"


def load(path: Path, check: Callable[[Path, os.stat_result], None] | None = None) -> bytes | None:
    """A file's payload; None if there is none or it is damaged. check: raises OSError for one that isn't trusted."""
    try:
        with path.open("rb") as file:
            if check is not None:
                check(path, os.fstat(file.fileno()))  # of what is read, whatever takes its place meanwhile
            data = file.read()
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
