"""The length of a step, by the loss that it leads to on the step's own batch."""

import jax
import jax.numpy as jnp

from kldwrm_jax.capture import Oracle
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves

_HALVINGS = 12  # down to 1/4096 of the solution; what needs less needs more damping first


Search = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # halvings, best rate, its loss, over


def best_rate(oracle: Oracle, solution: Leaves) -> tuple[jax.Array, jax.Array]:
    """The rate with the lowest loss on the batch, of 1, 1/2, 1/4, ...

    They are halved until the loss is finite and lower than without a step, and then for as long as
    it goes on falling.

    Args:
      oracle: the batch's.
      solution: what the rate multiplies.

    Returns:
      The rate, 0 where none lowers the loss and not a number where the loss itself is not finite,
      and by how much the loss falls.
    """
    leaves = leaves_by_path(oracle.params)
    here = oracle.loss(oracle.params)

    def loss(rate: jax.Array) -> jax.Array:
        moved = {p: leaves[p] + (rate * x).astype(leaves[p].dtype) for p, x in solution.items()}
        return oracle.loss(replace_leaves(oracle.params, moved))

    def goes_on(search: Search) -> jax.Array:
        halvings, _, _, over = search
        return (halvings <= _HALVINGS) & ~over

    def attempt(search: Search) -> Search:
        halvings, best, lowest, _ = search
        rate = 0.5 ** halvings.astype(lowest.dtype)
        new = loss(rate)
        lower = new < lowest  # false where it is not a number
        return (
            halvings + 1,
            jnp.where(lower, rate, best),
            jnp.where(lower, new, lowest),
            ~lower & (best > 0),
        )

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(here), here, jnp.zeros((), bool))
    _, best, lowest, _ = jax.lax.while_loop(goes_on, attempt, start)
    rate = jnp.where(jnp.isfinite(here), best, jnp.nan)
    return rate.astype(float), (here - lowest).astype(float)
