r"""The step that all members of the family share, as an Optax transform.

With :math:`\mathrm{lr} = 1/\lambda_k` and everything scaled by it (see :mod:`kldwrm_jax.wake`):

.. math::
   h &= \mathrm{lr}\, \nabla M_k(0) + R_k \\
   v &= [\bar F_k + \mathrm{lr}\, B_k]^{-1} (h + \mathrm{lr}\, \gamma_{wd}\, \theta_k) \\
   s &= -\mathrm{clip}(v) \\
   R_{k+1} &= \rho\,(R_k + \bar F_k s_k)
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax import wake
from kldwrm_jax.arguments import check_decay, check_non_negative, is_known
from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import AveragedFisher, Averages, CachedInverse, Refreshed, StepScalars
from kldwrm_jax.finite import vdot
from kldwrm_jax.optimizers import calibration, eager, loss_scale
from kldwrm_jax.optimizers.clipping import Clip, kl_clip_factor
from kldwrm_jax.optimizers.direction import Direction, StepInputs, advance
from kldwrm_jax.optimizers.gradients import Gradients
from kldwrm_jax.optimizers.inner_problem import InnerProblem, Iterates, Solution
from kldwrm_jax.optimizers.rejection import check_not_stuck, fade, fits
from kldwrm_jax.optimizers.same_model import check_same_model
from kldwrm_jax.optimizers.self_setting import LAST, OFFSET, PROPOSAL, Fit, SelfSetting
from kldwrm_jax.optimizers.state import KLDWRMState, increment_if, new_monitor, next_count
from kldwrm_jax.optimizers.true_size import limit_true_size
from kldwrm_jax.paths import Leaves, leaves_by_path, leaves_like, replace_leaves
from kldwrm_jax.replicas import shared_count

_MEASURED = Fit()  # the part of the batch on which a step's true size is measured


class Step(NamedTuple):
    """A step on its way through the pieces of a member."""

    inputs: StepInputs
    refreshed: Refreshed
    direction: Direction
    s: Leaves  # the step as it is so far
    size: jax.Array  # float []: its s'F_bar s by the blocks, or more
    finite: jax.Array  # bool []: whether it can be taken
    undo: jax.Array  # bool []: whether the last step is undone in its place
    metrics: dict[str, jax.Array]  # fields of the monitor
    memory: dict[str, Any]  # fields of the state, if the step is taken
    observed: dict[str, Any]  # fields of the state in any case


@dataclasses.dataclass(frozen=True)
class Member:
    r"""One member of the family, put together from its pieces; see ``family.py``.

    Args:
      fisher: the averaged curvature, and the linear algebra of the member's model.
      learning_rate: :math:`1/\lambda`, a number or a schedule; None for steps that set themselves.
      damping: :math:`\gamma`, a number or a schedule; None if it sets itself.
      clip: limits of the step.
      weight_decay: joins the effective gradient; preconditioned but not remembered.
      calibrate: whether the blocks are multiplied by :math:`c`; see ``calibration.py``.
      wake: ``"proposed"``, ``"taken"``, or None for a member without a wake.
      nu: momentum of the linear model.
      inner_problem: QE's, or None.
      momentum: what the last step is multiplied by and added.
      self_setting: how steps set themselves, or None.
    """

    fisher: AveragedFisher
    learning_rate: optax.ScalarOrSchedule | None
    damping: optax.ScalarOrSchedule | None
    clip: Clip
    weight_decay: Any
    calibrate: bool
    wake: str | None
    nu: Any = 0.0
    inner_problem: InnerProblem | None = None
    momentum: Any = 0.0
    self_setting: SelfSetting | None = None

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            check_non_negative("learning_rate", self.learning_rate)
        if self.damping is not None:
            check_non_negative("damping", self.damping)
        check_decay("momentum", self.momentum)
        check_decay("nu", self.nu)
        check_non_negative("weight_decay", self.weight_decay)
        if not isinstance(self.calibrate, bool):
            raise ValueError(f"calibrate must be True or False, got {self.calibrate!r}")

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The member as an Optax transform."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> KLDWRMState:
        """The state before the first step; its blocks are those of ``layers``."""
        self.fisher.layers.active(leaves_by_path(params))
        averages = self.fisher.init()

        def like_params() -> optax.Updates:
            return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), float), params)

        remembers, inner = self.wake is not None, self.inner_problem
        return KLDWRMState(
            count=jnp.zeros((), jnp.int32),
            **averages._asdict(),
            calibration=jnp.zeros((), float),
            g_prev=like_params() if remembers else None,
            g_hat=like_params() if remembers else None,
            pull=like_params() if remembers else None,
            momentum=like_params() if self._has_momentum else None,
            history=None if inner is None else inner.empty(params),
            last_step=like_params() if self._has_last_step else None,
            offset=None if self.self_setting is None else like_params(),
            fit=None if self.self_setting is None else self.self_setting.init(),
            monitor=new_monitor(),
        )

    def update(
        self,
        updates: optax.Updates,
        state: KLDWRMState,
        params: optax.Params | None = None,
        *,
        oracle: Oracle | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, KLDWRMState]:
        """One step; ``oracle`` is the batch's ``net.oracle(...)``, the update the step itself."""
        del extra_args
        blocks = self.fisher.layers.active(leaves_by_path(updates))
        oracle = self._check(updates, state, params, oracle)
        if not blocks:  # everything is masked
            return updates, state
        if not is_known((updates, state, params, oracle)):
            return self._step(updates, state, params, oracle)
        check_not_stuck(state.monitor.refused_in_a_row)
        check_non_negative("learning_rate", self._scalars(state).lr)
        if eager.holds_arrays(self):
            eager.warn_of_slow_steps()
            return self._step(updates, state, params, oracle)
        return self._compiled_step(updates, state, params, oracle)

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., tuple[optax.Updates, KLDWRMState]]:
        def step(*args: Any) -> tuple[optax.Updates, KLDWRMState]:
            return self._step(*args)

        return jax.jit(step)

    def _step(
        self,
        updates: optax.Updates,
        state: KLDWRMState,
        params: optax.Params | None,
        oracle: Oracle,
    ) -> tuple[optax.Updates, KLDWRMState]:
        blocks = self.fisher.layers.active(leaves_by_path(updates))
        gradients = self._gradients(updates, state, params)
        at = self._scalars(state)
        step = self._solve(state, StepInputs(blocks, state.count, oracle, gradients, at))
        if self.self_setting is None:
            step = self._calibrate(state, step)
            step = self._clip(step)
            step = self._add_momentum(state, step)
        else:
            step = self._set_itself(self.self_setting, state, step)
        step = self._solve_inner_problem(state, step, params)
        step = self._limit_true_size(state, step)
        step = self._remember(state, step)
        return self._accept(updates, state, step)

    def _scalars(self, state: KLDWRMState) -> StepScalars:
        def now(value: Any) -> jax.Array:
            return jnp.asarray(value(state.count) if callable(value) else value, float)

        return StepScalars(
            # A step that sets itself is one of calibrated blocks, whose lambda is 1.
            lr=now(1.0 if self.learning_rate is None else self.learning_rate),
            rho=jnp.asarray(self.fisher.rho, float),
            damping=state.fit.damping if self.damping is None else now(self.damping),
            first=state.monitor.refreshes == 0,
            calibration=calibration.factor(state.calibration),
        )

    def _gradients(
        self, updates: optax.Updates, state: KLDWRMState, params: optax.Params | None
    ) -> Gradients:
        g = m = optax.tree.cast(leaves_by_path(updates), float)
        # Steps that set themselves are in the units of the likelihood, whose curvature it is.
        unit = 1.0 if state.fit is None else 1 / loss_scale.factor(state.fit.scale)
        if state.fit is not None:
            g = m = optax.tree.scale(unit, g)
        if state.momentum is not None:
            nu = jnp.asarray(self.nu, float)
            m = wake.linear_model(nu, leaves_by_path(state.momentum), g)
        decay = None
        if not _is_zero(self.weight_decay):
            theta = optax.tree.cast(leaves_by_path(params), float)
            decay = optax.tree.scale(unit * jnp.asarray(self.weight_decay, float), theta)
        return Gradients(g, m, None if self.wake is None else leaves_by_path(state.pull), decay)

    def _solve(self, state: KLDWRMState, inputs: StepInputs) -> Step:
        r""":math:`v = [\bar F_k + \mathrm{lr} B_k]^{-1} (h + \mathrm{lr}\,\gamma_{wd}\theta_k)`."""
        before = Averages(state.factors, state.inverses, state.outlier_streak)
        wants_b = self.inner_problem is not None
        refreshed, direction = advance(self.fisher, before, inputs, wants_b=wants_b)
        left = inputs.gradients.forget(inputs.blocks, refreshed.restart)
        inputs = inputs.with_damping(refreshed.damping)
        return Step(
            inputs=inputs._replace(gradients=left),
            refreshed=refreshed,
            direction=direction,
            s=jax.tree.map(jnp.negative, direction.v),
            size=direction.size,
            # What is not finite in gradient, pull or direction is not finite in their product.
            finite=jnp.isfinite(direction.size) & (inputs.at.lr >= 0),
            undo=jnp.zeros((), bool),
            metrics={
                "contraction": inputs.at.rho * direction.contraction,
                "learning_rate": jnp.asarray(inputs.at.lr, float),
                "momentum": jnp.asarray(self.momentum, float),
                "damping": refreshed.damping,
            },
            memory={"count": next_count(state.count, self._round)},
            observed=refreshed.averages._asdict(),
        )

    def _calibrate(self, state: KLDWRMState, step: Step) -> Step:
        """Measures ``c`` at a refresh. The first measurement serves the first step, too."""
        if not self.calibrate:
            return step
        measured = self.fisher.if_refresh(
            state.count,
            lambda: calibration.measure(
                self.fisher, state.calibration, step.inputs, step.refreshed, step.direction
            ),
            lambda: state.calibration,
        )
        at = step.inputs.at
        # Before the first step nothing is remembered that would not scale with the gradient.
        c = jnp.where(state.count == 0, calibration.factor(measured), at.calibration)
        return step._replace(
            inputs=step.inputs._replace(at=at._replace(calibration=c)),
            direction=step.direction.scaled(at.calibration / c),
            observed=step.observed | {"calibration": measured},
        )

    def _clip(self, step: Step) -> Step:
        at = step.inputs.at
        size = at.calibration * step.direction.size
        s, kl_clip, block_clip = self.clip.step(step.direction.v, size, at.lr, step.inputs.blocks)
        metrics = step.metrics | {"kl_clip": kl_clip, "block_clip": block_clip}
        return step._replace(s=s, size=kl_clip**2 * size, metrics=metrics)

    def _add_momentum(self, state: KLDWRMState, step: Step) -> Step:
        r""":math:`s_k + m s_{k-1}`, within the limit, too.

        Its size is at most :math:`(\sqrt{s_k'\bar F s_k} + m \sqrt{s_{k-1}'\bar F s_{k-1}})^2`.
        """
        if state.last_step is None:
            return step
        last, momentum = leaves_by_path(state.last_step), jnp.asarray(self.momentum, float)
        s = {path: x + momentum * last[path] for path, x in step.s.items()}
        size = (jnp.sqrt(step.size) + momentum * jnp.sqrt(state.monitor.block_size)) ** 2
        if self.clip.kl is None:
            return step._replace(s=s, size=size)
        factor = kl_clip_factor(jnp.asarray(self.clip.kl, float), size)
        metrics = step.metrics | {"kl_clip": factor * step.metrics["kl_clip"]}
        return step._replace(s=optax.tree.scale(factor, s), size=factor**2 * size, metrics=metrics)

    def _set_itself(self, setting: SelfSetting, state: KLDWRMState, step: Step) -> Step:
        """A step of proposal, last step and averaged iterates, by what the batches say of them."""
        inputs, v = step.inputs, step.direction.v
        every, offsets = leaves_by_path(state.last_step), leaves_by_path(state.offset)
        last, offset = ({path: tree[path] for path in v} for tree in (every, offsets))
        new = setting.step(state.fit, state.calibration, inputs, step.direction, (offset, last))
        c, w = calibration.factor(new.calibration), new.w
        s = {
            path: w[OFFSET] * offset[path] + w[LAST] * last[path] - w[PROPOSAL] * x
            for path, x in v.items()
        }
        # What the wake remembers of the first step is of blocks that were not calibrated yet.
        scale = jnp.where(state.calibration == 0, new.rescaled * inputs.at.calibration / c, 1)
        moved = replace_leaves(state.offset, setting.next_offset(new, v, offset))
        return step._replace(
            inputs=inputs._replace(
                at=inputs.at._replace(calibration=c),
                gradients=inputs.gradients.scaled(new.rescaled),
            ),
            direction=step.direction.scaled(scale),
            s=s,
            finite=step.finite & jnp.isfinite(optax.tree.vdot(s, s)) & new.is_sized,
            undo=new.undo,
            metrics=step.metrics
            | {
                "kl_clip": new.shortened,
                "learning_rate": w[PROPOSAL] / inputs.at.calibration,
                "momentum": w[LAST] + w[OFFSET],
                "reduction_ratio": new.state.judgement.share,
                "kl_limit": new.state.limit,
                "loss_scale": loss_scale.factor(new.state.scale),
                "loss_agreement": loss_scale.agreement(new.state.scale),
                "averaging": (~new.state.fitting).astype(float),
            },
            memory=step.memory | {"offset": moved, "fit": new.state},
            observed=step.observed | {"calibration": new.calibration},
        )

    def _solve_inner_problem(
        self, state: KLDWRMState, step: Step, params: optax.Params | None
    ) -> Step:
        """QE: the Q step, improved on the exact divergence once the buffer is full."""
        problem, inputs, averages = self.inner_problem, step.inputs, step.refreshed.averages
        if problem is None:
            return step
        taken = step.finite & self._ready(state, step)
        iterates = problem.push(Iterates(params, state.history, state.count), taken)
        inverse = CachedInverse(inputs.blocks, self.fisher.solver, averages.inverses, inputs.at)
        b = averages.factors if step.direction.b is None else step.direction.b
        zero = jnp.zeros((), float)
        unsolved = Solution(step.s, zero, zero)
        solution = jax.lax.cond(
            shared_count(state.count) >= problem.capacity - 1,
            lambda: problem.improve(step.s, inputs, b, inverse, iterates),
            lambda: unsolved,
        )
        solution = optax.tree.where(taken, solution, unsolved)
        # Where the inner solver diverges, the Q step stands.
        converged = jnp.isfinite(vdot(solution.s, solution.s))
        return step._replace(
            s=optax.tree.where(converged, solution.s, step.s),
            metrics=step.metrics
            | {"objective_before": solution.before, "objective_after": solution.after},
            observed=step.observed | {"history": iterates.history},
        )

    def _limit_true_size(self, state: KLDWRMState, step: Step) -> Step:
        """Shortens a step whose true divergence is too large; so much of it is remembered."""
        if self.clip.kl is None or self.clip.true_kl is None or self.self_setting is not None:
            return step
        factor, ratio = limit_true_size(
            step.s,
            step.size,
            jnp.asarray(self.clip.true_kl, float),
            step.inputs.oracle.thinned(_MEASURED.examples_of, step.inputs.k),
            state.monitor.kl_ratio,
            # QE's inner solver may have made any step of the one whose size is known.
            self.fisher.refresh_due(state.count) | (self.inner_problem is not None),
        )
        fisher_v = optax.tree.scale(factor, step.direction.fisher_v)
        return step._replace(
            direction=step.direction._replace(fisher_v=fisher_v),
            s=optax.tree.scale(factor, step.s),
            size=factor**2 * step.size,
            metrics=step.metrics | {"true_kl_clip": factor, "kl_ratio": ratio},
        )

    def _remember(self, state: KLDWRMState, step: Step) -> Step:
        r""":math:`R_{k+1} = \rho\,(R_k + \bar F_k s_k)`, of the minimiser or of the step taken."""
        gradients, at, memory = step.inputs.gradients, step.inputs.at, dict(step.memory)
        if state.momentum is not None:
            memory["momentum"] = replace_leaves(state.momentum, gradients.m)
        pull = gradients.pull
        if pull is None:
            return step._replace(memory=memory)
        finite = step.finite
        fisher_s = jax.tree.map(jnp.negative, step.direction.fisher_v)
        if self.wake == "taken":
            fisher_s = self.fisher.times(
                step.inputs.blocks, step.refreshed.averages, step.s, at.damping
            )
            finite &= jnp.isfinite(vdot(fisher_s, step.s))
        lr = at.lr / at.calibration
        g_hat = wake.unscaled(lr, gradients.effective(lr), gradients.m)
        memory |= {
            "g_prev": replace_leaves(state.g_prev, gradients.g),
            "g_hat": replace_leaves(state.g_hat, g_hat),
            "pull": replace_leaves(state.pull, wake.remember(at.rho, pull, fisher_s)),
        }
        metrics = step.metrics | {"wake_ratio": wake.ratio(lr, gradients.m, pull)}
        return step._replace(finite=finite, metrics=metrics, memory=memory)

    def _accept(
        self, updates: optax.Updates, state: KLDWRMState, step: Step
    ) -> tuple[optax.Updates, KLDWRMState]:
        """The step and the state after it; or none, or the last one undone."""
        finite = step.finite & fits(updates, step.s)
        undo = finite & step.undo
        taken = finite & ~undo & self._ready(state, step)
        metrics = step.metrics | {"block_size": step.size}
        new = step.memory | {"monitor": state.monitor._replace(**metrics)}
        if state.last_step is not None:
            new["last_step"] = replace_leaves(state.last_step, step.s)
        old = {name: getattr(state, name) for name in new}
        nothing = optax.tree.zeros_like(step.s)
        if self.self_setting is not None:
            nothing, old = self._take_back(state, nothing, old)
        for name, decay in (("pull", self.fisher.rho), ("momentum", self.nu)):
            if name in new:
                old[name] = fade(old[name], decay, finite, step.inputs.gradients.g)
        # The count goes on where a schedule is below zero, or it would stay there for ever.
        passes = undo | ~(step.inputs.at.lr >= 0)
        old["count"] = jnp.where(passes, new["count"], old["count"])
        s, kept = optax.tree.where(taken, (step.s, new), (nothing, old))
        counters = {
            "refreshes": step.refreshed.refreshed,
            "rejected_refreshes": step.refreshed.rejected,
            "outliers": step.refreshed.outlier,
            "rejected_steps": ~finite,
            "undone_steps": undo,
        }
        refused = optax.safe_increment(state.monitor.refused_in_a_row)
        kept["monitor"] = kept["monitor"]._replace(
            refused_in_a_row=jnp.where(taken | undo, 0, refused),
            **{
                name: increment_if(happened, getattr(state.monitor, name))
                for name, happened in counters.items()
            },
        )
        return leaves_like(updates, s), state._replace(**step.observed, **kept)

    def _take_back(
        self, state: KLDWRMState, nothing: Leaves, old: dict[str, Any]
    ) -> tuple[Leaves, dict[str, Any]]:
        """In place of a step, the update that undoes the last one, and smaller steps to come."""
        assert self.self_setting is not None
        last = leaves_by_path(state.last_step)
        back = {path: -last[path] for path in nothing}
        trees = optax.tree.zeros_like({name: old[name] for name in ("last_step", "offset")})
        return back, old | trees | {"fit": self.self_setting.retreat(state.fit)}

    def _ready(self, state: KLDWRMState, step: Step) -> jax.Array:
        """Whether there is an inverse to step with."""
        return (state.monitor.refreshes > 0) | step.refreshed.refreshed

    def _check(
        self,
        updates: optax.Updates,
        state: KLDWRMState,
        params: optax.Params | None,
        oracle: Oracle | None,
    ) -> Oracle:
        """Checks that everything belongs to one step of one model and of this optimizer."""
        layers = self.fisher.layers
        oracle = check_same_model(layers, updates, params, oracle)
        if params is None and (not _is_zero(self.weight_decay) or self.inner_problem is not None):
            raise ValueError(
                "update needs the parameters for weight decay and for QE: "
                "tx.update(grads, state, params, oracle=oracle)"
            )
        names = [block.name for block in layers]
        if state.factors.keys() != {*names}:
            raise ValueError(
                f"the state has the blocks {', '.join(map(repr, state.factors))}, the optimizer "
                f"{', '.join(map(repr, names))}: make a state by this optimizer's init(params)"
            )
        needed = {
            "pull": self.wake is not None,
            "momentum": self._has_momentum,
            "history": self.inner_problem is not None,
            "last_step": self._has_last_step,
            "fit": self.self_setting is not None,
        }
        if any((getattr(state, name) is not None) != need for name, need in needed.items()):
            raise ValueError(
                "the state is that of another member of the family, which remembers other things: "
                "make one by this optimizer's init(params)"
            )
        return oracle

    @property
    def _has_momentum(self) -> bool:
        return self.wake is not None and not _is_zero(self.nu)

    @property
    def _has_last_step(self) -> bool:
        return self.self_setting is not None or not _is_zero(self.momentum)

    @property
    def _round(self) -> Any:
        """A number of steps after which everything periodic in the count repeats."""
        capacity = 1 if self.inner_problem is None else self.inner_problem.capacity
        periods = () if self.self_setting is None else self.self_setting.periods
        known = math.lcm(capacity, self.fisher.inverse.every or 1, *periods)
        if isinstance(self.fisher.refresh_every, numbers.Integral):
            return min(math.lcm(known, self.fisher.refresh_every), jnp.iinfo(jnp.int32).max)
        return known * self.fisher.refresh_every


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0
