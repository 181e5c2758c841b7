r"""Calibration: what the blocks are multiplied by so that they see a step's true divergence.

.. math:: c = \frac{v'(F + \gamma I)v}{v'\tilde F v}

with :math:`F` the exact Fisher of the batch and :math:`\tilde F` the damped, averaged blocks that
the step :math:`-v` is made with. One JVP per refresh; averaged as the factors are.
"""

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.curvature import AveragedFisher, CachedInverse, Refreshed
from kldwrm_jax.optimizers.direction import Direction, StepInputs


def factor(calibration: jax.Array) -> jax.Array:
    """``c``, which is stored as 0 until it is measured and is 1 until then."""
    return jnp.where(calibration > 0, calibration, 1)


def measure(
    fisher: AveragedFisher,
    calibration: jax.Array,
    inputs: StepInputs,
    refreshed: Refreshed,
    direction: Direction,
) -> jax.Array:
    """The average of ``c`` with this batch's measurement, to be taken at a refresh.

    It restarts with the average of any block. Outliers do not count. With a learning rate of zero
    there is no step, and the gradient's own direction is measured.
    """
    inverse = CachedInverse(inputs.blocks, fisher.solver, refreshed.averages.inverses, inputs.at)
    v = optax.tree.where(direction.size == 0, inverse.times(inputs.gradients.g), direction.v)
    unseen = {p.path for block in inputs.blocks if block.unseen for p in block.parameters}
    v = {path: jnp.zeros_like(x) if path in unseen else x for path, x in v.items()}
    blocks = fisher.times(inputs.blocks, refreshed.averages, v, inputs.at.damping)
    exact = 2 * inputs.oracle.quadratic(v) + inputs.at.damping * optax.tree.vdot(v, v)
    now = exact / optax.tree.vdot(v, blocks)
    restarts = jnp.stack([*refreshed.restart.values()]).any() | (calibration == 0)
    decay = jnp.where(restarts, 0, inputs.at.rho)
    new = decay * calibration + (1 - decay) * now
    counts = refreshed.refreshed & ~refreshed.outlier & jnp.isfinite(new) & (new > 0)
    return jnp.where(counts, new, calibration)
