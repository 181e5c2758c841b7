"""When curvature is computed anew, and the direction it gives."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import check_count, check_decay, check_non_negative
from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import (
    Block,
    LayerBlock,
    Layers,
    Linear,
    Operator,
    QuadraticSolver,
    Setting,
    Solver,
    average,
    per_block,
    sift,
)
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.optimizers.inverse import Inverse, Turn, turns
from kldwrm_jax.optimizers.state import KLDWRMState
from kldwrm_jax.paths import Leaves


class Direction(NamedTuple):
    r"""What the curvature makes of a gradient.

    ``v`` is :math:`[\bar F + \mathrm{lr} B]^{-1}` times it; ``pulled`` is :math:`\bar F v` without
    weight decay, what the wake remembers; ``size`` is the product of ``v`` and what it was made
    of; ``contraction`` is :math:`\|I - \hat M\|`.
    """

    v: Leaves
    pulled: Leaves
    size: jax.Array
    contraction: jax.Array

    def scaled(self, c: jax.Array) -> "Direction":
        """That of a gradient times ``c``."""
        v, pulled = optax.tree.scale(c, (self.v, self.pulled))
        return Direction(v, pulled, c**2 * self.size, self.contraction)


RightSides = Callable[[jax.Array], tuple[Leaves, Leaves]]
"""From :attr:`Curvature.anew` to ``h`` and to ``h`` with weight decay, what is solved for."""


class Curvature(NamedTuple):
    """The curvature after a refresh, or as it was."""

    factors: dict[str, Factors]
    inverses: dict[str, Any]
    strange: jax.Array
    b: dict[str, Factors] | None  # B_k, undamped, if it is wanted
    own: Direction | None  # the direction, where that of a refresh has a B_k of its own
    refreshed: jax.Array  # bool []: statistics were taken in
    rejected: jax.Array  # bool []: they, or their inverses, were not finite: the old ones stay
    outlier: jax.Array  # bool []: some block's were absurd, and kept out
    anew: jax.Array  # bool (blocks,): the average, and with it the wake, begins anew


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
        period = self.inverse.every
        known = isinstance(self.every, numbers.Integral)
        if period is not None and known and period % self.every:
            raise ValueError(
                f"inverse=Inverse(every={period}) must be a multiple of refresh_every={self.every}"
            )
        if self.inverse.stagger and not (known and self._period > 1):
            raise ValueError(
                f"inverse=Inverse(stagger=True) needs a period of at least two steps that is known "
                f"when the optimizer is made: refresh_every={self.every}, every={period}. Under "
                f"optax.inject_hyperparams, name refresh_every among its static_args"
            )

    def init(self, layers: Layers) -> tuple[dict[str, Factors], dict[str, Any]]:
        """Factors and inverses before the first refresh."""
        zero = jnp.zeros((), float)
        factors, inverses = {}, {}
        for block in layers:
            f = block.factors_like(tuple(jnp.zeros(shape, float) for shape in block.shapes))

            def made(f: Factors, kind: Block = block.block) -> Any:
                return self.inverse.make(self.solver.damping, [kind], [f], zero)[0]

            shapes = jax.eval_shape(made, f)
            factors[block.name] = f
            inverses[block.name] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return factors, inverses

    def __call__(
        self,
        blocks: list[LayerBlock],
        state: KLDWRMState,
        oracle: Oracle,
        g: Leaves,
        right_sides: RightSides,
        lr: jax.Array,
    ) -> tuple[Curvature, Direction]:
        """The curvature for this step, refreshed if that is due, and the direction it gives.

        Statistics that are not finite, or come with a gradient that is not, are not taken in; nor
        are inverses that are not finite: the last good ones stay.
        """
        rho, gamma = jnp.asarray(self.rho, float), jnp.asarray(self.damping, float)
        at = Setting(gamma, lr, rho, first=state.monitor.refreshes == 0)
        kinds, names = [block.block for block in blocks], [block.name for block in blocks]
        quadratic = self._quadratic
        no, none = jnp.zeros((), bool), jnp.zeros(len(blocks), bool)

        def solve(inverses: dict[str, Any], anew: jax.Array) -> Direction:
            caches = [inverses[name] for name in names]
            between = [self.solver.between(*own, at) for own in zip(kinds, caches, strict=True)]
            return _direct(blocks, between, *right_sides(anew))

        # Made outside of the branches, where it overlaps with the backward pass; a refresh that has
        # a solve of its own replaces it.
        direction = None if quadratic is None else solve(state.inverses, none)

        def keep() -> Curvature:
            b = state.factors if self.wants_b else None
            unchanged = state.factors, state.inverses, state.strange
            return Curvature(*unchanged, b, direction, no, no, no, none)

        def refresh() -> Curvature:
            fresh = _statistics(oracle, state.factors)
            decay = jnp.where(at.first, 0, rho)
            places = jnp.array([sorted(state.factors).index(name) for name in names])
            before = [state.factors[name] for name in names]
            new = [fresh[name] for name in names]
            sifted = sift(kinds, before, new, decay, state.strange[places], gamma)
            averages = [
                average(*own, sifted.rho[i])
                for i, own in enumerate(zip(before, sifted.factors, strict=True))
            ]
            f_bar = state.factors | dict(zip(names, averages, strict=True))
            usable, old = _all_finite(g), keep()

            def accept_if(finite: jax.Array, new: Curvature) -> Curvature:
                good = usable & finite
                new = new._replace(
                    strange=state.strange.at[places].set(sifted.strange),
                    refreshed=good,
                    outlier=sifted.kept_out.any(),
                    anew=sifted.anew,
                )
                return optax.tree.where(good, new, old._replace(rejected=usable & ~good))

            def average_only() -> Curvature:
                own = None if quadratic is None else solve(state.inverses, sifted.anew)
                b = f_bar if self.wants_b else None
                return accept_if(sifted.finite, old._replace(factors=f_bar, b=b, own=own))

            def solve_too(quadratic: QuadraticSolver) -> Curvature:
                caches, operators = quadratic.refresh(kinds, averages, sifted.factors, at)
                own = _direct(blocks, operators, *right_sides(sifted.anew))
                b = f_bar | dict(zip(names, sifted.factors, strict=True))
                inverses = state.inverses | dict(zip(names, caches, strict=True))
                new = old._replace(
                    factors=f_bar, inverses=inverses, b=b if self.wants_b else None, own=own
                )
                return accept_if(sifted.finite & _all_finite((caches, own)), new)

            if quadratic is None:
                return average_only()
            if self.inverse.every is None:
                return solve_too(quadratic)
            return jax.lax.cond(
                state.count % self.inverse.every == 0, lambda: solve_too(quadratic), average_only
            )

        if isinstance(self.every, numbers.Integral) and self.every == 1:
            curvature = refresh()
        else:
            due = state.count % jnp.asarray(self.every, state.count.dtype) == 0
            curvature = jax.lax.cond(due, refresh, keep)
        if quadratic is None:
            # A branch of its own: what the statistics needed is free by now, and a step needs the
            # less memory at once, with or without a refresh.
            curvature = self._take_turns(blocks, state, curvature, gamma)
        return curvature, curvature.own or solve(curvature.inverses, curvature.anew)

    @property
    def _quadratic(self) -> QuadraticSolver | None:
        """The solver, if a refresh solves with a curvature ``B`` that is not the average."""
        if isinstance(self.solver, Linear) or self.inverse.takes_average:
            return None
        return cast("QuadraticSolver", self.solver)

    @property
    def _period(self) -> int:
        return self.every if self.inverse.every is None else self.inverse.every

    def _take_turns(
        self, blocks: list[LayerBlock], state: KLDWRMState, curvature: Curvature, gamma: jax.Array
    ) -> Curvature:
        """Inverts the blocks whose turn it is; all of them after the first refresh."""
        first = curvature.refreshed & (state.monitor.refreshes == 0)
        phase = state.count % jnp.asarray(self._period, state.count.dtype)
        if self.inverse.stagger:
            planned, ready = turns(blocks, self._period), state.monitor.refreshes > 0
        else:
            planned, ready = [Turn(tuple(blocks), range(1))], curvature.refreshed
        inverses, failed = dict(curvature.inverses), jnp.zeros((), bool)
        for turn in planned:
            due = ready & (phase >= turn.steps.start) & (phase < turn.steps.stop)
            mine = [block.name for block in turn.blocks]
            factors, old = ([t[name] for name in mine] for t in (curvature.factors, inverses))
            lower = jnp.where(first, 0, phase - turn.steps.start)
            upper = jnp.where(first, len(turn.steps), jnp.where(due, lower + 1, lower))
            new, failed_now = self._invert_in_turn(turn, factors, old, lower, upper, gamma)
            inverses |= zip(mine, new, strict=True)
            failed |= failed_now
        return curvature._replace(
            inverses=inverses,
            refreshed=curvature.refreshed & ~(first & failed),  # there is nothing to step with
            rejected=curvature.rejected | failed,
        )

    def _invert_in_turn(
        self,
        turn: Turn,
        factors: list[Factors],
        old: list[Any],
        lower: jax.Array,
        upper: jax.Array,
        gamma: jax.Array,
    ) -> tuple[list[Any], jax.Array]:
        """The steps of a turn from ``lower`` to ``upper``, and whether one of them failed."""
        kinds, no = [block.block for block in turn.blocks], jnp.zeros((), bool)

        def invert(factors: list[Factors], old: list[Any]) -> tuple[list[Any], jax.Array]:
            new = self.inverse.make(self.solver.damping, kinds, factors, gamma, old)
            good = _all_finite(new)
            return jax.lax.cond(good, lambda: new, lambda: old), ~good

        copies = turn.copies
        if copies is None:
            return jax.lax.cond(lower < upper, lambda: invert(factors, old), lambda: (old, no))

        def some_copies(i: jax.Array, carried: tuple) -> tuple[list[Any], jax.Array]:
            caches, failed = carried
            start = i * copies
            new, failed_now = invert(*_cut((factors, caches), start, copies))
            return _paste(caches, new, start), failed | failed_now

        return jax.lax.fori_loop(lower, upper, some_copies, (old, no))

    def solve_between(
        self, blocks: list[LayerBlock], inverses: dict[str, Any], v: Leaves, lr: jax.Array
    ) -> Leaves:
        """The cached inverse times a direction, as on a step without a refresh."""
        at = Setting(jnp.asarray(self.damping, float), lr, jnp.asarray(self.rho, float), False)
        return per_block(
            blocks, lambda b, x: self.solver.between(b.block, inverses[b.name], at).solve(x), v
        )

    def multiply(self, blocks: list[LayerBlock], factors: dict[str, Factors], s: Leaves) -> Leaves:
        """The damped average times a step."""
        gamma, damping = jnp.asarray(self.damping, float), self.solver.damping
        return per_block(
            blocks, lambda b, v: damping.multiply(b.block, factors[b.name], v, gamma), s
        )


def _statistics(oracle: Oracle, known: dict[str, Factors]) -> dict[str, Factors]:
    """The oracle's factors, if they are of the optimizer's blocks."""
    fresh = optax.tree.cast(oracle.factors(), float)
    theirs, ours = (jax.tree.map(jnp.shape, factors) for factors in (fresh, known))
    for name in ours | theirs:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the block {name!r} has factors of shape {theirs.get(name)} in the oracle and "
                f"{ours.get(name)} in the optimizer: make both from the same "
                f"net = kldwrm_jax.instrument(...)"
            )
    return fresh


def _direct(
    blocks: list[LayerBlock], operators: list[Operator], h: Leaves, rhs: Leaves
) -> Direction:
    """Solves for ``rhs``, and for what the wake remembers of ``h``."""
    v: Leaves = {}
    pulled: Leaves = {}
    size, contraction = jnp.zeros((), float), jnp.zeros((), float)
    for block, operator in zip(blocks, operators, strict=True):
        right, remembered = block.gather(rhs), block.gather(h)
        x = operator.solve(right)
        y = x if rhs is h else operator.solve(remembered)
        v |= block.scatter(x)
        pulled |= block.scatter(operator.pull(remembered, y))
        size += jnp.vdot(x, right, precision=jax.lax.Precision.HIGHEST)
        contraction = jnp.maximum(contraction, operator.contraction)
    return Direction(v, pulled, size, contraction)


def _cut(tree: Any, start: jax.Array, length: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), tree)


def _paste(tree: Any, part: Any, start: jax.Array) -> Any:
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=0), tree, part
    )


def _all_finite(tree: Any) -> jax.Array:
    # Zero times what is not finite is not zero.
    return optax.tree.sum(jax.tree.map(lambda x: x * 0, tree)) == 0
