"""A layer of a model whose statistics are collected."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.stack import Stack
from kldwrm_jax.capture.trace import CONSTANT, PROBE, Path
from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.curvature.layer_spec import WEIGHTS, Arrays, LayerSpec, MatrixProduct, key

Basis = Sequence[jax.Array | None]  # (U_A, U_G); None is the identity
Bases = Mapping[str, Basis]  # by the names of blocks
NO_BASES: Bases = {}


@dataclasses.dataclass(frozen=True)
class CapturedLayer:
    """A layer, where it is, how its copies are stacked, and the blocks that it makes."""

    path: Path
    name: str
    spec: LayerSpec
    stack: Stack
    blocks: tuple[LayerBlock, ...]  # those of the spec, at their place in the model

    @property
    def parameters(self) -> tuple[str, ...]:
        """The paths of its parameters."""
        return tuple(p.path for block in self.blocks for p in block.parameters)

    def probes(self, bases: Bases) -> Arrays:
        """Zeros shaped like the statistics, as they are attached."""
        shapes = self.spec.probes
        for part, _ in self._own_bases(bases):
            a, g = shapes[key("A", part)], shapes[key("G", part)]
            groups = self.spec.blocks[0].parameters[0].view.groups
            shapes[key("S", part)] = (*groups, a[-1], g[-1])
        return self.stack.attach({PROBE + k: jnp.zeros(s, float) for k, s in shapes.items()})

    def constants(self, weights: jax.Array | None, bases: Bases) -> Arrays:
        """What the statistics need beside the operands of a call, as it is attached."""
        attached = {} if weights is None else self.stack.attach({CONSTANT + WEIGHTS: weights})
        for part, (u_a, u_g) in self._own_bases(bases):
            sides = {"U_A": u_a, "U_G": u_g, "S": jnp.zeros(self.stack.lengths)}
            given = {CONSTANT + key(k, part): u for k, u in sides.items() if u is not None}
            attached |= self.stack.attach(given, stacked=True)
        return attached

    def _own_bases(self, bases: Bases) -> Iterator[tuple[str, Basis]]:
        for block, own in zip(self.blocks, self.spec.blocks, strict=True):
            if block.name in bases:
                _check_basis(block, self.spec, bases[block.name])
                yield own.name, bases[block.name]

    def factors(self, collected: Arrays, scale: float) -> dict[str, Factors]:
        """The factors of every block, from the cotangents of the probes.

        ``scale`` is what the square of the outputs' cotangent should have been multiplied by.
        """
        made = self.spec.factors(self._by_name(collected), scale)
        return {
            block.name: self.stack.from_front(own[0]) if isinstance(block.block, Diagonal) else own
            for block, own in zip(self.blocks, made, strict=True)
        }

    def reached(self, collected: Arrays) -> bool:
        """Whether the layer saw any rows."""
        counts = {k: x for k, x in self._by_name(collected).items() if k.startswith("count")}
        return any(bool(x.any()) for x in counts.values())

    def _by_name(self, collected: Arrays) -> Arrays:
        return {k.removeprefix(PROBE): x for k, x in self.stack.detach(collected).items()}


def _check_basis(block: LayerBlock, spec: LayerSpec, basis: Basis) -> None:
    got = tuple(None if u is None else jnp.shape(u) for u in basis)
    kronecker = block.block
    wanted: tuple = ()
    if isinstance(spec, MatrixProduct) and isinstance(kronecker, Kronecker):
        a, g = block.shapes
        wanted = (None if kronecker.a_diagonal else a, None if kronecker.g_diagonal else g)
    if len(got) != len(wanted) or any(u not in (None, s) for u, s in zip(got, wanted, strict=True)):
        raise ValueError(
            f"bases[{block.name!r}] must be a pair (U_A, U_G) of orthogonal matrices for a layer "
            f"that is a matrix product, here of shapes {wanted} (None is the identity), got shapes "
            f"{got} for a block of {block.kind}"
        )
