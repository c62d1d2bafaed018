"""README's Python blocks run as they stand, one after the other in one namespace, as a reader would try them.

A block that can't run here has a line before it that says why: `<!-- not run: needs a GPU -->`.
"""

import re
from pathlib import Path

import numpy as np
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# Numbers of tokens in README's examples, and what the test takes: with those it computes for ten seconds and more.
SMALLER = {"4096": "320", "3000": "250"}


def blocks():
    return [(of["why"], of["code"]) for of in BLOCK.finditer(README)]


def test_every_block_is_found_and_those_left_out_say_why():
    assert len(blocks()) == README.count("```python\n") >= 4
    assert [why for why, _ in blocks() if why] == ["needs a GPU"]


def test_blocks_run_in_order():
    namespace = {}
    for why, code in blocks():
        if why is None:
            for tokens, fewer in SMALLER.items():
                code = code.replace(tokens, fewer)
            exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (1, 32, 320, 128)
    dq, dbias = namespace["dq"], namespace["dbias"]
    assert dq.shape == namespace["q"].shape
    assert np.isfinite(dq).all()
    assert dbias is None


@pytest.mark.slow
def test_blocks_run_as_they_stand():
    namespace = {}
    for why, code in blocks():
        if why is None:
            exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (1, 32, 4096, 128)
