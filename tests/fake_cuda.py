"""A CUDA driver that isn't there: the calls of `cuda.bindings.driver` that this library makes, on memory of the host.

It checks what a driver checks (contexts, sizes, limits) and keeps what it was asked, for tests on machines with no GPU.
"""

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

PLAIN_SHARED, SHARED = 48 * 1024, 227 * 1024
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0  # cuda.h, CU_LAUNCH_PARAM_*


class Started(NamedTuple):
    """One kernel launch."""

    entry: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int
    stream: int
    parameters: bytes
    context: int


class FakeApi:
    """In place of the module `cuda.bindings.driver`. What `started` gets, `kernel(parameters)` may compute."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="multiprocessors",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared")
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="device")
    CUstream = int

    def __init__(self, cc=(9, 0), version=13000, count=1, kernel=None):
        self.cc, self.version, self.count, self.kernel = cc, version, count, kernel
        self.log = []  # names of calls
        self.started: list[Started] = []
        self.memory = {}  # address -> (buffer, device)
        self.contexts = []  # the stack of this thread; a context is 100 + its device
        self.libraries = []
        self.allowed_shared = {}  # kernel -> bytes
        self.init_status = 0
        self.multiprocessors = 132

    def __getattribute__(self, name):
        if name.startswith("cu"):
            object.__getattribute__(self, "log").append(name)
        return object.__getattribute__(self, name)

    # -- the driver and its devices

    def cuInit(self, flags):
        return (self.init_status,)

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuGetErrorName(self, status):
        return 0, {100: b"CUDA_ERROR_NO_DEVICE", 1: b"CUDA_ERROR_INVALID_VALUE"}.get(status, b"CUDA_ERROR_UNKNOWN")

    def cuGetErrorString(self, status):
        return 0, b"what it means"

    def cuDeviceGetCount(self):
        return 0, self.count

    def cuDeviceGet(self, number):
        return (0, number) if number < self.count else (101, None)

    def cuDeviceGetAttribute(self, attribute, device):
        values = {"major": self.cc[0], "minor": self.cc[1], "multiprocessors": self.multiprocessors, "shared": SHARED}
        return 0, values[attribute]

    def cuDeviceGetName(self, length, device):
        return 0, b"Fake GPU\0" + bytes(length - 9)

    def cuDeviceTotalMem(self, device):
        return 0, 2**30

    # -- contexts

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, 100 + device

    def cuCtxGetCurrent(self):
        return 0, self.contexts[-1] if self.contexts else 0

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return 0, self.contexts.pop()

    def cuCtxGetDevice(self):
        return (0, self.contexts[-1] - 100) if self.contexts else (201, None)

    def cuCtxSynchronize(self):
        return (0 if self.contexts else 201,)

    # -- memory

    def cuMemAlloc(self, count):
        if not self.contexts or count < 1:
            return 201 if count else 1, None
        buffer = ctypes.create_string_buffer(b"\xff" * (count + 256))  # not zeros, as on a GPU
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.memory[address] = buffer, self.contexts[-1] - 100
        return 0, address

    def cuMemFree(self, address):
        return (0 if self.memory.pop(address, None) else 1,)

    def cuMemcpyHtoDAsync(self, target, source, count, stream):
        ctypes.memmove(target, source, count)
        return (0,)

    def cuMemcpyDtoDAsync(self, target, source, count, stream):
        ctypes.memmove(target, source, count)
        return (0,)

    def cuMemcpyDtoH(self, target, source, count):
        ctypes.memmove(target, source, count)
        return (0,)

    def cuMemsetD8Async(self, target, value, count, stream):
        ctypes.memset(target, value, count)
        return (0,)

    def cuPointerGetAttribute(self, attribute, address):
        return 0, next((device for at, (_, device) in self.memory.items() if at <= address), 0)

    def cuStreamSynchronize(self, stream):
        return (0,)

    # -- kernels

    def cuLibraryLoadData(self, code, *options):
        assert options == (None, None, 0, None, None, 0)
        self.libraries.append(code)
        return 0, len(self.libraries) - 1

    def cuLibraryGetKernel(self, library, name):
        return 0, ("kernel", library, name.decode())

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        if attribute != "dynamic shared" or value > SHARED:
            return (1,)
        self.allowed_shared[kernel] = value
        return (0,)

    def cuKernelGetFunction(self, kernel):
        return 0, kernel

    def cuLaunchKernel(self, function, x, y, z, tx, ty, tz, shared, stream, parameters, extra):
        if shared > self.allowed_shared.get(function, PLAIN_SHARED) or not x * y * z * tx * ty * tz or parameters:
            return (1,)
        words = (ctypes.c_int64 * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (BUFFER_POINTER, BUFFER_SIZE, END)
        size = ctypes.c_size_t.from_address(words[3]).value
        packed = ctypes.string_at(words[1], size)
        context = self.contexts[-1] if self.contexts else 0
        self.started.append(Started(function[2], (x, y, z), (tx, ty, tz), shared, int(stream), packed, context))
        if self.kernel is not None:
            self.kernel(packed)
        return (0,)


class DeviceThing:
    """An array "on a GPU" of an unknown library: host memory that announces itself by `__cuda_array_interface__`."""

    def __init__(self, array, **changes):
        self.array = array
        self.changes = changes

    @property
    def __cuda_array_interface__(self):
        own = self.array.__array_interface__
        fields = {name: own[name] for name in ("shape", "typestr", "data", "strides")}
        return fields | {"version": 3} | self.changes


class DlpackThing:
    """The same, by DLPack. NumPy makes the capsules; ml_dtypes and the device are patched in."""

    def __init__(self, array, device=0, kind=2):
        self.array, self.device, self.kind = array, device, kind
        self.asked = []  # streams

    def __dlpack_device__(self):
        return self.kind, self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        from flash_numba.gpu import dlpack

        self.asked.append(stream)
        of = self.array.__array_interface__
        strides = self.array.strides
        return dlpack.capsule(
            self.array,
            dlpack.Contents(of["data"][0], self.array.shape, strides, self.array.dtype, self.device, self.kind, False),
        )


def values(array):
    """The elements of a `DeviceArray` that lies in memory of the host after all."""
    assert isinstance(array._layout, np.ndarray)
    return array._layout.copy()
