"""A call of a model as a pytree: what changes with the batch, and what is part of the program."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


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
