"""Where an array's data lies."""

import ctypes
from typing import Any

import numpy as np


def documented_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def quick_address(array: np.ndarray) -> int:
    """The data pointer where NumPy's C interface has it, right behind the object's head: in a third of the time."""
    return ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value or 0


_probe = np.zeros(3)[1:]
address = quick_address if quick_address(_probe) == documented_address(_probe) else documented_address


def address_of(array: Any) -> int:
    """Of an array in host memory or on a GPU (`gpu.arrays.DeviceArray`)."""
    return address(array) if isinstance(array, np.ndarray) else array.address
