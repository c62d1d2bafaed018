"""Arrays in a GPU's memory, whoever made them: seen as address, shape, strides and dtype, without a copy.

Libraries are looked up among the modules already imported, never imported here. What is returned is allocated by, and
is an array of, the library that the inputs come from.
"""

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..backend import HOST_TYPES
from . import dlpack
from .dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Contents


class _At:
    """Has NumPy lay an array over an address."""

    def __init__(self, of: Contents) -> None:
        self.__array_interface__ = {
            "shape": of.shape,
            "strides": of.strides,
            "typestr": f"|V{of.dtype.itemsize}",
            "data": (of.address, of.read_only),
            "version": 3,
        }


class DeviceArray:
    """An array in a GPU's memory, as far as the checks of arguments and `problem.describe` look at arrays.

    NumPy computes shapes and strides, on an array that it believes to lie at the device's address. Only what touches no
    element is passed on to it, as there may be nothing at that address for the CPU to read.

    One that is returned, for inputs of a library that no other array can be made for, takes part in DLPack and
    `__cuda_array_interface__`.
    """

    __slots__ = ("__weakref__", "_layout", "device", "on_gpu", "owner")

    def __init__(self, layout: np.ndarray, device: int, owner: Any, on_gpu: bool = True) -> None:
        self._layout = layout
        self.device = device
        self.owner = owner  # the library's array that this is a view of, or what keeps the memory
        self.on_gpu = on_gpu  # or simulated, in host memory

    @classmethod
    def at(cls, of: Contents, owner: Any) -> "DeviceArray":
        return cls(np.asarray(_At(of)).view(of.dtype), of.device, owner, of.device_type != CPU)

    shape = property(lambda self: self._layout.shape)
    strides = property(lambda self: self._layout.strides)
    dtype = property(lambda self: self._layout.dtype)
    ndim = property(lambda self: self._layout.ndim)
    size = property(lambda self: self._layout.size)
    nbytes = property(lambda self: self._layout.nbytes)
    flags = property(lambda self: self._layout.flags)
    address = property(lambda self: self._layout.__array_interface__["data"][0])

    def _like(self, layout: np.ndarray, owner: Any = None) -> "DeviceArray":
        return DeviceArray(layout, self.device, owner or self.owner, self.on_gpu)

    def swapaxes(self, a: int, b: int) -> "DeviceArray":
        return self._like(self._layout.swapaxes(a, b))

    def __getitem__(self, key: Any) -> "DeviceArray":
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys):
            raise TypeError(f"an array on a GPU is indexed by slices and integers here, got {key!r}")
        full = keys if any(k is Ellipsis for k in keys) else (*keys, ...)  # so that no element is taken out
        return self._like(self._layout[full])

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        if function not in (np.broadcast_to, np.may_share_memory):
            return NotImplemented
        result = function(*(x._layout if isinstance(x, DeviceArray) else x for x in args), **kwargs)
        return self._like(result) if isinstance(result, np.ndarray) else result

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(f"{self!r} can't be read by the CPU")

    def __repr__(self) -> str:
        return f"<{self.dtype} array of shape {self.shape} on GPU {self.device}>"

    def contents(self) -> Contents:
        return Contents(
            self.address, self.shape, self.strides, self.dtype, self.device, CUDA if self.on_gpu else CPU,
            not self.flags.writeable,
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA if self.on_gpu else CPU), self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return dlpack.capsule(self, self.contents())  # complete: see `Foreign.waits`

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind == "V":
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}; use DLPack")
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.address, not self.flags.writeable),
            "version": 3,
            "stream": None,
        }


# -- libraries ---------------------------------------------------------------------------------------------------------


class Torch:
    """PyTorch tensors."""

    waits = False  # whether memory may be reused before the GPU is done with it, so that calls wait for their end

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        pairs = [(getattr(torch, dtype.name, None), dtype) for dtype in dlpack.CODES]
        self._dtypes = {theirs: dtype for theirs, dtype in pairs if theirs is not None}
        self._theirs = {dtype: theirs for theirs, dtype in self._dtypes.items()}
        # what `torch.cuda.current_stream(device).cuda_stream` comes to, in a tenth of the time where torch offers it
        quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = quick or (lambda device: torch.cuda.current_stream(device).cuda_stream)

    def form(self, q: Any, k: Any, v: Any) -> tuple | None:
        """What tells calls apart that are planned differently; None for one that needs a closer look."""
        if q.requires_grad or k.requires_grad or v.requires_grad or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        return (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        )  # fmt: skip

    def address(self, x: Any) -> int:
        return x.data_ptr()

    def view(self, name: str, x: Any, stream: int) -> DeviceArray:
        if x.requires_grad and self._torch.is_grad_enabled():
            raise TypeError(f"{name} requires grad, which attention wouldn't follow; pass {name}.detach()")
        dtype = self._dtypes.get(x.dtype)
        if dtype is None:
            raise TypeError(f"{name} has dtype {x.dtype}, which isn't taken")
        if x.is_neg():
            x = x.resolve_neg()
        strides = tuple(dtype.itemsize * stride for stride in x.stride())
        of = Contents(x.data_ptr(), tuple(x.shape), strides, dtype, x.device.index, CUDA, False)
        return DeviceArray.at(of, x)

    def maker(self, shape: tuple[int, ...], dtype: np.dtype, device: int) -> Callable[[], Any]:
        """What makes a new array each time that it is called."""
        return partial(self._torch.empty, shape, dtype=self._theirs[dtype], device=self._device(device))

    def bytes(self, count: int, device: int, stream: int) -> tuple[int, Any]:
        """Memory for the time of a launch: its address, and what keeps it."""
        kept = self._torch.empty(count, dtype=self._torch.uint8, device=self._device(device))
        return kept.data_ptr(), kept

    def _device(self, number: int) -> Any:
        return self._torch.device("cuda", number)

    def give(self, array: DeviceArray) -> Any:
        return array.owner if array.owner.shape == array.shape else array.owner.reshape(array.shape)

    def copy(self, out: Any, source: Any) -> None:
        out.copy_(source)

    def clone(self, array: DeviceArray) -> Any:
        return array.owner.clone()

    def to_host(self, x: Any) -> np.ndarray:
        x = x.detach()
        return (x.double() if x.is_floating_point() else x).cpu().numpy()


class CuPy:
    """CuPy arrays."""

    waits = False

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def stream(self, device: int) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def form(self, q: Any, k: Any, v: Any) -> tuple | None:
        each = [(x.shape, x.strides, x.dtype, x.device.id) for x in (q, k, v)]
        return *each, (q.data.ptr | k.data.ptr | v.data.ptr) & 15

    def address(self, x: Any) -> int:
        return x.data.ptr

    def view(self, name: str, x: Any, stream: int) -> DeviceArray:
        of = Contents(x.data.ptr, x.shape, x.strides, x.dtype, x.device.id, CUDA, False)
        return DeviceArray.at(of, x)

    def maker(self, shape: tuple[int, ...], dtype: np.dtype, device: int) -> Callable[[], Any]:
        def make() -> Any:
            with self._cupy.cuda.Device(device):
                return self._cupy.empty(shape, dtype)

        return make

    def bytes(self, count: int, device: int, stream: int) -> tuple[int, Any]:
        kept = self.maker((count,), np.dtype(np.uint8), device)()
        return kept.data.ptr, kept

    def give(self, array: DeviceArray) -> Any:
        return array.owner if array.owner.shape == array.shape else array.owner.reshape(array.shape)

    def copy(self, out: Any, source: Any) -> None:
        out[...] = source

    def clone(self, array: DeviceArray) -> Any:
        return array.owner.copy()

    def to_host(self, x: Any) -> np.ndarray:
        return x.get()


class Borrowed(NamedTuple):
    """An array of another library, and the capsule that keeps its memory."""

    array: Any
    capsule: Any


class Foreign:
    """Arrays of any other library that has DLPack or `__cuda_array_interface__`: JAX, Numba and their like.

    They say nothing of streams that work could be queued on, and may reuse memory as soon as Python lets go of it. So
    they are made ready for the default stream, and a call on them waits for its end.
    """

    waits = True

    def __init__(self, memory: Any, back: Callable[[DeviceArray], Any]) -> None:
        self._memory = memory  # a driver
        self._back = back  # from our own array to one of the library

    def stream(self, device: int) -> int:
        return dlpack.LEGACY_STREAM  # as a handle too: CU_STREAM_LEGACY

    def view(self, name: str, x: Any, stream: int) -> DeviceArray:
        if isinstance(x, DeviceArray):
            return x._like(x._layout, Borrowed(x, None))
        if hasattr(x, "__dlpack__"):
            try:
                capsule = dlpack.export(x, stream)
                of = dlpack.contents(capsule)
            except TypeError as error:
                raise TypeError(f"{name} isn't taken: {error}") from None
            return DeviceArray.at(of, Borrowed(x, capsule))
        return DeviceArray.at(interface_contents(name, x, self._memory), Borrowed(x, None))

    def maker(self, shape: tuple[int, ...], dtype: np.dtype, device: int) -> Callable[[], Any]:
        def make() -> DeviceArray:
            address, kept = self._memory.allocate(math.prod(shape) * dtype.itemsize, device)
            strides = dlpack.rows_after_rows(shape, dtype.itemsize)
            kind = CPU if self._memory.simulated else CUDA
            return DeviceArray.at(Contents(address, shape, strides, dtype, device, kind, False), kept)

        return make

    def bytes(self, count: int, device: int, stream: int) -> tuple[int, Any]:
        return self._memory.allocate(count, device)

    def give(self, array: DeviceArray) -> Any:
        return array.owner.array if isinstance(array.owner, Borrowed) else self._back(array)

    def copy(self, out: Any, source: Any) -> None:
        raise ValueError("out must have q's dtype and not overlap an input where a library's arrays can't be copied")

    def clone(self, array: DeviceArray) -> DeviceArray:
        low, high = np.lib.array_utils.byte_bounds(array._layout)
        count = high - low if array.size else 0
        address, kept = self._memory.allocate(count, array.device)
        self._memory.copy(address, low, count, array.device, self.stream(array.device))
        of = array.contents()._replace(address=address + array.address - low, read_only=False)
        return DeviceArray.at(of, kept)

    def to_host(self, x: Any) -> np.ndarray:
        return self._memory.read(self.view("", x, self.stream(0)))


def interface_contents(name: str, x: Any, memory: Any) -> Contents:
    """What `__cuda_array_interface__` says; https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    of = x.__cuda_array_interface__
    dtype = np.dtype(of["typestr"])
    if dtype.newbyteorder("=") not in dlpack.CODES and dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {dtype}, which isn't taken")
    if of.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, whose mask would be ignored")
    address, read_only = of["data"]
    shape = tuple(of["shape"])
    strides = of.get("strides") or dlpack.rows_after_rows(shape, dtype.itemsize)
    stream = of.get("stream")
    if stream is not None:
        memory.synchronize(stream)
    device = memory.device_of(address) if address else 0
    kind = CPU if memory.simulated else CUDA
    return Contents(address or 0, shape, tuple(strides), dtype, device, kind, bool(read_only))


# -- finding them ------------------------------------------------------------------------------------------------------


def device_of(x: Any) -> tuple[int, int] | None:
    """(DLPack device type, number) of an array in a GPU's memory; None for anything that NumPy should take."""
    if isinstance(x, HOST_TYPES):
        return None
    ask = getattr(x, "__dlpack_device__", None)
    if ask is not None:
        try:
            kind, number = ask()
        except Exception:  # not one device, or none yet: let NumPy say what it thinks of it
            return None
        if int(kind) in (CUDA, CUDA_MANAGED):
            return int(kind), int(number)
        if int(kind) in (CPU, CUDA_HOST) and not isinstance(x, DeviceArray):
            return None
    return (CUDA, -1) if hasattr(x, "__cuda_array_interface__") else None


def kind_of(x: Any) -> str:
    """Which library an array comes from, by its class's module: "torch", "cupy", "jax" or another name."""
    root = type(x).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def library(x: Any, memory: Callable[[], Any]) -> Any:
    """The library of an array in a GPU's memory. `memory` gives the driver to those that need it."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch(torch)
    if cupy is not None and isinstance(x, cupy.ndarray):
        return _cupy(cupy)
    return Foreign(memory(), _way_back(x))


_torch, _cupy = cache(Torch), cache(CuPy)


def _way_back(x: Any) -> Callable[[DeviceArray], Any]:
    if kind_of(x) == "numba":
        as_theirs = sys.modules["numba"].cuda.as_cuda_array
        return lambda array: array if array.dtype.kind == "V" else as_theirs(array)  # it knows no bfloat16
    if kind_of(x) == "jax":
        return sys.modules["jax"].dlpack.from_dlpack
    space = getattr(x, "__array_namespace__", None)  # the array API standard has from_dlpack
    if space is not None:
        return space().from_dlpack
    return lambda array: array
