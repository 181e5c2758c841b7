"""The networks of the benchmark. To add one, add an entry to ``NETWORKS``."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import linen as nn

from kldwrm_jax.experiments.models import MLP, ResNet, StridedCNN, Transformer

Batch = tuple[jax.Array, jax.Array]  # inputs, labels


class Network(NamedTuple):
    """A model and the batches that it is trained on."""

    title: str
    model: nn.Module
    batch: Callable[[int], Batch]  # random examples, of so many
    examples: int  # per step


def images(size: int, shape: tuple[int, ...] = (28, 28, 1)) -> Batch:
    """Random images of MNIST's shape, or another, and labels of ten classes."""
    x, y = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (size, *shape)), jax.random.randint(y, (size,), 0, 10)


TOKENS, LENGTH = 64, 64


def texts(size: int) -> Batch:
    """Random texts, and the token that follows each of theirs."""
    tokens = jax.random.randint(jax.random.key(0), (size, LENGTH + 1), 0, TOKENS)
    return tokens[:, :-1], tokens[:, 1:]


_POOL = functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2))
_CONVOLUTIONS = [nn.Conv(5, (5, 5), padding="VALID"), nn.Conv(7, (5, 5), padding="VALID")]
# The paper's network of 4,712 parameters in standard Flax layers, without dropout.
PAPER_CNN = nn.Sequential(
    [layer for conv in _CONVOLUTIONS for layer in (conv, _POOL, nn.relu)]
    + [lambda x: x.reshape(x.shape[0], -1), nn.Dense(30), nn.relu, nn.Dense(10)]
)
_SMALL_COLOURED = functools.partial(images, shape=(16, 16, 3))

NETWORKS: dict[str, Network] = {
    "mlp": Network("MLP 784-512-512-10", MLP(10, (512, 512)), images, 512),
    "paper-cnn": Network("CNN of the paper", PAPER_CNN, images, 512),
    "cnn": Network("CNN, three strided convolutions", StridedCNN(10), images, 256),
    "resnet": Network("ResNet with BatchNorm", ResNet(10), _SMALL_COLOURED, 128),
    "decoder-96": Network("decoder, width 96", Transformer(TOKENS, width=96), texts, 64),
    "decoder-256": Network("decoder, width 256", Transformer(TOKENS, width=256), texts, 16),
}
