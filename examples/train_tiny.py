"""Trains a small language model in NumPy alone, flash_numba being its attention, forward and backward.

    python examples/train_tiny.py [--steps 300]

It predicts the next character of a real text, the language reference that comes with Python (`pydoc_data.topics`): two
blocks of causal attention and an MLP, 240 000 parameters. The loss falls from 4.6 nats a character (guessing) to 1.9 in
about fifteen seconds on two cores, and some lines of its own are printed at the end.

Every layer returns its output and a function from the loss's derivative by that output to the one by its input; on the
way back, weights collect their gradients. Positions are known from ALiBi alone (Press et al. 2021, arXiv:2108.12409).
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import numpy as np

from flash_numba import attention, attention_grad

WIDTH, HEADS, BLOCKS = 96, 4, 2
CONTEXT, BATCH = 128, 16
SLOPES = 2.0 ** -np.linspace(1, 6, HEADS)
FLOAT = np.float32


class Weight:
    """A matrix, its gradient, and Adam's running moments of that."""

    def __init__(self, value):
        self.value = value.astype(FLOAT)
        self.gradient, self.mean, self.square = (np.zeros_like(self.value) for _ in range(3))

    def step(self, number, rate):
        """Kingma and Ba 2014 (arXiv:1412.6980), algorithm 1; the gradient is used up."""
        self.mean += 0.1 * (self.gradient - self.mean)
        self.square += 0.01 * (self.gradient**2 - self.square)
        mean, square = self.mean / (1 - 0.9**number), self.square / (1 - 0.99**number)
        self.value -= rate * mean / (np.sqrt(square) + 1e-8)
        self.gradient[...] = 0


# ---- layers: (output, backward)


def linear(x, weight):
    def backward(dy):
        weight.gradient += x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
        return dy @ weight.value.T

    return x @ weight.value, backward


def normalised(x):
    """Each token's vector with a mean square of 1."""
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + FLOAT(1e-5))
    y = x * factor

    def backward(dy):
        return factor * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))

    return y, backward


def relu(x):
    return np.maximum(x, 0), lambda dy: dy * (x > 0)


def attend(qkv):
    """Causal self-attention; q, k and v are views of one array, (batch, tokens, heads, columns)."""
    q, k, v = np.moveaxis(qkv.reshape(*qkv.shape[:2], 3, HEADS, -1), 2, 0)
    rules = {"causal": True, "alibi_slopes": SLOPES, "layout": "bshd"}
    out, lse = attention(q, k, v, **rules, return_lse=True)

    def backward(dy):
        gradients = attention_grad(dy.reshape(out.shape), q, k, v, out, lse, **rules)
        return np.stack(gradients[:3], axis=2).reshape(qkv.shape)

    return out.reshape(*qkv.shape[:2], -1), backward


def chain(x, *layers):
    """Layers one after the other."""
    backwards = []
    for layer, *weights in layers:
        x, backward = layer(x, *weights)
        backwards.append(backward)

    def backward(dy):
        for of_layer in reversed(backwards):
            dy = of_layer(dy)
        return dy

    return x, backward


def residual(x, *layers):
    """What a chain of layers adds to its input."""
    y, through = chain(x, *layers)
    return x + y, lambda dy: dy + through(dy)


# ---- the model


class Model:
    """Tokens in, logits of the next ones out."""

    def __init__(self, vocabulary, seed=0):
        rng = np.random.default_rng(seed)

        def weight(rows, columns, size=1.0):
            return Weight(size / np.sqrt(rows) * rng.standard_normal((rows, columns)))

        self.embedding = Weight(rng.standard_normal((vocabulary, WIDTH)))
        shapes = ((WIDTH, 3 * WIDTH, 1.0), (WIDTH, WIDTH, 0.5), (WIDTH, 4 * WIDTH, 1.0), (4 * WIDTH, WIDTH, 0.5))
        self.blocks = [[weight(*shape) for shape in shapes] for _ in range(BLOCKS)]
        self.unembedding = weight(WIDTH, vocabulary, 0.1)

    @property
    def weights(self):
        return [self.embedding, *(weight for block in self.blocks for weight in block), self.unembedding]

    def logits(self, tokens):
        """(batch, tokens) to (batch, tokens, vocabulary), and the backward, which returns nothing."""
        layers = []
        for qkv, out, up, down in self.blocks:
            layers.append((residual, (normalised,), (linear, qkv), (attend,), (linear, out)))
            layers.append((residual, (normalised,), (linear, up), (relu,), (linear, down)))
        y, through = chain(self.embedding.value[tokens], *layers, (normalised,), (linear, self.unembedding))

        def backward(dy):
            np.add.at(self.embedding.gradient, tokens, through(dy))

        return y, backward

    def loss(self, tokens, backward=True):
        """Mean of -log p(next token), in nats; with `backward` the weights collect their gradients."""
        logits, through = self.logits(tokens[:, :-1])
        following = tokens[:, 1:, None]
        logits -= logits.max(axis=-1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=-1, keepdims=True)
        loss = np.mean(np.log(total) - np.take_along_axis(logits, following, axis=-1))
        if backward:
            p /= total
            np.put_along_axis(p, following, np.take_along_axis(p, following, axis=-1) - 1, axis=-1)
            through(p / FLOAT(following.size))
        return float(loss)


def sample(model, tokens, count, seed=0):
    """So many tokens more, drawn one by one."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        logits, _ = model.logits(tokens[None, -CONTEXT:])
        p = np.exp(logits[0, -1] - logits[0, -1].max(), dtype=np.float64)
        tokens = np.append(tokens, rng.choice(p.size, p=p / p.sum()))
    return tokens


# ---- training


def text_of_python():
    """The text, as numbers; and the characters that they stand for."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters, tokens = np.unique(np.array(list(text)), return_inverse=True)
    return tokens, characters


def windows(tokens, rng):
    """A batch of stretches of the text."""
    starts = rng.integers(0, tokens.size - CONTEXT, BATCH)
    return tokens[starts[:, None] + np.arange(CONTEXT + 1)]


def train(steps, seed=0, report=lambda step, loss: None):
    """`(model, losses on the text trained on, loss on the text kept back)`."""
    tokens, characters = text_of_python()
    cut = tokens.size * 9 // 10
    rng = np.random.default_rng(seed)
    model, losses = Model(characters.size, seed), []
    for step in range(1, steps + 1):
        losses.append(model.loss(windows(tokens[:cut], rng)))
        for weight in model.weights:
            weight.step(step, 3e-3 * min(1, step / 20) * (1 - step / (steps + 1)))
        report(step, losses[-1])
    kept_back = np.mean([model.loss(windows(tokens[cut:], rng), backward=False) for _ in range(8)])
    return model, losses, float(kept_back)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    # NumPy's threads and those of the attention take turns: idle ones had better sleep than spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start = time.perf_counter()

    def report(step, loss):
        if step == 1 or step % 50 == 0:
            print(f"step {step:4}  loss {loss:.3f}  {time.perf_counter() - start:5.1f} s", flush=True)

    model, _, kept_back = train(steps, report=report)
    print(f"on text that it didn't see: {kept_back:.3f} nats a character\n")
    tokens, characters = text_of_python()
    print("".join(characters[sample(model, tokens[:40], 300)]))


if __name__ == "__main__":
    main()
