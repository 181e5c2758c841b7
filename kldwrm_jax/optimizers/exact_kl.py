r"""QE-KLD-WRM's inner problem: the exact symmetric KL to the newest iterates, in a ring buffer.

.. math:: \min_s\ g_k's + \tfrac12 s'B_k s
          + \lambda \sum_i \zeta(i) \rho^{k-i} D_{KL}(\theta_i, \theta_k + s)

on the current batch, by a few steps of SGD from the Q step. Everything is multiplied by the
learning rate :math:`1/\lambda`, so that nothing is divided by it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_choice, check_count, check_non_negative
from kldwrm_jax.capture import Oracle
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


@dataclasses.dataclass(frozen=True)
class ExactKL:
    """How QE's inner problem is posed and solved."""

    capacity: int
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
        r""":math:`\zeta(i)\rho^{k-i}` of every iterate by its age, once the buffer is full.

        ``"drop"`` forgets what has left the buffer; ``"fold"`` gives its weight to the oldest that
        is left, as if that were the first iterate of all.
        """
        age = jnp.arange(self.capacity)
        first = age == self.capacity - 1 if self.tail == "fold" else age == count
        return self.kl_scale * jnp.where(first, 1.0, 1.0 - rho) * jnp.power(rho, age)

    def solve(
        self,
        s: Leaves,
        *,
        g: Leaves,
        multiply_b: Callable[[Leaves], Leaves],
        lr: jax.Array,
        rho: jax.Array,
        clip: Callable[[Leaves], Leaves],
        oracle: Oracle,
        params: Any,
        history: Any,
        count: jax.Array,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """The step after the inner solver, and the objective before and after it."""
        weights = self.weights(rho, count)
        here, buffer = leaves_by_path(params), leaves_by_path(history)

        def outputs(leaves: Leaves) -> jax.Array:
            # The oracle's parameters are whole, where ours may be masked.
            return oracle.outputs(replace_leaves(oracle.params, leaves))

        def outputs_at_age(age: jax.Array) -> jax.Array:
            return outputs({path: x[(count - age) % self.capacity] for path, x in buffer.items()})

        newest = outputs(here) if oracle.done is None else oracle.done.outputs
        older = jax.lax.map(outputs_at_age, jnp.arange(1, self.capacity))
        old = jax.lax.stop_gradient(jnp.concatenate([newest[None], older]))

        def wake(s: Leaves) -> jax.Array:
            new = outputs({path: p + s[path].astype(p.dtype) for path, p in here.items()})
            terms = jax.vmap(oracle.divergence, in_axes=(0, None))(old, new)
            return jnp.sum(weights * terms)

        def model(s: Leaves) -> tuple[jax.Array, Leaves]:
            bs = multiply_b(s)
            value = optax.tree.vdot(g, s) + 0.5 * optax.tree.vdot(s, bs)
            return lr * value, {path: lr * (g[path] + bs[path]) for path in s}

        def step(i: jax.Array, carried: tuple[Leaves, jax.Array]) -> tuple[Leaves, jax.Array]:
            s, start = carried
            kl, kl_gradient = jax.value_and_grad(wake)(s)
            value, model_gradient = model(s)
            gradient = clip({p: kl_gradient[p] + model_gradient[p] for p in s})
            s = {path: s[path] - self.omega * gradient[path] for path in s}
            return s, jnp.where(i == 0, kl + value, start)

        start = jnp.zeros((), float)
        s, start = jax.lax.fori_loop(0, self.inner_steps, step, (s, start))
        end = wake(s) + model(s)[0]
        start = jnp.where(jnp.asarray(self.inner_steps) > 0, start, end)
        scale = jnp.where(lr > 0, 1 / jnp.where(lr > 0, lr, 1), 1)
        return s, scale * start, scale * end
