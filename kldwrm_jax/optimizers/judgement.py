r"""What the next batch says of a step.

A step is made from one batch, and that batch is always pleased with it: to judge it needs another.
Of the *next* batch's loss :math:`L`, after the step :math:`s` from :math:`\theta^-` to
:math:`\theta`, the change is

.. math:: L(\theta) - L(\theta^-) = g's + [L(\theta) - L(\theta^-) - g_L's],

whose first part is known of the whole batch, and of whatever the user's loss has besides, and whose
second part, of second order and of one sign, is measured on a part of the batch by two forward
passes. Its ratio to what the step's own batch had promised, averaged over steps, is the *reduction
ratio*: near 1 where a batch says nearly all about the problem, near 0 where its noise rules.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_DECAY = 0.8  # of the means by which harm is judged: about five steps
_SHARE_DECAY = 0.9


class Change(NamedTuple):
    """Of the loss, by the last step, as the next batch sees it."""

    promise: jax.Array  # the decrease that the step's own batch predicted; 0 if there was no step
    mean: jax.Array
    variance: jax.Array  # of the mean
    loss: jax.Array  # before the step; 0 if it is not known


class Judgement(NamedTuple):
    """Running means over the steps judged so far."""

    change: jax.Array  # of the next batch's loss
    promise: jax.Array  # of the decrease that the step's own batch had predicted
    variance: jax.Array  # of the mean change
    share: jax.Array  # the realised share: 1 until it is measured
    loss: jax.Array  # 0 until it is measured


class Verdict(NamedTuple):
    """What follows for the steps to come."""

    harmed: jax.Array  # bool []: the loss rises, beyond doubt
    confirmed: jax.Array  # bool []: more than half of the promise is kept
    undo: jax.Array  # bool []: the last step alone did harm beyond doubt


def unjudged() -> Judgement:
    """Before the first step."""
    change, promise, variance, loss = (jnp.zeros((), float) for _ in range(4))
    return Judgement(change, promise, variance, share=jnp.ones((), float), loss=loss)


def judge(before: Judgement, last: Change) -> tuple[Judgement, Verdict]:
    """Takes the last step into the judgement."""
    step = last.promise > 0
    known = jnp.where(step, last.promise, 1)
    finite = jnp.isfinite(last.mean) & jnp.isfinite(last.variance)
    change = jnp.where(finite, jnp.clip(last.mean, -2 * known, 5 * known), 5 * known)
    variance = jnp.where(finite, last.variance, 0)
    level = jnp.maximum(jnp.abs(last.loss), before.loss)
    new = Judgement(
        _DECAY * before.change + (1 - _DECAY) * change,
        _DECAY * before.promise + (1 - _DECAY) * known,
        _DECAY**2 * before.variance + (1 - _DECAY) ** 2 * variance,
        _SHARE_DECAY * before.share + (1 - _SHARE_DECAY) * jnp.clip(-change / known, -1, 1),
        jnp.where(before.loss > 0, _DECAY * before.loss, 0)
        + jnp.where(before.loss > 0, 1 - _DECAY, 1) * jnp.abs(last.loss),
    )
    slowly = (new.change > 2 * jnp.sqrt(new.variance)) & (new.change > 0.1 * new.promise)
    deviation = jnp.sqrt(variance)
    at_once = (change > 4 * deviation) & (change > 0.5 * known)
    # Where few samples carry the change, their number says nothing, but the loss has doubled.
    # A promise of more than the loss is no measure of harm.
    most = level + jnp.minimum(known, level)
    doubled = (last.loss != 0) & (last.mean > most) & (last.mean > deviation)
    undo = step & (~finite | (last.mean > known + 4 * deviation) | doubled)
    harmed = step & (slowly | at_once | undo)
    confirmed = step & (-new.change > 0.5 * new.promise)
    # Harm that was answered once is not counted again.
    forgotten = unjudged()._replace(share=new.share, loss=new.loss)
    new = jax.tree.map(lambda a, b: jnp.where(harmed, a, b), forgotten, new)
    # The loss of a step that is undone is the loss again.
    new = new._replace(loss=jnp.where(undo | ~jnp.isfinite(new.loss), before.loss, new.loss))
    new = jax.tree.map(lambda a, b: jnp.where(step, a, b), new, before)
    return new, Verdict(harmed, confirmed, undo)
