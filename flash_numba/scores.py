"""Score rules: which keys a query row sees, written once as plain functions (see `ops.py`).

Row i stands at position i + shift, where `shift` is 0 for `causal="top-left"` and S_kv - S_q for `causal=True`
(bottom-right). Without a causal mask `shift` is S_kv: every row then stands behind the last key.
"""

from math import inf

from .ops import select


def seen_causal(i, j, shift):
    """Whether row i sees key j: no key behind its own position (flash-attn's and PyTorch's causal masks)."""
    return j <= i + shift


def hide(s, seen):
    """The score, or -inf where the key isn't seen. A selection, so that a NaN in a hidden place can't leak."""
    return select(seen, s, -inf)


def keys_seen_by_all(first_row, shift, keys):
    """How many leading keys every row from `first_row` on sees: they need no mask."""
    return max(0, min(keys, first_row + shift + 1))


def keys_seen_by_any(last_row, shift, keys):
    """How many leading keys some row up to `last_row` sees: the rest needn't be read."""
    return max(0, min(keys, last_row + shift + 1))
