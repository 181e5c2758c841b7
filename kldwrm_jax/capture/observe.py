"""The identity that collects: cotangents of zero probes are a layer's statistics.

``observe`` is a JAX primitive and not a ``custom_vjp``, for the sake of ``vmap``. Where examples
are mapped one by one, the mapped axis joins the rows: the statistic is that of the batched model,
in one matrix product, also where a layer's input is the same for every example. Where the probes
are mapped too, copies of the layer stand side by side, and each has its own statistic. A ``vmap``
of the backward pass alone, over output directions, meets ordinary operations.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Probes = dict[str, jax.Array]
Statistic = Callable[[jax.Array, jax.Array, jax.Array | None], Probes]
RowsOf = Callable[[jax.Array], jax.Array]


def as_it_is(x: jax.Array) -> jax.Array:
    """The rows of an array whose features are its last axis."""
    return x


@dataclasses.dataclass(frozen=True)
class Mark:
    """What is collected from one call of a layer.

    Args:
      names: of the probes.
      weighted: whether weights are given.
      statistic: from rows of inputs, rows of output gradients and weights.
      rows_of_inputs: from a layer's operand.
      rows_of_outputs: from a layer's output.
      copies: axes in front that number copies of the layer, each with its own probes.
      examples: axes after them, that a ``vmap`` over examples has put there.
    """

    names: tuple[str, ...]
    weighted: bool
    statistic: Statistic
    rows_of_inputs: RowsOf
    rows_of_outputs: RowsOf
    copies: int = 0
    examples: int = 0

    def collect(self, inputs: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
        """The statistics of a call, and of all that it was mapped over."""
        rows_of_inputs, rows_of_outputs = self.rows_of_inputs, self.rows_of_outputs
        for _ in range(self.examples):
            rows_of_inputs, rows_of_outputs = jax.vmap(rows_of_inputs), jax.vmap(rows_of_outputs)

        def one_copy(inputs: jax.Array, g: jax.Array, weights: jax.Array | None) -> Probes:
            return self.statistic(rows_of_inputs(inputs), rows_of_outputs(g), weights)

        for _ in range(self.copies):
            one_copy = jax.vmap(one_copy)
        return one_copy(inputs, g, weights)


def observe(
    statistic: Statistic,
    z: jax.Array,
    inputs: jax.Array,
    probes: Probes,
    weights: jax.Array | None,
    rows_of_inputs: RowsOf = as_it_is,
    rows_of_outputs: RowsOf = as_it_is,
) -> jax.Array:
    """The identity on ``z``; cotangents of ``probes`` are ``statistic(inputs, dz, weights)``.

    Args:
      statistic: from rows of inputs and of output gradients, ``(examples, ..., features)``.
      z: a layer's output.
      inputs: the operand that the statistic wants.
      probes: zeros, by the names that the statistic gives.
      weights: of the samples, or None.
      rows_of_inputs: from the operand of one call to its rows.
      rows_of_outputs: from the output of one call to its rows.
    """
    cast = {name: x.dtype for name, x in probes.items() if jnp.finfo(x.dtype).bits < 32}
    if cast:
        raise ValueError(
            f"the probes beside a parameter were cast to {next(iter(cast.values()))} with it: cast "
            f"the parameter where it is used, kernel.astype(dtype), and not the tree of all of them"
        )
    names = tuple(sorted(probes))
    mark = Mark(names, weights is not None, statistic, rows_of_inputs, rows_of_outputs)
    others = [inputs] if weights is None else [inputs, weights]
    operands = [z, *(probes[name] for name in names), *map(jax.lax.stop_gradient, others)]
    return _observe.bind(*map(jnp.asarray, operands), mark=mark)


# Operands: the output, the probes, the input and, if any, the weights.
_observe = Primitive("kldwrm_observe")
_observe_linear = Primitive("kldwrm_observe_linear")  # the same, as a function of the tangents


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, mark: Mark) -> tuple[Any, Any]:
    split = 1 + len(mark.names)
    moved = map(ad.instantiate_zeros, tangents[:split])
    return (
        _observe.bind(*primals, mark=mark),
        _observe_linear.bind(*moved, *primals[split:], mark=mark),
    )


def _transpose(g: Any, *operands: Any, mark: Mark) -> list[Any]:
    split = 1 + len(mark.names)
    z, probes, rest = operands[0], operands[1:split], operands[split:]
    g = ad.instantiate_zeros(g)
    wanted = [ad.is_undefined_primal(probe) for probe in probes]
    seen = mark.collect(rest[0], g, rest[1] if mark.weighted else None) if any(wanted) else {}

    def cotangent(name: str, probe: Any, asked: bool) -> jax.Array | None:
        if not asked:
            return None
        if name not in seen:
            return jnp.zeros(probe.aval.shape, probe.aval.dtype)
        return seen[name].reshape(probe.aval.shape).astype(probe.aval.dtype)

    cotangents = [cotangent(*each) for each in zip(mark.names, probes, wanted, strict=True)]
    return [g if ad.is_undefined_primal(z) else None, *cotangents, *([None] * len(rest))]


def _batching_rule(primitive: Primitive) -> Callable[..., tuple[Any, int]]:
    def rule(operands: Sequence[Any], dims: Sequence[int | None], *, mark: Mark) -> tuple[Any, int]:
        split = 1 + len(mark.names)
        lengths = (x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        length = next(lengths)

        def mapped(x: jax.Array, dim: int | None, to: int) -> jax.Array:
            x = jnp.broadcast_to(x, (length, *x.shape)) if dim is None else x
            return jnp.moveaxis(x, dim or 0, to)

        if any(dim is not None for dim in dims[1:split]):
            moved = [mapped(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]
            mark = dataclasses.replace(mark, copies=mark.copies + 1)
            return primitive.bind(*moved, mark=mark), 0
        if mark.weighted and dims[-1] is not None:
            raise ValueError("weights are mapped by a vmap that does not map a layer's parameters")
        z, inputs = (mapped(operands[i], dims[i], mark.copies) for i in (0, split))
        mark_joined = dataclasses.replace(mark, examples=mark.examples + 1)
        joined = [z, *operands[1:split], inputs, *operands[split + 1 :]]
        return primitive.bind(*joined, mark=mark_joined), mark.copies

    return rule


def _first(z: Any, *others: Any, mark: Mark) -> Any:
    del others, mark
    return z


for _primitive in (_observe, _observe_linear):
    _primitive.def_impl(_first)
    _primitive.def_abstract_eval(_first)
    mlir.register_lowering(_primitive, lambda _, z, *others, mark: [z])
    batching.primitive_batchers[_primitive] = _batching_rule(_primitive)
ad.primitive_jvps[_observe] = _jvp
ad.primitive_transposes[_observe_linear] = _transpose
