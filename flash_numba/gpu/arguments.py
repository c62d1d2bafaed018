"""What a kernel is called with: one named tuple of the call's description and of the thread blocks that it becomes.

Each field is one 8-byte kernel parameter, so the packed parameters of a launch are the bytes of one `ARGUMENTS` record,
and a kernel reads `problem.q_head` from the constant bank, with no copy to the device.
"""

from collections import namedtuple

import numpy as np

from ..problem import PROBLEM

PLAN = [
    ("row_tiles", np.int64),  # work tiles of each sequence, where there is no table of them
    ("splits", np.int64),  # of decode: KV splits of a row's keys, and the keys of each
    ("split_keys", np.int64),
    ("workspace", np.int64),  # device addresses: split states, and a counter of finished splits a row block
    ("finished", np.int64),
]
OF_PROBLEM = [*(PROBLEM.names or ())]
ARGUMENTS = np.dtype(
    [*((name, *(PROBLEM[name].subdtype or (PROBLEM[name],))) for name in OF_PROBLEM), *PLAN], align=True
)
NAMES = [*(ARGUMENTS.names or ())]

Arguments = namedtuple("Arguments", NAMES)  # type: ignore[misc]


def pack(problem: np.ndarray, **plan: int) -> np.ndarray:
    """The `ARGUMENTS` record of a `PROBLEM` record and the fields of the plan."""
    record = np.zeros((), ARGUMENTS)
    for name in OF_PROBLEM:
        record[name] = problem[name]
    for name, value in plan.items():
        record[name] = value
    return record


def unpack(record: np.ndarray) -> Arguments:
    """The named tuple of an `ARGUMENTS` record, as a kernel in Python sees it."""
    return Arguments(*(tuple(x.tolist()) if isinstance(x, np.ndarray) else x for x in record.item()))
