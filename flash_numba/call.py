"""A checked call, as the front hands it to a backend."""

from dataclasses import dataclass, field

import numpy as np

from .geometry import UNLIMITED


@dataclass(frozen=True)
class Call:
    """A checked call. Arrays are (batch axes, heads, rows, columns) views; B is the product of the batch axes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray | None
    lse: np.ndarray
    scale: float
    left: int = UNLIMITED
    right: int = UNLIMITED
    softcap: float = 0.0
    top_left: bool = False
    operands: list[np.ndarray] = field(default_factory=list)  # bias and mask, at most two, float ones first
    slopes: np.ndarray | None = None  # (B, H) float64, like sinks
    sinks: np.ndarray | None = None
    k_scales: np.ndarray | None = None  # (B, H_kv) float64
    v_scales: np.ndarray | None = None
    q_lengths: np.ndarray | None = None  # (B,) int64, like the next two
    kv_lengths: np.ndarray | None = None
    q_offset: np.ndarray | None = None
    counts_from_offset: bool = True  # whether dropout counts rows from q_offset, as from one that the caller gave
    k_offset: int = 0
    dropout: float = 0.0
    seed: int = 0
    # packed sequences: arrays have one batch element, rows and keys lie between these offsets, (sequences + 1,) int64
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    threads: int | None = None  # of the CPU, at most


@dataclass(frozen=True)
class GradCall:
    """A checked call of the gradient. Arrays are views like a `Call`'s; None is a gradient that isn't asked for.

    The gradients are all 0 at first, in the accumulation format, the one of `call.lse`; what they are copied and summed
    to afterwards is the front's affair (`gradient.py`).
    """

    call: Call  # the forward's, its `out` and `lse` holding what came of it
    dout: np.ndarray  # (batch axes, H, S_q, D_v), of any format that `out` may have
    dlse: np.ndarray | None  # (batch axes, H, S_q), contiguous, in the accumulation format
    dq: np.ndarray | None  # (batch axes, H, S_q, D)
    dk: np.ndarray | None  # (batch axes, the least common multiple of k's and v's head counts, S_kv, D)
    dv: np.ndarray | None  # (batch axes, likewise, S_kv, D_v)
    dbias: np.ndarray | None  # of `call.operands[0]`: its axes, those that it repeats along being of length 1
    dsinks: np.ndarray | None  # (B, H)


def flops(call: Call) -> float:
    """About what a call computes, for deciding on threads: the keys within the window of every row."""
    keys = min(call.k.shape[-2], call.left + call.right + 1)
    return 2.0 * (call.q.shape[-1] + call.v.shape[-1]) * keys * call.lse.size
