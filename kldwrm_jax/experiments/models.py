"""The networks of the experiments; ``MODELS`` are those that ``kldwrm train`` knows by name."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.experiments.banded_convolution import banded_convolution, max_pool
from kldwrm_jax.experiments.errors import UsageError, check_names


def _uniform(fan_in: int) -> Callable[..., jax.Array]:
    """Uniform in ±1/sqrt(fan_in): PyTorch's default, which the paper used."""
    bound, draw = fan_in**-0.5, jax.random.uniform
    return lambda key, shape, dtype=jnp.float32: draw(key, shape, dtype, -bound, bound)


def _conv(features: int, size: int, x: jax.Array) -> jax.Array:
    init = _uniform(size * size * x.shape[-1])
    options: Any = {"padding": "VALID", "conv_general_dilated": banded_convolution}
    return nn.Conv(features, (size, size), kernel_init=init, bias_init=init, **options)(x)


def _dense(features: int, x: jax.Array) -> jax.Array:
    init = _uniform(x.shape[-1])
    return nn.Dense(features, kernel_init=init, bias_init=init)(x)


class PaperCNN(nn.Module):
    """The paper's network for 28 x 28 images: 4,712 parameters."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        for features in (5, 7):
            x = nn.relu(max_pool(_conv(features, 5, x)))
        x = nn.relu(_dense(30, x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return _dense(self.classes, x)


class SmallCNN(nn.Module):
    """Two convolutions with pooling between them and a hidden layer, for small images."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        x = max_pool(nn.relu(_conv(16, 3, x)))
        x = nn.relu(_conv(24, 2, x))
        x = nn.relu(_dense(32, x.reshape(x.shape[0], -1)))
        return _dense(self.classes, x)


class MLP(nn.Module):
    """Dense layers with ReLU on flattened images."""

    classes: int
    widths: tuple[int, ...] = (128, 128)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = nn.relu(_dense(width, x))
        return _dense(self.classes, x)


class StridedCNN(nn.Module):
    """Three convolutions of stride 2, without pooling, and a hidden layer."""

    classes: int
    channels: tuple[int, ...] = (24, 32, 48)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        for channels in self.channels:
            x = nn.relu(nn.Conv(channels, (3, 3), strides=2)(x))
        return nn.Dense(self.classes)(nn.relu(nn.Dense(80)(x.reshape(x.shape[0], -1))))


class ResNet(nn.Module):
    """Residual blocks of two convolutions with BatchNorm; the width doubles where the side halves.

    BatchNorm normalises by the batch, as in training.
    """

    classes: int
    widths: tuple[int, ...] = (16, 32, 64)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        x = nn.relu(self._conv(self.widths[0], 1, x))
        for i, width in enumerate(self.widths):
            stride = 1 if i == 0 else 2
            y = nn.relu(self._conv(width, stride, x))
            y = self._conv(width, 1, y)
            x = nn.relu(y + (x if stride == 1 else self._conv(width, stride, x, size=1)))
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))

    def _conv(self, width: int, stride: int, x: jax.Array, size: int = 3) -> jax.Array:
        x = nn.Conv(width, (size, size), strides=stride, use_bias=False)(x)
        return nn.BatchNorm(use_running_average=False)(x)


class Transformer(nn.Module):
    """A causal decoder; the outputs are logits of the next character."""

    characters: int
    width: int = 48
    heads: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits at every position."""
        places, frequencies = np.arange(tokens.shape[1]), np.arange(0, self.width, 2)
        angles = places[:, None] / 100.0 ** (frequencies / self.width)
        positions = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
        x = nn.Embed(self.characters, self.width)(tokens) + positions
        for _ in range(self.depth):
            mask = nn.make_causal_mask(tokens)
            x += nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x += nn.Dense(self.width)(hidden)
        return nn.Dense(self.characters)(nn.LayerNorm()(x))


MODELS: dict[str, type[nn.Module]] = {
    "paper-cnn": PaperCNN,
    "cnn": SmallCNN,
    "mlp": MLP,
    "strided-cnn": StridedCNN,
}
_SMALLEST = {
    "paper-cnn": 16,
    "cnn": 6,
    "mlp": 1,
    "strided-cnn": 1,
}  # side of an image that pooling does not empty


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Builds the network ``name`` for images of a shape (height, width, channels)."""
    check_names("--model", [name], MODELS)
    if min(shape[:2]) < _SMALLEST[name]:
        raise UsageError(
            f"--model {name} needs images of {_SMALLEST[name]} pixels a side or more, got {shape}; "
            f"try --model cnn or --model mlp"
        )
    return MODELS[name](classes=classes)
