"""Score rules, written once as plain functions (see `ops.py`): what is done to a score, and what hides a key.

Scores are in base 2, so whatever is added comes multiplied by log2(e); soft-capping only needs its cap so. A row stands
at a position `p`; positions and key indices count from the same key (`geometry.py`). The order is scale, softcap, then
ALiBi and bias, then masks.
"""

from math import e, inf, log2

from .ops import maximum, select, tanh

LOG2E = log2(e)


def softcapped(s, cap, inverse):
    """cap * tanh(s / cap): scores bounded smoothly by the cap (Gemma 2, arXiv:2408.00118, section 2)."""
    return cap * tanh(s * inverse)


def softcap_slope(capped, cap, inverse):
    """The derivative of `softcapped` by the score, from what it gave: 1 - tanh(s / cap)**2.

    Exactly 0 where the cap is reached, whatever rounding has made of cap * inverse: there q and k may be as large as
    they like.
    """
    t = capped * inverse
    return select(maximum(capped, -capped) == cap, 0.0, 1.0 - t * t)


def with_alibi(s, slope, p, j):
    """Attention with linear biases, symmetric: -slope * |p - j| (Press et al. 2021, arXiv:2108.12409, section 3)."""
    return s - slope * maximum(p - j, j - p)


def with_bias(s, bias, lowest):
    """A float bias added. -inf in it is a mask; finite values saturate at `lowest` and -`lowest`, in base 2."""
    scaled = bias * LOG2E
    scaled = select(-lowest < scaled, -lowest, maximum(lowest, scaled))  # comparisons that a NaN fails
    return select(maximum(bias, -bias) == inf, bias, s + scaled)


def hide(s, seen):
    """The score, or -inf where the key isn't seen. A selection, so that a NaN in a hidden place can't leak."""
    return select(seen, s, -inf)
