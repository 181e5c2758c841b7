"""Readings: layers as matrix products, whatever library they come from.

A :class:`Reading` is how one call of one layer is seen: its operands in rows, its parameters as
matrices, and what is collected. A front end makes readings of its own layers with the functions
here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.observe import Probes, RowsOf, Statistic, as_it_is, observe
from kldwrm_jax.capture.statistics import Lookup, MatrixProduct, Normalization, Observation

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of ``instrument``, as far as it concerns a layer."""

    bias: str
    sharing: str
    max_factor: int


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix: the axes of its shape once reshaped to ``split``."""

    split: Axes
    groups: Axes = ()
    rows: Axes = ()
    columns: Axes = ()


@dataclasses.dataclass(frozen=True)
class Role:
    """What a call makes of its layer.

    Args:
      kind: the layer's type, for people.
      observation: what is collected.
      matrices: how each parameter is read; empty for a normalisation.
      note: why this is less than a full Kronecker block, if it is.
    """

    kind: str
    observation: Observation
    matrices: dict[str, Matrix]
    note: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """What the layer calls its parameters."""
        if isinstance(self.observation, Normalization):
            return tuple(name for name, _ in self.observation.parameters)
        return tuple(self.matrices)

    def covers(self, other: "Role") -> bool:
        """Whether what is collected in this role is what the other wants."""
        mine, wanted = self.observation, other.observation
        if isinstance(mine, Lookup) and isinstance(wanted, Lookup) and mine.attends:
            wanted = dataclasses.replace(wanted, attends=True)
        return mine == wanted and self.matrices == other.matrices


@dataclasses.dataclass(frozen=True)
class Reading:
    """One call of a layer, as statistics see it.

    Args:
      role: what it makes of the layer.
      inputs: the operand that ``statistic`` wants, computed in the forward pass.
      statistic: from that operand and the output's gradient, in rows.
      rows_of_inputs: from the operand to its rows.
      rows_of_outputs: from the output to its rows.
    """

    role: Role
    inputs: Callable[[], jax.Array]
    statistic: Statistic
    rows_of_inputs: RowsOf = as_it_is
    rows_of_outputs: RowsOf = as_it_is

    def observed(self, z: jax.Array, probes: Probes, weights: jax.Array | None) -> jax.Array:
        """The call's output, whose cotangents for ``probes`` are the statistics."""
        return observe(
            self.statistic,
            z,
            self.inputs(),
            probes,
            weights,
            self.rows_of_inputs,
            self.rows_of_outputs,
        )


def as_tuple(value: int | Sequence[int]) -> Axes:
    """One or several axes or lengths, as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def matrix_product(
    kind: str,
    options: Options,
    kernel: Matrix,
    bias: Matrix | None,
    inputs: Any,
    rows_of_inputs: RowsOf = as_it_is,
    rows_of_outputs: RowsOf = as_it_is,
) -> Reading:
    """The reading of any layer that multiplies rows of its inputs by its kernel."""

    def length(axes: Axes) -> int:
        return math.prod(kernel.split[axis] for axis in axes)

    n, m = length(kernel.rows), length(kernel.columns)
    mode = "none" if bias is None else options.bias
    full = n + (mode == "joint")
    observation = MatrixProduct(
        rows=n,
        columns=m,
        groups=length(kernel.groups) if kernel.groups else None,
        bias=mode,
        a_diagonal=full > options.max_factor,
        g_diagonal=m > options.max_factor,
        reduce=options.sharing == "reduce",
    )
    sides = [
        f"{side} of {size} is diagonal (max_factor={options.max_factor})"
        for side, size in (("an input side", full), ("an output side", m))
        if size > options.max_factor
    ]
    matrices = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    return Reading(
        Role(kind, observation, matrices, note="; ".join(sides)),
        inputs=lambda: inputs,
        statistic=observation.statistic,
        rows_of_inputs=rows_of_inputs,
        rows_of_outputs=rows_of_outputs,
    )


def dense(kind: str, options: Options, x: jax.Array, features: int, *, bias: bool) -> Reading:
    """A product along the last axis."""
    return matrix_product(
        kind,
        options,
        kernel=Matrix((x.shape[-1], features), rows=(0,), columns=(1,)),
        bias=Matrix((features,), columns=(0,)) if bias else None,
        inputs=x,
    )


def dense_general(
    kind: str,
    options: Options,
    x: jax.Array,
    features: Axes,
    axis: Axes,
    batch_axes: Axes,
    *,
    bias: bool,
) -> Reading:
    """A product along several axes, with a kernel for each place of the batch axes."""
    axes = tuple(sorted(a % x.ndim for a in axis))  # as Flax does
    batch = tuple(sorted(a % x.ndim for a in batch_axes))
    rest = tuple(a for a in range(x.ndim) if a not in axes + batch)
    split = tuple(x.shape[a] for a in batch + axes) + features
    spans = _spans(len(batch), len(axes), len(features))

    def rows_of_inputs(a: jax.Array) -> jax.Array:
        return _merge(a.transpose(rest + batch + axes), len(rest), len(batch), len(axes))

    def rows_of_outputs(z: jax.Array) -> jax.Array:  # (batch, rest, features)
        front = tuple(range(len(batch), len(batch) + len(rest))) + tuple(range(len(batch)))
        z = z.transpose(front + tuple(range(len(front), z.ndim)))
        return _merge(z, len(rest), len(batch), len(features))

    groups, columns = _spans(len(batch), len(features))
    return matrix_product(
        kind,
        options,
        kernel=Matrix(split, groups=spans[0], rows=spans[1], columns=spans[2]),
        bias=Matrix(split[: len(batch)] + features, groups=groups, columns=columns)
        if bias
        else None,
        inputs=x,
        rows_of_inputs=rows_of_inputs,
        rows_of_outputs=rows_of_outputs,
    )


def _spans(*lengths: int) -> list[Axes]:
    """Consecutive ranges of axes."""
    spans, start = [], 0
    for length in lengths:
        spans.append(tuple(range(start, start + length)))
        start += length
    return spans


def _merge(x: jax.Array, samples: int, groups: int, features: int) -> jax.Array:
    """``(*samples, *groups, *features)`` with any groups in one axis, the features in one."""
    shape = x.shape
    assert len(shape) == samples + groups + features
    grouped = (math.prod(shape[samples : samples + groups]),) if groups else ()
    return x.reshape(*shape[:samples], *grouped, math.prod(shape[samples + groups :]))


def einsum(
    kind: str,
    options: Options,
    x: jax.Array,
    equation: str,
    kernel_shape: Axes,
    *,
    bias: bool,
) -> Reading | str:
    """An einsum of the inputs and the kernel; or why it is no matrix product."""
    equation = equation.replace(" ", "")
    operands, out = equation.split("->")
    left, right = operands.split(",")
    if "..." in right:
        return f"the einsum {equation!r} has an ellipsis in its kernel"
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    ellipsis = "".join(unused[: x.ndim - len(left.replace("...", ""))])
    left, out = left.replace("...", ellipsis), out.replace("...", ellipsis)
    groups = [c for c in right if c in left and c in out]
    contracted = [c for c in right if c in left and c not in out]
    columns = [c for c in right if c not in left and c in out]
    samples = [c for c in left if c not in right and c in out]
    if len({*left}) < len(left) or len({*right}) < len(right):
        return f"the einsum {equation!r} repeats an axis"
    if {*left} - {*groups, *contracted, *samples} or {*right} - {*groups, *contracted, *columns}:
        return f"the einsum {equation!r} sums an axis of one operand alone: it is no matrix product"
    if not contracted:
        return f"the einsum {equation!r} contracts no axis: it is no matrix product"

    def reorder(labels: str, wanted: list[str]) -> Axes:
        return tuple(labels.index(c) for c in wanted)

    def rows_of(labels: str, features: list[str]) -> RowsOf:
        order = reorder(labels, samples + groups + features)
        return lambda t: _merge(t.transpose(order), len(samples), len(groups), len(features))

    lengths = dict(zip(right, kernel_shape, strict=True))
    own = [c for c in out if c in right]  # the axes of the bias
    return matrix_product(
        kind,
        options,
        kernel=Matrix(
            tuple(kernel_shape),
            groups=reorder(right, groups),
            rows=reorder(right, contracted),
            columns=reorder(right, columns),
        ),
        bias=Matrix(
            tuple(lengths[c] for c in own),
            groups=tuple(own.index(c) for c in groups),
            columns=tuple(own.index(c) for c in columns),
        )
        if bias
        else None,
        inputs=x,
        rows_of_inputs=rows_of(left, contracted),
        rows_of_outputs=rows_of(out, columns),
    )


def convolution(
    kind: str,
    options: Options,
    x: jax.Array | jax.ShapeDtypeStruct,
    window: Axes,
    features: int,
    groups: int,
    cut: Callable[[jax.Array], jax.Array],
    *,
    bias: bool,
) -> Reading:
    """A convolution, channels last.

    ``cut`` is the layer itself for one channel, with the kernel :func:`window_units`: so every
    padding, stride and dilation is the layer's own.
    """
    channels, places = x.shape[-1], math.prod(window)
    depth, k, grouped = channels // groups, len(window), groups > 1

    def rows_of_inputs(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(cut(jnp.moveaxis(a, -1, 0)[..., None]), 0, -2)  # each channel by itself
        a = a.reshape(*a.shape[:-2], groups, depth, places)
        a = jnp.swapaxes(a, -1, -2)  # (channel, place) to the kernel's (place, channel)
        return a.reshape(*a.shape[:-3], *((groups,) if grouped else ()), places * depth)

    def rows_of_outputs(z: jax.Array) -> jax.Array:
        return z.reshape(*z.shape[:-1], groups, features // groups) if grouped else z

    kernel = Matrix((*window, depth, features), rows=tuple(range(k + 1)), columns=(k + 1,))
    vector = Matrix((features,), columns=(0,))
    if grouped:
        split = (groups, features // groups)
        kernel = Matrix(
            (*window, depth, *split), groups=(k + 1,), rows=tuple(range(k + 1)), columns=(k + 2,)
        )
        vector = Matrix(split, groups=(0,), columns=(1,))
    return matrix_product(
        kind if not grouped else f"{kind}, {groups} groups",
        options,
        kernel=kernel,
        bias=vector if bias else None,
        inputs=x,
        rows_of_inputs=rows_of_inputs,
        rows_of_outputs=rows_of_outputs,
    )


def window_units(window: Axes) -> jax.Array:
    """A kernel from one channel to the places of a window: what each of its entries is given."""
    places = math.prod(window)
    return jnp.eye(places).reshape(*window, 1, places)


def transposed_convolution(
    kind: str,
    options: Options,
    x: jax.Array,
    window: Axes,
    features: int,
    cut: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    transpose_kernel: bool,
    bias: bool,
) -> Reading:
    """A transposed convolution, channels last; ``cut(x, kernel)`` is it with another kernel."""
    channels, k = x.shape[-1], len(window)
    n = math.prod(window) * channels
    if transpose_kernel:
        kernel = Matrix((*window, features, channels), rows=(*range(k), k + 1), columns=(k,))
    else:
        kernel = Matrix((*window, channels, features), rows=tuple(range(k + 1)), columns=(k + 1,))

    def rows_of_inputs(a: jax.Array) -> jax.Array:
        units = jnp.eye(n, dtype=a.dtype).reshape(*window, channels, n)
        return cut(a, jnp.swapaxes(units, -1, -2) if transpose_kernel else units)

    return matrix_product(
        kind,
        options,
        kernel=kernel,
        bias=Matrix((features,), columns=(0,)) if bias else None,
        inputs=x,
        rows_of_inputs=rows_of_inputs,
    )


def table(
    kind: str, options: Options, inputs: jax.Array, rows: int, columns: int, *, attends: bool
) -> Reading:
    """A table that is looked up or, if it ``attends``, compared with queries."""
    diagonal = columns > options.max_factor
    observation = Lookup(rows, columns, g_diagonal=diagonal, attends=attends)
    note = "the vocabulary's side is diagonal"
    if diagonal:
        note += f"; an output side of {columns} is diagonal (max_factor={options.max_factor})"
    return Reading(
        Role(
            f"{kind}, tied" if attends else kind,
            observation,
            {"embedding": Matrix((rows, columns), rows=(0,), columns=(1,))},
            note,
        ),
        inputs=lambda: inputs,
        statistic=observation.attend_statistic if attends else observation.statistic,
    )


def normalization(
    kind: str,
    x: jax.Array,
    feature_axes: Axes,
    parameters: Sequence[str],
    normalised: Callable[[], jax.Array],
) -> Reading:
    """Scale and bias after a normalisation; ``normalised`` is what they are applied to."""
    features = tuple(axis % x.ndim - x.ndim for axis in feature_axes)
    shape = tuple(x.shape[axis] for axis in sorted(features))
    observation = Normalization(features, tuple((name, shape) for name in parameters))
    return Reading(
        Role(kind, observation, {}, note="scale and bias of a normalisation are diagonal"),
        inputs=normalised,
        statistic=observation.statistic,
    )
