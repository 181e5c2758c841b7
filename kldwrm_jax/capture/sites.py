"""Sites: where statistics are collected, how they are stacked, which blocks they make."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.linen_layers import Role
from kldwrm_jax.capture.statistics import Lookup, MatrixProduct, Normalization, Probes
from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock, Parameter
from kldwrm_jax.curvature.blocks import Factors


@dataclasses.dataclass(frozen=True)
class Stack:
    """Copies of a layer in one array: ``lengths`` of the axes that ``at`` begins with.

    A negative ``at`` counts from the back, as ``nn.scan(variable_axes={"params": -1})`` does.
    """

    at: int = 0
    lengths: tuple[int, ...] = ()

    def axes(self, ndim: int) -> tuple[int, ...]:
        """The stack's axes in an array that has ``ndim`` axes with it."""
        first = self.at if self.at >= 0 else ndim + self.at
        return tuple(range(first, first + len(self.lengths)))

    def spread(self, x: jax.Array) -> jax.Array:
        """One copy's array, for every copy."""
        axes = self.axes(x.ndim + len(self.lengths))
        x = jnp.expand_dims(x, axes)
        shape = list(x.shape)
        for axis, length in zip(axes, self.lengths, strict=True):
            shape[axis] = length
        return jnp.broadcast_to(x, shape)

    def to_front(self, x: jax.Array) -> jax.Array:
        """A stacked array with the stack's axes in front."""
        return jnp.moveaxis(x, self.axes(x.ndim), range(len(self.lengths)))

    def from_front(self, x: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_front`."""
        return jnp.moveaxis(x, range(len(self.lengths)), self.axes(x.ndim))


def find_stack(
    inside: Mapping[str, tuple[int, ...]], outside: Mapping[str, tuple[int, ...] | None]
) -> Sequence[Stack]:
    """Every way in which the shapes outside are those inside, stacked."""
    pairs = [(inside[name], outside[name] or ()) for name in inside]
    extra = {len(o) - len(i) for i, o in pairs}
    if extra == {0}:
        return [Stack()]
    if len(extra) != 1:
        return []
    k = extra.pop()
    found = []
    for at in (0, 1, 2, -1, -2) if k == 1 else (0,):
        lengths = set()
        for inner, outer in pairs:
            axes = Stack(at, (0,) * k).axes(len(outer))
            if axes[0] < 0 or axes[-1] >= len(outer):
                break
            if tuple(n for axis, n in enumerate(outer) if axis not in axes) != inner:
                break
            lengths.add(tuple(outer[axis] for axis in axes))
        else:
            if len(lengths) == 1:
                found.append(Stack(at, lengths.pop()))
    return found


def merge_roles(roles: Sequence[Role]) -> Role | None:
    """The role of a layer that is called several times; None if its calls differ."""
    # A table that is looked up and attended to is the one kind with two sorts of calls.
    attends = (r for r in roles if isinstance(r.observation, Lookup) and r.observation.attends)
    widest = next(attends, roles[0])
    return widest if all(widest.covers(role) for role in roles) else None


@dataclasses.dataclass(frozen=True)
class Site:
    """A layer whose statistics are collected, and the blocks they make."""

    path: tuple[str, ...]
    role: Role
    blocks: tuple[LayerBlock, ...]
    stack: Stack

    @property
    def name(self) -> str:
        """The layer's path, as people write it."""
        return "/".join(self.path) or "root"

    @staticmethod
    def reached(seen: Probes) -> bool:
        """Whether the layer saw any rows."""
        return any(bool(x.any()) for name, x in seen.items() if name.endswith("rows"))

    def factors(self, seen: Probes, scale: float = 1.0) -> dict[str, Factors]:
        """The factors of every block, from the cotangents of the probes.

        ``scale`` is what the outputs' cotangent should have been multiplied by, squared.
        """
        quadratic = self.role.observation.quadratic
        seen = {name: scale * x if name in quadratic else x for name, x in seen.items()}
        front = {name: self.stack.to_front(x) for name, x in seen.items()}
        made = list(self.role.observation.factors(front).values())
        factors: dict[str, Factors] = {}
        for block, arrays in zip(self.blocks, made, strict=True):
            if isinstance(block.block, Diagonal):
                factors[block.name] = self.stack.from_front(arrays[0])
            else:
                factors[block.name] = arrays
        return factors


def blocks_of(
    path: tuple[str, ...],
    role: Role,
    stack: Stack,
    shapes: Mapping[str, tuple[int, ...] | None],
) -> tuple[LayerBlock, ...]:
    """The curvature blocks of a layer."""
    observation = role.observation

    def parameter(name: str) -> Parameter:
        shape = shapes[name] or ()
        matrix = role.matrices.get(name)
        axes = dataclasses.asdict(matrix) if matrix else {}
        return Parameter("/".join((*path, name)), shape, stack.axes(len(shape)), **axes)

    if isinstance(observation, Normalization):
        return tuple(
            LayerBlock(
                name="/".join((*path, name)),
                kind=role.kind,
                block=Diagonal(),
                parameters=(parameter(name),),
                shapes=(shapes[name] or (),),
                note=role.note,
            )
            for name, _ in observation.parameters
        )
    assert isinstance(observation, MatrixProduct | Lookup)
    a_diagonal = isinstance(observation, Lookup) or observation.a_diagonal
    made = []
    for part, (a, g) in observation.shapes.items():
        names = [part] if part else list(role.matrices)
        made.append(
            LayerBlock(
                name="/".join((*path, part) if part else path) or "root",
                kind=role.kind,
                block=Kronecker(a_diagonal, observation.g_diagonal),
                parameters=tuple(parameter(name) for name in names),
                shapes=(stack.lengths + a, stack.lengths + g),
                note=role.note,
            )
        )
    return tuple(made)
