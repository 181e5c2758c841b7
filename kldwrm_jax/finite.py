"""Sums over a tree of numbers, and whether it is finite."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def all_finite(tree: Any) -> jax.Array:
    """Whether every entry of every leaf is finite."""
    leaves = [jnp.ravel(x) for x in jax.tree.leaves(tree)]
    # 0 * inf and 0 * nan are nan. A sum of products compiles faster than jnp.isfinite, and that of
    # one long array faster than those of many.
    return jnp.sum(_apart(jnp.concatenate(leaves)) * 0) == 0


def vdot(a: Any, b: Any) -> jax.Array:
    """The inner product of two trees of one structure."""
    own = jax.tree.map(lambda x, y: jnp.vdot(x, y, precision=jax.lax.Precision.HIGHEST), a, b)
    return total(jax.tree.leaves(own))


def squared_norm(x: jax.Array) -> jax.Array:
    """The sum of squares."""
    return jnp.vdot(x, x, precision=jax.lax.Precision.HIGHEST)


def total(scalars: Sequence[jax.Array]) -> jax.Array:
    """The sum of many scalars."""
    return jnp.sum(together(scalars))


def together(scalars: Sequence[jax.Array]) -> jax.Array:
    """Many scalars as one array."""
    return _apart(jnp.stack(scalars))


def _apart(x: jax.Array) -> jax.Array:
    """Keeps XLA from making the reduction of joined arrays a chain of their own reductions.

    It would repeat the chain in every kernel that uses the result.
    """
    return jax.lax.optimization_barrier(x)
