"""What a backend is: the contract between the public calls and whatever computes them.

A public call chooses a backend (`backends.py`), checks its arguments, makes a `Call` of them and hands it over. All
that depends on where arrays lie and on how something is computed stands behind this contract. It is implemented by
`cpu/backend.py`, `gpu/backend.py` (for arrays on a GPU, and for copies there of arrays in host memory) and
`reference_backend.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from .call import Call
from .reference import Gradients

Array = Any
"""An array where its backend has it: `numpy.ndarray` in host memory, `gpu.arrays.DeviceArray` on a GPU. In public
signatures, one of any library that the backend takes."""
Progress = Callable[[int, int], None]
"""Called with work tiles done and their number."""
Job = tuple[str, Callable[[], Any]]
"""The name of a kernel, and what compiles or loads it."""

HOST_TYPES = (type(None), np.ndarray, np.generic, bool, int, float, list, tuple)  # nothing of these lies on a GPU
INSTALL = 'pip install "flash_numba[cuda]" (CUDA 13, NVIDIA driver 580 or newer) or "flash_numba[cuda12]" (CUDA 12)'
NO_NUMBA_CUDA = f"numba-cuda isn't installed: {INSTALL}"


class BackendError(RuntimeError):
    """The GPU, or Numba's compiler, can't be used; the message says why, and what would help."""


class Support(NamedTuple):
    """Whether a backend takes a call: yes, or no and why."""

    reason: str | None = None
    error: type[Exception] = ValueError  # what a call that isn't taken raises

    @classmethod
    def yes(cls) -> "Support":
        return YES

    @classmethod
    def no(cls, reason: str, error: type[Exception] = ValueError) -> "Support":
        return cls(reason, error)

    def __bool__(self) -> bool:
        return self.reason is None

    def require(self) -> None:
        """Raise the error of a call that isn't taken."""
        if self.reason is not None:
            raise self.error(self.reason)


YES = Support()


class Remembered(Protocol):
    """What is kept of a call without its arrays, for other calls of the same form (`prepared.py`)."""

    def run(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """`(out, lse)` as the caller gets them."""


class PreparedCall(Protocol):
    """A call that was planned, whose kernel is loaded."""

    def run(self, progress: Progress | None = None) -> None:
        """Fill the call's `out` and `lse` in; on a GPU, queue the work that does."""

    def remembered(self, out: Array, lse: Array) -> Remembered | None:
        """What runs other calls of its form, with results like these; None where nothing is kept."""


class StreamState(Protocol):
    """What an `AttentionStream` keeps between its chunks."""

    def absorb(self, call: Call) -> bool:
        """Take in the keys of a call, which has an output in the accumulation format and no sinks.

        Returns whether `absorb_alike` takes further chunks of the same shapes, strides and dtypes.
        """

    def absorb_alike(self, k: Array, v: Array) -> None:
        """Take in the next keys, of the form of the chunk before."""

    def result(self, call: Call) -> None:
        """Fill `out` and `lse` in over all keys so far. The call has none of its own; its sinks count."""


class GradientCall(NamedTuple):
    """A checked call of the gradient, whose results are shaped as the caller's own arrays."""

    call: Call  # the forward's, with its `out`, and its `lse` in the accumulation format
    dout: Array  # (batch axes, H, S_q, D_v), of any format that `out` may have
    dlse: Array | None  # (batch axes, H, S_q), contiguous, in the accumulation format
    # as the caller gave them: dout, q, k, v, out, lse (all arrays), dlse, bias, mask, sinks and layout
    given: dict[str, Any]
    formats: dict[str, np.dtype]  # of each gradient that is asked for and exists: "q", "k", "v", "bias", "sinks"


class Backend(Protocol):
    """Where a call runs, and with what."""

    name: str
    array: type  # what `take` gives

    # arrays

    def take(self, x: Any) -> Array:
        """An array argument in the form that the checks take: q, k, v, bias, mask and out."""

    def numbers(self, x: Any) -> Any:
        """An argument whose values are needed on the host: lengths, offsets, and numbers for each head."""

    def own(self, x: Array) -> Array:
        """A copy."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """A new array, whose elements may be anything."""

    def copy(self, out: Array, source: Array) -> None:
        """Copy elements, converted to the format of `out`."""

    def give(self, array: Array) -> Any:
        """An array as the caller gets it, one of the library that its arguments are of."""

    def joined(self, **arrays: Any) -> "Backend":
        """The backend for arrays that come later than those it was chosen for. TypeError if they lie elsewhere."""

    # calls

    def supports(self, call: Call, gradient: bool = False) -> Support:
        """Whether it takes a call, or computes its gradient."""

    def remembers(self, kind: type) -> bool:
        """Whether what it prepares for q, k and v of a type may be kept for later calls."""

    def prepare(self, call: Call, repeated: bool = False) -> PreparedCall:
        """Plan a supported call, and load its kernel. repeated: it will be `remembered`."""

    def merge(self, outs: list[Array], lses: list[Array], sinks: np.ndarray | None, out: Array, lse: Array) -> None:
        """Put partial results together into `out` and `lse`; arrays have heads before rows, sinks are (1 or B, H)."""

    def gradient(self, gradient: GradientCall, progress: Progress | None = None) -> Gradients:
        """The gradients that are asked for, in their formats and the shapes of the arguments; None for the others."""

    def stream(self) -> StreamState:
        """The state before any key."""

    # without computing anything

    def facts(self, call: Call) -> dict[str, str]:
        """How it would do a call, and why, for `info`."""

    def compile_jobs(self, dtypes: list[np.dtype], head_dims: list[int], gradients: bool) -> list[Job]:
        """What `warmup` compiles for dtypes of q, and for head dimensions where each has a kernel of its own."""


class HostArrays:
    """The half of the contract that is about arrays, where they lie in host memory."""

    array: type = np.ndarray

    def take(self, x: Any) -> Any:
        return x

    def numbers(self, x: Any) -> Any:
        return x

    def own(self, x: Any) -> Any:
        return np.array(x)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return np.empty(shape, dtype)

    def copy(self, out: Any, source: Any) -> None:
        with np.errstate(all="ignore"):  # beyond a smaller format's range lies infinity, as in a kernel
            out[...] = source

    def give(self, array: Any) -> Any:
        return array

    def joined(self, **arrays: Any) -> Any:
        return self  # the checks say what isn't in host memory


def rounded(gradients: Gradients, formats: dict[str, np.dtype]) -> Gradients:
    """Gradients in host memory, each in its format; None for those that have none."""
    with np.errstate(all="ignore"):  # beyond a smaller format's range lies infinity, as in a kernel
        return Gradients(
            *(
                None if dx is None or name not in formats else np.asarray(dx, formats[name])
                for name, dx in zip(("q", "k", "v", "bias", "sinks"), gradients, strict=True)
            )
        )
