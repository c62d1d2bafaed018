"""Against PyTorch, where it is installed: CI installs it from the extra `interop` and runs `-m interop`."""

import numpy as np
import pytest

from flash_numba import attention

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch", reason="the extra interop isn't installed")
sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


@pytest.mark.parametrize("queries", [5, 130])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", ["plain", "causal", "mask", "bias", "gqa", "scale"])
def test_attention_agrees_with_torch(rule, dtype, queries):
    rng = np.random.default_rng(0)
    keys = queries if rule == "causal" else 97
    q = rng.standard_normal((2, 4, queries, 32)).astype(dtype)
    k, v = (rng.standard_normal((2, 2 if rule == "gqa" else 4, keys, 32)).astype(dtype) for _ in range(2))
    ours, theirs = {}, {}
    if rule == "causal":
        ours, theirs = {"causal": "top-left"}, {"is_causal": True}
    elif rule == "mask":
        mask = rng.random((2, 1, queries, keys)) < 0.6
        ours, theirs = {"mask": mask}, {"attn_mask": torch.from_numpy(mask)}
    elif rule == "bias":
        bias = rng.standard_normal((4, queries, keys)).astype(dtype)
        ours, theirs = {"bias": bias}, {"attn_mask": torch.from_numpy(bias)}
    elif rule == "gqa":
        theirs = {"enable_gqa": True}
    elif rule == "scale":
        ours, theirs = {"scale": -0.3}, {"scale": -0.3}
    want = sdpa(*tensors(q, k, v), **theirs).numpy()
    limit = 1e-5 if dtype is np.float32 else 1e-13
    np.testing.assert_allclose(attention(q, k, v, **ours), want, rtol=limit, atol=limit)


def test_a_numpy_view_of_a_tensor_is_taken_as_it_is():
    q = torch.randn(1, 3, 40, 16).transpose(1, 2)  # sequence first
    got = attention(q.numpy(), q.numpy(), q.numpy(), layout="bhsd")
    np.testing.assert_allclose(got, sdpa(q, q, q).numpy(), rtol=1e-5, atol=1e-5)
