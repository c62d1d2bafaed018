"""The shapes that tests and benchmarks share."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class Shape(NamedTuple):
    """One attention problem: q (B, H, S_q, D), k and v (B, H_kv, S_kv, D). With `gradient`, forward and backward."""

    name: str
    B: int
    H: int
    H_kv: int
    S_q: int
    S_kv: int
    D: int
    causal: bool
    gradient: bool = False

    @property
    def decoding(self) -> bool:
        """One new token: bound by reading K and V, not by multiply-adds."""
        return self.S_q == 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products, as papers count them: 4 B H S_q S_kv D.

        Causal counts the share of the score matrix below the diagonal through its lower right corner: half of a square.
        The gradient's five products are 2.5 times as much again. Softmax isn't counted.
        """
        area = 2 * self.S_q * self.S_kv
        if self.causal:
            seen = min(self.S_q, self.S_kv)
            area = seen * (2 * self.S_kv - seen)
        forward = 2 * self.B * self.H * area * self.D
        return forward * 7 // 2 if self.gradient else forward

    def kv_bytes(self, dtype: Any) -> int:
        """Bytes of K and V together: what decoding one token reads at least."""
        return 2 * self.B * self.H_kv * self.S_kv * self.D * np.dtype(dtype).itemsize

    def output_bytes(self, dtype: Any) -> int:
        """Bytes of the output, and of q."""
        return self.B * self.H * self.S_q * self.D * np.dtype(dtype).itemsize

    def result_bytes(self, dtype: Any) -> int:
        """Bytes of all that a call results in: the output, and with a gradient the LSE and those of q, k and v."""
        lse = 4 * self.B * self.H * self.S_q
        out = self.output_bytes(dtype)
        return 2 * out + lse + self.kv_bytes(dtype) if self.gradient else out

    def bytes(self, dtype: Any) -> int:
        """Bytes of q, k, v and the output."""
        return self.kv_bytes(dtype) + 2 * self.output_bytes(dtype)

    def inputs(self, dtype: Any = np.float32, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Standard normal q, k and v, the same for every dtype up to its rounding."""
        rng = np.random.default_rng(seed)
        q_shape = (self.B, self.H, self.S_q, self.D)
        kv_shape = (self.B, self.H_kv, self.S_kv, self.D)
        drawn_as = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        q, k, v = (
            rng.standard_normal(shape, drawn_as).astype(dtype, copy=False) for shape in (q_shape, kv_shape, kv_shape)
        )
        return q, k, v

    def dout(self, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
        """Likewise a loss's derivative by the output."""
        return self._replace(H_kv=self.H, S_kv=0).inputs(dtype, seed)[0]

    def small(self) -> "Shape":
        """The same kind of problem on few tokens: what a library compiles or allocates once it does for this one."""
        return self._replace(B=min(self.B, 2), S_q=min(self.S_q, 256), S_kv=min(self.S_kv, 256))


def square(B: int, H: int, S: int, D: int) -> tuple[Shape, Shape]:
    """Self-attention over S tokens, without and with the causal mask."""
    name = f"{B}x{H}x{S}x{D}"
    return Shape(name, B, H, H, S, S, D, False), Shape(name + "-causal", B, H, H, S, S, D, True)


def decode(B: int, H: int, H_kv: int, S_kv: int, D: int) -> Shape:
    """One new token against S_kv cached keys."""
    heads = f"{H}/{H_kv}" if H_kv < H else f"{H}"
    return Shape(f"decode-{B}x{heads}x{S_kv}x{D}", B, H, H_kv, 1, S_kv, D, False)


LONG = square(1, 8, 4096, 64)
MEMORY = square(1, 1, 16384, 64)[0]

MAIN: tuple[Shape, ...] = (
    *square(1, 8, 1024, 64),
    *LONG,
    *square(1, 8, 2048, 128),
    *square(4, 16, 512, 64),
    *square(1, 1, 16384, 64),
)
DECODE: tuple[Shape, ...] = (
    decode(1, 32, 8, 8192, 128),
    decode(1, 32, 8, 32768, 128),
    decode(1, 1, 1, 131072, 64),
    decode(8, 32, 32, 1024, 128),
)
TINY: tuple[Shape, ...] = (*square(1, 1, 16, 64), *square(1, 8, 64, 64), *square(8, 8, 32, 64))
FULL = (*MAIN, *TINY, *DECODE)

# What CI measures: one of each kind, none for which NumPy needs more than about half a second.
SHORT: tuple[Shape, ...] = (
    *square(1, 8, 1024, 64),
    square(1, 8, 2048, 128)[1],
    square(4, 16, 512, 64)[0],
    square(1, 1, 16, 64)[0],
    square(1, 8, 64, 64)[0],
    square(8, 8, 32, 64)[0],
    decode(1, 32, 8, 8192, 128),
)

# One problem at growing lengths: what a picture shows.
LENGTHS: tuple[Shape, ...] = tuple(shape for i in range(7, 15) for shape in square(1, 8, 2**i, 64))

SETS = {"short": SHORT, "full": FULL, "main": MAIN, "decode": DECODE, "tiny": TINY, "lengths": LENGTHS}

# Forward and backward: what a step of training takes.


def with_gradient(*shapes: Shape) -> tuple[Shape, ...]:
    return tuple(shape._replace(name=shape.name + "-grad", gradient=True) for shape in shapes)


GRADIENT = with_gradient(
    *square(1, 8, 2048, 64), *square(1, 8, 2048, 128), *square(4, 16, 512, 64), *square(1, 1, 8192, 64)
)

# Sets that the command measures on top of those above.
GRADIENT_SETS = {
    "short": with_gradient(*square(1, 8, 1024, 64)),
    "main": GRADIENT,
    "full": GRADIENT,
    "gradient": GRADIENT,
}
