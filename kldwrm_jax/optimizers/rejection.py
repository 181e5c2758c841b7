"""What happens to a step that is not finite: it is refused, and the state stays as it was."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.paths import Leaves, leaves_by_path

Tree = TypeVar("Tree")


def fits(updates: optax.Updates, step: Leaves) -> jax.Array:
    """Whether the step stays finite in the gradients' type, where that is narrower."""
    fit = jnp.ones((), bool)
    for path, x in leaves_by_path(updates).items():
        theirs, ours = jnp.finfo(x.dtype), jnp.finfo(step[path].dtype)
        if theirs.maxexp < ours.maxexp:
            fit &= jnp.abs(step[path]).max(initial=0) <= theirs.max
    return fit


def fade(remembered: Tree, decay: Scalar, finite: jax.Array, g: Leaves) -> Tree:
    """What is remembered after a step that was refused.

    If the gradient is finite but the direction is not, the memory is decayed, as by a step of zero,
    so that training can resume.
    """
    overflowed = ~finite & jnp.isfinite(optax.tree.vdot(g, g))
    return optax.tree.scale(jnp.where(overflowed, jnp.asarray(decay, float), 1), remembered)
