"""A call of a model as a pytree: what changes with the batch, and what is part of the program."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import is_known

_LARGE = 2**14  # entries: products of smaller constants are folded in no time


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for an argument whose arrays are among the call's ``rngs``."""

    index: int
    graph: Any  # its structure


def _is_static(leaf: Any) -> bool:
    return isinstance(leaf, bool | str | Slot) or callable(leaf)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Call:
    """All that a model is called with but its parameters.

    Python bools, strings, None and callables among the arguments belong to the tree's structure,
    and so does ``graph``, the structure of an NNX module; everything else is a leaf.
    """

    args: tuple
    kwargs: Mapping[str, Any]
    variables: Mapping[str, Any]
    rngs: Any  # keys by name, or one key; for an NNX model, the states that slots stand for
    graph: Any = None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Leaves of the arguments that are arrays, then the other fields."""
        leaves, treedef = jax.tree.flatten((self.args, dict(self.kwargs)))
        static = tuple((i, leaf) for i, leaf in enumerate(leaves) if _is_static(leaf))
        arrays = [leaf for leaf in leaves if not _is_static(leaf)]
        return (arrays, self.variables, self.rngs), (treedef, static, self.graph)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> "Call":
        """The call again, whatever its leaves have become."""
        treedef, static, graph = aux
        arrays, variables, rngs = children
        leaves = list(arrays)
        for i, leaf in static:
            leaves.insert(i, leaf)
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return cls(args, kwargs, variables, rngs, graph)

    def unfolded(self) -> "Call":
        """The call with large constants of a compiled program behind a barrier.

        Of a batch that a jitted function closes over, XLA would compute ``a'a`` while it compiles:
        a minute of one core for a thousand rows of 784.
        """
        return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if _folds(x) else x, self)


def _folds(x: Any) -> bool:
    is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return is_float and x.size >= _LARGE and is_known(x)
