r"""The direction of a step: a batch's curvature, averaged and inverted, times the gradients.

A refresh has two parts. First the batch is *observed*: after that it is known which blocks restart
and so what the wake remembers. Then the average is *inverted*, and the direction *solved* for.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import (
    AveragedFisher,
    Averages,
    CachedInverse,
    LayerBlock,
    Operator,
    QuadraticSolver,
    Refreshed,
    StepScalars,
    unchanged,
)
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.finite import all_finite, together, total
from kldwrm_jax.optimizers.gradients import Gradients
from kldwrm_jax.paths import Leaves


class StepInputs(NamedTuple):
    """What one step is made from."""

    blocks: list[LayerBlock]  # of the parameters that are not masked
    k: jax.Array  # the step count
    oracle: Oracle
    gradients: Gradients
    at: StepScalars

    def with_damping(self, damping: jax.Array) -> "StepInputs":
        """The same, once the damping is known."""
        return self._replace(at=self.at._replace(damping=damping))


class Direction(NamedTuple):
    """What the curvature makes of ``h``, and of ``rhs``, which is ``h`` with weight decay."""

    v: Leaves  # [F_bar + lr B]^-1 rhs: the step is -v before it is clipped
    fisher_v: Leaves  # F_bar [F_bar + lr B]^-1 h: what the wake remembers, if there is one
    size: jax.Array  # float []: v' rhs
    contraction: jax.Array  # float []: ||I - Mhat||
    b: dict[str, Factors] | None  # B_k, undamped; None if it is the average

    def scaled(self, c: jax.Array) -> "Direction":
        """The direction of gradients times ``c``."""
        v, fisher_v = optax.tree.scale(c, (self.v, self.fisher_v))
        return self._replace(v=v, fisher_v=fisher_v, size=c**2 * self.size)


def solve(
    operators: list[Operator], inputs: StepInputs, restart: Mapping[str, jax.Array]
) -> Direction:
    """The direction of every block, by its operator."""
    gradients = inputs.gradients.forget(inputs.blocks, restart)
    # [c F + lr c B]^-1 (lr m + c R) = [F + lr B]^-1 ((lr / c) m + R)
    lr = inputs.at.lr / inputs.at.calibration
    h = gradients.effective(lr)
    rhs = gradients.right_side(lr, h)
    v: Leaves = {}
    fisher_v: Leaves = {}
    sizes, contractions = [], []
    for block, operator in zip(inputs.blocks, operators, strict=True):
        right, remembered = block.gather(rhs), block.gather(h)
        x = operator.solve(right)
        v |= block.scatter(x)
        if gradients.pull is not None:
            y = x if rhs is h else operator.solve(remembered)
            fisher_v |= block.scatter(operator.times_average(remembered, y))
        size = jnp.vdot(x, right, precision=jax.lax.Precision.HIGHEST)
        # What the likelihood does not see has no divergence; 0 times what is not finite is nan.
        sizes.append(0 * size if block.unseen else size)
        contractions.append(jnp.asarray(operator.contraction, float))
    return Direction(v, fisher_v, total(sizes), jnp.max(together(contractions)), b=None)


def solve_cached(fisher: AveragedFisher, inputs: StepInputs, refreshed: Refreshed) -> Direction:
    r"""The direction by the stored inverses, with :math:`B_k = \bar F_k`."""
    inputs = inputs.with_damping(refreshed.damping)
    inverses = refreshed.averages.inverses
    inverse = CachedInverse(inputs.blocks, fisher.solver, inverses, inputs.at)
    return solve(inverse.operators, inputs, refreshed.restart)


def observe(
    fisher: AveragedFisher, before: Averages, inputs: StepInputs, judged: Any
) -> tuple[Refreshed, dict[str, Factors]]:
    """The averages with the batch's statistics if ``judged`` is finite, and those statistics."""
    fresh = _statistics(inputs.oracle, before.factors)
    usable = all_finite(judged)
    return fisher.observe(inputs.blocks, before, fresh, usable, inputs.at)


def advance(
    fisher: AveragedFisher, before: Averages, inputs: StepInputs, *, wants_b: bool = False
) -> tuple[Refreshed, Direction]:
    """The averages, refreshed if that is due, and the direction they give, with ``b`` if wanted."""
    as_before = unchanged(before, inputs.blocks, inputs.at.damping)
    solver, judged = fisher.fresh_solver, _judged(inputs)
    if solver is None:
        refreshed = fisher.if_refresh(
            inputs.k, lambda: observe(fisher, before, inputs, judged)[0], lambda: as_before
        )
        # In a branch of its own: the memory that the statistics needed is free by now.
        refreshed = fisher.invert(inputs.blocks, refreshed, inputs.k, inputs.at)
        return refreshed, solve_cached(fisher, inputs, refreshed)

    def cached(refreshed: Refreshed) -> tuple[Refreshed, Direction]:
        b = refreshed.averages.factors if wants_b else None
        return refreshed, solve_cached(fisher, inputs, refreshed)._replace(b=b)

    # Solved outside of the branches, where it overlaps with the backward pass.
    kept = cached(as_before)

    def refresh() -> tuple[Refreshed, Direction]:
        observed, fresh = observe(fisher, before, inputs, judged)
        return fisher.if_inversion(
            inputs.k,
            lambda: _solve_fresh(solver, inputs, observed, fresh, cached),
            lambda: cached(observed),
        )

    return fisher.if_refresh(inputs.k, refresh, lambda: kept)


def _judged(inputs: StepInputs) -> Any:
    """What is finite if and only if the gradient is.

    Without a wake it is the right side of the solve, which every step computes: the gradient itself
    would have to be brought into another layout for the branch of a refresh.
    """
    gradients, lr = inputs.gradients, inputs.at.lr / inputs.at.calibration
    if gradients.pull is not None:
        return gradients.g
    rhs = gradients.right_side(lr, gradients.effective(lr))
    return [block.gather(rhs) for block in inputs.blocks]


def _solve_fresh(
    solver: QuadraticSolver,
    inputs: StepInputs,
    observed: Refreshed,
    fresh: dict[str, Factors],
    cached: Callable[[Refreshed], tuple[Refreshed, Direction]],
) -> tuple[Refreshed, Direction]:
    r"""New inverses, and the direction with the batch's own curvature as :math:`B_k`.

    If they are not finite, the old inverses stay, and the direction is what those make of the
    wake as it is now, without the blocks that restart.
    """
    names, averages = [block.name for block in inputs.blocks], observed.averages
    inputs = inputs.with_damping(observed.damping)
    inverses, operators = solver.refresh(
        [block.block for block in inputs.blocks],
        [averages.factors[name] for name in names],
        [fresh[name] for name in names],
        inputs.at,
    )
    direction = solve(operators, inputs, observed.restart)
    finite = all_finite((inverses, direction))
    inverted = averages.inverses | dict(zip(names, inverses, strict=True))
    new = observed._replace(averages=averages._replace(inverses=inverted))
    if jax.eval_shape(cached, observed)[1].b is not None:
        direction = direction._replace(b=averages.factors | fresh)
    refreshed, direction = jax.lax.cond(
        observed.refreshed & finite, lambda: (new, direction), lambda: cached(observed)
    )
    refreshed = refreshed._replace(
        refreshed=observed.refreshed & (finite | ~jnp.asarray(inputs.at.first)),
        rejected=observed.rejected | (observed.refreshed & ~finite),
    )
    return refreshed, direction


def _statistics(oracle: Oracle, known: dict[str, Factors]) -> dict[str, Factors]:
    """The oracle's factors, if they are those of the optimizer's blocks."""
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
