"""Which parameters make which block: the description that capture writes and optimizers read."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.blocks import Block, Factors
from kldwrm_jax.curvature.parameters import Parameter


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """One curvature block and its parameters.

    Args:
      name: its key in ``oracle.factors()``.
      kind: what it belongs to, as shown in the table.
      block: its linear algebra.
      parameters: kernel and bias for a joint block, any number for a dense one, a single parameter
        otherwise.
      shapes: of its factors, ``(A, G)``, or that of the diagonal or of the dense matrix alone.
      note: why this is less than a full Kronecker block, if it is.
      unseen: whether the likelihood does not see its parameters. Its factors are then ones, and it
        has no part in the divergence of a step.
    """

    name: str
    kind: str
    block: Block
    parameters: tuple[Parameter, ...]
    shapes: tuple[tuple[int, ...], ...]
    note: str = ""
    unseen: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def factor_size(self) -> int:
        """Number of entries in the factors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def factors_like(self, arrays: tuple[jax.Array, ...]) -> Factors:
        """Arrays, one for each of ``shapes``, as this block's factors."""
        return self.block.join(arrays)

    def gather(self, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """The direction that the block acts on, from the parameters' leaves."""
        return self.block.gather(self.parameters, leaves)

    def scatter(self, v: jax.Array) -> dict[str, jax.Array]:
        """The inverse of :meth:`gather`."""
        return self.block.scatter(self.parameters, v)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Every curvature block of a model. Prints as a table; optimizers need nothing else.

    Iterates over its :class:`LayerBlock`; ``layers["path/to/layer"]`` is one of them.
    """

    blocks: tuple[LayerBlock, ...]

    def __iter__(self) -> Iterator[LayerBlock]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, name: str) -> LayerBlock:
        for block in self.blocks:
            if block.name == name:
                return block
        names = ", ".join(repr(block.name) for block in self.blocks)
        raise KeyError(f"no block is called {name!r}; there are {names}")

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every covered parameter, by its path."""
        return {p.path: p for block in self.blocks for p in block.parameters}

    @property
    def is_whole(self) -> bool:
        """Whether there are blocks that are the Fisher itself."""
        return any(block.block.is_whole for block in self.blocks)

    def active(self, leaves: Mapping[str, jax.Array]) -> list[LayerBlock]:
        """The blocks whose parameters are here; others may be masked, but not half of a block."""
        known = self.parameters
        strange = [path for path in leaves if path not in known]
        if strange:
            raise ValueError(
                f"the parameters {', '.join(map(repr, strange))} are not among the layers that "
                f"this optimizer was made for ({', '.join(map(repr, known))}): build it from "
                f"net.layers of the same model"
            )
        for path, leaf in leaves.items():
            if jnp.shape(leaf) != known[path].shape:
                raise ValueError(
                    f"{path!r} has shape {jnp.shape(leaf)}, and {known[path].shape} in the layers "
                    f"that this optimizer was made for: build it from net.layers of the same model"
                )
            if not jnp.issubdtype(_dtype(leaf), jnp.floating):
                raise ValueError(
                    f"{path!r} is of type {_dtype(leaf)}, and only real floating-point numbers can "
                    f"be trained: keep it in a collection other than 'params'"
                )
        found = []
        for block in self.blocks:
            present = [parameter.path in leaves for parameter in block.parameters]
            if all(present):
                found.append(block)
            elif any(present):
                paths = ", ".join(repr(parameter.path) for parameter in block.parameters)
                raise ValueError(
                    f"{paths} share the block {block.name!r}, and only some of them are here: mask "
                    f"all or none, or instrument with {self._smaller_blocks}"
                )
        return found

    @property
    def _smaller_blocks(self) -> str:
        """How fewer parameters come to share a block."""
        separate = "bias='separate'"
        return f"structure='layer', or 'kronecker' and {separate}" if self.is_whole else separate

    def sum_of_terms(self, factors: Sequence[Mapping[str, Factors]]) -> dict[str, Factors]:
        """The factors of a sum of Fishers, of every block that these have."""
        if len(factors) == 1:
            return dict(factors[0])
        known = [block for block in self.blocks if block.name in factors[0]]
        return {b.name: b.block.sum_of_terms([own[b.name] for own in factors]) for b in known}

    @property
    def state_bytes(self) -> int:
        """Bytes of averaged factors and their cached inverses, in float32."""
        return sum(_state_bytes(block) for block in self.blocks)

    def __str__(self) -> str:
        return table(self)


def per_block(
    blocks: Sequence[LayerBlock],
    f: Callable[[LayerBlock, jax.Array], jax.Array],
    leaves: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """A function of every block's direction, on the parameters' leaves."""
    out: dict[str, jax.Array] = {}
    for block in blocks:
        out |= block.scatter(f(block, block.gather(leaves)))
    return out


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _state_bytes(block: LayerBlock) -> int:
    return 2 * 4 * block.factor_size


def table(layers: Layers) -> str:
    """The layers as people like to read them: one row a block, notes and totals below."""
    header = ("layer", "kind", "parameters", "factors", "state")
    rows = [
        (
            block.name,
            block.kind,
            f"{block.size:,}",
            " x ".join(_shape(shape) for shape in block.shapes),
            _bytes(_state_bytes(block)),
        )
        for block in layers
    ]
    total = (
        "total",
        f"{len(layers)} block{'s' * (len(layers) != 1)}",
        f"{sum(block.size for block in layers):,}",
        "",
        _bytes(layers.state_bytes),
    )
    widths = [max(map(len, column)) for column in zip(header, *rows, total, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        justified = (
            cell.rjust(width) if i in (2, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "│ " + " │ ".join(justified) + " │"

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    lines = [rule("┌", "┬", "┐"), line(header), rule("├", "┼", "┤"), *map(line, rows)]
    lines += [rule("├", "┼", "┤"), line(total), rule("└", "┴", "┘")]
    notes: dict[str, list[str]] = {}
    for block in layers:
        if block.note:
            notes.setdefault(block.note, []).append(block.name)
    if notes:
        lines.append("Less than a full Kronecker block:")
        lines += [f"  {', '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
