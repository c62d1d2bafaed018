"""The CUDA driver, as far as a launch needs it: what GPUs there are, memory, and loading and starting kernels.

Through `cuda.bindings`, which numba-cuda brings along. Under Numba's simulator (NUMBA_ENABLE_CUDASIM=1) memory is the
host's and kernels run in Python. Only the primary context of a device is used, which other libraries share.
"""

import ctypes
import importlib.metadata
import importlib.util
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..backend import INSTALL, NO_NUMBA_CUDA, BackendError
from . import SIMULATED

OLDEST = (7, 5)  # the least compute capability that CUDA 13 compiles for
PLAIN_SHARED = 48 * 1024  # bytes of shared memory that a thread block may have without asking

# what `info` gives the versions of
COMPONENTS = ("numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12")


class GPU(NamedTuple):
    """What is known of a device."""

    name: str
    cc: tuple[int, int]  # compute capability
    multiprocessors: int
    memory: int  # bytes
    shared_bytes: int  # that a thread block may ask for

    def __str__(self) -> str:
        if not self.memory:  # simulated
            return self.name
        return (
            f"{self.name} (compute capability {self.cc[0]}.{self.cc[1]}, {self.multiprocessors} multiprocessors, "
            f"{self.memory / 2**30:.0f} GiB)"
        )


class Loaded(NamedTuple):
    """A kernel on a device, ready to be started."""

    handle: Any
    threads: int
    shared_bytes: int


class Memory:
    """Device memory of our own, given back when nothing refers to it any more."""

    def __init__(self, driver: Any, address: int, device: int) -> None:
        self.address = address
        weakref.finalize(self, driver.free, address, device).atexit = False  # the driver goes first, with everything


class Driver:
    """The GPUs of this machine."""

    simulated = False

    def __init__(self, api: Any) -> None:
        self._api = api  # the module cuda.bindings.driver
        self._check(api.cuInit(0))
        self.cuda_version: int = self._check(api.cuDriverGetVersion())  # 13000: what the driver supports at most
        self.count: int = self._check(api.cuDeviceGetCount())
        self._contexts: dict[int, Any] = {}
        self._handles: dict[int, int] = {}  # of the contexts
        self._gpus: dict[int, GPU] = {}
        self._streams: dict[int, Any] = {}
        self._loaded: list[Any] = []  # libraries, which live as long as the process

    def _check(self, result: tuple) -> Any:
        """What a call returned, without its status; an error if that isn't 0."""
        status, *values = result
        if int(status) != 0:
            name = self._api.cuGetErrorName(status)[1]
            words = self._api.cuGetErrorString(status)[1]
            said = [x.decode() if isinstance(x, bytes) else str(x) for x in (name, words)]
            raise BackendError(f"the CUDA driver reports {said[0]}: {said[1]}")
        return values[0] if len(values) == 1 else tuple(values)

    # -- devices

    def gpu(self, device: int) -> GPU:
        if device not in self._gpus:
            api, check = self._api, self._check
            attributes = api.CUdevice_attribute
            handle = check(api.cuDeviceGet(device))

            def ask(name: str) -> int:
                attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
                return check(api.cuDeviceGetAttribute(attribute, handle))

            name = check(api.cuDeviceGetName(128, handle))
            self._gpus[device] = GPU(
                name.split(b"\0")[0].decode(),
                (ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
                ask("MULTIPROCESSOR_COUNT"),
                check(api.cuDeviceTotalMem(handle)),
                ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            )
        return self._gpus[device]

    def _context(self, device: int) -> Any:
        if device not in self._contexts:
            handle = self._check(self._api.cuDeviceGet(device))
            context = self._check(self._api.cuDevicePrimaryCtxRetain(handle))
            self._handles[device], self._contexts[device] = int(context), context
        return self._contexts[device]

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device's primary context this thread's for a time, unless it is already."""
        context = self._context(device)
        if int(self._check(self._api.cuCtxGetCurrent())) == int(context):
            yield
            return
        self._check(self._api.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            self._check(self._api.cuCtxPopCurrent())

    def device_of(self, address: int) -> int:
        """The device whose memory holds an address."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(self._check(self._api.cuPointerGetAttribute(attribute, address)))

    def current_device(self) -> int:
        """The device of this thread's context, or 0 where there is none yet."""
        status, device = self._api.cuCtxGetDevice()
        return int(device) if int(status) == 0 else 0

    # -- memory

    def allocate(self, count: int, device: int) -> tuple[int, Memory]:
        """Allocate so many bytes; returns their address, and what keeps them."""
        with self.on(device):
            address = int(self._check(self._api.cuMemAlloc(max(count, 1))))
        return address, Memory(self, address, device)

    def free(self, address: int, device: int) -> None:
        with self.on(device):
            self._check(self._api.cuMemFree(address))  # which waits for whatever may still use it

    def write(self, address: int, data: np.ndarray, device: int, stream: int) -> None:
        """Copy a contiguous array to the device, in the order of a stream; `data` may change after the call."""
        if data.nbytes:
            with self.on(device):
                self._check(self._api.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self._stream(stream)))

    def copy(self, to: int, source: int, count: int, device: int, stream: int) -> None:
        """Copy bytes within a device, in the order of a stream."""
        if count:
            with self.on(device):
                self._check(self._api.cuMemcpyDtoDAsync(to, source, count, self._stream(stream)))

    def read(self, array: Any) -> np.ndarray:
        """A copy of a `DeviceArray` in host memory, when everything queued before is done."""
        low, high = np.lib.array_utils.byte_bounds(array._layout)
        copy = self.read_bytes(low, high - low if array.size else 0, array.device)
        return np.ndarray(array.shape, array.dtype, copy, array.address - low if copy.size else 0, array.strides)

    def read_bytes(self, address: int, count: int, device: int) -> np.ndarray:
        """A copy of bytes of the device, when everything queued before is done."""
        copy = np.empty(count, np.uint8)
        if count:
            with self.on(device):
                self._check(self._api.cuCtxSynchronize())
                self._check(self._api.cuMemcpyDtoH(copy.ctypes.data, address, count))
        return copy

    def clear(self, address: int, count: int, device: int, stream: int) -> None:
        """Set bytes to 0, in the order of a stream."""
        with self.on(device):
            self._check(self._api.cuMemsetD8Async(address, 0, count, self._stream(stream)))

    def synchronize(self, stream: int) -> None:
        self._check(self._api.cuStreamSynchronize(self._stream(stream)))

    # -- kernels

    def load(self, cubin: bytes, entry: str, threads: int, shared_bytes: int, device: int) -> Loaded:
        """The kernel `entry` of a cubin, allowed as much dynamic shared memory as it is started with."""
        api, check = self._api, self._check
        gpu = self.gpu(device)
        if shared_bytes > gpu.shared_bytes:
            raise BackendError(
                f"a kernel wants {shared_bytes} bytes of shared memory a thread block, {gpu} has {gpu.shared_bytes}"
            )
        with self.on(device):
            library = check(api.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
            kernel = check(api.cuLibraryGetKernel(library, entry.encode()))
            if shared_bytes > PLAIN_SHARED:
                attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(api.cuKernelSetAttribute(attribute, shared_bytes, kernel, check(api.cuDeviceGet(device))))
            function = check(api.cuKernelGetFunction(kernel))  # of this device's context
        self._loaded.append((library, cubin))
        return Loaded(function, threads, shared_bytes)

    def start(self, loaded: Loaded, grid: tuple[int, int, int], extra: int, device: int, stream: int) -> None:
        """Queue a kernel on a stream of its device; `extra` is the address of what `launch.Launch.extra` says."""
        api = self._api
        handle = self._streams.get(stream) or self._stream(stream)
        shape = *grid, loaded.threads, 1, 1, loaded.shared_bytes
        if int(api.cuCtxGetCurrent()[1]) == self._handles[device]:
            (status,) = api.cuLaunchKernel(loaded.handle, *shape, handle, 0, extra)
        else:
            with self.on(device):
                (status,) = api.cuLaunchKernel(loaded.handle, *shape, handle, 0, extra)
        if status != 0:
            self._check((status,))

    def _stream(self, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._api.CUstream(stream)
        return self._streams[stream]


class Simulator:
    """Numba's simulator in place of a GPU: memory of the host, kernels in Python."""

    simulated = True
    count = 1
    cuda_version = 0

    def gpu(self, device: int) -> GPU:
        return GPU("Numba's simulator", (0, 0), 1, 0, 227 * 1024)

    def device_of(self, address: int) -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def allocate(self, count: int, device: int) -> tuple[int, Any]:
        kept = np.empty(count + 127, np.uint8)  # aligned as cuMemAlloc does it
        return -(-kept.ctypes.data // 128) * 128, kept

    def write(self, address: int, data: np.ndarray, device: int, stream: int) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def copy(self, to: int, source: int, count: int, device: int, stream: int) -> None:
        ctypes.memmove(to, source, count)

    def read(self, array: Any) -> np.ndarray:
        return array._layout.copy()

    def clear(self, address: int, count: int, device: int, stream: int) -> None:
        ctypes.memset(address, 0, count)

    def synchronize(self, stream: int) -> None: ...


class Nowhere:
    """Stands for a GPU of a compute capability where a call is only planned."""

    simulated = False

    def __init__(self, cc: tuple[int, int]) -> None:
        self._cc = cc

    def gpu(self, device: int) -> GPU:
        return GPU("any GPU", self._cc, 1, 0, 227 * 1024)

    def current_device(self) -> int:
        return 0

    def allocate(self, count: int, device: int) -> tuple[int, Any]:
        return 256, None  # as aligned as any

    def write(self, address: int, data: np.ndarray, device: int, stream: int) -> None: ...


# -- finding it --------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_found: Any = None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find() -> Any:
    """The driver, or the simulator.

    Raises:
        BackendError: no numba-cuda, no driver, one too old for it, or no GPU; it says what would help.
    """
    global _found
    if _found is None:
        with _lock:
            _found = _found or _open()
    return _found


def check_installed() -> None:
    if importlib.util.find_spec("numba_cuda") is None:
        raise BackendError(NO_NUMBA_CUDA)


def _open() -> Any:
    check_installed()
    if SIMULATED:
        return Simulator()
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise BackendError(f"numba-cuda is installed without cuda-bindings ({error}): {INSTALL}") from None
    return open_driver(api, version_of("cuda-bindings") or "")


def open_driver(api: Any, bindings: str) -> Driver:
    """The driver behind a `cuda.bindings.driver` of a version, if the two fit and there is a GPU."""
    try:
        driver = Driver(api)
    except BackendError as error:
        raise BackendError(f"{error}. Is there an NVIDIA GPU that CUDA_VISIBLE_DEVICES doesn't hide?") from None
    except Exception as error:  # cuda-pathfinder's own, where there is no libcuda
        said = "" if "NotFound" in type(error).__name__ else f" ({str(error).partition(chr(10))[0]})"
        raise BackendError(f"no NVIDIA driver found{said}: install one, 580 or newer for CUDA 13") from None
    wanted = bindings.partition(".")[0]
    if wanted.isdigit() and driver.cuda_version // 1000 < int(wanted):
        has = f"{driver.cuda_version // 1000}.{driver.cuda_version % 1000 // 10}"
        older = ', or pip install "flash_numba[cuda12]" in place of [cuda]' if has.startswith("12") else ""
        raise BackendError(
            f"the NVIDIA driver supports CUDA {has}, cuda-bindings {bindings} needs {wanted}.0: "
            f"update the driver (580 or newer for CUDA 13){older}"
        )
    if driver.count == 0:
        raise BackendError("the CUDA driver finds no GPU; CUDA_VISIBLE_DEVICES may hide it")
    return driver


def usable(driver: Any, device: int) -> GPU:
    """The device, if kernels can be compiled for it. BackendError if not."""
    gpu = driver.gpu(device)
    if not driver.simulated and gpu.cc < OLDEST:
        raise BackendError(f"{gpu} is too old: compute capability {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return gpu


def facts() -> dict[str, str]:
    """The GPU and what runs it, or what is missing and what would help, for `info`."""
    versions = [f"{name} {version}" for name in COMPONENTS if (version := version_of(name))]
    try:
        driver = find()
        gpus = [str(usable(driver, device)) for device in range(driver.count)]
    except BackendError as error:
        return {"GPU": f"none: {error}", "CUDA": ", ".join(versions) or "none"}
    if not driver.simulated:
        versions.insert(0, f"driver for CUDA {driver.cuda_version // 1000}.{driver.cuda_version % 1000 // 10}")
    return {"GPU": "; ".join(gpus), "CUDA": ", ".join(versions)}
