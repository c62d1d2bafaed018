"""The signatures of the public calls, against the one record of their keywords (`rules.py`)."""

import inspect
from types import ModuleType

import numpy as np
import pytest

import flash_numba
from flash_numba import AttentionStream, prepared, rules
from flash_numba.call import Call

CALLS = {
    "attention": flash_numba.attention,
    "attention_varlen": flash_numba.attention_varlen,
    "attention_partial": flash_numba.attention_partial,
    "attention_grad": flash_numba.attention_grad,
    "attention_varlen_grad": flash_numba.attention_varlen_grad,
    "AttentionStream": AttentionStream,
    "AttentionStream.absorb": AttentionStream.absorb,
    "merge": flash_numba.merge,
    "warmup": flash_numba.warmup,
}
NOT_CALLED_WITH_RULES = {"Gradients", "info"}  # a result; and what takes the options of `attention` as they come
EMPTY = inspect.Parameter.empty


def keywords(function):
    of = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in of if parameter.kind == parameter.KEYWORD_ONLY}


def test_every_public_call_is_here():
    public = {name for name in flash_numba.__all__ if not isinstance(getattr(flash_numba, name), ModuleType)}
    assert public == {name.partition(".")[0] for name in CALLS} | NOT_CALLED_WITH_RULES
    assert {call for rule in rules.RULES for call in rule.calls} == set(CALLS)
    methods = {name for name, value in vars(AttentionStream).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {name for name in methods if keywords(getattr(AttentionStream, name))} == {"absorb"}


@pytest.mark.parametrize("name", CALLS)
def test_keywords_and_defaults_are_those_of_the_record(name):
    recorded = rules.defaults_of(name)
    want = {keyword: EMPTY if default is rules.REQUIRED else default for keyword, default in recorded.items()}
    got = keywords(CALLS[name])
    assert got == want
    assert {keyword: type(default) for keyword, default in got.items()} == {
        keyword: type(default) for keyword, default in want.items()
    }  # False isn't 0


@pytest.mark.parametrize("name", [name for name in CALLS if name != "AttentionStream.absorb"])
def test_every_keyword_is_documented(name):
    """By the call itself, or by the one that its docstring refers to."""
    text = inspect.getdoc(CALLS[name])
    while "The other arguments are `" in text:
        other = text.partition("The other arguments are `")[2].partition("`")[0]
        text = text.replace("The other arguments are `", "", 1) + inspect.getdoc(CALLS[other])
    documented = {line.strip().partition(":")[0] for line in text.splitlines()}
    prose = text.replace("`", "")
    missing = [keyword for keyword in keywords(CALLS[name]) if keyword not in documented and keyword not in prose]
    assert missing == []


def test_the_record_is_whole():
    names = [rule.name for rule in rules.RULES]
    assert len(names) == len(set(names))
    assert {rule.remembered for rule in rules.RULES} <= {rules.KEY, rules.OFF, rules.FREE}
    fields = set(Call.__dataclass_fields__)
    assert {rule.field for rule in rules.RULES if rule.field} <= fields
    assert all((rule.check is None) == (rule.field == "") for rule in rules.RULES)
    assert tuple(f"d{name}" for name in rules.GRADIENTS) == flash_numba.Gradients._fields


def test_a_look_for_remembered_calls_is_given_every_keyword_that_matters():
    free = {rule.name for rule in rules.RULES if rule.remembered == rules.FREE}
    want = [name for name in inspect.signature(flash_numba.attention).parameters if name not in free]
    assert list(inspect.signature(prepared.recall).parameters) == want


def test_info_takes_the_options_of_attention_and_names_others():
    x = np.zeros((2, 3, 4), np.float32)
    defaults = rules.defaults_of("attention")
    assert flash_numba.info(x, x, x, **defaults) == flash_numba.info(x, x, x)
    text = inspect.getdoc(flash_numba.info)
    assert [name for name in defaults if name not in text] == []
    with pytest.raises(TypeError, match=r"unknown options: causl; there are causal, window"):
        flash_numba.info(x, x, x, causl=True)
