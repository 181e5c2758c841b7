"""How Flax NNX's layers are read.

Adding a layer type is adding a function here and its methods to ``READERS``. A reader looks at a
module only while it is called: nothing that outlives the call may hold its variables.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from kldwrm_jax.capture import readings
from kldwrm_jax.capture.readings import Axes, Options, Reading, as_tuple

Reader = Callable[[nnx.Module, inspect.BoundArguments, Options], Reading | str]


def _first(call: inspect.BoundArguments) -> jax.Array:
    return call.args[1]


def _linear(module: Any, call: inspect.BoundArguments, options: Options) -> Reading:
    bias = module.bias is not None
    return readings.dense("Linear", options, _first(call), module.out_features, bias=bias)


def _linear_general(module: Any, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.dense_general(
        "LinearGeneral",
        options,
        _first(call),
        tuple(module.out_features),
        tuple(module.axis),
        tuple(module.batch_axis),
        bias=module.bias is not None,
    )


def _einsum(module: Any, call: inspect.BoundArguments, options: Options) -> Reading | str:
    equation = call.arguments["einsum_str"] or module.einsum_str
    return readings.einsum(
        "Einsum",
        options,
        _first(call),
        equation,
        tuple(module.kernel_shape),
        bias=module.bias is not None,
    )


def _with_kernel(
    layer: Any, x: jax.Array, kernel: jax.Array, features: int, settings: dict[str, Any]
) -> jax.Array:
    """A layer of this type and these settings, with this kernel and no bias."""
    made = layer(
        x.shape[-1],
        features,
        **settings,
        use_bias=False,
        kernel_init=lambda *_: kernel.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        rngs=nnx.Rngs(0),
    )
    return made(x)


def _conv(module: Any, call: inspect.BoundArguments, options: Options) -> Reading | str:
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    window = as_tuple(module.kernel_size)
    names = ("strides", "padding", "input_dilation", "kernel_dilation", "conv_general_dilated")
    settings = {"kernel_size": window} | {name: getattr(module, name) for name in names}

    def cut(x: jax.Array) -> jax.Array:
        units = readings.window_units(window)
        return _with_kernel(nnx.Conv, x, units, units.shape[-1], settings)

    return readings.convolution(
        "Conv",
        options,
        _first(call),
        window,
        module.out_features,
        module.feature_group_count,
        cut,
        bias=module.bias is not None,
    )


def _conv_transpose(module: Any, call: inspect.BoundArguments, options: Options) -> Reading | str:
    if module.mask is not None:
        return "a masked convolution is no matrix product with its kernel"
    window = as_tuple(module.kernel_size)
    names = ("strides", "padding", "kernel_dilation", "transpose_kernel")
    settings = {"kernel_size": window} | {name: getattr(module, name) for name in names}

    def cut(x: jax.Array, kernel: jax.Array) -> jax.Array:
        features = kernel.shape[-2 if settings["transpose_kernel"] else -1]
        return _with_kernel(nnx.ConvTranspose, x, kernel, features, settings)

    return readings.transposed_convolution(
        "ConvTranspose",
        options,
        _first(call),
        window,
        module.out_features,
        cut,
        transpose_kernel=module.transpose_kernel,
        bias=module.bias is not None,
    )


def _embed(module: Any, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.table(
        "Embed", options, _first(call), module.num_embeddings, module.features, attends=False
    )


def _attend(module: Any, call: inspect.BoundArguments, options: Options) -> Reading:
    return readings.table(
        "Embed", options, _first(call), module.num_embeddings, module.features, attends=True
    )


def _norm(layer: type[nnx.Module], features_of: Callable[[Any], Axes]) -> dict[str, Reader]:
    def read(module: Any, call: inspect.BoundArguments, options: Options) -> Reading:
        del options
        used = [name for name in ("scale", "bias") if getattr(module, name, None) is not None]

        def normalised() -> jax.Array:
            bare = nnx.clone(module)
            for name in used:
                setattr(bare, name, None)
            return layer.__call__(bare, *call.args[1:], **call.kwargs)

        return readings.normalization(
            layer.__name__, _first(call), features_of(module), used, normalised
        )

    return {"__call__": read}


READERS: dict[type[nnx.Module], dict[str, Reader]] = {
    nnx.Linear: {"__call__": _linear},
    nnx.LinearGeneral: {"__call__": _linear_general},
    nnx.Einsum: {"__call__": _einsum},
    nnx.Conv: {"__call__": _conv},
    nnx.ConvTranspose: {"__call__": _conv_transpose},
    nnx.Embed: {"__call__": _embed, "attend": _attend},
    nnx.LayerNorm: _norm(nnx.LayerNorm, lambda m: as_tuple(m.feature_axes)),
    nnx.RMSNorm: _norm(nnx.RMSNorm, lambda m: as_tuple(m.feature_axes)),
    nnx.InstanceNorm: _norm(nnx.InstanceNorm, lambda m: as_tuple(m.feature_axes)),
    nnx.GroupNorm: _norm(nnx.GroupNorm, lambda m: (-1,)),
    nnx.BatchNorm: _norm(nnx.BatchNorm, lambda m: as_tuple(m.axis)),
}

# Wrappers whose layers compute with something else than the parameters that are stored.
REPARAMETRISATIONS = (nnx.WeightNorm, nnx.SpectralNorm)


def mixes_examples(module: Any, call: inspect.BoundArguments) -> bool:
    """Whether a call makes examples depend on each other."""
    if not isinstance(module, nnx.BatchNorm):
        return False
    asked = call.arguments.get("use_running_average")
    return not (module.use_running_average if asked is None else asked)
