"""The CUDA backend on a GPU, where there is one: `-m gpu`, with numba-cuda; with PyTorch or CuPy as far as installed.

`python -m benchmarks.gpu` runs the conformance cases too, as many as there is time for.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from test_conformance import (
    KernelConformance,
    expect_once,
    pytest_generate_tests,  # noqa: F401  gives the class here its cases
)

import flash_numba
from flash_numba import attention, attention_varlen
from flash_numba.backend import BackendError
from flash_numba.gpu import driver


def why_none():
    """Why there is no GPU to test on, or None."""
    if driver.SIMULATED:
        return "Numba simulates a GPU"
    try:
        driver.usable(driver.find(), 0)
    except BackendError as error:
        return str(error)
    return None


REASON = why_none()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def qkv(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


def is_on_tensor_cores(case):
    q, k, v, options = case.arguments()
    return q.size > 0 and flash_numba.info(q, k, v, **options, backend="cuda")["kernel"] == "tensor-core"


class TestOnGPU(KernelConformance):
    """Tensor cores take the weights in 16 bits: their limit is twice what an eager version in the dtype reaches."""

    backend = "cuda"

    def check(self, case, expected):
        if is_on_tensor_cores(case):
            from cuda_ptx import eager_limit  # where numba-cuda is installed

            q, k, v, options = case.arguments()
            limit = eager_limit(case.dtype, expected.out, q, k, v, **options)
            expected = replace(expected, out_limit=np.maximum(limit, expected.out_limit))
        super().check(case, expected)

    def test_sixteen_bits_are_the_float32_result_rounded(self, sixteen_bit_case):
        if is_on_tensor_cores(sixteen_bit_case):
            self.check(sixteen_bit_case, expect_once(sixteen_bit_case))
        else:
            super().test_sixteen_bits_are_the_float32_result_rounded(sixteen_bit_case)


class Library:
    """How a test goes from NumPy to a library's arrays on the GPU and back."""

    def __init__(self, name):
        self.module = pytest.importorskip(name)
        self.name = name

    def there(self, *arrays):
        if self.name == "torch":
            return [self.module.from_numpy(np.ascontiguousarray(x)).cuda() for x in arrays]
        if self.name == "jax":
            return [self.module.numpy.asarray(x) for x in arrays]
        return [self.module.asarray(x) for x in arrays]

    def back(self, x):
        return x.cpu().numpy() if self.name == "torch" else np.asarray(x.get() if self.name == "cupy" else x)


@pytest.fixture(params=["torch", "cupy", "jax"])
def library(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"no {request.param}")
    return Library(request.param)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_of_a_library_give_its_arrays(library, dtype):
    arrays = qkv(2, 4, 200, 64, dtype=dtype)
    given = library.there(*arrays)
    for _ in range(3):  # the third is a remembered call
        out, lse = attention(*given, causal=True, return_lse=True)
        assert type(out) is type(given[0])
        want, want_lse = attention(*arrays, causal=True, return_lse=True, backend="cuda")
        np.testing.assert_array_equal(library.back(out), want)
        np.testing.assert_array_equal(library.back(lse), want_lse)


def test_packed_sequences_and_numbers_on_the_gpu(library):
    q, k, v = qkv(90, 4, 64)
    ends = np.array([0, 20, 20, 77], np.int32)
    slopes = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    want = attention_varlen(q, k, v, ends, ends, alibi_slopes=slopes, backend="reference")
    *given, ends, slopes = library.there(q, k, v, ends, slopes)
    got = attention_varlen(*given, ends, ends, alibi_slopes=slopes)
    np.testing.assert_allclose(library.back(got), want, rtol=2e-5, atol=2e-5)


def test_work_goes_to_the_current_stream():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 16, 2048, 64, device="cuda", dtype=torch.float16)
    want = attention(x, x, x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y = x * 1
        got = attention(y, y, y)  # wrong if it didn't wait for y
        got = got * 1
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, want)


def test_strided_and_misaligned_tensors():
    torch = pytest.importorskip("torch")
    base = torch.randn(2, 100, 4, 80, device="cuda", dtype=torch.float16)
    aligned, odd = base[..., :64].transpose(1, 2), base[..., 1:65].transpose(1, 2)
    for x in (aligned, odd, aligned):
        for _ in range(3):
            got = attention(x, x, x, causal=True)
            want = attention(*[x.cpu().numpy()] * 3, causal=True, backend="reference")
            np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-3, atol=2e-3)
    assert "16 bytes" in flash_numba.info(odd, odd, odd)["not tensor-core"]
