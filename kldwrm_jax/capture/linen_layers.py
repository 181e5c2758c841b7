"""How Flax Linen's layers are read.

Adding a layer type is adding a function here and its method to ``READERS``.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kldwrm_jax.capture import readings
from kldwrm_jax.capture.readings import Axes, Options, Reading, as_tuple

Reader = Callable[[nn.Module, inspect.BoundArguments, Options], Reading | str]


def _first(call: inspect.BoundArguments) -> jax.Array:
    return call.args[1]


def _dense(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.dense("Dense", options, _first(call), module.features, bias=module.use_bias)


def _dense_general(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.dense_general(
        "DenseGeneral",
        options,
        _first(call),
        as_tuple(module.features),
        as_tuple(module.axis),
        as_tuple(module.batch_dims),
        bias=module.use_bias,
    )


def _einsum(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading | str:
    equation = module.einsum_str or call.arguments["einsum_str"]
    return readings.einsum(
        "Einsum", options, _first(call), equation, tuple(module.shape), bias=module.use_bias
    )


def _with_kernel(layer: nn.Module, x: jax.Array, kernel: jax.Array, **changes: Any) -> jax.Array:
    """The layer itself, with another kernel and no bias."""
    other = layer.clone(
        parent=None,
        name=None,
        use_bias=False,
        dtype=None,
        param_dtype=jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
        **changes,
    )
    out: Any = other.apply({"params": {"kernel": kernel.astype(x.dtype)}}, x)
    return out


def _conv(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading | str:
    if isinstance(module, nn.ConvLocal):
        return "a ConvLocal shares no weights between places"
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    window = as_tuple(module.kernel_size)

    def cut(x: jax.Array) -> jax.Array:
        units = readings.window_units(window)
        return _with_kernel(module, x, units, features=units.shape[-1], feature_group_count=1)

    return readings.convolution(
        "Conv",
        options,
        _first(call),
        window,
        module.features,
        module.feature_group_count,
        cut,
        bias=module.use_bias,
    )


def _conv_transpose(
    module: nn.Module, call: inspect.BoundArguments, options: Options
) -> Reading | str:
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"

    def cut(x: jax.Array, kernel: jax.Array) -> jax.Array:
        features = kernel.shape[-2 if module.transpose_kernel else -1]
        return _with_kernel(module, x, kernel, features=features)

    return readings.transposed_convolution(
        "ConvTranspose",
        options,
        _first(call),
        as_tuple(module.kernel_size),
        module.features,
        cut,
        transpose_kernel=module.transpose_kernel,
        bias=module.use_bias,
    )


def _embed(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.table(
        "Embed", options, _first(call), module.num_embeddings, module.features, attends=False
    )


def _attend(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.table(
        "Embed", options, _first(call), module.num_embeddings, module.features, attends=True
    )


def _norm(features_of: Callable[[nn.Module], Axes], kind: str) -> Reader:
    def read(module: nn.Module, call: inspect.BoundArguments, options: Options) -> Reading:
        del options

        def normalised() -> jax.Array:
            off = {
                f"use_{name}": False for name in ("scale", "bias") if hasattr(module, f"use_{name}")
            }
            bare = module.clone(parent=None, name=None, **off)
            others = {k: v for k, v in module.variables.items() if k != "params"}
            return bare.apply(others, *call.args[1:], **call.kwargs, mutable=list(others))[0]

        used = [name for name in ("scale", "bias") if getattr(module, f"use_{name}", False)]
        return readings.normalization(kind, _first(call), features_of(module), used, normalised)

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
    _function(nn.LayerNorm.__call__): _norm(lambda m: as_tuple(m.feature_axes), "LayerNorm"),
    _function(nn.RMSNorm.__call__): _norm(lambda m: as_tuple(m.feature_axes), "RMSNorm"),
    _function(nn.InstanceNorm.__call__): _norm(lambda m: as_tuple(m.feature_axes), "InstanceNorm"),
    _function(nn.GroupNorm.__call__): _norm(lambda m: (-1,), "GroupNorm"),
    _function(nn.BatchNorm.__call__): _norm(lambda m: as_tuple(m.axis), "BatchNorm"),
}


@functools.cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a layer's method."""
    return inspect.signature(function)


# Wrappers whose layers compute with something else than the parameters that are stored.
REPARAMETRISATIONS = (nn.WeightNorm, nn.SpectralNorm)
