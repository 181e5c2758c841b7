r"""Curvature blocks: one layer's share of the Fisher, and the linear algebra it needs.

A block is a stateless description; its *factors* are plain arrays, so that they live in optimizer
states and cross ``jit`` as they are. Three kinds share one small interface (:class:`Block`):

- :class:`Kronecker`: factors ``(A, G)`` for :math:`F = A \otimes G`, acting on a matrix ``V`` of
  inputs x outputs as :math:`A V G`. A side that is too large is kept as its diagonal, a vector.
- :class:`Diagonal`: factors ``d``, acting elementwise.
- :class:`Dense`: factors ``F`` itself, acting on vectors. Exact, for small problems and for tests.

Axes in front are stacks of independent blocks: scanned layers, groups of a convolution.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar

Factors = Any  # a pytree of arrays, whose structure the block knows

_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Block(Protocol):
    """What every kind of block can do. ``f`` are its factors, ``v`` a direction of its shape."""

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``F v``."""
        ...

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """Every factor times ``c``: a Kronecker product grows by ``c**2``."""
        ...

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """Factors of about ``F + damping I``, exactly of the block's own structure."""
        ...

    def inverse(self, f: Factors) -> Factors:
        """Factors of ``F^-1``, for factors that are positive definite."""
        ...

    def eigen(self, f: Factors) -> Any:
        """An eigenbasis of ``F``, for :meth:`eigen_solve`."""
        ...

    def eigen_solve(self, basis: Any, v: jax.Array, damping: Scalar, c: Scalar) -> jax.Array:
        """``(c F + damping I)^-1 v``, with ``c`` applied as :meth:`scale` does."""
        ...

    def pencil(self, f_bar: Factors, b: Factors) -> Any:
        """A basis that diagonalises ``F_bar`` (to the identity) and ``B`` at once."""
        ...

    def pencil_solve(self, basis: Any, v: jax.Array, weight: Scalar) -> jax.Array:
        """``(F_bar + weight B)^-1 v``."""
        ...

    def pencil_inverse(self, basis: Any) -> Factors:
        """Factors of ``F_bar^-1``, without another decomposition."""
        ...

    def pencil_norm(self, basis: Any) -> jax.Array:
        """The largest generalised eigenvalue of ``(B, F_bar)``."""
        ...


# --- One side of a Kronecker product: a symmetric matrix, or the vector of a diagonal one ---------


class _MatrixSide:
    """``f``: (..., n, n). A basis is a matrix whose columns are vectors."""

    @staticmethod
    def left(m: jax.Array, v: jax.Array) -> jax.Array:
        return _matmul(m, v)

    @staticmethod
    def right(v: jax.Array, m: jax.Array) -> jax.Array:
        return _matmul(v, m)

    @staticmethod
    def transpose(m: jax.Array) -> jax.Array:
        return jnp.swapaxes(m, -1, -2)

    @staticmethod
    def mean_eigenvalue(f: jax.Array) -> jax.Array:
        return jnp.trace(f, axis1=-2, axis2=-1) / f.shape[-1]

    @staticmethod
    def shift(f: jax.Array, c: jax.Array) -> jax.Array:
        return f + c[..., None, None] * jnp.eye(f.shape[-1], dtype=f.dtype)

    @staticmethod
    def inverse(f: jax.Array) -> jax.Array:
        chol = jnp.linalg.cholesky(f)
        eye = jnp.broadcast_to(jnp.eye(f.shape[-1], dtype=f.dtype), f.shape)
        half = jax.scipy.linalg.solve_triangular(chol, eye, lower=True)
        return _matmul(jnp.swapaxes(half, -1, -2), half)

    @staticmethod
    def eigen(f: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, vectors = jnp.linalg.eigh(f)
        return vectors, jnp.maximum(values, 0)

    @staticmethod
    def pencil(f_bar: jax.Array, f: jax.Array) -> tuple[jax.Array, jax.Array]:
        # f_bar = L L', L^-1 f L^-T = U D U': the basis L^-T U.
        solve = functools.partial(jax.scipy.linalg.solve_triangular, jnp.linalg.cholesky(f_bar))
        half = solve(f, lower=True)
        whitened = solve(jnp.swapaxes(half, -1, -2), lower=True)
        values, vectors = jnp.linalg.eigh(whitened)
        return solve(vectors, lower=True, trans=1), jnp.maximum(values, 0)

    @staticmethod
    def outer(m: jax.Array) -> jax.Array:
        return _matmul(m, jnp.swapaxes(m, -1, -2))


class _VectorSide:
    """``f``: (..., n), the diagonal. The standard basis serves; a basis is a vector of scales."""

    @staticmethod
    def left(m: jax.Array, v: jax.Array) -> jax.Array:
        return m[..., :, None] * v

    @staticmethod
    def right(v: jax.Array, m: jax.Array) -> jax.Array:
        return v * m[..., None, :]

    @staticmethod
    def transpose(m: jax.Array) -> jax.Array:
        return m

    @staticmethod
    def mean_eigenvalue(f: jax.Array) -> jax.Array:
        return jnp.mean(f, axis=-1)

    @staticmethod
    def shift(f: jax.Array, c: jax.Array) -> jax.Array:
        return f + c[..., None]

    @staticmethod
    def inverse(f: jax.Array) -> jax.Array:
        return 1 / f

    @staticmethod
    def eigen(f: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.ones_like(f), jnp.maximum(f, 0)

    @staticmethod
    def pencil(f_bar: jax.Array, f: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.rsqrt(f_bar), jnp.maximum(f / f_bar, 0)

    @staticmethod
    def outer(m: jax.Array) -> jax.Array:
        return m * m


class KroneckerBasis(NamedTuple):
    """A basis on each side and the values that belong to it."""

    a_basis: jax.Array
    a_values: jax.Array
    g_basis: jax.Array
    g_values: jax.Array


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
    def _a(self) -> type[_MatrixSide] | type[_VectorSide]:
        return _VectorSide if self.a_diagonal else _MatrixSide

    @property
    def _g(self) -> type[_MatrixSide] | type[_VectorSide]:
        return _VectorSide if self.g_diagonal else _MatrixSide

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``A V G``."""
        a, g = f
        return self._a.left(a, self._g.right(v, g))

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``(c A, c G)``."""
        a, g = f
        return c * a, c * g

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        r"""``factored`` damping: :math:`(A + \pi\sqrt\gamma I,\ G + \pi^{-1}\sqrt\gamma I)`.

        :math:`\pi^2` is the ratio of the two mean eigenvalues; 1 where one of them is zero.
        """
        a, g = f
        mean_a, mean_g = self._a.mean_eigenvalue(a), self._g.mean_eigenvalue(g)
        known = (mean_a > 0) & (mean_g > 0)
        # Roots before the ratio, which float32 may not hold; the bounds keep 1 / pi finite.
        pi = jnp.sqrt(jnp.where(known, mean_a, 1)) / jnp.sqrt(jnp.where(known, mean_g, 1))
        pi = jnp.clip(pi, 1e-30, 1e30)
        root = jnp.sqrt(jnp.asarray(damping, a.dtype))
        return self._a.shift(a, pi * root), self._g.shift(g, root / pi)

    def inverse(self, f: Factors) -> Factors:
        """``(A^-1, G^-1)``, by Cholesky."""
        a, g = f
        return self._a.inverse(a), self._g.inverse(g)

    def eigen(self, f: Factors) -> KroneckerBasis:
        """Eigenvectors and eigenvalues (not below zero) of both sides."""
        a, g = f
        return KroneckerBasis(*self._a.eigen(a), *self._g.eigen(g))

    def eigen_solve(
        self, basis: KroneckerBasis, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        r""":math:`(cA \otimes cG + \gamma I)^{-1} V`."""
        c = jnp.asarray(c, v.dtype)
        products = (c * basis.a_values)[..., :, None] * (c * basis.g_values)[..., None, :]
        return self._in_basis(basis, v, products + damping)

    def pencil(self, f_bar: Factors, b: Factors) -> KroneckerBasis:
        """Simultaneous diagonalisation of ``(A, A_bar)`` and of ``(G, G_bar)``."""
        (a_bar, g_bar), (a, g) = f_bar, b
        return KroneckerBasis(*self._a.pencil(a_bar, a), *self._g.pencil(g_bar, g))

    def pencil_solve(self, basis: KroneckerBasis, v: jax.Array, weight: Scalar) -> jax.Array:
        r""":math:`(\bar A \otimes \bar G + w\, A \otimes G)^{-1} V`, solving a Stein equation."""
        products = basis.a_values[..., :, None] * basis.g_values[..., None, :]
        return self._in_basis(basis, v, 1 + weight * products)

    def pencil_inverse(self, basis: KroneckerBasis) -> Factors:
        """``(A_bar^-1, G_bar^-1)``."""
        return self._a.outer(basis.a_basis), self._g.outer(basis.g_basis)

    def pencil_norm(self, basis: KroneckerBasis) -> jax.Array:
        """The largest generalised eigenvalue over all stacked blocks."""
        return jnp.max(jnp.max(basis.a_values, axis=-1) * jnp.max(basis.g_values, axis=-1))

    def _in_basis(self, basis: KroneckerBasis, v: jax.Array, divisor: jax.Array) -> jax.Array:
        a, g = self._a, self._g
        inside = a.left(a.transpose(basis.a_basis), g.right(v, basis.g_basis)) / divisor
        return a.left(basis.a_basis, g.right(inside, g.transpose(basis.g_basis)))


class DiagonalBasis(NamedTuple):
    """A diagonal block's two diagonals."""

    f_bar: jax.Array
    b: jax.Array


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """A diagonal block, of the shape of its parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Diagonal
      >>> block, d = Diagonal(), jnp.array([1.0, 3.0])
      >>> block.eigen_solve(block.eigen(d), jnp.ones(2), damping=1.0).tolist()
      [0.5, 0.25]
    """

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``d * v``."""
        return f * v

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``c d``."""
        return c * f

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """``d + damping``: both modes of damping agree here."""
        return f + damping

    def inverse(self, f: Factors) -> Factors:
        """``1 / d``."""
        return 1 / f

    def eigen(self, f: Factors) -> jax.Array:
        """The diagonal, not below zero."""
        return jnp.maximum(f, 0)

    def eigen_solve(
        self, basis: jax.Array, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """``v / (c d + damping)``."""
        return v / (c * basis + damping)

    def pencil(self, f_bar: Factors, b: Factors) -> DiagonalBasis:
        """Both diagonals."""
        return DiagonalBasis(f_bar, b)

    def pencil_solve(self, basis: DiagonalBasis, v: jax.Array, weight: Scalar) -> jax.Array:
        """``v / (d_bar + weight b)``."""
        return v / (basis.f_bar + weight * basis.b)

    def pencil_inverse(self, basis: DiagonalBasis) -> Factors:
        """``1 / d_bar``."""
        return 1 / basis.f_bar

    def pencil_norm(self, basis: DiagonalBasis) -> jax.Array:
        """The largest ratio of the two diagonals."""
        return jnp.max(basis.b / basis.f_bar)


class DenseBasis(NamedTuple):
    """A basis, its columns in a matrix, and the values that belong to it."""

    basis: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class Dense:
    """The whole matrix, on vectors: exact natural gradient for small problems.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Dense
      >>> block, f = Dense(), jnp.array([[3.0, 2.0], [2.0, 1.0]])
      >>> inverse = block.inverse(block.damp(f, 1.0))  # of [[4, 2], [2, 2]]
      >>> block.multiply(inverse, jnp.array([4.0, 0.0])).tolist()
      [2.0, -2.0]
    """

    def multiply(self, f: Factors, v: jax.Array) -> jax.Array:
        """``F v``."""
        return _matmul(f, v[..., None])[..., 0]

    def scale(self, f: Factors, c: Scalar) -> Factors:
        """``c F``."""
        return c * f

    def damp(self, f: Factors, damping: Scalar) -> Factors:
        """``F + damping I``: both modes of damping agree here."""
        return f + damping * jnp.eye(f.shape[-1], dtype=f.dtype)

    def inverse(self, f: Factors) -> Factors:
        """``F^-1``, by Cholesky."""
        return _MatrixSide.inverse(f)

    def eigen(self, f: Factors) -> DenseBasis:
        """Eigenvectors and eigenvalues, not below zero."""
        return DenseBasis(*_MatrixSide.eigen(f))

    def eigen_solve(
        self, basis: DenseBasis, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """``(c F + damping I)^-1 v``."""
        return self._in_basis(basis, v, c * basis.values + damping)

    def pencil(self, f_bar: Factors, b: Factors) -> DenseBasis:
        """Simultaneous diagonalisation of ``(B, F_bar)``."""
        return DenseBasis(*_MatrixSide.pencil(f_bar, b))

    def pencil_solve(self, basis: DenseBasis, v: jax.Array, weight: Scalar) -> jax.Array:
        """``(F_bar + weight B)^-1 v``."""
        return self._in_basis(basis, v, 1 + weight * basis.values)

    def pencil_inverse(self, basis: DenseBasis) -> Factors:
        """``F_bar^-1``."""
        return _MatrixSide.outer(basis.basis)

    def pencil_norm(self, basis: DenseBasis) -> jax.Array:
        """The largest generalised eigenvalue over all stacked blocks."""
        return jnp.max(basis.values)

    def _in_basis(self, basis: DenseBasis, v: jax.Array, divisor: jax.Array) -> jax.Array:
        inside = self.multiply(jnp.swapaxes(basis.basis, -1, -2), v) / divisor
        return self.multiply(basis.basis, inside)


def average(f_bar: Factors, f: Factors, rho: Scalar) -> Factors:
    r"""One step of the exponential average: :math:`\rho \bar F + (1 - \rho) F`.

    The first statistics are to enter with weight one (:math:`\kappa(0) = 1`): ``rho = 0`` then.
    """
    return jax.tree.map(lambda old, new: rho * old + (1 - rho) * new, f_bar, f)
