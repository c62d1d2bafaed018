"""Few queries against many keys: what `test_conformance.py` can't see of `cpu/decode.py` from outside."""

import ml_dtypes
import numpy as np
import pytest

import flash_numba
from flash_numba import attention, prepared, reference
from flash_numba.cpu import launch, plan
from flash_numba.cpu.backend import CPU
from flash_numba.problem import describe


@pytest.mark.parametrize("dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_16_bit_format_is_float32_to_the_bit(dtype, rows, dim):
    """However K and V are read (as they are stored, converted in registers or through a block), sums run alike."""
    rng = np.random.default_rng(dim + rows)
    q, k, v = (rng.standard_normal((2, n, dim)).astype(dtype) for n in (rows, 1300, 1300))
    for keys in (1300, 21, 3):
        got, want = np.empty(q.shape, np.float32), np.empty(q.shape, np.float32)
        attention(q, k[:, :keys], v[:, :keys], out=got)
        attention(*(x.astype(np.float32) for x in (q, k[:, :keys], v[:, :keys])), out=want)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_head_alone_or_in_a_group(dtype):
    """A row's scores are summed in the same order for any number of rows that share the keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, n, 64)).astype(dtype) for heads, n in ((8, 1), (1, 700), (1, 700)))
    _, together = attention(q, k, v, return_lse=True)
    alone = [attention(q[h : h + 1], k, v, return_lse=True)[1] for h in range(8)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_hidden_keys_beyond_a_whole_register(dtype):
    """The last keys go through a padded block; whatever lies behind them, NaN here, isn't seen."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((4, n, 64)).astype(dtype) for n in (1, 96, 96))
    k[:, 77:], v[:, 77:] = np.nan, np.nan
    want = attention(q, k[:, :77].copy(), v[:, :77].copy())
    np.testing.assert_array_equal(attention(q, k[:, :77], v[:, :77]), want)
    lengths = attention(q[None], k[None], v[None], kv_lengths=np.array([77]))
    np.testing.assert_array_equal(lengths[0], want)


def parameters_of(q, k, v):
    call = flash_numba.checked.checked_call(q, k, v, CPU())[0]
    return launch.choose_kernel(describe(call)[0], call.lse.dtype)


@pytest.mark.parametrize("keys", [0, 1, 1024, 1025, 32768, 2**20, 2**31 - 1])
@pytest.mark.parametrize(("heads", "queries", "columns"), [(128, 16, 512), (1, 1, 64), (8, 1, 128), (64, 16, 1)])
def test_split_states_are_bounded(heads, queries, columns, keys):
    """However many keys there are; and few rows are still split at every 1024 keys."""
    q, k = np.empty((heads, queries, 1), np.float32), np.broadcast_to(np.float32(0), (1, keys, 1))
    kernel, parameters = parameters_of(q, k, np.broadcast_to(np.float32(0), (1, keys, columns)))
    splits, split_keys = int(parameters["splits"]), int(parameters["split_keys"])
    assert kernel == "decode"
    assert splits == max(1, -(-keys // split_keys))
    assert splits * int(parameters["state_bytes"]) <= 16 * 2**20 or splits == 1
    assert split_keys % 1024 == 0
    if heads * queries == 1 and keys <= 2**20:
        assert split_keys == 1024


@pytest.mark.parametrize("keys", [1024, 3000, 5000])
def test_longer_splits_give_the_same(keys, monkeypatch):
    """Within rounding: partial sums are taken over other keys."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((heads, n, 40), dtype=np.float32) for heads, n in ((6, 5), (1, keys), (1, keys)))
    bias = rng.standard_normal((5, keys), dtype=np.float32)
    want = reference.attention(q, k, v, causal=True, bias=bias)
    np.testing.assert_allclose(attention(q, k, v, causal=True, bias=bias), want, atol=2e-6)
    monkeypatch.setattr(plan, "STATES_BYTES", 16000)  # two splits at most
    prepared._known.clear()
    assert int(parameters_of(q, k, v)[1]["splits"]) <= 2
    np.testing.assert_allclose(attention(q, k, v, causal=True, bias=bias), want, atol=2e-6)
