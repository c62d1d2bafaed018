"""Places on a GPU (`places.py`): the arrays' own, or the first GPU for copies of arrays in host memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..addresses import address_of
from ..call import Call
from ..places import HOST, Host
from ..prepared import FORMS
from . import dlpack, driver
from .arrays import DeviceArray, Foreign, device_of, kind_of, library


def choose(backend: str, arrays: dict[str, Any]) -> Any:
    """As `places.choose`."""
    found = {name: device_of(x) for name, x in arrays.items()}
    on_gpu = [name for name, device in found.items() if device is not None]
    if not on_gpu:
        return Copies() if backend == "cuda" else HOST
    kinds = {name: kind_of(arrays[name]) for name in on_gpu}
    if backend in ("cpu", "reference"):
        raise TypeError(
            f"backend={backend!r} takes arrays in host memory, {' and '.join(on_gpu)} lie on a GPU "
            f"({', '.join(sorted(set(kinds.values())))}); copy them to the host, or leave backend to 'auto'"
        )
    off = [name for name, x in arrays.items() if x is not None and name not in on_gpu]
    if off:
        raise TypeError(
            f"{', '.join(on_gpu)} on a GPU and {', '.join(off)} in host memory can't be mixed: "
            f"copy {', '.join(off)} to the GPU, or all to the host"
        )
    if kinds.get("out") == "jax":
        raise TypeError("out must be an array that can be written to, got one of JAX")
    if len({type(library(arrays[name], lambda: None)) for name in on_gpu}) > 1:
        raise TypeError(f"arrays must come from one library, got {', '.join(f'{n}: {k}' for n, k in kinds.items())}")
    memory = driver.find()
    of = library(arrays[on_gpu[0]], lambda: memory)
    place = OnGPU(memory, of)
    devices = {name: place.take(arrays[name], name).device for name in on_gpu}
    if len(set(devices.values())) > 1:
        raise ValueError(f"arrays must lie on one GPU, got {', '.join(f'{name}: {n}' for name, n in devices.items())}")
    place.device = devices[on_gpu[0]]
    return place


class OnGPU:
    """A GPU, for arrays of one library, which makes the results too."""

    array = DeviceArray

    def __init__(self, memory: Any, of: Any) -> None:
        self.driver = memory
        self.library = of
        self.device = 0
        self._taken: dict[int, DeviceArray] = {}

    def take(self, x: Any, name: str = "array") -> Any:
        if x is None or (type(x) is DeviceArray and type(self.library) is not Foreign):  # taken already
            return x
        if id(x) not in self._taken:  # not twice, as a view may wait for a stream
            self._taken[id(x)] = self.library.view(name, x, dlpack.LEGACY_STREAM)
        return self._taken[id(x)]

    def numbers(self, x: Any) -> Any:
        return self.library.to_host(x) if device_of(x) is not None else x

    def own(self, x: DeviceArray) -> DeviceArray:
        """A copy of what `take` gave."""
        copy = self.library.clone(x)
        return copy if isinstance(copy, DeviceArray) else self.library.view("q", copy, 0)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        made = self.library.maker(shape, dtype, self.device)()
        return made if isinstance(made, DeviceArray) else self.library.view("out", made, 0)

    def give(self, array: DeviceArray) -> Any:
        return self.library.give(array)

    def copy(self, out: DeviceArray, source: DeviceArray) -> None:
        """Between arrays as the library knows them: a `DeviceArray`'s owner."""
        if out.size:
            self.library.copy(out.owner, source.owner)

    def run(self, call: Call, remembered: bool = False) -> tuple | None:
        """Queue a call on the library's current stream. Returns what `prepared` takes, or None if it isn't kept."""
        from . import launch  # which starts Numba

        launch.check_alignment(call)
        if call.lse.size == 0:
            return None
        library, device = self.library, self.device
        stream = library.stream(device)
        prepared = launch.prepare(call, self.driver, device, stream, None if remembered else library)
        arrays = call.q, call.k, call.v, call.out, call.lse
        scratch = launch.start(prepared, tuple(map(address_of, arrays)), library, stream)
        if library.waits:
            self.driver.synchronize(stream)
            del scratch
            return None
        FORMS[type(call.q.owner)] = library.form  # type: ignore[attr-defined]
        return launch.start, prepared, library, device

    def merge(self, outs: list[Any], lses: list[Any], sinks: np.ndarray | None, out: Any, lse: Any) -> None:
        """Partial results put together, in the library's current stream: `outs` and `out` with heads first."""
        from . import launch, merge

        if (out.dtype == np.float64) != (lse.dtype == np.float64):
            raise TypeError(f"outs of {out.dtype} and lses of {lse.dtype} can't be merged on a GPU")
        if not lse.size:
            return
        stream = self.library.stream(self.device)
        record, tables = merge.describe(outs, lses, out, lse, sinks)
        kept = launch.upload_tables(record, tables, self.driver, self.device, stream, self.library, ("q", "sinks"))
        launch.run_once(merge.specialise(lse.dtype == np.float64), record, self.driver, self.device, stream)
        if self.library.waits:
            self.driver.synchronize(stream)
        del kept

    def prepared(self, started: tuple[Any, Any, Any, int], out: DeviceArray, lse: DeviceArray) -> "PreparedOnGPU":
        start, launch, library, device = started
        makers = library.maker(out.shape, out.dtype, device), library.maker(lse.shape, lse.dtype, device)
        return PreparedOnGPU(start, launch, library, device, *makers)


class PreparedOnGPU(NamedTuple):
    """A call without its arrays: `prepared.Prepared` on a GPU."""

    start: Any  # launch.start
    launch: Any  # launch.Launch
    library: Any
    device: int
    make_out: Callable[[], Any]
    make_lse: Callable[[], Any]

    def run(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, lse, library = self.make_out(), self.make_lse(), self.library
        address = library.address
        addresses = address(q), address(k), address(v), address(out), address(lse)
        self.start(self.launch, addresses, library, library.stream(self.device))
        return out, lse


class Copies(Host):
    """The first GPU, or the current one, for arrays in host memory, which are copied there and back."""

    def __init__(self, memory: Any = None) -> None:
        self.driver = memory or driver.find()
        self.device = self.driver.current_device()

    def run(self, call: Call, remembered: bool = False) -> None:
        if call.lse.size == 0:
            return
        there, own = self.there(call)
        own.run(there)
        call.lse[...] = self.driver.read(there.lse)
        call.out[...] = self.driver.read(there.out)  # type: ignore[index]

    def there(self, call: Call) -> tuple[Call, OnGPU]:
        """The call on copies of its arrays, and where they lie."""
        own = OnGPU(self.driver, Foreign(self.driver, lambda array: array))
        own.device = self.device
        assert call.out is not None
        copies: dict[str, Any] = {name: self._copy(getattr(call, name)) for name in "qkv"}
        copies["operands"] = [self._copy(term) for term in call.operands]
        copies["out"] = own.empty(call.out.shape, call.out.dtype.newbyteorder("="))
        copies["lse"] = own.empty(call.lse.shape, call.lse.dtype)
        return replace(call, **copies), own

    def _copy(self, x: np.ndarray) -> Any:
        """On the GPU, in this machine's byte order; what an axis of stride 0 repeats is copied once."""
        repeats = [stride == 0 and n > 1 for stride, n in zip(x.strides, x.shape, strict=True)]
        once = x[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]
        packed = np.ascontiguousarray(once, once.dtype.newbyteorder("=")).reshape(once.shape)
        address, kept = self.driver.allocate(packed.nbytes, self.device)
        self.driver.write(address, packed, self.device, dlpack.LEGACY_STREAM)
        kind = dlpack.CPU if self.driver.simulated else dlpack.CUDA
        strides = dlpack.rows_after_rows(packed.shape, packed.itemsize)
        of = dlpack.Contents(address, packed.shape, strides, packed.dtype, self.device, kind, True)
        return np.broadcast_to(DeviceArray.at(of, kept), x.shape)
