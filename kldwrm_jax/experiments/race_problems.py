"""Four problems with targets: digits, MNIST, an autoencoder of MNIST, and a language model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import kldwrm_jax as kw
from kldwrm_jax.experiments import data, models

_TEST_EXAMPLES = 5000  # at most


class Arrays(NamedTuple):
    """Examples to train on and to be judged by."""

    train_x: jax.Array
    train_y: jax.Array
    test_x: jax.Array
    test_y: jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network, its data and the values to be reached.

    Args:
      title: what tables call it.
      load: from a folder with MNIST's files, or None, to network, likelihood and data.
      batch: examples in a batch.
      steps: how many there are.
      every: steps from one evaluation to the next.
      metric: ``"accuracy"``, to be raised, or ``"loss"``, to be lowered.
      targets: values of the metric, the easier first.
      without: methods that take too long here.
      limit: ``kl_clip`` of calibrated methods, for which it is a limit of the true divergence and
        has the scale of the loss.
    """

    title: str
    load: Callable[[Path | None], tuple[nn.Module, Any, Arrays]]
    batch: int
    steps: int
    every: int
    metric: str
    targets: tuple[float, ...]
    without: tuple[str, ...] = ()
    limit: float = 0.1

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target."""
        return value >= target if self.metric == "accuracy" else value <= target


class Autoencoder(nn.Module):
    """784-400-200-100-30 and back, with tanh; its outputs are logits of pixels."""

    widths: tuple[int, ...] = (400, 200, 100, 30, 100, 200, 400)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the pixels of ``x``."""
        pixels = x.shape[-1]
        for i, width in enumerate(self.widths):
            x = nn.Dense(width)(x)
            if i != len(self.widths) // 2:  # the code is linear
                x = nn.tanh(x)
        return nn.Dense(pixels)(x)


class Transformer(nn.Module):
    """A decoder of two layers; its outputs are logits of the next character."""

    characters: int
    width: int = 48
    heads: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of what follows every token."""
        x = nn.Embed(self.characters, self.width)(tokens) + _positions(tokens.shape[1], self.width)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x += nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x += nn.Dense(self.width)(hidden)
        return nn.Dense(self.characters)(nn.LayerNorm()(x))


def _positions(length: int, width: int) -> np.ndarray:
    """Sines and cosines of places."""
    angle = np.arange(length)[:, None] / 100.0 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)


_PEOPLE = ("anna", "bruno", "the baker", "a sailor", "my neighbour", "the old queen")
_DOINGS = ("sees", "follows", "paints", "remembers", "never meets", "waits for")
_THINGS = ("a red boat", "the harbour", "two foxes", "bread", "the last letter", "a small bell")
_WHEN = ("today", "in winter", "at noon", "every day", "before dawn")


def sentences(count: int, seed: int) -> str:
    """Simple sentences, drawn word by word."""
    rng = np.random.default_rng(seed)
    return "".join(
        f"{rng.choice(_PEOPLE)} {rng.choice(_DOINGS)} {rng.choice(_THINGS)} {rng.choice(_WHEN)}. "
        for _ in range(count)
    )


def _text(data_dir: Path | None, length: int = 32) -> tuple[nn.Module, Any, Arrays]:
    del data_dir
    train, test = sentences(2000, seed=0), sentences(200, seed=1)
    characters = sorted(set(train))

    def windows(text: str) -> tuple[jax.Array, jax.Array]:
        tokens = np.array([characters.index(c) for c in text], np.int32)
        tokens = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
        return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])

    arrays = Arrays(*windows(train), *windows(test))
    return Transformer(len(characters)), kw.Categorical(), arrays


def _images(name: str, model: str) -> Callable[[Path | None], tuple[nn.Module, Any, Arrays]]:
    def load(data_dir: Path | None) -> tuple[nn.Module, Any, Arrays]:
        own = data.load(name, data_dir)
        x, test_x = ((x - own.mean) / own.std for x in (own.train_x, own.test_x[:_TEST_EXAMPLES]))
        arrays = map(jnp.asarray, (x, own.train_y, test_x, own.test_y[:_TEST_EXAMPLES]))
        return models.build(model, x.shape[1:], own.classes), kw.Categorical(), Arrays(*arrays)

    return load


def _autoencoder(data_dir: Path | None) -> tuple[nn.Module, Any, Arrays]:
    own = data.load("mnist", data_dir)
    x, test = (
        jnp.asarray(x.reshape(len(x), -1)) for x in (own.train_x, own.test_x[:_TEST_EXAMPLES])
    )
    return Autoencoder(), kw.Bernoulli(), Arrays(x, x, test, test)


PROBLEMS = {
    "digits": Problem(
        "digits, a small CNN", _images("digits", "cnn"), 128, 150, 5, "accuracy", (0.95, 0.97)
    ),
    "mnist": Problem(
        "MNIST, the paper's CNN",
        _images("mnist", "paper-cnn"),
        512,
        150,
        10,
        "accuracy",
        (0.95, 0.97),
        without=("qe",),
    ),
    "autoencoder": Problem(
        "MNIST, an autoencoder of eight layers",
        _autoencoder,
        256,
        150,
        10,
        "loss",
        (150.0, 120.0),
        without=("qe",),
        limit=10.0,  # 784 pixels in a sum
    ),
    "text": Problem("text, a transformer of two layers", _text, 64, 200, 10, "loss", (1.0, 0.6)),
}
