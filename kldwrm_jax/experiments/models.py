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
    are few. It is for ``nn.Conv(..., padding="VALID", conv_general_dilated=tiled_convolution)``,
    which goes on being a convolution to whoever looks at the model.

    Args:
      x: (batch, height, width, channels).
      kernel: (kernel height, kernel width, channels, features).
      window_strides: must be 1.
      padding: must be ``"VALID"``.
    """
    tiles = _in_tiles(x, kernel, window_strides, padding, multiple=1)
    batch, rows, columns, height, width, features = tiles.shape
    image = tiles.transpose(0, 1, 3, 2, 4, 5)
    return image.reshape(batch, rows * height, columns * width, features)


def convolution_to_pool(
    x: jax.Array, kernel: jax.Array, window_strides: Any, padding: Any, **others: Any
) -> jax.Array:
    """A tiled convolution that leaves its output in tiles, for :func:`max_pool` to put together.

    So nothing is moved before it is pooled. What an odd size leaves over is not computed: pooling
    would drop it.

    Args:
      x: as :func:`tiled_convolution` has them, and the others, too.
      kernel: see there.
      window_strides: see there.
      padding: see there.

    Returns:
      (batch, rows of tiles, columns of tiles, place in a 2 x 2 window, windows in a tile, features)
    """
    tiles = _in_tiles(x, kernel, window_strides, padding, multiple=2)
    batch, rows, columns, _, width, features = tiles.shape
    return tiles.reshape(batch, rows, columns, 4, width // 2, features)


def max_pool(x: jax.Array) -> jax.Array:
    """Pools what :func:`convolution_to_pool` gives; of equal entries the first has the gradient.

    As ``nn.max_pool`` has it, whose gradient is slow on a CPU. Dividing it among equals instead, as
    ``jnp.max`` does, would change the curvature: windows of background are full of equals.
    """

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(a >= b, a, b)

    batch, rows, columns, _, width, features = x.shape
    x = x.reshape(batch, rows, columns, 4, width * features)  # in long runs of memory
    x = larger(larger(x[..., 0, :], x[..., 1, :]), larger(x[..., 2, :], x[..., 3, :]))
    return x.reshape(batch, rows, columns * width, features)


def _in_tiles(
    x: jax.Array, kernel: jax.Array, window_strides: Any, padding: Any, multiple: int
) -> jax.Array:
    """(batch, rows of tiles, columns of tiles, tile height, tile width, features).

    With ``multiple`` 2, the even places of a tile's width stand before the odd ones.
    """
    if set(window_strides) != {1} or padding != "VALID":
        raise ValueError(
            f"a tiled convolution has window_strides (1, 1) and padding 'VALID', got "
            f"{window_strides} and {padding!r}"
        )
    rows, row_band = _tiles(x.shape[1], kernel.shape[0], 2, multiple)
    columns, column_band = _tiles(x.shape[2], kernel.shape[1], 8, multiple)
    order = np.arange(column_band.shape[1]).reshape(-1, multiple).T.reshape(-1)
    matrix = jnp.einsum(
        "hai,wbj,ijcf->hwcabf",
        row_band.astype(kernel.dtype),
        column_band[:, order].astype(kernel.dtype),
        kernel,
        precision="highest",
    )
    tiles = [x[:, r, c].reshape(len(x), -1) for r in rows for c in columns]
    covered = tiles[0].shape[1]
    # A product of two matrices: with a third axis, its gradient would move everything about.
    out = jnp.stack(tiles, axis=1).reshape(-1, covered) @ matrix.reshape(covered, -1)
    return out.reshape(len(x), len(rows), len(columns), *matrix.shape[3:])


def _tiles(size: int, window: int, largest: int, multiple: int) -> tuple[list[slice], np.ndarray]:
    """Along one axis: what each tile of the output covers, and which input meets which weight.

    The latter is 1 at (place in the covered input, place in the tile, place in the window) where
    the three meet, and 0 elsewhere. Tiles, and so what is computed, are multiples of ``multiple``.
    """
    out = (size - window + 1) // multiple * multiple
    tile = max(n for n in range(multiple, largest + 1, multiple) if out % n == 0)
    covered = tile + window - 1
    meets = np.arange(tile)[:, None] + np.arange(window)
    band = np.arange(covered)[:, None, None] == meets
    return [slice(start, start + covered) for start in range(0, out, tile)], band


def _uniform(fan_in: int) -> Callable[..., jax.Array]:
    """Uniform in +-1/sqrt(fan_in): the paper's networks were initialised by PyTorch's defaults."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _conv(
    features: int, size: int, x: jax.Array, convolution: Callable[..., jax.Array]
) -> jax.Array:
    init = _uniform(size * size * x.shape[-1])
    return nn.Conv(
        features,
        (size, size),
        padding="VALID",
        kernel_init=init,
        bias_init=init,
        conv_general_dilated=convolution,
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
            x = nn.relu(max_pool(_conv(features, 5, x, convolution_to_pool)))
        x = nn.relu(_dense(30, x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return _dense(self.classes, x)


class SmallCNN(nn.Module):
    """For small images: two convolutions, with pooling between them, and a hidden layer."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits; there is no dropout."""
        x = max_pool(nn.relu(_conv(16, 3, x, convolution_to_pool)))
        x = nn.relu(_conv(24, 2, x, tiled_convolution))
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
