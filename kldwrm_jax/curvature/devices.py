"""Work shared out among devices: each does a part of it, and all have the whole."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from kldwrm_jax.arguments import check_choice


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices along some axes of a mesh."""

    mesh: Mesh
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            check_choice("axis", axis, self.mesh.axis_names)
        if AxisType.Explicit in self.mesh.axis_types:
            raise ValueError(
                f"mesh must leave shardings to the compiler, and its axes "
                f"{self.mesh.axis_names} are of types {self.mesh.axis_types}: make it by "
                f"jax.make_mesh(..., axis_types=(AxisType.Auto,) * {len(self.mesh.axis_names)})"
            )

    @property
    def count(self) -> int:
        """How many they are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


class Task(NamedTuple):
    """A function of matrices, and stacks of them: ``(matrices, n, n)`` and the like."""

    function: Callable[..., Any]
    stacks: tuple[Any, ...]

    @property
    def matrices(self) -> int:
        """How many there are to be done."""
        return jax.tree.leaves(self.stacks)[0].shape[0]

    @property
    def cost(self) -> int:
        """Of one of them, up to a constant."""
        return max(x.shape[-1] for x in jax.tree.leaves(self.stacks)) ** 3


Share = dict[int, list[int]]  # by the number of a task, which of its matrices


def shares(tasks: Sequence[Task], devices: int) -> list[Share]:
    """Who does what: the most expensive first, each to the device with the least to do."""
    load = [0] * devices
    mine: list[Share] = [{} for _ in range(devices)]
    for i, task in sorted(enumerate(tasks), key=lambda own: -own[1].cost):
        for matrix in range(task.matrices):
            lightest = min(range(devices), key=load.__getitem__)
            load[lightest] += task.cost
            mine[lightest].setdefault(i, []).append(matrix)
    return mine


def share_out(tasks: Sequence[Task], devices: Devices) -> list[Any]:
    """Every task's results, each matrix done by one device.

    XLA would have every device do all of them. Here a device has a branch of the program of its
    own, and what it has not done is zero: a sum over devices gives everything to everyone.
    """
    stacks = [task.stacks for task in tasks]
    empty = [jax.eval_shape(task.function, *task.stacks) for task in tasks]
    plan = shares(tasks, devices.count)
    busy = [share for share in plan if share]

    def branch(mine: Share) -> Callable[[list[tuple]], list[Any]]:
        def work(stacks: list[tuple]) -> list[Any]:
            results = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), empty)
            for i, which in mine.items():
                places = np.array(which)
                some = tasks[i].function(*jax.tree.map(lambda x, at=places: x[at], stacks[i]))
                results[i] = jax.tree.map(
                    lambda whole, part, at=places: whole.at[at].set(part), results[i], some
                )
            return results

        return work

    def on_each(stacks: list[tuple]) -> list[Any]:
        # Those with nothing to do share the last branch.
        place = jnp.minimum(jax.lax.axis_index(devices.axes), len(busy))
        done = jax.lax.switch(place, [branch(share) for share in [*busy, {}]], stacks)
        return jax.lax.psum(done, devices.axes)

    everywhere = PartitionSpec()
    return jax.shard_map(
        on_each, mesh=devices.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )(stacks)
