r"""QE-KLD-WRM's inner problem: the exact symmetric KL to the newest iterates, in a ring buffer.

.. math:: \min_s\ g_k's + \tfrac12 s'B_k s
          + \lambda \sum_i \zeta(i) \rho^{k-i} D_{KL}(\theta_i, \theta_k + s)

on the current batch, by a few steps from the Q step: of SGD, as in the paper, or preconditioned
with the inverse that the Q step was made with. Everything is multiplied by the learning rate
:math:`1/\lambda`, so that nothing is divided by it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_choice, check_count, check_non_negative
from kldwrm_jax.capture import Oracle
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


class Solved(NamedTuple):
    """Where an inner solver came to."""

    s: Leaves
    start: jax.Array  # the objective at the Q step
    end: jax.Array  # and at ``s``


class Value(NamedTuple):
    """What is known of a step ``s``."""

    objective: jax.Array  # times the learning rate
    size: jax.Array  # about s'Fs: twice its divergence from the newest iterate


class Objective(NamedTuple):
    """The inner objective of a step ``s``, times the learning rate."""

    value: Callable[[Leaves], Value]
    value_and_gradient: Callable[[Leaves], tuple[Value, Leaves]]
    at_rest: jax.Array  # its value for no step at all, which costs nothing


@dataclasses.dataclass(frozen=True)
class ExactKL:
    """How QE's inner problem is posed and solved."""

    capacity: int
    inner: str
    inner_steps: Any
    omega: Any
    kl_scale: Any
    tail: str

    def __post_init__(self) -> None:
        check_count("capacity", self.capacity)
        check_count("inner_steps", self.inner_steps, least=0)
        check_non_negative("omega", self.omega)
        check_non_negative("kl_scale", self.kl_scale)
        check_choice("tail", self.tail, ("drop", "fold"))

    def empty(self, params: Any) -> Any:
        """A ring buffer for ``capacity`` iterates."""
        return jax.tree.map(lambda p: jnp.zeros((self.capacity, *p.shape), p.dtype), params)

    def push(self, history: Any, params: Any, count: jax.Array, taken: jax.Array) -> Any:
        """The buffer with the iterate of step ``count`` in place of the oldest, if it is taken."""
        leaves, place = leaves_by_path(params), count % self.capacity

        def put(path: str, buffer: jax.Array) -> jax.Array:
            new = jnp.where(taken, leaves[path].astype(buffer.dtype), buffer[place])
            return buffer.at[place].set(new)

        return replace_leaves(history, {p: put(p, x) for p, x in leaves_by_path(history).items()})

    def weights(self, rho: Scalar, count: jax.Array) -> jax.Array:
        r""":math:`\kappa(i)\rho^{k-i}` of every iterate by its age, once the buffer is full.

        ``"drop"`` forgets what has left the buffer; ``"fold"`` gives its weight to the oldest that
        is left, as if that were the first iterate of all.
        """
        age = jnp.arange(self.capacity)
        first = age == self.capacity - 1 if self.tail == "fold" else age == count
        return jnp.where(first, 1.0, 1.0 - rho) * jnp.power(rho, age)

    def objective(
        self,
        *,
        g: Leaves,
        multiply_b: Callable[[Leaves], Leaves],
        gamma: jax.Array,
        lr: jax.Array,
        rho: jax.Array,
        oracle: Oracle,
        params: Any,
        history: Any,
        count: jax.Array,
    ) -> Objective:
        r"""The inner problem at the newest iterate, ``params``.

        Preconditioned steps go as far as the objective lets them, and it must be bounded: to every
        divergence they add what damping is to the Q step,
        :math:`\frac\gamma2 \|\theta_k + s - \theta_i\|^2`. SGD's few short steps, as in the paper,
        need no such thing.
        """
        weights = self.weights(rho, count)
        here, buffer = leaves_by_path(params), leaves_by_path(history)
        held = None
        if self.inner == "preconditioned":
            ages = (count - jnp.arange(self.capacity)) % self.capacity
            past = {path: here[path].astype(float) - x[ages] for path, x in buffer.items()}
            held = _Held(gamma, weights, past)

        def outputs(leaves: Leaves) -> jax.Array:
            # The oracle's parameters are whole, where ours may be masked.
            return oracle.outputs(replace_leaves(oracle.params, leaves))

        def outputs_at_age(age: jax.Array) -> jax.Array:
            return outputs({path: x[(count - age) % self.capacity] for path, x in buffer.items()})

        newest = outputs(here) if oracle.done is None else oracle.done.outputs
        older = jax.lax.map(outputs_at_age, jnp.arange(1, self.capacity))
        old = jax.lax.stop_gradient(jnp.concatenate([newest[None], older]))

        def divergences(new: jax.Array) -> tuple[jax.Array, jax.Array]:
            terms = jax.vmap(oracle.divergence, in_axes=(0, None))(old, new)
            return self.kl_scale * jnp.sum(weights * terms), 2 * terms[0]

        def wake(s: Leaves) -> tuple[jax.Array, jax.Array]:
            return divergences(
                outputs({path: p + s[path].astype(p.dtype) for path, p in here.items()})
            )

        def model(s: Leaves) -> tuple[jax.Array, Leaves]:
            bs = multiply_b(s)
            value = lr * (optax.tree.vdot(g, s) + 0.5 * optax.tree.vdot(s, bs))
            gradient = {path: lr * (g[path] + bs[path]) for path in s}
            if held is None:
                return value, gradient
            more = held.gradient(s)
            return value + held.value(s), {path: x + more[path] for path, x in gradient.items()}

        def value(s: Leaves) -> Value:
            kl, size = wake(s)
            return Value(kl + model(s)[0], size)

        def value_and_gradient(s: Leaves) -> tuple[Value, Leaves]:
            (kl, size), kl_gradient = jax.value_and_grad(wake, has_aux=True)(s)
            value, gradient = model(s)
            whole = {path: kl_gradient[path] + gradient[path] for path in s}
            return Value(kl + value, size), whole

        at_rest, _ = divergences(old[0])
        if held is not None:
            at_rest += held.value(optax.tree.zeros_like(g))
        return Objective(value, value_and_gradient, at_rest)

    def solve(
        self,
        s: Leaves,
        objective: Objective,
        clip: Callable[[Leaves], Leaves],
        precondition: Callable[[Leaves], Leaves],
        limit: jax.Array,
    ) -> Solved:
        """The step after the inner solver.

        Args:
          s: the Q step, where it begins.
          objective: what it lowers.
          clip: limits a step of SGD.
          precondition: about the inverse of the objective's Hessian, times a gradient.
          limit: of the size of preconditioned steps.
        """
        if self.inner == "sgd":
            return self._by_sgd(s, objective, clip)
        return self._preconditioned(s, objective, precondition, limit)

    def _by_sgd(self, s: Leaves, objective: Objective, clip: Callable[[Leaves], Leaves]) -> Solved:
        def step(i: jax.Array, carried: tuple[Leaves, jax.Array]) -> tuple[Leaves, jax.Array]:
            s, start = carried
            value, gradient = objective.value_and_gradient(s)
            gradient = clip(gradient)
            s = {path: s[path] - self.omega * gradient[path] for path in s}
            return s, jnp.where(i == 0, value.objective, start)

        s, start = jax.lax.fori_loop(0, self.inner_steps, step, (s, jnp.zeros((), float)))
        end = objective.value(s).objective
        return Solved(s, jnp.where(jnp.asarray(self.inner_steps) > 0, start, end), end)

    def _preconditioned(
        self,
        s: Leaves,
        objective: Objective,
        precondition: Callable[[Leaves], Leaves],
        limit: jax.Array,
    ) -> Solved:
        """Steps that are shortened until they lower the objective, the first of them the Q step."""

        def helps(value: Value, at: _Search) -> jax.Array:
            return (value.objective <= at.lowest) & (value.size <= limit)

        def step(i: jax.Array, at: _Search) -> _Search:
            value, gradient = objective.value_and_gradient(at.trial)
            better = helps(value, at)
            direction = optax.tree.where(better, precondition(gradient), at.direction)
            best = optax.tree.where(better, at.trial, at.best)
            within = jnp.sqrt(limit / jnp.maximum(value.size, limit))
            length = jnp.where(better, self.omega, at.length * jnp.minimum(0.5, within))
            return _Search(
                best=best,
                lowest=jnp.where(better, value.objective, at.lowest),
                direction=direction,
                length=length,
                trial={path: x - length * direction[path] for path, x in best.items()},
                start=jnp.where(i == 0, value.objective, at.start),
            )

        at = _Search(
            best=optax.tree.zeros_like(s),
            lowest=objective.at_rest,
            direction=jax.tree.map(jnp.negative, s),
            length=jnp.ones((), float),
            trial=s,
            start=jnp.zeros((), float),
        )
        at = jax.lax.fori_loop(0, self.inner_steps, step, at)
        end = objective.value(at.trial)
        better = helps(end, at)
        return Solved(
            optax.tree.where(better, at.trial, at.best),
            jnp.where(jnp.asarray(self.inner_steps) > 0, at.start, end.objective),
            jnp.where(better, end.objective, at.lowest),
        )


class _Held(NamedTuple):
    r""":math:`\frac\gamma2 \sum_i w_i \|s + d_i\|^2`, where ``past`` has :math:`d_i` in front."""

    gamma: jax.Array
    weights: jax.Array
    past: Leaves

    def value(self, s: Leaves) -> jax.Array:
        squares = [
            jnp.tensordot(
                self.weights, ((s[path] + d) ** 2).reshape(len(d), -1).sum(axis=1), axes=1
            )
            for path, d in self.past.items()
        ]
        return 0.5 * self.gamma * sum(squares[1:], start=squares[0])

    def gradient(self, s: Leaves) -> Leaves:
        return {
            path: self.gamma * jnp.tensordot(self.weights, s[path] + d, axes=1)
            for path, d in self.past.items()
        }


class _Search(NamedTuple):
    """The best step so far, and the next to be tried: ``best - length * direction``."""

    best: Leaves
    lowest: jax.Array  # the objective there
    direction: Leaves
    length: jax.Array
    trial: Leaves
    start: jax.Array
