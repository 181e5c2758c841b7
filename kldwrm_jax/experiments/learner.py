"""A model and its optimizer, compiled: initial state, training step, outputs."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import kldwrm_jax as kw


class State(NamedTuple):
    """The state that a step updates."""

    params: Any
    opt_state: Any
    step: jax.Array


class Learner:
    """Compiles a training run on batches like ``batch``, inputs and targets.

    ``make`` returns the optimizer for ``net.layers`` and a learning rate; ``options`` are those of
    ``kw.instrument``, and ``train`` keyword arguments of the model in training.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: kw.Likelihood,
        make: Callable[[Any, Any], Any],
        batch: tuple[Any, Any],
        train: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        started, key = time.perf_counter(), jax.random.key(0)
        net = kw.instrument(model, likelihood, batch[0], **options, **train)

        def transform(rate: Any) -> optax.GradientTransformationExtraArgs:
            return optax.with_extra_args_support(make(net.layers, rate))

        def init(key: jax.Array, rate: Any) -> State:
            params = model.init(key, jnp.zeros_like(batch[0][:1]))["params"]
            return State(params, transform(rate).init(params), jnp.zeros((), jnp.int32))

        def step(state: State, rate: Any, key: Any, x: Any, y: Any) -> tuple[State, jax.Array]:
            params, opt_state, count = state
            dropout, key = jax.random.split(jax.random.fold_in(key, count))
            loss, grads, oracle = net.value_and_grad(
                params, x, targets=y, key=key, rngs={"dropout": dropout}, **train
            )
            updates, opt_state = transform(rate).update(grads, opt_state, params, oracle=oracle)
            return State(optax.apply_updates(params, updates), opt_state, count + 1), loss

        def outputs(params: Any, x: jax.Array) -> Any:
            apply = partial(model.apply, {"params": params})
            return jax.lax.map(lambda x: apply(x[None])[0], x, batch_size=1000)  # bounds memory

        self.init, self.outputs = jax.jit(init), jax.jit(outputs)
        self.step = jax.jit(step, donate_argnums=0)
        state, _ = self.step(self.init(key, 0.0), 0.0, key, *batch)
        jax.block_until_ready(self.outputs(state.params, batch[0]))
        self.compile_seconds = time.perf_counter() - started
