r"""Statistics too far from their average to be believed.

An absurd batch (inputs of 1e15, a loss multiplied by mistake) has finite statistics that would sit
in the average for hundreds of refreshes. A block's statistics are kept out of its average if the
trace of one of their factors is more than :data:`FAR` times that of the average. Averaging in what
is too small does no harm; but it may be the average that is absurd. What comes back again and again
is no accident but a new scale: after :data:`PATIENCE` refreshes in a row that are :data:`FAR` from
the average, above or below, it begins anew with them, and so does the wake of that block. A factor
that is zero is not far from any other: a layer may fall asleep and wake up.

Inputs have a scale; gradients need not have one. Where a network is sure of itself, labels drawn
from it hold no surprise for many batches, and then one that is millions of times their average:
honest, and the Fisher consists of these. So output factors and diagonals are compared as they
count, with the damping that is added to them: below it, nothing is far.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.blocks import Block, Factors

FAR = 1e6
PATIENCE = 3


class Sifted(NamedTuple):
    """What is to be averaged, and how; one entry a block."""

    factors: list[Factors]  # the average itself where the statistics are kept out
    rho: jax.Array  # (blocks,): the decay; 0 where the average begins anew
    kept_out: jax.Array  # bool (blocks,)
    anew: jax.Array  # bool (blocks,): whether the average begins anew
    strange: jax.Array  # int32 (blocks,): refreshes in a row that were far from the average
    finite: jax.Array  # bool []: whether all statistics are; the rest is void if not


def sift(
    blocks: Sequence[Block],
    f_bar: Sequence[Factors],
    f: Sequence[Factors],
    rho: Scalar,
    strange: jax.Array,
    gamma: Scalar = 0.0,
) -> Sifted:
    """Decides which blocks' statistics are taken into their averages.

    Args:
      blocks: their kinds.
      f_bar: their averages.
      f: their statistics.
      rho: the decay of the averages.
      strange: for every block, how many refreshes in a row before this one had statistics far from
        the average.
      gamma: the damping.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Diagonal, sift
      >>> blocks, average = [Diagonal(), Diagonal()], [jnp.ones(2), jnp.ones(2)]
      >>> statistics = [jnp.full(2, 3.0), jnp.full(2, 1e12)]
      >>> sifted = sift(blocks, average, statistics, 0.95, jnp.zeros(2, jnp.int32))
      >>> sifted.kept_out.tolist(), [f.tolist() for f in sifted.factors]
      ([False, True], [[3.0, 3.0], [1.0, 1.0]])
    """
    new, old = _traces(blocks, f), _traces(blocks, f_bar)
    floor = _floor(blocks, f, old, gamma)
    known = (old > 0) & (new > 0)
    above = (known & (new + floor > FAR * (old + floor))).any(axis=-1)
    below = (known & (old + floor > FAR * (new + floor))).any(axis=-1)
    strange = jnp.where(above | below, strange + 1, 0)
    anew = strange >= PATIENCE
    kept_out = above & ~anew
    return Sifted(
        factors=[
            optax.tree.where(kept_out[i], *own) for i, own in enumerate(zip(f_bar, f, strict=True))
        ],
        rho=jnp.where(anew, 0, rho),
        kept_out=kept_out,
        anew=anew,
        strange=jnp.where(anew, 0, strange),
        finite=jnp.isfinite(new).all(),
    )


def _traces(blocks: Sequence[Block], factors: Sequence[Factors]) -> jax.Array:
    """Of every block's sides, over the number of rows: (blocks, 2), one twice if it is alone.

    If they are finite, so are the factors: these are sums of squares or of products with
    themselves, whose diagonals bound all else.
    """
    rows = []
    for block, f in zip(blocks, factors, strict=True):
        sides = [jnp.mean(side.mean_eigenvalue(x)) for side, x in block.split(f)]
        rows += [sides[0], sides[-1]]
    return jnp.stack(rows).reshape(-1, 2)


def _floor(
    blocks: Sequence[Block], factors: Sequence[Factors], traces: jax.Array, gamma: Scalar
) -> jax.Array:
    r"""What damping adds to the traces: :math:`\gamma` to a diagonal, its share to ``G``."""
    inputs = traces[:, 0]
    share = gamma / jnp.where(inputs > 0, inputs, 1)
    alone = np.array([len(block.split(f)) == 1 for block, f in zip(blocks, factors, strict=True)])
    both = jnp.stack([jnp.zeros_like(share), share], axis=-1)
    return jnp.where(alone[:, None], gamma, both)
