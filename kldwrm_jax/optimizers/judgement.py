r"""What the next batch says of a step.

A step is made from one batch, and that batch is always pleased with it: to judge it needs another.
With gradient :math:`g` and Fisher :math:`F` of the *next* batch, at the parameters after the step
:math:`s`, the loss of that batch has changed by

.. math:: g's - \tfrac12 s'Fs

to second order, with a variance of about :math:`s'Fs / n` over batches of ``n`` samples. Its ratio
to what the step's own batch had promised, averaged over steps, is the *realised share*: near 1
where a batch says nearly all about the problem, near 0 where its noise rules.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar

_DECAY = 0.8  # of the means by which harm is judged: about five steps
_SHARE_DECAY = 0.9


class Judgement(NamedTuple):
    """Running means over the steps judged so far."""

    change: jax.Array  # of the next batch's loss
    promise: jax.Array  # of the decrease that the step's own batch had predicted
    variance: jax.Array  # of the mean change
    share: jax.Array  # the realised share: 1 until it is measured


class Verdict(NamedTuple):
    """What follows for the steps to come."""

    harmed: jax.Array  # bool []: the loss rises, beyond doubt
    confirmed: jax.Array  # bool []: more than half of the promise is kept


def unjudged() -> Judgement:
    """Before the first step."""
    change, promise, variance = (jnp.zeros((), float) for _ in range(3))
    return Judgement(change, promise, variance, share=jnp.ones((), float))


def judge(
    before: Judgement, promise: jax.Array, slope: jax.Array, size: jax.Array, samples: Scalar
) -> tuple[Judgement, Verdict]:
    r"""Takes the last step into the judgement.

    Args:
      before: the judgement so far.
      promise: the decrease that the step's own batch had predicted; 0 if there was no step.
      slope: :math:`g's` on the next batch.
      size: :math:`s'Fs` on the next batch.
      samples: in that batch.
    """
    step = promise > 0
    known = jnp.where(step, promise, 1)
    change = slope - 0.5 * size
    change = jnp.where(jnp.isfinite(change), jnp.clip(change, -2 * known, 5 * known), 5 * known)
    variance = size / samples
    new = Judgement(
        _DECAY * before.change + (1 - _DECAY) * change,
        _DECAY * before.promise + (1 - _DECAY) * known,
        _DECAY**2 * before.variance + (1 - _DECAY) ** 2 * variance,
        _SHARE_DECAY * before.share + (1 - _SHARE_DECAY) * jnp.clip(-change / known, -1, 1),
    )
    slowly = (new.change > 2 * jnp.sqrt(new.variance)) & (new.change > 0.1 * new.promise)
    at_once = (change > 4 * jnp.sqrt(variance)) & (change > 0.5 * known)
    harmed = step & (slowly | at_once)
    confirmed = step & (-new.change > 0.5 * new.promise)
    # Harm that was answered once is not counted again.
    forgotten = unjudged()._replace(share=new.share)
    new = jax.tree.map(lambda a, b: jnp.where(harmed, a, b), forgotten, new)
    new = jax.tree.map(lambda a, b: jnp.where(step, a, b), new, before)
    return new, Verdict(harmed, confirmed)
