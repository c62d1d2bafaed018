"""How property tests draw their examples.

The same few in every run, so that a run fails for what has changed and for nothing else. `tests/test_soak.py` runs them
all again with new ones.
"""

import os

from hypothesis import settings

SOAK = "FLASH_NUMBA_SOAK"  # how many times as many examples, all of them new


def fuzz(max_examples: int, **others) -> settings:
    times = os.environ.get(SOAK)
    return settings(
        max_examples=round(max_examples * float(times or 1)),
        derandomize=not times,
        print_blob=bool(times),
        deadline=None,
        database=None,
        **others,
    )
