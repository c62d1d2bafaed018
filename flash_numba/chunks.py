"""A stream's state as a result over the keys so far, with which each chunk's is merged: for any backend that merges."""

from typing import Any

from .backend import Array
from .call import Call


class Chunks:
    """The output in the accumulation format and the log-sum-exp, sinks left out; None before the first chunk."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._out: Array | None = None  # (batch axes, heads, rows, columns)
        self._lse: Array | None = None

    def absorb(self, call: Call) -> bool:
        backend = self._backend
        backend.prepare(call).run()
        out, lse = call.out, call.lse
        if self._out is not None:
            outs, lses = [self._out, out], [self._lse, lse]
            out, lse = backend.empty(out.shape, out.dtype), backend.empty(lse.shape, lse.dtype)  # type: ignore
            backend.merge(outs, lses, None, out, lse)
        self._out, self._lse = out, lse
        return False

    def absorb_alike(self, k: Array, v: Array) -> None:
        raise NotImplementedError  # `absorb` never says that it may be called

    def result(self, call: Call) -> None:
        backend = self._backend
        if self._out is None:
            backend.prepare(call).run()
        else:
            backend.merge([self._out], [self._lse], call.sinks, call.out, call.lse)
