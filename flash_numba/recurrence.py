"""The online softmax, once: plain functions of one query row's state, compiled per target (see `ops.py`).

A row's state over the keys seen so far is `(m, l, O)`: the running maximum of its scores, the running sum of weights,
and the unnormalised output. Scores are in base 2 (log2(e) is folded into the scale), so a weight is `2**(s - ref)`.

    m_new, ref, alpha = advance(m, block_max)
    l = alpha * l + sum(weight(s, ref));   O = alpha * O + sum(weight(s, ref) * v)
    ...
    lse, factor = conclude(m, l, sink);   out = O * factor

Sources: the running maximum and sum, Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3, algorithm 3; with the
output carried along, Rabe and Staats 2021 (arXiv:2112.05682), section 2, and Dao 2023 (arXiv:2307.08691), section 3.1.
"""

from math import inf, log

from .ops import exp2, log2, maximum, select

LN2 = log(2.0)


def advance(m, block_max):
    """Take a block's maximum in: `(m_new, ref, alpha)`.

    `ref` is what weights are measured from, `alpha` rescales l and O to it. `ref` is 0 while no key has been seen,
    which is the only guard against (-inf) - (-inf) anywhere: every subtraction uses `ref`.
    """
    m_new = maximum(m, block_max)
    ref = select(m_new == -inf, 0.0, m_new)
    return m_new, ref, exp2(m - ref)


def weight(s, ref):
    """The weight of a key with score `s`, at most 1."""
    return exp2(s - ref)


def merge_weights(m_a, m_b):
    """`(m, alpha_a, alpha_b)`: the common maximum of two partial states, and the factors that bring each to it."""
    m, ref, alpha_a = advance(m_a, m_b)
    return m, alpha_a, exp2(m_b - ref)


def finish(l):
    """1 / l, or 0 for a row that saw no key. No epsilon: l >= 1 otherwise, as the largest score weighs 1."""
    return select(l == 0.0, 0.0, 1.0 / select(l == 0.0, 1.0, l))


def lse(m, l):
    """Natural logarithm of the row's sum of exp(score); -inf for a row that saw no key."""
    return LN2 * (m + log2(select(l == 0.0, 1.0, l)))


def conclude(m, l, sink):
    """What a row has come to: its log-sum-exp, and the factor that O is normalised by.

    The sink is a logit without a value, in base 2; -inf for none. It is one more state, (sink, 1, 0), merged last.
    """
    m, alpha, of_sink = merge_weights(m, sink)
    l = alpha * l + of_sink
    return lse(m, l), alpha * finish(l)


def normalised(o, l, factor):
    """A row's output. One whose weights are all 0 gives 0, whatever of V they were multiplied by: 0 * inf is NaN."""
    return select(l == 0.0, 0.0, o * factor)


def probability(s, lse):
    """A key's share of its row, exp(score - lse) with both in base 2, from a LSE that is there already.

    At most 1, whatever rounding a large LSE suffered. A row that saw no key has LSE -inf, and its scores are too.
    """
    ref = select(lse == -inf, 0.0, lse)
    return exp2(select(s > ref, 0.0, s - ref))


def score_gradient(p, dp, delta):
    """The loss's derivative by a score, from those by the weights: delta is their mean over the row, weighted by p.

    Dao et al. 2022 (arXiv:2205.14135), appendix B.2: delta = sum(p * dp) = sum(dO * O), less the derivative by the LSE.
    """
    return p * (dp - delta)
