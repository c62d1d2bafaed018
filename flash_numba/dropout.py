"""Philox-4x32-10, a counter-based random generator, as a plain function on 32-bit integers (see `ops.py`).

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3, constants from their table 2. Because a
word depends on the indices of its row, head and key alone, the mask is the same on every backend and for any tiling.
"""

from .ops import mul_high, select

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32
WEYL_0, WEYL_1 = 0x9E3779B9 - 2**32, 0xBB67AE85 - 2**32
ROUNDS = 10
SIGN = -(2**31)


def round_keys(seed):
    """The two 32-bit keys of each round, one after the other, as signed numbers, for a 64-bit seed."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    keys = [key for r in range(ROUNDS) for key in (low + r * WEYL_0, high + r * WEYL_1)]
    return [(key + 2**31) % 2**32 - 2**31 for key in keys]


def philox(c0, c1, c2, c3, keys):
    """The four random words of a counter: ten rounds of two full products, permuted and mixed with the round's keys."""
    for r in range(ROUNDS):
        c0, c1, c2, c3 = (
            mul_high(c2, MULTIPLIER_1) ^ c1 ^ keys[2 * r],
            c2 * MULTIPLIER_1,
            mul_high(c0, MULTIPLIER_0) ^ c3 ^ keys[2 * r + 1],
            c0 * MULTIPLIER_0,
        )
    return c0, c1, c2, c3


def word_of_key(word_0, word_1, word_2, word_3, j):
    """The random word of key j, one of the four that its counter gives: number j & 3."""
    even, odd = select((j & 2) == 0, word_0, word_2), select((j & 2) == 0, word_1, word_3)
    return select((j & 1) == 0, even, odd)


def kept(word, threshold):
    """Whether a key with this random word is kept: word >= threshold, both as unsigned numbers."""
    return (word ^ SIGN) >= (threshold ^ SIGN)
