"""Programs that have NumPy raise on overflow, underflow and invalid operations can use us: `np.seterr(all="raise")`."""

import ml_dtypes
import numpy as np
import pytest

import flash_numba
from flash_numba import (
    AttentionStream,
    attention,
    attention_grad,
    attention_partial,
    attention_varlen,
    merge,
    reference,
)

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
ROWS = [3, 40]


def inputs(rows, dtype, scale=1.0):
    """Some numbers too large and some too small for the format of the weights, a NaN, an infinity."""
    rng = np.random.default_rng(rows)
    q, k, v = (rng.standard_normal((2, n, 16)) * size for n, size in ((rows, 30 * scale), (70, 30), (70, 1e-3)))
    v[0, 0, 0], v[1, 5, 3], k[0, 9, 1] = np.inf, np.nan, np.nan
    with np.errstate(all="ignore"):
        return [x.astype(dtype) for x in (q, k, v)]


RULES = {
    "plain": {},
    "masked": {"causal": True, "kv_lengths": 50},
    "sinks": {"sinks": [-np.inf, 1e30]},
    "bias": {"bias": np.where(np.arange(70) % 3, -1e30, np.finfo(np.float32).min)},
    "capped": {"softcap": 1e-20, "alibi_slopes": [1e30, 1e-30], "dropout": 0.5, "seed": 1},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_gradient(dtype, rows, rules):
    q, k, v = inputs(rows, dtype)
    dout = np.ones((2, rows, 16), dtype)
    with np.errstate(all="raise"):
        out, lse = attention(q, k, v, return_lse=True, **RULES[rules])
        attention_grad(dout, q, k, v, out, lse, **RULES[rules])
        attention(q, k, v, out=np.empty_like(out, np.float16 if dtype != np.float16 else np.float32), **RULES[rules])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_and_streams(dtype):
    q, k, v = inputs(40, dtype)
    with np.errstate(all="raise"):
        parts = [
            attention_partial(q, k[:, keys], v[:, keys], q_offset=30, k_offset=keys.start, causal=True)
            for keys in (slice(0, 20), slice(20, 70))
        ]
        merge(*zip(*parts, strict=True), sinks=[-np.inf, 1e30])
        stream = AttentionStream(q, kv_total=70, causal=True, sinks=[1.0, 1e30])
        for start in range(0, 70, 35):
            stream.absorb(k[:, start : start + 35], v[:, start : start + 35])
        stream.result()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_packed_sequences(dtype):
    q, k, v = (x.swapaxes(0, 1) for x in inputs(40, dtype))
    offsets = np.array([0, 10, 10, 40]), np.array([0, 30, 40, 60])
    with np.errstate(all="raise"):
        out, lse = attention_varlen(q, k, v, *offsets, sinks=[-np.inf, 1e30], return_lse=True)
        flash_numba.attention_varlen_grad(out * 0 + 1, q, k, v, out, lse, *offsets, sinks=[-np.inf, 1e30])


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype, rules):
    q, k, v = inputs(5, dtype)
    with np.errstate(all="raise"):
        out, lse = reference.attention(q, k, v, return_lse=True, **RULES[rules])
        reference.attention_grad(np.ones_like(out), q, k, v, out, lse, **RULES[rules])
        attention(q, k, v, backend="reference", **RULES[rules])
        reference.one_shot_attention(q, k, v)
        reference.online_attention(q, k, v, 16)
        reference.kv_outer_attention(q, k, v, 2, 16)
        reference.online_softmax(q, 4)
