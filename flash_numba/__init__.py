"""Exact attention that streams, from plain NumPy arrays: `attention` and its relatives."""

from . import reference
from .diagnosis import info, warmup
from .interface import attention, attention_partial, attention_varlen, merge
from .stream import AttentionStream

__version__ = "0.1.0"
__all__ = [
    "AttentionStream",
    "attention",
    "attention_partial",
    "attention_varlen",
    "info",
    "merge",
    "reference",
    "warmup",
]
