"""Flax's training state, for transforms that take more than gradients."""

import dataclasses
import functools
from typing import Any, Self

import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` whose ``apply_gradients`` forwards extra arguments to ``tx.update``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(4), jnp.array([0, 1, 2, 0])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> state = kw.TrainState.create(
      ...     apply_fn=model.apply,
      ...     params=model.init(jax.random.key(0), x)["params"],
      ...     tx=kw.kfac(net.layers, 0.1))
      >>> oracle = net.oracle(state.params, x, targets=y, key=jax.random.key(1))
      >>> grads = jax.grad(oracle.loss)(state.params)
      >>> int(state.apply_gradients(grads=grads, oracle=oracle).step)
      1
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Takes a step.

        Args:
          grads: gradients, of the structure of ``params``.
          **kwargs: those that name fields of the state replace them; all others go to
            ``tx.update``, such as ``oracle``.

        Returns:
          The state after the step.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: value for name, value in kwargs.items() if name in fields}
        extra = {name: value for name, value in kwargs.items() if name not in fields}
        tx = optax.with_extra_args_support(self.tx)
        bound = optax.GradientTransformation(tx.init, functools.partial(tx.update, **extra))
        stepped = super(TrainState, self.replace(tx=bound)).apply_gradients(grads=grads)
        return stepped.replace(**{"tx": self.tx} | replaced)
