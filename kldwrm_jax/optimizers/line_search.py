"""The length of a step, and its damping, by the loss that they lead to on the step's own batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.capture import Oracle
from kldwrm_jax.finite import vdot
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves

_RATES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001)


class Found(NamedTuple):
    """A solution, and what it is to be multiplied by."""

    solution: Leaves
    damping: jax.Array
    rate: jax.Array  # 0 where no rate lowers the loss, not a number where the loss is not finite


def search(oracle: Oracle, solve: Callable[[jax.Array], Leaves], dampings: jax.Array) -> Found:
    """The damping and the rate, of a few each, that lead to the lowest loss on the batch.

    Args:
      oracle: the batch's.
      solve: the solution with some damping.
      dampings: to be tried; of several that are as good, the first is taken.
    """
    here = oracle.loss(oracle.params)

    def attempt(damping: jax.Array) -> tuple[Found, jax.Array]:
        solution = solve(damping)
        # Damping near the rounding error may leave no Cholesky factor.
        finite = jnp.isfinite(vdot(solution, solution)) | ~jnp.isfinite(here)
        solution = jax.tree.map(lambda x: jnp.where(finite, x, 0), solution)
        rate, loss = _best_rate(oracle, solution, here)
        return Found(solution, damping, rate), loss

    found, losses = jax.lax.map(attempt, dampings)
    best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
    return jax.tree.map(lambda x: x[best], found)


def _best_rate(oracle: Oracle, solution: Leaves, here: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rate with the lowest loss, and the loss."""
    leaves = leaves_by_path(oracle.params)

    def loss(rate: jax.Array) -> jax.Array:
        moved = {p: leaves[p] + (rate * x).astype(leaves[p].dtype) for p, x in solution.items()}
        return oracle.loss(replace_leaves(oracle.params, moved))

    rates = jnp.array((0.0, *_RATES))
    losses = jnp.concatenate([here[None], jax.lax.map(loss, rates[1:])])
    best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
    return jnp.where(jnp.isfinite(here), rates[best], jnp.nan), losses[best]
