"""Few queries against many keys: what `test_conformance.py` can't see of `cpu/decode.py` from outside."""

import ml_dtypes
import numpy as np
import pytest

from flash_numba import attention


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
