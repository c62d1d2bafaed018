"""AttentionStream: attention to keys and values that arrive in chunks."""

from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from .addresses import address
from .interface import CAUSAL, LAYOUTS, checked_call, finished, run
from .places import HOST, choose
from .prepared import following_keys


class AttentionStream:
    """Attention to keys and values absorbed chunk by chunk, with a state of the size of the output.

    Exact for any cut of the keys into chunks; the chunks may be views of a memory-mapped file larger than memory. Only
    the running maximum, sum and output of each row are kept (`recurrence.py`), so memory doesn't depend on how many
    keys there are.

    Args:
        q: Queries, as for `attention`; all chunks lie where they do, in host memory or on a GPU.
        q_offset: Position of row 0 in the whole sequence, one integer or (B,).
        kv_total: How many keys there will be, instead of `q_offset`: then row i stands at i + kv_total - S_q. (Dropout
            counts rows from `q_offset`, and from 0 with `kv_total`, as `attention` does.)
            A causal mask, a window and ALiBi need one of the two.

    The other arguments are `attention`'s.

    Raises:
        ValueError, TypeError: as `attention`, and where a position is needed but not given.

    >>> stream = AttentionStream(q, causal=True, kv_total=k.shape[-2])
    >>> for start in range(0, k.shape[-2], 4096):
    ...     stream.absorb(k[..., start : start + 4096, :], v[..., start : start + 4096, :])
    >>> out, lse = stream.result()
    """

    def __init__(
        self,
        q: Any,
        *,
        q_offset: Any = None,
        kv_total: int | None = None,
        causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        dropout: float = 0.0,
        seed: int | np.random.Generator | None = None,
        training: bool = True,
        k_scale: Any = None,
        v_scale: Any = None,
        layout: str = "bhsd",
    ) -> None:
        check.check_choice("layout", layout, LAYOUTS)
        causal = bool(causal) if isinstance(causal, np.bool_) else causal
        check.check_choice("causal", causal, CAUSAL)
        if q_offset is not None and kv_total is not None:
            raise ValueError(f"q_offset and kv_total exclude each other, got {q_offset!r} and {kv_total!r}")
        if q_offset is None and kv_total is None and (causal or window is not None or alibi_slopes is not None):
            raise ValueError(
                f"a stream needs q_offset or kv_total to know positions for causal={causal!r}, window={window!r}, "
                f"alibi_slopes={'None' if alibi_slopes is None else 'given'}; both are None"
            )
        rate, seed = check.dropout_rate(dropout, seed, training)  # a generator's seed is drawn once for all chunks
        place = choose("auto", q=q)
        self._q = place.own(check.operand("q", place.take(q)))  # the caller may reuse the array between chunks
        self._chunks: Any = None  # on a GPU
        if place is not HOST:
            from .gpu.chunks import Chunks

            self._chunks = Chunks(place, layout == "bshd" and self._q.ndim > 2)
        if kv_total is not None:
            queries = check.heads_view(self._q, layout == "bshd").shape[-2]
            kv_total = check.key_count("kv_total", kv_total)
            q_offset = 0 if causal == "top-left" else kv_total - queries
        self._rules: dict[str, Any] = {
            "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "sinks": sinks, "dropout": rate, "seed": seed, "training": training, "k_scale": k_scale,
            "v_scale": v_scale, "layout": layout, "q_offset": q_offset,
        }  # fmt: skip
        self._layout = layout
        self._counts_from_offset = kv_total is None
        self._kv_total = kv_total
        self._keys = 0
        self._state: np.ndarray | None = None
        self._last: tuple[np.ndarray, np.ndarray] | None = None  # no keys of the last chunk: its shape and dtypes
        self._interrupted = False
        self._form: tuple | None = None  # of the last chunk, how it was run, and its call
        self._started: Any = None
        self._call: Any = None
        nothing = self._q[..., :0, :, :] if layout == "bshd" and self._q.ndim > 2 else self._q[..., :0, :]
        # errors now rather than at the first chunk, those apart that depend on its heads
        checked_call(self._q, nothing, nothing, **self._rules | {"k_scale": None, "v_scale": None}, place=place)

    @property
    def keys(self) -> int:
        """How many keys have been absorbed."""
        return self._keys

    def absorb(self, k: Any, v: Any, *, bias: Any = None, mask: Any = None) -> "AttentionStream":
        """Take the next keys and values in; `bias` and `mask` are for these keys. Returns the stream.

        Raises:
            ValueError, TypeError: as `attention`; a value dimension other than the chunks' before, or more keys than
                `kv_total`.
            RuntimeError: an absorb before this one was interrupted, which leaves the state half brought forward.
        """
        self._check_state()
        if self._chunks is not None:
            return self._absorb_on_gpu(k, v, bias, mask)
        form = None
        if bias is mask is None and type(k) is type(v) is np.ndarray:
            form = k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype
            if form == self._form:
                self._absorb_alike(k, v)
                return self
        call, _ = checked_call(self._q, k, v, bias=bias, mask=mask, k_offset=self._keys, **self._rules)
        self._check_total(call.k.shape[-2])
        if self._last is not None:
            self._check_value_dim(self._last[1].shape[-1], call.v.shape[-1])
        if call.lse.size:
            from .cpu import launch

            if self._state is None:
                self._state = launch.new_state(call)
            call = replace(call, out=None, counts_from_offset=self._counts_from_offset)
            self._interrupted = True
            self._form, self._started, self._call = form, run(call, state=self._state), call
            self._interrupted = False
        k, v = np.asarray(k), np.asarray(v)
        axis = -3 if self._layout == "bshd" and k.ndim > 2 else -2
        self._last = tuple(np.empty_like(np.take(x, [], axis=axis)) for x in (k, v))  # type: ignore[assignment]
        self._keys += call.k.shape[-2]
        return self

    def _absorb_on_gpu(self, k: Any, v: Any, bias: Any, mask: Any) -> "AttentionStream":
        place = choose("auto", k=k, v=v, bias=bias, mask=mask)
        self._chunks.check(place)
        rules = self._rules | {"sinks": None}  # added once, at the end
        call, out = checked_call(
            self._q, k, v, bias=bias, mask=mask, k_offset=self._keys, partial=True, place=place, **rules
        )
        self._check_total(call.k.shape[-2])
        if self._chunks.out is not None:
            self._check_value_dim(self._chunks.out.shape[-1], call.v.shape[-1])
        self._chunks.absorb(replace(call, counts_from_offset=self._counts_from_offset), out)
        self._keys += call.k.shape[-2]
        return self

    def _check_value_dim(self, before: int, given: int) -> None:
        if before != given:
            raise ValueError(f"v must have the value dimension of the chunks before, {before}, got {given}")

    def _absorb_alike(self, k: np.ndarray, v: np.ndarray) -> None:
        """A chunk of the form of the last one: what was checked and planned for that holds, some keys further on."""
        count = self._call.k.shape[-2]
        self._check_total(count)
        start, launch, tables = self._started
        launch = following_keys(launch, tables, count)
        self._started = start, launch, tables
        self._interrupted = True
        addresses = address(self._call.q), address(k), address(v), 0, address(self._call.lse)
        start(launch, addresses, (self._call, k, v, tables, self._state))
        self._interrupted = False
        self._keys += count

    def _check_total(self, count: int) -> None:
        if self._kv_total is not None and self._keys + count > self._kv_total:
            raise ValueError(f"kv_total={self._kv_total} keys were announced, got {count} more after {self._keys}")

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """`(out, lse)` over the keys absorbed so far, as `attention` returns them. The stream may go on afterwards."""
        self._check_state()
        rules = self._rules
        if self._chunks is not None:
            return self._result_on_gpu()
        if self._last is None:  # no keys so far, nor value dimension: q's stands in
            k = v = self._q[..., :0, :, :] if self._layout == "bshd" and self._q.ndim > 2 else self._q[..., :0, :]
            rules = rules | {"k_scale": None, "v_scale": None}
        else:
            k, v = self._last
        call, result = checked_call(self._q, k, v, k_offset=self._keys, **rules)
        run(call, state=self._state)
        return finished(call, result, self._layout)

    def _result_on_gpu(self) -> tuple[Any, Any]:
        second = self._layout == "bshd" and self._q.ndim > 2
        k = self._q[..., :0, :, :] if second else self._q[..., :0, :]  # no keys
        place, rules = self._chunks.place, self._rules | {"k_scale": None, "v_scale": None}
        v = k
        if self._chunks.out is not None:
            v = np.broadcast_to(k[..., :1], (*k.shape[:-1], self._chunks.out.shape[-1]))
        call, out = checked_call(self._q, k, v, k_offset=self._keys, place=place, **rules)
        return self._chunks.result(call, out)

    def _check_state(self) -> None:
        if self._interrupted:
            raise RuntimeError("the stream's last absorb was interrupted, or still runs in another thread")
