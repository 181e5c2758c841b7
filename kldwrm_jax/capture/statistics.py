r"""Statistics of a layer's inputs and output gradients, as cotangents of zero probes.

A *probe* is a zero array, shaped like a statistic, that travels with the parameters. A layer's
output passes through :func:`~kldwrm_jax.capture.observe.observe`, the identity, whose cotangent for
the probes is the statistic. So the statistics of a whole network are one vector-Jacobian product,
whatever ``scan``, ``remat`` or ``vmap`` the layers stand under, and a layer called twice sums its
calls by itself.

Scale: the cotangent fed to the network carries :math:`\sqrt{w_n / W}` for every sample, with
:math:`W = \sum_n w_n`; so sums over rows of :math:`g g'` are means over samples already. ``rows``,
the sum of the weights of the rows seen, turns the sum of :math:`a a'` into a mean, and tells by
being zero that a layer was not reached.
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.observe import Probes


class Observation(Protocol):
    """What is collected at one layer, and how it becomes the factors of its blocks."""

    @property
    def probes(self) -> dict[str, tuple[int, ...]]:
        """The probes' shapes, by name; at least two axes each."""
        ...

    @property
    def quadratic(self) -> tuple[str, ...]:
        """The probes whose statistics are quadratic in the outputs' cotangent."""
        ...

    def factors(self, seen: Probes) -> dict[str, tuple[jax.Array, ...]]:
        """Factors of each block of the layer, from what was collected."""
        ...


def _gram(x: jax.Array, w: jax.Array | None, diagonal: bool) -> jax.Array:
    """Sum over the first axis of ``w x x'`` (of its diagonal), for each of the axes between."""
    weighted = x if w is None else x * w.reshape((-1,) + (1,) * (x.ndim - 1))
    if diagonal:
        return jnp.sum(weighted * x, axis=0)
    return jnp.einsum("r...i,r...j->...ij", weighted, x, precision=jax.lax.Precision.HIGHEST)


def _full(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _with_ones(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)


def _row_weights(rows: tuple[int, ...], weights: jax.Array | None) -> jax.Array | None:
    """Weights of a layer's rows, from the weights of the network's samples.

    Axes in front are matched as far as they agree; a sample's axes that the layer no longer has are
    summed, and rows that the samples do not tell apart share their weight.
    """
    if weights is None:
        return None
    if weights.ndim > 1 and rows[:1] == (weights.size,):
        weights = weights.reshape(-1)  # the model has merged the samples' axes
    common = 0
    while common < min(len(rows), weights.ndim) and rows[common] == weights.shape[common]:
        common += 1
    if common == 0:
        raise ValueError(
            f"weights of shape {weights.shape} do not match a layer that sees rows of shape "
            f"{rows}: a weighted batch must keep its examples along the first axis of every "
            f"layer's input"
        )
    matched = weights.sum(axis=tuple(range(common, weights.ndim)))
    matched = matched.reshape(matched.shape + (1,) * (len(rows) - common))
    return jnp.broadcast_to(matched, rows)


def _count(rows: int, w: jax.Array | None) -> jax.Array:
    """The sum of the rows' weights."""
    return jnp.asarray(rows, float) if w is None else jnp.sum(w)


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    r"""A layer :math:`z = a W + b`, row by row: the factors of K-FAC.

    Args:
      rows: how many inputs a row has, without the bias's one.
      columns: how many outputs.
      groups: independent products side by side, or None.
      bias: ``"none"``, ``"joint"`` (a row of ones joins the inputs) or ``"separate"``.
      a_diagonal: whether only the diagonal of :math:`A` is kept.
      g_diagonal: whether only the diagonal of :math:`G` is kept.
      reduce: whether the axes after the first are one sample's shared weights, whose inputs are
        averaged and whose gradients are summed first; otherwise each is a row of its own.
    """

    rows: int
    columns: int
    groups: int | None
    bias: str
    a_diagonal: bool
    g_diagonal: bool
    reduce: bool

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of ``(A, G)`` for each block, without a stack."""
        groups = () if self.groups is None else (self.groups,)

        def side(n: int, diagonal: bool) -> tuple[int, ...]:
            return (*groups, n) if diagonal else (*groups, n, n)

        g = side(self.columns, self.g_diagonal)
        if self.bias == "separate":
            bias = (side(1, self.a_diagonal), g)
            return {"kernel": (side(self.rows, self.a_diagonal), g), "bias": bias}
        return {"": (side(self.rows + (self.bias == "joint"), self.a_diagonal), g)}

    @property
    def probes(self) -> dict[str, tuple[int, ...]]:
        """Probes for ``A``, ``G``, the row count and, if it stands alone, the bias's ``G``."""
        main = self.shapes["kernel" if self.bias == "separate" else ""]
        shapes = {"A": main[0], "G": main[1], "rows": (1, 1)}
        if self.bias == "separate":
            shapes["bias_G"] = main[1]
        return {name: _two_axes(shape) for name, shape in shapes.items()}

    @property
    def quadratic(self) -> tuple[str, ...]:
        """Those of the outputs' side."""
        return tuple(name for name in self.probes if name in ("G", "bias_G"))

    def statistic(self, a: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
        """``a``: (*samples, [groups,] rows), ``g``: (*samples, [groups,] columns)."""
        a, g = _full(a), _full(g)
        own = 1 if self.groups is None else 2
        samples = a.shape[: a.ndim - own]
        w = _row_weights(samples, weights)
        shared = tuple(range(1, len(samples)))
        g_summed = g.sum(axis=shared)
        if self.reduce and shared:
            a, w = _average_rows(a, w, shared)
            g, samples = g_summed, samples[:1]
        a, g = a.reshape(-1, *a.shape[len(samples) :]), g.reshape(-1, *g.shape[len(samples) :])
        g_summed = g_summed.reshape(-1, *g_summed.shape[len(samples[:1]) :])
        if self.bias == "joint":
            a = _with_ones(a)
        return {
            "A": _gram(a, w, self.a_diagonal),
            "G": _gram(g, None, self.g_diagonal),
            "rows": _count(a.shape[0], w),
            "bias_G": _gram(g_summed, None, self.g_diagonal),
        }

    def factors(self, seen: Probes) -> dict[str, tuple[jax.Array, ...]]:
        """``(A, G)`` of each block, a stack's axes in front."""
        rows = seen["rows"][..., 0, 0]
        stack = rows.shape
        shapes = self.shapes
        name = "kernel" if self.bias == "separate" else ""
        a_shape, g_shape = (stack + shape for shape in shapes[name])
        a = _per_row(seen["A"].reshape(a_shape), rows)
        out: dict[str, tuple[jax.Array, ...]] = {name: (a, seen["G"].reshape(g_shape))}
        if self.bias == "separate":
            ones = jnp.ones(stack + shapes["bias"][0], a.dtype)
            out["bias"] = (ones, seen["bias_G"].reshape(g_shape))
        return out


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A table whose rows are looked up, and against which queries may be compared (``attend``).

    The inputs' side, as large as the vocabulary, is diagonal: counts of tokens for a look-up,
    squared output gradients for ``attend``. A table used both ways has a sum of two Kronecker
    products; it is given the one with the same partial traces.
    """

    rows: int
    columns: int
    g_diagonal: bool
    attends: bool

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of ``(A, G)``, without a stack."""
        return {"": ((self.rows,), (self.columns,) if self.g_diagonal else (self.columns,) * 2)}

    @property
    def probes(self) -> dict[str, tuple[int, ...]]:
        """Probes for both sides and the row count, and the same for ``attend``."""
        a, g = self.shapes[""]
        shapes = {"A": a, "G": g, "rows": (1, 1)}
        if self.attends:
            shapes |= {"attend_A": a, "attend_G": g, "attend_rows": (1, 1)}
        return {name: _two_axes(shape) for name, shape in shapes.items()}

    @property
    def quadratic(self) -> tuple[str, ...]:
        """Those of the outputs' side: for ``attend``, that of the vocabulary."""
        return tuple(name for name in self.probes if name in ("G", "attend_A"))

    def statistic(self, tokens: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
        """A look-up: ``tokens`` (*samples,), ``g`` (*samples, columns)."""
        g = _full(g)
        w = _row_weights(tokens.shape, weights)
        amounts = jnp.ones(tokens.shape, g.dtype) if w is None else w
        return {
            "A": jnp.zeros(self.rows, g.dtype).at[tokens.reshape(-1)].add(amounts.reshape(-1)),
            "G": _gram(g.reshape(-1, self.columns), None, self.g_diagonal),
            "rows": jnp.sum(amounts),
        }

    def attend_statistic(self, query: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
        """A comparison: ``query`` (*samples, columns), ``g`` (*samples, rows)."""
        query, g = _full(query), _full(g)
        w = _row_weights(query.shape[:-1], weights)
        flat = query.reshape(-1, self.columns)
        return {
            "attend_A": _gram(g.reshape(-1, self.rows), None, True),
            "attend_G": _gram(flat, w, self.g_diagonal),
            "attend_rows": _count(flat.shape[0], w),
        }

    def factors(self, seen: Probes) -> dict[str, tuple[jax.Array, ...]]:
        """``(A, G)``, a stack's axes in front."""
        rows = seen["rows"][..., 0, 0]
        a_shape, g_shape = (rows.shape + shape for shape in self.shapes[""])
        a, g = _per_row(seen["A"].reshape(a_shape), rows), seen["G"].reshape(g_shape)
        if self.attends:
            other = _per_row(seen["attend_G"].reshape(g_shape), seen["attend_rows"][..., 0, 0])
            a, g = _same_partial_traces(a, g, seen["attend_A"].reshape(a_shape), other)
        return {"": (a, g)}


@dataclasses.dataclass(frozen=True)
class Normalization:
    """Scale and bias of a normalisation: diagonals of squared per-example gradients.

    Args:
      features: axes of the inputs that the parameters have, counted from the back.
      parameters: names and shapes of the parameters there are.
    """

    features: tuple[int, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def probes(self) -> dict[str, tuple[int, ...]]:
        """A probe for each parameter, and the row count."""
        shapes = dict(self.parameters) | {"rows": (1, 1)}
        return {name: _two_axes(shape) for name, shape in shapes.items()}

    @property
    def quadratic(self) -> tuple[str, ...]:
        """Those of the parameters."""
        return tuple(name for name, _ in self.parameters)

    def statistic(self, x: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
        """``x``: the normalised input, before scale and bias; ``g``: of its shape."""
        del weights  # they are in g
        x, g = _full(x), _full(g)
        features = {axis % x.ndim for axis in self.features}
        examples = 0 not in features
        summed = tuple(axis for axis in range(1 if examples else 0, x.ndim) if axis not in features)

        def squares(per_entry: jax.Array) -> jax.Array:
            gradient = per_entry.sum(axis=summed)
            return (gradient**2).sum(axis=0) if examples else gradient**2

        return {
            "scale": squares(g * x),
            "bias": squares(g),
            "rows": _count(x.shape[0] if examples else 1, None),
        }

    def factors(self, seen: Probes) -> dict[str, tuple[jax.Array, ...]]:
        """One diagonal a parameter, a stack's axes in front."""
        stack = seen["rows"].shape[:-2]
        return {name: (seen[name].reshape(stack + shape),) for name, shape in self.parameters}


def _two_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    # A stack's axis may be any of the first: every probe needs enough axes for it.
    return shape if len(shape) > 1 else (math.prod(shape), 1)


def _per_row(total: jax.Array, rows: jax.Array) -> jax.Array:
    rows = rows.reshape(rows.shape + (1,) * (total.ndim - rows.ndim))
    return jnp.where(rows == 0, 0, total / jnp.where(rows == 0, 1, rows))


def _average_rows(
    a: jax.Array, w: jax.Array | None, shared: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Inputs averaged over an example's shared axes, and the example's weight."""
    if w is None:
        return a.mean(axis=shared), None
    total = w.sum(axis=shared)
    weighted = (a * w.reshape(w.shape + (1,) * (a.ndim - w.ndim))).sum(axis=shared)
    return _per_row(weighted, total), total


def _same_partial_traces(
    a1: jax.Array, g1: jax.Array, a2: jax.Array, g2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One product with the partial traces of ``a1 x g1 + a2 x g2``; ``a`` are diagonals."""

    def trace(g: jax.Array, like: jax.Array) -> jax.Array:
        return g.sum(-1) if g.ndim == like.ndim else jnp.trace(g, axis1=-2, axis2=-1)

    s1, s2 = a1.sum(-1), a2.sum(-1)
    t1, t2 = trace(g1, a1), trace(g2, a2)
    total = s1 * t1 + s2 * t2
    safe = jnp.where(total == 0, 1, total)

    def expand(x: jax.Array, like: jax.Array) -> jax.Array:
        return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))

    a = expand(t1, a1) * a1 + expand(t2, a2) * a2
    g = (expand(s1, g1) * g1 + expand(s2, g2) * g2) / expand(safe, g1)
    return a, g
