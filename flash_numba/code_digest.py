"""A digest of the code that kernels are compiled from, as it is in memory.

Compiled code is kept on disk under this digest (`disk_cache.py`). Source files would not do: they may have changed
since they were imported, and there are none in a zip archive or where only bytecode is installed. So it is taken of
what Numba compiles: the code objects of functions, what they have closed over, and the constants of their modules.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

PACKAGE = __name__.partition(".")[0] + "."
UNREAD = {"__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"}  # of a class
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type(Ellipsis))


def of_code(module: str, facts: object) -> str:
    """Of a module that is imported, of all modules of this package that it has its code from, and of further facts."""
    h = hashlib.sha256(repr(facts).encode())
    parts = Parts()
    for name in sorted(modules_of(module)):
        for part in parts.of_module(name):
            h.update(part.encode() + b"\0")
    return h.hexdigest()


def modules_of(module: str) -> set[str]:
    """The names of the modules that a module of this package imports things from, at any depth, and its own."""
    found, new = set(), {module}
    while new:
        found |= new
        values = [value for name in new for value in vars(sys.modules[name]).values()]
        names = (x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) for x in values)
        new = {str(name) for name in names if str(name).startswith(PACKAGE)} & sys.modules.keys() - found
    return found


class Parts:
    """What the code of modules consists of, as strings, in an order that is the same in every process."""

    def __init__(self) -> None:
        self._met: set[int] = set()

    def of_module(self, module: str) -> Iterator[str]:
        yield module
        for name, value in sorted(vars(sys.modules[module]).items()):
            # Private variables are what a module keeps while it runs: caches and locks. Private functions are code.
            if not name.startswith("__") and (not name.startswith("_") or callable(value)):
                yield name
                yield from self.of(value)

    def of(self, value: Any) -> Iterator[str]:
        if isinstance(value, PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, (ModuleType, BuiltinFunctionType)):
            yield value.__name__
        elif isinstance(value, Mapping):
            yield from self.of_all((part for item in value.items() for part in item), "mapping")
        elif isinstance(value, (set, frozenset)):
            yield from sorted(map(repr, value))
        elif isinstance(value, (tuple, list)):
            yield from self.of_all(value, type(value).__name__)
        else:
            yield f"{type(value).__name__} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
            if id(value) not in self._met:  # a function may call itself, and modules import the same ones
                self._met.add(id(value))
                yield from self.of_object(value)

    def of_all(self, values: Iterable[Any], kind: str) -> Iterator[str]:
        yield kind
        for value in values:
            yield from self.of(value)
        yield "end"

    def of_object(self, value: Any) -> Iterator[str]:
        """A class, a function, what holds one (a dispatcher, an intrinsic, a cached function), or something else."""
        if isinstance(value, type):
            if value.__module__.startswith(PACKAGE):
                yield from self.of_all((x for name, x in sorted(vars(value).items()) if name not in UNREAD), "class")
            return
        if hasattr(value, "targetoptions"):
            yield from self.of({str(key): value.targetoptions[key] for key in sorted(value.targetoptions)})
        function = function_of(value)
        if function is not None and function.__module__.startswith(PACKAGE):
            yield from self.of_code(function.__code__)
            yield from self.of_all((function.__defaults__, function.__kwdefaults__), "defaults")
            yield from self.of_all((contents(cell) for cell in function.__closure__ or ()), "closure")
        elif function is None and not callable(value):
            yield str(value) if type(value).__str__ is not object.__str__ else ""

    def of_code(self, code: CodeType) -> Iterator[str]:
        """Without what it is called and where it stands: names of files, numbers of lines."""
        yield code.co_code.hex()
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags
        yield repr(names)
        for constant in code.co_consts:
            yield from self.of_code(constant) if isinstance(constant, CodeType) else self.of(constant)


def function_of(value: Any) -> FunctionType | None:
    """The function of Python that an object is or was made from."""
    for name in ("py_func", "_defn", "__wrapped__", "__func__", "fget"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None


def contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
