"""Decompositions of many blocks at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.blocks import Block, Factors
from kldwrm_jax.curvature.devices import Devices, Task, share_out
from kldwrm_jax.curvature.sides import Matrix, Side

Operation = Callable[[type[Side]], Callable[..., Any]]  # such as lambda side: side.inverse
Place = tuple[int, int]  # a block, and one of its sides


def decompose(
    operation: Operation,
    blocks: Sequence[Block],
    *factors: Sequence[Factors],
    devices: Devices | None = None,
) -> list[Any]:
    """Applies one operation to every side of every block.

    Sides of equal shape are batched on accelerators, and done in turn on a CPU.

    Args:
      operation: picks a method of :class:`~kldwrm_jax.curvature.sides.Side`.
      blocks: their kinds.
      *factors: the operands of each block.
      devices: share the full matrices out among themselves; with None, each device does them all.

    Returns:
      For every block the results of its sides, joined as its factors are.

    Example:
      >>> import jax.numpy as jnp
      >>> from kldwrm_jax.curvature import Kronecker, decompose
      >>> factors = (2.0 * jnp.eye(3), 5.0 * jnp.eye(3))
      >>> ((a, g),) = decompose(lambda side: side.inverse, [Kronecker()], [factors])
      >>> round(float(a[0, 0]), 6), round(float(g[0, 0]), 6)
      (0.5, 0.2)
    """
    operands: dict[Place, tuple] = {}
    groups: dict[Any, list[Place]] = {}
    for i, (block, *own) in enumerate(zip(blocks, *factors, strict=True)):
        for j, forms in enumerate(zip(*(block.split(f) for f in own), strict=True)):
            side = forms[0][0]
            operands[i, j] = tuple(x for _, x in forms)
            leaves, structure = jax.tree.flatten(operands[i, j])
            key = (side, structure, *((x.shape, x.dtype) for x in leaves))
            groups.setdefault(key, []).append((i, j))

    results: dict[Place, Any] = {}
    shared: list[tuple[Callable[..., Any], list[Place]]] = []
    for (side, *_), places in groups.items():
        if devices is not None and side is Matrix:
            shared.append((operation(side), places))
        else:
            done = _each(operation(side), [operands[place] for place in places])
            results |= zip(places, done, strict=True)
    if devices is not None and shared:
        results |= _shared_out(shared, operands, devices)
    return [
        block.join([results[place] for place in operands if place[0] == i])
        for i, block in enumerate(blocks)
    ]


def _each(function: Callable[..., Any], operands: Sequence[tuple]) -> list[Any]:
    """The function of each of several operands of equal shape."""
    if len(operands) == 1:
        return [function(*operands[0])]

    # XLA compiles equal kernels once; batching on a CPU would only add copies in and out.
    def in_turn(operands: Sequence[tuple]) -> list[Any]:
        return [function(*own) for own in operands]

    def batched(operands: Sequence[tuple]) -> list[Any]:
        return _unstack(function(*_stack(operands)), len(operands))

    return jax.lax.platform_dependent(operands, cpu=in_turn, default=batched)


def _shared_out(
    work: Sequence[tuple[Callable[..., Any], list[Place]]],
    operands: dict[Place, tuple],
    devices: Devices,
) -> dict[Place, Any]:
    """Every side's result, each matrix decomposed by one device."""
    stacks = [_stack([operands[place] for place in places]) for _, places in work]
    shapes = [jax.tree.leaves(stack)[0].shape[:-2] for stack in stacks]
    tasks = [
        Task(function, _flat(stack, len(shape)))
        for (function, _), stack, shape in zip(work, stacks, shapes, strict=True)
    ]
    results: dict[Place, Any] = {}
    for (_, places), shape, done in zip(work, shapes, share_out(tasks, devices), strict=True):
        whole = jax.tree.map(lambda x, shape=shape: x.reshape(*shape, *x.shape[1:]), done)
        results |= zip(places, _unstack(whole, len(places)), strict=True)
    return results


def _flat(tree: Any, axes: int) -> Any:
    """All axes of a stack in one."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), tree)


def _stack(operands: Sequence[tuple]) -> tuple:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *operands)


def _unstack(tree: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]
