"""What a layer is to curvature: its blocks, and the statistics that make their factors.

There are three kinds of layer, whatever library it comes from: a matrix product, a table of
embeddings, and the scale and bias of a normalisation.
"""

import abc
import dataclasses
import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature import statistics
from kldwrm_jax.curvature.blocks import Diagonal, Kronecker
from kldwrm_jax.curvature.layers import LayerBlock
from kldwrm_jax.curvature.parameters import Axes

Shape = tuple[int, ...]
Arrays = dict[str, jax.Array]  # statistics or constants, by name

WEIGHTS = "weights"  # the constant that holds the samples' weights


class Use(enum.Enum):
    """How a row uses a layer's parameters."""

    ALONE = "z = a W + b"
    VALUE = "z = a W + b, of which the model takes derivatives, too"
    TANGENT = "dz = da W"
    BACKWARDS = "alpha = gamma W'"

    @property
    def has_bias(self) -> bool:
        """Whether the bias is part of it."""
        return self in (Use.ALONE, Use.VALUE)


def key(side: str, part: str) -> str:
    """The name of a block's statistic or constant, such as ``A`` or ``G_bias``."""
    return f"{side}_{part}" if part else side


@dataclasses.dataclass(frozen=True)
class LayerSpec(abc.ABC):
    """The description of a layer, the same for all its calls.

    Args:
      blocks: the curvature blocks of one copy of the layer. Each is named after the parameter that
        it is for, or "" if it is for all; its parameters' paths are their names in the layer.
    """

    blocks: tuple[LayerBlock, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(p.path for block in self.blocks for p in block.parameters)

    @property
    def probes(self) -> dict[str, Shape]:
        """The shapes of the statistics; those called ``count...`` are the weight of the rows."""
        shapes: dict[str, Shape] = {}
        for block in self.blocks:
            sides = ("D",) if isinstance(block.block, Diagonal) else ("A", "G")
            for side, shape in zip((*sides, "count"), (*block.shapes, ()), strict=True):
                shapes[key(side, block.name)] = shape
        return shapes

    @abc.abstractmethod
    def statistic(
        self,
        a: jax.Array,
        g: jax.Array,
        constants: Mapping[str, jax.Array],
        use: Use = Use.ALONE,
    ) -> Arrays:
        """The statistics of one call, from the rows of its inputs and output gradients.

        Of a layer that is used backwards, ``alpha = gamma W'``: from the rows of alpha's gradient,
        which is shaped like the inputs, and those of gamma, shaped like the outputs.
        """

    def factors(self, collected: Arrays, scale: float) -> list[tuple[jax.Array, ...]]:
        """The factors of each block from the statistics, a stack's axes in front.

        They are ``(A, G)``, with EK-FAC's ``S`` after them if it was collected, or a diagonal.
        ``scale`` multiplies what is quadratic in the output gradients.
        """
        made = []
        for part in (block.name for block in self.blocks):
            quadratic = (key(side, part) for side in ("G", "S", "D"))
            own = [scale * collected[name] for name in quadratic if name in collected]
            if key("A", part) in collected:
                a = statistics.mean(collected[key("A", part)], collected[key("count", part)])
                own.insert(0, a)
            made.append(tuple(own))
        return made

    def merge(self, other: "LayerSpec") -> "LayerSpec | None":
        """The description that collects both calls; None if no block fits both."""
        return self if self == other else None

    def used_backwards(self) -> "LayerSpec":
        """The description that collects backward uses, too."""
        return self


@dataclasses.dataclass(frozen=True)
class MatrixProduct(LayerSpec):
    r"""A layer :math:`z = a W + b`, row by row: the factors of K-FAC.

    Args:
      blocks: one, with or without the bias; or one for the kernel and one for the bias.
      groups: the number of axes, 0 or 1, that number independent products. Rows have shape
        ``(*samples, [groups,] features)``.
      reduce: whether the samples' axes after the first are places that share weights, over which
        inputs are averaged and gradients summed. Otherwise every place is a row.
      backwards: whether the model also uses it backwards, in a derivative by its inputs. The block
        is then the Kronecker product with the partial traces of ``A x G + A_back x G_back``.
    """

    groups: int
    reduce: bool
    backwards: bool = False

    @property
    def probes(self) -> dict[str, Shape]:
        """Both sides and the rows' weight, for backward uses too."""
        shapes = super().probes
        for part in self._backward_parts:
            for side in ("A", "G", "count"):
                shapes[key(f"{side}_back", part)] = shapes[key(side, part)]
        return shapes

    @property
    def _backward_parts(self) -> list[str]:
        return [b.name for b in self.blocks if b.name != "bias"] if self.backwards else []

    def statistic(
        self,
        a: jax.Array,
        g: jax.Array,
        constants: Mapping[str, jax.Array],
        use: Use = Use.ALONE,
    ) -> Arrays:
        """Second moments of inputs and gradients; of their products in bases that are given."""
        features, backwards = 1 + self.groups, use is Use.BACKWARDS
        weights = statistics.row_weights(a.shape[: a.ndim - features], constants.get(WEIGHTS))
        a, g = (statistics.by_example(x, features) for x in (a, g))
        weights = None if weights is None else weights.reshape(a.shape[:2])
        if use is not Use.ALONE:
            rows, cotangents = (g, a) if backwards else (a, g)
            if not use.has_bias:  # 0 W is no use of W
                cotangents = cotangents * statistics.nonzero(rows, features)
            a, g = (cotangents, rows) if backwards else (rows, cotangents)
            weights = statistics.live_weights(cotangents, weights, features, together=self.reduce)
        ones = jnp.ones_like(a[..., :1]) if use.has_bias else jnp.zeros_like(a[..., :1])
        collected: Arrays = {}
        for block in self.blocks:
            if block.name == "bias" and not use.has_bias:
                continue
            joint = len(block.parameters) > 1
            inputs = ones if block.name == "bias" else a
            inputs = jnp.concatenate([a, ones], axis=-1) if joint else inputs
            own = _moment_in_basis(block.name, inputs, g, constants)
            averaged, summed = (g, inputs) if backwards else (inputs, g)
            if (self.reduce or block.name == "bias") and a.shape[1] != 1:
                x, w = statistics.average_places(averaged, weights)
                dz = summed.sum(axis=1)
            else:
                x, dz = (rows.reshape(-1, *rows.shape[2:]) for rows in (averaged, summed))
                w = weights
            side, other, back = ("G", "A", "_back") if backwards else ("A", "G", "")
            own[side + back] = _second_moment(block, side, x, w)
            own[other + back] = _second_moment(block, other, dz, None)
            own["count" + back] = jnp.asarray(x.shape[0], float) if w is None else w.sum()
            collected |= {key(name, block.name): total for name, total in own.items()}
        return collected

    def factors(self, collected: Arrays, scale: float) -> list[tuple[jax.Array, ...]]:
        """``(A, G)`` of each block, and ``S`` if it was collected."""
        made = super().factors(collected, scale)
        for i, block in enumerate(self.blocks):
            if block.name in self._backward_parts:
                a, g, count = (collected[key(f"{k}_back", block.name)] for k in ("A", "G", "count"))
                back = (scale * a, statistics.mean(g, count))
                diagonal = (_is_diagonal(block, 0), _is_diagonal(block, 1))
                one = statistics.same_partial_traces(made[i][:2], back, diagonal)
                made[i] = (*one, *made[i][2:])
        return made

    def merge(self, other: LayerSpec) -> LayerSpec | None:
        """What is used backwards may be used forwards alone."""
        if not isinstance(other, MatrixProduct):
            return None
        both = dataclasses.replace(other, backwards=self.backwards or other.backwards)
        return both if both == dataclasses.replace(self, backwards=both.backwards) else None

    def used_backwards(self) -> LayerSpec:
        """With a further Kronecker term."""
        return dataclasses.replace(self, backwards=True)


def _second_moment(
    block: LayerBlock, side: str, rows: jax.Array, weights: jax.Array | None
) -> jax.Array:
    return statistics.second_moment(rows, weights, diagonal=_is_diagonal(block, "AG".index(side)))


def _is_diagonal(block: LayerBlock, side: int) -> bool:
    assert isinstance(block.block, Kronecker)
    return (block.block.a_diagonal, block.block.g_diagonal)[side]


def _moment_in_basis(
    part: str, a: jax.Array, g: jax.Array, constants: Mapping[str, jax.Array]
) -> Arrays:
    """EK-FAC's ``S = sum_n (U_A' grad_n U_G)^2``, if it is asked for by a constant of its name."""
    if key("S", part) not in constants:
        return {}

    def rotated(x: jax.Array, side: str) -> jax.Array:
        u = constants.get(key(side, part))
        if u is None:
            return x
        return jnp.einsum("nt...i,...ij->nt...j", x, u, precision=statistics.HIGHEST)

    return {"S": statistics.gradient_moment(rotated(a, "U_A"), rotated(g, "U_G"))}


@dataclasses.dataclass(frozen=True)
class Embedding(LayerSpec):
    """A table whose entries are looked up and that, if it ``attends``, multiplies queries.

    The side of the vocabulary is diagonal: token counts for a look-up, squared output gradients for
    ``attend``. A table that is used both ways has a sum of two Kronecker products; its block is the
    one with the same partial traces.
    """

    attends: bool

    @property
    def probes(self) -> dict[str, Shape]:
        """Both sides and the rows' weight, for look-ups and for ``attend``."""
        shapes = super().probes
        attend = {key(side, "attend"): shape for side, shape in shapes.items()}
        return shapes | (attend if self.attends else {})

    def statistic(
        self,
        a: jax.Array,
        g: jax.Array,
        constants: Mapping[str, jax.Array],
        use: Use = Use.ALONE,
    ) -> Arrays:
        """A look-up: tokens ``a`` of shape (*samples,), gradients (*samples, features)."""
        del use  # tokens have no derivatives
        weights = statistics.row_weights(a.shape, constants.get(WEIGHTS))
        weights = jnp.ones(a.shape, float) if weights is None else weights
        counts = jnp.zeros(self.probes["A"], weights.dtype).at[a].add(weights)
        return {"A": counts, "G": self._moment(g, None), "count": weights.sum()}

    def attend_statistic(
        self,
        a: jax.Array,
        g: jax.Array,
        constants: Mapping[str, jax.Array],
        use: Use = Use.ALONE,
    ) -> Arrays:
        """A product: queries ``a`` (*samples, features), gradients (*samples, vocabulary)."""
        weights = statistics.row_weights(a.shape[:-1], constants.get(WEIGHTS))
        weights = jnp.ones(a.shape[:-1], float) if weights is None else weights
        if use is not Use.ALONE:
            weights = statistics.live_weights(g, weights, 1)
        squares = statistics.second_moment(_flat_rows(g), None, diagonal=True)
        queries = self._moment(a, weights)
        return {"A_attend": squares, "G_attend": queries, "count_attend": weights.sum()}

    def factors(self, collected: Arrays, scale: float) -> list[tuple[jax.Array, ...]]:
        """``(A, G)``."""
        ((a, g),) = super().factors(collected, scale)
        if self.attends:
            queries = statistics.mean(collected["G_attend"], collected["count_attend"])
            attend = (scale * collected["A_attend"], queries)
            diagonal = (True, _is_diagonal(self.blocks[0], 1))
            a, g = statistics.same_partial_traces((a, g), attend, diagonal)
        return [(a, g)]

    def merge(self, other: LayerSpec) -> LayerSpec | None:
        """A table may be looked up and attended to."""
        if not isinstance(other, Embedding):
            return None
        widest, second = (self, other) if self.attends else (other, self)
        (own,), (same,) = widest.blocks, second.blocks
        return widest if own == dataclasses.replace(same, kind=own.kind) else None

    def used_backwards(self) -> LayerSpec:
        """Of tokens there is no derivative; that of a product with the table is not collected."""
        raise NotImplementedError(
            "a reverse-mode derivative (jax.grad) through a table of embeddings that multiplies "
            "its input is not supported: take it in forward mode (jax.jvp, jax.jacfwd)"
        )

    def _moment(self, x: jax.Array, weights: jax.Array | None) -> jax.Array:
        diagonal = _is_diagonal(self.blocks[0], 1)
        return statistics.second_moment(_flat_rows(x), weights, diagonal=diagonal)


def _flat_rows(x: jax.Array) -> jax.Array:
    return statistics.full_precision(x).reshape(-1, x.shape[-1])


@dataclasses.dataclass(frozen=True)
class Normalization(LayerSpec):
    """Scale and bias of a normalisation: diagonals of squared per-example gradients."""

    feature_axes: Axes  # the axes of the inputs that the parameters have, counted from the back

    def statistic(
        self,
        a: jax.Array,
        g: jax.Array,
        constants: Mapping[str, jax.Array],
        use: Use = Use.ALONE,
    ) -> Arrays:
        """``a``: the normalised input, before scale and bias; ``g``: of its shape."""
        del constants  # weights are in g
        a, g = statistics.full_precision(a), statistics.full_precision(g)
        features = {axis % a.ndim for axis in self.feature_axes}
        batched = 0 not in features
        places = tuple(axis for axis in range(int(batched), a.ndim) if axis not in features)
        collected: Arrays = {}
        for block in self.blocks:
            if block.name == "bias" and not use.has_bias:
                continue
            gradient = (g if block.name == "bias" else g * a).sum(axis=places)
            squares = (gradient**2).sum(axis=0) if batched else gradient**2
            count = jnp.asarray(a.shape[0] if batched else 1, float)
            collected |= {key("D", block.name): squares, key("count", block.name): count}
        return collected
