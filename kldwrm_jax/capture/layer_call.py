"""Calls of layers as operations on rows, whatever library the layer comes from.

An adapter (or a reader of :mod:`kldwrm_jax.capture.readers`) describes a call by its
:class:`Operands`; the functions here turn that into a :class:`LayerCall`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.capture.observe import Collector, ToRows
from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock, Parameter
from kldwrm_jax.curvature.layer_spec import (
    Embedding,
    LayerSpec,
    MatrixProduct,
    Normalization,
    Shape,
)
from kldwrm_jax.curvature.parameters import Axes, MatrixView


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``instrument`` that concern single layers."""

    bias: str = "joint"
    sharing: str = "expand"
    max_factor: int = 4096


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a layer was called with."""

    layer_type: str  # as shown in the table of layers
    inputs: Any  # an array
    shapes: Mapping[str, Shape]  # of the layer's own parameters, within the call
    options: Options


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer, as its statistics see it."""

    spec: LayerSpec
    inputs: Callable[[], jax.Array]  # the operand, computed in the forward pass if asked for
    collector: Collector
    mixes_examples: bool = False  # whether the output of an example depends on the others


def matrix_product(
    operands: Operands,
    kernel: MatrixView,
    bias: MatrixView,
    input_rows: ToRows = lambda x: x,
    output_rows: ToRows = lambda z: z,
) -> LayerCall:
    """Rows of the inputs times the kernel; ``bias`` is how the bias is read, if there is one."""
    options, shapes = operands.options, operands.shapes
    views = {"kernel": kernel} | ({"bias": bias} if "bias" in shapes else {})
    separate = len(views) == 2 and options.bias == "separate"
    inputs = kernel.inputs + (len(views) == 2 and not separate)
    kind = ", ".join([operands.layer_type, *(f"{n} groups" for n in kernel.groups)])
    note, a_diagonal = _diagonal_note("an input side", inputs, options)
    other, g_diagonal = _diagonal_note("an output side", kernel.outputs, options)

    def block(part: str, names: Iterable[str], n: int) -> LayerBlock:
        parameters = tuple(Parameter(name, shapes[name], (), views[name]) for name in names)
        sides = (n,) * (2 - a_diagonal), (kernel.outputs,) * (2 - g_diagonal)
        factors = tuple(kernel.groups + side for side in sides)
        notes = "; ".join(filter(None, (note, other)))
        return LayerBlock(part, kind, Kronecker(a_diagonal, g_diagonal), parameters, factors, notes)

    blocks = [block("", views, inputs)]
    if separate:
        blocks = [block("kernel", ["kernel"], inputs), block("bias", ["bias"], 1)]
    spec = MatrixProduct(tuple(blocks), len(kernel.groups), options.sharing == "reduce")
    collector = Collector(spec.statistic, input_rows, output_rows)
    return LayerCall(spec, lambda: operands.inputs, collector)


def _diagonal_note(side: str, size: int, options: Options) -> tuple[str, bool]:
    """A note if a side is too large for a matrix, and whether it is."""
    diagonal = size > options.max_factor
    note = f"{side} of {size} is diagonal (max_factor={options.max_factor})"
    return note if diagonal else "", diagonal


def einsum(operands: Operands, equation: str) -> LayerCall | str:
    """An einsum of the inputs and the kernel; or why it is no matrix product."""
    equation = equation.replace(" ", "")
    terms, out = equation.split("->")
    left, right = terms.split(",")
    if "..." in right:
        return f"the einsum {equation!r} has an ellipsis in its kernel"
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    ellipsis = "".join(unused[: operands.inputs.ndim - len(left.replace("...", ""))])
    left, out = left.replace("...", ellipsis), out.replace("...", ellipsis)
    groups = [c for c in right if c in left and c in out]
    inputs = [c for c in right if c in left and c not in out]
    outputs = [c for c in right if c not in left and c in out]
    samples = [c for c in left if c not in right and c in out]
    if len({*left}) < len(left) or len({*right}) < len(right):
        return f"the einsum {equation!r} repeats an axis"
    if {*left} - {*groups, *inputs, *samples} or {*right} - {*groups, *inputs, *outputs}:
        return f"the einsum {equation!r} sums an axis of one operand alone: it is no matrix product"
    if not inputs:
        return f"the einsum {equation!r} contracts no axis: it is no matrix product"

    def axes(labels: str, wanted: list[str]) -> Axes:
        return tuple(labels.index(c) for c in wanted)

    def rows(labels: str, features: list[str]) -> ToRows:
        order = axes(labels, samples + groups + features)
        n, k = len(samples), len(samples) + len(groups)

        def to_rows(x: jax.Array) -> jax.Array:
            x = x.transpose(order)
            grouped = (math.prod(x.shape[n:k]),) if groups else ()
            return x.reshape(*x.shape[:n], *grouped, math.prod(x.shape[k:]))

        return to_rows

    shape = operands.shapes["kernel"]
    own = "".join(c for c in out if c in right)  # the axes of the bias
    return matrix_product(
        operands,
        MatrixView(shape, axes(right, groups), axes(right, inputs), axes(right, outputs)),
        MatrixView(
            tuple(shape[right.index(c)] for c in own), axes(own, groups), (), axes(own, outputs)
        ),
        rows(left, inputs),
        rows(out, outputs),
    )


def window_units(window: Shape) -> np.ndarray:
    """A kernel from one channel to the places of a window: each output picks one of them."""
    places = math.prod(window)
    return np.eye(places).reshape(*window, 1, places)


def patch_rows(patches: Callable[[jax.Array], jax.Array], window: Shape, groups: int = 1) -> ToRows:
    """The rows of a convolution's inputs, channels last: what each entry of the kernel multiplies.

    ``patches`` is the convolution of a single channel with the kernel :func:`window_units`.
    """
    k, places = len(window), math.prod(window)

    def input_rows(x: jax.Array) -> jax.Array:
        batch, channels = x.shape[: -1 - k], x.shape[-1]
        spatial, depth = x.shape[-1 - k : -1], channels // groups
        # A patch is picked by its pixels' numbers, which the convolution of an image of them tells:
        # on a CPU four times as fast as a convolution of every channel, in half the memory.
        with jax.ensure_compile_time_eval():
            numbers = np.arange(1, math.prod(spatial) + 1, dtype=np.float32)
            image = numbers.reshape((1,) * (1 + len(batch)) + spatial + (1,))
            # In one jit: a model's first call would wait for every operation of the layer.
            picked = np.asarray(jax.jit(patches)(image), int).reshape(-1, places)  # 0 is padding
        out = jax.eval_shape(patches, jax.ShapeDtypeStruct((1, *x.shape[:-1], 1), x.dtype))
        x = x.reshape(*batch, math.prod(spatial), channels)
        rows = jnp.take(x, np.maximum(picked.ravel() - 1, 0), axis=-2, mode="clip")
        rows = rows * (picked > 0).reshape(-1, 1).astype(x.dtype)
        rows = rows.reshape(*out.shape[1:-1], places, groups, depth)
        grouped = (groups,) * (groups > 1)  # the kernel's order is (place, channel)
        return jnp.swapaxes(rows, -3, -2).reshape(*out.shape[1:-1], *grouped, places * depth)

    return input_rows


def convolution(
    operands: Operands, groups: int, patches: Callable[[jax.Array], jax.Array]
) -> LayerCall:
    """A convolution, channels last, with a kernel of shape (*window, channels / groups, features).

    ``patches`` is the layer itself on a single channel, with the kernel :func:`window_units`. So
    every padding, stride and dilation is the layer's own.
    """
    *window, depth, features = operands.shapes["kernel"]
    k, split = len(window), (groups, features // groups) if groups > 1 else (features,)
    at, n = tuple(range(k + 1, k + 1 + len(split))), len(split) - 1
    return matrix_product(
        operands,
        MatrixView((*window, depth, *split), at[:-1], tuple(range(k + 1)), at[-1:]),
        MatrixView(split, tuple(range(n)), (), (n,)),
        patch_rows(patches, tuple(window), groups),
        lambda z: z.reshape(*z.shape[:-1], *split),
    )


def transposed_convolution(
    operands: Operands,
    convolve: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    transpose_kernel: bool,
) -> LayerCall:
    """A transposed convolution, channels last; ``convolve(x, kernel)`` is it, without a bias."""
    *window, a, b = shape = operands.shapes["kernel"]
    channels, features = (b, a) if transpose_kernel else (a, b)
    n, k = math.prod(window) * channels, len(window)
    in_axis, out_axis = (k + 1, k) if transpose_kernel else (k, k + 1)

    def input_rows(x: jax.Array) -> jax.Array:
        units = jnp.eye(n, dtype=x.dtype).reshape(*window, channels, n)
        return convolve(x, jnp.swapaxes(units, -1, -2) if transpose_kernel else units)

    return matrix_product(
        operands,
        MatrixView(tuple(shape), (), (*range(k), in_axis), (out_axis,)),
        MatrixView((features,), output_axes=(0,)),
        input_rows,
    )


def embedding(operands: Operands, *, attends: bool) -> LayerCall:
    """A table that is looked up or, if it ``attends``, multiplied with queries."""
    vocabulary, features = shape = operands.shapes["embedding"]
    note, diagonal = _diagonal_note("an output side", features, operands.options)
    kind = f"{operands.layer_type}, tied" if attends else operands.layer_type
    table = Parameter("embedding", shape, (), MatrixView(shape, (), (0,), (1,)))
    sides = (vocabulary,), (features,) * (2 - diagonal)
    notes = "; ".join(filter(None, ("the vocabulary's side is diagonal", note)))
    block = LayerBlock("", kind, Kronecker(True, diagonal), (table,), sides, notes)
    spec = Embedding((block,), attends)
    collector = Collector(spec.attend_statistic if attends else spec.statistic)
    return LayerCall(spec, lambda: operands.inputs, collector)


def normalization(
    operands: Operands, feature_axes: Axes, normalized: Callable[[], jax.Array]
) -> LayerCall:
    """Scale and bias after a normalisation; ``normalized`` is what they are applied to."""
    ndim, kind = operands.inputs.ndim, operands.layer_type
    parameters = [
        Parameter(k, operands.shapes[k]) for k in ("scale", "bias") if k in operands.shapes
    ]
    note = "scale and bias of a normalisation are diagonal"
    blocks = [LayerBlock(p.path, kind, Diagonal(), (p,), (p.shape,), note) for p in parameters]
    spec = Normalization(tuple(blocks), tuple(axis % ndim - ndim for axis in feature_axes))
    return LayerCall(spec, normalized, Collector(spec.statistic))
