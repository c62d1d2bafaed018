"""Array files: inputs are mapped, what is wrong is said in one line, an output appears whole or not at all."""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from fuzzing import fuzz
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from flash_numba import files
from flash_numba.files import FileError, NewFile

DTYPES = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
X = np.random.default_rng(0).standard_normal((2, 3, 5))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def is_mapped(array):
    """Whether its elements lie in a mapped file: some array that it is a view of is a `memmap`."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def read_error(path, *arguments, reader=files.read):
    """The message, which must be one line that starts with the file's name."""
    with pytest.raises(FileError) as caught:
        reader(path, *arguments)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.fixture
def cut(tmp_path):
    """Writes a shorter copy of a file."""

    def write(path, size):
        short = tmp_path / f"short{path.suffix}"
        short.write_bytes(path.read_bytes()[:size])
        return short

    return write


# ---- reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_npy_is_mapped(tmp_path, dtype):
    np.save(tmp_path / "x.npy", X.astype(dtype))
    x = files.read(tmp_path / "x.npy", dtype=dtype.name)
    assert same(x, X.astype(dtype))
    assert is_mapped(x)
    assert not x.flags.writeable


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("descr", ["<f4", ">f4"])
def test_npy_in_any_order(tmp_path, order, descr):
    np.save(tmp_path / "x.npy", np.asarray(X, descr, order=order))
    x = files.read(tmp_path / "x.npy")
    assert x.dtype == descr
    np.testing.assert_array_equal(x, X.astype(np.float32))


def test_npy_version_2(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, X, version=(2, 0))
    assert same(files.read(tmp_path / "x.npy"), X)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), ()])
def test_arrays_of_any_size(tmp_path, suffix, shape):
    with NewFile(tmp_path / f"x{suffix}", "x", shape, np.dtype(np.float32)) as file:
        file.commit()
    assert same(files.read(tmp_path / f"x{suffix}", "x"), np.zeros(shape, np.float32))


def test_stored_npz_members_are_mapped(tmp_path):
    np.savez(tmp_path / "x.npz", q=X, other=X[0].astype(np.float16))
    for name, expected in (("q", X), ("other", X[0].astype(np.float16))):
        x = files.read(tmp_path / "x.npz", name)
        assert same(x, expected)
        assert is_mapped(x)


@pytest.mark.parametrize("order", ["C", "F"])
def test_compressed_npz_members_are_inflated(tmp_path, order):
    large = np.zeros((700, 500), order=order)  # more than one piece
    large[3] = np.arange(500)
    np.savez_compressed(tmp_path / "x.npz", large=large, empty=np.zeros((0, 2)))
    assert same(files.read(tmp_path / "x.npz", "large"), large)
    assert files.read(tmp_path / "x.npz", "empty").shape == (0, 2)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions(tmp_path, compression):
    with zipfile.ZipFile(tmp_path / "x.npz", "w", compression) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array(member, X)
    assert same(files.read(tmp_path / "x.npz", "x"), X)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_are_mapped(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": X[0].astype(dtype), "b": X.astype(dtype)}, path, metadata={"format": "np"})
    for name, expected in (("a", X[0]), ("b", X)):
        x = files.read(path, name)
        assert same(x, expected.astype(dtype))
        assert is_mapped(x)


def test_raw_elements_need_their_dtype(tmp_path):
    x = X.astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", raw=x, unsigned=x.view(np.uint16))
    for name in ("raw", "unsigned"):
        assert same(files.read(tmp_path / "x.npz", name, "bfloat16"), x)
        assert "--dtype bfloat16" in read_error(tmp_path / "x.npz", name)
        assert "not float32" in read_error(tmp_path / "x.npz", name, "float32")


def test_masks(tmp_path):
    np.savez(tmp_path / "m.npz", mask=X > 0, floats=X)
    safetensors.numpy.save_file({"mask": X > 0}, tmp_path / "m.safetensors")
    for suffix in (".npz", ".safetensors"):
        assert same(files.read_mask(tmp_path / f"m{suffix}"), X > 0)
    assert "bool" in read_error(tmp_path / "m.npz", "floats", reader=files.read_mask)


# ---- what can be wrong with a file


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_missing_empty_and_foreign_files(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    assert "no such file" in read_error(path, "x")
    path.write_bytes(b"")
    read_error(path, "x")
    path.write_bytes(b"no array at all, but some text that is long enough to be taken for a header")
    read_error(path, "x")
    path.unlink()
    path.mkdir()
    read_error(path, "x")


def test_unknown_suffix(tmp_path):
    assert ".safetensors" in read_error(tmp_path / "x.txt")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").chmod(0)
    assert "ermission" in read_error(tmp_path / "x.npy")


def test_pickles_are_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    objects = np.array([Trap(), Trap()], dtype=object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=objects)
    np.savez_compressed(tmp_path / "y.npz", x=objects)
    for name in ("x.npy", "x.npz", "y.npz"):
        assert "pickle" in read_error(tmp_path / name, "x")
    for suffix in files.SUFFIXES:
        path = tmp_path / f"raw{suffix}"
        path.write_bytes(pickle.dumps(Trap()))
        read_error(path, "x")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, np.bool_, "U3", "M8[s]", [("a", "f4")], np.longdouble])
def test_dtypes_that_attention_does_not_take(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.zeros((2, 2), dtype))
    assert "not float64, float32, float16, bfloat16" in read_error(tmp_path / "x.npy")


def test_names_that_are_not_in_the_archive(tmp_path):
    np.savez(tmp_path / "x.npz", query=X, key=X)
    safetensors.numpy.save_file({"query": X, "key": X}, tmp_path / "x.safetensors")
    for suffix in (".npz", ".safetensors"):
        message = read_error(tmp_path / f"x{suffix}", "q")
        assert "no array 'q'" in message
        assert "query" in message
    np.savez(tmp_path / "many.npz", **{f"layer{i}": X for i in range(50)})
    assert len(read_error(tmp_path / "many.npz", "q")) < len(str(tmp_path)) + 150
    np.savez(tmp_path / "none.npz")
    assert "empty" in read_error(tmp_path / "none.npz", "q")


def test_truncated_files(tmp_path, cut):
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "x.npz", x=X)
    np.savez_compressed(tmp_path / "y.npz", x=X)
    safetensors.numpy.save_file({"x": X}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.npz", "y.npz", "x.safetensors"):
        path = tmp_path / name
        size = path.stat().st_size
        for kept in (1, 7, 9, 40, 100, size // 2, size - 1):
            read_error(cut(path, kept), "x")


def test_a_header_that_promises_more_than_there_is(tmp_path):
    """Neither mapped nor allocated: the sizes are compared first."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**20, 2**22)}
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    assert "truncated" in read_error(tmp_path / "x.npy")
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", compression) as archive:
            archive.write(tmp_path / "x.npy", "x.npy")
        assert "truncated" in read_error(tmp_path / "x.npz", "x")


@pytest.mark.parametrize("shape", [(1,) * 100, (0, 2**70), (2**70, 0)])
def test_shapes_that_numpy_cannot_hold(tmp_path, shape):
    size = 4 * math.prod(shape)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(size))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    write_safetensors(tmp_path / "x.safetensors", {"x": entry}, bytes(size))
    for suffix in files.SUFFIXES:
        assert "shape" in read_error(tmp_path / f"x{suffix}", "x")


def test_a_wrong_checksum(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=X)
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        checksum = archive.getinfo("x.npy").CRC.to_bytes(4, "little")
    content = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(content.replace(checksum, b"abcd"))
    assert "CRC" in read_error(tmp_path / "x.npz", "x")


def write_safetensors(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "data_offsets": [0, 15]},
        {**ENTRY, "data_offsets": [16, 0]},
        {**ENTRY, "data_offsets": [-16, 0]},
        {**ENTRY, "data_offsets": [8, 24]},
        {**ENTRY, "data_offsets": [0]},
        {**ENTRY, "data_offsets": [0.0, 16.0]},
        {**ENTRY, "data_offsets": None},
        {**ENTRY, "shape": [-2, -2]},
        {**ENTRY, "shape": [2**40, 2**40], "data_offsets": [0, 2**82]},
        {**ENTRY, "shape": "22"},
        {**ENTRY, "dtype": "I64"},
        {**ENTRY, "dtype": ["F32"]},
        {"dtype": "F32"},
        [1, 2],
        None,
    ],
)
def test_damaged_safetensors_entries(tmp_path, entry):
    write_safetensors(tmp_path / "x.safetensors", {"x": entry}, bytes(16))
    read_error(tmp_path / "x.safetensors", "x")


@pytest.mark.parametrize("header", [b"", b"[1, 2]", b"{'x': 1}", b"\xff\xfe", b"null", b"[" * 100_000])
def test_damaged_safetensors_headers(tmp_path, header):
    write_safetensors(tmp_path / "x.safetensors", header)
    read_error(tmp_path / "x.safetensors", "x")


def test_safetensors_header_longer_than_the_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    assert "header of" in read_error(tmp_path / "x.safetensors", "x")


@fuzz(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(files.SUFFIXES), st.integers(0, 400), st.binary(min_size=1, max_size=6), st.booleans())
@pytest.mark.filterwarnings("ignore::UserWarning")  # NumPy's, on a header that looks like Python 2's
def test_flipped_bytes_never_do_worse_than_a_file_error(tmp_path, suffix, at, junk, compressed):
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, X)
    elif suffix == ".npz":
        (np.savez_compressed if compressed else np.savez)(path, x=X)
    else:
        safetensors.numpy.save_file({"x": X}, path)
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    with contextlib.suppress(FileError):
        files.load(path, "x").tobytes()


# ---- writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_what_is_written_is_read_again(tmp_path, suffix, dtype):
    path = tmp_path / f"x{suffix}"
    path.write_text("an older file")
    with NewFile(path, "out", X.shape, dtype) as file:
        file.array[...] = X
        assert path.read_text() == "an older file"
        file.commit()
    assert same(files.read(path, "out", dtype.name), X.astype(dtype))
    assert list(tmp_path.iterdir()) == [path]
    if suffix == ".safetensors":
        assert same(safetensors.numpy.load_file(path)["out"], X.astype(dtype))
    else:
        loaded = np.load(path, allow_pickle=False)
        loaded = loaded if suffix == ".npy" else loaded["out"]
        assert loaded.tobytes() == X.astype(dtype).tobytes()


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_outputs_are_mapped(tmp_path, suffix):
    with NewFile(tmp_path / f"x{suffix}", "out", X.shape, np.dtype(np.float32)) as file:
        assert is_mapped(file.array)
        assert file.array.flags.aligned


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_nothing_is_left_without_commit(tmp_path, suffix):
    def interrupted():
        with NewFile(tmp_path / f"x{suffix}", "out", X.shape, X.dtype):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_a_link_stays_one(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link.npy").symlink_to(tmp_path / "data" / "x.npy")
    with NewFile(tmp_path / "link.npy", "out", X.shape, X.dtype) as file:
        file.array[...] = X
        file.commit()
    assert (tmp_path / "link.npy").is_symlink()
    assert same(np.load(tmp_path / "data" / "x.npy"), X)


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "usual").write_text("")
    with NewFile(tmp_path / "x.npy", "out", X.shape, X.dtype) as file:
        file.commit()
    assert (tmp_path / "x.npy").stat().st_mode == (tmp_path / "usual").stat().st_mode


def new_file(path):
    return NewFile(path, "out", X.shape, X.dtype)


def test_places_that_cannot_be_written_to(tmp_path):
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "file").write_text("")
    assert "folder" in read_error(tmp_path / "folder.npy", reader=new_file)
    assert "no folder" in read_error(tmp_path / "missing" / "x.npy", reader=new_file)
    assert "no folder" in read_error(tmp_path / "file" / "x.npy", reader=new_file)
    assert "must end in" in read_error(tmp_path / "x.txt", reader=new_file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.npy"]


def temporary(folder, process, host=files.HOST):
    path = folder / f".flash_numba-{host}-{process}-0123456789abcdef.tmp"
    path.write_text("what was written so far")
    return path


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.skipif(files.fcntl is None, reason="without locks nothing is removed")
def test_temporary_files_of_processes_that_are_gone_are_removed(tmp_path, gone):
    """And no others: those of a process that runs, of another host or user, that are locked, or have another name."""
    left = temporary(tmp_path, gone)
    others = [temporary(tmp_path, os.getpid()), temporary(tmp_path, os.getppid()), temporary(tmp_path, gone, "0" * 8)]
    for name in (".flash_numba-0123456789abcdef.tmp", f"{left.name}.npy", f"x{left.name}", left.name[:-5] + "g.tmp"):
        others.append(tmp_path / name)
        others[-1].write_text("not ours")
    with new_file(tmp_path / "x.npy") as file:
        assert not left.exists()
        assert all(path.exists() for path in others)
        assert file.temporary.exists()
        with new_file(tmp_path / "y.npy"):
            assert file.temporary.exists()
    left.mkdir()
    with new_file(tmp_path / "x.npy") as file:
        file.commit()
    assert left.exists()


@pytest.mark.skipif(files.fcntl is None, reason="without locks nothing is removed")
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_a_locked_file_stays(tmp_path, gone, suffix, monkeypatch):
    """Of a process that has no number here, as in another container."""
    monkeypatch.setattr(files.os, "getpid", lambda: gone)
    with new_file(tmp_path / f"x{suffix}") as file:
        with new_file(tmp_path / "y.npy"):
            assert file.temporary.exists()
        file.array[...] = X
        file.commit()
    assert [path.name for path in tmp_path.iterdir()] == [f"x{suffix}"]


@pytest.mark.skipif(files.fcntl is None, reason="no locks")
def test_locks_arent_kept_open(tmp_path):
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with new_file(tmp_path / "x.npy") as file:
            file.commit()
        with pytest.raises(KeyError), new_file(tmp_path / "x.npy"):
            raise KeyError
    assert len(os.listdir("/dev/fd")) <= before + 1


@pytest.mark.skipif(files.fcntl is None, reason="no locks")
def test_a_file_system_without_locks(tmp_path, gone, monkeypatch):
    def none(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(files.fcntl, "flock", none)
    left = temporary(tmp_path, gone)
    with new_file(tmp_path / "x.npy") as file:
        assert not left.exists()
        file.commit()
    assert (tmp_path / "x.npy").exists()


def test_a_full_disk_shows_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files.os, "posix_fallocate", full, raising=False)
    assert os.strerror(28) in read_error(tmp_path / "x.npy", reader=new_file)
    assert not list(tmp_path.iterdir())


def test_room_is_reserved_without_posix_fallocate(tmp_path, monkeypatch):
    monkeypatch.delattr(files.os, "posix_fallocate", raising=False)
    monkeypatch.setattr(files, "PIECE", 100)
    with new_file(tmp_path / "x.npy") as file:
        file.array[...] = X
        file.commit()
    assert same(np.load(tmp_path / "x.npy"), X)
