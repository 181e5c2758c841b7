r"""Limits of a step: its KL divergence as a whole, and the size of every parameter's part."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar, check_positive
from kldwrm_jax.curvature import LayerBlock
from kldwrm_jax.finite import together
from kldwrm_jax.paths import Leaves


@dataclasses.dataclass(frozen=True)
class Clip:
    """A member's limits; None is no limit."""

    kl: Any  # of the whole step's quadratic divergence
    block: Any  # of every parameter's root mean square, relative to the learning rate
    true_kl: Any = None  # of the true divergence per output; see ``true_size.py``

    def __post_init__(self) -> None:
        limits = {"kl_clip": self.kl, "block_clip": self.block, "true_kl_clip": self.true_kl}
        for name, limit in limits.items():
            if limit is not None:
                check_positive(name, limit)

    def step(
        self, v: Leaves, size: jax.Array, lr: Scalar, blocks: Sequence[LayerBlock]
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """``-v``, clipped, and both factors; each is computed from the unclipped direction."""
        kl, smallest = jnp.ones((), float), jnp.ones((), float)
        if self.kl is not None:
            kl = kl_clip_factor(jnp.asarray(self.kl, float), size)
        s = {path: -kl * x for path, x in v.items()}
        if self.block is not None:
            factors = self._block_factors(v, lr, blocks)
            s = {path: factors[path] * x for path, x in s.items()}
            smallest = jnp.min(together([jnp.min(x) for x in factors.values()]))
        return s, kl, smallest

    def blocks(self, v: Leaves, lr: Scalar, blocks: Sequence[LayerBlock]) -> Leaves:
        """``v`` with every parameter's part clipped by itself."""
        if self.block is None:
            return v
        factors = self._block_factors(v, lr, blocks)
        return {path: factors[path] * x for path, x in v.items()}

    def _block_factors(self, v: Leaves, lr: Scalar, blocks: Sequence[LayerBlock]) -> Leaves:
        return block_clip_factors(jnp.asarray(self.block, float), lr, v, blocks)


def kl_clip_factor(limit: Scalar, size: jax.Array) -> jax.Array:
    r""":math:`\min(1, \sqrt{c / v'h})`, which keeps a step's quadratic divergence below ``c``.

    Args:
      limit: ``c``.
      size: :math:`v'h`, twice the quadratic divergence of the unclipped step.
    """
    return jnp.where(size > limit, jnp.sqrt(limit / jnp.where(size > limit, size, 1)), 1.0)


def block_clip_factors(
    tau: Scalar, lr: Scalar, v: Leaves, blocks: Sequence[LayerBlock]
) -> dict[str, jax.Array]:
    r""":math:`\min(1, \tau \sqrt{n_b}\, \mathrm{lr} / \|v_b\|)` for every parameter.

    Each copy of a stacked layer is clipped by itself, as it would be outside the stack.
    """

    parameters = {p.path: p for block in blocks for p in block.parameters}

    def factor(path: str, x: jax.Array) -> jax.Array:
        axes = parameters[path].per_slice(x)
        size = math.prod(x.shape[axis] for axis in axes)
        norm = jnp.sqrt(jnp.sum(x**2, axis=axes, keepdims=True))
        limit = tau * math.sqrt(size) * lr
        return jnp.where(norm > limit, limit / jnp.where(norm > limit, norm, 1), 1.0)

    return {path: factor(path, x) for path, x in v.items()}
