"""Which weights dropout keeps: random words that depend on nothing but a weight's indices."""

import math

import numpy as np


def philox(counter, key):
    """Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3).

    `counter` is four integers or integer arrays below 2^32, which broadcast, and `key` two integers below 2^32. Returns
    four uint64 arrays of words below 2^32.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = (int(k) for k in key)
    for r in range(10):
        round_k0 = np.uint64((k0 + r * 0x9E3779B9) & 0xFFFFFFFF)
        round_k1 = np.uint64((k1 + r * 0xBB67AE85) & 0xFFFFFFFF)
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (product1 >> half) ^ c1 ^ round_k0, (product0 >> half) ^ c3 ^ round_k1
        c1, c3 = product1 & low, product0 & low
    return c0, c1, c2, c3


def seed_number(seed):
    """A seed as a number of 64 bits; a `numpy.random.Generator` is drawn from, once."""
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(0, 2**64, dtype=np.uint64))
    return None if seed is None else int(seed) % 2**64


def kept(dropout, seed, b, h, i, j):
    """Which weights dropout keeps: word j & 3 of the counter (j >> 2, i, h, b) is at least floor(dropout * 2^32)."""
    seed = seed_number(seed)
    if seed is None:
        raise ValueError(f"seed is needed where dropout is {dropout!r}")
    counter = [index % 2**32 for index in (j >> 2, i, h, b)]
    words = np.stack(np.broadcast_arrays(*philox(counter, (seed & 0xFFFFFFFF, seed >> 32))))
    word = np.take_along_axis(words, np.broadcast_to(j & 3, words.shape[1:])[None], axis=0)[0]
    return word >= math.floor(dropout * 2**32)
