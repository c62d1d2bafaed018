"""Exact attention in whole-matrix NumPy: the oracle that every backend is tested against. Readable beats fast.

It imports nothing from the kernels' formulas (`recurrence.py`, `scores.py`, `dropout.py` one level up), so a mistake
there can't hide in both, and it uses natural logarithms throughout where they use base 2.

* `online`: `one_shot_*`, `online_*`, `kv_outer_attention` and `merge` show that the streaming softmax is exact. They
  compute in the dtype of their input (16-bit formats round after every step, only sums and products accumulate in
  float32, as eager code does), so an online result can be compared with a one-shot result of the same precision.
* `full`: `attention`, `attention_varlen` and `merge_partials` have every feature of the public functions, and compute
  in float64.
* `gradient`: `attention_grad` and `attention_varlen_grad`, likewise.
* `dropout`: the random words.
"""

from .dropout import philox
from .full import attention, attention_varlen, merge_partials
from .gradient import Gradients, attention_grad, attention_varlen_grad
from .online import (
    kv_outer_attention,
    merge,
    one_shot_attention,
    one_shot_softmax,
    online_attention,
    online_softmax,
    softmax_stats,
)

__all__ = [
    "Gradients",
    "attention",
    "attention_grad",
    "attention_varlen",
    "attention_varlen_grad",
    "kv_outer_attention",
    "merge",
    "merge_partials",
    "one_shot_attention",
    "one_shot_softmax",
    "online_attention",
    "online_softmax",
    "philox",
    "softmax_stats",
]
