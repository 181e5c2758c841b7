r"""The factor between the user's loss and the likelihood's.

The gradient is the user's, the Fisher the likelihood's. A loss that is a mean over pixels, has no
half, or is divided by the padding as well, is :math:`\alpha` times the negative log-likelihood,
maybe with a regulariser; a quadratic model of the one with the curvature of the other would be
wrong by that factor. Slopes along a few directions tell it, :math:`v'g \approx \alpha\, v'g_L`: a
regression through zero, with each in units of its curvature :math:`v'Fv`, remembered over
measurements. Where it explains little, the two losses are different things, and the gradient is
taken as it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_DECAY = 0.9  # per measurement
_ALIKE = 0.1  # a factor this close to one is one: the loss is the likelihood's on other examples
_EXPLAINED = 0.5  # the least part of the variance of the slopes that makes it a factor


class LossScale(NamedTuple):
    """Sums of the regression of the user's slopes on the likelihood's."""

    user_square: jax.Array
    product: jax.Array
    likelihood_square: jax.Array


def unknown() -> LossScale:
    """Before the first measurement."""
    user_square, product, likelihood_square = (jnp.zeros((), float) for _ in range(3))
    return LossScale(user_square, product, likelihood_square)


def update(
    before: LossScale, user: jax.Array, likelihood: jax.Array, sizes: jax.Array
) -> LossScale:
    """Takes in slopes of both losses along some directions, and the directions' ``v'Fv``."""
    known = (sizes > 0) & jnp.isfinite(user) & jnp.isfinite(likelihood)
    weights = jnp.where(known, 1 / jnp.where(known, sizes, 1), 0)
    user, likelihood = jnp.where(known, user, 0), jnp.where(known, likelihood, 0)

    def add(old: jax.Array, products: jax.Array) -> jax.Array:
        return _DECAY * old + jnp.sum(weights * products)

    new = LossScale(
        add(before.user_square, user**2),
        add(before.product, user * likelihood),
        add(before.likelihood_square, likelihood**2),
    )
    # Squares may overflow, and a sum would remember that for ever.
    finite = jnp.isfinite(jnp.stack(new)).all()
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, before)


def agreement(scale: LossScale) -> jax.Array:
    """The part of the user's slopes that the likelihood's explain; 1 before it is measured."""
    both = scale.user_square * scale.likelihood_square
    explained = scale.product**2 / jnp.where(both > 0, both, 1)
    return jnp.where(both > 0, explained, 1)


def factor(scale: LossScale) -> jax.Array:
    r""":math:`\alpha`, or 1 where there is none."""
    known = (scale.product > 0) & (agreement(scale) > _EXPLAINED)
    alpha = scale.product / jnp.where(known, scale.likelihood_square, 1)
    return jnp.where(known & (jnp.abs(alpha - 1) > _ALIKE), alpha, 1)
