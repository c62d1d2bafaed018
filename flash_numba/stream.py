"""AttentionStream: attention to keys and values that arrive in chunks."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from . import arguments as check
from .backend import Array
from .backends import choose
from .checked import checked_call, finished
from .prepared import form_of_chunk
from .rules import CAUSAL, DEFAULTS, LAYOUTS


class AttentionStream:
    """Attention to keys and values absorbed chunk by chunk, with a state of the size of the output.

    Exact for any cut of the keys into chunks; the chunks may be views of a memory-mapped file larger than memory. Only
    the running maximum, sum and output of each row are kept (`recurrence.py`), so memory doesn't depend on how many
    keys there are.

    A stream in host memory may be copied (`copy.copy`, `copy.deepcopy`) or pickled: the copy has all keys so far, and
    goes on independently. A pickled one goes on where the same version runs on a CPU with registers as wide.

    Args:
        q: Queries, (..., H, S_q, D), of any dtype that `attention` takes; they are copied. All chunks lie where they
            do, in host memory or on a GPU.
        q_offset: Position of row 0 in the whole sequence, one integer or (B,).
        kv_total: How many keys there will be, instead of `q_offset`: then row i stands at i + kv_total - S_q. (Dropout
            counts rows from `q_offset`, and from 0 with `kv_total`, as `attention` does.)
            A causal mask, a window and ALiBi need one of the two.

    The other arguments are `attention`'s.

    Raises:
        ValueError: as `attention`; `q_offset` and `kv_total` together, or neither where a position is needed.
        TypeError: as `attention`; a stream on a GPU that is copied or pickled.
        RuntimeError: q lies on a GPU that can't be used.

    Formula: `recurrence.py`, as in Dao 2023 (arXiv:2307.08691), section 3.1, a chunk being a block of keys.

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
        self._backend = choose("auto", q=q)
        # a copy, as the caller may reuse the array between chunks
        self._q = self._backend.own(check.attention_input("q", self._backend.take(q)))
        if kv_total is not None:
            queries = check.heads_view(self._q, layout == "bshd").shape[-2]
            kv_total = check.key_count("kv_total", kv_total)
            q_offset = 0 if causal == "top-left" else kv_total - queries
        self._rules: dict[str, Any] = {
            "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "sinks": sinks, "dropout": rate, "seed": seed, "training": training, "k_scale": k_scale,
            "v_scale": v_scale, "layout": layout, "q_offset": q_offset,
        }  # fmt: skip
        self._counts_from_offset = kv_total is None
        self._kv_total = kv_total
        self._keys = 0
        self._value_dim: int | None = None  # of the chunks so far
        self._state = self._backend.stream()
        self._form: tuple | None = None  # of the last chunk, if others like it can be absorbed in the same way
        self._count = 0  # its keys
        self._call_without_keys()  # errors now rather than at the first chunk

    def __copy__(self) -> "AttentionStream":
        return copy.deepcopy(self)  # its arrays are written to in place

    def __getstate__(self) -> dict[str, Any]:
        if self._backend.array is not np.ndarray:
            raise TypeError("a stream on a GPU can't be copied or pickled; take its result(), or start another stream")
        return self.__dict__ | {"_form": None, "_count": 0}

    def __repr__(self) -> str:
        keys = f"{self._keys}" if self._kv_total is None else f"{self._keys} of {self._kv_total}"
        rules = [f"{name}={shown(x)}" for name, x in self._rules.items() if not is_default(name, x)]
        if self._kv_total is not None:  # which q_offset was made of
            rules = [rule for rule in rules if not rule.startswith("q_offset=")]
        return ", ".join([f"<AttentionStream: q {self._q.dtype} {self._q.shape}, {keys} keys absorbed", *rules]) + ">"

    @property
    def keys(self) -> int:
        """How many keys have been absorbed."""
        return self._keys

    def absorb(self, k: Any, v: Any, *, bias: Any = None, mask: Any = None) -> "AttentionStream":
        """Take the next keys and values in. Returns the stream.

        Args:
            k: Keys, (..., H_kv, chunk, D), of q's dtype or 8 bits, where q lies; a chunk may have any number of them.
            v: Their values, (..., H_kv, chunk, D_v).
            bias: For these keys, broadcastable to (..., H, S_q, chunk), as `attention` takes it.
            mask: Likewise.

        Raises:
            ValueError: as `attention`; a value dimension other than the chunks' before, or more keys than `kv_total`.
            TypeError: as `attention`; arrays that don't lie where q does.
            RuntimeError: an absorb before this one was interrupted, which leaves the saved (m, l, O) half updated.
        """
        form = form_of_chunk(k, v, bias, mask)
        if form is not None and form == self._form:
            # what was checked and planned for the last chunk holds, some keys further on
            self._check_total(self._count)
            self._state.absorb_alike(k, v)
            self._keys += self._count
            return self
        backend = self._backend.joined(k=k, v=v, bias=bias, mask=mask)
        rules = self._rules | {"sinks": None}  # added once, at the end
        call, _ = checked_call(
            self._q, k, v, backend, bias=bias, mask=mask, k_offset=self._keys, partial=True, **rules
        )  # fmt: skip
        count, value_dim = call.v.shape[-2:]
        self._check_total(count)
        if self._value_dim not in (None, value_dim):
            raise ValueError(
                f"v must have the value dimension of the chunks before, {self._value_dim}, got {value_dim}"
            )
        call = replace(call, counts_from_offset=self._counts_from_offset)
        backend.supports(call).require()
        alike = self._state.absorb(call)
        self._form, self._count = form if alike else None, count
        self._value_dim = value_dim
        self._keys += count
        return self

    def result(self) -> tuple[Array, Array]:
        """Attention to the keys absorbed so far. The stream may go on afterwards.

        Returns:
            `(out, lse)` as `attention` returns them: (..., H, S_q, D_v) in q's dtype, and (..., H, S_q). Before the
            first chunk D_v is D, and every row is one that sees no key.

        Raises:
            RuntimeError: an absorb was interrupted.
        """
        call, result = self._call_without_keys()
        self._state.result(call)
        return finished(call, result, self._rules["layout"], self._backend)

    def _call_without_keys(self) -> tuple[Any, Array]:
        """A call with the stream's rules, without those that depend on a chunk's heads, and the array to return."""
        second = self._rules["layout"] == "bshd" and self._q.ndim > 2
        k = v = self._q[..., :0, :, :] if second else self._q[..., :0, :]
        if self._value_dim is not None:
            v = np.broadcast_to(k[..., :1], (*k.shape[:-1], self._value_dim))
        rules = self._rules | {"k_scale": None, "v_scale": None}
        return checked_call(self._q, k, v, self._backend, k_offset=self._keys, **rules)

    def _check_total(self, count: int) -> None:
        if self._kv_total is not None and self._keys + count > self._kv_total:
            raise ValueError(f"kv_total={self._kv_total} keys were announced, got {count} more after {self._keys}")


def is_default(name: str, value: Any) -> bool:
    """Whether a stream's rule changes nothing."""
    default = DEFAULTS[name]
    return value is default or (name == "seed" and value == 0) or (type(value) is type(default) and value == default)


def shown(value: Any) -> str:
    """A rule's value in a line: arrays by their shapes."""
    return repr(value) if isinstance(value, (bool, int, float, str, tuple)) else f"array of shape {np.shape(value)}"
