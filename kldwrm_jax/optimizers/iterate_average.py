r"""Averaged iterates, for where the noise of the batches rules.

A fast iterate ``z`` takes steps that are too long to settle, ``x`` is its running mean, and the
parameters are between them:

.. math::
   z' &= z + d, \qquad x' = (1 - c)\,x + c\,z', \qquad y = (1 - \beta) z + \beta x \\
   y' - y &= (1 - \beta + \beta c)\,d + \beta c\,(z - x), \qquad z' - x' = (1 - c)(z - x + d)

so that the offset :math:`z - x` is all that has to be kept. The mean forgets its beginning:
:math:`c = p / (k + p / c_{max})` after ``k`` steps.

How long the fast steps should be shows in the slope of the loss along the offset, on batches that
neither iterate has seen: where it is positive, ``z`` is too far out.

References:
  Defazio et al., `The Road Less Scheduled <https://arxiv.org/abs/2405.15682>`_, 2024.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_BETA = 0.9
_POWER = 4.0
_LARGEST_WEIGHT = 0.2
_WARM_UP = 20  # steps before the slope along the offset means anything
_RATES = 0.02, 2.0
_AIM, _SPREAD = 0.03, 0.1  # of the slope, in units of the offset's own curvature


class IterateAverage(NamedTuple):
    """What is known of the average, besides the offset."""

    age: jax.Array  # float []: steps averaged
    rate: jax.Array  # float []: length of the fast steps, in units of the fitted one
    slope: jax.Array  # float []: running mean of g'(z - x)
    size: jax.Array  # float []: running mean of (z - x)'F(z - x)


def no_average() -> IterateAverage:
    """Before the first step."""
    age, slope, size = (jnp.zeros((), float) for _ in range(3))
    return IterateAverage(age, jnp.ones((), float), slope, size)


def weight(age: jax.Array) -> jax.Array:
    """``c``, the newest iterate's part of the mean."""
    return _POWER / (age + _POWER / _LARGEST_WEIGHT)


def coefficients(average: IterateAverage) -> tuple[jax.Array, jax.Array]:
    """What the parameters' step has of the fast step, and of the offset."""
    pulled = _BETA * weight(average.age)
    return 1 - _BETA + pulled, pulled


def adapt(average: IterateAverage, slope: jax.Array, size: jax.Array) -> IterateAverage:
    """The fast steps' rate, by the slope and the curvature along the offset on a new batch."""
    c = weight(average.age)
    old = jnp.where(average.age < 2, 0, 1 - jnp.minimum(0.2, 2 * c))
    slope = old * average.slope + (1 - old) * slope
    size = old * average.size + (1 - old) * size
    ratio = slope / jnp.where(size > 0, size, 1)
    push = jnp.clip((ratio - _AIM) / _SPREAD, -1, 1)
    rate = jnp.clip(average.rate * jnp.exp(-jnp.minimum(0.1, c) * push), *_RATES)
    rate = jnp.where((average.age > _WARM_UP) & (size > 0), rate, average.rate)
    return average._replace(rate=rate, slope=slope, size=size)
