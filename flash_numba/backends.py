"""Which backend a call gets: by its name, or by where its arrays lie."""

from typing import Any

from .backend import HOST_TYPES, Backend
from .cpu.backend import CPU
from .reference_backend import ReferenceBackend

ON_HOST: dict[str, Backend] = {"auto": CPU(), "cpu": CPU(), "reference": ReferenceBackend()}


def choose(name: str, **arrays: Any) -> Backend:
    """The backend of a name (`rules.BACKENDS`) for arrays, named as the arguments that they are.

    Raises:
        TypeError: arrays in host memory and on a GPU, of several libraries, or on a GPU for a backend of the host.
        ValueError: arrays on several GPUs.
        BackendError: arrays on a GPU that can't be used.
    """
    if name != "cuda" and all(isinstance(x, HOST_TYPES) for x in arrays.values()):
        return ON_HOST[name]
    from .gpu import backend as gpu

    if not gpu.any_on_gpu(arrays):
        return gpu.Copies() if name == "cuda" else ON_HOST[name]
    return gpu.for_arrays(name, arrays)
