"""Decisions that all replicas under a ``vmap`` share.

``vmap`` turns a ``lax.cond`` whose predicate is batched into a ``select`` that runs both branches:
ten seeds trained side by side would pay for a refresh on every step. When a refresh is due depends
on the step count alone, which the replicas have in common, so the predicate need not be batched.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _shared(reduce: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The identity, which under ``vmap`` is a reduction over the replicas and not batched."""

    @jax.custom_batching.custom_vmap
    def identity(x: jax.Array) -> jax.Array:
        return x

    @identity.def_vmap
    def rule(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        del axis_size, in_batched
        return identity(reduce(x)), False

    return identity


shared_count = _shared(lambda count: jnp.max(count, axis=0))
shared_any = _shared(lambda flag: jnp.any(flag, axis=0))
