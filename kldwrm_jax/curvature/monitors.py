"""Two quantities of the paper that tell how far its theory holds in a run."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar, check_decay
from kldwrm_jax.curvature.blocks import Block, Factors, average
from kldwrm_jax.curvature.decompositions import decompose


def contraction(block: Block, f_bar: Factors, b: Factors, lr: Scalar) -> jax.Array:
    r"""The norm of :math:`I - \hat M` in the metric of :math:`\bar F^{-1}`.

    :math:`\hat g` stays bounded if ``rho`` times this stays below some number below 1 (after
    Prop. 4.2). With ``d`` the largest generalised eigenvalue of :math:`(B, \bar F)` it is
    :math:`d / (\lambda + d)`.

    Args:
      block: the kind of block.
      f_bar: averaged factors, positive definite (damped, if they may be singular).
      b: factors of the model's curvature.
      lr: the learning rate, :math:`1/\lambda`.

    Returns:
      A scalar in [0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Diagonal, contraction
      >>> float(contraction(Diagonal(), jnp.array([1.0, 2.0]), jnp.array([1.0, 6.0]), lr=1.0))
      0.75
    """
    (basis,) = decompose(lambda side: side.pencil, [block], [f_bar], [b])
    largest = lr * block.pencil_norm(basis)
    return jnp.asarray(1 - 1 / (1 + largest))


class AveragingError(NamedTuple):
    """Frobenius norms: of the error, and of the average that is approximated."""

    error: jax.Array
    average: jax.Array


def averaging_error(factors: Sequence[tuple[jax.Array, jax.Array]], rho: Scalar) -> AveragingError:
    r"""How far averaging factors is from averaging their product (supplement, section 4).

    .. math:: \Big\|\sum_i \kappa(i)\rho^{k-i} A_i \otimes G_i - \bar A_k \otimes \bar G_k\Big\|_F

    computed from inner products of factors, without forming a Kronecker product.

    Args:
      factors: ``(A_i, G_i)`` of every refresh, oldest first; full matrices.
      rho: the decay of the average.

    Returns:
      An :class:`AveragingError`; its two fields' ratio is the relative error.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import averaging_error
      >>> eye = jnp.eye(2)
      >>> float(averaging_error([(eye, eye), (3 * eye, 3 * eye)], rho=0.5).error)
      2.0
    """
    check_decay("rho", rho)
    if not factors:
        raise ValueError("factors must hold at least one pair (A, G), got none")
    weights = jnp.asarray(
        [
            (1.0 if i == 0 else 1.0 - rho) * rho ** (len(factors) - 1 - i)
            for i in range(len(factors))
        ]
    )
    f_bar = factors[0]
    for f in factors[1:]:
        f_bar = average(f_bar, f, rho)
    a, g = (jnp.stack(side) for side in zip(*factors, strict=True))

    def gram(x: jax.Array) -> jax.Array:
        return jnp.einsum("iab,jab->ij", x, x, precision=jax.lax.Precision.HIGHEST)

    def norm(a: jax.Array, g: jax.Array) -> jax.Array:
        # |sum_i w_i A_i x G_i|^2, from <A_i x G_i, A_j x G_j> = <A_i, A_j> <G_i, G_j>.
        inner = gram(a) * gram(g)
        return jnp.sqrt(jnp.maximum(weights @ inner @ weights, 0))

    # The weights sum to one, so that the error is a weighted sum of (A_i - A_bar) x (G_i - G_bar).
    return AveragingError(error=norm(a - f_bar[0], g - f_bar[1]), average=norm(a, g))
