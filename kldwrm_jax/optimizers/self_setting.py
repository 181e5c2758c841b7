r"""The step that sets itself: its length, its momentum and the damping, from the batches alone.

Every step is a combination of three directions: the member's own proposal, the last step, and the
offset of averaged iterates. A quadratic model with the exact Fisher of the batch
(``quadratic_model.py``) says what each is worth; the next batch says what came of it
(``judgement.py``). Two regimes follow, and the realised share of the promises chooses between them:

* where a batch says nearly all about the problem, proposal and last step are *fitted*: the two
  coefficients that minimise the model (Martens and Grosse);
* where its noise rules, that is short-sighted: the best step for one batch is not the best for the
  next hundred. There the iterates are *averaged* (``iterate_average.py``).

In both a limit of the step's true divergence grows while the next batches confirm the steps, and
shrinks when they do harm; the damping is Levenberg's and Marquardt's.
"""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_count, check_decay, check_fraction
from kldwrm_jax.likelihoods.evidence import Evidence
from kldwrm_jax.optimizers import calibration, loss_scale
from kldwrm_jax.optimizers.direction import Direction, StepInputs
from kldwrm_jax.optimizers.iterate_average import (
    IterateAverage,
    adapt,
    coefficients,
    no_average,
    weight,
)
from kldwrm_jax.optimizers.judgement import Change, Judgement, Verdict, judge, unjudged
from kldwrm_jax.optimizers.levenberg_marquardt import LevenbergMarquardt
from kldwrm_jax.optimizers.loss_scale import LossScale
from kldwrm_jax.optimizers.quadratic_model import QuadraticModel, measure
from kldwrm_jax.paths import Leaves
from kldwrm_jax.replicas import shared_any

_LEAST_SAMPLES = 128
_MOST_PARTS = jnp.iinfo(jnp.int32).max
_SELDOM, _BEGINNING = 4, 20  # steps between two fits where iterates are averaged; the first steps
_LEAVE, _RETURN = 0.2, 0.6  # realised shares at which fitting ends, and begins again
_FIRST_LIMIT = 0.01  # in units of the first fitted step's divergence
_CONFIRMED, _TOLERATED, _HARMED = 1.5, 1.1, 0.5  # growth of the limit
_CALIBRATION_DECAY = 0.7
_AHEAD = 10.0  # the limit in units of what recent steps had
_ENOUGH = 32.0  # samples that carry the curvature; where there are fewer, more are measured
_WHOLE_EVERY = 30  # steps between two measurements of the whole batch
_SATURATED = 1e-3  # the least that a step's divergence is taken for, in units of the blocks'
_UNDONE, _RAISED = 0.25, 3.0  # after an undone step: the limit in units of its promise; damping

PROPOSAL, OFFSET, LAST = range(3)  # the directions


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a step that sets itself is fitted.

    Args:
      examples: the part of the batch that the JVPs see: a fraction, of which at least as many are
        taken as have 128 samples (such as tokens), or a count.
      every: steps between two fits; between them the last coefficients serve. None is 1 where steps
        are fitted, and 4 where iterates are averaged.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> net = kw.instrument(nn.Dense(1), kw.Gaussian(), jnp.ones((8, 2)))
      >>> tx = kw.kfac(net.layers, fit=kw.Fit(examples=1.0))  # the whole batch
    """

    examples: float | int = 0.125
    every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.examples, numbers.Integral):
            check_count("examples", self.examples)
        else:
            check_fraction("examples", self.examples)
        if self.every is not None:
            check_count("every", self.every)

    def examples_of(self, sample_shape: tuple[int, ...]) -> int:
        """How many examples of a batch the JVPs see."""
        batch, *positions = sample_shape
        if isinstance(self.examples, numbers.Integral):
            return min(batch, int(self.examples))
        least = math.ceil(_LEAST_SAMPLES / math.prod(positions))
        return min(batch, max(least, math.ceil(self.examples * batch)))

    def is_due(self, count: jax.Array, fitting: jax.Array) -> jax.Array:
        """Whether this step is fitted."""
        if self.every is not None:
            return count % self.every == 0
        beginning, whole = count < _BEGINNING, count % _WHOLE_EVERY == 0
        return fitting | beginning | whole | (count % _SELDOM == 0)


class FitState(NamedTuple):
    """What a step that sets itself knows, besides the last step and the blocks' calibration."""

    damping: jax.Array  # float []: gamma; 0 until it is found
    first_damping: jax.Array  # float []
    limit: jax.Array  # float []: of the step's divergence
    at_limit: jax.Array  # bool []: whether the last step was shortened to it
    promise: jax.Array  # float []: the decrease that the last step's own batch predicted
    fitting: jax.Array  # bool []: whether steps are fitted; if not, iterates are averaged
    judgement: Judgement
    average: IterateAverage
    scale: LossScale
    effective: jax.Array  # float []: samples of the last measurement that carry the curvature
    recent: jax.Array  # float []: running mean of the steps' divergence
    w: jax.Array  # float [3]: the coefficients of the last fit


class SetStep(NamedTuple):
    """A step that has set itself."""

    w: jax.Array  # float [3]: of proposal, offset and last step
    fast: jax.Array  # float []: of the proposal, in the step of the fast iterate
    shortened: jax.Array  # float []: by the limit; 1 if that did not bind
    divergence: jax.Array  # float []: of the whole step
    calibration: jax.Array
    undo: jax.Array  # bool []: the last step did harm
    rescaled: jax.Array  # float []: what the first step's gradients are multiplied by
    state: FitState

    @property
    def is_sized(self) -> jax.Array:
        """Whether its size did not overflow: the steps to come are measured by it."""
        sizes = self.state.limit, self.state.promise, self.state.recent
        return jnp.isfinite(jnp.stack(sizes)).all()


@dataclasses.dataclass(frozen=True)
class SelfSetting:
    r"""How a member without a learning rate sets its steps.

    Args:
      fit: how the quadratic model is measured.
      momentum: of the fitted steps; None fits it.
      damping: how :math:`\gamma` adapts; None if it is given.
      mu: how often the member's objective has the curvature: 1, or 2 with a quadratic model.
      highest_limit: of the step's divergence; None for none.
    """

    fit: Fit
    momentum: Any
    damping: LevenbergMarquardt | None
    mu: float
    highest_limit: Any

    def __post_init__(self) -> None:
        if self.momentum is not None:
            check_decay("momentum", self.momentum)

    def init(self) -> FitState:
        """Before the first step."""
        known = 0.0 if self.damping is None else self.damping.initial or 0.0
        return FitState(
            damping=jnp.full((), known, float),
            first_damping=jnp.full((), known, float),
            limit=jnp.zeros((), float),
            at_limit=jnp.zeros((), bool),
            promise=jnp.zeros((), float),
            fitting=jnp.ones((), bool),
            judgement=unjudged(),
            average=no_average(),
            scale=loss_scale.unknown(),
            effective=jnp.full((), _ENOUGH, float),
            recent=jnp.zeros((), float),
            w=jnp.zeros(3, float),
        )

    @property
    def periods(self) -> tuple[int, ...]:
        """The periods of what is done every few steps."""
        return (
            _WHOLE_EVERY,
            self.fit.every or _SELDOM,
            1 if self.damping is None else self.damping.every,
        )

    def step(
        self,
        before: FitState,
        calibration_before: jax.Array,
        inputs: StepInputs,
        direction: Direction,
        others: tuple[Leaves, Leaves],
    ) -> SetStep:
        """The coefficients of a step, and what is known after it.

        Args:
          before: what was known before.
          calibration_before: the blocks' calibration, 0 until it is measured.
          inputs: what the proposal was made from.
          direction: the proposal is its ``-v``.
          others: the offset of the averaged iterates, and the last step.
        """
        first, damping = calibration_before == 0, jnp.asarray(inputs.at.damping, float)
        known = before._replace(
            damping=damping,
            first_damping=jnp.where(first, damping, before.first_damping),
            average=before.average._replace(
                age=jnp.where(before.fitting, 0, before.average.age + 1)
            ),
        )
        due = self.fit.is_due(inputs.k, before.fitting) | first
        unfitted = self._between(known, inputs, direction, others, calibration_before)
        offset, last = others
        # Where steps are fitted there is no offset; the gradient there says more of its scale.
        second = optax.tree.where(before.fitting, inputs.gradients.g, offset)
        directions = [jax.tree.map(jnp.negative, direction.v), second, last]

        def fitted() -> SetStep:
            gradients = inputs.gradients.g, inputs.gradients.objective(inputs.at.calibration)
            few = jnp.ceil(_ENOUGH / jnp.maximum(known.effective, 1))
            parts = jnp.where(inputs.k % _WHOLE_EVERY == 0, _MOST_PARTS, few)
            measured = measure(
                inputs.oracle, directions, gradients, self.fit.examples_of, inputs.k, parts
            )
            return self._fitted(known, inputs, direction, *measured, calibration_before)

        # Replicas under a vmap share the branch, and each takes what is its own.
        result = jax.lax.cond(shared_any(due), fitted, lambda: unfitted)
        return jax.tree.map(lambda a, b: jnp.where(due, a, b), result, unfitted)

    def _fitted(
        self,
        known: FitState,
        inputs: StepInputs,
        direction: Direction,
        model: QuadraticModel,
        evidence: Evidence,
        calibration_before: jax.Array,
    ) -> SetStep:
        first = calibration_before == 0
        scale, rescaled = self._scale(known, inputs, model, evidence)
        rescaled = jnp.where(first, rescaled, 1)
        model = model.with_gradients_times(rescaled).without(OFFSET, known.fitting)
        judgement, verdict = judge(known.judgement, _change(known, model, evidence))
        fitting = judgement.share > jnp.where(known.fitting, _LEAVE, _RETURN)
        average = adapt(known.average, model.slope[OFFSET], model.fisher[OFFSET, OFFSET])
        average = jax.tree.map(lambda a, b: jnp.where(fitting, a, b), known.average, average)
        now = self._calibration(inputs, direction, model)
        decay = jnp.where(first, 0, _CALIBRATION_DECAY)
        c = decay * calibration_before + (1 - decay) * now
        c = jnp.where(jnp.isfinite(c) & (c > 0), c, calibration_before)
        fast = average.rate * inputs.at.calibration / calibration.factor(c)
        w = jnp.where(fitting, self._fit_two(model, inputs), self._averaged(average, fast))
        # Where outputs saturate, their Fisher vanishes, and the blocks alone know of a long step.
        known_of_it = self._by_blocks(w, calibration_before, direction)
        divergence = jnp.maximum(model.divergence(w), _SATURATED * known_of_it)
        limit = jnp.where(first, _FIRST_LIMIT * divergence, self._limit(known, verdict))
        effective = evidence.effective_samples
        state = known._replace(
            damping=self._damping(known, inputs, judgement, verdict),
            limit=limit,
            fitting=fitting,
            judgement=judgement,
            average=average,
            scale=scale,
            effective=jnp.where(jnp.isfinite(effective), effective, known.effective),
            w=w,
        )
        shortened = self._shortened(state, w, fast, (divergence, model.loss_slope), c)
        return shortened._replace(undo=verdict.undo, rescaled=rescaled)

    def _between(
        self,
        known: FitState,
        inputs: StepInputs,
        direction: Direction,
        others: tuple[Leaves, Leaves],
        calibration_before: jax.Array,
    ) -> SetStep:
        """A step with what is known: the blocks stand for the Fisher."""
        g, c = inputs.gradients.g, inputs.at.calibration
        slopes = [-optax.tree.vdot(direction.v, g), *(optax.tree.vdot(v, g) for v in others)]
        fast = known.average.rate
        w = jnp.where(known.fitting, known.w, self._averaged(known.average, fast))
        divergence = self._by_blocks(w, c, direction)
        return self._shortened(known, w, fast, (divergence, jnp.stack(slopes)), calibration_before)

    def _by_blocks(self, w: jax.Array, c: Scalar, direction: Direction) -> jax.Array:
        """The divergence of the proposal's part of a step, by the calibrated blocks."""
        return 0.5 * w[PROPOSAL] ** 2 * c * direction.size / self.mu

    def _shortened(
        self,
        state: FitState,
        w: jax.Array,
        fast: jax.Array,
        model: tuple[jax.Array, jax.Array],
        c: jax.Array,
    ) -> SetStep:
        """The step within the limit of its divergence; the divergence and the slopes are given."""
        divergence, slopes = model
        limit = state.limit
        if self.highest_limit is not None:
            limit = jnp.minimum(limit, jnp.asarray(self.highest_limit, float))
        above = divergence > limit
        k = jnp.where(above, jnp.sqrt(limit / jnp.where(above, divergence, 1)), 1)
        promise = jnp.abs(k * slopes @ w + k**2 * divergence)
        size = k**2 * divergence
        recent = jnp.where(state.recent > 0, 0.9 * state.recent + 0.1 * size, size)
        state = state._replace(at_limit=above, promise=promise, recent=recent)
        return SetStep(k * w, fast, k, size, c, jnp.zeros((), bool), jnp.ones((), float), state)

    def _scale(
        self, known: FitState, inputs: StepInputs, model: QuadraticModel, evidence: Evidence
    ) -> tuple[LossScale, jax.Array]:
        """The loss's scale, if the whole batch was measured, and its old factor over the new."""
        if not inputs.oracle.terms.have_loss:
            return known.scale, jnp.ones((), float)
        old = loss_scale.factor(known.scale)
        sizes = jnp.diagonal(evidence.fisher)
        new = loss_scale.update(known.scale, old * model.loss_slope, evidence.slopes, sizes)
        whole = inputs.k % _WHOLE_EVERY == 0
        new = jax.tree.map(lambda a, b: jnp.where(whole, a, b), new, known.scale)
        return new, old / loss_scale.factor(new)

    def _fit_two(self, model: QuadraticModel, inputs: StepInputs) -> jax.Array:
        """Proposal and last step, fitted; or the proposal alone, where momentum is given."""
        damping = inputs.at.damping
        if self.momentum is None:
            rate, momentum = model.minimiser(PROPOSAL, LAST, damping, self.mu)
        else:
            momentum = jnp.asarray(self.momentum, float)
            rate = model.minimiser_given(PROPOSAL, LAST, momentum, damping, self.mu)
        return jnp.stack([rate, jnp.zeros((), float), momentum])

    def _averaged(self, average: IterateAverage, fast: jax.Array) -> jax.Array:
        """The step of averaged iterates; where momentum is given, its average of steps instead."""
        zero = jnp.zeros((), float)
        if self.momentum is not None:
            return jnp.stack([(1 - self.momentum) * fast, zero, jnp.asarray(self.momentum, float)])
        of_step, of_offset = coefficients(average)
        return jnp.stack([of_step * fast, of_offset, zero])

    def _calibration(
        self, inputs: StepInputs, direction: Direction, model: QuadraticModel
    ) -> jax.Array:
        """What the blocks have to be multiplied by to see the proposal's curvature."""
        exact = self.mu * model.curvature(inputs.at.damping)[PROPOSAL, PROPOSAL]
        return exact / jnp.where(direction.size > 0, direction.size, jnp.nan)

    def _limit(self, known: FitState, verdict: Verdict) -> jax.Array:
        """The limit of the divergence grows where it bound a step that did no harm."""
        growth = jnp.where(verdict.confirmed, _CONFIRMED, _TOLERATED)
        growth = jnp.where(known.at_limit, growth, 1)
        limit = known.limit * jnp.where(verdict.harmed, _HARMED, growth)
        return jnp.minimum(limit, _AHEAD * known.recent)

    def _damping(
        self, known: FitState, inputs: StepInputs, judgement: Judgement, verdict: Verdict
    ) -> jax.Array:
        if self.damping is None:
            return known.damping
        rule, now, first = self.damping, known.damping, known.first_damping
        every = self._steps_since_the_last_fit(inputs.k, known.fitting)
        moved = rule.move(now, first, judgement.share, known.fitting)
        due = (inputs.k > 0) & (inputs.k // rule.every > (inputs.k - every) // rule.every)
        return jnp.where(verdict.harmed, rule.raised(now, first), jnp.where(due, moved, now))

    def _steps_since_the_last_fit(self, k: jax.Array, fitting: jax.Array) -> Scalar:
        if self.fit.every is not None:
            return self.fit.every
        return jnp.where(fitting | (k < _BEGINNING), 1, _SELDOM)

    def next_offset(self, set_step: SetStep, v: Leaves, offset: Leaves) -> Leaves:
        """The fast iterate's offset from the mean after the step; none where steps are fitted."""
        state = set_step.state
        keep = set_step.shortened * (1 - weight(state.average.age))
        keep = jnp.where(state.fitting | (self.momentum is not None), 0, keep)
        return {path: keep * (x - set_step.fast * v[path]) for path, x in offset.items()}

    def retreat(self, before: FitState) -> FitState:
        """After a step that is taken back, for it did harm, or led to what is not finite."""
        promised = jnp.where(before.promise > 0, _UNDONE * before.promise, jnp.inf)
        raised = before.damping if self.damping is None else _RAISED * before.damping
        return before._replace(
            limit=jnp.minimum(0.5 * before.limit, promised),
            damping=raised,
            promise=jnp.zeros((), float),
            average=before.average._replace(age=jnp.zeros((), float)),
        )


def _change(known: FitState, model: QuadraticModel, evidence: Evidence) -> Change:
    """What the last step did, in the loss of this batch."""
    part = evidence.share_square
    whole = 1 / model.samples
    variance = evidence.slope_square * whole / part + evidence.remainder_square
    mean = model.loss_slope[LAST] + evidence.remainder
    return Change(known.promise, mean, variance, evidence.loss)
