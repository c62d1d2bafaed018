"""Is a softmax that streams over blocks really the softmax? Measured, in three precisions. NumPy and ml_dtypes only.

    python examples/online_softmax_check.py

Attention is softmax(q k^T / sqrt(D)) v. The plain way holds all N scores of a row at once. The online way sees them a
block at a time and keeps only (m, l, o): the maximum so far, the sum of exp(score - m), and the output so far. Both are
run in the same precision, so the table shows what streaming costs and nothing else.
"""

import sys

import ml_dtypes
import numpy as np

BLOCK = 128
HEAD_DIM = 64
ROWS = 32

# The largest relative error that passes. One rounding in float64, float32 and bfloat16 is off by 1.1e-16, 6e-8 and
# 3.9e-3 at most. A score of 40 that is off by that much makes its exp 40 times less exact, and sums are rounded once a
# block. Usual are 1e-15, 5e-7 and, with everything rounded to bfloat16 after every step, 5e-3 to 1e-2.
LIMITS = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 4e-2}


# ---- arithmetic in the precision of the arrays: 16 bits are multiplied and added up in float32, then rounded


def matmul(a, b):
    wide = np.float32 if a.dtype == ml_dtypes.bfloat16 else a.dtype
    return (a.astype(wide) @ b.astype(wide)).astype(a.dtype)


def row_sum(x):
    wide = np.float32 if x.dtype == ml_dtypes.bfloat16 else x.dtype
    return x.sum(axis=-1, keepdims=True, dtype=wide).astype(x.dtype)


def row_max(x):
    return x.max(axis=-1, keepdims=True)


# ---- the softmax of whole rows, and the same a block at a time


def one_shot_softmax(scores):
    weights = np.exp(scores - row_max(scores))
    return weights / row_sum(weights)


def online_softmax(scores):
    m = np.full_like(scores[:, :1], -np.inf)
    l = np.zeros_like(m)
    for start in range(0, scores.shape[1], BLOCK):
        s = scores[:, start : start + BLOCK]
        m_new = np.maximum(m, row_max(s))
        # Every weight in l was measured from m, so all of them are too large by the same factor exp(m_new - m).
        # One product repairs the sum; no weight has to be seen again.
        l = l * np.exp(m - m_new) + row_sum(np.exp(s - m_new))
        m = m_new
    return np.exp(scores - m) / l


# ---- attention, likewise


def one_shot_attention(q, k, v):
    scores = matmul(q, k.T)
    weights = np.exp(scores - row_max(scores))
    return matmul(weights, v) / row_sum(weights)


def online_attention(q, k, v):
    m = np.full((len(q), 1), -np.inf, q.dtype)
    l = np.zeros((len(q), 1), q.dtype)
    o = np.zeros((len(q), v.shape[1]), q.dtype)
    for start in range(0, len(k), BLOCK):
        s = matmul(q, k[start : start + BLOCK].T)
        m_new = np.maximum(m, row_max(s))
        rescale, weights = np.exp(m - m_new), np.exp(s - m_new)
        l = l * rescale + row_sum(weights)
        # o is a sum with the same weights, so the same factor repairs it. Nothing else is kept from block to block.
        o = o * rescale + matmul(weights, v[start : start + BLOCK])
        m = m_new
    return o / l


# ---- the comparison


def problem(n, spread, dtype):
    """q, k, v with scores of standard deviation `spread`; 1 / sqrt(D) is already in q."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((rows, HEAD_DIM)) for rows in (ROWS, n, n))
    return (q * spread / np.sqrt(HEAD_DIM)).astype(dtype), k.astype(dtype), v.astype(dtype)


def errors(got, want, size):
    """Largest absolute error, and the relative error at the median, the 99th percentile and the maximum.

    An output is a sum of weight * value that may cancel to nearly 0, so its error is taken relative to the sum of
    weight * |value|, the size of what was added up. A probability is its own size; those below 1e-30 are left out, as
    they leave the range of normal numbers.
    """
    error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    size = size.astype(np.float64)
    relative = error[size > 1e-30] / size[size > 1e-30]
    return [error.max(), *np.percentile(relative, (50, 99)), relative.max()]


def main():
    head = ("dtype", "scores", "N", "what", "max abs", "rel p50", "rel p99", "rel max", "limit")
    print("{:9} {:>10} {:>5} {:10} {:>8} {:>8} {:>8} {:>8} {:>7}".format(*head))
    broken = 0
    for dtype in (np.float64, np.float32, ml_dtypes.bfloat16):
        name = np.dtype(dtype).name
        for label, spread in (("normal", 1.0), ("large x10", 10.0)):
            for n in (128, 200, 1024, 4096):
                q, k, v = problem(n, spread, dtype)
                scores = matmul(q, k.T)
                p = one_shot_softmax(scores)
                out = one_shot_attention(q, k, v)
                rows = {
                    "softmax": errors(online_softmax(scores), p, p),
                    "attention": errors(online_attention(q, k, v), out, matmul(p, np.abs(v))),
                }
                for what, (absolute, p50, p99, largest) in rows.items():
                    passed = largest <= LIMITS[name]
                    broken += not passed
                    numbers = f"{absolute:8.1e} {p50:8.1e} {p99:8.1e} {largest:8.1e} {LIMITS[name]:7.0e}"
                    print(f"{name:9} {label:>10} {n:5} {what:10} {numbers}{'' if passed else '  BROKEN'}")
    print(f"{broken} limits broken" if broken else "every error is within its limit")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
