"""The reference (`reference/`) as a backend: whole-matrix NumPy in float64, for checking."""

from typing import Any, NamedTuple

import numpy as np

from . import reference
from .backend import YES, GradientCall, HostArrays, Job, Progress, Support, rounded
from .call import Call
from .chunks import Chunks
from .reference import Gradients


class ReferenceBackend(HostArrays):
    """Every call in float64 with all scores in memory, rounded once."""

    name = "reference"

    def supports(self, call: Call, gradient: bool = False) -> Support:
        return YES

    def remembers(self, kind: type) -> bool:
        return False

    def prepare(self, call: Call, repeated: bool = False) -> "Prepared":
        return Prepared(call)

    def merge(self, outs: list, lses: list, sinks: np.ndarray | None, out: np.ndarray, lse: np.ndarray) -> None:
        if sinks is not None and len(sinks) > 1:
            for b, own in zip(np.ndindex(out.shape[:-3]), sinks, strict=True):
                self.merge([x[b] for x in outs], [x[b] for x in lses], own[None], out[b], lse[b])
            return
        exact, exact_lse = reference.merge_partials(outs, lses, None if sinks is None else sinks[0])
        self.copy(out, exact)
        self.copy(lse, exact_lse)

    def gradient(self, gradient: GradientCall, progress: Progress | None = None) -> Gradients:
        call, given = gradient.call, dict(gradient.given)
        arrays: Any = [given.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")]
        rules = rules_of(call) | given
        offsets: Any = [call.cu_seqlens_q, call.cu_seqlens_k]
        if call.cu_seqlens_q is None:
            return rounded(reference.attention_grad(*arrays, **rules), gradient.formats)
        return rounded(
            reference.attention_varlen_grad(*arrays, *offsets, **packed(rules)),
            gradient.formats,
        )

    def stream(self) -> Chunks:
        return Chunks(self)

    def facts(self, call: Call) -> dict[str, str]:
        scores = call.lse.size * call.k.shape[-2]
        return {
            "kernel": "none: whole-matrix NumPy",
            "accumulates in": "float64",
            "scratch": f"{8 * scores / 1024:.0f} KiB for each matrix of scores",
        }

    def compile_jobs(self, dtypes: list[np.dtype], head_dims: list[int], gradients: bool) -> list[Job]:
        return []


class Prepared(NamedTuple):
    """A call, which needs no preparation."""

    call: Call

    def run(self, progress: Progress | None = None) -> None:
        call = self.call
        assert call.out is not None
        if call.cu_seqlens_q is None:
            out, lse = reference.attention(call.q, call.k, call.v, return_lse=True, **rules_of(call))
        else:
            q, k, v = (x[0].swapaxes(0, 1) for x in (call.q, call.k, call.v))
            out, lse = reference.attention_varlen(
                q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, return_lse=True, **packed(rules_of(call))
            )
            out, lse = out.swapaxes(0, 1)[None], lse[None]
        with np.errstate(all="ignore"):
            call.out[...], call.lse[...] = out, lse

    def remembered(self, out: np.ndarray, lse: np.ndarray) -> None:
        return None


def rules_of(call: Call) -> dict[str, Any]:
    """A call's rules as the reference takes them."""
    return {
        "causal": "top-left" if call.top_left else False,  # else it is in the window
        "window": (call.left, call.right),
        "scale": call.scale,
        "softcap": call.softcap or None,
        "bias": call.operands[0] if call.operands else None,
        "mask": call.operands[1] if len(call.operands) > 1 else None,
        "alibi_slopes": call.slopes,
        "sinks": call.sinks,
        "q_lengths": call.q_lengths,
        "kv_lengths": call.kv_lengths,
        "q_offset": call.q_offset,
        "k_offset": call.k_offset,
        "dropout": call.dropout,
        "seed": call.seed,
        "k_scale": call.k_scales,
        "v_scale": call.v_scales,
        "_counts_from_offset": call.counts_from_offset,
    }


def packed(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules as calls on packed sequences take them."""
    return {name: value for name, value in rules.items() if name != "layout"}
