r"""The damped quadratic model of the loss on a batch, minimised in the space of its samples.

With the batch's Fisher :math:`F = J'J`, and :math:`K = JJ'`,

.. math:: \phi = \arg\min_\phi\ g'\phi + \tfrac12 \phi'F\phi + \tfrac\gamma2 \|\phi - a\|^2
               = a - J'(K + \gamma)^{-1} (e + Ja - \tfrac1\gamma Jr) - \tfrac1\gamma r

for a gradient :math:`g = J'e + r`: the first part is the likelihood's, the second whatever it has
besides, such as weight decay. Where :math:`e` is not known, :math:`J'e` is the part of the gradient
in the space of the rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture import SampleSpace
from kldwrm_jax.finite import squared_norm, vdot
from kldwrm_jax.paths import Leaves

_RAISE = 4.0  # the damping by, where the linear system can not be solved
_ROUNDING = 100.0  # of a gradient, in units of the machine epsilon
_DOUBLE = 1e-10  # a machine epsilon below this needs no second pass


class DampedModel(NamedTuple):
    """What the minimiser depends on, but for the damping."""

    space: SampleSpace  # J and e
    gram: jax.Array  # K
    g: Leaves
    anchor: Leaves | None  # a; None is zero

    def minimiser(self, damping: jax.Array) -> tuple[Leaves, jax.Array]:
        r""":math:`\phi`, and the damping that it was found with.

        In double precision there may be no Cholesky factor near the rounding error of :math:`K`:
        damping is raised until there is one.
        """
        space, errors = self.space, self._errors()
        rest = self._rest(errors)
        solution, damping = self._inverse(damping)
        y = errors - space.times(rest) / damping
        if self.anchor is not None:
            y += space.times(self.anchor)
        jz = solution(y)
        phi = {path: -x - rest[path] / damping for path, x in jz.items()}
        if self.anchor is not None:
            phi = {path: self.anchor[path] + x for path, x in phi.items()}
        return phi, damping

    def _inverse(self, damping: jax.Array) -> tuple[Callable[[jax.Array], Leaves], jax.Array]:
        r""":math:`J'(K + \gamma)^{-1}` as a function, and the damping, raised if it has to be."""
        if jnp.finfo(self.gram.dtype).eps > _DOUBLE:
            return self._inverse_in_two_passes(damping), damping
        space = self.space
        factor, damping = _cholesky(self.gram, damping)

        def solution(y: jax.Array) -> Leaves:
            # Once again for what is left, as K has been rounded and J has not.
            z = jax.scipy.linalg.cho_solve((factor, True), y)
            left = y - space.times(space.transposed(z)) - damping * z
            return space.transposed(z + jax.scipy.linalg.cho_solve((factor, True), left))

        return solution, damping

    def _inverse_in_two_passes(self, damping: jax.Array) -> Callable[[jax.Array], Leaves]:
        r""":math:`J'(K + \gamma)^{-1}` where :math:`\gamma` is lost in the rounding of :math:`K`.

        With the Cholesky factor :math:`L` of :math:`K` and a damping that is above its rounding,
        the rows of :math:`P = L^{-1}J` are nearly orthogonal, and the Gram matrix of *them* shows
        what :math:`K` could not: :math:`K + \gamma = L (PP' + \gamma (L'L)^{-1}) L'`.
        """
        n, rounding = len(self.gram), float(jnp.finfo(self.gram.dtype).eps)
        factor, _ = _cholesky(self.gram, jnp.maximum(damping, rounding * jnp.trace(self.gram)))
        whitened = self.space.solved(factor)
        inverse = solve_triangular(factor, jnp.eye(n, dtype=factor.dtype), lower=True)
        own = jnp.matmul(inverse, inverse.T, precision=jax.lax.Precision.HIGHEST)
        second, _ = _cholesky(whitened.gram() + damping * own, rounding)

        def solution(y: jax.Array) -> Leaves:
            z = jax.scipy.linalg.cho_solve((second, True), solve_triangular(factor, y, lower=True))
            return whitened.transposed(z)

        return solution

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
        factor, _ = _cholesky(self.gram, jnp.maximum(least, numbers.tiny))
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


def _cholesky(matrix: jax.Array, damping: Scalar) -> tuple[jax.Array, jax.Array]:
    r"""The Cholesky factor of :math:`A + \gamma`, and the damping, raised if it has to be."""
    trace, identity = jnp.trace(matrix), jnp.eye(len(matrix), dtype=matrix.dtype)

    def factor(damping: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(matrix + damping * identity)

    def fails(tried: tuple[jax.Array, jax.Array]) -> jax.Array:
        factor, damping = tried
        return ~jnp.isfinite(factor[-1, -1]) & (damping < trace)  # false if A is not finite

    def raised(tried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        damping = _RAISE * tried[1]
        return factor(damping), damping

    first = jnp.asarray(damping, matrix.dtype)
    return jax.lax.while_loop(fails, raised, (factor(first), first))
