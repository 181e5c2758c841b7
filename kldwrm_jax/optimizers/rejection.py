"""What happens to a step that is not finite: it is refused, and the state stays as it was.

A callback could tell of it from inside ``jit``, at a price for everyone: a program with a callback
is neither exported nor written to JAX's compilation cache, and under ``vmap`` it calls on every
step. So the state counts, and whoever can look at it tells.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kldwrm_jax.arguments import Scalar, is_known
from kldwrm_jax.finite import vdot
from kldwrm_jax.paths import Leaves, leaves_by_path

Tree = TypeVar("Tree")

STUCK = 10  # refusals in a row after which it is no accident

WAY_OUT = (
    "the parameters do not change any more. Refused are steps with gradients that are not finite, "
    "with a learning rate below zero, or without usable curvature (rejected_refreshes). Go back to "
    "a checkpoint and lower the learning rate or kl_clip, or raise the damping; "
    "jax.config.update('jax_debug_nans', True) finds where a NaN arises"
)


def is_stuck(refused_in_a_row: Any, refused: int = STUCK) -> bool:
    """Whether so many steps in a row were refused; False if that cannot be looked at.

    Of replicas side by side, whether any of them is stuck.
    """
    return is_known(refused_in_a_row) and bool(np.max(np.asarray(refused_in_a_row)) >= refused)


def check_not_stuck(refused_in_a_row: Any, refused: int = STUCK) -> None:
    """An error if so many steps in a row were refused."""
    if is_stuck(refused_in_a_row, refused):
        count = np.max(np.asarray(refused_in_a_row))
        raise FloatingPointError(f"the last {count} steps were refused: {WAY_OUT}")


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
    overflowed = ~finite & jnp.isfinite(vdot(g, g))
    return optax.tree.scale(jnp.where(overflowed, jnp.asarray(decay, float), 1), remembered)
