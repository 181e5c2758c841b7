"""Sites: where statistics are collected, how they are stacked, which blocks they make."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Role
from kldwrm_jax.capture.statistics import Lookup, MatrixProduct, Normalization
from kldwrm_jax.capture.watch import Path, Shape, Watch, marks
from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock, Layers, Parameter
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


def find_stack(inside: Mapping[str, Shape], outside: Mapping[str, Shape]) -> Sequence[Stack]:
    """Every way in which the shapes outside are those inside, stacked."""
    pairs = [(inside[name], outside[name]) for name in inside]
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

    path: Path
    name: str
    role: Role
    blocks: tuple[LayerBlock, ...]
    stack: Stack

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
    name: str, role: Role, stack: Stack, parameters: Mapping[str, tuple[str, Shape]]
) -> tuple[LayerBlock, ...]:
    """The curvature blocks of a layer; ``parameters`` are their paths and shapes, by role."""
    observation = role.observation

    def parameter(part: str) -> Parameter:
        path, shape = parameters[part]
        matrix = role.matrices.get(part)
        axes = dataclasses.asdict(matrix) if matrix else {}
        return Parameter(path, shape, stack.axes(len(shape)), **axes)

    if isinstance(observation, Normalization):
        return tuple(
            LayerBlock(
                name=parameters[part][0],
                kind=role.kind,
                block=Diagonal(),
                parameters=(parameter(part),),
                shapes=(parameters[part][1],),
                note=role.note,
            )
            for part, _ in observation.parameters
        )
    assert isinstance(observation, MatrixProduct | Lookup)
    a_diagonal = isinstance(observation, Lookup) or observation.a_diagonal
    made = []
    for part, (a, g) in observation.shapes.items():
        parts = [part] if part else list(role.matrices)
        made.append(
            LayerBlock(
                name=parameters[part][0] if part else name,
                kind=role.kind,
                block=Kronecker(a_diagonal, observation.g_diagonal),
                parameters=tuple(parameter(part) for part in parts),
                shapes=(stack.lengths + a, stack.lengths + g),
                note=role.note,
            )
        )
    return tuple(made)


@dataclasses.dataclass(frozen=True)
class Survey:
    """What was found: every block, the sites, and the parameters that no site covers."""

    layers: Layers
    sites: tuple[Site, ...]
    uncovered: tuple[str, ...]


def survey(
    shapes: Mapping[str, Shape],
    look: Callable[[Mapping[Path, Mapping[str, jax.ShapeDtypeStruct]]], Watch],
    name_of: Callable[[Path, Watch], str],
    owner_of: Callable[[str, Watch], tuple[str, str]],
) -> tuple[Survey, Watch]:
    """Finds a model's sites and gives every parameter a block.

    Args:
      shapes: of all parameters, by their paths.
      look: runs the model with shapes alone; its argument is carried beside layers' parameters.
      name_of: a layer's name, for people.
      owner_of: what kind of thing an uncovered parameter belongs to, and why it is uncovered.
    """
    watch = look({})
    claims: dict[str, list[Path]] = {}
    for path, own in watch.parameters.items():
        for parameter in own.values():
            claims.setdefault(parameter, []).append(path)
    for parameter, paths in claims.items():
        for path in paths if len(paths) > 1 else ():
            watch.refused[path] = f"{parameter} belongs to another layer too"

    sites = []
    for path, roles in watch.roles.items():
        own = watch.parameters[path]
        if not own or path in watch.refused or any(p not in shapes for p in own.values()):
            continue  # a layer without parameters of this tree: they are named among the uncovered
        role = merge_roles(roles)
        if role is None:
            watch.refused[path] = "it is called in different ways"
            continue
        outside = {part: shapes[parameter] for part, parameter in own.items()}
        stack = _stack(path, watch.shapes[path], outside, look)
        parameters = {part: (own[part], outside[part]) for part in own}
        name = name_of(path, watch)
        sites.append(Site(path, name, role, blocks_of(name, role, stack, parameters), stack))

    covered = {p.path for site in sites for block in site.blocks for p in block.parameters}
    missed = [parameter for parameter in shapes if parameter not in covered]
    blocks = [block for site in sites for block in site.blocks]
    refused = {
        parameter: watch.refused[path]
        for path, own in watch.parameters.items()
        for parameter in own.values()
        if path in watch.refused
    }
    for parameter in missed:
        kind, reason = owner_of(parameter, watch)
        reason = refused.get(parameter, reason)
        blocks.append(
            LayerBlock(
                name=parameter,
                kind=kind,
                block=Diagonal(),
                parameters=(Parameter(parameter, shapes[parameter]),),
                shapes=(shapes[parameter],),
                note=f"{reason}: a diagonal from squared random-sign gradients",
            )
        )
    return Survey(Layers(tuple(blocks)), tuple(sites), tuple(missed)), watch


def _stack(
    path: Path,
    inside: Mapping[str, Shape],
    outside: Mapping[str, Shape],
    look: Callable[[Mapping[Path, Mapping[str, jax.ShapeDtypeStruct]]], Watch],
) -> Stack:
    """How a layer's parameters are stacked, from their shapes inside and outside the call.

    Where lengths coincide, the shapes fit axes that are not the stack's: marks of lengths that
    occur nowhere else show it.
    """
    wanted = marks({len(shape) for shape in inside.values()})

    def arrives(stack: Stack) -> bool:
        sent = {
            name: jax.eval_shape(stack.spread, jax.ShapeDtypeStruct(shape, jnp.float32))
            for name, shape in wanted.items()
        }
        try:
            return look({path: sent}).arrived[path] == wanted
        except ValueError:
            return False

    candidates: Sequence[Stack] = find_stack(inside, outside)
    if candidates != [Stack()]:
        candidates = [stack for stack in candidates if arrives(stack)]
    if not candidates:
        raise ValueError(
            f"the parameters of {'/'.join(path)!r} are stacked in a way that is not understood: "
            f"{dict(inside)} inside its lifted transform, {dict(outside)} outside; nested scans "
            f"and vmaps must stack along leading axes (for Linen, variable_axes={{'params': 0}})"
        )
    return candidates[0]
