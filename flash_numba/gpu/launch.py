"""From a checked call on device arrays to a kernel in a stream.

What depends on the call's form only is done once: kernels are loaded once a device, and repeated calls of the same
shapes and rules (`prepared.py`) fill in five addresses.
"""

import threading
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..addresses import address, address_of
from ..backend import YES, Support
from ..call import Call
from ..problem import TABLES, describe
from ..work_tiles import packed_work_tiles
from . import cubins
from .arguments import ARGUMENTS, unpack
from .compile import Kernel
from .driver import Loaded, usable
from .plan import TABLES_TO_COME, LaunchGeometry, Plan, choose, launch_geometry

ALIGNMENT = 128

WORDS = ARGUMENTS.itemsize // 8
WORKSPACE, FINISHED = (ARGUMENTS.fields[name][1] // 8 for name in ("workspace", "finished"))  # type: ignore[index]
# cuda.h: how a launch says that its parameters lie one after the other in a buffer
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0

_lock = threading.Lock()
_loaded: dict[tuple[str, int], Any] = {}  # (kernel name, device)


class Launch(NamedTuple):
    """What calls of one form have in common."""

    loaded: Any  # driver.Loaded, or a simulated kernel
    words: np.ndarray  # `parameters`
    extra: int  # `extra_of` them
    lock: Any  # of the words, which the driver has copied when a launch returns
    grid: tuple[int, int, int]
    workspace_bytes: int
    counters: int
    device: int
    driver: Any
    tables: Any  # keeps the device's copy of the tables


def load(kernel: Kernel, driver: Any, device: int) -> Any:
    """A kernel on a device: from memory, from disk, or compiled."""
    key = kernel.name, device
    if key not in _loaded:
        with _lock:
            if key not in _loaded:
                if driver.simulated:
                    from numba import cuda

                    _loaded[key] = Loaded(cuda.jit(kernel.function), kernel.threads, kernel.shared_bytes)
                else:
                    cubin, entry = cubins.machine_code(kernel, usable(driver, device).cc)
                    _loaded[key] = driver.load(cubin, entry, kernel.threads, kernel.shared_bytes, device)
    return _loaded[key]


def plan_call(call: Call, cc: tuple[int, int], simulated: bool) -> tuple[Plan, LaunchGeometry, list[np.ndarray]]:
    """Kernel and launch geometry of a call, and the host tables that the record points to."""
    if call.cu_seqlens_q is not None:
        call = with_rows_behind(call)
    problem, alive = describe(call)
    if call.cu_seqlens_q is not None:
        problem["work_tiles"] = TABLES_TO_COME
    sequences = alive[-1] if problem["sequences"] else None
    chosen = choose(problem, sequences, cc, simulated)
    if call.cu_seqlens_q is not None:
        tiles = packed_work_tiles(alive[-1], chosen.kernel.rows, call.left, call.right)
        problem["work_tiles"], problem["work_tile_count"] = address(tiles), tiles.size
        alive.append(tiles)
    return chosen, launch_geometry(problem, chosen), alive


def with_rows_behind(call: Call) -> Call:
    """Packed sequences and one more, without a key, of the rows behind the last: they are written as empty ones are."""
    q_starts, k_starts = call.cu_seqlens_q, call.cu_seqlens_k
    assert q_starts is not None
    assert k_starts is not None
    total = call.q.shape[-2]
    if q_starts[-1] == total:
        return call

    rows = {}
    for name, value in (("slopes", 0.0), ("sinks", -np.inf), ("k_scales", 1.0), ("v_scales", 1.0)):
        numbers = getattr(call, name)
        rows[name] = None if numbers is None else np.vstack([numbers, np.full((1, numbers.shape[1]), value)])
    ends = {"cu_seqlens_q": np.append(q_starts, total), "cu_seqlens_k": np.append(k_starts, k_starts[-1])}
    return replace(call, **rows, **ends)  # type: ignore[arg-type]


def upload_tables(
    record: np.ndarray,
    alive: list[np.ndarray],
    driver: Any,
    device: int,
    stream: int,
    library: Any,
    fields: tuple[str, ...] = TABLES,
) -> Any:
    """Copy the tables to the device, have the record point there, and return what keeps them.

    library: whose memory is taken, in the order of the stream; None for tables that outlive the call, and are read in
    other streams too.
    """
    at = {address(table): table for table in alive}
    offsets, end = {}, 0
    for name in fields:
        if record[name]:
            offsets[name] = end
            end += -(-at[int(record[name])].nbytes // ALIGNMENT) * ALIGNMENT
    if not end:
        return None
    packed = np.zeros(end, np.uint8)
    for name, offset in offsets.items():
        table = np.ascontiguousarray(at[int(record[name])])
        packed[offset : offset + table.nbytes] = np.frombuffer(table.tobytes(), np.uint8)
    start, kept = library.bytes(end, device, stream) if library else driver.allocate(end, device)
    driver.write(start, packed, device, stream)
    if library is None:
        driver.synchronize(stream)
    for name, offset in offsets.items():
        record[name] = start + offset
    return kept


def parameters(record: np.ndarray) -> np.ndarray:
    """A kernel's parameters, and behind them how the driver wants to be told where they lie."""
    words = np.zeros(WORDS + 6, np.int64)
    words[:WORDS] = np.frombuffer(record.tobytes(), np.int64)
    start = address(words)
    words[WORDS:] = BUFFER_POINTER, start, BUFFER_SIZE, start + 8 * (WORDS + 5), END, 8 * WORDS
    return words


def extra_of(words: np.ndarray) -> int:
    """Where, in what `parameters` returns, the driver is told where a kernel's parameters lie."""
    return address(words) + 8 * WORDS


def prepare(call: Call, driver: Any, device: int, stream: int, library: Any = None) -> Launch:
    """Choose, load and plan for a call on device arrays; with `library`, for this call only."""
    gpu = usable(driver, device)
    plan, of, alive = plan_call(call, gpu.cc, driver.simulated)
    loaded = load(plan.kernel, driver, device)
    tables = upload_tables(of.record, alive, driver, device, stream, library)
    words = parameters(of.record)
    return Launch(
        loaded, words, extra_of(words), threading.Lock(), of.grid, of.workspace_bytes, of.counters, device, driver,
        tables,
    )  # fmt: skip


def start(launch: Launch, addresses: tuple[int, ...], library: Any, stream: int) -> Any:
    """Queue a call on the arrays q, k, v, out and lse at five addresses; returns its scratch, to be kept like them."""
    scratch = None
    driver, words = launch.driver, launch.words
    if launch.workspace_bytes or launch.counters:
        # counters first: they have to be 8-byte aligned, states on 16 bytes
        counters = -(-8 * launch.counters // ALIGNMENT) * ALIGNMENT
        base, scratch = library.bytes(counters + launch.workspace_bytes, launch.device, stream)
        if counters:
            driver.clear(base, counters, launch.device, stream)
        with launch.lock:
            words[WORKSPACE], words[FINISHED] = base + counters, base
            words[:5] = addresses
            run(launch, stream)
        return scratch
    with launch.lock:
        words[:5] = addresses
        run(launch, stream)
    return scratch


def run(launch: Launch, stream: int) -> None:
    if 0 in launch.grid:
        return
    if launch.driver.simulated:
        simulate(launch.loaded, launch.grid, np.frombuffer(launch.words[:WORDS].tobytes(), ARGUMENTS)[0])
    else:
        launch.driver.start(launch.loaded, launch.grid, launch.extra, launch.device, stream)


def simulate(loaded: Loaded, grid: tuple[int, int, int], record: np.ndarray) -> None:
    loaded.handle[grid, loaded.threads, 0, loaded.shared_bytes](unpack(record))


def run_once(kernel: Kernel, record: np.ndarray, driver: Any, device: int, stream: int) -> None:
    """Queue a kernel with an `ARGUMENTS` record."""
    loaded, grid = load(kernel, driver, device), kernel.grid(record)
    if 0 in grid:
        return
    if driver.simulated:
        simulate(loaded, grid, record)
    else:
        words = parameters(record)
        driver.start(loaded, grid, extra_of(words), device, stream)


def aligned(call: Call) -> Support:
    """Whether kernels can read a call's arrays: GPUs read numbers only at multiples of their size."""
    arrays = [("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)]
    for name, array in arrays + [("bias or mask", operand) for operand in call.operands]:
        if array is None or not array.size:
            continue
        size = array.dtype.itemsize
        if address_of(array) % size or any(stride % size for stride in array.strides):
            return Support.no(f"{name} must lie at multiples of {size} bytes on a GPU, got strides {array.strides}")
        if not array.dtype.isnative:
            return Support.no(f"{name} must be in this machine's byte order on a GPU, got {array.dtype}", TypeError)
    return YES
