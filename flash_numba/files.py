"""Arrays in and out of `.npy`, `.npz` and `.safetensors` files, for the commands.

Inputs are mapped, so that only what is computed on is ever read; a compressed `.npz` member, which can't be, is
inflated a piece at a time into its array. A pickle is never loaded. An output appears under its name whole or not at
all.
"""

import hashlib
import json
import lzma
import math
import os
import platform
import re
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIXES = (".npy", ".npz", ".safetensors")
FLOATS = {np.dtype(t).name: np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}
SAFETENSORS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
}
MAX_HEADER = 100_000_000  # what the safetensors format itself allows
PIECE = 1 << 20
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]  # folders may be shared with other machines
TEMPORARY = re.compile(r"\.flash_numba-(?P<host>[0-9a-f]{8})-(?P<process>\d{1,9})-[0-9a-f]{16}\.tmp")


class FileError(Exception):
    """What is wrong with a file, in one line that starts with its name."""

    def __init__(self, path: Path, why: object):
        super().__init__(" ".join(f"{path}: {why}".split()))


class Stored(NamedTuple):
    """Where an array's elements lie in a file."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system reports (missing file, no permission, full disk) into a `FileError`."""
    try:
        yield
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise FileError(path, reason) from error


# ---- reading


def read(path: Path, name: str = "", dtype: str | None = None) -> np.ndarray:
    """A float array from a file, mapped read-only wherever its elements lie there as they are.

    `name` picks it from an archive (`.npz`, `.safetensors`). `dtype` (a key of `FLOATS`) says what it must be, and what
    raw or unsigned elements of that size are: `.npy` has no code for bfloat16. `FileError` if anything is wrong.
    """
    array = load(path, name)
    if dtype is None:
        if array.dtype.newbyteorder("=") in FLOATS.values():
            return array
        hint = "; if they are bfloat16, say so (--dtype bfloat16)" if array.dtype.itemsize == 2 else ""
        raise FileError(path, f"{described(array, name)}, not {', '.join(FLOATS)}{hint}")
    wanted = FLOATS[dtype]
    if array.dtype.newbyteorder("=") == wanted:
        return array
    raw = array.dtype.kind == "u" or (array.dtype.kind == "V" and array.dtype not in FLOATS.values())
    if raw and array.dtype.isnative and array.dtype.names is None and array.dtype.itemsize == wanted.itemsize:
        return array.view(wanted)
    raise FileError(path, f"{described(array, name)}, not {dtype}")


def read_mask(path: Path, name: str = "mask") -> np.ndarray:
    """A boolean array from a file, likewise."""
    array = load(path, name)
    if array.dtype != np.bool_:
        raise FileError(path, f"{described(array, name)}, and a mask is bool (True keeps a key)")
    return array


def described(array: np.ndarray, name: str) -> str:
    what = "raw values" if array.dtype.kind == "V" and array.dtype not in FLOATS.values() else array.dtype.name
    return f"{f'array {name!r} ' if name else ''}holds {what} ({array.dtype.str})"


def load(path: Path, name: str) -> np.ndarray:
    """The array as stored. A `.npy` file holds one, whatever the name."""
    loaders: dict[str, Callable[[Path, str], np.ndarray]]
    loaders = {".npy": load_npy, ".npz": load_npz, ".safetensors": load_safetensors}
    check_suffix(path)
    try:
        with system_errors(path):
            return loaders[path.suffix](path, name)
    except (ValueError, OverflowError) as error:
        raise FileError(path, f"a shape that NumPy can't hold ({error})") from error


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise FileError(path, f"the name must end in {', '.join(SUFFIXES)}")


def mapped(path: Path, stored: Stored) -> np.ndarray:
    size = path.stat().st_size
    if stored.offset + stored.nbytes > size:
        raise FileError(path, f"truncated: {stored.offset + stored.nbytes} bytes are needed, and it has {size}")
    order: Any = "F" if stored.fortran else "C"
    if stored.nbytes == 0:  # which can't be mapped
        return np.empty(stored.shape, stored.dtype, order)
    return np.memmap(path, stored.dtype, "r", stored.offset, stored.shape, order).view(np.ndarray)


def npy_header(path: Path, stream: IO[bytes]) -> Stored:
    """Reads the header of a `.npy` file or member; `offset` counts from the stream's start."""
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):  # later ones differ only in the field names of structured dtypes
            raise ValueError(f"format version {version}, which plain arrays don't need")
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
    except Exception as error:  # NumPy's parser has many ways to fail on a damaged header
        raise FileError(path, f"no .npy data, or a damaged header ({error})") from error
    if dtype.hasobject:
        raise FileError(path, "holds Python objects (a pickle), which are never loaded")
    if any(n < 0 for n in shape):
        raise FileError(path, f"a damaged header (shape {shape})")
    return Stored(stream.tell(), dtype, shape, fortran)


def load_npy(path: Path, name: str) -> np.ndarray:
    with path.open("rb") as stream:
        stored = npy_header(path, stream)
    return mapped(path, stored)


def load_npz(path: Path, name: str) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if name not in infos:
                raise FileError(path, missing(name, infos))
            info = infos[name]
            with archive.open(info) as member:
                stored = npy_header(path, member)
                if stored.offset + stored.nbytes > info.file_size:
                    raise FileError(path, f"array {name!r} is truncated")
                if info.compress_type != zipfile.ZIP_STORED:
                    return inflated(path, name, member, stored)
            start = member_start(path, info)
    except (
        zipfile.BadZipFile,
        EOFError,
        struct.error,
        zlib.error,
        lzma.LZMAError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        # no archive, or a bad checksum; cut short; bad compressed data; an unknown compression; a password
        raise FileError(path, f"no readable .npz archive ({error})") from error
    return mapped(path, stored._replace(offset=start + stored.offset))


def member_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header, whose extra field the directory doesn't know."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
    return info.header_offset + 30 + name_length + extra_length


def inflated(path: Path, name: str, member: IO[bytes], stored: Stored) -> np.ndarray:
    array = np.empty(stored.shape, stored.dtype, "F" if stored.fortran else "C")
    if array.size:
        flat = array.reshape(-1, order="A").view(np.uint8).data
        done = 0
        while done < len(flat):
            count = member.readinto(flat[done : done + PIECE])  # type: ignore[attr-defined]
            if not count:
                raise FileError(path, f"array {name!r} is truncated")
            done += count
    while member.read(PIECE):  # to the end, where the checksum is compared
        pass
    return array


def load_safetensors(path: Path, name: str) -> np.ndarray:
    """Format: 8 bytes of header length (little-endian), a JSON header, the data (huggingface/safetensors)."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise FileError(path, "truncated: it has no safetensors header")
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER, size - 8):
            raise FileError(path, f"truncated, or no safetensors file: a header of {length} bytes, and it has {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode())
        header.pop("__metadata__", None)
        if name not in header:
            raise FileError(path, missing(name, header))
        code, shape, (begin, end) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"shape {shape}, offsets {begin} to {end}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(path, f"a damaged safetensors header ({error})") from error
    if str(code) not in SAFETENSORS:
        raise FileError(path, f"array {name!r} holds {code}, not {', '.join(SAFETENSORS)}")
    stored = Stored(8 + length + begin, SAFETENSORS[code].newbyteorder("<"), tuple(shape))
    if end - begin != stored.nbytes:
        raise FileError(path, f"a damaged safetensors header ({name!r}: {stored.nbytes} bytes in {end - begin})")
    return mapped(path, stored)


def missing(name: str, names: Any) -> str:
    shown = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
    return f"holds no array {name!r}" + (f"; it has {shown}" if names else "; it is empty")


# ---- writing


class NewFile:
    """An array to fill, `.array`, that becomes the file `path` by `commit` and leaves nothing otherwise. Use in `with`.

    Until then it is a temporary file in the same folder, mapped, with its room reserved, so that a full disk shows at
    once and not while a kernel writes. A process that is killed leaves that file; the next one to write into the folder
    removes it. Only `.npz`, which needs a checksum, is held in memory. bfloat16 goes to
    `.safetensors` as BF16, and to `.npy` and `.npz` as raw 2-byte values, as NumPy itself does.
    """

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype):
        check_suffix(path)
        if path.is_dir():
            raise FileError(path, "is a folder")
        if not path.parent.is_dir():
            raise FileError(path, f"there is no folder {path.parent}")
        self.path, self.name = path, name
        self.target = path.resolve()  # what a link points to is replaced, not the link
        self.temporary = self.target.with_name(f".flash_numba-{HOST}-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        self.lock: int | None = None
        stored = Stored(0, dtype, shape)
        remove_abandoned(self.target.parent)
        try:
            with system_errors(path), self.temporary.open("xb") as file:
                self.lock = locked(file.fileno())
                if path.suffix == ".npy":
                    header = {"descr": npy.dtype_to_descr(plain(dtype)), "fortran_order": False, "shape": shape}
                    npy.write_array_header_1_0(file, header)
                elif path.suffix == ".safetensors":
                    file.write(safetensors_header(name, stored))
                offset = file.tell()
                in_memory = path.suffix == ".npz" or stored.nbytes == 0
                if not in_memory:
                    reserve(file, offset + stored.nbytes)
            with system_errors(path):
                self.map = None if in_memory else np.memmap(self.temporary, dtype, "r+", offset, shape)
        except BaseException:
            self.discard()
            raise
        self.array = np.zeros(shape, dtype) if self.map is None else self.map.view(np.ndarray)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def commit(self) -> None:
        """Puts the file in its place, where it replaces one of that name."""
        with system_errors(self.path):
            if self.map is not None:
                self.map.flush()
            elif self.path.suffix == ".npz":
                array = self.array.view(plain(self.array.dtype))
                with (
                    zipfile.ZipFile(self.temporary, "w") as archive,
                    archive.open(f"{self.name}.npy", "w", force_zip64=True) as member,
                ):
                    npy.write_array(member, array, allow_pickle=False)
            self.temporary.replace(self.target)

    def discard(self) -> None:
        """Removes the temporary file, if it is still one."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        self.temporary.unlink(missing_ok=True)


def locked(file: int) -> int | None:
    """A descriptor that holds a lock on an open file until it is closed, or its process ends. None without locks."""
    if fcntl is None:
        return None
    own = os.dup(file)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # there are none on this file system
        os.close(own)
        return None
    return own


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that were killed."""
    with suppress(OSError):
        for path in folder.glob(".flash_numba-*.tmp"):
            with suppress(OSError):
                if abandoned(path):
                    path.unlink()


def abandoned(path: Path) -> bool:
    """Whether a file is a temporary one of the user's whose process has ended.

    Its number says so on this host. A lock says it where processes don't see each other, as in containers; the number
    is looked at all the same, as there is a moment before a file is locked, and there are file systems without locks.
    """
    match = TEMPORARY.fullmatch(path.name)
    if match is None or match["host"] != HOST or fcntl is None:
        return False
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        return False
    try:
        os.kill(int(match["process"]), 0)  # which sends nothing
        return False
    except ProcessLookupError:
        pass
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        pass
    finally:
        os.close(file)
    return True


def plain(dtype: np.dtype) -> np.dtype:
    """The dtype that NumPy's formats have a code for."""
    return np.dtype("V2") if dtype == ml_dtypes.bfloat16 else dtype


def safetensors_header(name: str, stored: Stored) -> bytes:
    """The length and the JSON header, padded so that the data starts at a multiple of 8."""
    code = next(code for code, dtype in SAFETENSORS.items() if dtype == stored.dtype)
    entry = {"dtype": code, "shape": stored.shape, "data_offsets": (0, stored.nbytes)}
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def reserve(file: IO[bytes], size: int) -> None:
    """Makes the file `size` bytes long, all of them with room on the disk: a hole fails only when it is written to."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        zeros = bytes(PIECE)
        while (left := size - file.tell()) > 0:
            file.write(zeros[:left])
