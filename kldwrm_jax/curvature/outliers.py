r"""Statistics that are too far from their average to be averaged in.

A corrupt batch (inputs of 1e15, a loss multiplied by mistake) can have finite statistics that would
dominate the average for hundreds of refreshes. So a block's statistics are rejected if the trace of
one of its factors exceeds :data:`FAR` times that of the average. Statistics that are too small are
averaged in, since they do no harm.

It may also be the average that is wrong. After :data:`PATIENCE` consecutive refreshes that are off
by :data:`FAR`, above or below, the average restarts from the newest statistics, and so does the
wake of that block. A factor that is zero is not far from any other: a layer may be inactive for a
while.

Output factors and diagonals are compared with the damping added. Where a network is confident,
labels sampled from it have gradients near zero for many batches and then one that is millions of
times their average; the Fisher consists of these, and below the damping they make no difference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.blocks import Block, Factors

FAR = 1e6
PATIENCE = 3

Traces = tuple[jax.Array, ...]  # of a block's factors, divided by their rows


class Verdict(NamedTuple):
    """How a block's statistics are to be averaged."""

    rho: jax.Array  # float []: the decay of the average; 0 where it restarts
    rejected: jax.Array  # bool []: whether the average stays as it is
    restart: jax.Array  # bool []: whether the average, and with it the wake, restarts
    streak: jax.Array  # int32 []: consecutive refreshes that were far from the average


def traces(block: Block, f: Factors) -> Traces:
    """The traces by which a block's statistics are judged.

    If they are finite, so are the factors: a Gram matrix is bounded by its diagonal.
    """
    return tuple(jnp.mean(side.mean_eigenvalue(x)) for side, x in block.split(f))


def judge_outlier(
    new: Traces, old: Traces, rho: Scalar, streak: jax.Array, damping: Scalar = 0.0
) -> Verdict:
    """Decides whether a block's statistics are taken into its average.

    Args:
      new: traces of the statistics.
      old: traces of the average.
      rho: the decay of the average.
      streak: how many refreshes in a row, before this one, were far from the average.
      damping: added to the factors before they are compared.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Diagonal, judge_outlier, traces
      >>> new, old = traces(Diagonal(), jnp.full(2, 1e12)), traces(Diagonal(), jnp.ones(2))
      >>> bool(judge_outlier(new, old, 0.95, jnp.zeros((), jnp.int32)).rejected)
      True
    """
    above, below = jnp.zeros((), bool), jnp.zeros((), bool)
    for trace, average, floor in zip(new, old, _floors(old, damping), strict=True):
        known = (average > 0) & (trace > 0)
        above |= known & (trace + floor > FAR * (average + floor))
        below |= known & (average + floor > FAR * (trace + floor))
    streak = jnp.where(above | below, streak + 1, 0)
    restart = streak >= PATIENCE
    return Verdict(
        rho=jnp.where(restart, 0, rho),
        rejected=above & ~restart,
        restart=restart,
        streak=jnp.where(restart, 0, streak),
    )


def _floors(old: Traces, damping: Scalar) -> list[Scalar]:
    r"""What damping adds to the traces: :math:`\gamma` to a diagonal, its share to ``G``."""
    if len(old) == 1:
        return [damping]
    inputs = old[0]
    return [0.0, damping / jnp.where(inputs > 0, inputs, 1)]
