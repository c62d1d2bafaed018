"""The GPU kernels' real PTX, run by the interpreter on the conformance cases and compared with the oracle.

Each case has its kernel module's format and head dimension put in, where the kernel is made for certain ones. Tensor
cores take the weights in 16 bits, so their limit is what an eager version in the same dtype reaches, twice; the tile
kernel and decode have the CPU's bands. Compiling costs more than running: cases are chosen to need few kernels.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda isn't installed")

from cases import BFLOAT16, CASES, FLOAT16, FLOAT32, FLOAT64, RULE_CASES, RULES, Case, rule_case
from cuda_ptx import Interpreted, attend, calls_on, eager_limit
from test_conformance import assert_within, expect, heads_first, same_bits

import flash_numba
from flash_numba import reference
from flash_numba.gpu import decode, tensorcore, tile

pytestmark = pytest.mark.cuda


def check(case: Case, module) -> None:
    """The output within the limits, the LSE within the bands, empty rows 0, everything written once."""
    q, k, v, options = case.arguments()
    with np.errstate(over="ignore"):
        expected = expect(case)
        out, lse = attend(Interpreted(module), q, k, v, return_lse=True, **options)
        limit = expected.out_limit
        if module is tensorcore:
            limit = eager_limit(case.dtype, expected.out, q, k, v, **options)
    assert_within("out", out, expected.out, limit)
    # as in test_conformance: what is -inf in base 2 and finite in natural units saturates
    lowest = float(np.finfo(lse.dtype).min) * np.log(2)
    seen = expected.lse != -np.inf
    wanted, got = (np.where(seen, np.maximum(x, lowest), x) for x in (expected.lse, lse))
    assert_within("lse", got, wanted, expected.lse_limit)
    assert (heads_first(out, case.layout)[lse == -np.inf] == 0).all()


def parametrize(cases):
    assert len({case.name for case in cases}) == len(cases)
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def named(*names, cases=CASES + RULE_CASES):
    found = [case for case in cases if case.name in names]
    assert len(found) == len(names), set(names) - {case.name for case in found}
    return found


# ---- tensor cores


def fitted(case: Case, dtype: np.dtype, dim: int = 64) -> Case:
    """The case with another head dimension and dtype."""
    shapes = {name: (*getattr(case, name)[:-1], dim) for name in "qkv"}
    return replace(case, name=f"{case.name}-as-D{dim}-{dtype}", dtype=dtype, **shapes)


def of_kinds(*kinds, without=(), cases=CASES):
    """The float32 cases of these kinds: they stand for all dtypes."""
    return [c for c in cases if c.dtype == FLOAT32 and set(kinds) & c.features and not set(without) & c.features]


# Rules that a kernel is compiled for, and the dtype that they are tried in here; without one the dtypes take turns.
COMPILED = {
    "softcap": FLOAT16, "alibi": BFLOAT16, "alibi-batch": BFLOAT16, "bias": FLOAT16, "bias-with-masks": FLOAT16,
    "bias-keys-float16": FLOAT16, "mask": BFLOAT16, "mask-keys": BFLOAT16, "dropout": FLOAT16,
}  # fmt: skip


def tensor_rule_cases():
    """Each rule alone, every third pair with at most one that is compiled in, and one set of many."""
    rules = [rule for rule in RULES if rule != "float8"]
    sets = [*itertools.combinations(rules, 1), *itertools.combinations(rules, 2)]
    for number, chosen in enumerate(sets):
        compiled = [COMPILED[rule] for rule in chosen if rule in COMPILED]
        if len(compiled) <= 1 and (len(chosen) == 1 or number % 3 == 0):
            dtype = compiled[0] if compiled else (FLOAT16, BFLOAT16)[number % 2]
            yield rule_case("tensor-" + "+".join(chosen), *chosen, dim=64, dtype=dtype)
    together = ["causal", "softcap", "alibi", "bias-with-masks", "mask", "sinks", "kv-lengths", "dropout"]
    yield rule_case("tensor-together", *together, dim=64, rows=150, keys=140, dtype=FLOAT16)


OWN_DIMS = named(*(f"D{dim}-bfloat16" for dim in (64, 96, 128, 192, 256)))
HEADS = ["GQA", "MQA", "2-D", "3-D", "5-D", "broadcast", "bshd"]
PLAIN = of_kinds(
    "lengths", *HEADS, "scale", "non-finite", "large logits", without=["mask", "NaN under a mask", "no keys"]
)
PLAIN = [fitted(case, (FLOAT16, BFLOAT16)[i % 2]) for i, case in enumerate(PLAIN[::2]) if case.cost < 3_000_000]
MASKED = of_kinds("NaN under a mask", "hidden-rows", "hidden-first-keys", "isolated-keys")
MASKED += of_kinds("mask", without=["causal"])[:24:3] + named("hidden-first-keys-causal", "isolated-keys-full")
MASKED = [fitted(case, BFLOAT16) for case in dict.fromkeys(MASKED)]
FAULTS = named(
    "nan-seen-with-window", "infinities-with-kv-lengths", "nan-seen-with-sinks", "nan-beyond-kv-lengths",
    "nan-outside-window", "zero-times-infinity", "scale-0-times-infinity", "window-beyond-the-first-blocks",
    "window-seen-by-no-row", "rows-before-the-first-key", "right-padded-causal",
)  # fmt: skip
FAULTS = [fitted(case, (FLOAT16, BFLOAT16)[i % 2]) for i, case in enumerate(FAULTS)]
FAULTS += [fitted(case, FLOAT16) for case in named(
    "rows-of-finfo-min-float32", "padding-by-finfo-min-in-bias-float32", "first-keys-hidden-by-bias",
    "nan-seen-with-softcap", "softcap-of-large-logits", "infinities-with-dropout", "nan-seen-with-bias-with-masks",
)]  # fmt: skip


@parametrize([*OWN_DIMS, *PLAIN, *MASKED, *tensor_rule_cases(), *FAULTS])
def test_tensor_cores(case):
    check(case, tensorcore)


# ---- the tile kernel and decode


def every(cases, n):
    return cases[::n]


SMALL = [case for case in CASES if case.dtype == FLOAT32 and case.q[-1] == case.v[-1] == 8 and case.cost < 500_000]
ODD = ("padded-rows", "off-by-one-byte", "big-endian")  # which a GPU isn't given
TILE_CASES = [case for case in SMALL if "non-finite" in case.features and "causal" in case.name.split("-")]
TILE_CASES += [case for case in SMALL if "memory" in case.features and not set(ODD) & case.features]
TILE_CASES += every([case for case in SMALL if "mask" in case.features and case not in TILE_CASES], 6)
TILE_RULES = [case for case in RULE_CASES if not case.name.endswith(("-few", "-few-long")) and case.q[-1] == 16]
TILE_CASES += [case for case in TILE_RULES if case.dtype == FLOAT32 and case.kv_dtype is None and len(case.about) == 1]
TILE_CASES += every(
    [case for case in TILE_RULES if case.dtype == FLOAT32 and len(case.about) == 2 and not case.kv_dtype], 6
)
TILE_CASES += every([case for case in TILE_RULES if case.dtype == FLOAT64], 6)
TILE_CASES += every([case for case in TILE_RULES if case.dtype == BFLOAT16 and not case.kv_dtype], 6)
TILE_CASES += named("D64-Dv32-float16", "D3-Dv1-float32", "float8-bfloat16")


@parametrize(list(dict.fromkeys(TILE_CASES)))
def test_tiles(case):
    check(case, tile)


FEW = [case for case in RULE_CASES if case.name.endswith("-few")]
DECODE_CASES = [case for case in FEW if case.dtype == FLOAT32 and case.kv_dtype is None and len(case.about) == 1]
DECODE_CASES += every([case for case in FEW if case.dtype == FLOAT32 and not case.kv_dtype and len(case.about) == 2], 8)
DECODE_CASES += every([case for case in FEW if case.dtype == BFLOAT16 and not case.kv_dtype], 6)
DECODE_CASES += [c for c in RULE_CASES if c.name.endswith("-few-long") and c.dtype == FLOAT32 and not c.kv_dtype]
DECODE_CASES += named("one-row-of-all-rules", "gqa-32/4-many-keys")


@parametrize(list(dict.fromkeys(DECODE_CASES)))
def test_decode(case):
    check(case, decode)


# ---- what all kernels promise

KERNELS = {
    "tensor cores": (tensorcore, 150, 64, FLOAT16, 2),
    "tiles": (tile, 70, 16, FLOAT32, 2),
    "decode": (decode, 5, 16, FLOAT32, 2),
}


def normal(*shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_neither_the_batch_nor_the_order_of_blocks_changes_a_bit(name):
    module, rows, dim, dtype, batch = KERNELS[name]
    q, k, v = (normal(batch, h, n, dim, dtype=dtype, seed=n) for h, n in ((4, rows), (2, 601), (2, 601)))
    out, lse = attend(Interpreted(module), q, k, v, causal=True, return_lse=True)
    backwards = attend(Interpreted(module, backwards=True), q, k, v, causal=True, return_lse=True)
    assert same_bits(out, backwards[0])
    assert same_bits(lse, backwards[1])
    one = attend(Interpreted(module), q[1:, 2:], k[1:, 1:], v[1:, 1:], causal=True, return_lse=True)
    assert same_bits(np.ascontiguousarray(out[1:, 2:]), one[0])
    assert same_bits(np.ascontiguousarray(lse[1:, 2:]), one[1])


@pytest.mark.parametrize("name", ["tensor cores", "tiles"])
def test_packed_sequences(name):
    module, rows, dim, dtype, _ = KERNELS[name]
    starts_q = np.array([0, 0, 1, 1 + rows // 2, 1 + rows // 2, rows])
    starts_k = np.array([0, 30, 30, 101, 140, 300])
    q, k, v = (normal(n, h, dim, dtype=dtype, seed=n) for h, n in ((4, rows + 2), (2, 300), (2, 300)))
    with calls_on(Interpreted(module)):
        out, lse = flash_numba.attention_varlen(q, k, v, starts_q, starts_k, causal=True, return_lse=True)
    want, want_lse = reference.attention_varlen(q, k, v, starts_q, starts_k, causal=True, return_lse=True)
    limit = 3e-3 if dtype == FLOAT16 else 5e-6
    np.testing.assert_allclose(out.astype(np.float64), want, atol=limit)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_parts_of_the_keys_merge(name):
    """The output in float32 for 16-bit inputs, and keys counted from k_offset."""
    module, rows, dim, dtype, _ = KERNELS[name]
    q, k, v = (normal(1, h, n, dim, dtype=dtype, seed=n) for h, n in ((4, rows), (2, 130), (2, 130)))
    parts = []
    with calls_on(Interpreted(module)):
        for keys in (slice(0, 60), slice(60, 130)):
            at = {"q_offset": 130 - rows, "k_offset": keys.start}
            parts.append(flash_numba.attention_partial(q, k[:, :, keys], v[:, :, keys], causal=True, **at))
    assert parts[0][0].dtype == np.float32
    out, lse = flash_numba.merge(*zip(*parts, strict=True))
    want, want_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(out, want, atol=1e-3 if dtype == FLOAT16 else 5e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)
