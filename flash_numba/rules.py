"""One record of every keyword of the public calls: its default, how it is checked, and which calls take it.

The signatures of the public calls repeat names and defaults, as they are the interface; tests hold them to this record.
What makes a `Call` of keywords (`checked.py`), what `info` and `warmup` assume, and which calls are remembered
(`prepared.py`) go by it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from . import arguments as check
from .arguments import MAX_POSITION

LAYOUTS = ("bhsd", "bshd")
CAUSAL = (False, True, "top-left")
BACKENDS = ("auto", "cpu", "cuda", "reference")
WARMUP_BACKENDS = ("cpu", "cuda")
GRADIENTS = ("q", "k", "v", "bias", "sinks")  # what there are gradients of, in the order of `reference.Gradients`

# Kinds: what the value of a keyword is, and so where it is looked at.
VALUE = "value"  # of Python: a number, a choice, a pair
NUMBERS = "numbers"  # for each head or batch element; they may lie on a GPU, and are read by the host
ARRAY = "array"  # which stays where it lies
OPTION = "option"  # of a call, of which a `Call` says nothing

# What it means for remembered calls.
KEY = "key"  # its value is a part of the key
OFF = "off"  # only calls that leave it at its default are remembered
FREE = "free"  # it changes nothing in what is kept

REQUIRED = object()  # in place of a default


class Sizes(NamedTuple):
    """What shapes of numbers are checked against."""

    batch: tuple[int, ...]  # batch axes, or the number of packed sequences
    heads: int
    k_heads: int
    v_heads: int
    queries: int
    keys: int
    dim: int


Check = Callable[[str, Any, Sizes], Any]


class Rule(NamedTuple):
    """A keyword."""

    name: str
    default: Any
    kind: str
    calls: tuple[str, ...]  # the public calls that take it
    remembered: str = OFF
    field: str = ""  # of `Call`, which holds what `check` makes of the value; "" for what is checked with others
    check: Check | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})  # of the calls that have another one

    def default_of(self, call: str) -> Any:
        return self.defaults.get(call, self.default)


def per_head(name: str, value: Any, sizes: Sizes) -> Any:
    return check.per_head(name, value, sizes.batch, sizes.heads, "H")


def lengths_up_to(most: str) -> Check:
    return lambda name, value, sizes: check.per_batch(name, value, sizes.batch, 0, getattr(sizes, most))


def scales_of(heads: str) -> Check:
    return lambda name, value, sizes: check.head_scales(name, value, sizes.batch, getattr(sizes, heads))


def position(name: str, value: Any, sizes: Sizes) -> Any:
    return check.per_batch(name, value, sizes.batch, -MAX_POSITION, MAX_POSITION)


PADDED = ("attention", "attention_partial", "attention_grad")  # calls on batches, whose arrays have batch axes
STREAM, ABSORB = "AttentionStream", "AttentionStream.absorb"
ALL = (*PADDED, "attention_varlen", "attention_varlen_grad", STREAM)
WITH_SINKS = tuple(call for call in ALL if call != "attention_partial")
FORWARD = ("attention", "attention_varlen")
GRADIENT = ("attention_grad", "attention_varlen_grad")

RULES = (
    Rule("causal", False, VALUE, ALL, KEY),
    Rule("window", None, VALUE, ALL, KEY),
    Rule("scale", None, VALUE, ALL, KEY, "scale", lambda name, value, sizes: check.scale_factor(value, sizes.dim)),
    Rule("softcap", None, VALUE, ALL, KEY, "softcap", lambda name, value, sizes: check.softcap_value(value)),
    Rule("bias", None, ARRAY, (*PADDED, ABSORB)),
    Rule("mask", None, ARRAY, (*PADDED, ABSORB)),
    Rule("alibi_slopes", None, NUMBERS, ALL, OFF, "slopes", per_head),
    Rule("sinks", None, NUMBERS, (*WITH_SINKS, "merge"), OFF, "sinks", per_head),
    Rule("q_lengths", None, NUMBERS, PADDED, OFF, "q_lengths", lengths_up_to("queries")),
    Rule("kv_lengths", None, NUMBERS, PADDED, OFF, "kv_lengths", lengths_up_to("keys")),
    Rule(
        "q_offset", None, NUMBERS, (*PADDED, STREAM), OFF, "q_offset", position,
        defaults=MappingProxyType({"attention_partial": REQUIRED}),
    ),
    Rule(
        "k_offset", 0, VALUE, ("attention_partial", "attention_grad"), OFF, "k_offset",
        lambda name, value, sizes: check.key_count(name, value),
    ),
    Rule("dropout", 0.0, VALUE, ALL),
    Rule("seed", None, VALUE, ALL, FREE),  # as without dropout it is
    Rule("training", True, VALUE, ALL, FREE),
    Rule("k_scale", None, NUMBERS, ALL, OFF, "k_scales", scales_of("k_heads")),
    Rule("v_scale", None, NUMBERS, ALL, OFF, "v_scales", scales_of("v_heads")),
    Rule("layout", "bhsd", VALUE, (*PADDED, STREAM, "merge"), KEY),
    Rule("out", None, ARRAY, FORWARD),
    Rule("return_lse", False, OPTION, FORWARD, FREE),
    Rule("backend", "auto", OPTION, (*FORWARD, *GRADIENT, "warmup"), KEY, defaults=MappingProxyType({"warmup": "cpu"})),
    Rule(
        "threads", None, VALUE, (*FORWARD, *GRADIENT), KEY, "threads",
        lambda name, value, sizes: check.thread_count(name, value),
    ),
    Rule("progress", None, OPTION, (*ALL[:-1], "warmup")),  # False is as None, for remembered calls too
    Rule("dlse", None, OPTION, GRADIENT),
    Rule(
        "need", GRADIENTS, OPTION, GRADIENT,
        defaults=MappingProxyType({"attention_varlen_grad": tuple(name for name in GRADIENTS if name != "bias")}),
    ),
    Rule("kv_total", None, OPTION, (STREAM,)),
    Rule("head_dims", (64, 128), OPTION, ("warmup",)),
    Rule("gradients", False, OPTION, ("warmup",)),
)  # fmt: skip

OF_A_CALL = tuple(rule for rule in RULES if rule.kind != OPTION)  # what a `Call` is made of, besides q, k and v
DEFAULTS: dict[str, Any] = {rule.name: rule.default for rule in OF_A_CALL}
# (field of `Call`, rule, what makes the one of the other), for values of Python, and for numbers, None being none
VALUES, READ = (
    tuple((rule.field, rule.name, rule.check) for rule in OF_A_CALL if rule.check is not None and rule.kind == kind)
    for kind in (VALUE, NUMBERS)
)
TAKEN = tuple(rule.name for rule in OF_A_CALL if rule.kind == ARRAY)


def defaults_of(call: str) -> dict[str, Any]:
    """The keywords of a public call, with their defaults."""
    return {rule.name: rule.default_of(call) for rule in RULES if call in rule.calls}


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every rule of a `Call`: those given, and the defaults of the others. TypeError for one that there isn't."""
    if not given.keys() <= DEFAULTS.keys():
        unknown = [name for name in given if name not in DEFAULTS]
        raise TypeError(f"unknown options: {', '.join(unknown)}; there are {', '.join(DEFAULTS)}")
    return {**DEFAULTS, **given}
