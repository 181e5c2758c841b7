r"""The quadratic model of a step that is a combination of a few directions.

.. math:: q(w) = w'b + \tfrac12 w'(\mu (A + \gamma N))w, \qquad A = V'FV,\ N = V'V,\ b = V'\hat g

for the step :math:`Vw`, with :math:`F` the exact Fisher of the batch, or of a part of it: one JVP
per direction. A linear member of the family has :math:`\mu = 1`; one whose own model is quadratic
has that curvature once more, :math:`\mu = 2`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture import Oracle
from kldwrm_jax.finite import vdot
from kldwrm_jax.paths import Leaves


class QuadraticModel(NamedTuple):
    """What a batch says about the steps that some directions span."""

    loss_slope: jax.Array  # [k]: V'g, of the loss
    slope: jax.Array  # [k]: b = V'g_hat, of the member's objective: with wake and weight decay
    fisher: jax.Array  # [k, k]: A = V'FV
    norms: jax.Array  # [k, k]: N = V'V
    samples: jax.Array  # []: what the gradient is a mean over

    def curvature(self, damping: Scalar) -> jax.Array:
        r""":math:`A + \gamma N`."""
        return self.fisher + damping * self.norms

    def divergence(self, w: jax.Array) -> jax.Array:
        r""":math:`\frac12 w'Aw`, the step's divergence to second order."""
        return 0.5 * w @ self.fisher @ w

    def change(self, w: jax.Array) -> jax.Array:
        """The change of the loss that the model predicts, without damping."""
        return self.loss_slope @ w + self.divergence(w)

    def minimiser(self, i: int, j: int, damping: Scalar, mu: float) -> tuple[jax.Array, jax.Array]:
        """The best coefficients of two directions; of the second, 0 if that direction is zero."""
        b, m = self.slope, mu * self.curvature(damping)
        jitter = 1 + jnp.finfo(m.dtype).eps ** 0.75  # directions may be parallel
        ii, ij, jj = m[i, i] * jitter, m[i, j], m[j, j] * jitter
        known = self.norms[j, j] > 0
        determinant = jnp.where(known, ii * jj - ij**2, 1)
        both = (ij * b[j] - jj * b[i]) / determinant, (ij * b[i] - ii * b[j]) / determinant
        return jnp.where(known, both[0], -b[i] / ii), jnp.where(known, both[1], 0)

    def minimiser_given(
        self, i: int, j: int, other: Scalar, damping: Scalar, mu: float
    ) -> jax.Array:
        """The best coefficient of direction ``i`` where that of ``j`` is given."""
        m = mu * self.curvature(damping)
        return -(self.slope[i] + other * m[i, j]) / m[i, i]


def measure(
    oracle: Oracle,
    directions: list[Leaves],
    g: Leaves,
    objective_gradient: Leaves,
    examples_of: Callable[[tuple[int, ...]], int],
) -> QuadraticModel:
    """The model of a batch, whose Fisher is measured on ``examples_of`` the samples' shape."""
    return QuadraticModel(
        loss_slope=jnp.stack([vdot(v, g) for v in directions]),
        slope=jnp.stack([vdot(v, objective_gradient) for v in directions]),
        fisher=oracle.thinned(examples_of).gram(directions),
        norms=jnp.stack([jnp.stack([vdot(u, v) for v in directions]) for u in directions]),
        samples=oracle.samples,
    )
