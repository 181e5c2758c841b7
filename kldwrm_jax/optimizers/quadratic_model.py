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
import optax

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture import Oracle
from kldwrm_jax.finite import vdot
from kldwrm_jax.likelihoods.evidence import Evidence
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

    def with_gradients_times(self, factor: jax.Array) -> "QuadraticModel":
        """The model of another multiple of the loss, whose curvature is this one."""
        return self._replace(loss_slope=factor * self.loss_slope, slope=factor * self.slope)

    def without(self, i: int, condition: jax.Array) -> "QuadraticModel":
        """The model with a direction of zero, on a condition."""
        keep = jnp.ones(len(self.slope)).at[i].set(jnp.where(condition, 0, 1))
        both = keep * keep[:, None]
        return QuadraticModel(
            keep * self.loss_slope,
            keep * self.slope,
            both * self.fisher,
            both * self.norms,
            self.samples,
        )

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
    gradients: tuple[Leaves, Leaves],
    examples_of: Callable[[tuple[int, ...]], int],
    place: Scalar = 0,
    parts: Scalar = 1,
) -> tuple[QuadraticModel, Evidence]:
    """The model of a batch, and what its examples say of the last of the directions.

    Args:
      oracle: the batch's.
      directions: the columns of ``V``, the last of which is the step that led here.
      gradients: of the loss, and of the member's objective.
      examples_of: how many examples are measured at a time, of the samples' shape.
      place: where in the batch they begin; the next place has others.
      parts: how many such parts are measured, as far as the batch goes.
    """
    evidence = _over_parts(oracle, directions, examples_of, place, parts)
    loss_slope, slope = (jnp.stack([vdot(v, g) for v in directions]) for g in gradients)
    norms = jnp.stack([jnp.stack([vdot(u, v) for v in directions]) for u in directions])
    return QuadraticModel(loss_slope, slope, evidence.fisher, norms, oracle.samples), evidence


def parts_of(oracle: Oracle, examples_of: Callable[[tuple[int, ...]], int]) -> int:
    """How many parts the batch has."""
    part = oracle.thinned(examples_of).sample_shapes
    pairs = zip(oracle.sample_shapes, part, strict=True)
    return max(whole[0] // own[0] for whole, own in pairs)


def _over_parts(
    oracle: Oracle,
    directions: list[Leaves],
    examples_of: Callable[[tuple[int, ...]], int],
    place: Scalar,
    parts: Scalar,
) -> Evidence:
    most = parts_of(oracle, examples_of)
    if most == 1:
        return oracle.thinned(examples_of).evidence(directions)

    def of_part(i: Scalar) -> Evidence:
        return oracle.thinned(examples_of, place + i).evidence(directions)

    def add(i: Scalar, total: Evidence) -> Evidence:
        return jax.tree.map(jnp.add, total, of_part(i))

    count = jnp.clip(jnp.asarray(parts, jnp.int32), 1, most)
    nothing = optax.tree.zeros_like(jax.eval_shape(of_part, count))
    return jax.lax.fori_loop(0, count, add, nothing).divided(count)
