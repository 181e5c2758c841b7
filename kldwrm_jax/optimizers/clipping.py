"""Two clips: of the whole step by its KL divergence, and of every parameter by its size."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature import Parameter
from kldwrm_jax.paths import Leaves


def kl_clip_factor(limit: Scalar, size: jax.Array) -> jax.Array:
    r""":math:`\min(1, \sqrt{c / v'h})`: a step's quadratic divergence stays below about ``c``.

    Args:
      limit: ``c``.
      size: :math:`v'h`, twice the quadratic divergence of the unclipped step.
    """
    return jnp.where(size > limit, jnp.sqrt(limit / jnp.where(size > limit, size, 1)), 1.0)


def block_clip_factors(
    tau: Scalar, lr: Scalar, v: Leaves, parameters: Mapping[str, Parameter]
) -> dict[str, jax.Array]:
    r""":math:`\min(1, \tau \sqrt{n_b}\, \mathrm{lr} / \|v_b\|)` for every parameter.

    Each copy of a stacked layer is clipped by itself, as it would be outside the stack.
    """

    def factor(path: str, x: jax.Array) -> jax.Array:
        axes = parameters[path].per_slice(x)
        size = math.prod(x.shape[axis] for axis in axes)
        norm = jnp.sqrt(jnp.sum(x**2, axis=axes, keepdims=True))
        limit = tau * math.sqrt(size) * lr
        return jnp.where(norm > limit, limit / jnp.where(norm > limit, norm, 1), 1.0)

    return {path: factor(path, x) for path, x in v.items()}
