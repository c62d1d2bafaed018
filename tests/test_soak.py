"""Property tests with examples that no run has drawn before: `-m slow`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import SOAK

HERE = Path(__file__)
TESTS = sorted(path for path in HERE.parent.glob("test_*.py") if path != HERE and "@given" in path.read_text("utf-8"))


def run(*arguments, times):
    command = [sys.executable, "-m", "pytest", "-m", "hypothesis and not slow", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | {SOAK: str(times)}, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_new_examples(path):
    done = run(path, times=os.environ.get(SOAK, 1))
    assert done.returncode == 0, done.stdout + done.stderr


FAILS_ON_NEW_EXAMPLES = """
from fuzzing import fuzz
from hypothesis import given, strategies as st

@fuzz(5)
@given(n=st.integers(0, 2**64))
def test_drawn(n):
    print("drawn", n)
"""


def test_a_soak_draws_anew_and_the_usual_run_does_not(tmp_path, monkeypatch):
    path = tmp_path / "test_drawn.py"
    path.write_text(FAILS_ON_NEW_EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), *sys.path[1:]]))

    def drawn(times):
        done = run(path, "-s", "-c", os.devnull, "-p", "no:cacheprovider", times=times)
        assert done.returncode == 0, done.stdout
        return re.findall(r"drawn (\d+)", done.stdout)

    assert drawn("") == drawn("")
    assert len(drawn("")) == 5
    once, again = drawn(3), drawn(3)
    assert len(once) == 15
    assert once != again


def test_every_property_test_draws_its_examples_so():
    for path in TESTS:
        text = path.read_text("utf-8")
        assert "settings(" not in text, path.name
        assert len(re.findall(r"^ *@given\(", text, re.M)) == len(re.findall(r"^ *@fuzz\(", text, re.M)), path.name
