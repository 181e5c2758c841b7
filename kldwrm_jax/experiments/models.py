"""The networks, and exact ways to run small convolutions fast on a CPU."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.experiments.errors import UsageError, check_name


def tiled_convolution(
    x: jax.Array, kernel: jax.Array, window_strides: Any, padding: Any, **others: Any
) -> jax.Array:
    """A convolution with stride 1 and no padding, as one product with a matrix.

    A tile of the output is a linear function of the tile of the input that its windows cover. Cut
    so, the products with zeros cost less than what XLA's convolutions lose on a CPU where channels
    are few: a gradient of the paper's network takes less than a third of the time. It is for
    ``nn.Conv(..., padding="VALID", conv_general_dilated=tiled_convolution)``, which goes on being
    a convolution to whoever looks at the model.

    Args:
      x: (batch, height, width, channels).
      kernel: (kernel height, kernel width, channels, features).
      window_strides: must be 1.
      padding: must be ``"VALID"``.
    """
    if set(window_strides) != {1} or padding != "VALID":
        raise ValueError(
            f"a tiled convolution has window_strides (1, 1) and padding 'VALID', got "
            f"{window_strides} and {padding!r}"
        )
    batch, height, width, _ = x.shape
    kernel_height, kernel_width, _, features = kernel.shape
    rows, row_band = _tiles(height, kernel_height, largest=2)
    columns, column_band = _tiles(width, kernel_width, largest=8)
    matrix = jnp.einsum(
        "hai,wbj,ijcf->hwcabf",
        row_band.astype(kernel.dtype),
        column_band.astype(kernel.dtype),
        kernel,
        precision="highest",
    )
    tiles = jnp.stack([x[:, r, c].reshape(batch, -1) for r in rows for c in columns], axis=1)
    tile_height, tile_width = row_band.shape[1], column_band.shape[1]
    out = tiles @ matrix.reshape(tiles.shape[-1], -1)
    out = out.reshape(batch, len(rows), len(columns), tile_height, tile_width, features)
    return out.transpose(0, 1, 3, 2, 4, 5).reshape(
        batch, len(rows) * tile_height, len(columns) * tile_width, features
    )


def _tiles(size: int, window: int, largest: int) -> tuple[list[slice], np.ndarray]:
    """Along one axis: what each tile of the output covers, and which input meets which weight.

    The latter is 1 at (place in the covered input, place in the tile, place in the window) where
    the three meet, and 0 elsewhere.
    """
    out = size - window + 1
    tile = max(n for n in range(1, largest + 1) if out % n == 0)
    covered = tile + window - 1
    meets = np.arange(tile)[:, None] + np.arange(window)
    band = np.arange(covered)[:, None, None] == meets
    return [slice(start, start + covered) for start in range(0, out, tile)], band


def max_pool(x: jax.Array) -> jax.Array:
    """Pools 2 x 2 windows; of equal entries the first has the gradient.

    As ``nn.max_pool`` has it, whose gradient is slow on a CPU. Dividing it among equals instead, as
    ``jnp.max`` does, would change the curvature: windows of background are full of equals.
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(a >= b, a, b)

    top = larger(x[:, :, 0, :, 0], x[:, :, 0, :, 1])
    return larger(top, larger(x[:, :, 1, :, 0], x[:, :, 1, :, 1]))


def _uniform(fan_in: int) -> Callable[..., jax.Array]:
    """Uniform in +-1/sqrt(fan_in): the paper's networks were initialised by PyTorch's defaults."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _conv(features: int, size: int, x: jax.Array) -> jax.Array:
    init = _uniform(size * size * x.shape[-1])
    return nn.Conv(
        features,
        (size, size),
        padding="VALID",
        kernel_init=init,
        bias_init=init,
        conv_general_dilated=tiled_convolution,
    )(x)


def _dense(features: int, x: jax.Array) -> jax.Array:
    init = _uniform(x.shape[-1])
    return nn.Dense(features, kernel_init=init, bias_init=init)(x)


class PaperCNN(nn.Module):
    """The paper's network for 28 x 28 images: 4,712 parameters."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits; ``train`` turns dropout on."""
        for features in (5, 7):
            x = nn.relu(max_pool(_conv(features, 5, x)))
        x = nn.relu(_dense(30, x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return _dense(self.classes, x)


class SmallCNN(nn.Module):
    """For small images: two convolutions, with pooling between them, and a hidden layer."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits; there is no dropout."""
        x = max_pool(nn.relu(_conv(16, 3, x)))
        x = nn.relu(_conv(24, 2, x))
        x = nn.relu(_dense(32, x.reshape(x.shape[0], -1)))
        return _dense(self.classes, x)


class MLP(nn.Module):
    """Two hidden layers of 128 units."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits; there is no dropout."""
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(_dense(128, x))
        return _dense(self.classes, x)


MODELS: dict[str, type[nn.Module]] = {"paper-cnn": PaperCNN, "cnn": SmallCNN, "mlp": MLP}
_SMALLEST = {"paper-cnn": 16, "cnn": 6}  # side of the smallest image that leaves anything to pool


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network for inputs of a shape.

    Args:
      name: one of ``MODELS``.
      shape: of one input, without the batch.
      classes: how many logits.

    Raises:
      UsageError: for an unknown name, and for inputs that do not fit.
    """
    check_name("--model", name, MODELS)
    smallest = _SMALLEST.get(name)
    if smallest and (len(shape) != 3 or min(shape[:2]) < smallest):
        raise UsageError(
            f"--model {name} needs images of at least {smallest} x {smallest} pixels, and the data "
            f"set has inputs of shape {shape}; try --model {'mlp' if len(shape) != 3 else 'cnn'}"
        )
    return MODELS[name](classes=classes)
