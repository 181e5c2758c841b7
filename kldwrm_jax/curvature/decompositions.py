"""Decompositions of many blocks at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.blocks import Block, Factors


def decompose(operation: str, blocks: Sequence[Block], *factors: Sequence[Factors]) -> list[Any]:
    """One operation on every side of every block, those of equal shape stacked in one call.

    Args:
      operation: of :class:`~kldwrm_jax.curvature.sides.Side`: ``"inverse"``, ``"eigen"``,
        ``"pencil"`` (of two factors), ``"outer"`` (of a basis) or ``"compress"`` (with subspaces).
      blocks: their kinds.
      *factors: what each of them has.

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
    for (side, *_), places in groups.items():
        function = getattr(side, operation)
        if len(places) == 1:
            ((i, j),) = places
            made[i, j] = function(*operands[i][j])
            continue
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(operands[i][j] for i, j in places))
        results = function(*stacked)
        for n, place in enumerate(places):
            made[place] = jax.tree.map(lambda x, n=n: x[n], results)
    return [
        block.join([made[i, j] for j in range(len(operands[i]))]) for i, block in enumerate(blocks)
    ]
