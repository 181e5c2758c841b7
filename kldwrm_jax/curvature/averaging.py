r"""The averaged Fisher :math:`\bar F`: how statistics enter it, and how and when it is inverted."""

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_count, check_decay
from kldwrm_jax.curvature.blocks import Block, Factors, average
from kldwrm_jax.curvature.inverse import Inverse, InversionSlot, slots
from kldwrm_jax.curvature.layers import LayerBlock, Layers, per_block
from kldwrm_jax.curvature.outliers import Traces, Verdict, judge_outlier, traces
from kldwrm_jax.curvature.sides import Side
from kldwrm_jax.curvature.solvers import (
    Operator,
    QuadraticSolver,
    Solver,
    StepScalars,
)
from kldwrm_jax.finite import all_finite, together, total
from kldwrm_jax.paths import Leaves
from kldwrm_jax.replicas import shared_any, shared_count


class Averages(NamedTuple):
    """What is stored of the averaged Fisher, by block."""

    factors: dict[str, Factors]
    inverses: dict[str, Any]
    outlier_streak: dict[str, jax.Array]  # int32 []: consecutive refreshes far from the average


class Refreshed(NamedTuple):
    """The averaged Fisher after a refresh, or as it was."""

    averages: Averages
    restart: dict[str, jax.Array]  # bool []: whether a block's average, and so its wake, restarts
    refreshed: jax.Array  # bool []: the statistics were averaged in
    rejected: jax.Array  # bool []: they, or their inverses, were not finite
    outlier: jax.Array  # bool []: some block's statistics were rejected as outliers
    damping: jax.Array  # float []: gamma of the step, found at the first refresh if not given


def unchanged(averages: Averages, blocks: Iterable[LayerBlock], damping: Scalar) -> Refreshed:
    """The averages as they are, on a step without a refresh."""
    no = jnp.zeros((), bool)
    restart = {block.name: no for block in blocks}
    return Refreshed(averages, restart, no, no, no, jnp.asarray(damping, float))


class CachedInverse(NamedTuple):
    r"""The inverses as they are stored, for steps where :math:`B_k = \bar F_k`."""

    blocks: list[LayerBlock]
    solver: Solver
    inverses: dict[str, Any]
    at: StepScalars

    @property
    def operators(self) -> list[Operator]:
        """The solve of every block."""
        return [
            self.solver.between(block.block, self.inverses[block.name], self.at)
            for block in self.blocks
        ]

    def times(self, v: Leaves) -> Leaves:
        """The inverse times ``v``."""
        out: Leaves = {}
        for block, operator in zip(self.blocks, self.operators, strict=True):
            out |= block.scatter(operator.solve(block.gather(v)))
        return out


@dataclasses.dataclass(frozen=True)
class AveragedFisher:
    """How a model's curvature is averaged and inverted, and when.

    Args:
      layers: the model's curvature blocks.
      solver: the linear algebra of the steps that are made with it.
      rho: decay of the average, once per refresh.
      refresh_every: steps between two refreshes of the statistics.
      inverse: how and when the average is inverted.
      first_damping: the damping at the first refresh, in units of the mean eigenvalue of its
        statistics; None where the damping is given.
    """

    layers: Layers
    solver: Solver
    rho: Any
    refresh_every: Any
    inverse: Inverse
    first_damping: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Layers):
            raise ValueError(
                f"layers must be net.layers of net = kldwrm_jax.instrument(...), got "
                f"{type(self.layers).__name__}"
            )
        check_decay("rho", self.rho)
        if not isinstance(self.refresh_every, jax.Array):
            check_count("refresh_every", self.refresh_every)
        period = self.inverse.every
        known = isinstance(self.refresh_every, numbers.Integral)
        if period is not None and known and period % self.refresh_every:
            raise ValueError(
                f"inverse=Inverse(every={period}) must be a multiple of "
                f"refresh_every={self.refresh_every}"
            )
        if self.inverse.stagger and not (known and self.invert_every > 1):
            raise ValueError(
                f"inverse=Inverse(stagger=True) needs a period of at least two steps that is known "
                f"when the optimizer is made: refresh_every={self.refresh_every}, every={period}. "
                f"Under optax.inject_hyperparams, name refresh_every among its static_args"
            )

    @property
    def invert_every(self) -> Any:
        """Steps between two inversions."""
        return self.refresh_every if self.inverse.every is None else self.inverse.every

    @property
    def fresh_solver(self) -> QuadraticSolver | None:
        r"""The solver, if at an inversion its :math:`B_k` is the batch's own curvature."""
        if isinstance(self.solver, QuadraticSolver) and not self.inverse.takes_average(self.layers):
            return self.solver
        return None

    def init(self) -> Averages:
        """Zeros, before the first refresh."""
        factors: dict[str, Factors] = {}
        inverses: dict[str, Any] = {}
        for block in self.layers:
            f = block.factors_like(tuple(jnp.zeros(shape, float) for shape in block.shapes))

            def invert(f: Factors, kind: Block = block.block) -> Any:
                mode, zero = self.solver.damping_mode, jnp.zeros((), float)
                return self.inverse.make(mode, [kind], [f], zero)[0]

            factors[block.name] = f
            inverses[block.name] = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(invert, f)
            )
        streak = {name: jnp.zeros((), jnp.int32) for name in factors}
        return Averages(factors, inverses, streak)

    def refresh_due(self, count: jax.Array) -> jax.Array:
        """Whether the statistics are refreshed on this step."""
        count = shared_count(count)
        return count % jnp.asarray(self.refresh_every, count.dtype) == 0

    def if_refresh(
        self, count: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]
    ) -> Any:
        """One branch on steps with a refresh, the other in between."""
        return _if_due(count, self.refresh_every, then, otherwise)

    def if_inversion(
        self, count: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]
    ) -> Any:
        """At a refresh: one branch if an inversion is due, too, and the other if not."""
        return _if_due(count, self.inverse.every or 1, then, otherwise)

    def observe(
        self,
        blocks: list[LayerBlock],
        before: Averages,
        fresh: dict[str, Factors],
        usable: jax.Array,
        at: StepScalars,
    ) -> tuple[Refreshed, dict[str, Factors]]:
        """Averages a batch's statistics in.

        Args:
          blocks: of the parameters that are trained.
          before: the averages so far.
          fresh: the batch's statistics.
          usable: whether they belong to a gradient that is finite.
          at: the step's hyperparameters.

        Returns:
          The averages after it, or as they were if the statistics are not finite; and the
          statistics, in which outliers are replaced by their average.
        """
        new = {block.name: traces(block.block, fresh[block.name]) for block in blocks}
        old = {block.name: traces(block.block, before.factors[block.name]) for block in blocks}
        good, verdicts = self._judge(new, old, before, usable, at)

        def averaged(name: str) -> Factors:
            verdict = verdicts[name]
            keep = ~good | verdict.rejected
            f_bar = before.factors[name]
            return optax.tree.where(keep, f_bar, average(f_bar, fresh[name], verdict.rho))

        averages = Averages(
            before.factors | {name: averaged(name) for name in new},
            before.inverses,
            before.outlier_streak | {name: own.streak for name, own in verdicts.items()},
        )
        refreshed = Refreshed(
            averages,
            restart={name: own.restart for name, own in verdicts.items()},
            refreshed=good,
            rejected=usable & ~good,
            outlier=together([own.rejected for own in verdicts.values()]).any(),
            damping=self._damping(blocks, new, at),
        )
        screened = {
            name: optax.tree.where(own.rejected, averages.factors[name], fresh[name])
            for name, own in verdicts.items()
        }
        return refreshed, screened

    def _damping(
        self, blocks: list[LayerBlock], new: dict[str, Traces], at: StepScalars
    ) -> jax.Array:
        r""":math:`\gamma`, or at first its multiple of :math:`\mathrm{tr}(F_0)` per parameter."""
        if self.first_damping is None:
            return jnp.asarray(at.damping, float)
        traces = total([block.size * jnp.prod(jnp.stack(new[block.name])) for block in blocks])
        mean = traces / sum(block.size for block in blocks)
        return jnp.where(at.first, self.first_damping * mean, at.damping)

    def _judge(
        self,
        new: dict[str, Traces],
        old: dict[str, Traces],
        before: Averages,
        usable: jax.Array,
        at: StepScalars,
    ) -> tuple[jax.Array, dict[str, Verdict]]:
        """Whether the statistics are finite, and how each block's are to be averaged."""
        no = jnp.zeros((), bool)

        def finite() -> jax.Array:
            return usable & jnp.isfinite(together(jax.tree.leaves(new))).all()

        def first() -> tuple[jax.Array, dict[str, Verdict]]:
            verdict = Verdict(jnp.zeros((), float), no, no, jnp.zeros((), jnp.int32))
            return finite(), dict.fromkeys(new, verdict)

        def later() -> tuple[jax.Array, dict[str, Verdict]]:
            good, verdicts = finite(), {}
            for name, streak in before.outlier_streak.items():
                if name in new:
                    verdict = judge_outlier(new[name], old[name], at.rho, streak, at.damping)
                    verdicts[name] = Verdict(
                        verdict.rho,
                        good & verdict.rejected,
                        good & verdict.restart,
                        jnp.where(good, verdict.streak, streak),
                    )
            return good, verdicts

        # A branch also keeps XLA from computing these scalars again in the kernel of every factor.
        return jax.lax.cond(at.first, first, later)

    def invert(
        self, blocks: list[LayerBlock], refreshed: Refreshed, count: jax.Array, at: StepScalars
    ) -> Refreshed:
        """Renews the inverses of the blocks whose turn it is; after the first refresh, all.

        Inverses that are not finite are not taken: the last good ones stay.
        """
        first = shared_any(refreshed.refreshed & at.first)
        count = shared_count(count)
        phase = count % jnp.asarray(self.invert_every, count.dtype)
        if self.inverse.stagger:
            planned, usable = slots(blocks, self.invert_every), first | ~jnp.asarray(at.first)
        else:
            planned, usable = [InversionSlot(tuple(blocks), range(1))], refreshed.refreshed
        inverses, failed = dict(refreshed.averages.inverses), jnp.zeros((), bool)
        for slot in planned:
            names = [block.name for block in slot.blocks]
            due = (phase >= slot.steps.start) & (phase < slot.steps.stop)
            lower = jnp.where(first, 0, phase - slot.steps.start)
            upper = jnp.where(first, len(slot.steps), jnp.where(due, lower + 1, lower))
            factors = [refreshed.averages.factors[name] for name in names]
            old = [inverses[name] for name in names]
            new, finite = self._invert_slot(
                slot, factors, old, (lower, upper), usable, refreshed.damping
            )
            inverses |= zip(names, new, strict=True)
            failed |= usable & ~finite
        return refreshed._replace(
            averages=refreshed.averages._replace(inverses=inverses),
            refreshed=refreshed.refreshed & ~(first & failed),  # there is nothing to step with
            rejected=refreshed.rejected | failed,
        )

    def _invert_slot(
        self,
        slot: InversionSlot,
        factors: list[Factors],
        old: list[Any],
        steps: tuple[jax.Array, jax.Array],
        usable: jax.Array,
        damping: jax.Array,
    ) -> tuple[list[Any], jax.Array]:
        """The inversions of a slot's ``steps``, and whether they are finite."""
        kinds, (lower, upper), yes = [b.block for b in slot.blocks], steps, jnp.ones((), bool)

        def invert(factors: list[Factors], old: list[Any]) -> tuple[list[Any], jax.Array]:
            new = self.inverse.make(self.solver.damping_mode, kinds, factors, damping, old)
            finite = all_finite(list(map(_spectra, kinds, new)))
            return jax.lax.cond(usable & finite, lambda: new, lambda: old), finite

        copies = slot.copies
        if copies is None:
            return jax.lax.cond(lower < upper, lambda: invert(factors, old), lambda: (old, yes))

        def some_copies(i: jax.Array, carried: tuple) -> tuple[list[Any], jax.Array]:
            inverses, finite = carried
            new, finite_now = invert(*_cut((factors, inverses), i * copies, copies))
            return _paste(inverses, new, i * copies), finite & finite_now

        return jax.lax.fori_loop(lower, upper, some_copies, (old, yes))

    def times(
        self, blocks: list[LayerBlock], averages: Averages, v: Leaves, damping: Scalar
    ) -> Leaves:
        """The damped average times ``v``."""
        mode, factors = self.solver.damping_mode, averages.factors
        return per_block(
            blocks, lambda b, x: mode.multiply(b.block, factors[b.name], x, damping), v
        )


def _if_due(
    count: jax.Array, every: Any, then: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    if isinstance(every, numbers.Integral) and every == 1:
        return then()
    count = shared_count(count)
    return jax.lax.cond(count % jnp.asarray(every, count.dtype) == 0, then, otherwise)


def _spectra(block: Block, cache: Any) -> list[jax.Array]:
    """What is not finite if anything of an inverse is not.

    Of eigenvectors their values; of an inverse its diagonal, which bounds the rest.
    """

    def own(side: type[Side], x: Any) -> Any:
        if hasattr(x, "values"):
            return x._replace(vectors=x.values)
        return side.mean_eigenvalue(x)

    return [own(*each) for each in block.split(cache)]


def _cut(tree: Any, start: jax.Array, length: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), tree)


def _paste(tree: Any, part: Any, start: jax.Array) -> Any:
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=0), tree, part
    )
