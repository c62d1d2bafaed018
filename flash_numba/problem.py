"""Problem: one frozen description of a call, which every backend takes.

It is a NumPy structured record, so that a kernel on either target reads named fields from one address instead of taking
thirty arguments, and no array type multiplies the number of compiled specialisations.
"""

import numpy as np

_int, _float = np.int64, np.float64

PROBLEM = np.dtype(
    [
        # addresses of the first element; mask is 0 where there is none
        ("q", _int),
        ("k", _int),
        ("v", _int),
        ("out", _int),
        ("lse", _int),
        ("mask", _int),
        # byte strides: batch, head, row (of q, out and mask: query; of k and v: key), column
        ("q_strides", _int, 4),
        ("k_strides", _int, 4),
        ("v_strides", _int, 4),
        ("out_strides", _int, 4),
        ("mask_strides", _int, 4),
        # byte offsets of each batch for q, k, v, mask, out, where leading axes can't be one stride: address of (batch, 5)
        ("batch_offsets", _int),
        # sizes; out is (batch, heads, queries, value_dim), lse (batch, heads, queries) C-contiguous
        ("batch", _int),
        ("heads", _int),
        ("k_group", _int),  # query heads per key head
        ("v_group", _int),  # query heads per value head
        ("queries", _int),
        ("keys", _int),
        ("dim", _int),
        ("value_dim", _int),
        # dtypes.format_code of each
        ("q_format", _int),
        ("k_format", _int),
        ("v_format", _int),
        ("out_format", _int),
        # rules
        ("scale", _float),  # log2(e) folded in: scores are in base 2
        ("shift", _int),  # row i stands at position i + shift (scores.py)
    ],
    align=True,
)
