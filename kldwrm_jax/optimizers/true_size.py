r"""The true size of a step, and a limit of it.

The blocks, and an average that is some steps old, may underestimate :math:`s'Fs` by orders of
magnitude; a limit of their estimate then limits nothing. One JVP measures it with the exact Fisher
of the batch. The ratio of the two is remembered, and measured again at every refresh and wherever
it says that the limit is near: steps far below the limit pay nothing.

The limit is for every number among a sample's outputs, so that it means the same for one pixel and
for a thousand.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture import Oracle
from kldwrm_jax.optimizers.clipping import kl_clip_factor
from kldwrm_jax.paths import Leaves
from kldwrm_jax.replicas import shared_any

_NEAR = 10.0  # the ratio may have grown by this factor since it was measured


class TrueSize(NamedTuple):
    """How a step is shortened to its limit, and the ratio that says so."""

    factor: jax.Array  # float []: 1 where the step is within the limit
    ratio: jax.Array  # float []: s'Fs per output over the blocks' size, as last measured


def limit_true_size(
    s: Leaves, size: jax.Array, limit: Scalar, oracle: Oracle, ratio: jax.Array, due: jax.Array
) -> TrueSize:
    r"""The factor that keeps :math:`s'Fs` per output within the limit.

    Args:
      s: the step.
      size: the same by the blocks, or anything of its scale.
      limit: of the size per output.
      oracle: the batch's.
      ratio: of the true size to ``size``, as last measured; 0 before.
      due: whether to measure it in any case.
    """

    def measure() -> jax.Array:
        true = 2 * oracle.quadratic(s).astype(size.dtype) / oracle.event_size
        now = jnp.minimum(true / jnp.where(size > 0, size, 1), jnp.finfo(size.dtype).max)
        return jnp.where((size > 0) & ~jnp.isnan(now), now, ratio)

    near = _NEAR * ratio * size > limit
    ratio = jax.lax.cond(shared_any(due | near), measure, lambda: ratio)
    return TrueSize(kl_clip_factor(limit, ratio * size), ratio)
