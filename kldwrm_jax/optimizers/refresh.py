"""When curvature is computed anew, and the direction it gives."""

import dataclasses
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import check_count, check_decay, check_non_negative
from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import LayerBlock, Layers, Operator, Setting, Solver, average, per_block
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.optimizers.state import KLDWRMState
from kldwrm_jax.paths import Leaves


@dataclasses.dataclass(frozen=True)
class Inverse:
    """How inverses are made, and when.

    Args:
      every: steps between two inversions, a multiple of ``refresh_every``; None inverts at every
        refresh. In between, statistics go on being averaged while the step uses the inverse there
        is. The ``proposed`` wake then belongs to the average that was inverted, as if no statistics
        had come since; the ``taken`` wake, which holds for any steps, to the newest average.

    Example:
      >>> import kldwrm_jax as kw
      >>> kw.Inverse(every=30)
      Inverse(every=30)
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every)


class Direction(NamedTuple):
    r"""What the curvature makes of a gradient.

    ``v`` is :math:`[\bar F + \mathrm{lr} B]^{-1}` times it; ``pulled`` is :math:`\bar F v` without
    weight decay, what the wake remembers; ``contraction`` is :math:`\|I - \hat M\|`.
    """

    v: Leaves
    pulled: Leaves
    contraction: jax.Array


class Curvature(NamedTuple):
    """The curvature after a refresh, or as it was."""

    factors: dict[str, Factors]
    inverses: dict[str, Any]
    b: dict[str, Factors] | None  # B_k, undamped, if it is wanted
    own: Direction | None  # a refresh's own direction, for members whose B_k is not F_bar then
    refreshed: jax.Array  # bool []: statistics were taken in
    inverted: jax.Array  # bool []: and inverted
    rejected: jax.Array  # bool []: they were not finite, and nothing has changed


@dataclasses.dataclass(frozen=True)
class Refresh:
    """A member's curvature: its average, its solver, its periods."""

    solver: Solver
    damping: Any
    rho: Any
    every: Any
    inverse: Inverse
    wants_b: bool

    def __post_init__(self) -> None:
        check_decay("rho", self.rho)
        check_non_negative("damping", self.damping)
        if not isinstance(self.every, jax.Array):
            check_count("refresh_every", self.every)
        if not isinstance(self.inverse, Inverse):
            raise ValueError(f"inverse must be a kldwrm_jax.Inverse(...), got {self.inverse!r}")
        period = self.inverse.every
        if period is not None and isinstance(self.every, numbers.Integral) and period % self.every:
            raise ValueError(
                f"inverse=Inverse(every={period}) must be a multiple of refresh_every={self.every}"
            )

    def init(self, layers: Layers) -> tuple[dict[str, Factors], dict[str, Any]]:
        """Factors and inverses before the first refresh."""
        scalar = jnp.zeros((), float)
        at = Setting(scalar, scalar, scalar, jnp.zeros((), bool))

        def inverted(block: LayerBlock, f: Factors) -> Any:
            return self.solver.refresh(block.block, f, f, at)[0]

        factors, inverses = {}, {}
        for block in layers:
            f = block.factors_like(tuple(jnp.zeros(shape, float) for shape in block.shapes))
            shapes = jax.eval_shape(lambda f, block=block: inverted(block, f), f)
            factors[block.name] = f
            inverses[block.name] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return factors, inverses

    def __call__(
        self,
        blocks: list[LayerBlock],
        state: KLDWRMState,
        oracle: Oracle,
        g: Leaves,
        h: Leaves,
        rhs: Leaves,
        lr: jax.Array,
    ) -> tuple[Curvature, Direction]:
        """The curvature for this step, refreshed if that is due, and the direction it gives.

        Statistics and inverses that are not finite, or come with a gradient that is not, are not
        taken in: the last good ones stay.
        """
        rho, gamma = jnp.asarray(self.rho, float), jnp.asarray(self.damping, float)
        at = Setting(gamma, lr, rho, first=state.monitor.refreshes == 0)
        no = jnp.zeros((), bool)

        def keep() -> Curvature:
            b = state.factors if self.wants_b else None
            own = None
            if not self.solver.is_linear:
                own = optax.tree.zeros_like(Direction(rhs, h, jnp.zeros((), float)))
            return Curvature(state.factors, state.inverses, b, own, no, no, no)

        def refresh() -> Curvature:
            fresh = optax.tree.cast(oracle.factors(), float)
            weight = jnp.where(at.first, 0, rho)
            f_bar = dict(state.factors)
            for block in blocks:
                f_bar[block.name] = average(state.factors[block.name], fresh[block.name], weight)
            usable = _all_finite(g)

            def invert() -> Curvature:
                inverses, operators = dict(state.inverses), {}
                for block in blocks:
                    inverses[block.name], operators[block.name] = self.solver.refresh(
                        block.block, f_bar[block.name], fresh[block.name], at
                    )
                own = None if self.solver.is_linear else _direct(blocks, operators, h, rhs)
                b = f_bar | {name: fresh[name] for name in operators} if self.wants_b else None
                good = usable & _all_finite((f_bar, inverses, own))
                new = Curvature(f_bar, inverses, b, own, good, good, usable & ~good)
                return _unless_rejected(new, keep())

            def average_only() -> Curvature:
                good = usable & _all_finite(f_bar)
                b = f_bar if self.wants_b else None
                new = keep()._replace(factors=f_bar, b=b, refreshed=good, rejected=usable & ~good)
                return _unless_rejected(new, keep())

            if self.inverse.every is None:
                return invert()
            return jax.lax.cond(state.count % self.inverse.every == 0, invert, average_only)

        if isinstance(self.every, numbers.Integral) and self.every == 1:
            curvature = refresh()
        else:
            due = state.count % jnp.asarray(self.every, state.count.dtype) == 0
            curvature = jax.lax.cond(due, refresh, keep)
        operators = {
            block.name: self.solver.between(block.block, curvature.inverses[block.name], at)
            for block in blocks
        }
        direction = _direct(blocks, operators, h, rhs)
        if curvature.own is not None:
            direction = optax.tree.where(curvature.inverted, curvature.own, direction)
        return curvature, direction

    def multiply(self, blocks: list[LayerBlock], factors: dict[str, Factors], s: Leaves) -> Leaves:
        """The damped average times a step."""
        gamma, damping = jnp.asarray(self.damping, float), self.solver.damping
        return per_block(
            blocks, lambda b, v: damping.multiply(b.block, factors[b.name], v, gamma), s
        )


def _direct(
    blocks: list[LayerBlock], operators: dict[str, Operator], h: Leaves, rhs: Leaves
) -> Direction:
    """Solves for ``rhs``, and for what the wake remembers of ``h``."""
    v: Leaves = {}
    pulled: Leaves = {}
    contraction = jnp.zeros((), float)
    for block in blocks:
        operator = operators[block.name]
        remembered = block.gather(h)
        x = operator.solve(block.gather(rhs))
        y = x if rhs is h else operator.solve(remembered)
        v |= block.scatter(x)
        pulled |= block.scatter(operator.pull(remembered, y))
        contraction = jnp.maximum(contraction, operator.contraction)
    return Direction(v, pulled, contraction)


def _unless_rejected(new: Curvature, old: Curvature) -> Curvature:
    """The new arrays if they were taken in, the old ones otherwise; the flags are the new ones."""
    chosen = optax.tree.where(new.refreshed, new, old)
    return chosen._replace(refreshed=new.refreshed, inverted=new.inverted, rejected=new.rejected)


def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))
