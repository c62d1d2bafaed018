"""What is timed on a GPU: its limits, then this library next to PyTorch's flash attention, in the same run."""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cuda import resident, row_name
from flash_numba.bench.shapes import DTYPES, SETS, Shape
from flash_numba.gpu import dlpack, launch
from flash_numba.gpu.arguments import pack
from flash_numba.gpu.compile import Kernel
from flash_numba.problem import PROBLEM

ROUNDS = 7
AT_LEAST = 2e-3  # seconds of a round, so that the clock's step and the gaps around it don't count
TOKENS, WIDTH = 16384, 2048  # batch times tokens, and heads times head dimension, of the shapes that papers use
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def square(tokens: int, dim: int, causal: bool, total: int = TOKENS) -> Shape:
    heads = WIDTH // dim
    name = f"{total // tokens}x{heads}x{tokens}x{dim}" + "-causal" * causal
    return Shape(name, total // tokens, heads, heads, tokens, tokens, dim, causal)


FORWARD = [square(n, dim, causal) for dim in (64, 128) for causal in (False, True) for n in LENGTHS]
# In float32, on CUDA cores: less work, as they are slower.
TILE = [square(n, dim, causal, 4096) for dim in (64, 128) for causal in (False, True) for n in (1024, 4096)]


def decoding(batch: int, heads: int, kv_heads: int, keys: int, dim: int) -> Shape:
    return Shape(f"decode-{batch}x{heads}/{kv_heads}x{keys}x{dim}", batch, heads, kv_heads, 1, keys, dim, False)


DECODE = [decoding(64, 32, 8, 4096, 128), decoding(16, 32, 8, 16384, 128), decoding(1, 32, 8, 131072, 128),
          decoding(32, 32, 32, 8192, 64)]  # fmt: skip


class Clock:
    """Seconds that a GPU takes for calls queued on a stream, by events of the driver."""

    def __init__(self, gpus: Any, device: int = 0) -> None:
        self._gpus, self._device, self._api = gpus, device, gpus._api
        with gpus.on(device):
            self._events = [gpus._check(self._api.cuEventCreate(0)) for _ in range(2)]

    def seconds(self, start: Callable[[], Any], stream: int) -> float:
        """The median of rounds, of one call each."""
        once = self.of(start, 2, stream)  # also the first calls, which load
        once = self.of(start, 2, stream) / 2
        count = max(1, int(AT_LEAST / max(once, 1e-7)))
        return statistics.median(self.of(start, count, stream) / count for _ in range(ROUNDS))

    def of(self, start: Callable[[], Any], count: int, stream: int) -> float:
        check, api, handle = self._gpus._check, self._api, self._gpus._stream(stream)
        with self._gpus.on(self._device):
            check(api.cuEventRecord(self._events[0], handle))
            for _ in range(count):
                start()
            check(api.cuEventRecord(self._events[1], handle))
            check(api.cuEventSynchronize(self._events[1]))
            return 1e-3 * float(check(api.cuEventElapsedTime(*self._events)))


# ---- limits of the chip


def fma_kernel() -> Kernel:
    """float32 multiply-adds in sixteen chains a thread, p.keys times."""
    from numba import cuda, float32, int32

    from flash_numba.gpu.ir.memory import store_float32

    def multiply_add(p):
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        x, y = float32(p.scale), float32(p.softcap)
        a = cuda.local.array(16, float32)
        for i in range(16):
            a[i] = float32(thread + i)
        for _ in range(int32(p.keys)):
            for i in range(16):
                a[i] = a[i] * x + y
        total = float32(0.0)
        for i in range(16):
            total += a[i]
        if total == float32(p.keep_factor):  # never: but the sums have to be computed
            store_float32(p.out, total)

    return Kernel("peak_fma", multiply_add, 256, 0, lambda record: (int(record["heads"]), 1, 1), 1)


def mma_kernel() -> Kernel:
    """bfloat16 products by `mma.sync` in eight chains a warp, p.keys times."""
    from numba import cuda, float32, int32

    from flash_numba.gpu.ir import ptx
    from flash_numba.gpu.ir.memory import store_float32

    def multiply(p):
        lane = int32(cuda.threadIdx.x & 31)
        c = cuda.local.array(32, float32)
        for i in range(32):
            c[i] = float32(0.0)
        for n in range(int32(p.keys)):
            a = lane + n
            for i in range(0, 32, 4):
                c[i], c[i + 1], c[i + 2], c[i + 3] = ptx.mma_bfloat16(
                    a, a, a, a, lane, lane, c[i], c[i + 1], c[i + 2], c[i + 3]
                )
        total = float32(0.0)
        for i in range(32):
            total += c[i]
        if total == float32(p.keep_factor):
            store_float32(p.out, total)

    return Kernel("peak_mma", multiply, 256, 0, lambda record: (int(record["heads"]), 1, 1), 1)


def read_kernel() -> Kernel:
    """Reads p.keys times 16 bytes a thread, neighbours next to one another."""
    from numba import cuda, int32, int64

    from flash_numba.gpu.ir.memory import fetch_16, local_array, store_float32

    def read(p):
        thread = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        step = int64(cuda.gridDim.x) * cuda.blockDim.x * 16
        four = local_array(4, int32)
        total = int32(0)
        at = p.q + thread * 16
        for _ in range(int32(p.keys)):
            fetch_16(four, 0, at)
            total ^= four[0] ^ four[1] ^ four[2] ^ four[3]
            at += step
        if total == int32(p.row_index):
            store_float32(p.out, 1.0)

    return Kernel("peak_read", read, 256, 0, lambda record: (int(record["heads"]), 1, 1), 1)


class Raw:
    """A kernel of this file on the first GPU."""

    def __init__(self, gpus: Any, kernel: Kernel, **fields: float) -> None:
        problem = np.zeros((), PROBLEM)
        for name, value in fields.items():
            problem[name] = value
        record = pack(problem)
        self._gpus = gpus
        self._grid = kernel.grid(record)
        self._loaded = launch.load(kernel, gpus, 0)
        self._words = launch.parameters(record)

    def __call__(self) -> None:
        self._gpus.start(self._loaded, self._grid, launch.extra_of(self._words), 0, dlpack.LEGACY_STREAM)


def limits(gpus: Any, clock: Clock, torch: Any) -> dict[str, float]:
    """FLOP/s of CUDA cores (float32) and tensor cores (bfloat16), and bytes/s of memory."""
    blocks, stream = 8 * gpus.gpu(0).multiprocessors, dlpack.LEGACY_STREAM
    sink, kept = gpus.allocate(4, 0)
    common = {"out": sink, "heads": blocks, "keep_factor": -1.0}
    fma = Raw(gpus, fma_kernel(), keys=4096, scale=0.999, softcap=0.5, **common)
    mma = Raw(gpus, mma_kernel(), keys=4096, **common)
    size = blocks * 256 * 16 * 512
    buffer, memory = gpus.allocate(size, 0)
    gpus.clear(buffer, size, 0, stream)
    reading = Raw(gpus, read_kernel(), q=buffer, keys=512, row_index=1, **common)
    found = {
        "float32_flops": blocks * 256 * 16 * 2 * 4096 / clock.seconds(fma, stream),
        "mma_flops": blocks * 8 * 8 * (2 * 16 * 8 * 16) * 4096 / clock.seconds(mma, stream),
        "read_bytes": size / clock.seconds(reading, stream),
    }
    del kept, memory
    if torch is not None:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        found["matmul_flops"] = 2 * 8192**3 / clock.seconds(lambda: a @ b, torch.cuda.current_stream().cuda_stream)
    return found


# ---- attention


class Timed(NamedTuple):
    """One problem: seconds of a call, ours and PyTorch's (None where it isn't there or refuses)."""

    shape: str
    dtype: str
    causal: bool
    tokens: int
    dim: int
    seconds: float
    torch_seconds: float | None
    flops: float
    bytes: float
    kernel: str


@cache
def numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(2**22, np.float32)


def inputs(shape: Shape, dtype: str) -> list[np.ndarray]:
    """q, k and v of any numbers: drawing them would take longer than the rest."""
    sizes = [(shape.B, h, n, shape.D) for h, n in ((shape.H, shape.S_q), (shape.H_kv, shape.S_kv))]
    drawn = numbers().astype(DTYPES[dtype])
    return [np.resize(drawn[first:], size) for first, size in enumerate((*sizes, sizes[1]))]


def time_call(shape: Shape, dtype: str, clock: Clock, torch: Any) -> Timed:
    """Both libraries on the same tensors, one after the other; ours alone where there is no PyTorch."""
    import flash_numba

    theirs = None
    if torch is None:
        q, k, v = inputs(shape, dtype)
        start, _ = resident(q, k, v, causal=shape.causal)
        seconds = clock.seconds(start, dlpack.LEGACY_STREAM)
        kernel = flash_numba.info(q, k, v, causal=shape.causal, backend="cuda")["kernel"]
    else:
        import torch.nn.functional as functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sizes = [(shape.B, h, n, shape.D) for h, n in ((shape.H, shape.S_q), (shape.H_kv, shape.S_kv))]
        q, k, v = (torch.randn(size, device="cuda", dtype=getattr(torch, dtype)) for size in (*sizes, sizes[1]))
        stream = torch.cuda.current_stream().cuda_stream
        seconds = clock.seconds(lambda: flash_numba.attention(q, k, v, causal=shape.causal), stream)
        kernel = flash_numba.info(q, k, v, causal=shape.causal)["kernel"]
        options = {"is_causal": shape.causal} | ({"enable_gqa": True} if shape.H_kv < shape.H else {})
        if dtype != "float32":  # which its flash backend doesn't take
            try:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    theirs = clock.seconds(lambda: functional.scaled_dot_product_attention(q, k, v, **options), stream)
            except RuntimeError:
                theirs = None
    item = DTYPES[dtype]
    return Timed(
        shape.name, dtype, shape.causal, shape.S_kv, shape.D, seconds, theirs, shape.flops, shape.kv_bytes(item), kernel
    )


def rows(clock: Clock) -> dict[str, float]:
    """Seconds of the rows of the CPU's table: what pytest-benchmark would measure here."""
    problems = [(shape, "float32") for shape in SETS["short"]] + [(shape, "float32") for shape in SETS["main"]]
    problems += [(SETS["short"][0], dtype) for dtype in ("float16", "bfloat16")]
    found = {}
    for shape, dtype in problems:
        start, _ = resident(*inputs(shape, dtype), causal=shape.causal)
        found[row_name(shape.name, dtype)] = clock.seconds(start, dlpack.LEGACY_STREAM)
    return found


def overhead(gpus: Any, torch: Any) -> dict[str, float]:
    """Seconds of this thread for a call whose work on the GPU is over sooner: by launch alone, and all of it."""
    import flash_numba

    q = np.zeros((1, 4, 64, 64), np.float16)
    start, wait = resident(q, q, q)
    found = {"launch": host_seconds(start, wait)}
    if torch is not None:
        x = torch.zeros((1, 4, 64, 64), device="cuda", dtype=torch.float16)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found["torch_tensors"] = host_seconds(lambda: flash_numba.attention(x, x, x), torch.cuda.synchronize)
        found["torch_itself"] = host_seconds(lambda: sdpa(x, x, x), torch.cuda.synchronize)
    return found


def host_seconds(start: Callable[[], Any], wait: Callable[[], Any], count: int = 500) -> float:
    for _ in range(20):
        start()
    wait()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(count):
            start()
        rounds.append((time.perf_counter() - began) / count)
        wait()
    return statistics.median(rounds)
