"""Exact attention that streams, from plain NumPy arrays: `attention` and its relatives."""

from . import reference
from .interface import attention

__version__ = "0.1.0"
__all__ = ["attention", "reference"]
