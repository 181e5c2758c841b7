"""``observe``: the identity on a layer's output that collects the layer's statistics.

A *probe* is a zero array, shaped like a statistic, that travels with a layer's parameters. The
cotangents of ``observe`` for the probes are the statistics: those of a whole network are one
vector-Jacobian product, under any ``scan``, ``remat`` or ``vmap``, summed over a layer's calls.

It is a primitive and not a ``custom_vjp`` because of ``vmap``. Where a ``vmap`` maps examples but
not the probes, the mapped axis joins the rows, as in the batched model: one matrix product, in
which an unmapped input counts once per example. Where the probes are mapped, each copy of the layer
gets its own statistic. A ``vmap`` of the backward pass only meets ordinary operations.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kldwrm_jax.batch_axis import vary_like
from kldwrm_jax.curvature.layer_spec import Arrays

ToRows = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Collector:
    """How the statistics of a call are computed from its operand and its output's cotangent."""

    # Of the rows of both, (examples, ..., features), and of constants such as the weights.
    statistic: Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], Arrays]
    input_rows: ToRows = lambda x: x  # from the operand of one call
    output_rows: ToRows = lambda z: z  # from the output of one call, and so from its cotangent


@dataclasses.dataclass(frozen=True)
class ObserveParams:
    """Static parameters of the primitive, whose operands are z, *probes, inputs, *constants."""

    collector: Collector
    probes: tuple[str, ...]  # names
    constants: tuple[str, ...]  # names
    copies: int = 0  # leading axes that number copies of the layer, each with its own probes
    examples: int = 0  # axes after them that a vmap over examples has added

    def split(self, operands: Sequence[Any]) -> tuple[Any, Sequence[Any], Any, Sequence[Any]]:
        """``z, probes, inputs, constants``."""
        n = 1 + len(self.probes)
        return operands[0], operands[1:n], operands[n], operands[n + 1 :]

    def collect(self, inputs: jax.Array, g: jax.Array, constants: Sequence[Any]) -> Arrays:
        """The statistics of a call and of everything that it was mapped over."""
        input_rows, output_rows = self.collector.input_rows, self.collector.output_rows
        for _ in range(self.examples):
            input_rows, output_rows = jax.vmap(input_rows), jax.vmap(output_rows)

        def one_copy(inputs: jax.Array, g: jax.Array, constants: Arrays) -> Arrays:
            return self.collector.statistic(input_rows(inputs), output_rows(g), constants)

        for _ in range(self.copies):
            one_copy = jax.vmap(one_copy)
        return one_copy(inputs, g, dict(zip(self.constants, constants, strict=True)))


def observe(
    collector: Collector,
    z: jax.Array,
    inputs: jax.Array,
    probes: Mapping[str, jax.Array],
    constants: Mapping[str, jax.Array],
) -> jax.Array:
    """The identity on ``z``; cotangents of ``probes`` are ``statistic(inputs, dz, constants)``."""
    for x in probes.values():
        if jnp.finfo(x.dtype).bits < 32:
            raise ValueError(
                f"the probes beside a parameter were cast to {x.dtype} with it: cast the parameter "
                f"where it is used, kernel.astype(dtype), instead of the whole tree of parameters"
            )
    params = ObserveParams(collector, tuple(sorted(probes)), tuple(sorted(constants)))
    fixed = (inputs, *(constants[name] for name in params.constants))
    operands = (z, *(probes[name] for name in params.probes), *map(jax.lax.stop_gradient, fixed))
    return _observe.bind(*map(jnp.asarray, operands), params=params)


_observe = Primitive("kldwrm_observe")
_observe_linear = Primitive("kldwrm_observe_linear")  # linear in z and the probes, to be transposed


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: ObserveParams) -> Any:
    """The tangent is that of ``z``; the probes' join it so that the transpose can collect.

    ``observe`` stops the gradient of the inputs, so they have no tangent here. A derivative by the
    model's own input (no probe has a tangent) would be another row: ``observe(dz, probes, da)``.
    """
    _, _, inputs, constants = params.split(primals)
    dz, dprobes, _, _ = params.split(tangents)
    moved = map(ad.instantiate_zeros, (dz, *dprobes))
    tangent = _observe_linear.bind(*moved, inputs, *constants, params=params)
    return _observe.bind(*primals, params=params), tangent


def _transpose(g: Any, *operands: Any, params: ObserveParams) -> list[Any]:
    z, probes, inputs, constants = params.split(operands)
    g = ad.instantiate_zeros(g)
    wanted = any(map(ad.is_undefined_primal, probes))
    collected = params.collect(inputs, g, constants) if wanted else {}

    def cotangent(name: str, probe: Any) -> jax.Array | None:
        if not ad.is_undefined_primal(probe):
            return None
        shape, dtype = probe.aval.shape, probe.aval.dtype
        own = collected[name].astype(dtype) if name in collected else jnp.zeros(shape, dtype)
        return vary_like(own, probe.aval)

    cotangents = map(cotangent, params.probes, probes)
    return [g if ad.is_undefined_primal(z) else None, *cotangents, None, *(None for _ in constants)]


def _batching_rule(primitive: Primitive, operands: Any, dims: Any, *, params: Any) -> Any:
    length = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def mapped(x: jax.Array, dim: int | None, to: int) -> jax.Array:
        x = jnp.broadcast_to(x, (length, *x.shape)) if dim is None else x
        return jnp.moveaxis(x, dim or 0, to)

    z, probes, inputs, constants = params.split(operands)
    z_dim, probe_dims, inputs_dim, constant_dims = params.split(dims)
    if any(dim is not None for dim in probe_dims):
        moved = [mapped(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]
        return primitive.bind(
            *moved, params=dataclasses.replace(params, copies=params.copies + 1)
        ), 0
    if any(dim is not None for dim in constant_dims):
        names = ", ".join(params.constants)
        raise ValueError(f"{names} are mapped by a vmap that does not map a layer's parameters")
    at = params.copies
    z, inputs = mapped(z, z_dim, at), mapped(inputs, inputs_dim, at)
    more = dataclasses.replace(params, examples=params.examples + 1)
    return primitive.bind(z, *probes, inputs, *constants, params=more), at


def _first(z: Any, *others: Any, params: ObserveParams) -> Any:
    del others, params
    return z


for _primitive in (_observe, _observe_linear):
    _primitive.def_impl(_first)
    _primitive.def_abstract_eval(_first)
    mlir.register_lowering(_primitive, lambda _, z, *others, params: [z])
    batching.primitive_batchers[_primitive] = functools.partial(_batching_rule, _primitive)
ad.primitive_jvps[_observe] = _jvp
ad.primitive_transposes[_observe_linear] = _transpose
