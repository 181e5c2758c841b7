r"""What samples say of a step: along directions to come, and of the last one, which they judge.

With :math:`h` the outputs, :math:`u_i = J v_i` their changes along the directions and :math:`h^-`
the outputs before the last step, a sample's loss has changed by :math:`\ell(h) - \ell(h^-)`. To
first order that is its slope along the step. The *remainder* is the difference of the two: minus
half of the step's size :math:`s'Fs` on a quadratic loss, exact on any other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.likelihoods.terms import LikelihoodTerms


class Evidence(NamedTuple):
    """Sums over samples, each with its share of the mean: they add over terms and replicas."""

    fisher: jax.Array  # [k, k]: V'FV
    slopes: jax.Array  # [k]: of the loss, at the parameters after the last step
    loss: jax.Array  # []: before the last step; 0 where there are no targets
    remainder: jax.Array  # []: of the last step
    remainder_square: jax.Array  # []: the sum of the samples' squares, a variance
    slope_square: jax.Array  # []: likewise, of the last step's slope
    share_square: jax.Array  # []: likewise, of ones: 1 / n for n samples of equal weight
    size_square: jax.Array  # []: likewise, of the first direction's size

    def divided(self, parts: jax.Array) -> "Evidence":
        """The mean over some parts of the batch, from the sum."""
        sums = self._asdict().items()
        squares = {name: x / parts**2 for name, x in sums if name.endswith("_square")}
        return jax.tree.map(lambda x: x / parts, self)._replace(**squares)

    @property
    def effective_samples(self) -> jax.Array:
        r"""How many samples carry the first direction's curvature: :math:`(\sum d)^2/\sum d^2`."""
        known = self.size_square > 0
        many = self.fisher[0, 0] ** 2 / jnp.where(known, self.size_square, 1)
        return jnp.where(known, many, jnp.inf)


def evidence_here(
    terms: LikelihoodTerms, outputs: jax.Array, changes: jax.Array, before: jax.Array
) -> Evidence:
    """The evidence of this replica's samples, summed over the terms of the loss.

    Args:
      terms: the likelihoods on the batch; one without targets is taken for quadratic.
      outputs: at the parameters.
      changes: of the outputs along the directions, stacked in front; the last is the last step.
      before: outputs before the last step.
    """
    own = [
        _of_term(term, here, along, there)
        for (term, here), (_, along), (_, there) in zip(
            *(terms.by_term(x) for x in (outputs, changes, before)), strict=True
        )
    ]
    return jax.tree.map(lambda *x: jnp.stack(x).sum(axis=0), *own)


def _of_term(
    term: LikelihoodTerm, outputs: jax.Array, changes: jax.Array, before: jax.Array
) -> Evidence:
    outputs, changes, before = (x.astype(float) for x in (outputs, changes, before))
    k, event = len(changes), tuple(range(-term.likelihood.event_ndim, 0))
    gradient = jax.grad(lambda h: term.divergence_here(outputs, h))
    curved = jax.vmap(jax.linearize(gradient, outputs)[1])(changes)
    columns = (x.reshape(k, -1) for x in (changes, curved))
    fisher = jnp.einsum("in,jn->ij", *columns, precision=jax.lax.Precision.HIGHEST)
    sizes = (changes * curved).sum(axis=event)
    shares = term.shares(outputs)
    if term.has_loss:
        slopes = (changes * jax.grad(term.loss_here)(outputs)).sum(axis=event)
        there = shares * term.losses(before)
        change = shares * term.losses(outputs) - there
        remainder, slope_square = change - slopes[-1], slopes[-1] ** 2
    else:  # the scores' second moment is the Fisher
        slopes, there, remainder = 0 * sizes, 0 * shares, -0.5 * sizes[-1]
        slope_square = shares * sizes[-1]
    return Evidence(
        fisher,
        slopes.reshape(k, -1).sum(axis=1),
        there.sum(),
        remainder.sum(),
        jnp.sum(remainder**2),
        slope_square.sum(),
        jnp.sum(shares**2),
        jnp.sum(sizes[0] ** 2),
    )
