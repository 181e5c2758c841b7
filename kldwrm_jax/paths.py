"""Leaves of a tree of parameters by the path that people write: ``"path/to/layer/kernel"``.

Any tree will do: dicts, FrozenDicts, ``nnx.State``, boxed parameters.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")
Leaves = dict[str, jax.Array]  # leaves by their paths


def path_of(keys: tuple[Any, ...]) -> str:
    """A path of JAX keys as people write it; the last key of a boxed value is not part of it."""
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaves_by_path(tree: Any) -> Leaves:
    """Every leaf, by its path."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def replace_leaves(tree: Tree, leaves: Mapping[str, jax.Array]) -> Tree:
    """The tree with the leaves at some paths replaced."""
    if not leaves:
        return tree
    return jax.tree_util.tree_map_with_path(lambda keys, x: leaves.get(path_of(keys), x), tree)


def leaves_like(tree: Tree, leaves: Mapping[str, jax.Array]) -> Tree:
    """Leaves in the structure and with the types of a tree of arrays."""
    types = {path: jnp.asarray(x).dtype for path, x in leaves_by_path(tree).items()}
    return replace_leaves(tree, {path: leaves[path].astype(types[path]) for path in types})
