r"""The damping of natural gradients, found from how the last steps went.

Two things tell whether a solution is to be trusted: how much of it the line search took, on the
step's own batch, and what share of the decrease there came true on the next batch.

* Little of it: the model was wrong so far away, and more damping makes shorter solutions.
* Next to nothing came true: the step has fitted the noise of its batch, and more damping averages
  over more of them.
* Else, where at least half was taken, damping falls; and by more than it is raised at a time, for a
  damping that is too high leads into canyons that only long solutions leave (Transtrum and Sethna,
  `Improvements to the Levenberg-Marquardt algorithm <https://arxiv.org/abs/1201.5885>`_, 2012).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The first damping, in units of the mean of the diagonal of K. From 1e-8 to 1e-4 it made little
# difference after fifty steps on the equations of examples/equations.py.
_INITIAL = 1e-6
# Poisson's equation, 2-d: raised by 4 and lowered by 1/3, without the judgement, it had an error of
# 3e-6 after 40 seconds (one seed); with these, 4e-8 to 8e-7 after 33 to 40 (three seeds).
_LOWERED, _LOWERED_FROM = 0.2, 0.5  # the damping by, after a rate of at least
_RAISED, _RAISED_BELOW = 2.0, 0.25  # likewise, after a rate of less than
_NOISY, _NOISY_BELOW = 1.5, 0.25  # likewise, where a smaller share came true
_DECAY = 0.8  # of the share: about five steps


class FoundDamping(NamedTuple):
    """What is known of the last steps."""

    damping: jax.Array  # float []: of the last step; 0 before the first
    rate: jax.Array  # float []: that its search took
    promise: jax.Array  # float []: by how much its own batch's loss fell
    share: jax.Array  # float []: of the promises, what came true on the next batches

    def judged(self, decrease: jax.Array) -> "FoundDamping":
        """With what the last step did to the loss of the next batch."""
        known = (self.promise > 0) & jnp.isfinite(decrease)
        now = jnp.clip(decrease / jnp.where(known, self.promise, 1), -1, 2)
        share = _DECAY * self.share + (1 - _DECAY) * now
        return self._replace(share=jnp.where(known, share, self.share))

    def next(self, trace: jax.Array, rows: int) -> jax.Array:
        """The damping of the next step, of whose Gram matrix the trace and the rows are given."""
        factor = jnp.where(self.rate >= _LOWERED_FROM, _LOWERED, 1.0)
        factor = jnp.where(self.share < _NOISY_BELOW, _NOISY, factor)
        factor = jnp.where(self.rate < _RAISED_BELOW, _RAISED, factor)
        moved = jnp.minimum(factor * self.damping, trace)
        return jnp.where(self.damping > 0, moved, _INITIAL * trace / rows)


def unknown() -> FoundDamping:
    """Before the first step."""
    nothing = jnp.zeros((), float)
    return FoundDamping(nothing, nothing, nothing, jnp.ones((), float))
