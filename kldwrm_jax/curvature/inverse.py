"""How inverses are made, and on which steps."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from kldwrm_jax.arguments import Scalar, check_choice, check_count
from kldwrm_jax.curvature.blocks import Block, Factors
from kldwrm_jax.curvature.decompositions import decompose
from kldwrm_jax.curvature.devices import Devices
from kldwrm_jax.curvature.layers import LayerBlock
from kldwrm_jax.curvature.sides import Matrix, Side, Subspace, start_subspace
from kldwrm_jax.curvature.solvers import DampingMode

# On one core a side of width 3137 takes 0.69 s by Cholesky, 1.37 s by eigenvectors and 0.30 s by
# so many of them, which reach 95 to 99 % of the decrease of the quadratic model (features of MNIST,
# default damping); 256 take 0.14 s and reach 88 to 91 %. Below 2048 there is little to gain.
_WIDEST_FULL = 2048
_RANK = 512


@dataclasses.dataclass(frozen=True)
class Inverse:
    r"""How inverses are made, and when.

    With ``stagger``, with ``method="randomized"``, and where ``"auto"`` makes any inverse that way,
    Q and QE use :math:`B_k = \bar F_k` at a refresh, too, as on the steps in between.

    Args:
      every: steps between two inversions, a multiple of ``refresh_every``; with None, every refresh
        inverts. In between, statistics are averaged while steps use the last inverse. The
        ``"proposed"`` wake then belongs to the average that was inverted; the ``"taken"`` wake,
        which holds for any steps, to the newest average.
      stagger: spreads the inversions of a period over its steps, a few layers (or copies of a
        stacked layer) per step, so that no step is much slower than the others. The first
        inversions are all made at once.
      method: ``"full"``, or ``"randomized"``: of a side wider than ``rank``, only the leading
        eigenvectors are computed, by subspace iteration from the previous ones, and the rest of the
        spectrum is replaced by its mean. For wide layers, where a full decomposition is too
        expensive. ``"auto"`` decides for every side by itself: full up to a width of 2048, and
        randomized of rank 512 above; dense blocks are always full.
      rank: how many eigenvectors ``"randomized"`` keeps.
      mesh: a mesh whose devices share the decompositions out: each does some of the matrices, and a
        sum over the devices distributes the results. With None, each device does all of them,
        which is what XLA does with replicated matrices.
      axis: the mesh axis, or axes, to share out over; all of them with None.

    Example:
      >>> import kldwrm_jax as kw
      >>> kw.Inverse(every=30, stagger=True)
      Inverse(every=30, stagger=True, method='auto', rank=None, mesh=None, axis=None)
      >>> kw.Inverse(method="randomized", rank=128).rank
      128

    References:
      Puiu, `Randomized K-FACs: Speeding up K-FAC with Randomized Numerical Linear Algebra
      <https://arxiv.org/abs/2206.15397>`_, 2022 (``"randomized"``).
    """

    every: int | None = None
    stagger: bool = False
    method: str = "auto"
    rank: int | None = None
    mesh: Mesh | None = None
    axis: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every)
        check_choice("method", self.method, ("auto", "full", "randomized"))
        if self.method == "randomized":
            if self.rank is None:
                raise ValueError("method='randomized' needs a rank, such as rank=128, got None")
            check_count("rank", self.rank)
        elif self.rank is not None:
            raise ValueError(f"rank={self.rank} needs method='randomized', got {self.method!r}")
        if not isinstance(self.stagger, bool):
            raise ValueError(f"stagger must be True or False, got {self.stagger!r}")
        if not isinstance(self.mesh, Mesh | None):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, got {self.mesh!r}")
        if self.mesh is None and self.axis is not None:
            raise ValueError(f"axis={self.axis!r} needs the mesh it is an axis of, got mesh=None")
        _ = self.devices  # checks the axes

    @property
    def devices(self) -> Devices | None:
        """Devices that share the decompositions out, or None."""
        if self.mesh is None:
            return None
        axis = self.mesh.axis_names if self.axis is None else self.axis
        return Devices(self.mesh, (axis,) if isinstance(axis, str) else tuple(axis))

    def takes_average(self, blocks: Iterable[LayerBlock]) -> bool:
        r"""Whether :math:`B_k = \bar F_k` on every step."""
        if self.stagger or self.method == "randomized":
            return True
        sides = ((own.block, width) for own in blocks for width in _widths(own))
        return any(self.rank_at(block, width) is not None for block, width in sides)

    def rank_at(self, block: Block, width: int) -> int | None:
        """How many eigenvectors are kept of a side; None if its decomposition is full."""
        if self.method == "auto":
            return _RANK if width > _WIDEST_FULL and not block.is_whole else None
        return self.rank if self.rank is not None and width > self.rank else None

    def make(
        self,
        mode: DampingMode,
        blocks: Sequence[Block],
        factors: Sequence[Factors],
        damping: Scalar,
        old: Sequence[Any] | None = None,
    ) -> list[Any]:
        """What is cached of every block's factors; iterative methods start from ``old`` caches."""
        before = old or [None] * len(blocks)
        starts = [self._starts(*own) for own in zip(blocks, factors, before, strict=True)]
        if jax.tree.leaves(starts):
            factors = decompose(
                lambda side: side.compress, blocks, factors, starts, devices=self.devices
            )
        return mode.invert(blocks, factors, damping)

    def _starts(self, block: Block, f: Factors, cache: Any) -> Any:
        """For every side a subspace to start from, or None where it stays as it is."""
        sides = block.split(f)
        before = [None] * len(sides) if cache is None else [x for _, x in block.split(cache)]

        def start(side: type[Side], x: Any, known: Any) -> Subspace | None:
            rank = self.rank_at(block, x.shape[-1]) if side is Matrix else None
            if rank is None:
                return None
            return start_subspace(x, rank, getattr(known, "vectors", None))

        return block.join([start(*own, known) for own, known in zip(sides, before, strict=True)])


@dataclasses.dataclass(frozen=True)
class InversionSlot:
    """What is inverted on the same steps of a period.

    Args:
      blocks: that are inverted.
      steps: of the period; several where the copies of a stacked block are inverted in turn.
      copies: of a stacked block per step; None if the blocks are inverted whole.
    """

    blocks: tuple[LayerBlock, ...]
    steps: range
    copies: int | None = None


def slots(blocks: Sequence[LayerBlock], period: int) -> list[InversionSlot]:
    """Spreads inversions over the steps after the first of a period, with about equal work."""
    steps = period - 1
    stacked = [block for block in blocks if _copies(block) > 1]
    load = [0] * steps
    planned: list[InversionSlot] = []
    for block in sorted(stacked, key=_work, reverse=True):
        copies = -(-_copies(block) // steps)
        count = -(-_copies(block) // copies)
        start = min(range(steps - count + 1), key=lambda i: sum(load[i : i + count]))
        planned.append(InversionSlot((block,), range(1 + start, 1 + start + count), copies))
        for step in range(start, start + count):
            load[step] += _work(block) // count
    whole: dict[int, list[LayerBlock]] = {}
    for block in sorted((b for b in blocks if _copies(b) == 1), key=_work, reverse=True):
        lightest = min(range(steps), key=load.__getitem__)
        load[lightest] += _work(block)
        whole.setdefault(lightest, []).append(block)
    planned += [InversionSlot(tuple(own), range(1 + i, 2 + i)) for i, own in sorted(whole.items())]
    return planned


def _copies(block: LayerBlock) -> int:
    """Independent matrices along the first axis of each factor."""
    if not block.block.inverted:
        return 1
    lone = 2 if block.block.inverted[0] is Matrix else 1
    return block.shapes[0][0] if len(block.shapes[0]) > lone else 1


def _work(block: LayerBlock) -> int:
    """Flops of the decompositions, up to a constant."""
    sides = zip(block.block.inverted, block.shapes, strict=False)
    return sum(math.prod(shape) * (shape[-1] if side is Matrix else 1) for side, shape in sides)


def _widths(block: LayerBlock) -> list[int]:
    """Of the sides that are full matrices."""
    sides = zip(block.block.inverted, block.shapes, strict=False)
    return [shape[-1] for side, shape in sides if side is Matrix]
