r"""QE-KLD-WRM's inner problem: the exact symmetric KL to the newest iterates, in a ring buffer.

.. math:: \min_s\ g_k's + \tfrac12 s'B_k s
          + \lambda \sum_i \zeta(i) \rho^{k-i} D_{KL}(\theta_i, \theta_k + s)

on the current batch, by a few steps from the Q step: of SGD, as in the paper, or preconditioned
with the inverse that the Q step was made with. Everything is multiplied by the learning rate
:math:`1/\lambda`, so that nothing is divided by it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_choice, check_count, check_non_negative
from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import CachedInverse, per_block
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.optimizers.clipping import Clip
from kldwrm_jax.optimizers.direction import StepInputs
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


class Iterates(NamedTuple):
    """The newest iterate, and those before it."""

    params: Any
    history: Any  # (capacity, *shape): a ring buffer, in which that of step k is at k % capacity
    k: jax.Array  # the step count


class Solution(NamedTuple):
    """The step that an inner solver found, and the objective, not multiplied by the rate."""

    s: Leaves
    before: jax.Array  # at the Q step
    after: jax.Array  # at ``s``


class Value(NamedTuple):
    """What is known of a step ``s``."""

    objective: jax.Array  # times the learning rate
    size: jax.Array  # about s'Fs: twice its divergence from the newest iterate


@dataclasses.dataclass(frozen=True)
class InnerProblem:
    """How QE's inner problem is posed and solved; see :func:`~kldwrm_jax.qe_kldwrm`.

    Args:
      clip: the limits of the Q step, which hold for inner steps, too.
      calibrated: whether the limit of the Q step is one of its true divergence.
    """

    capacity: int
    inner: str
    inner_steps: Any
    omega: Any
    kl_scale: Any
    tail: str
    clip: Clip
    calibrated: bool

    def __post_init__(self) -> None:
        check_count("capacity", self.capacity)
        check_choice("inner", self.inner, ("sgd", "preconditioned"))
        check_count("inner_steps", self.inner_steps, least=0)
        check_non_negative("omega", self.omega)
        check_non_negative("kl_scale", self.kl_scale)
        check_choice("tail", self.tail, ("drop", "fold"))

    def empty(self, params: Any) -> Any:
        """A ring buffer for ``capacity`` iterates."""
        return jax.tree.map(lambda p: jnp.zeros((self.capacity, *p.shape), p.dtype), params)

    def push(self, iterates: Iterates, taken: jax.Array) -> Iterates:
        """The newest iterate replaces the oldest in the buffer, if a step is taken from it."""
        leaves, place = leaves_by_path(iterates.params), iterates.k % self.capacity

        def put(path: str, buffer: jax.Array) -> jax.Array:
            new = jnp.where(taken, leaves[path].astype(buffer.dtype), buffer[place])
            return buffer.at[place].set(new)

        pushed = {p: put(p, x) for p, x in leaves_by_path(iterates.history).items()}
        return iterates._replace(history=replace_leaves(iterates.history, pushed))

    def improve(
        self,
        s: Leaves,
        inputs: StepInputs,
        b: dict[str, Factors],
        inverse: CachedInverse,
        iterates: Iterates,
    ) -> Solution:
        """The Q step ``s`` after the inner solver; ``b`` are undamped factors of :math:`B_k`."""
        objective = self._objective(inputs, b, iterates)
        if self.inner == "sgd":
            s, before, after = self._by_sgd(s, objective)
        else:
            s, before, after = self._preconditioned(s, objective, inverse)
        lr = inputs.at.lr
        scale = jnp.where(lr > 0, 1 / jnp.where(lr > 0, lr, 1), 1)
        return Solution(s, scale * before, scale * after)

    def weights(self, rho: Scalar, k: jax.Array) -> jax.Array:
        r""":math:`\kappa(i)\rho^{k-i}` of every iterate by its age, once the buffer is full.

        ``"drop"`` forgets what has left the buffer; ``"fold"`` gives its weight to the oldest that
        is left, as if that were the first iterate of all.
        """
        age = jnp.arange(self.capacity)
        first = age == self.capacity - 1 if self.tail == "fold" else age == k
        return jnp.where(first, 1.0, 1.0 - rho) * jnp.power(rho, age)

    def _objective(
        self, inputs: StepInputs, b: dict[str, Factors], iterates: Iterates
    ) -> "Objective":
        here, buffer = leaves_by_path(iterates.params), leaves_by_path(iterates.history)
        weights = self.weights(inputs.at.rho, iterates.k)
        places = (iterates.k - jnp.arange(self.capacity)) % self.capacity  # newest first

        def outputs_at(place: jax.Array) -> Any:
            return _outputs(inputs.oracle, {path: x[place] for path, x in buffer.items()})

        # The outputs of older networks stay the same while the inner solver runs.
        newest = _outputs(inputs.oracle, here)
        older = jax.lax.map(outputs_at, places[1:])
        proximal = None
        if self.inner == "preconditioned":
            apart = {path: here[path].astype(float) - x[places] for path, x in buffer.items()}
            proximal = Proximal(jnp.asarray(inputs.at.damping, float), weights, apart)
        return Objective(
            inputs,
            b,
            here,
            jax.lax.stop_gradient(jax.tree.map(_put_first, newest, older)),
            self.kl_scale * weights,
            proximal,
        )

    def _by_sgd(self, s: Leaves, objective: "Objective") -> tuple[Leaves, jax.Array, jax.Array]:
        blocks, lr = objective.inputs.blocks, objective.inputs.at.lr

        def step(i: jax.Array, carried: tuple[Leaves, jax.Array]) -> tuple[Leaves, jax.Array]:
            s, before = carried
            value, gradient = objective.value_and_gradient(s)
            gradient = self.clip.blocks(gradient, lr, blocks)
            s = {path: s[path] - self.omega * gradient[path] for path in s}
            return s, jnp.where(i == 0, value.objective, before)

        s, before = jax.lax.fori_loop(0, self.inner_steps, step, (s, jnp.zeros((), float)))
        after = objective.value(s).objective
        return s, jnp.where(jnp.asarray(self.inner_steps) > 0, before, after), after

    def _preconditioned(
        self, s: Leaves, objective: "Objective", inverse: CachedInverse
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Steps that are shortened until they lower the objective, the first of them the Q step."""
        c = objective.inputs.at.calibration
        limited = self.calibrated and self.clip.kl is not None
        limit = jnp.asarray(
            self.clip.kl if limited else jnp.finfo(jnp.result_type(float)).max, float
        )

        def helps(value: Value, at: _Search) -> jax.Array:
            return (value.objective <= at.lowest) & (value.size <= limit)

        def step(i: jax.Array, at: _Search) -> _Search:
            value, gradient = objective.value_and_gradient(at.trial)
            better = helps(value, at)
            newton = jax.tree.map(lambda x: x / c, inverse.times(gradient))
            direction = optax.tree.where(better, newton, at.direction)
            best = optax.tree.where(better, at.trial, at.best)
            within = jnp.sqrt(limit / jnp.maximum(value.size, limit))
            length = jnp.where(better, self.omega, at.length * jnp.minimum(0.5, within))
            return _Search(
                best=best,
                lowest=jnp.where(better, value.objective, at.lowest),
                direction=direction,
                length=length,
                trial={path: x - length * direction[path] for path, x in best.items()},
                before=jnp.where(i == 0, value.objective, at.before),
            )

        at = _Search(
            best=optax.tree.zeros_like(s),
            lowest=objective.at_rest,
            direction=jax.tree.map(jnp.negative, s),
            length=jnp.ones((), float),
            trial=s,
            before=jnp.zeros((), float),
        )
        at = jax.lax.fori_loop(0, self.inner_steps, step, at)
        last = objective.value(at.trial)
        better = helps(last, at)
        return (
            optax.tree.where(better, at.trial, at.best),
            jnp.where(jnp.asarray(self.inner_steps) > 0, at.before, last.objective),
            jnp.where(better, last.objective, at.lowest),
        )


class Proximal(NamedTuple):
    r""":math:`\frac\gamma2 \sum_i w_i \|\theta_k + s - \theta_i\|^2`, by the iterates' age.

    Preconditioned steps go as far as the objective lets them, so it must be bounded: this adds to
    every divergence what damping adds to the Q step's. SGD's few short steps, as in the paper, need
    no such term.
    """

    damping: jax.Array
    weights: jax.Array
    apart: Leaves  # theta_k - theta_i, (capacity, *shape)

    def value(self, s: Leaves) -> jax.Array:
        """At a step ``s``."""
        squares = [
            self.weights @ ((s[path] + d) ** 2).reshape(len(d), -1).sum(axis=1)
            for path, d in self.apart.items()
        ]
        return 0.5 * self.damping * sum(squares[1:], start=squares[0])

    def gradient(self, s: Leaves) -> Leaves:
        """At a step ``s``."""
        return {
            path: self.damping * jnp.tensordot(self.weights, s[path] + d, axes=1)
            for path, d in self.apart.items()
        }


class Objective(NamedTuple):
    """The inner objective of a step ``s``, times the learning rate."""

    inputs: StepInputs
    b: dict[str, Factors]
    here: Leaves
    old_outputs: Any  # of the networks in the buffer, the newest first
    weights: jax.Array  # of their divergences
    proximal: Proximal | None

    def value(self, s: Leaves) -> Value:
        """The objective, and the step's size."""
        kl, size = self._wake(s)
        return Value(kl + self._model(s)[0], size)

    def value_and_gradient(self, s: Leaves) -> tuple[Value, Leaves]:
        """The same, and the objective's gradient."""
        (kl, size), kl_gradient = jax.value_and_grad(self._wake, has_aux=True)(s)
        value, gradient = self._model(s)
        return Value(kl + value, size), {path: kl_gradient[path] + gradient[path] for path in s}

    @property
    def at_rest(self) -> jax.Array:
        """The objective of no step at all, for which no network has to be run."""
        kl, _ = self._divergences(jax.tree.map(lambda h: h[0], self.old_outputs))
        if self.proximal is None:
            return kl
        return kl + self.proximal.value(optax.tree.zeros_like(self.inputs.gradients.g))

    def _wake(self, s: Leaves) -> tuple[jax.Array, jax.Array]:
        s = self.inputs.oracle.averaging_gradient(s)
        new = {path: p + s[path].astype(p.dtype) for path, p in self.here.items()}
        return self._divergences(_outputs(self.inputs.oracle, new))

    def _divergences(self, outputs: Any) -> tuple[jax.Array, jax.Array]:
        terms = jax.vmap(self.inputs.oracle.divergence, (0, None))(self.old_outputs, outputs)
        return jnp.sum(self.weights * terms), 2 * terms[0]

    def _model(self, s: Leaves) -> tuple[jax.Array, Leaves]:
        g, lr, c = self.inputs.gradients.g, self.inputs.at.lr, self.inputs.at.calibration
        bs = per_block(
            self.inputs.blocks, lambda own, v: c * own.block.multiply(self.b[own.name], v), s
        )
        value = lr * (optax.tree.vdot(g, s) + 0.5 * optax.tree.vdot(s, bs))
        gradient = {path: lr * (g[path] + bs[path]) for path in s}
        if self.proximal is None:
            return value, gradient
        more = self.proximal.gradient(s)
        return value + self.proximal.value(s), {p: x + more[p] for p, x in gradient.items()}


def _put_first(first: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.concatenate([first[None], others])


def _outputs(oracle: Oracle, leaves: Leaves) -> Any:
    """The network's outputs; the oracle's parameters are whole where ours may be masked."""
    return oracle.outputs(replace_leaves(oracle.params, leaves))


class _Search(NamedTuple):
    """The best step so far, and the next to be tried: ``best - length * direction``."""

    best: Leaves
    lowest: jax.Array  # the objective there
    direction: Leaves
    length: jax.Array
    trial: Leaves
    before: jax.Array
