"""Whether the CUDA rows can run here."""

import importlib.util
import warnings
from functools import cache


@cache
def why_no_cuda() -> str | None:
    """Why CUDA can't be measured here, as "word: reason" (the word stands in the table), or None if it can."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "no GPU: numba-cuda isn't installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from numba import cuda

        if not cuda.is_available():
            return "no GPU: the CUDA driver finds no device"
    from flash_numba.interface import BACKENDS

    return None if "cuda" in BACKENDS else "no backend: this version of flash_numba has none for CUDA"
