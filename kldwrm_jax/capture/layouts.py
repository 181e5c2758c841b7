"""What the ``layout`` of a tag means: how its kernel multiplies its inputs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.capture import layer_call
from kldwrm_jax.capture.layer_call import LayerCall, Operands
from kldwrm_jax.curvature.layer_spec import Shape
from kldwrm_jax.curvature.parameters import MatrixView

Layout = str | tuple[str, str, str]
Product = Callable[[jax.Array, jax.Array], jax.Array]

_EQUATIONS = {"io": "...i,io->...o", "oi": "...i,oi->...o"}


def kernel_name(layout: Layout) -> str:
    """The name of the tagged parameter within a layer of this layout."""
    return {"lookup": "embedding", "attend": "embedding", "scale": "scale"}.get(
        str(layout), "kernel"
    )


def layer_type(layout: Layout) -> str:
    """The kind of a layer of this layout, as shown in the table of layers."""
    types = {"embedding": "table", "scale": "scale"}
    return types.get(kernel_name(layout), "product" if isinstance(layout, str) else "convolution")


@dataclasses.dataclass(frozen=True)
class TaggedCall(Operands):
    """What a tag was given."""

    outputs: jax.Array
    product: Product | None  # computes the outputs from inputs and kernel
    layout: Layout

    @property
    def kernel(self) -> Shape:
        """The shape of the tagged parameter."""
        return self.shapes[kernel_name(self.layout)]

    @property
    def bias(self) -> Shape | None:
        """The shape of the bias."""
        return self.shapes.get("bias")

    def misfit(self) -> ValueError:
        """The error of shapes that the layout does not allow."""
        bias = "" if self.bias is None else f", a bias of shape {self.bias}"
        return ValueError(
            f"layout={self.layout!r} does not fit inputs of shape {self.inputs.shape}, a kernel of "
            f"shape {self.kernel}{bias} and outputs of shape {self.outputs.shape}"
        )


def read(call: TaggedCall) -> LayerCall:
    """A tagged call as a call of a layer; an error if its layout does not fit."""
    if call.layout in ("lookup", "attend"):
        return _table(call)
    if call.layout == "scale":
        return _scale(call)
    if isinstance(call.layout, str):
        made = _einsum(call, call.layout)
    else:
        made = _convolution(call, call.layout)
    kernel = made.spec.blocks[0].parameters[0].view
    width = math.prod(kernel.groups) * kernel.outputs
    if call.bias is not None and math.prod(call.bias) != width:
        raise call.misfit()
    return made


def _table(call: TaggedCall) -> LayerCall:
    attends, samples = call.layout == "attend", call.inputs.shape
    if call.bias is not None or len(call.kernel) != 2:
        raise call.misfit()
    vocabulary, features = call.kernel
    expected = (*samples[:-1], vocabulary) if attends else (*samples, features)
    if call.outputs.shape != expected or (attends and samples[-1:] != (features,)):
        raise call.misfit()
    return layer_call.embedding(call, attends=attends)


def _scale(call: TaggedCall) -> LayerCall:
    x, n = call.inputs, len(call.kernel)
    fits = x.shape[x.ndim - n :] == call.kernel and call.bias in (None, call.kernel)
    if not fits or call.outputs.shape != x.shape:
        raise call.misfit()
    return layer_call.normalization(call, tuple(range(-n, 0)), lambda: x)


def _einsum(call: TaggedCall, layout: str) -> LayerCall:
    equation = _EQUATIONS.get(layout, layout)
    if equation.count("->") != 1 or equation.count(",") != 1:
        raise ValueError(
            f"layout must be 'io', 'oi', 'lookup', 'attend', 'scale', an einsum of inputs and "
            f"kernel such as 'btd,dhk->bthk', or a convolution's dimension numbers, got {layout!r}"
        )
    kernel = jax.ShapeDtypeStruct(call.kernel, call.inputs.dtype)
    try:
        out = jax.eval_shape(lambda a, w: jnp.einsum(equation, a, w), call.inputs, kernel)
    except (TypeError, ValueError) as error:
        raise call.misfit() from error
    if out.shape != call.outputs.shape:
        raise call.misfit()
    made = layer_call.einsum(call, equation)
    if isinstance(made, str):
        raise ValueError(f"layout={layout!r}: {made}")
    return made


def _convolution(call: TaggedCall, numbers: tuple[str, str, str]) -> LayerCall:
    """The convolution with its axes moved to (examples, places, channels)."""
    product = call.product
    if not _are_dimension_numbers(numbers):
        raise ValueError(
            f"layout must be three strings as in ('NHWC', 'HWIO', 'NHWC') for a convolution, got "
            f"{numbers!r}"
        )
    if product is None:
        raise ValueError(
            "a convolution is tagged with the function that computes it: kw.tag(kernel, x, "
            "lambda x, w: jax.lax.conv_general_dilated(x, w, ...), layout=dimension_numbers)"
        )
    left, right, out = numbers
    ranks = (call.inputs.ndim, len(call.kernel), call.outputs.ndim)
    if ranks != tuple(map(len, numbers)):
        raise call.misfit()
    if call.outputs.shape[out.index("C")] != call.kernel[right.index("O")]:
        raise call.misfit()
    places = "".join(c for c in left if c not in "NC")
    last = f"{'N' if 'N' in left else ''}{places}C"
    kernel_axes = tuple(right.index(c) for c in f"{places}IO")
    kernel = tuple(call.kernel[axis] for axis in kernel_axes)
    channels = call.inputs.shape[left.index("C")]
    if channels != kernel[-2]:
        raise ValueError(
            f"layout={numbers!r}: the kernel is for {kernel[-2]} channels and the inputs have "
            f"{channels}. Grouped convolutions cannot be tagged; without a tag they get a diagonal "
            f"block"
        )
    units = np.einsum(f"{places}IO->{right}", layer_call.window_units(kernel[:-2]))

    def patches(x: jax.Array) -> jax.Array:
        z = product(jnp.einsum(f"{last}->{left}", x), jnp.asarray(units, x.dtype))
        return jnp.einsum(f"{out}->{last}", z)

    rows = layer_call.patch_rows(jax.vmap(patches), kernel[:-2])
    return layer_call.matrix_product(
        call,
        MatrixView(call.kernel, (), kernel_axes[:-1], kernel_axes[-1:]),
        MatrixView(kernel[-1:], output_axes=(0,)),
        lambda x: rows(jnp.einsum(f"{left}->{last}", x)),
        lambda z: jnp.einsum(f"{out}->{last}", z),
    )


def _are_dimension_numbers(numbers: Any) -> bool:
    if len(numbers) != 3 or not all(isinstance(spec, str) for spec in numbers):
        return False
    left, right, out = numbers
    places = {*left} - {*"NC"}
    return (
        all(len({*spec}) == len(spec) for spec in numbers)
        and {*right} == places | {*"IO"}
        and {*left} == {*out} >= {"C"}
    )
