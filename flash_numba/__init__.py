"""Exact attention that streams, from plain NumPy arrays: `attention` and its relatives."""

from . import reference
from ._version import __version__ as __version__
from .diagnosis import info, warmup
from .gradient import Gradients, attention_grad, attention_varlen_grad
from .interface import attention, attention_partial, attention_varlen, merge
from .stream import AttentionStream

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
