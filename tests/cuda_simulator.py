"""Conformance of the tile kernel and the decode kernel in Numba's simulator; run by `test_cuda_tiles.py`.

The simulator runs each GPU thread as one of Python's, so cases are small: every pair of score rules, with many query
rows and few by turns, and the cheapest of the other cases that together have all features.
"""

import itertools
import sys

import numpy as np
import pytest
from cases import BFLOAT16, CASES, FLOAT16, FLOAT32, FLOAT64, RULES, rule_case
from numba.core import config
from test_conformance import FEATURES, Conformance, expect, same_bits

from flash_numba import attention_varlen, reference

assert config.ENABLE_CUDASIM, "to be run with NUMBA_ENABLE_CUDASIM=1"
sys.setswitchinterval(1e-4)  # threads wait for one another at barriers

MAX_COST = 140_000
# A NaN is what several cases are about, and products of 32 bits in the random generator are meant to wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Simulator(Conformance):
    backend = "cuda"


def cheapest_of_each_feature():
    """The cheapest cases that have all features among them."""
    met = set()
    for case in sorted(CASES, key=lambda case: case.cost):
        if case.cost <= MAX_COST and not case.features <= met:
            met |= case.features
            yield case


def small_rule_cases():
    """Every rule and every pair of them, with 20 rows (the tile kernel) and 3 (decode) by turns."""
    rules = [*itertools.combinations(RULES, 1), *itertools.combinations(RULES, 2)]
    for number, names in enumerate(rules):
        dtype = (FLOAT32, FLOAT16, FLOAT64, FLOAT32, BFLOAT16)[number % 5]
        if "float8" in names and dtype == FLOAT64:
            dtype = FLOAT32
        rows, dim = ((20, 8), (3, 16))[number % 2]
        shape = {"batch": 1, "heads": 2, "kv_heads": 1, "rows": rows, "keys": 27, "dim": dim}
        yield rule_case(f"{'+'.join(names)}-{dtype}-{rows}", *names, dtype=dtype, **shape)


def by_name(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def test_all_features_are_among_the_cases():
    assert frozenset().union(*(case.features for case in cheapest_of_each_feature())) == FEATURES


@by_name(cheapest_of_each_feature())
def test_case(case):
    Simulator().check(case, expect(case))


@by_name(small_rule_cases())
def test_rules(case):
    Simulator().check(case, expect(case))


def test_packed_sequences():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((34, 2, 8), (40, 1, 8), (40, 1, 12)))
    starts = [0, 3, 3, 21, 30], [0, 12, 15, 38, 38]
    rules = {"causal": True, "window": (11, 0), "alibi_slopes": [0.2, 0.4], "sinks": [0.3, -0.2]}
    out, lse = attention_varlen(q, k, v, *starts, **rules, return_lse=True, backend="cuda")
    want, want_lse = reference.attention_varlen(q, k, v, *starts, **rules, return_lse=True)
    np.testing.assert_allclose(out[:30], want[:30], atol=2e-6)
    np.testing.assert_allclose(lse[:, :30], want_lse[:, :30], atol=2e-6)
    assert (out[30:] == 0).all()


@pytest.mark.parametrize("rows", [3, 20])
def test_the_batch_changes_no_bit(rows):
    rng = np.random.default_rng(0)
    shapes = (3, 4, rows, 16), (3, 2, 45, 16), (3, 2, 45, 16)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    out, lse = Simulator().attend(q, k, v, causal=True, return_lse=True)
    one, one_lse = Simulator().attend(q[1:2, 2:], k[1:2, 1:], v[1:2, 1:], causal=True, return_lse=True)
    assert same_bits(np.ascontiguousarray(one), np.ascontiguousarray(out[1:2, 2:]))
    assert same_bits(np.ascontiguousarray(one_lse), np.ascontiguousarray(lse[1:2, 2:]))
