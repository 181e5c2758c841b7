"""Differential equations with a known solution, to be solved by a network.

An equation is two loss terms: its residual at points of the interior, and what the solution's
values on the boundary (and at the initial time) leave. The points are drawn anew on every step.
The equations, networks and numbers of points are those of Dangel, Müller and Zeinhofer, `Kronecker-
Factored Approximate Curvature for Physics-Informed Neural Networks
<https://arxiv.org/abs/2405.15603>`_, 2024.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import kldwrm_jax as kw

Function = Callable[[jax.Array], jax.Array]  # from points (n, dimensions) to values (n, 1)


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation on the unit cube, whose first coordinate may be time.

    Args:
      title: as people write it.
      dimensions: of a point, time included.
      solution: the exact one.
      residual: what a function leaves of the equation, given the function and points.
      interior: points of the interior in a batch.
      boundary: points of the boundary in a batch.
      has_time: whether the first coordinate is time: half of the boundary's points are then at the
        initial time, and none at the final one.
    """

    title: str
    dimensions: int
    solution: Function
    residual: Callable[[Function, jax.Array], jax.Array]
    interior: int = 900
    boundary: int = 120
    has_time: bool = False

    def points(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Random points of the interior and of the boundary."""
        of_interior, of_boundary = jax.random.split(key)
        inside = jax.random.uniform(of_interior, (self.interior, self.dimensions))
        return inside, self._boundary(of_boundary)

    def _boundary(self, key: jax.Array) -> jax.Array:
        of_points, of_axes, of_ends = jax.random.split(key, 3)
        x = jax.random.uniform(of_points, (self.boundary, self.dimensions))
        axis = jax.random.randint(of_axes, (self.boundary,), int(self.has_time), self.dimensions)
        end = jax.random.bernoulli(of_ends, shape=(self.boundary,)).astype(x.dtype)
        if self.has_time:
            initial = jnp.arange(self.boundary) % 2 == 0
            axis, end = jnp.where(initial, 0, axis), jnp.where(initial, 0, end)
        return jnp.where(jnp.arange(self.dimensions) == axis[:, None], end[:, None], x)

    def terms(self, model: nn.Module) -> Callable[..., dict[str, jax.Array]]:
        """The residuals of both terms as a function of parameters and points."""

        def residuals(
            params: Any, interior: jax.Array, boundary: jax.Array
        ) -> dict[str, jax.Array]:
            def u(x: jax.Array) -> jax.Array:
                return model.apply({"params": params}, x)

            return {
                "interior": self.residual(u, interior),
                "boundary": u(boundary) - self.solution(boundary),
            }

        return residuals

    @property
    def likelihoods(self) -> dict[str, kw.Residuals]:
        """Of both terms: the loss is half of each one's mean square, added up."""
        return {"interior": kw.Residuals(), "boundary": kw.Residuals()}

    def error(self, u: Function, x: jax.Array) -> jax.Array:
        """The relative error of an approximate solution, in the norm of L2."""
        truth = self.solution(x)
        return jnp.linalg.norm(u(x) - truth) / jnp.linalg.norm(truth)


def network(widths: tuple[int, ...]) -> nn.Module:
    """A network of tanh layers with one output."""
    layers: list[Any] = []
    for width in widths:
        layers += [nn.Dense(width, param_dtype=float), nn.tanh]
    return nn.Sequential([*layers, nn.Dense(1, param_dtype=float)])


def second_derivatives(u: Function, x: jax.Array, axes: range) -> jax.Array:
    """The sum of the second derivatives along some axes: a ``jvp`` of a ``jvp`` for each."""

    def along(direction: jax.Array) -> jax.Array:
        v = jnp.broadcast_to(direction, x.shape).astype(x.dtype)
        return jax.jvp(lambda x: jax.jvp(u, (x,), (v,))[1], (x,), (v,))[1]

    return jax.vmap(along)(jnp.eye(x.shape[-1])[axes.start : axes.stop]).sum(axis=0)


def first_derivative(u: Function, x: jax.Array, axis: int) -> jax.Array:
    """The derivative along one axis."""
    direction = jnp.eye(x.shape[-1], dtype=x.dtype)[axis]
    return jax.jvp(u, (x,), (jnp.broadcast_to(direction, x.shape),))[1]


def poisson(solution: Function, dimensions: int, **sizes: int) -> Equation:
    """Poisson's equation with the right-hand side that a solution has."""

    def laplacian(u: Function, x: jax.Array) -> jax.Array:
        return second_derivatives(u, x, range(dimensions))

    def residual(u: Function, x: jax.Array) -> jax.Array:
        return laplacian(u, x) - laplacian(solution, x)

    title = f"Poisson's equation, {dimensions}-d"
    return Equation(title, dimensions, solution, residual, **sizes)


def cubic(solution: Function, dimensions: int, strength: float = 10.0, **sizes: int) -> Equation:
    """A nonlinear equation, ``-laplace u + strength u^3 = f``, with the ``f`` of a solution."""

    def left(u: Function, x: jax.Array) -> jax.Array:
        return strength * u(x) ** 3 - second_derivatives(u, x, range(dimensions))

    def residual(u: Function, x: jax.Array) -> jax.Array:
        return left(u, x) - left(solution, x)

    title = f"Poisson's equation with a cubic term, {dimensions}-d"
    return Equation(title, dimensions, solution, residual, **sizes)


def heat(solution: Function, space: int, conductivity: float = 0.25, **sizes: int) -> Equation:
    """The heat equation, with time as the first coordinate."""

    def residual(u: Function, x: jax.Array) -> jax.Array:
        diffused = conductivity * second_derivatives(u, x, range(1, 1 + space))
        return first_derivative(u, x, 0) - diffused

    return Equation(
        f"heat equation, {space}+1-d", 1 + space, solution, residual, **sizes, has_time=True
    )


def _sines(x: jax.Array) -> jax.Array:
    return jnp.prod(jnp.sin(jnp.pi * x), axis=-1, keepdims=True)


def _cosines(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.cos(jnp.pi * x), axis=-1, keepdims=True)


def _cooling_sine(x: jax.Array) -> jax.Array:
    return jnp.exp(-(jnp.pi**2) * x[:, :1] / 4) * jnp.sin(jnp.pi * x[:, 1:])


def _cooling_sum(x: jax.Array) -> jax.Array:
    return jnp.exp(-x[:, :1]) * jnp.sum(jnp.sin(2 * x[:, 1:]), axis=-1, keepdims=True)


SMALL, LARGE = (64,), (64, 64, 48, 48)  # 257 and 9,873 parameters in two dimensions
EQUATIONS = {
    "poisson-2": poisson(_sines, 2),
    "poisson-5": poisson(_cosines, 5, interior=3000, boundary=500),
    "cubic-2": cubic(_sines, 2),
    "heat-1": heat(_cooling_sine, 1),
    "heat-4": heat(_cooling_sum, 4, interior=3000, boundary=500),
}
