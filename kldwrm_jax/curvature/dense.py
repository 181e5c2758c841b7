r"""Dense blocks: the exact Fisher of some parameters as one matrix, for small networks.

With the rows of :math:`J`, one for each sample and column of the root of its outputs' Fisher, it is
:math:`F = J'J`, and averages of it are averages of Fishers, without a Kronecker product between.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.curvature.parameters import Parameter
from kldwrm_jax.curvature.sides import Basis, Matrix, Side, Weight, side_of
from kldwrm_jax.curvature.statistics import second_moment


@dataclasses.dataclass(frozen=True)
class Dense:
    """The whole matrix, on vectors: one parameter after another, each row by row.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Dense, decompose
      >>> block, f = Dense(), jnp.array([[3.0, 2.0], [2.0, 1.0]])
      >>> damped = block.damp(f, 1.0)  # [[4, 2], [2, 2]]
      >>> (inverse,) = decompose(lambda side: side.inverse, [block], [damped])
      >>> block.multiply(inverse, jnp.array([4.0, 0.0])).tolist()
      [2.0, -2.0]
    """

    @property
    def inverted(self) -> tuple[type[Side], ...]:
        """The matrix."""
        return (Matrix,)

    @property
    def is_whole(self) -> bool:
        """It is the Fisher of its parameters."""
        return True

    def statistics(self, parameters: Sequence[Parameter], rows: Mapping[str, jax.Array]) -> Factors:
        """``J'J``, from the rows of ``J`` by parameter, ``(rows, *parameter)``."""
        own = {p.path: rows[p.path] for p in parameters}
        j = jax.vmap(lambda leaves: self.gather(parameters, leaves))(own)
        return second_moment(j, None, diagonal=False)

    def gather(self, parameters: Sequence[Parameter], leaves: Mapping[str, jax.Array]) -> jax.Array:
        """``(*stack, entries)``."""
        return jnp.concatenate([p.to_vector(leaves[p.path]) for p in parameters], axis=-1)

    def scatter(self, parameters: Sequence[Parameter], v: jax.Array) -> dict[str, jax.Array]:
        """Cut where the next parameter begins."""
        leaves, start = dict[str, jax.Array](), 0
        for p in parameters:
            leaves[p.path] = p.from_vector(v[..., start : start + p.slice_size])
            start += p.slice_size
        return leaves

    def sum_of_terms(self, factors: Sequence[Factors]) -> Factors:
        """Their sum."""
        return jnp.sum(jnp.stack(factors), axis=0)

    def split(self, f: Factors) -> tuple[tuple[type[Side], Any], ...]:
        """The matrix."""
        return ((side_of(f, diagonal=False), f),)

    def join(self, sides: Sequence[Any]) -> Factors:
        """The matrix."""
        return sides[0]

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``F v``."""
        ((side, f),) = self.split(f)
        return side.left(f, v[..., None])[..., 0]

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``c F``."""
        ((side, f),) = self.split(f)
        return side.scale(f, c)

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """``F + damping I``: both modes of damping agree here."""
        ((side, f),) = self.split(f)
        return side.shift(f, jnp.full_like(side.mean_eigenvalue(f), damping))

    def eigen_solve(
        self, basis: Basis, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """``(c F + damping I)^-1 v``."""
        return self._weighted(basis, v, lambda values: 1 / (c * values + damping))

    def pencil_solve(self, basis: Basis, v: jax.Array, weight: Scalar) -> jax.Array:
        """``(F_bar + weight B)^-1 v``."""
        return self._weighted(basis, v, lambda values: 1 / (1 + weight * values))

    def pencil_norm(self, basis: Basis) -> jax.Array:
        """The largest generalised eigenvalue over all stacked blocks."""
        return jnp.max(basis.values)

    def _weighted(self, basis: Basis, v: jax.Array, weight: Weight) -> jax.Array:
        ((side, basis),) = self.split(basis)
        return side.weigh(basis, v[..., None], lambda values: weight(values)[..., None])[..., 0]
