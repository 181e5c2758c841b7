r"""Sums over the rows of a layer: of its inputs :math:`a` and of its output gradients :math:`g`.

A row is a pair of an input and an output gradient that meet in the layer's product. The cotangent
fed to the network carries :math:`\sqrt{w_n / W}` for every sample, with :math:`W = \sum_n w_n`, so
that sums of :math:`g g'` over rows are means over samples already; sums of :math:`a a'` become
means through division by the rows' total weight.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.batch_axis import zeros

HIGHEST = jax.lax.Precision.HIGHEST


def second_moment(x: jax.Array, weights: jax.Array | None, *, diagonal: bool) -> jax.Array:
    """``sum_r w_r x_r x_r'``, or its diagonal, of rows ``(rows, [groups,] features)``."""
    weighted = x if weights is None else x * _expand(weights.reshape(-1), x.ndim)
    if diagonal:
        return jnp.sum(weighted * x, axis=0)
    return jnp.einsum("r...i,r...j->...ij", weighted, x, precision=HIGHEST)


def gradient_moment(a: jax.Array, g: jax.Array) -> jax.Array:
    r"""``sum_n (sum_t a_nt g_nt')^2``, elementwise: the diagonal of the Fisher of a kernel.

    ``sum_t a_nt g_nt'`` is the gradient of example n, which has a row for every place t that shares
    the weights. Shapes: ``(examples, places, [groups,] features)``.
    """
    if a.shape[1] == 1:  # (a_i g_j)^2 = a_i^2 g_j^2
        return jnp.einsum("nt...i,nt...j->...ij", a**2, g**2, precision=HIGHEST)

    def square(a: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.einsum("t...i,t...j->...ij", a, g, precision=HIGHEST) ** 2

    def add(total: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + square(*rows), None

    # One example at a time: all their gradients would not fit in memory.
    return jax.lax.scan(add, zeros(jax.eval_shape(square, a[0], g[0])), (a, g))[0]


def full_precision(x: jax.Array) -> jax.Array:
    """At least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def by_example(x: jax.Array, features: int) -> jax.Array:
    """``(*samples, *features)`` as ``(examples, places, *features)``, with so many feature axes."""
    samples, own = x.shape[: x.ndim - features], x.shape[x.ndim - features :]
    return full_precision(x).reshape(*samples[:1] or (1,), math.prod(samples[1:]), *own)


def row_weights(samples: tuple[int, ...], weights: jax.Array | None) -> jax.Array | None:
    """Weights of a layer's rows, of shape ``samples``, from those of the network's samples.

    Leading axes are matched as far as they agree. Weights are summed over sample axes that the
    layer no longer has, and repeated over axes that the samples do not have.
    """
    if weights is None:
        return None
    if weights.ndim > 1 and samples[:1] == (weights.size,):
        weights = weights.reshape(-1)  # the model has merged the samples' axes
    common = 0
    while common < min(len(samples), weights.ndim) and samples[common] == weights.shape[common]:
        common += 1
    if common == 0:
        raise ValueError(
            f"weights of shape {weights.shape} do not match a layer that sees rows of shape "
            f"{samples}: a weighted batch must keep its examples along the first axis of every "
            f"layer's input"
        )
    matched = weights.sum(axis=tuple(range(common, weights.ndim)))
    return jnp.broadcast_to(_expand(matched, len(samples)), samples)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """``total / weight``; 0 where the weight is."""
    weight = _expand(weight, total.ndim)
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def average_places(a: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The inputs of each example averaged over its places, and the example's weight."""
    if weights is None:
        return a.mean(axis=1), None
    example = weights.sum(axis=1)
    return mean((a * _expand(weights, a.ndim)).sum(axis=1), example), example


def nonzero(rows: jax.Array, features: int) -> jax.Array:
    """Whether a row, ``(*samples, *features)``, is not zero; feature axes have length one."""
    return (rows != 0).any(axis=tuple(range(-features, 0)), keepdims=True)


def live_weights(
    cotangents: jax.Array, weights: jax.Array | None, features: int, *, together: bool = False
) -> jax.Array:
    """Weights of rows, ``(*samples, *features)``, some of which may not matter.

    A model that takes derivatives has rows without a cotangent, such as the value of its last layer
    if the outputs are derivatives alone. They must not count; but next to nothing is enough, so
    that the mean of a layer that has no other rows is one.

    Args:
      cotangents: of the rows; 0 where the outputs do not depend on them.
      weights: of the rows, if any.
      features: the number of axes of the features.
      together: whether the rows of an example count all or not at all.
    """
    samples = cotangents.shape[: cotangents.ndim - features]
    live = nonzero(cotangents, features).reshape(samples)
    live = live.any(axis=tuple(range(1, len(samples))), keepdims=True) if together else live
    share = jnp.broadcast_to(jnp.where(live, 1.0, 1e-20), samples)
    return share if weights is None else share * weights


def same_partial_traces(
    first: tuple[jax.Array, ...], second: tuple[jax.Array, ...], diagonal: tuple[bool, bool]
) -> tuple[jax.Array, jax.Array]:
    """One Kronecker product with the partial traces of ``A1 x G1 + A2 x G2``.

    ``diagonal`` says of ``A`` and of ``G`` whether they are given as vectors.
    """
    (a1, g1), (a2, g2) = first, second

    s1, s2 = (_trace(a, diagonal=diagonal[0]) for a in (a1, a2))
    t1, t2 = (_trace(g, diagonal=diagonal[1]) for g in (g1, g2))
    a = _expand(t1, a1.ndim) * a1 + _expand(t2, a1.ndim) * a2
    return a, mean(_expand(s1, g1.ndim) * g1 + _expand(s2, g1.ndim) * g2, s1 * t1 + s2 * t2)


def sum_of_products(
    products: Sequence[tuple[jax.Array, ...]], diagonal: tuple[bool, bool]
) -> tuple[jax.Array, jax.Array]:
    r"""One Kronecker product with the partial traces of :math:`\sum_t A_t \otimes G_t`.

    That is the sum itself where all :math:`A_t`, or all :math:`G_t`, are multiples of one matrix.
    :math:`A` is a mean of the :math:`A_t`, by the traces of the :math:`G_t`.
    """
    of_g = [_trace(g, diagonal=diagonal[1]) for _, g in products]
    total = sum(of_g[1:], start=of_g[0])
    shares = [
        jnp.where(total == 0, 1 / len(of_g), t / jnp.where(total == 0, 1, total)) for t in of_g
    ]

    def weighted(weights: Sequence[jax.Array], side: int) -> jax.Array:
        terms = [
            _expand(w, own[side].ndim) * own[side] for w, own in zip(weights, products, strict=True)
        ]
        return sum(terms[1:], start=terms[0])

    a = weighted(shares, 0)
    g = weighted([_trace(own, diagonal=diagonal[0]) for own, _ in products], 1)
    return a, mean(g, _trace(a, diagonal=diagonal[0]))


def _trace(x: jax.Array, *, diagonal: bool) -> jax.Array:
    return x.sum(-1) if diagonal else jnp.trace(x, axis1=-2, axis2=-1)


def _expand(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
