"""Against PyTorch, where it is installed: CI installs it from the extra `interop` and runs `-m interop`."""

import ml_dtypes
import numpy as np
import pytest

from flash_numba import attention, attention_grad

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


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_are_described_to_the_gpu_backend_as_they_are(dtype):
    """Address, shape, strides and dtype of a tensor as `gpu.arrays` takes them, and a tensor over memory of ours."""
    from flash_numba.gpu import arrays, dlpack

    x = torch.zeros(2, 3, 4, 5).to(getattr(torch, dtype)).transpose(1, 2)
    library = arrays.Torch(torch)
    seen = library.view("q", x, 0)
    assert (seen.address, seen.shape, seen.dtype.name) == (x.data_ptr(), (2, 4, 3, 5), dtype)
    assert [stride // seen.dtype.itemsize for stride in seen.strides] == list(x.stride())
    assert dlpack.contents(dlpack.export(x, None))[:4] == seen.contents()[:4]
    assert hash(library.form(x, x, x)) != hash(library.form(x, x, x.transpose(1, 2)))
    assert arrays.device_of(x) is None
    array = np.arange(12).reshape(3, 4).astype(seen.dtype)[:, ::2]
    of = dlpack.Contents(array.ctypes.data, array.shape, array.strides, array.dtype, 0, dlpack.CPU, False)
    got = torch.from_dlpack(arrays.DeviceArray.at(of, array))
    assert got.dtype == x.dtype
    assert got.double().tolist() == array.astype(np.float64).tolist()


# ---- gradients


def by_autograd(dout, *leaves, **options):
    """The derivatives of sum(sdpa(q, k, v) * dout) by q, k, v and, if there is a fourth, the bias."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    if len(leaves) > 3:
        options["attn_mask"] = leaves[3]
    sdpa(*leaves[:3], **options).backward(dout)
    return [leaf.grad.double().numpy() for leaf in leaves]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("queries", [5, 130])
@pytest.mark.parametrize("rule", ["plain", "causal", "mask", "bias", "bias of keys", "gqa", "scale"])
def test_gradients_agree_with_autograd(rule, queries, backend):
    rng = np.random.default_rng(0)
    keys = queries if rule == "causal" else 97
    q, dout = (rng.standard_normal((2, 4, queries, 32)) for _ in range(2))
    k, v = (rng.standard_normal((2, 2 if rule == "gqa" else 4, keys, 32)) for _ in range(2))
    ours, theirs, bias = {}, {}, ()
    if rule == "causal":
        ours, theirs = {"causal": "top-left"}, {"is_causal": True}
    elif rule == "mask":
        mask = rng.random((2, 1, queries, keys)) < 0.6
        ours, theirs = {"mask": mask}, {"attn_mask": torch.from_numpy(mask)}
    elif rule.startswith("bias"):
        bias = (rng.standard_normal((4, queries, keys) if rule == "bias" else (2, 1, 1, keys)),)
        ours = {"bias": bias[0]}
    elif rule == "gqa":
        theirs = {"enable_gqa": True}
    elif rule == "scale":
        ours, theirs = {"scale": -0.3}, {"scale": -0.3}
    want = by_autograd(*tensors(dout, q, k, v, *bias), **theirs)
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **ours)
    got = attention_grad(dout, q, k, v, out, lse, backend=backend, **ours)
    for dx, theirs_dx in zip(got, want, strict=False):
        np.testing.assert_allclose(dx, theirs_dx, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 2, 512, 64), (1, 2, 300, 128), (2, 4, 130, 40)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_are_as_exact_as_autograds(dtype, shape, causal):
    """Forward and backward in the dtype, against both in float64 on the same numbers: at most twice torch's error."""
    drawn = [torch.from_numpy(np.random.default_rng(n).standard_normal(shape)) for n in range(4)]
    dout, *qkv = (x.to(getattr(torch, dtype)) for x in drawn)
    exact = by_autograd(dout.double(), *(x.double() for x in qkv), is_causal=causal)
    theirs = by_autograd(dout, *qkv, is_causal=causal)
    ours_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    dout, q, k, v = (x.double().numpy().astype(ours_dtype) for x in (dout, *qkv))
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    ours = attention_grad(dout, q, k, v, out, lse, causal=causal)
    errors = [np.abs(x.astype(np.float64) - want) for x, want in zip(ours[:3], exact, strict=True)]
    allowed = [np.abs(x - want) for x, want in zip(theirs, exact, strict=True)]
    assert max(error.max() for error in errors) <= 2 * max(error.max() for error in allowed)
    for error, other in zip(errors, allowed, strict=True):
        assert np.sqrt(np.mean(error**2)) <= 2 * np.sqrt(np.mean(other**2))
