r"""One side of a block: a symmetric matrix in one of three forms, and what can be done with it.

- :class:`Matrix`: the matrix itself, ``(..., n, n)``.
- :class:`Vector`: the diagonal of a diagonal one, ``(..., n)``.
- :class:`LowRankSide`: its leading eigenvectors and one value for all the others, a
  :class:`LowRank`.

A *basis* diagonalises a matrix (``eigen``), or two of them at once (``pencil``).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.sequential import sequential_on_cpu

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

Weight = Callable[[jax.Array], jax.Array]  # from a side's values to what multiplies their rows
Rows = Callable[[jax.Array, jax.Array], jax.Array]  # the rest of a solve, for columns of values


class Basis(NamedTuple):
    """Vectors, the columns of a matrix (scales, for a diagonal one), and the values they have."""

    vectors: jax.Array
    values: jax.Array


class LowRank(NamedTuple):
    r""":math:`U D U' + t\,(I - U U')`, with ``U`` of orthonormal columns."""

    vectors: jax.Array  # (..., n, rank)
    values: jax.Array  # (..., rank)
    tail: jax.Array  # (...,)


class Subspace(NamedTuple):
    """Where the search for leading eigenvectors begins; see :func:`low_rank`."""

    vectors: jax.Array
    extra: jax.Array


class Side:
    """What every form of a side can do; ``f`` is what represents it in that form."""

    @staticmethod
    def left(f: Any, v: jax.Array) -> jax.Array:
        """``f v``."""
        raise NotImplementedError

    @staticmethod
    def right(v: jax.Array, f: Any) -> jax.Array:
        """``v f``."""
        raise NotImplementedError

    @staticmethod
    def scale(f: Any, c: Scalar) -> Any:
        """``c f``."""
        raise NotImplementedError

    @staticmethod
    def mean_eigenvalue(f: Any) -> jax.Array:
        """The trace over the number of rows."""
        raise NotImplementedError

    @staticmethod
    def shift(f: Any, c: jax.Array) -> Any:
        """``f + c I``."""
        raise NotImplementedError

    @staticmethod
    def inverse(f: Any) -> Any:
        """``f^-1``, for a positive definite ``f``."""
        raise NotImplementedError

    @staticmethod
    def eigen(f: Any) -> Any:
        """An eigenbasis, with negative values set to zero."""
        raise NotImplementedError

    @staticmethod
    def pencil(f_bar: Any, f: Any) -> Any:
        """A basis ``T`` with ``T' f_bar T = I`` and ``T' f T`` diagonal."""
        raise NotImplementedError

    @staticmethod
    def outer(basis: Any) -> Any:
        """``T T'``: of a pencil, the inverse of ``f_bar``."""
        raise NotImplementedError

    @staticmethod
    def compress(f: Any, start: Subspace | None) -> Any:
        """A :class:`LowRank`, searched for from ``start``; ``f`` itself with None."""
        raise NotImplementedError

    @staticmethod
    def weigh(basis: Any, v: jax.Array, weight: Weight) -> jax.Array:
        """``T weight T' v``."""
        raise NotImplementedError

    @staticmethod
    def by_columns(basis: Any, v: jax.Array, rows: Rows) -> jax.Array:
        """``rows(v T, values) T'``."""
        raise NotImplementedError


class Matrix(Side):
    """A full matrix."""

    @staticmethod
    def left(f: jax.Array, v: jax.Array) -> jax.Array:
        """``f v``."""
        return matmul(f, v)

    @staticmethod
    def right(v: jax.Array, f: jax.Array) -> jax.Array:
        """``v f``."""
        return matmul(v, f)

    @staticmethod
    def scale(f: jax.Array, c: Scalar) -> jax.Array:
        """``c f``."""
        return c * f

    @staticmethod
    def mean_eigenvalue(f: jax.Array) -> jax.Array:
        """The mean of the diagonal."""
        n = f.shape[-1]  # jnp.trace would make a matrix of the diagonal first
        return f.reshape(*f.shape[:-2], n * n)[..., :: n + 1].mean(axis=-1)

    @staticmethod
    def shift(f: jax.Array, c: jax.Array) -> jax.Array:
        """``f + c I``."""
        return f + c[..., None, None] * jnp.eye(f.shape[-1], dtype=f.dtype)

    @staticmethod
    @sequential_on_cpu
    def inverse(f: jax.Array) -> jax.Array:
        """By Cholesky: ``L^-T L^-1``."""
        eye = jnp.eye(f.shape[-1], dtype=f.dtype)
        half = _row_major(_transpose(_cholesky_solve(f)(_transpose(eye))))
        return matmul(half, _transpose(half))

    @staticmethod
    @sequential_on_cpu
    def eigen(f: jax.Array) -> Basis:
        """Eigenvectors and eigenvalues."""
        vectors, values = jax.lax.linalg.eigh(_transpose(f), symmetrize_input=False)
        return Basis(vectors, jnp.maximum(values, 0))

    @staticmethod
    @sequential_on_cpu
    def pencil(f_bar: jax.Array, f: jax.Array) -> Basis:
        """From ``f_bar = L L'`` and ``L^-1 f L^-T = U D U'``: the basis ``L^-T U``."""
        solve = _cholesky_solve(f_bar)
        whitened = solve(_transpose(solve(f)))
        vectors, values = jax.lax.linalg.eigh(whitened)
        return Basis(solve(vectors, transpose_a=True), jnp.maximum(values, 0))

    @staticmethod
    def outer(basis: Basis) -> jax.Array:
        """``T T'``."""
        return matmul(basis.vectors, _transpose(basis.vectors))

    @staticmethod
    def compress(f: jax.Array, start: Subspace | None) -> jax.Array | LowRank:
        """By subspace iteration."""
        return f if start is None else low_rank(f, *start)

    @staticmethod
    def weigh(basis: Basis, v: jax.Array, weight: Weight) -> jax.Array:
        """Into the basis and back."""
        inside = weight(basis.values) * matmul(_transpose(basis.vectors), v)
        return matmul(basis.vectors, inside)

    @staticmethod
    def by_columns(basis: Basis, v: jax.Array, rows: Rows) -> jax.Array:
        """Into the basis and back."""
        return matmul(rows(matmul(v, basis.vectors), basis.values), _transpose(basis.vectors))


class Vector(Side):
    """A diagonal matrix: the standard basis serves."""

    @staticmethod
    def left(f: jax.Array, v: jax.Array) -> jax.Array:
        """``f v``."""
        return f[..., :, None] * v

    @staticmethod
    def right(v: jax.Array, f: jax.Array) -> jax.Array:
        """``v f``."""
        return v * f[..., None, :]

    @staticmethod
    def scale(f: jax.Array, c: Scalar) -> jax.Array:
        """``c f``."""
        return c * f

    @staticmethod
    def mean_eigenvalue(f: jax.Array) -> jax.Array:
        """The mean."""
        return jnp.mean(f, axis=-1)

    @staticmethod
    def shift(f: jax.Array, c: jax.Array) -> jax.Array:
        """``f + c``."""
        return f + c[..., None]

    @staticmethod
    def inverse(f: jax.Array) -> jax.Array:
        """``1 / f``."""
        return 1 / f

    @staticmethod
    def eigen(f: jax.Array) -> Basis:
        """The values themselves."""
        return Basis(jnp.ones_like(f), jnp.maximum(f, 0))

    @staticmethod
    def pencil(f_bar: jax.Array, f: jax.Array) -> Basis:
        """Scales that make ``f_bar`` one, and the ratios."""
        return Basis(jax.lax.rsqrt(f_bar), jnp.maximum(f / f_bar, 0))

    @staticmethod
    def outer(basis: Basis) -> jax.Array:
        """The squared scales."""
        return basis.vectors**2

    @staticmethod
    def compress(f: jax.Array, start: Subspace | None) -> jax.Array:
        """It is small already."""
        del start
        return f

    @staticmethod
    def weigh(basis: Basis, v: jax.Array, weight: Weight) -> jax.Array:
        """Row by row."""
        return weight(basis.values) * basis.vectors[..., :, None] ** 2 * v

    @staticmethod
    def by_columns(basis: Basis, v: jax.Array, rows: Rows) -> jax.Array:
        """Column by column."""
        return rows(v, basis.values) * basis.vectors[..., None, :] ** 2


class LowRankSide(Side):
    """Leading eigenvectors, and the same value for all directions orthogonal to them."""

    @staticmethod
    def left(f: LowRank, v: jax.Array) -> jax.Array:
        """``f v``."""
        return LowRankSide.weigh(f, v, lambda values: values[..., :, None])

    @staticmethod
    def right(v: jax.Array, f: LowRank) -> jax.Array:
        """``v f``."""
        return LowRankSide.by_columns(f, v, lambda x, values: x * values[..., None, :])

    @staticmethod
    def scale(f: LowRank, c: Scalar) -> LowRank:
        """``c f``."""
        return f._replace(values=c * f.values, tail=c * f.tail)

    @staticmethod
    def mean_eigenvalue(f: LowRank) -> jax.Array:
        """Leading values and tail, by their numbers."""
        n, rank = f.vectors.shape[-2:]
        return (f.values.sum(axis=-1) + (n - rank) * f.tail) / n

    @staticmethod
    def shift(f: LowRank, c: jax.Array) -> LowRank:
        """``f + c I``."""
        return f._replace(values=f.values + c[..., None], tail=f.tail + c)

    @staticmethod
    def inverse(f: LowRank) -> LowRank:
        """The inverse values."""
        return f._replace(values=1 / f.values, tail=1 / f.tail)

    @staticmethod
    def eigen(f: LowRank) -> LowRank:
        """It is one already."""
        return f

    @staticmethod
    def weigh(basis: LowRank, v: jax.Array, weight: Weight) -> jax.Array:
        """The tail's weight everywhere, corrected along the vectors."""
        everywhere = weight(basis.tail[..., None])
        along = matmul(_transpose(basis.vectors), v)
        corrected = (weight(basis.values) - everywhere) * along
        return everywhere * v + matmul(basis.vectors, corrected)

    @staticmethod
    def by_columns(basis: LowRank, v: jax.Array, rows: Rows) -> jax.Array:
        """What lies along the vectors by itself, and the rest by the tail's value."""
        along, back = matmul(v, basis.vectors), _transpose(basis.vectors)
        rest = rows(v - matmul(along, back), basis.tail[..., None])
        return matmul(rows(along, basis.values), back) + rest


def side_of(f: Any, diagonal: bool) -> type[Side]:
    """The form of a side, from what represents it."""
    if isinstance(f, LowRank):
        return LowRankSide
    return Vector if diagonal else Matrix


_POWERS = 2
_OVERSAMPLING = 8


def start_subspace(f: jax.Array, rank: int, before: jax.Array | None = None) -> Subspace | None:
    """Where :func:`low_rank` begins; None for a matrix that is no larger.

    From the vectors of ``before``, where there are any.
    """
    n = f.shape[-1]
    if n <= rank:
        return None
    columns = min(rank + _OVERSAMPLING, n)
    random = jax.random.normal(jax.random.key(0), (*f.shape[:-1], columns), f.dtype) / math.sqrt(n)
    kept, extra = random[..., :rank], random[..., rank:]
    if before is not None:
        known = jnp.any(before != 0, axis=(-2, -1), keepdims=True)
        kept = jnp.where(known, before, kept)
    return Subspace(kept, extra)


@sequential_on_cpu
def low_rank(f: jax.Array, vectors: jax.Array, extra: jax.Array) -> LowRank:
    r"""Leading eigenvectors of a positive semidefinite matrix, from a subspace to start with.

    Two steps of subspace iteration, then the Rayleigh-Ritz values. A start from the vectors of a
    matrix not very different is as good as many more. What is discarded is replaced by its mean, so
    that the trace is kept.

    Args:
      f: ``(..., n, n)``.
      vectors: ``(..., n, rank)``, to start with.
      extra: ``(..., n, any)``: directions that are not kept in number. Random ones find what the
        vectors, if ``f`` maps their span to itself, never would.

    Returns:
      A :class:`LowRank` of ``rank`` vectors.
    """
    rank = vectors.shape[-1]
    space = jnp.concatenate([vectors, extra], axis=-1)
    for _ in range(_POWERS):
        space, _ = jnp.linalg.qr(matmul(f, space))
    inside = matmul(space.T, matmul(f, space))
    rotation, values = jax.lax.linalg.eigh(inside)  # ascending
    values = jnp.maximum(values[-rank:], 0)
    tail = jnp.maximum(jnp.trace(f) - values.sum(), 0) / (f.shape[-1] - rank)
    return LowRank(matmul(space, rotation[:, -rank:]), values, tail)


def _cholesky_solve(f: jax.Array) -> Callable[..., jax.Array]:
    """``L^-1`` (or its transpose, by ``transpose_a``) times a matrix, where ``f = L L'``."""
    chol = jax.lax.linalg.cholesky(_transpose(f), symmetrize_input=False)
    return functools.partial(jax.lax.linalg.triangular_solve, chol, left_side=True, lower=True)


def _transpose(m: jax.Array) -> jax.Array:
    """The transpose. Of a symmetric row-major matrix it is LAPACK's column-major operand as is."""
    return jnp.swapaxes(m, -1, -2)


def _row_major(m: jax.Array) -> jax.Array:
    """Keeps XLA from folding a transpose into the product that follows.

    The transpose of LAPACK's column-major result is row-major, as products want it. Folded into the
    product it would be undone by a copy that takes as long to compile as the factorisation.
    """
    return jax.lax.optimization_barrier(m)
