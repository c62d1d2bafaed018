"""The contract that every backend keeps (`backend.py`), asked of each directly and through the public calls."""

import inspect

import numpy as np
import pytest

from flash_numba import (
    AttentionStream,
    attention,
    attention_grad,
    attention_partial,
    attention_varlen,
    attention_varlen_grad,
    backend,
    backends,
    interface,
    merge,
    reference,
    stream,
)
from flash_numba.backend import Support
from flash_numba.checked import checked_call
from flash_numba.chunks import Chunks
from flash_numba.cpu import backend as cpu
from flash_numba.gpu import backend as gpu
from flash_numba.reference_backend import ReferenceBackend

IMPLEMENTED = [cpu.CPU, gpu.OnGPU, gpu.Copies, gpu.Transfer, ReferenceBackend]
ON_HOST = [cpu.CPU(), ReferenceBackend()]
OTHERS = {
    "PreparedCall": [cpu.Prepared, gpu.Prepared, gpu.PreparedCopies],
    "Remembered": [cpu.Remembered, gpu.Remembered],
    "StreamState": [cpu.State, Chunks],
}


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def parts_of(contract):
    return {name: value for name, value in vars(contract).items() if inspect.isfunction(value) and name[0] != "_"}


def assert_kept(contract, implementation):
    for name, function in parts_of(contract).items():
        asked = list(inspect.signature(function).parameters.values())
        given = list(inspect.signature(getattr(implementation, name)).parameters.values())
        for want, got in zip(asked, given, strict=False):
            assert (got.name, got.kind, got.default) == (want.name, want.kind, want.default), (implementation, name)
        assert len(given) >= len(asked)
        assert all(more.default is not more.empty for more in given[len(asked) :])


@pytest.mark.parametrize("implementation", IMPLEMENTED, ids=lambda x: x.__name__)
def test_backends_have_all_of_the_contract(implementation):
    assert_kept(backend.Backend, implementation)
    for name in ("name", "array"):
        assert isinstance(getattr(implementation, name), (str, type))


@pytest.mark.parametrize("contract", OTHERS)
def test_what_they_return_has_all_of_its_contract(contract):
    for implementation in OTHERS[contract]:
        assert_kept(getattr(backend, contract), implementation)


def test_support_is_yes_or_a_reason():
    assert Support.yes()
    Support.yes().require()
    no = Support.no("rows are odd", TypeError)
    assert not no
    with pytest.raises(TypeError, match="rows are odd"):
        no.require()


# ---- gradients on a GPU: no, and why


def test_gradients_of_backend_cuda_are_refused_with_the_reason():
    q = normal(2, 5, 8)
    out, lse = attention(q, q, q, return_lse=True)
    packed = [x.swapaxes(0, 1) for x in (out, q, q, q, out)]
    for call in (
        lambda: attention_grad(out, q, q, q, out, lse, backend="cuda"),
        lambda: attention_varlen_grad(*packed, lse, [0, 5], [0, 5], backend="cuda"),
    ):
        with pytest.raises(ValueError, match="backend='cuda' computes no gradients yet"):
            call()


def test_no_gpu_backend_supports_gradients():
    for chosen in (gpu.Copies(), gpu.OnGPU(None, None)):
        assert not chosen.supports(None, gradient=True)
    q = normal(2, 5, 8)
    call, _ = checked_call(q, q, q, ON_HOST[0])
    for chosen in ON_HOST:
        assert chosen.supports(call)
        assert chosen.supports(call, gradient=True)


# ---- the host's backends, asked directly


@pytest.mark.parametrize("chosen", ON_HOST, ids=lambda x: x.name)
def test_prepare_and_run_fill_the_call_in(chosen):
    q, k, v = normal(3, 4, 20, 8), normal(3, 2, 33, 8, seed=1), normal(3, 2, 33, 8, seed=2)
    rules = {"causal": True, "sinks": np.linspace(-1, 1, 4), "kv_lengths": [33, 20, 0], "softcap": 2.0}
    call, result = checked_call(q, k, v, chosen, **rules)
    prepared = chosen.prepare(call, repeated=True)
    prepared.run()
    want, want_lse = reference.attention(q, k, v, return_lse=True, **rules)
    np.testing.assert_allclose(result, want, atol=3e-6)
    np.testing.assert_allclose(call.lse, want_lse, atol=3e-6)
    kept = prepared.remembered(result, call.lse)
    assert (kept is not None) == chosen.remembers(np.ndarray)
    assert not chosen.remembers(list)
    if kept is not None:
        for a, b in zip(kept.run(q, k, v), (result, call.lse), strict=True):
            np.testing.assert_array_equal(a, b)
    nothing, _ = checked_call(q[..., :0, :], k, v, chosen)
    prepared = chosen.prepare(nothing)
    prepared.run()
    assert prepared.remembered(nothing.out, nothing.lse) is None


@pytest.mark.parametrize("chosen", ON_HOST, ids=lambda x: x.name)
@pytest.mark.parametrize("of_each", [False, True])
def test_merge_takes_sinks_of_each_head_and_of_each_batch_element(chosen, of_each):
    q, k, v = normal(2, 3, 4, 9, 8), normal(2, 3, 4, 12, 8, seed=1), normal(2, 3, 4, 12, 8, seed=2)
    sinks = normal(6, 4, seed=3).astype(float) if of_each else normal(1, 4, seed=3).astype(float)
    parts = [attention_partial(q, k[..., at, :], v[..., at, :], q_offset=0) for at in (slice(0, 5), slice(5, 12))]
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:-1], np.float32)
    chosen.merge([part[0] for part in parts], [part[1] for part in parts], sinks, out, lse)
    want, want_lse = reference.attention(q, k, v, sinks=sinks if of_each else sinks[0], return_lse=True)
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("position", [{"kv_total": 24}, {"q_offset": 4}])
@pytest.mark.parametrize("chosen", ON_HOST, ids=lambda x: x.name)
def test_streams_of_every_backend_agree_with_attention(monkeypatch, chosen, position, layout):
    """With dropout, whose rows count from `q_offset` and not from `kv_total`; and with sinks, which count once."""
    monkeypatch.setattr(stream, "choose", lambda name, **arrays: chosen)
    q, k, v = normal(2, 4, 20, 8), normal(2, 2, 24, 8, seed=1), normal(2, 2, 24, 8, seed=2)
    rules = {"causal": True, "dropout": 0.3, "seed": 5, "sinks": normal(2, 4, seed=3), "v_scale": [2.0, 3.0]}
    own = {"q_offset": 4} if "q_offset" in position else {}
    want, want_lse = reference.attention(q, k, v, **rules, **own, return_lse=True)
    turned = [x.swapaxes(1, 2) if layout == "bshd" else x for x in (q, k, v)]
    axis = 1 if layout == "bshd" else 2
    whole = AttentionStream(turned[0], layout=layout, **rules, **position)
    before, _ = whole.result()
    assert not before.any()
    for start, stop in ((0, 9), (9, 9), (9, 24)):
        whole.absorb(*(np.take(x, range(start, stop), axis=axis) for x in turned[1:]))
    out, lse = whole.result()
    np.testing.assert_allclose(out.swapaxes(1, 2) if layout == "bshd" else out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)
    assert whole.keys == 24


def test_the_reference_computes_packed_sequences_and_their_rules():
    q, k, v = normal(12, 4, 8), normal(14, 2, 8, seed=1), normal(14, 2, 8, seed=2)
    ends = np.array([0, 3, 3, 10]), np.array([0, 4, 6, 11])
    rules = {"causal": "top-left", "window": (2, None), "sinks": normal(3, 4), "k_scale": [[2, 3], [1, 2], [3, 1]]}
    got = attention_varlen(q, k, v, *ends, **rules, return_lse=True, backend="reference")
    want = reference.attention_varlen(q, k, v, *ends, **rules, return_lse=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float32))


def test_info_names_the_reference():
    q = normal(2, 5, 8)
    found = backends.choose("reference").facts(checked_call(q, q, q, ON_HOST[1])[0])
    assert found["accumulates in"] == "float64"


def test_the_public_calls_ask_whether_a_call_is_supported(monkeypatch):
    class Picky(cpu.CPU):
        def supports(self, call, gradient=False):
            return Support.no("not on Sundays", TypeError)

    for module in (interface, stream):
        monkeypatch.setattr(module, "choose", lambda name, **arrays: Picky())
    q = normal(2, 5, 8)
    for call in (
        lambda: attention(q, q, q, kv_lengths=3),
        lambda: attention_partial(q, q, q, q_offset=0),
        lambda: attention_varlen(q, q, q, [0, 2], [0, 2]),
        lambda: AttentionStream(q).absorb(q, q),
    ):
        with pytest.raises(TypeError, match="not on Sundays"):
            call()
    monkeypatch.undo()
    assert merge(*[[x] for x in attention_partial(q, q, q, q_offset=0)])[0].shape == q.shape
