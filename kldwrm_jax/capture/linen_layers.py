"""Flax Linen's layers as matrix products: which axes are samples, inputs and outputs.

A :class:`Reading` is how one call of one layer is seen: its operands in rows, its parameters as
matrices, and what is collected. Adding a layer type is adding a function here and its name to
``READERS``.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from kldwrm_jax.capture.statistics import (
    Lookup,
    MatrixProduct,
    Normalization,
    Observation,
    Statistic,
)

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
      statistic: from that operand and the output's gradient.
    """

    role: Role
    inputs: Callable[[], jax.Array]
    statistic: Statistic


Reader = Callable[[nn.Module, inspect.BoundArguments, Options], "Reading | str"]


def _first(call: inspect.BoundArguments) -> jax.Array:
    return call.args[1]


def _product(
    kind: str,
    options: Options,
    kernel: Matrix,
    bias: Matrix | None,
    inputs: jax.Array,
    rows_of_inputs: Callable[[jax.Array], jax.Array],
    rows_of_outputs: Callable[[jax.Array], jax.Array],
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
        statistic=lambda a, g, w: observation.statistic(rows_of_inputs(a), rows_of_outputs(g), w),
    )


def _dense(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    x = _first(call)
    n, m = x.shape[-1], module.features
    return _product(
        "Dense",
        options,
        kernel=Matrix((n, m), rows=(0,), columns=(1,)),
        bias=Matrix((m,), columns=(0,)) if module.use_bias else None,
        inputs=x,
        rows_of_inputs=lambda a: a,
        rows_of_outputs=lambda z: z,
    )


def _tuple(value: int | Sequence[int]) -> Axes:
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _dense_general(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    x = _first(call)
    features = _tuple(module.features)
    axes = tuple(sorted(axis % x.ndim for axis in _tuple(module.axis)))  # as Flax does
    batch = tuple(sorted(axis % x.ndim for axis in _tuple(module.batch_dims)))
    rest = tuple(axis for axis in range(x.ndim) if axis not in axes + batch)
    split = tuple(x.shape[axis] for axis in batch + axes) + features
    spans = _spans(len(batch), len(axes), len(features))

    def rows_of_inputs(a: jax.Array) -> jax.Array:
        return _merge(a.transpose(rest + batch + axes), len(rest), len(batch), len(axes))

    def rows_of_outputs(z: jax.Array) -> jax.Array:  # (batch, rest, features)
        front = tuple(range(len(batch), len(batch) + len(rest))) + tuple(range(len(batch)))
        z = z.transpose(front + tuple(range(len(front), z.ndim)))
        return _merge(z, len(rest), len(batch), len(features))

    bias = None
    if module.use_bias:
        groups, columns = _spans(len(batch), len(features))
        bias = Matrix(split[: len(batch)] + features, groups=groups, columns=columns)
    return _product(
        "DenseGeneral",
        options,
        kernel=Matrix(split, groups=spans[0], rows=spans[1], columns=spans[2]),
        bias=bias,
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


def _einsum(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading | str:
    x = _first(call)
    equation = (module.einsum_str or call.arguments["einsum_str"]).replace(" ", "")
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

    def rows_of(labels: str, features: list[str]) -> Callable[[jax.Array], jax.Array]:
        order = reorder(labels, samples + groups + features)
        return lambda t: _merge(t.transpose(order), len(samples), len(groups), len(features))

    kernel_shape = dict(zip(right, module.shape, strict=True))
    own = [c for c in out if c in right]  # the axes of the bias
    return _product(
        "Einsum",
        options,
        kernel=Matrix(
            tuple(module.shape),
            groups=reorder(right, groups),
            rows=reorder(right, contracted),
            columns=reorder(right, columns),
        ),
        bias=Matrix(
            tuple(kernel_shape[c] for c in own),
            groups=tuple(own.index(c) for c in groups),
            columns=tuple(own.index(c) for c in columns),
        )
        if module.use_bias
        else None,
        inputs=x,
        rows_of_inputs=rows_of(left, contracted),
        rows_of_outputs=rows_of(out, columns),
    )


def _patches(layer: nn.Module, units: np.ndarray, **changes: Any) -> Callable[[jax.Array], Any]:
    """The layer itself, with a kernel of unit vectors: what each entry of its kernel is given.

    So every padding, stride and dilation is the layer's own.
    """
    patching = layer.clone(
        parent=None,
        name=None,
        use_bias=False,
        dtype=None,
        param_dtype=jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
        **changes,
    )
    return lambda x: patching.apply({"params": {"kernel": jnp.asarray(units, x.dtype)}}, x)


def _conv(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading | str:
    if isinstance(module, nn.ConvLocal):
        return "a ConvLocal shares no weights between places"
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    x = _first(call)
    window, groups = _tuple(module.kernel_size), module.feature_group_count
    channels, features = x.shape[-1], module.features
    places = math.prod(window)
    depth = channels // groups
    units = np.eye(places).reshape(*window, 1, places)
    cut = _patches(module, units, features=places, feature_group_count=1)
    k = len(window)
    grouped = groups > 1

    def rows_of_inputs(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(cut(jnp.moveaxis(a, -1, 0)[..., None]), 0, -2)  # each channel by itself
        a = a.reshape(*a.shape[:-2], groups, depth, places)
        a = jnp.swapaxes(a, -1, -2)  # (channel, place) to the kernel's (place, channel)
        return a.reshape(*a.shape[:-3], *((groups,) if grouped else ()), places * depth)

    def rows_of_outputs(z: jax.Array) -> jax.Array:
        return z.reshape(*z.shape[:-1], groups, features // groups) if grouped else z

    kernel = Matrix((*window, depth, features), rows=tuple(range(k + 1)), columns=(k + 1,))
    bias = Matrix((features,), columns=(0,))
    if grouped:
        split = (groups, features // groups)
        kernel = Matrix(
            (*window, depth, *split), groups=(k + 1,), rows=tuple(range(k + 1)), columns=(k + 2,)
        )
        bias = Matrix(split, groups=(0,), columns=(1,))
    return _product(
        "Conv" if not grouped else f"Conv, {groups} groups",
        options,
        kernel=kernel,
        bias=bias if module.use_bias else None,
        inputs=x,
        rows_of_inputs=rows_of_inputs,
        rows_of_outputs=rows_of_outputs,
    )


def _conv_transpose(
    module: nn.Module, call: inspect.BoundArguments, options: Options
) -> Reading | str:
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    x = _first(call)
    window, channels, features = _tuple(module.kernel_size), x.shape[-1], module.features
    k, n = len(window), math.prod(window) * channels
    units = np.eye(n).reshape(*window, channels, n)
    if module.transpose_kernel:
        units = np.swapaxes(units, -1, -2)
        kernel = Matrix((*window, features, channels), rows=(*range(k), k + 1), columns=(k,))
    else:
        kernel = Matrix((*window, channels, features), rows=tuple(range(k + 1)), columns=(k + 1,))
    return _product(
        "ConvTranspose",
        options,
        kernel=kernel,
        bias=Matrix((features,), columns=(0,)) if module.use_bias else None,
        inputs=x,
        rows_of_inputs=_patches(module, units, features=n),
        rows_of_outputs=lambda z: z,
    )


def _embed(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return _table(module, options, lambda: _first(call), attending=False)


def _attend(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return _table(module, options, lambda: _first(call), attending=True)


def _table(
    module: nn.Module, options: Options, inputs: Callable[[], jax.Array], attending: bool
) -> Reading:
    rows, columns = module.num_embeddings, module.features
    diagonal = columns > options.max_factor
    observation = Lookup(rows, columns, g_diagonal=diagonal, attends=attending)
    note = "the vocabulary's side is diagonal"
    if diagonal:
        note += f"; an output side of {columns} is diagonal (max_factor={options.max_factor})"
    return Reading(
        Role(
            "Embed, tied" if attending else "Embed",
            observation,
            {"embedding": Matrix((rows, columns), rows=(0,), columns=(1,))},
            note,
        ),
        inputs=inputs,
        statistic=observation.attend_statistic if attending else observation.statistic,
    )


def _norm(features_of: Callable[[nn.Module], Axes], kind: str) -> Reader:
    def read(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
        del options
        x = _first(call)
        features = tuple(axis % x.ndim - x.ndim for axis in features_of(module))
        shape = tuple(x.shape[axis] for axis in sorted(features))
        used = [name for name in ("scale", "bias") if getattr(module, f"use_{name}", False)]
        observation = Normalization(features, tuple((name, shape) for name in used))

        def normalised() -> jax.Array:
            off = {
                f"use_{name}": False for name in ("scale", "bias") if hasattr(module, f"use_{name}")
            }
            bare = module.clone(parent=None, name=None, **off)
            others = {k: v for k, v in module.variables.items() if k != "params"}
            return bare.apply(others, *call.args[1:], **call.kwargs, mutable=list(others))[0]

        return Reading(
            Role(kind, observation, {}, note="scale and bias of a normalisation are diagonal"),
            inputs=normalised,
            statistic=observation.statistic,
        )

    return read


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(method)


READERS: dict[Callable[..., Any], Reader] = {
    _function(nn.Dense.__call__): _dense,
    _function(nn.DenseGeneral.__call__): _dense_general,
    _function(nn.Einsum.__call__): _einsum,
    _function(nn.Conv.__call__): _conv,
    _function(nn.ConvTranspose.__call__): _conv_transpose,
    _function(nn.Embed.__call__): _embed,
    _function(nn.Embed.attend): _attend,
    _function(nn.LayerNorm.__call__): _norm(lambda m: _tuple(m.feature_axes), "LayerNorm"),
    _function(nn.RMSNorm.__call__): _norm(lambda m: _tuple(m.feature_axes), "RMSNorm"),
    _function(nn.InstanceNorm.__call__): _norm(lambda m: _tuple(m.feature_axes), "InstanceNorm"),
    _function(nn.GroupNorm.__call__): _norm(lambda m: (-1,), "GroupNorm"),
    _function(nn.BatchNorm.__call__): _norm(lambda m: _tuple(m.axis), "BatchNorm"),
}


@functools.cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a layer's method."""
    return inspect.signature(function)


# Wrappers whose layers compute with something else than the parameters that are stored.
REPARAMETRISATIONS = (nn.WeightNorm, nn.SpectralNorm)
