"""Decompositions of many blocks at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.blocks import Block, Factors
from kldwrm_jax.curvature.devices import Devices, Task, share_out
from kldwrm_jax.curvature.sides import Matrix


def decompose(
    operation: str,
    blocks: Sequence[Block],
    *factors: Sequence[Factors],
    devices: Devices | None = None,
) -> list[Any]:
    """One operation on every side of every block, those of equal shape stacked in one call.

    Args:
      operation: of :class:`~kldwrm_jax.curvature.sides.Side`: ``"inverse"``, ``"eigen"``,
        ``"pencil"`` (of two factors), ``"outer"`` (of a basis) or ``"compress"`` (with subspaces).
      blocks: their kinds.
      *factors: what each of them has.
      devices: share full matrices out among themselves; by None, each does them all.

    Returns:
      For every block the results of its sides, joined as its factors are.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Kronecker, decompose
      >>> ((a, g),) = decompose("inverse", [Kronecker()], [(2.0 * jnp.eye(3), 5.0 * jnp.eye(3))])
      >>> round(float(a[0, 0]), 6), round(float(g[0, 0]), 6)
      (0.5, 0.2)
    """
    groups: dict[Any, list[tuple[int, int]]] = {}
    operands: list[list[tuple]] = []
    for i, (block, *own) in enumerate(zip(blocks, *factors, strict=True)):
        operands.append([])
        for j, forms in enumerate(zip(*(block.split(f) for f in own), strict=True)):
            sides = tuple(x for _, x in forms)
            leaves, structure = jax.tree.flatten(sides)
            key = (forms[0][0], structure, *((x.shape, x.dtype) for x in leaves))
            groups.setdefault(key, []).append((i, j))
            operands[i].append(sides)

    made: dict[tuple[int, int], Any] = {}
    shared: list[tuple[Task, tuple[int, ...], list[tuple[int, int]]]] = []
    for (side, *_), places in groups.items():
        function = getattr(side, operation)
        alone = devices is None or side is not Matrix
        if alone and len(places) == 1:
            ((i, j),) = places
            made[i, j] = function(*operands[i][j])
            continue
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(operands[i][j] for i, j in places))
        if alone:
            made |= _unstacked(places, function(*stacked))
        else:
            stack = stacked[0].shape[:-2]
            shared.append((Task(function, _flat(stacked, len(stack))), stack, places))
    if devices is not None and shared:
        done = share_out([task for task, *_ in shared], devices)
        for (_, stack, places), results in zip(shared, done, strict=True):
            whole = jax.tree.map(lambda x, stack=stack: x.reshape(*stack, *x.shape[1:]), results)
            made |= _unstacked(places, whole)
    return [
        block.join([made[i, j] for j in range(len(operands[i]))]) for i, block in enumerate(blocks)
    ]


def _unstacked(places: list[tuple[int, int]], results: Any) -> dict[tuple[int, int], Any]:
    return {place: jax.tree.map(lambda x, n=n: x[n], results) for n, place in enumerate(places)}


def _flat(tree: Any, axes: int) -> Any:
    """All axes of the stack in one."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), tree)
