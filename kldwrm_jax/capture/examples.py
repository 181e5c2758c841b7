"""The examples of a batch: which arguments of a model hold them, and how some are taken."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.independence import keeps_examples_apart
from kldwrm_jax.capture.model import Model
from kldwrm_jax.curvature.layer_spec import Shape

Take = Callable[[jax.Array], jax.Array]  # of some entries along the first axis


def check_batched(batched: Any, args: tuple) -> Any:
    """The argument ``batched`` of ``instrument``; an error if it does not fit the arguments."""
    batched = tuple(batched) if isinstance(batched, list) else batched
    if batched is None or isinstance(batched, bool):
        return batched
    wanted = (
        "batched must be True, False, or a tuple with an entry for every positional argument of "
        "the model (but a function's parameters): True or False, or a tree of them for a tree of "
        "arrays, such as batched=(True, False)"
    )
    if not isinstance(batched, tuple) or len(batched) != len(args):
        raise ValueError(f"{wanted}; there are {len(args)} arguments, got {batched!r}")
    for i, (own, argument) in enumerate(zip(batched, args, strict=True)):
        flags = jax.tree.leaves(own, is_leaf=lambda x: x is None)
        try:
            _spread(own, argument)
        except ValueError as error:
            raise ValueError(
                f"{wanted}; batched[{i}] is {own!r}, which is no prefix of its argument, "
                f"{jax.tree.structure(argument)} ({error})"
            ) from error
        if not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"{wanted}; batched[{i}] is {own!r}")
    return batched


def _spread(prefix: Any, tree: Any) -> Any:
    return jax.tree.map(lambda flag, own: jax.tree.map(lambda _: flag, own), prefix, tree)


def cut_call(call: Call, takes: Mapping[int, Take], batched: Any = None) -> Call:
    """The call with some examples of a batch.

    Args:
      call: the whole batch's.
      takes: takes them, by the length of the axis.
      batched: the arguments that have examples, as ``instrument`` is told; None for all whose first
        axis has one of the lengths.
    """
    if batched is None:
        args, kwargs = jax.tree.map(lambda x: cut(x, takes), (call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)
    flags = _spread(batched, call.args)
    args = jax.tree.map(lambda x, flag: cut(x, takes) if flag else x, call.args, flags)
    return dataclasses.replace(call, args=args)


def cut(x: Any, takes: Mapping[int, Take]) -> Any:
    """Some entries of an array whose first axis has one of the lengths; all of any other."""
    if getattr(x, "ndim", 0) == 0 or x.shape[0] not in takes:
        return x
    return takes[x.shape[0]](jnp.asarray(x))


def every(n: int, place: Scalar) -> Take:
    """Takes every n-th entry, from some place on."""

    def take(x: jax.Array) -> jax.Array:
        left, rest = divmod(x.shape[0], n)
        if rest:  # those at the end have their turn when the others begin a new round
            x = jax.lax.dynamic_slice_in_dim(x, (place // n) % (rest + 1), n * left)
        return x.reshape(left, n, *x.shape[1:])[:, place % n]

    return take


def lengths_in(call: Call, batched: Any = None) -> set[int]:
    """The lengths of the first axes of the arguments that may have examples, or that do."""
    return {x.shape[0] for _, x in _arrays(call, batched) if x.ndim}


def check_lengths(call: Call, lengths: Collection[int], batched: Any) -> None:
    """An error if an argument that is said to have examples has another number of them."""
    for place, x in _arrays(call, batched) if batched is not None else ():
        if not x.ndim or x.shape[0] not in lengths:
            raise ValueError(
                f"batched={batched!r} says that the argument args{place} has the batch as its "
                f"first axis, and its shape is {x.shape} where the outputs are of "
                f"{', '.join(map(str, sorted({*lengths})))} examples: say False there"
            )


def _arrays(call: Call, batched: Any) -> list[tuple[str, Any]]:
    """The arrays that may have examples, or those that do, and their places in the arguments."""
    arguments = (call.args, call.kwargs) if batched is None else call.args
    flags = jax.tree.leaves(_spread(True if batched is None else batched, arguments))
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    pairs = zip(flags, leaves, strict=True)
    return [(keystr(keys), x) for flag, (keys, x) in pairs if flag and hasattr(x, "ndim")]


def are_certain(
    model: Model, params: Any, call: Call, lengths: Collection[int], outputs: tuple[Shape, ...]
) -> bool:
    """Whether the arguments of these lengths have examples, which do not depend on each other.

    The model is traced for a batch of another length, and nothing is computed: it must take it,
    its outputs must be of that many examples, and no equation may mix them. Layers that normalise
    over the batch are let through, with all other sums over examples in their model.

    Args:
      model: with its outputs.
      params: its parameters.
      call: the whole batch's.
      lengths: of the batches that are to be cut.
      outputs: the shapes of the outputs on the whole batch.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *given: given, params, call))
    return _are_certain(model, structure, tuple(leaves), frozenset(lengths), outputs)


@functools.lru_cache(maxsize=64)  # a step that is not compiled asks every time
def _are_certain(
    model: Model,
    structure: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    lengths: frozenset[int],
    outputs: tuple[Shape, ...],
) -> bool:
    params, call = jax.tree.unflatten(structure, leaves)
    known = {n for x in leaves for n in x.shape if n}
    new = dict(zip(sorted(lengths), _primes(known), strict=False))

    def resized(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:1], (new[x.shape[0]], *x.shape[1:]))

    other = jax.eval_shape(lambda call: cut_call(call, dict.fromkeys(new, resized)), call)
    try:
        program, made = jax.make_jaxpr(model.outputs, return_shape=True)(params, other)
    except Exception:  # of any kind: the model can not take arguments of these lengths
        return False
    wanted = [(new.get(n, n), *rest) for n, *rest in outputs]
    return [x.shape for x in jax.tree.leaves(made)] == wanted and keeps_examples_apart(
        program, [*new.values()], normalised=bool(model.mixing)
    )


def _primes(lengths: Collection[int]) -> Iterator[int]:
    """Primes that no model has for a length and that divide none of those given."""
    for p in itertools.count(1009, 2):
        if all(p % d for d in range(3, math.isqrt(p) + 1, 2)) and all(n % p for n in lengths):
            yield p
