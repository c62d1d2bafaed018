"""The one parallel function: it calls a kernel on every thread. It serves all kernels, as it takes their addresses."""

from numba import prange

from .ir.threads import call_worker


def drive(worker, problem, parameters, scratch, scratch_bytes, threads):
    """Call the worker on every thread, each with scratch of its own."""
    for t in prange(threads):
        call_worker(worker, problem, parameters, scratch + t * scratch_bytes)
