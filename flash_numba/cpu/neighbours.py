"""Living with others in one process: forks, other users of OpenMP, and how many threads the environment allows.

Nothing here imports Numba, as a fork before the first call counts too: Numba may have been started by others.
"""

import ctypes
import os
import sys
import threading

OPENMP = ("libgomp", "libomp", "libiomp")  # how the files of OpenMP's libraries are called

_fork_reason = ""
_thread = threading.local()


def layer() -> str | None:
    """Numba's threading layer, if anybody in this process has started its threads."""
    try:
        return sys.modules["numba"].threading_layer()
    except (KeyError, AttributeError, ValueError):  # not imported, being imported, not started
        return None


# -- forks: a child has none of its parent's threads, and GNU's OpenMP ends it when it tries to use them ---------------


def before_fork() -> None:
    global _layer_at_fork
    _layer_at_fork = layer()


def after_fork() -> None:
    global _fork_reason, _thread
    _thread = threading.local()
    if _layer_at_fork is not None:
        _fork_reason = f"this process was forked from one that had started Numba's threads ({_layer_at_fork})"


def why_forked() -> str:
    """Why there can't be threads in this process; "" if there can."""
    return _fork_reason


def has_lost_threads() -> bool:
    """Whether this is imported in a child that was forked before: Numba has started threads, and there are none."""
    started = layer()
    if started not in ("omp", "workqueue") or not sys.platform.startswith("linux"):  # TBB starts them when it likes
        return False
    return sys.modules["numba"].config.NUMBA_NUM_THREADS > 1 == len(os.listdir("/proc/self/task"))


_layer_at_fork: str | None = None
if has_lost_threads():
    before_fork()
    after_fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=before_fork, after_in_child=after_fork)


# -- the environment ---------------------------------------------------------------------------------------------------


def threads_in_environment() -> int | None:
    """What OMP_NUM_THREADS says, which Dask and joblib give their workers; NUMBA_NUM_THREADS is more to the point."""
    if "NUMBA_NUM_THREADS" in os.environ:
        return None
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the others are of nested teams
    return int(first) if first.isdecimal() and int(first) > 0 else None


# -- OpenMP ------------------------------------------------------------------------------------------------------------


def unnest_openmp() -> None:
    """Undo the `omp_set_nested` with which Numba starts GNU's OpenMP, in this thread, once.

    It holds for every user of that library, for whom waiting for nested teams takes ten times as long. Which one Numba
    uses depends on what was loaded first, so all that are loaded are looked at. A user who asks for nested teams by
    OpenMP's own variables gets them.
    """
    if getattr(_thread, "unnested", False) or not sys.platform.startswith("linux"):
        return
    started = layer()
    if started is None:
        return
    _thread.unnested = True
    if started != "omp" or "OMP_MAX_ACTIVE_LEVELS" in os.environ or "OMP_NESTED" in os.environ:
        return
    for library in openmp_libraries():
        if library.omp_get_max_active_levels() > 1:
            library.omp_set_max_active_levels(1)


def openmp_libraries() -> list[ctypes.CDLL]:
    """Those that are loaded, by their files: to open one by its name could load another copy."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "omp" in line}
    libraries = []
    for path in sorted(mapped):
        if os.path.basename(path).startswith(OPENMP):
            try:
                library = ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW)
                library.omp_get_max_active_levels  # noqa: B018
            except (OSError, AttributeError):  # a file that was replaced meanwhile, or something else of such a name
                continue
            libraries.append(library)
    return libraries
