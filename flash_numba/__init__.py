"""Exact attention that streams, from plain NumPy arrays: `attention` and its relatives."""

from . import reference
from .diagnosis import info, warmup
from .gradient import Gradients, attention_grad, attention_varlen_grad
from .interface import attention, attention_partial, attention_varlen, merge
from .stream import AttentionStream

__version__ = "0.1.0"
__all__ = [
    "AttentionStream",
    "Gradients",
    "attention",
    "attention_grad",
    "attention_partial",
    "attention_varlen",
    "attention_varlen_grad",
    "info",
    "merge",
    "reference",
    "warmup",
]
