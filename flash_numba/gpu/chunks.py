"""What an `AttentionStream` keeps on a GPU: the result over the keys so far, each chunk's merged with it."""

from typing import Any

from ..call import Call
from .arrays import DeviceArray


class Chunks:
    """The output in the accumulation format and the log-sum-exp, sinks left out; None before the first chunk."""

    def __init__(self, place: Any, heads_second: bool) -> None:
        self.place = place  # q's
        self._heads_second = heads_second
        self.out: DeviceArray | None = None
        self.lse: DeviceArray | None = None

    def _heads_first(self, x: DeviceArray) -> DeviceArray:
        return x.swapaxes(-3, -2) if self._heads_second else x

    def check(self, place: Any) -> None:
        """Raises TypeError if arrays that have this place can't follow those before."""
        theirs, own = getattr(place, "library", None), self.place.library
        if type(theirs) is not type(own) or place.device != self.place.device:
            raise TypeError("k and v must lie on q's GPU and be arrays of q's library")

    def absorb(self, call: Call, out: DeviceArray) -> None:
        """Take in a call's keys; `out` is its output as the caller of a partial result would get it."""
        place = self.place
        place.run(call)
        lse = call.lse[(0,) * (4 - out.ndim)]
        if self.out is not None:
            outs, lses = [self._heads_first(self.out), self._heads_first(out)], [self.lse, lse]
            out, lse = place.empty(out.shape, out.dtype), place.empty(lse.shape, lse.dtype)
            place.merge(outs, lses, None, self._heads_first(out), lse)
        self.out, self.lse = out, lse

    def result(self, call: Call, out: DeviceArray) -> tuple[Any, Any]:
        """`(out, lse)` so far. `call` is one without keys, whose sinks count and whose arrays are written to."""
        place = self.place
        lse: Any = call.lse[(0,) * (4 - out.ndim)]
        if self.out is None:
            place.run(call)
        else:
            place.merge([self._heads_first(self.out)], [self.lse], call.sinks, self._heads_first(out), lse)
        return place.give(out), place.give(lse)
