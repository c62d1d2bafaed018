"""How long a call takes, roughly: what decides whether it is watched for Ctrl-C.

In FLOPs, and what else takes the time of so many: at 100 GFLOP/s a thread, 100 are a nanosecond. Where heads have few
dimensions, or elements have to be gathered, the products are the smaller part. Measured on Zen 4 with AVX-512 on one
thread, 3000 x 3000 scores with 1, 8 and 64 dimensions, which agree within a tenth.
"""

import numpy as np

from ..call import Call, flops

SCORE = 30.0  # exponential, maximum and sum
DROPOUT = 45.0  # random bits
SOFTCAP = 30.0  # tanh
ALIBI = 10.0
OPERAND = 50.0  # bias or mask: 37 to 67 by format
GATHERED_OPERAND = 270.0  # whose columns aren't next to each other
EIGHT_BIT_ELEMENT = 10.0  # of k or v, whenever it is converted
GATHERED_ELEMENT = 200.0  # of k or v with strided columns or of the other byte order; 16-bit ones cost nothing


def work(call: Call, readings: float) -> float:
    """What a call takes of a thread's time, in FLOPs. readings: how often keys are read, over all heads."""
    keys = min(call.k.shape[-2], call.left + call.right + 1)
    score = SCORE + DROPOUT * (call.dropout > 0) + SOFTCAP * (call.softcap > 0) + ALIBI * (call.slopes is not None)
    score += sum(OPERAND if in_order(operand) else GATHERED_OPERAND for operand in call.operands)
    key = sum(x.shape[-1] * element(x) for x in (call.k, call.v))
    return flops(call) + score * keys * call.lse.size + key * keys * readings


def element(x: np.ndarray) -> float:
    if not in_order(x):
        return GATHERED_ELEMENT
    return EIGHT_BIT_ELEMENT if x.itemsize == 1 else 0.0


def in_order(x: np.ndarray) -> bool:
    """Whether a row's elements can be read by whole registers. (One that repeats is read once.)"""
    return x.dtype.isnative and x.strides[-1] in (0, x.itemsize)
