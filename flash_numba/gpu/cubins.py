"""Machine code of kernels, from disk where another process has compiled them (`disk_cache.py`).

Numba's own cache misses for kernels that are made by a function or hold intrinsics. Here a cubin lies under the digest
of all code that it is made of (`code_digest.py`), the versions, the compute capability and the specialisation's name.
"""

import sys
from typing import Any

import numpy as np

from .. import code_digest, disk_cache
from ..backend import INSTALL, BackendError
from .compile import ENTRY, Kernel, architecture, assemble, to_ptx
from .driver import version_of

COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink")
COMPILERS_12 = ("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12")  # as they were packaged for CUDA 12


def digest(module: str) -> str:
    """Of the code that a module's kernels are compiled from, and of everything else that changes the machine code."""
    facts = [*map(version_of, COMPILERS + COMPILERS_12), np.__version__, sys.version_info[:2]]
    return code_digest.of_code(module, facts)


def machine_code(kernel: Kernel, cc: tuple[int, int]) -> tuple[bytes, str]:
    """The kernel for a compute capability, and what it is called there."""
    of = digest(kernel.function.__module__)
    name = disk_cache.file_name(f"{kernel.name}_{architecture(cc)}", of, kernel.name, cc)
    cubin = disk_cache.find(name)
    if cubin is not None:
        disk_cache.log.append(f"loaded {name}")
        return cubin, ENTRY
    cubin = to_cubin(compiled(kernel, cc), cc)
    disk_cache.keep(name, cubin)
    return cubin, ENTRY


def compiled(kernel: Kernel, cc: tuple[int, int]) -> str:
    """The kernel's PTX. BackendError where numba-cuda came without NVIDIA's compiler."""
    try:
        return to_ptx(kernel, cc)
    except RuntimeError as error:
        if type(error).__name__ != "DynamicLibNotFoundError":  # cuda-pathfinder's
            raise
        raise BackendError(f"numba-cuda has no CUDA compiler: {INSTALL} ({str(error).partition(chr(10))[0]})") from None


def to_cubin(ptx: str, cc: tuple[int, int]) -> bytes:
    """Assemble by what there is: nvJitLink, which the extras bring along, or ptxas.

    Not by the driver, which refuses PTX of a CUDA that is newer than itself, while it runs machine code from any of its
    major version.
    """
    try:
        return link(ptx, cc)
    except RuntimeError as error:
        by_link = " ".join(str(error).split())
    try:
        return assemble(ptx, cc).cubin
    except RuntimeError as error:
        by_ptxas = " ".join(str(error).split())
    raise BackendError(
        "nothing assembles PTX: pip install nvidia-nvjitlink (CUDA 13) or nvidia-nvjitlink-cu12, no older than NVVM "
        f"({by_link}; {by_ptxas})"
    )


def link(ptx: str, cc: tuple[int, int]) -> bytes:
    """By nvJitLink. RuntimeError where it is missing or refuses."""
    try:
        from cuda.bindings import nvjitlink
    except ImportError as error:
        raise RuntimeError(f"no cuda-bindings: {error}") from None
    code = ptx.encode()
    handle = None
    try:
        handle = nvjitlink.create(1, [f"-arch={architecture(cc)}"])
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except Exception as error:  # its own, or cuda-pathfinder's where the library is missing
        said = log_of(nvjitlink, handle) if handle is not None else ""
        raise RuntimeError(f"nvJitLink: {str(error).partition(chr(10))[0]} {said}") from None
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)


def log_of(nvjitlink: Any, handle: int) -> str:
    text = bytearray(nvjitlink.get_error_log_size(handle))
    nvjitlink.get_error_log(handle, text)
    return text.decode(errors="replace").strip("\0 \n")
