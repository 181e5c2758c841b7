r"""The damped quadratic model of the loss on a batch, minimised in the space of its samples.

With the batch's Fisher :math:`F = J'J`, and :math:`K = JJ'`,

.. math:: \phi = \arg\min_\phi\ g'\phi + \tfrac12 \phi'F\phi + \tfrac\gamma2 \|\phi - a\|^2
               = a - J'(K + \gamma)^{-1} (e + Ja - \tfrac1\gamma Jr) - \tfrac1\gamma r

for a gradient :math:`g = J'e + r`: the first part is the likelihood's, the second whatever it has
besides, such as weight decay.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.capture import SampleSpace
from kldwrm_jax.finite import squared_norm, vdot
from kldwrm_jax.paths import Leaves

_REFINEMENTS = 2
_ROUNDING = 100.0  # of a gradient, in units of the machine epsilon


class DampedModel(NamedTuple):
    """What the minimiser depends on, but for the damping."""

    space: SampleSpace  # J and e
    gram: jax.Array  # K
    g: Leaves
    anchor: Leaves | None  # a; None is zero

    def minimiser(self, damping: jax.Array) -> Leaves:
        r""":math:`\phi`."""
        space, rest = self.space, self._rest()
        y = space.times(rest) / -damping
        if space.errors is not None:
            y += space.errors
        if self.anchor is not None:
            y += space.times(self.anchor)
        damped = self.gram + damping * jnp.eye(self.gram.shape[0], dtype=self.gram.dtype)
        factor = jax.scipy.linalg.cho_factor(damped)
        z = jnp.zeros_like(y)
        jz = space.transposed(z)  # J'z, where (K + gamma) z = y
        for _ in range(1 + _REFINEMENTS):
            correction = jax.scipy.linalg.cho_solve(factor, y - space.times(jz) - damping * z)
            z += correction
            jz = optax.tree.add(jz, space.transposed(correction))
        phi = {path: -x - rest[path] / damping for path, x in jz.items()}
        if self.anchor is None:
            return phi
        return {path: self.anchor[path] + x for path, x in phi.items()}

    def _rest(self) -> Leaves:
        r""":math:`r`; zero where it is no more than the gradient's rounding error.

        That would be divided by :math:`\gamma`. It is of the size of the terms that add up to the
        gradient, :math:`\|J\|\,\|e\|`, however small the gradient itself has become.
        """
        if self.space.errors is None:
            return self.g
        own = self.space.transposed(self.space.errors)
        rest = {path: x - own[path] for path, x in self.g.items()}
        terms = jnp.trace(self.gram) * squared_norm(self.space.errors)
        rounding = _ROUNDING * jnp.finfo(terms.dtype).eps
        is_none = vdot(rest, rest) <= rounding**2 * terms  # false where it is not a number
        return {path: jnp.where(is_none, 0, x) for path, x in rest.items()}
