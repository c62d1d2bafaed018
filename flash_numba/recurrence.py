"""The online softmax, once: plain functions of one query row's state, compiled per target (see `ops.py`).

A row's state over the keys seen so far is `(m, l, O)`: the running maximum of its scores, the running sum of weights,
and the unnormalised output (accumulator). Scores are in base 2 (log2(e) is folded into the scale), so a weight is
`2**(s - ref)`.

    m_new, ref, alpha = advance(m, block_max)
    l = absorb(l, alpha, sum(weight(s, ref)));   O = alpha * O + sum(weight(s, ref) * v)
    ...
    lse, normalizer = finalize(m, l, sink);   out = normalized(O, l, normalizer)

O's update has the form of `absorb` and isn't a call of it, as it is the last step of a matrix product: kernels rescale
and add in the registers that the product ends in.

Sources: the running maximum and sum, Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3, algorithm 3; with the
output carried along, Rabe and Staats 2021 (arXiv:2112.05682), section 2, and Dao 2023 (arXiv:2307.08691), section 3.1.
"""

from math import inf, log

from .ops import exp2, log2, maximum, select

LN2 = log(2.0)
# An LSE whose rounding is off by this much (natural logarithm) has no digits left: scores of 1e6 in float32.
MOST_ROUNDING = 0.02


def advance(m, block_max):
    """Take a block's maximum in: `(m_new, ref, alpha)`.

    `ref` is what weights are measured from, `alpha` rescales l and O to it. `ref` is 0 while no key has been seen,
    which is the only guard against (-inf) - (-inf) anywhere: every subtraction uses `ref`.
    """
    m_new = maximum(m, block_max)
    ref = select(m_new == -inf, 0.0, m_new)
    return m_new, ref, weight(m, ref)


def weight(s, ref):
    """The weight of a key with score `s`, at most 1."""
    return exp2(s - ref)


def absorb(l, alpha, total):
    """The running sum with a block's sum of weights taken in."""
    return alpha * l + total


def merge(m_a, l_a, m_b, l_b):
    """Two partial states as one: `(m, l, alpha_a, alpha_b)`, where O = alpha_a * O_a + alpha_b * O_b.

    Associative up to rounding, so code merges in the order of keys. The identity is (-inf, 0, 0). Split-KV decoding
    (Flash-Decoding, Dao et al. 2023), streams and `flash_numba.merge` stand on it.
    """
    m, ref, alpha_a = advance(m_a, m_b)
    alpha_b = weight(m_b, ref)
    return m, absorb(l_a, alpha_a, alpha_b * l_b), alpha_a, alpha_b


def finish(l):
    """1 / l, or 0 for a row that saw no key. No epsilon: l >= 1 otherwise, as the largest score weighs 1."""
    return select(l == 0.0, 0.0, 1.0 / select(l == 0.0, 1.0, l))


def lse(m, l):
    """Natural logarithm of the row's sum of exp(score); -inf for a row that saw no key."""
    return LN2 * (m + log2(select(l == 0.0, 1.0, l)))


def finalize(m, l, sink):
    """A row's log-sum-exp and its normalizer, the factor of O, once all keys have been seen.

    The sink is a logit without a value, in base 2; -inf for none. It is one more state, (sink, 1, 0), merged last.
    """
    m, l, alpha, _ = merge(m, l, sink, 1.0)
    return lse(m, l), alpha * finish(l)


def normalized(o, l, normalizer):
    """A row's output. One whose weights are all 0 gives 0, whatever of V they were multiplied by: 0 * inf is NaN."""
    return select(l == 0.0, 0.0, o * normalizer)


def probability(s, lse):
    """A key's part of its row, exp(score - lse) with both in base 2, from a LSE that is there already.

    At most 1, whatever rounding a large LSE suffered. A row that saw no key has LSE -inf, and its scores are too.
    """
    ref = select(lse == -inf, 0.0, lse)
    return exp2(select(s > ref, 0.0, s - ref))


def rounding_factor(rounding):
    """exp(-rounding) for what an LSE lost when it was rounded, in natural units: a factor of all the row's P.

    A series to the second order, as roundings are small. 1 for an LSE without digits left (`MOST_ROUNDING`), which
    would make more than 1 of P, and for NaN.
    """
    small = maximum(rounding, -rounding) < MOST_ROUNDING
    return select(small, 1.0 - rounding * (1.0 - 0.5 * rounding), 1.0)


def score_gradient(p, dp, delta):
    """The loss's derivative by a score, from those by the weights: delta is their mean over the row, weighted by p.

    Dao et al. 2022 (arXiv:2205.14135), appendix B.2: delta = sum(p * dp) = sum(dO * O), less the derivative by the LSE.
    """
    return p * (dp - delta)
