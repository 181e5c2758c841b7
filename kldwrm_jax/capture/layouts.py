"""What a mark's ``layout`` means: how its kernel multiplies its inputs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture import readings
from kldwrm_jax.capture.readings import Matrix, Options, Reading
from kldwrm_jax.capture.statistics import MatrixProduct

Layout = str | tuple[str, str, str]
Product = Callable[[jax.Array, jax.Array], jax.Array]

_EQUATIONS = {"io": "...i,io->...o", "oi": "...i,oi->...o"}


@dataclasses.dataclass(frozen=True)
class MarkedCall:
    """What a mark was given; ``kernel`` and ``bias`` are shapes."""

    kernel: tuple[int, ...]
    bias: tuple[int, ...] | None
    inputs: jax.Array
    outputs: jax.Array
    product: Product | None
    layout: Layout

    def misfit(self) -> ValueError:
        """The error of shapes that the layout does not allow."""
        return ValueError(
            f"layout={self.layout!r} does not fit inputs of shape {self.inputs.shape}, a kernel of "
            f"shape {self.kernel}"
            + (f", a bias of shape {self.bias}" if self.bias is not None else "")
            + f" and outputs of shape {self.outputs.shape}"
        )


def read(call: MarkedCall, options: Options) -> Reading:
    """The reading of a marked call; an error if its layout does not fit."""
    if call.layout == "lookup":
        return _table(call, options, (*call.inputs.shape, *call.kernel[1:]), attends=False)
    if call.layout == "attend":
        if call.inputs.shape[-1:] != call.kernel[1:]:
            raise call.misfit()
        return _table(call, options, (*call.inputs.shape[:-1], call.kernel[0]), attends=True)
    if call.layout == "scale":
        return _scale(call)
    reading = _einsum(call, options) if isinstance(call.layout, str) else _conv(call, options)
    columns = reading.role.observation
    assert isinstance(columns, MatrixProduct)
    width = columns.columns * (columns.groups or 1)
    if call.bias is not None and math.prod(call.bias) != width:
        raise call.misfit()
    return reading


def _table(
    call: MarkedCall, options: Options, expected: tuple[int, ...], *, attends: bool
) -> Reading:
    if call.bias is not None or len(call.kernel) != 2 or call.outputs.shape != expected:
        raise call.misfit()
    return readings.table("table", options, call.inputs, *call.kernel, attends=attends)


def _scale(call: MarkedCall) -> Reading:
    x, n = call.inputs, len(call.kernel)
    fits = x.shape[x.ndim - n :] == call.kernel and call.bias in (None, call.kernel)
    if not fits or call.outputs.shape != x.shape:
        raise call.misfit()
    parts = ["scale"] if call.bias is None else ["scale", "bias"]
    return readings.normalization("scale", x, tuple(range(-n, 0)), parts, lambda: x)


def _einsum(call: MarkedCall, options: Options) -> Reading:
    assert isinstance(call.layout, str)
    equation = _EQUATIONS.get(call.layout, call.layout)
    if equation.count("->") != 1 or equation.count(",") != 1:
        raise ValueError(
            f"layout must be 'io', 'oi', 'lookup', 'attend', 'scale', an einsum of inputs and "
            f"kernel such as 'btd,dhk->bthk', or a convolution's dimension numbers, got "
            f"{call.layout!r}"
        )
    kernel = jax.ShapeDtypeStruct(call.kernel, call.inputs.dtype)
    try:
        out = jax.eval_shape(lambda a, w: jnp.einsum(equation, a, w), call.inputs, kernel)
    except (TypeError, ValueError) as error:
        raise call.misfit() from error
    if out.shape != call.outputs.shape:
        raise call.misfit()
    biased = call.bias is not None
    reading = readings.einsum("product", options, call.inputs, equation, call.kernel, bias=biased)
    if isinstance(reading, str):
        raise ValueError(f"layout={call.layout!r}: {reading}")
    return reading


def _conv(call: MarkedCall, options: Options) -> Reading:
    numbers, product = call.layout, call.product
    if isinstance(numbers, str) or not _are_dimension_numbers(numbers):
        raise ValueError(
            f"layout must be three strings as in ('NHWC', 'HWIO', 'NHWC') for a convolution, got "
            f"{numbers!r}"
        )
    if product is None:
        raise ValueError(
            "a convolution is marked with the function that computes it: kw.tag(kernel, x, "
            "lambda x, w: jax.lax.conv_general_dilated(x, w, ...), layout=dimension_numbers)"
        )
    left, right, out = numbers
    batch, spatial = left.count("N"), [c for c in left if c not in "NC"]

    def last(spec: str, channels: str) -> tuple[int, ...]:
        """The order that puts examples first, then places, then channels."""
        return tuple(spec.index(c) for c in ["N"] * batch + spatial + [channels])

    to_last, out_to_last = last(left, "C"), last(out, "C")
    kernel_order = tuple(right.index(c) for c in [*spatial, "I", "O"])
    if [len(left), len(right), len(out)] != [
        call.inputs.ndim,
        len(call.kernel),
        call.outputs.ndim,
    ] or call.outputs.shape[out.index("C")] != call.kernel[right.index("O")]:
        raise call.misfit()
    channels, depth = call.inputs.shape[left.index("C")], call.kernel[right.index("I")]
    if channels != depth:
        raise ValueError(
            f"layout={numbers!r}: a kernel for {depth} channels and inputs of {channels}: grouped "
            f"convolutions cannot be marked; leave them without a mark, and they get a diagonal "
            f"block"
        )
    window = tuple(call.kernel[right.index(c)] for c in spatial)
    units = readings.window_units(window).transpose(_inverse(kernel_order))

    def cut_one(x: jax.Array) -> jax.Array:
        x = x.transpose(_inverse(to_last))
        return product(x, units.astype(x.dtype)).transpose(out_to_last)

    transposed = jax.ShapeDtypeStruct(
        tuple(call.inputs.shape[axis] for axis in to_last), call.inputs.dtype
    )
    channels_last = readings.convolution(
        "convolution",
        options,
        transposed,
        window,
        call.kernel[right.index("O")],
        groups=1,
        cut=jax.vmap(cut_one),
        bias=call.bias is not None,
    )
    matrix = Matrix(call.kernel, rows=kernel_order[:-1], columns=kernel_order[-1:])
    role = channels_last.role
    return dataclasses.replace(
        channels_last,
        role=dataclasses.replace(role, matrices=role.matrices | {"kernel": matrix}),
        inputs=lambda: call.inputs,
        rows_of_inputs=lambda a: channels_last.rows_of_inputs(a.transpose(to_last)),
        rows_of_outputs=lambda z: z.transpose(out_to_last),
    )


def _are_dimension_numbers(layout: Any) -> bool:
    if len(layout) != 3 or not all(isinstance(spec, str) for spec in layout):
        return False
    left, right, out = layout
    places = {*left} - {*"NC"}
    return (
        all(len({*spec}) == len(spec) for spec in layout)
        and {*right} == places | {*"IO"}
        and {*left} == {*out} >= {"C"}
    )


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
