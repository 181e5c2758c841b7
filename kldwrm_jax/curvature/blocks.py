r"""Curvature blocks: one layer's share of the Fisher, and the linear algebra it needs.

A block is a stateless description; its *factors* are plain arrays, so that they live in optimizer
states and cross ``jit`` as they are. Three kinds share one small interface (:class:`Block`):

- :class:`Kronecker`: factors ``(A, G)`` for :math:`F = A \otimes G`, acting on a matrix ``V`` of
  inputs x outputs as :math:`A V G`. A side that is too large is kept as its diagonal, a vector.
- :class:`Diagonal`: factors ``d``, acting elementwise.
- :class:`~kldwrm_jax.curvature.dense.Dense`: factors ``F`` itself, acting on vectors. Exact, for
  small networks.

What a block does is said in terms of its *sides* (:mod:`kldwrm_jax.curvature.sides`): two for a
Kronecker product, one for the others. Inverses and bases are made side by side, for many blocks at
once (:mod:`kldwrm_jax.curvature.decompositions`), and joined as the factors are. Axes in front are
stacks of independent blocks: scanned layers, groups of a convolution.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.parameters import Parameter
from kldwrm_jax.curvature.sides import Basis, Matrix, Side, Vector, side_of
from kldwrm_jax.curvature.statistics import sum_of_products

Factors = Any  # a pytree of arrays, whose structure the block knows


class Block(Protocol):
    """What every kind of block can do. ``f`` are its factors, ``v`` a direction of its shape."""

    @property
    def inverted(self) -> tuple[type[Side], ...]:
        """The forms of its factors, if they are inverted copy by copy; none if elementwise."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether it is the Fisher itself, which is damped and inverted as it is."""
        ...

    def gather(self, parameters: Sequence[Parameter], leaves: Mapping[str, jax.Array]) -> jax.Array:
        """The direction that it acts on, from the leaves of its parameters."""
        ...

    def scatter(self, parameters: Sequence[Parameter], v: jax.Array) -> dict[str, jax.Array]:
        """The inverse of :meth:`gather`."""
        ...

    def sum_of_terms(self, factors: Sequence[Factors]) -> Factors:
        """The factors of a sum of Fishers, from those of each."""
        ...

    def split(self, f: Factors) -> tuple[tuple[type[Side], Any], ...]:
        """Every side's form, and what represents it in ``f`` (in a basis, in an inverse)."""
        ...

    def join(self, sides: Sequence[Any]) -> Factors:
        """The inverse of :meth:`split`, without the forms."""
        ...

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``F v``."""
        ...

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """Every factor times ``c``: a Kronecker product grows by ``c**2``."""
        ...

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """Factors of about ``F + damping I``, exactly of the block's own structure."""
        ...

    def eigen_solve(self, basis: Any, v: jax.Array, damping: Scalar, c: Scalar) -> jax.Array:
        """``(c F + damping I)^-1 v``, with ``c`` applied as :meth:`scale` does."""
        ...

    def pencil_solve(self, basis: Any, v: jax.Array, weight: Scalar) -> jax.Array:
        """``(F_bar + weight B)^-1 v``."""
        ...

    def pencil_norm(self, basis: Any) -> jax.Array:
        """The largest generalised eigenvalue of ``(B, F_bar)``."""
        ...


@dataclasses.dataclass(frozen=True)
class Kronecker:
    r"""A layer's K-FAC block :math:`A \otimes G`, on matrices of inputs x outputs.

    Args:
      a_diagonal: whether ``A`` is kept as its diagonal.
      g_diagonal: whether ``G`` is kept as its diagonal.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Kronecker
      >>> f = (2.0 * jnp.eye(3), 5.0 * jnp.eye(2))
      >>> float(Kronecker().multiply(f, jnp.ones((3, 2)))[0, 0])
      10.0
    """

    a_diagonal: bool = False
    g_diagonal: bool = False

    @property
    def inverted(self) -> tuple[type[Side], ...]:
        """Inputs, outputs."""
        return tuple(Vector if own else Matrix for own in self._diagonal)

    @property
    def is_whole(self) -> bool:
        """It approximates the layer's Fisher."""
        return False

    @property
    def _diagonal(self) -> tuple[bool, bool]:
        return self.a_diagonal, self.g_diagonal

    def gather(self, parameters: Sequence[Parameter], leaves: Mapping[str, jax.Array]) -> jax.Array:
        """The kernel as a matrix, with the bias for its last row."""
        matrices = [p.to_matrix(leaves[p.path]) for p in parameters]
        return matrices[0] if len(matrices) == 1 else jnp.concatenate(matrices, axis=-2)

    def scatter(self, parameters: Sequence[Parameter], v: jax.Array) -> dict[str, jax.Array]:
        """Kernel and bias."""
        if len(parameters) == 1:
            return {parameters[0].path: parameters[0].from_matrix(v)}
        kernel, bias = parameters
        return {
            kernel.path: kernel.from_matrix(v[..., :-1, :]),
            bias.path: bias.from_matrix(v[..., -1:, :]),
        }

    def sum_of_terms(self, factors: Sequence[Factors]) -> Factors:
        """The product with the partial traces of the sum; of EK-FAC's scalings, their sum."""
        one = sum_of_products([(own[0], own[1]) for own in factors], self._diagonal)
        scalings = [own[2] for own in factors if len(own) > 2]
        return (*one, sum(scalings[1:], start=scalings[0])) if scalings else one

    def split(self, f: Factors) -> tuple[tuple[type[Side], Any], ...]:
        """Inputs, outputs."""
        a, g = f
        return (side_of(a, self.a_diagonal), a), (side_of(g, self.g_diagonal), g)

    def join(self, sides: Sequence[Any]) -> Factors:
        """Inputs, outputs."""
        return tuple(sides)

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``A V G``."""
        (a_side, a), (g_side, g) = self.split(f)
        return a_side.left(a, g_side.right(v, g))

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``(c A, c G)``."""
        return self.join([side.scale(x, c) for side, x in self.split(f)])

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        r"""``factored`` damping: :math:`(A + \pi\sqrt\gamma I,\ G + \pi^{-1}\sqrt\gamma I)`.

        :math:`\pi^2` is the ratio of the two mean eigenvalues; 1 where one of them is zero.
        """
        (a_side, a), (g_side, g) = self.split(f)
        mean_a, mean_g = a_side.mean_eigenvalue(a), g_side.mean_eigenvalue(g)
        known = (mean_a > 0) & (mean_g > 0)
        # Roots before the ratio, which float32 may not hold; the bounds keep 1 / pi finite.
        pi = jnp.sqrt(jnp.where(known, mean_a, 1)) / jnp.sqrt(jnp.where(known, mean_g, 1))
        pi = jnp.clip(pi, 1e-30, 1e30)
        root = jnp.sqrt(jnp.asarray(damping, mean_a.dtype))
        return a_side.shift(a, pi * root), g_side.shift(g, root / pi)

    def eigen_solve(self, basis: Any, v: jax.Array, damping: Scalar, c: Scalar = 1.0) -> jax.Array:
        r""":math:`(cA \otimes cG + \gamma I)^{-1} V`."""
        c = jnp.asarray(c, v.dtype)
        return self._weighted(basis, v, lambda a, g: 1 / (c * a * (c * g) + damping))

    def pencil_solve(self, basis: Any, v: jax.Array, weight: Scalar) -> jax.Array:
        r""":math:`(\bar A \otimes \bar G + w\, A \otimes G)^{-1} V`, solving a Stein equation."""
        return self._weighted(basis, v, lambda a, g: 1 / (1 + weight * (a * g)))

    def pencil_norm(self, basis: Any) -> jax.Array:
        """The largest generalised eigenvalue over all stacked blocks."""
        a, g = basis
        return jnp.max(jnp.max(a.values, axis=-1) * jnp.max(g.values, axis=-1))

    def _weighted(
        self,
        basis: Any,
        v: jax.Array,
        weight: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """``V`` in both sides' bases, times a function of their values, and back."""
        (a_side, a), (g_side, g) = self.split(basis)

        def rows(x: jax.Array, g_values: jax.Array) -> jax.Array:
            return a_side.weigh(
                a, x, lambda values: weight(values[..., :, None], g_values[..., None, :])
            )

        return g_side.by_columns(g, v, rows)


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """A diagonal block, of the shape of its parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Diagonal, decompose
      >>> block, d = Diagonal(), jnp.array([1.0, 3.0])
      >>> (basis,) = decompose(lambda side: side.eigen, [block], [d])
      >>> block.eigen_solve(basis, jnp.ones(2), damping=1.0).tolist()
      [0.5, 0.25]
    """

    @property
    def inverted(self) -> tuple[type[Side], ...]:
        """It acts elementwise."""
        return ()

    @property
    def is_whole(self) -> bool:
        """It approximates the parameter's Fisher."""
        return False

    def gather(self, parameters: Sequence[Parameter], leaves: Mapping[str, jax.Array]) -> jax.Array:
        """The parameter itself."""
        return leaves[parameters[0].path]

    def scatter(self, parameters: Sequence[Parameter], v: jax.Array) -> dict[str, jax.Array]:
        """The parameter itself."""
        return {parameters[0].path: v}

    def sum_of_terms(self, factors: Sequence[Factors]) -> Factors:
        """Their sum."""
        return jnp.sum(jnp.stack(factors), axis=0)

    def split(self, f: Factors) -> tuple[tuple[type[Side], Any], ...]:
        """The diagonal."""
        return ((Vector, f),)

    def join(self, sides: Sequence[Any]) -> Factors:
        """The diagonal."""
        return sides[0]

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``d * v``."""
        return f * v

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``c d``."""
        return c * f

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """``d + damping``: both modes of damping agree here."""
        return f + damping

    def eigen_solve(
        self, basis: Basis, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """``v / (c d + damping)``."""
        return v / (c * basis.values + damping)

    def pencil_solve(self, basis: Basis, v: jax.Array, weight: Scalar) -> jax.Array:
        """``v / (d_bar + weight b)``."""
        return v * basis.vectors**2 / (1 + weight * basis.values)

    def pencil_norm(self, basis: Basis) -> jax.Array:
        """The largest ratio of the two diagonals."""
        return jnp.max(basis.values)


def average(f_bar: Factors, f: Factors, rho: Scalar) -> Factors:
    r"""One step of the exponential average: :math:`\rho \bar F + (1 - \rho) F`.

    The first statistics are to enter with weight one (:math:`\kappa(0) = 1`): ``rho = 0`` then.
    """
    return jax.tree.map(lambda old, new: rho * old + (1 - rho) * new, f_bar, f)
