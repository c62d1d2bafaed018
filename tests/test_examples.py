"""The example that trains a model."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def train_tiny(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLES / "train_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CONTEXT", 32)
    monkeypatch.setattr(module, "BATCH", 8)
    return module


def test_a_few_steps_lower_the_loss(train_tiny):
    _, losses, kept_back = train_tiny.train(30)
    assert losses[0] > 4.3  # a guess among about a hundred characters
    assert np.mean(losses[-5:]) < 3.7
    assert kept_back < 3.7


def test_the_models_gradient_is_that_of_its_loss(train_tiny, monkeypatch):
    """In float64, by central differences along a random direction of all weights at once."""
    monkeypatch.setattr(train_tiny, "FLOAT", np.float64)
    rng = np.random.default_rng(0)
    model = train_tiny.Model(50)
    tokens = rng.integers(0, 50, (3, 33))
    model.loss(tokens)
    directions = [rng.standard_normal(weight.value.shape) for weight in model.weights]
    slope = sum((weight.gradient * d).sum() for weight, d in zip(model.weights, directions, strict=True))
    found = []
    for step in (1e-7, -1e-7):
        for weight, d in zip(model.weights, directions, strict=True):
            weight.value += step * d
        found.append(model.loss(tokens, backward=False))
        for weight, d in zip(model.weights, directions, strict=True):
            weight.value -= step * d
    assert (found[0] - found[1]) / 2e-7 == pytest.approx(slope, rel=1e-4)


def test_it_prints_its_losses_and_writes_on(train_tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--steps", "2"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    train_tiny.main()
    printed = capsys.readouterr().out
    assert "step    1  loss 4." in printed
    assert "nats a character" in printed
    assert len(printed) > 300
