"""DLPack by hand: the address, shape, strides and dtype of another library's array, and our own memory for others.

Structures and numbers are those of dlpack.h, version 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html); capsules go
by the Python specification there.
"""

import ctypes
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # device types
LEGACY_STREAM = 1  # how a capsule is asked to be ready for the default stream
READ_ONLY = 1  # a flag of versioned capsules

# (type code, bits) of one element
DTYPES = {
    (0, 32): np.dtype(np.int32),
    (0, 64): np.dtype(np.int64),
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (2, 64): np.dtype(np.float64),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (6, 8): np.dtype(np.bool_),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null for rows one after the other
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor, in capsules named "dltensor"."""

    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, in capsules named "dltensor_versioned"."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Contents(NamedTuple):
    """What a capsule says of an array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype
    device: int
    device_type: int
    read_only: bool


NAME, VERSIONED_NAME = b"dltensor", b"dltensor_versioned"  # capsules keep a pointer to theirs

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)(("PyCapsule_New", _api))
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def export(x: Any, stream: int | None) -> Any:
    """The capsule of an array, ready for work on a stream; versioned ones where the library has them."""
    try:
        return x.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # from before version 1
        return x.__dlpack__(stream=stream)


def contents(capsule: Any) -> Contents:
    """What a capsule describes. It isn't consumed: whoever reads the memory keeps it alive.

    Raises:
        TypeError: no DLPack capsule, or a dtype that has no counterpart here.
    """
    if _is_valid(capsule, VERSIONED_NAME):
        versioned = Versioned.from_address(_pointer(capsule, VERSIONED_NAME))
        if versioned.major > 1:
            raise TypeError(f"DLPack version {versioned.major}.{versioned.minor} isn't known here, only 1")
        tensor, read_only = versioned.tensor, bool(versioned.flags & READ_ONLY)
    elif _is_valid(capsule, NAME):
        tensor, read_only = Managed.from_address(_pointer(capsule, NAME)).tensor, False
    else:
        raise TypeError(f"__dlpack__ returned no unused DLPack capsule but {type(capsule).__name__}")
    form = tensor.dtype
    dtype = DTYPES.get((form.code, form.bits)) if form.lanes == 1 else None
    if dtype is None:
        raise TypeError(f"DLPack type code {form.code} of {form.bits} bits isn't taken")
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(dtype.itemsize * stride for stride in tensor.strides[: tensor.ndim])
    else:
        strides = rows_after_rows(shape, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    return Contents(address, shape, strides, dtype, tensor.device.number, tensor.device.type, read_only)


def rows_after_rows(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


# What an exported capsule points to lives here until its consumer, or the capsule itself, gives it back.
_exported: dict[int, tuple] = {}


@_DELETER
def _release(managed: int) -> None:
    _exported.pop(managed, None)


@_DESTRUCTOR
def _drop_unused(capsule: int) -> None:
    if _raw_is_valid(capsule, NAME):  # nobody took it, or its name would be "used_dltensor"
        _release(_raw_pointer(capsule, NAME))


def capsule(owner: Any, of: Contents) -> Any:
    """A capsule over memory of our own; `owner` lives until the consumer is done with it."""
    ndim = len(of.shape)
    shape = (ctypes.c_int64 * ndim)(*of.shape)
    strides = (ctypes.c_int64 * ndim)(*(stride // of.dtype.itemsize for stride in of.strides))
    code, bits = CODES[of.dtype]
    managed = Managed()
    managed.tensor = Tensor(
        of.address, Device(of.device_type, of.device), ndim, DataType(code, bits, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed.deleter = ctypes.cast(_release, ctypes.c_void_p)
    at = ctypes.addressof(managed)
    _exported[at] = managed, shape, strides, owner
    return _new(at, NAME, _drop_unused)
