"""``observe``: the identity on a layer's output that collects the layer's statistics.

A *probe* is a zero array, shaped like a statistic, that travels with a layer's parameters. The
cotangents of ``observe`` for the probes are the statistics: those of a whole network are one
vector-Jacobian product, under any ``scan``, ``remat`` or ``vmap``, summed over a layer's calls.

It is a primitive and not a ``custom_vjp`` because of ``vmap``. Where a ``vmap`` maps examples but
not the probes, the mapped axis joins the rows, as in the batched model: one matrix product, in
which an unmapped input counts once per example. Where the probes are mapped, each copy of the layer
gets its own statistic. A ``vmap`` of the backward pass only meets ordinary operations.

A model may itself take derivatives by its inputs. No probe has a tangent then, and each rule of the
primitive says which other product with the layer's kernel the derivative is::

    z = a W + b        observe(z; a)
    dz = da W          observe(dz; da), in the rule for jvp: the tangents are another row
    alpha = gamma W'   exchange(gamma), in the rule for the transpose: the layer backwards

``exchange`` is the identity on gamma, beside zeros shaped like a, which are added to alpha: the
cotangent of these zeros, when statistics are collected, is that of alpha. The tangent of
``exchange`` is ``exchange``, its transpose ``observe``: derivatives of derivatives follow.
"""

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kldwrm_jax.batch_axis import vary_like
from kldwrm_jax.curvature.layer_spec import Arrays, Use

ToRows = Callable[[jax.Array], jax.Array]


class Derivative(enum.Enum):
    """What the survey must know of the derivatives that a model takes."""

    BACKWARDS = enum.auto()  # by the inputs, in reverse mode
    BY_PARAMETERS = enum.auto()
    PAST_INPUTS = enum.auto()  # of a layer's output, by something that its inputs do not know of


Note = Callable[[Derivative], None]


@dataclasses.dataclass(frozen=True)
class Collector:
    """How the statistics of a call are computed from its operand and its output's cotangent."""

    # Of the rows of both, (examples, ..., features), of constants such as the weights, and of how
    # the parameters are used.
    statistic: Callable[[jax.Array, jax.Array, Mapping[str, jax.Array], Use], Arrays]
    input_rows: ToRows = lambda x: x  # from the operand of one call
    output_rows: ToRows = lambda z: z  # from the output of one call, and so from its cotangent


@dataclasses.dataclass(frozen=True)
class ObserveParams:
    """Static parameters of the primitives.

    The operands are ``z, *probes, inputs, *constants, *reference``, those of ``exchange`` are
    ``gamma, *probes, *constants, *reference``. The reference is nothing of the inputs of the value,
    beside a derivative: where a ``vmap`` does not map it, directions are mapped, not examples.
    """

    collector: Collector
    probes: tuple[str, ...]  # names
    constants: tuple[str, ...]  # names
    use: Use = Use.ALONE
    note: Note | None = None  # is told of derivatives
    copies: int = 0  # leading axes that number copies of the layer, each with its own probes
    examples: int = 0  # axes after them that a vmap over examples has added
    directions: int = 0  # axes after them that a vmap over a derivative's directions has added
    inputs: jax.ShapeDtypeStruct | None = None  # of exchange: the type of the layer's inputs

    def tell(self, derivative: Derivative) -> None:
        """Of a derivative that the model takes."""
        if self.note is not None:
            self.note(derivative)

    def split(self, operands: Sequence[Any]) -> tuple[Any, Sequence[Any], Any, Sequence[Any], Any]:
        """``z, probes, inputs, constants, reference``."""
        n = 1 + len(self.probes)
        m = n + 1 + len(self.constants)
        return operands[0], operands[1:n], operands[n], operands[n + 1 : m], operands[m:]

    def collect(self, inputs: jax.Array, g: jax.Array, constants: Sequence[Any]) -> Arrays:
        """The statistics of a call and of everything that it was mapped over."""
        input_rows, output_rows = self.collector.input_rows, self.collector.output_rows
        for _ in range(self.examples):
            input_rows, output_rows = jax.vmap(input_rows), jax.vmap(output_rows)

        def one_copy(inputs: jax.Array, g: jax.Array, constants: Arrays) -> Arrays:
            a, g = input_rows(inputs), output_rows(g)
            return self.collector.statistic(a, g, constants, self.use)

        one_copy = self._over_directions(one_copy) if self.directions else one_copy
        for _ in range(self.copies):
            one_copy = jax.vmap(one_copy)
        return one_copy(inputs, g, dict(zip(self.constants, constants, strict=True)))

    def _over_directions(self, statistics: Callable[..., Arrays]) -> Callable[..., Arrays]:
        """The sum of the statistics of every direction."""
        n = self.directions
        axes = tuple(range(self.examples, self.examples + n))

        def to_front(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, axes, tuple(range(n)))
            return x.reshape(-1, *x.shape[n:])

        def summed(inputs: jax.Array, g: jax.Array, constants: Arrays) -> Arrays:
            a, g = to_front(inputs), to_front(g)
            if self.use is Use.BACKWARDS:
                g, a = _merge_directions(g, a)
            else:
                a, g = _merge_directions(a, g)
            each = jax.vmap(statistics, in_axes=(0, 0, None))(a, g, constants)
            return jax.tree.map(lambda x: x.sum(axis=0), each)

        return summed

    def cotangents(self, probes: Sequence[Any], collected: Arrays) -> list[jax.Array | None]:
        """Those of the probes; None for one that needs none."""
        unexpected = {*collected} - {*self.probes}
        if unexpected:
            raise ValueError(
                "a layer is differentiated in another way than it was instrumented: call "
                "instrument with the arguments (train or eval mode, flags) that the oracle is given"
            )

        def cotangent(name: str, probe: Any) -> jax.Array | None:
            if not ad.is_undefined_primal(probe):
                return None
            shape, dtype = probe.aval.shape, probe.aval.dtype
            own = collected[name].astype(dtype) if name in collected else jnp.zeros(shape, dtype)
            return vary_like(own, probe.aval)

        return list(map(cotangent, self.probes, probes))


def _merge_directions(x: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows by direction and their cotangents, and one direction more for the sum of all.

    Directions that have the same cotangent are one row, ``sum_d x_d c' = (sum_d x_d) c'``: those of
    a Laplacian, of whose second derivatives only the sum is used. The others have no cotangent
    then, or, where they differ, the sum has none.
    """
    if len(c) == 1:
        return x, c
    live = _nonzero(x) & _nonzero(c)

    def total(rows: jax.Array) -> jax.Array:
        return jnp.tensordot(live.astype(rows.dtype), rows, 1, precision="highest")

    mean = total(c) / jnp.maximum(live.sum(), 1).astype(c.dtype)
    difference = jnp.abs(c - mean).max(axis=tuple(range(1, c.ndim)))
    rounding = 1e3 * jnp.finfo(c.dtype).eps * jnp.abs(mean).max()
    same = jnp.where(live, difference <= rounding, True).all()
    cotangents = jnp.concatenate([jnp.where(same, 0, c), jnp.where(same, mean, 0)[None]])
    return jnp.concatenate([x, total(x)[None]]), cotangents


def _nonzero(rows: jax.Array) -> jax.Array:
    """Of every direction, whether there is anything but zeros."""
    return (rows != 0).any(axis=tuple(range(1, rows.ndim)))


def observe(
    collector: Collector,
    z: jax.Array,
    inputs: jax.Array,
    probes: Mapping[str, jax.Array],
    constants: Mapping[str, jax.Array],
    note: Note | None = None,
) -> jax.Array:
    """The identity on ``z``; cotangents of ``probes`` are ``statistic(inputs, dz, constants)``.

    For a survey, ``note`` is told of the model's derivatives, and the probes are the parameters.
    """
    for x in probes.values() if note is None else ():
        if jnp.finfo(x.dtype).bits < 32:
            raise ValueError(
                f"the probes beside a parameter were cast to {x.dtype} with it: cast the parameter "
                f"where it is used, kernel.astype(dtype), instead of the whole tree of parameters"
            )
    params = ObserveParams(collector, tuple(sorted(probes)), tuple(sorted(constants)), note=note)
    fixed = (jax.lax.stop_gradient(constants[name]) for name in params.constants)
    operands = (z, *(probes[name] for name in params.probes), inputs, *fixed)
    return _observe.bind(*map(jnp.asarray, operands), params=params)


_observe = Primitive("kldwrm_observe")
_observe_linear = Primitive("kldwrm_observe_linear")  # linear in z and the probes, to be transposed
_exchange = Primitive("kldwrm_exchange")
_exchange_linear = Primitive("kldwrm_exchange_linear")  # linear in gamma and the probes


def _has_tangent(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero


def _observe_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: ObserveParams) -> Any:
    """The tangent is that of ``z``. Where statistics are collected, the probes' join it, so that
    the transpose can collect; where the model takes a derivative, it is observed itself.
    """
    _, probes, inputs, constants, reference = params.split(primals)
    dz, dprobes, da, _, _ = params.split(tangents)
    if any(map(_has_tangent, dprobes)) and params.note is None:
        moved = map(ad.instantiate_zeros, (dz, *dprobes))
        tangent = _observe_linear.bind(*moved, inputs, *constants, *reference, params=params)
        return _observe.bind(*primals, params=params), tangent
    if any(map(_has_tangent, dprobes)):
        params.tell(Derivative.BY_PARAMETERS)
    if not _has_tangent(dz) or not _has_tangent(da):  # no product with the kernel
        if _has_tangent(dz):
            params.tell(Derivative.PAST_INPUTS)
        return _observe.bind(*primals, params=params), dz
    value = Use.VALUE if params.use is Use.ALONE else params.use
    out = _observe.bind(*primals, params=dataclasses.replace(params, use=value))
    reference = reference or (_nothing_of(inputs, params),)
    operands = (dz, *probes, da, *constants, *reference)
    return out, _observe.bind(*operands, params=dataclasses.replace(params, use=Use.TANGENT))


def _nothing_of(inputs: jax.Array, params: ObserveParams) -> jax.Array:
    """An empty array, of the axes of copies, that depends on the inputs."""
    copies = inputs.shape[: params.copies]
    return jax.lax.stop_gradient(inputs).reshape(*copies, -1)[..., :0]


def _observe_transpose(g: Any, *operands: Any, params: ObserveParams) -> list[Any]:
    """Of a derivative that the model takes: the layer is used backwards."""
    z, probes, inputs, constants, reference = params.split(operands)
    rest = [None] * (len(constants) + len(reference))
    if type(g) is ad.Zero or not ad.is_undefined_primal(inputs):
        return [g if ad.is_undefined_primal(z) else None, *(None for _ in probes), None, *rest]
    like = jax.ShapeDtypeStruct(inputs.aval.shape, inputs.aval.dtype)
    params.tell(Derivative.BACKWARDS)
    params = dataclasses.replace(params, use=Use.BACKWARDS, inputs=like)
    operands = (g, *probes, *constants, *reference)
    gamma, zeros = _exchange.bind(*operands, params=params)
    return [gamma if ad.is_undefined_primal(z) else None, *(None for _ in probes), zeros, *rest]


def _observe_linear_transpose(g: Any, *operands: Any, params: ObserveParams) -> list[Any]:
    z, probes, inputs, constants, reference = params.split(operands)
    g = ad.instantiate_zeros(g)
    wanted = any(map(ad.is_undefined_primal, probes))
    collected = params.collect(inputs, g, constants) if wanted else {}
    rest = [None] * (1 + len(constants) + len(reference))
    own = g if ad.is_undefined_primal(z) else None
    return [own, *params.cotangents(probes, collected), *rest]


def _exchange_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: ObserveParams) -> Any:
    """As that of ``observe``; ``exchange`` is linear in gamma."""
    n = 1 + len(params.probes)
    out = _exchange.bind(*primals, params=params)
    if any(map(_has_tangent, tangents[1:n])) and params.note is None:
        moved = map(ad.instantiate_zeros, tangents[:n])
        return out, _exchange_linear.bind(*moved, primals[0], *primals[n:], params=params)
    if any(map(_has_tangent, tangents[1:n])):
        params.tell(Derivative.BY_PARAMETERS)
    if not _has_tangent(tangents[0]):
        return out, [jnp.zeros_like(x) for x in out]
    return out, _exchange.bind(tangents[0], *primals[1:], params=params)


def _exchange_transpose(cotangents: Any, *operands: Any, params: ObserveParams) -> list[Any]:
    """The backward product, backwards: ``observe`` with the cotangent of alpha as its inputs."""
    g, c = cotangents
    others = operands[1:]
    if _has_tangent(g) and _has_tangent(c):
        n = len(params.probes)
        forward = dataclasses.replace(params, use=Use.TANGENT, inputs=None)
        g = _observe.bind(g, *others[:n], c, *others[n:], params=forward)
    return [g, *(None for _ in others)]


def _exchange_linear_transpose(cotangents: Any, *operands: Any, params: ObserveParams) -> list[Any]:
    own, probes, gamma, constants, reference = params.split(operands)
    g, c = map(ad.instantiate_zeros, cotangents)
    wanted = any(map(ad.is_undefined_primal, probes))
    collected = params.collect(c, gamma, constants) if wanted else {}
    rest = [None] * (1 + len(constants) + len(reference))
    g = g if ad.is_undefined_primal(own) else None
    return [g, *params.cotangents(probes, collected), *rest]


def _batching_rule(primitive: Primitive, operands: Any, dims: Any, *, params: Any) -> Any:
    """Everything but probes, constants and the reference has the axes of examples."""
    length = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    own = 1 + len(params.probes) + (primitive is not _exchange)  # z, probes, inputs

    def mapped(x: jax.Array, dim: int | None, to: int) -> jax.Array:
        x = jnp.broadcast_to(x, (length, *x.shape)) if dim is None else x
        return jnp.moveaxis(x, dim or 0, to)

    def bound(at: int, operands: Sequence[jax.Array], **changed: int) -> Any:
        more = dataclasses.replace(params, **changed)
        if more.inputs is not None:
            shape = (*more.inputs.shape[:at], length, *more.inputs.shape[at:])
            like = jax.ShapeDtypeStruct(shape, more.inputs.dtype)
            more = dataclasses.replace(more, inputs=like)
        out = primitive.bind(*operands, params=more)
        return out, (at,) * len(out) if primitive.multiple_results else at

    if any(dim is not None for dim in dims[1 : 1 + len(params.probes)]):
        moved = [mapped(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]
        return bound(0, moved, copies=params.copies + 1)
    end = own + len(params.constants)
    if any(dim is not None for dim in dims[own:end]):
        names = ", ".join(params.constants)
        raise ValueError(f"{names} are mapped by a vmap that does not map a layer's parameters")
    over_examples = len(operands) == end or dims[end] is not None
    at = params.copies + (0 if over_examples else params.examples)
    spread = {0, *range(1 + len(params.probes), own)}
    moved = [mapped(x, dims[i], at) if i in spread else x for i, x in enumerate(operands)]
    if over_examples:
        # The reference has served: it is mapped by no axis but those of copies.
        moved[end:] = [x[(slice(None),) * dims[end] + (0,)] for x in moved[end:]]
        return bound(at, moved, examples=params.examples + 1)
    return bound(at, moved, directions=params.directions + 1)


def _first(z: Any, *others: Any, params: ObserveParams) -> Any:
    del others, params
    return z


def _with_zeros(gamma: Any, *others: Any, params: ObserveParams) -> list[Any]:
    del others
    assert params.inputs is not None
    return [gamma, jnp.zeros(params.inputs.shape, params.inputs.dtype)]


def _with_zeros_type(gamma: Any, *others: Any, params: ObserveParams) -> list[Any]:
    del others
    assert params.inputs is not None
    return [gamma, jax.core.ShapedArray(params.inputs.shape, params.inputs.dtype)]


for _primitive in (_observe, _observe_linear):
    _primitive.def_impl(_first)
    _primitive.def_abstract_eval(_first)
    mlir.register_lowering(_primitive, lambda _, z, *others, params: [z])
for _primitive in (_exchange, _exchange_linear):
    _primitive.multiple_results = True
    _primitive.def_impl(_with_zeros)
    _primitive.def_abstract_eval(_with_zeros_type)
    mlir.register_lowering(_primitive, mlir.lower_fun(_with_zeros, multiple_results=True))
for _primitive in (_observe, _observe_linear, _exchange, _exchange_linear):
    batching.primitive_batchers[_primitive] = functools.partial(_batching_rule, _primitive)
ad.primitive_jvps[_observe] = _observe_jvp
ad.primitive_jvps[_exchange] = _exchange_jvp
ad.primitive_transposes[_observe] = _observe_transpose
ad.primitive_transposes[_observe_linear] = _observe_linear_transpose
ad.primitive_transposes[_exchange] = _exchange_transpose
ad.primitive_transposes[_exchange_linear] = _exchange_linear_transpose


def tell_folx() -> None:
    """Tells folx, whose forward Laplacians a model may use, that ``observe`` is linear.

    It would see for itself that there is no second derivative, at the cost of a Hessian. Slopes and
    Laplacian of a layer's output are rows then, by the rule for jvp.
    """
    folx = sys.modules.get("folx")
    if folx is not None:
        linear = sys.modules["folx.api"].FunctionFlags.LINEAR
        folx.register_function(_observe, folx.wrap_forward_laplacian(_observe.bind, flags=linear))
