"""GPUs as backends (`backend.py`): the arrays' own, or one for copies of arrays in host memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..addresses import address_of
from ..backend import YES, GradientCall, HostArrays, Job, Progress, Support
from ..call import Call
from ..chunks import Chunks
from ..prepared import FORMS
from ..reference import Gradients
from . import dlpack, driver
from .arrays import DeviceArray, Foreign, device_of, kind_of, library

# `launch` and what it needs are imported in the functions below, as they start Numba.


def any_on_gpu(arrays: dict[str, Any]) -> bool:
    return any(device_of(x) is not None for x in arrays.values())


def for_arrays(name: str, arrays: dict[str, Any]) -> "OnGPU":
    """The backend for arrays of which some lie on a GPU, as `backends.choose` gives it."""
    on_gpu = [argument for argument, x in arrays.items() if device_of(x) is not None]
    kinds = {argument: kind_of(arrays[argument]) for argument in on_gpu}
    if name in ("cpu", "reference"):
        raise TypeError(
            f"backend={name!r} takes arrays in host memory, {' and '.join(on_gpu)} lie on a GPU "
            f"({', '.join(sorted(set(kinds.values())))}); copy them to the host, or leave backend to 'auto'"
        )
    off = [argument for argument, x in arrays.items() if x is not None and argument not in on_gpu]
    if off:
        raise TypeError(
            f"{', '.join(on_gpu)} on a GPU and {', '.join(off)} in host memory can't be mixed: "
            f"copy {', '.join(off)} to the GPU, or all to the host"
        )
    if kinds.get("out") == "jax":
        raise TypeError("out must be an array that can be written to, got one of JAX")
    if len({type(library(arrays[argument], lambda: None)) for argument in on_gpu}) > 1:
        raise TypeError(f"arrays must come from one library, got {', '.join(f'{n}: {k}' for n, k in kinds.items())}")
    memory = driver.find()
    backend = OnGPU(memory, library(arrays[on_gpu[0]], lambda: memory))
    devices = {argument: backend.take(arrays[argument], argument).device for argument in on_gpu}
    if len(set(devices.values())) > 1:
        raise ValueError(f"arrays must lie on one GPU, got {', '.join(f'{name}: {n}' for name, n in devices.items())}")
    backend.device = devices[on_gpu[0]]
    return backend


class OnGPU:
    """A GPU, for arrays of one library, which makes the results too."""

    name = "cuda"
    array: type = DeviceArray

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

    def joined(self, **arrays: Any) -> "OnGPU":
        theirs = for_arrays("auto", arrays) if any_on_gpu(arrays) else None
        if theirs is None or type(theirs.library) is not type(self.library) or theirs.device != self.device:
            raise TypeError("k and v must lie on q's GPU and be arrays of q's library")
        return theirs

    def supports(self, call: Call, gradient: bool = False) -> Support:
        if gradient:
            return Support.no(
                "q lies on a GPU, which this call doesn't take; copy it to the host, like all others",
                TypeError,
            )
        from . import launch

        return launch.aligned(call)

    def remembers(self, kind: type) -> bool:
        return kind is not np.ndarray and not self.library.waits

    def prepare(self, call: Call, repeated: bool = False) -> "Prepared":
        if call.lse.size == 0:
            return Prepared(self, call, None, 0)
        from . import launch

        stream = self.library.stream(self.device)
        planned = launch.prepare(call, self.driver, self.device, stream, None if repeated else self.library)
        return Prepared(self, call, planned, stream)

    def merge(self, outs: list[Any], lses: list[Any], sinks: np.ndarray | None, out: Any, lse: Any) -> None:
        """Queued on the library's current stream."""
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

    def gradient(self, gradient: GradientCall, progress: Progress | None = None) -> Gradients:
        raise NotImplementedError  # see `supports`

    def stream(self) -> Chunks:
        return Chunks(self)

    def facts(self, call: Call) -> dict[str, str]:
        from . import planned

        return planned.facts(lambda cc: call, lambda: self.driver, self.device, "none")

    def compile_jobs(self, dtypes: list[np.dtype], head_dims: list[int], gradients: bool) -> list[Job]:
        return Copies(self.driver).compile_jobs(dtypes, head_dims, gradients)


class Prepared(NamedTuple):
    """A call that was planned (`backend.PreparedCall`), in the current stream of its library."""

    backend: OnGPU
    call: Call
    launch: Any  # launch.Launch; None where there is nothing to compute
    stream: int

    def run(self, progress: Progress | None = None) -> None:
        if self.launch is not None:
            from . import launch

            call, of = self.call, self.backend.library
            addresses = tuple(map(address_of, (call.q, call.k, call.v, call.out, call.lse)))
            scratch = launch.start(self.launch, addresses, of, self.stream)
            if of.waits:
                self.backend.driver.synchronize(self.stream)
                del scratch
            else:
                FORMS[type(call.q.owner)] = of.form  # type: ignore[attr-defined]
        if progress is not None:
            progress(1, 1)

    def remembered(self, out: DeviceArray, lse: DeviceArray) -> "Remembered | None":
        if self.launch is None:
            return None
        from . import launch

        of, device = self.backend.library, self.backend.device
        makers = of.maker(out.shape, out.dtype, device), of.maker(lse.shape, lse.dtype, device)
        return Remembered(launch.start, self.launch, of, device, *makers)


class Remembered(NamedTuple):
    """A call without its arrays (`backend.Remembered`)."""

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


class Copies(HostArrays):
    """The first GPU, or the current one, for arrays in host memory, which are copied there and back."""

    name = "cuda"

    def __init__(self, memory: Any = None) -> None:
        self._driver = memory  # None: to be found, not before it is needed, as a GPU isn't to plan a call

    def supports(self, call: Call, gradient: bool = False) -> Support:
        if gradient:
            return Support.no("backend='cuda' computes no gradients yet; it may be one of ('auto', 'cpu', 'reference')")
        return YES

    def remembers(self, kind: type) -> bool:
        return False

    def prepare(self, call: Call, repeated: bool = False) -> "PreparedCopies":
        on_gpu = self.on_gpu()
        if call.lse.size == 0:
            return PreparedCopies(call, call, on_gpu.prepare(call))
        there = on_gpu.copies(call)
        return PreparedCopies(call, there, on_gpu.prepare(there))

    def merge(self, outs: list[Any], lses: list[Any], sinks: np.ndarray | None, out: Any, lse: Any) -> None:
        on_gpu = self.on_gpu()
        there = on_gpu.empty(out.shape, out.dtype), on_gpu.empty(lse.shape, lse.dtype)
        on_gpu.merge([on_gpu.copied(x) for x in outs], [on_gpu.copied(x) for x in lses], sinks, *there)
        for own, theirs in zip((out, lse), there, strict=True):
            own[...] = on_gpu.driver.read(theirs)

    def gradient(self, gradient: GradientCall, progress: Progress | None = None) -> Gradients:
        raise NotImplementedError  # see `supports`

    def stream(self) -> Chunks:
        return Chunks(self)

    def facts(self, call: Call) -> dict[str, str]:
        from . import planned

        return planned.facts(lambda cc: planned_copies(call, cc), self._found, 0, "to the GPU and back")

    def compile_jobs(self, dtypes: list[np.dtype], head_dims: list[int], gradients: bool) -> list[Job]:
        from . import planned

        return planned.compile_jobs(dtypes, head_dims, self._found(), planned_copies)

    def on_gpu(self) -> "Transfer":
        """Where the copies lie. BackendError if there is no GPU to use."""
        return Transfer(self._found())

    def _found(self) -> Any:
        return self._driver or driver.find()


class Transfer(OnGPU):
    """A GPU for copies of arrays in host memory."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory, Foreign(memory, lambda array: array))
        self.device = memory.current_device()

    def copies(self, call: Call) -> Call:
        """A call on copies of its arrays."""
        assert call.out is not None
        there: dict[str, Any] = {name: self.copied(getattr(call, name)) for name in "qkv"}
        there["operands"] = [self.copied(operand) for operand in call.operands]
        there["out"] = self.empty(call.out.shape, call.out.dtype.newbyteorder("="))
        there["lse"] = self.empty(call.lse.shape, call.lse.dtype)
        return replace(call, **there)

    def copied(self, x: np.ndarray) -> Any:
        """An array on the GPU, in this machine's byte order; what an axis of stride 0 repeats is copied once."""
        repeats = [stride == 0 and n > 1 for stride, n in zip(x.strides, x.shape, strict=True)]
        once = x[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]
        packed = np.ascontiguousarray(once, once.dtype.newbyteorder("=")).reshape(once.shape)
        address, kept = self.driver.allocate(packed.nbytes, self.device)
        self.driver.write(address, packed, self.device, dlpack.LEGACY_STREAM)
        kind = dlpack.CPU if self.driver.simulated else dlpack.CUDA
        strides = dlpack.rows_after_rows(packed.shape, packed.itemsize)
        of = dlpack.Contents(address, packed.shape, strides, packed.dtype, self.device, kind, True)
        return np.broadcast_to(DeviceArray.at(of, kept), x.shape)


class PreparedCopies(NamedTuple):
    """A call that was planned on copies of its arrays (`backend.PreparedCall`)."""

    call: Call
    there: Call
    prepared: Prepared

    def run(self, progress: Progress | None = None) -> None:
        self.prepared.run()
        if self.prepared.launch is not None:
            read = self.prepared.backend.driver.read
            self.call.lse[...] = read(self.there.lse)
            self.call.out[...] = read(self.there.out)  # type: ignore[index]
        if progress is not None:
            progress(1, 1)

    def remembered(self, out: Any, lse: Any) -> None:
        return None


def planned_copies(call: Call, cc: tuple[int, int]) -> Call:
    """A call as `Copies` would have it on a GPU of a compute capability, on arrays that are nowhere."""
    return Transfer(driver.Nowhere(cc)).copies(call)
