"""What is done to a score, and in which order: the one place for all kernels. And what dropout does to a weight.

Formulas are those of `scores.py` and `dropout.py`. The tensor-core kernel is compiled for the rules of a call, `Rules`;
the other kernels are compiled for all of them and ask the record.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numba import types

from .. import dropout, ops, scores
from ..dtypes import BOOL
from .primitives import device, lane, scalar

int32 = types.int32


class Rules(NamedTuple):
    """What is done to scores and weights besides masks by position. Operands by their format, None for none."""

    softcap: bool = False
    alibi: bool = False
    bias: int | None = None
    mask: int | None = None
    dropout: bool = False

    @property
    def on_scores(self) -> bool:
        """Whether there are any but dropout, which is one on weights."""
        return self._replace(dropout=False) != Rules()


def rules_of(problem: np.ndarray) -> Rules:
    """The rules of a `PROBLEM` record."""
    bias, mask = (int(problem[f"{name}_format"]) if problem[name] else None for name in ("bias", "mask"))
    return Rules(bool(problem["softcap"]), bool(problem["slopes"]), bias, mask, bool(problem["keep_factor"]))


def in_order(softcap, alibi, operands, position=None):
    """One function that does these to scores in the order of all kernels: `value = stage(value, ...)`, one by one.

    The stages are device functions with the same arguments, of which the first is what the one before has returned.
    position: what hides keys by causal masks and windows; None where it isn't done score by score.
    """
    user_function = None  # the place of a user's function of the score; what the operands hide, -inf, has to stay so
    return chained([stage for stage in (softcap, alibi, operands, user_function, position) if stage is not None])


def chained(stages):
    """A function that gives each stage's result to the next one."""
    if len(stages) == 1:
        return stages[0]
    first, others = stages[0], chained(stages[1:])

    @device
    def both(value, *args):
        return others(first(value, *args), *args)

    return both


# -- one score ---------------------------------------------------------------------------------------------------------


class At(NamedTuple):
    """Where one score stands."""

    slope: float  # of its head
    position: float  # of its row and its key, both counted from any one key
    j: float
    bias: int  # addresses of its elements of the operands
    mask: int


def soft_cap(real):
    @device
    def softcapped(p, s):
        """A score through the soft cap that the record has."""
        return scalar(scores.softcapped(lane(s), lane(real(p.softcap)), lane(real(1.0 / p.softcap))))

    return softcapped


@device
def with_alibi(s, slope, position, j):
    """A score with ALiBi. Numbers of the kernel's floats."""
    return scalar(scores.with_alibi(lane(s), lane(slope), lane(position), lane(j)))


@device
def hidden_unless(s, seen):
    """The score, or -inf where the key isn't seen."""
    return scalar(scores.hide(lane(s), seen))


def operand_rules(accumulator):
    """`(with_operand, hides)`: a score with an element of a bias or a mask, and whether an element hides its key."""
    real, highest = accumulator.real, accumulator.highest

    @device
    def with_operand(s, x, code):
        if code == BOOL:
            return hidden_unless(s, x != real(0.0))
        return scalar(scores.with_bias(lane(s), lane(x), real(-highest)))

    @device
    def hides(x, code):
        return x == (real(0.0) if code == BOOL else real(-inf))

    return with_operand, hides


@device
def operand_of(p, n, bias_at, mask_at):
    """The n-th operand of the scores: its address, strides and format. A lone one is the first, whichever it is."""
    if n == 0 and p.bias != 0:
        return bias_at, p.bias_row, p.bias_column, p.bias_format
    return mask_at, p.mask_row, p.mask_column, p.mask_format


def score_rules(accumulator, rules):
    """A function for one score: `(score, seen) = apply((score, seen), p, at)`, where `at` is an `At`.

    rules: those that the kernel is compiled for, or None to ask the record. What isn't seen at first isn't read.
    """
    real, asks = accumulator.real, rules is None
    has_softcap, has_alibi = (False, False) if asks else (rules.softcap, rules.alibi)
    softcapped = soft_cap(real)

    @device
    def softcap(score, p, at):
        s, seen = score
        if has_softcap or (asks and p.softcap != 0.0):
            s = softcapped(p, s)
        return s, seen

    @device
    def alibi(score, p, at):
        s, seen = score
        if has_alibi or (asks and p.slopes != 0):
            s = with_alibi(s, at.slope, at.position, at.j)
        return s, seen

    operands = asked_operands(accumulator) if asks else compiled_operands(accumulator, rules)
    return in_order(softcap, alibi, operands)


def asked_operands(accumulator):
    """Those that the record has. A loop, so that reading any format is in the kernel only once."""
    read, (with_operand, hides) = accumulator.read, operand_rules(accumulator)

    @device
    def operands(score, p, at):
        s, seen = score
        for n in range((p.bias != 0) + (p.mask != 0)):
            address, _, _, code = operand_of(p, n, at.bias, at.mask)
            if seen:
                x = read(address, code)
                s, seen = with_operand(s, x, code), not hides(x, code)
        return s, seen

    return operands


def compiled_operands(accumulator, rules):
    """Those that a kernel is compiled for."""
    read, (with_operand, hides) = accumulator.read, operand_rules(accumulator)
    has_bias, has_mask = rules.bias is not None, rules.mask is not None
    bias_code, mask_code = rules.bias or 0, rules.mask or 0

    @device
    def operands(score, p, at):
        s, seen = score
        if has_bias:
            x = read(at.bias, bias_code)
            s, seen = with_operand(s, x, bias_code), seen and not hides(x, bias_code)
        if has_mask:
            x = read(at.mask, mask_code)
            s, seen = with_operand(s, x, mask_code), seen and not hides(x, mask_code)
        return s, seen

    return operands


# -- dropout -----------------------------------------------------------------------------------------------------------


@device
def random_words(p, head, i, group):
    """The four random words of a row for the keys 4 group to 4 group + 3, counted with the call's `key_index`."""
    row = lane(int32(head.row_index + i))
    return dropout.philox(lane(int32(group)), row, lane(int32(head.h)), lane(int32(head.b)), p.round_keys)


def weight_dropout(real):
    """`(with_word, dropped)`: dropout of one weight whose random word is known, and of that of row i and key j."""

    @device
    def with_word(p, w, word):
        """0, or the weight times 1 / (1 - p)."""
        return scalar(ops.select(dropout.kept(word, int32(p.drop_below)), lane(w * real(p.keep_factor)), 0.0))

    @device
    def dropped(p, head, w, i, j):
        key = p.key_index + j
        word_0, word_1, word_2, word_3 = random_words(p, head, i, key >> 2)
        return with_word(p, w, dropout.word_of_key(word_0, word_1, word_2, word_3, key))

    return with_word, dropped
