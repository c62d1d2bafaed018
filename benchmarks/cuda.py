"""Whether the CUDA rows can run here, what runs in them, and what was last recorded where they can't."""

import importlib.util
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "gpu_figures.json"  # written by `python -m benchmarks.gpu`, kept in the repository
NOT_MEASURED = "not measured"


@cache
def why_no_cuda() -> str | None:
    """Why CUDA can't be measured here, as "word: reason", or None if it can."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "no GPU: numba-cuda isn't installed"
    from flash_numba.backend import BackendError
    from flash_numba.gpu import driver

    if driver.SIMULATED:
        return "no GPU: Numba simulates one"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            driver.usable(driver.find(), 0)
        except BackendError as error:
            return f"no GPU: {error}"
    return None


def gpu_name() -> str | None:
    """The GPU that the CUDA rows run on, if there is one."""
    if why_no_cuda():
        return None
    from flash_numba.gpu import driver

    return str(driver.find().gpu(0))


def recorded(file: Path = RECORDED) -> dict[str, Any] | None:
    """The figures last recorded on a GPU, as `benchmarks.gpu` writes them; None if there are none."""
    return json.loads(file.read_text()) if file.exists() else None


def origin(figures: dict[str, Any] | None) -> str:
    """Where and when figures were taken, in words."""
    if figures is None:
        return f"GPU figures: {NOT_MEASURED} yet"
    return f"GPU figures: recorded on {figures['device']}, {figures['date']}, commit {figures['commit']}"


def row_name(shape: str, dtype: str) -> str:
    return f"{shape} {dtype}"


def recorded_seconds(figures: dict[str, Any] | None, shape: str, dtype: str) -> float | None:
    """Of one call, as the table's CUDA row would measure it."""
    return None if figures is None else figures["rows"].get(row_name(shape, dtype))


class Scratch:
    """Memory between the thread blocks of a launch, the same for every launch: they come one after the other."""

    def __init__(self, gpus: Any) -> None:
        self._gpus = gpus
        self._kept: tuple[int, Any] | None = None

    def bytes(self, count: int, device: int, stream: int) -> tuple[int, Any]:
        self._kept = self._kept or self._gpus.allocate(count, device)
        return self._kept


def resident(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **rules: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A call on copies of arrays that stay on the first GPU: what queues it, and what waits for the end."""
    from flash_numba.addresses import address_of
    from flash_numba.checked import checked_call
    from flash_numba.cpu.backend import CPU
    from flash_numba.gpu import dlpack, driver, launch
    from flash_numba.gpu.backend import Transfer

    gpus, stream = driver.find(), dlpack.LEGACY_STREAM
    call, _ = checked_call(q, k, v, CPU(), **rules)
    own = Transfer(gpus)
    there = own.copies(call)
    prepared = launch.prepare(there, gpus, own.device, stream)
    addresses = tuple(map(address_of, (there.q, there.k, there.v, there.out, there.lse)))
    scratch = Scratch(gpus)

    def start(alive: object = there) -> None:
        launch.start(prepared, addresses, scratch, stream)

    return start, lambda: gpus.synchronize(stream)
