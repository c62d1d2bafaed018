"""Whether a CUDA row can run here."""

import importlib.util
import warnings
from functools import cache


@cache
def why_no_gpu() -> str | None:
    """Why Numba can reach no GPU here, in a line, or None where it can."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "no GPU: numba-cuda isn't installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from numba import cuda

        return None if cuda.is_available() else "no GPU: the CUDA driver finds no device"
