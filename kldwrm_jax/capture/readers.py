"""How the layers of Flax are read: Linen's and NNX's, from one table.

To add a layer type, write a function from its :class:`ModuleCall` to a
:class:`~kldwrm_jax.capture.layer_call.LayerCall`, or to a string that says why the layer has no
Kronecker block, and enter it in ``TABLE``.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from kldwrm_jax.capture import layer_call
from kldwrm_jax.capture.layer_call import LayerCall, Operands


@dataclasses.dataclass(frozen=True)
class ModuleCall(Operands):
    """A call of a method of a Flax module.

    What a reader keeps for the backward pass must not hold variables of an NNX module.
    """

    module: Any
    bound: inspect.BoundArguments
    without_affine: Callable[[], jax.Array]  # the output of this call without scale and bias


Reader = Callable[[ModuleCall], LayerCall | str]


def _as_tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _dense_general(call: ModuleCall) -> LayerCall | str:
    def labels_of(axes: Any) -> str:  # sorted, as Flax does
        return "".join(labels[i] for i in sorted(axis % len(labels) for axis in _as_tuple(axes)))

    labels = "abcdefghijklm"[: call.inputs.ndim]
    linen = isinstance(call.module, nn.Module)
    batch = labels_of(call.module.batch_dims if linen else call.module.batch_axis)
    inputs = labels_of(call.module.axis)
    features = "nopqrstuvwxyz"[: len(call.shapes["kernel"]) - len(batch + inputs)]
    rest = "".join(c for c in labels if c not in batch + inputs)
    return layer_call.einsum(call, f"{labels},{batch}{inputs}{features}->{batch}{rest}{features}")


def _einsum(call: ModuleCall) -> LayerCall | str:
    return layer_call.einsum(call, call.bound.arguments["einsum_str"] or call.module.einsum_str)


_SETTINGS = (
    *("kernel_size", "strides", "padding", "input_dilation", "kernel_dilation"),
    *("transpose_kernel", "conv_general_dilated", "conv_general_dilated_cls"),
)


def _convolution(layer: Callable[..., nn.Module], call: ModuleCall) -> LayerCall | str:
    """Of either library: a convolution with another kernel is computed by Linen's layer."""
    module: Any = call.module
    if isinstance(module, nn.ConvLocal):
        return "a ConvLocal shares no weights between places"
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    settings = {name: getattr(module, name) for name in _SETTINGS if hasattr(module, name)}
    transposed = settings.get("transpose_kernel", False)

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        features = kernel.shape[-2 if transposed else -1]
        # Flax runs the initializer to compare shapes: a normal one would be compiled for that.
        own: Any = {"precision": jax.lax.Precision.HIGHEST, "kernel_init": nn.initializers.zeros}
        bare = layer(features=features, use_bias=False, **own, **settings)
        out: Any = bare.apply({"params": {"kernel": kernel}}, x)
        return out

    if layer is nn.ConvTranspose:
        return layer_call.transposed_convolution(call, convolve, transpose_kernel=transposed)
    units = layer_call.window_units(call.shapes["kernel"][:-2])
    return layer_call.convolution(
        call, module.feature_group_count, lambda x: convolve(x, jnp.asarray(units, x.dtype))
    )


def _norm(call: ModuleCall) -> LayerCall:
    axes = _as_tuple(getattr(call.module, "feature_axes", -1))
    return layer_call.normalization(call, axes, call.without_affine)


def _batch_norm(call: ModuleCall) -> LayerCall:
    given = call.bound.arguments["use_running_average"]
    averages = call.module.use_running_average if given is None else given
    read = layer_call.normalization(call, _as_tuple(call.module.axis), call.without_affine)
    return dataclasses.replace(read, mixes_examples=not averages)


def _with_own_product(read: Reader) -> Reader:
    """A reader of products that a layer may compute by a ``dot_general`` of its own."""
    note = "its own dot_general is taken for a matrix product"

    def noted(call: ModuleCall) -> LayerCall | str:
        made, module = read(call), call.module
        plain = module.dot_general in (None, jax.lax.dot_general)
        if isinstance(made, str) or (plain and getattr(module, "dot_general_cls", None) is None):
            return made
        blocks = (
            dataclasses.replace(block, note="; ".join(filter(None, (block.note, note))))
            for block in made.spec.blocks
        )
        return dataclasses.replace(made, spec=dataclasses.replace(made.spec, blocks=tuple(blocks)))

    return noted


_dense = functools.partial(layer_call.einsum, equation="...i,io->...o")
_conv = functools.partial(_convolution, nn.Conv)
_conv_transpose = functools.partial(_convolution, nn.ConvTranspose)
_embed = functools.partial(layer_call.embedding, attends=False)
_attend = functools.partial(layer_call.embedding, attends=True)

TABLE: tuple[tuple[Reader, str, type[nn.Module], type[nnx.Module]], ...] = (
    (_with_own_product(_dense), "__call__", nn.Dense, nnx.Linear),
    (_with_own_product(_dense_general), "__call__", nn.DenseGeneral, nnx.LinearGeneral),
    (_einsum, "__call__", nn.Einsum, nnx.Einsum),
    (_conv, "__call__", nn.Conv, nnx.Conv),
    (_conv_transpose, "__call__", nn.ConvTranspose, nnx.ConvTranspose),
    (_embed, "__call__", nn.Embed, nnx.Embed),
    (_attend, "attend", nn.Embed, nnx.Embed),
    (_norm, "__call__", nn.LayerNorm, nnx.LayerNorm),
    (_norm, "__call__", nn.RMSNorm, nnx.RMSNorm),
    (_norm, "__call__", nn.InstanceNorm, nnx.InstanceNorm),
    (_norm, "__call__", nn.GroupNorm, nnx.GroupNorm),
    (_batch_norm, "__call__", nn.BatchNorm, nnx.BatchNorm),
)

# Wrappers whose layers compute with something other than the parameters that are stored.
REPARAMETRISATIONS = (nn.WeightNorm, nn.SpectralNorm, nnx.WeightNorm, nnx.SpectralNorm)


class LayerMethod(NamedTuple):
    """A method that is a layer, and how its calls are read."""

    read: Reader
    name: str
    layer: type

    def bind(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The arguments of a call, defaults included; the second are the inputs."""
        bound = _signature(getattr(self.layer, self.name)).bind(module, *args, **kwargs)
        bound.apply_defaults()
        return bound


_signature = functools.cache(inspect.signature)

# Linen's methods by their functions, so that a subclass that calls its parent is its parent.
LINEN = {
    inspect.unwrap(getattr(layer, name)): LayerMethod(read, name, layer)
    for read, name, layer, _ in TABLE
}
NNX = {
    layer: [LayerMethod(read, name, layer) for read, name, _, own in TABLE if own is layer]
    for *_, layer in TABLE
}
