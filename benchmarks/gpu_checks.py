"""What is checked on a GPU before anything is timed: the layouts of fragments, and the conformance cases."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from math import log
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import flash_numba
from flash_numba import bands
from flash_numba.checked import checked_call
from flash_numba.cpu.backend import CPU
from flash_numba.gpu import driver, launch, plan
from flash_numba.gpu.arguments import pack
from flash_numba.gpu.backend import planned_copies
from flash_numba.gpu.compile import Kernel
from flash_numba.problem import PROBLEM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# ---- fragments: what ldmatrix gives a thread is what mma takes from it

LAYOUTS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
A_BYTES, B_BYTES = 16 * 16 * 2, 8 * 16 * 2


def layout_kernel(name: str) -> Kernel:
    """One warp: `out` = A B with B's columns in memory as rows, `lse` = A B with its rows as rows; both (16, 8).

    A is (16, 16) at q; B is (8, 16), transposed, at k and (16, 8) at v. All go to shared memory by asynchronous copies.
    """
    from numba import cuda, float32, int32, uint8

    from flash_numba.gpu.ir import ptx

    mma = ptx.mma_float16 if name == "float16" else ptx.mma_bfloat16

    def fragments(p):
        tile = cuda.shared.array(0, uint8, alignment=128)
        base = ptx.shared_address(tile)
        lane = int32(cuda.threadIdx.x)
        ptx.copy_async(base + lane * 16, p.q + lane * 16, int32(16))
        if lane < 16:
            ptx.copy_async(base + A_BYTES + lane * 16, p.k + lane * 16, int32(16))
            ptx.copy_async(base + A_BYTES + B_BYTES + lane * 16, p.v + lane * 16, int32(16))
        ptx.commit_copies()
        ptx.wait_for_copies()
        cuda.syncthreads()
        # matrix i of A: rows 8 (i % 2) on, columns 8 (i // 2) on; B has two, and lanes 16 to 31 repeat them
        row, matrix = lane & 7, lane >> 3
        a0, a1, a2, a3 = ptx.load_matrices(base + (row + 8 * (matrix & 1)) * 32 + (matrix >> 1) * 16)
        b0, b1, _, _ = ptx.load_matrices(base + A_BYTES + row * 32 + (matrix & 1) * 16)
        t0, t1, _, _ = ptx.load_transposed_matrices(base + A_BYTES + B_BYTES + (row + 8 * (matrix & 1)) * 16)
        zero = float32(0.0)
        c0, c1, c2, c3 = mma(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
        d0, d1, d2, d3 = mma(a0, a1, a2, a3, t0, t1, zero, zero, zero, zero)
        at = (lane >> 2) * 32 + (lane & 3) * 8
        ptx.store_pair(p.out + at, c0, c1)
        ptx.store_pair(p.out + at + 256, c2, c3)
        ptx.store_pair(p.lse + at, d0, d1)
        ptx.store_pair(p.lse + at + 256, d2, d3)

    return Kernel(f"fragments_{name}", fragments, 32, A_BYTES + 2 * B_BYTES, lambda record: (1, 1, 1), 16)


def layout_inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (16, 16) and B (16, 8) of integers that products of are exact, no two alike in their places; and A B."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(LAYOUTS[name]) for shape in ((16, 16), (16, 8)))
    return a, b, a.astype(np.float32) @ b.astype(np.float32)


def check_layouts(gpus: Any, device: int = 0) -> None:
    """Raises AssertionError where a fragment isn't laid out as `gpu/ptx.py` says."""
    for name in LAYOUTS:
        a, b, want = layout_inputs(name)
        kept = []
        problem = np.zeros((), PROBLEM)
        for field, array in (("q", a), ("k", np.ascontiguousarray(b.T)), ("v", b)):
            problem[field], memory = gpus.allocate(array.nbytes, device)
            gpus.write(int(problem[field]), array, device, 1)
            kept.append(memory)
        results = []
        for field in ("out", "lse"):
            problem[field], memory = gpus.allocate(want.nbytes, device)
            results.append(int(problem[field]))
            kept.append(memory)
        kernel = layout_kernel(name)
        launch.run_once(kernel, pack(problem), gpus, device, 1)
        for field, start in zip(("from rows", "transposed"), results, strict=True):
            got = gpus.read_bytes(start, want.nbytes, device).view(np.float32).reshape(want.shape)
            assert (got == want).all(), f"{name} {field}: fragments are laid out otherwise\n{got}\nnot\n{want}"


# ---- conformance


class Outcome(NamedTuple):
    """Of the conformance cases that there was time for."""

    passed: int
    failed: list[str]  # "name: what is wrong"
    left_out: int
    kernels: dict[str, int]  # how many cases each kind of kernel took


def device_cases() -> list[Any]:
    """The shared cases, and those of 16 bits once more with a head dimension that the tensor-core kernel takes."""
    from cases import CASES, RULE_CASES

    wide = [
        replace(case, name=f"{case.name}-D64", **{x: (*getattr(case, x)[:-1], 64) for x in "qkv"})
        for case in RULE_CASES
        if case.dtype.itemsize == 2 and case.kv_dtype is None
    ]
    return [*wide, *RULE_CASES, *CASES]


def planned(case: Any, cc: tuple[int, int]) -> plan.Plan | None:
    """How a GPU would do a case; None if there is nothing to do."""
    q, k, v, options = case.arguments()
    call, _ = checked_call(q, k, v, CPU(), **options)
    if call.lse.size == 0:
        return None
    return launch.plan_call(planned_copies(call, cc), cc, False)[0]


def compile_case(name: str, cc: tuple[int, int]) -> None:
    """In a process of its own, which no case can be sent to: leaves the case's kernel in the cache on disk."""
    from flash_numba.gpu import cubins

    chosen = planned(next(case for case in device_cases() if case.name == name), cc)
    assert chosen is not None
    cubins.machine_code(chosen.kernel, cc)


def compile_ahead(cases: dict[str, str], cc: tuple[int, int], workers: int, deadline: float) -> Iterator[str]:
    """Names of kernels, given by the name of a case for each, as they are compiled on all cores until the deadline.

    One that doesn't compile comes too: its cases then fail, and say why.
    """
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(compile_case, case, cc): kernel for kernel, case in cases.items()}
        for done in as_completed(running, timeout=max(0.0, deadline - time.monotonic())):
            yield running[done]
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def what_is_wrong(case: Any) -> str | None:
    """A case on the GPU against the oracle, within the bands."""
    q, k, v, options = case.arguments()
    out, lse = flash_numba.attention(q, k, v, **options, return_lse=True, backend="cuda")
    layout = options.pop("layout", "bhsd")
    first = [np.swapaxes(x, -2, -3) if layout == "bshd" and x.ndim > 2 else x for x in (q, k, v, out)]
    truth = bands.exact(*first[:3], **options)
    lowest = float(np.finfo(lse.dtype).min) * log(2)  # kernels keep scores in base 2, where what lies beyond saturates
    unit = np.finfo(lse.dtype).eps
    lse_limit = bands.lse_limit(case.dtype, truth.score_max, keys=truth.keys, head_dim=truth.head_dim)
    lse_limit = lse_limit + 4 * unit * np.nan_to_num(np.abs(truth.lse), posinf=0)
    seen = truth.lse != -np.inf
    pairs = (
        ("out", first[3].astype(np.float64), truth.out, bands.limit(case.dtype, truth)),
        ("lse", np.where(seen, np.maximum(lse, lowest), lse), np.where(seen, np.maximum(truth.lse, lowest), truth.lse),
         lse_limit),
    )  # fmt: skip
    for what, got, want, limit in pairs:
        if (np.isnan(got) != np.isnan(want)).any():
            return f"{what}: NaN where there should be none, or none where it should be"
        if (got[np.isinf(want)] != want[np.isinf(want)]).any():
            return f"{what}: infinities differ"
        finite = np.isfinite(want)
        error, allowed = np.abs(got[finite] - want[finite]), np.broadcast_to(limit, want.shape)[finite]
        if not (error <= allowed).all():
            return f"{what}: off by {(error - allowed).max():.3g} more than allowed"
    return None


def run_cases(
    cases: list[Any], gpu: driver.GPU, seconds: float, workers: int, say: Callable[[str], None] = lambda words: None
) -> Outcome:
    """As many cases as there is time for, kernels that most cases share first."""
    deadline = time.monotonic() + seconds
    groups: dict[str, list[Any]] = {}
    kinds: dict[str, str] = {}
    for case in cases:
        chosen = planned(case, gpu.cc)
        name = chosen.kernel.name if chosen else ""
        kinds[name] = chosen.name if chosen else "none"
        groups.setdefault(name, []).append(case)
    order = sorted(groups, key=lambda name: -len(groups[name]))
    firsts = {name: groups[name][0].name for name in order if name}
    passed, failed, counts = 0, [], dict.fromkeys(plan.KERNELS, 0)
    done: set[str] = set()

    def run(name: str) -> None:
        nonlocal passed
        done.add(name)
        for case in groups[name]:
            if time.monotonic() > deadline:
                return
            try:
                wrong = what_is_wrong(case)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            passed += wrong is None
            counts[kinds[name]] = counts.get(kinds[name], 0) + 1
            if wrong is not None:
                failed.append(f"{case.name}: {wrong}")
        say(f"{passed} cases passed, {len(failed)} failed")

    for name in compile_ahead(firsts, gpu.cc, workers, deadline):
        run(name)
    if "" in groups:
        run("")
    ran = passed + len(failed)
    return Outcome(passed, failed, len(cases) - ran, counts)
