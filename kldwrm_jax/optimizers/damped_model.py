r"""The damped quadratic model of the loss on a batch, minimised in the space of its samples.

With the batch's Fisher :math:`F = J'J`, and :math:`K = JJ'`,

.. math:: \phi = \arg\min_\phi\ g'\phi + \tfrac12 \phi'F\phi + \tfrac\gamma2 \|\phi - a\|^2
               = a - J'(K + \gamma)^{-1} (e + Ja - \tfrac1\gamma Jr) - \tfrac1\gamma r

for a gradient :math:`g = J'e + r`: the first part is the likelihood's, the second whatever it has
besides, such as weight decay. Where :math:`e` is not known, :math:`J'e` is the part of the gradient
in the space of the rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.capture import SampleSpace
from kldwrm_jax.finite import squared_norm, vdot
from kldwrm_jax.paths import Leaves

_RAISE = 4.0  # the damping by, where the linear system can not be solved
_ROUNDING = 100.0  # of a gradient, in units of the machine epsilon


class DampedModel(NamedTuple):
    """What the minimiser depends on, but for the damping."""

    space: SampleSpace  # J and e
    gram: jax.Array  # K
    g: Leaves
    anchor: Leaves | None  # a; None is zero

    def minimiser(self, damping: jax.Array) -> tuple[Leaves, jax.Array]:
        r""":math:`\phi`, and the damping that it was found with.

        Near the rounding error of :math:`K` there may be no Cholesky factor: damping is raised
        until there is one.
        """
        space, errors = self.space, self._errors()
        rest = self._rest(errors)
        factor, damping = self._factor(damping)
        y = errors - space.times(rest) / damping
        if self.anchor is not None:
            y += space.times(self.anchor)
        # (K + gamma) z = y, and once again for what is left, as K has been rounded and J has not.
        z = jax.scipy.linalg.cho_solve((factor, True), y)
        left = y - space.times(space.transposed(z)) - damping * z
        jz = space.transposed(z + jax.scipy.linalg.cho_solve((factor, True), left))
        phi = {path: -x - rest[path] / damping for path, x in jz.items()}
        if self.anchor is not None:
            phi = {path: self.anchor[path] + x for path, x in phi.items()}
        return phi, damping

    def _factor(self, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
        r"""The Cholesky factor of :math:`K + \gamma`, and the damping, raised if it has to be."""
        trace, identity = jnp.trace(self.gram), jnp.eye(len(self.gram), dtype=self.gram.dtype)

        def cholesky(damping: jax.Array) -> jax.Array:
            return jnp.linalg.cholesky(self.gram + damping * identity)

        def fails(tried: tuple[jax.Array, jax.Array]) -> jax.Array:
            factor, damping = tried
            return ~jnp.isfinite(factor[-1, -1]) & (damping < trace)  # false if K is not finite

        def raised(tried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            damping = _RAISE * tried[1]
            return cholesky(damping), damping

        return jax.lax.while_loop(fails, raised, (cholesky(damping), damping))

    def _errors(self) -> jax.Array:
        r""":math:`e`; where it is not known, the solution of :math:`Ke = Jg`.

        Treating all of :math:`g` as the rest would give the same step in exact arithmetic, but it
        would divide by :math:`\gamma` what then cancels. Damped by the rounding error of
        :math:`K`, and once again for what is left, since what this misses is a rest.
        """
        if self.space.errors is not None:
            return self.space.errors
        rows, numbers = len(self.gram), jnp.finfo(self.gram.dtype)
        least = rows * numbers.eps * jnp.trace(self.gram)
        factor, _ = self._factor(jnp.maximum(least, numbers.tiny))
        e = jax.scipy.linalg.cho_solve((factor, True), self.space.times(self.g))
        left = self.space.times(self._without(e))
        return e + jax.scipy.linalg.cho_solve((factor, True), left)

    def _without(self, errors: jax.Array) -> Leaves:
        """:math:`g - J'e`."""
        own = self.space.transposed(errors)
        return {path: x - own[path] for path, x in self.g.items()}

    def _rest(self, errors: jax.Array) -> Leaves:
        r""":math:`r`; zero where it is no more than the gradient's rounding error.

        That would be divided by :math:`\gamma`. It is of the size of the terms that add up to the
        gradient, :math:`\|J\|\,\|e\|`, however small the gradient itself has become.
        """
        rest = self._without(errors)
        terms = jnp.trace(self.gram) * squared_norm(errors)
        rounding = _ROUNDING * jnp.finfo(terms.dtype).eps
        is_none = vdot(rest, rest) <= rounding**2 * terms  # false where it is not a number
        return {path: jnp.where(is_none, 0, x) for path, x in rest.items()}
