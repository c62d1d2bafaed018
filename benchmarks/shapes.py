"""The shapes that tests and benchmarks share, which `flash-numba bench` has."""

from flash_numba.bench.shapes import FULL

__all__ = ["FULL"]
