"""The averaged inverse Fisher alone, to be combined with Optax's own transforms."""

from typing import Any

import optax

from kldwrm_jax.curvature import AveragedFisher, Inverse, Layers, LinearSolver
from kldwrm_jax.curvature.solver_choice import check_damping_mode, damping_mode_of
from kldwrm_jax.optimizers.clipping import Clip
from kldwrm_jax.optimizers.member import Member

_AT_EVERY_REFRESH = Inverse()


def precondition(
    layers: Layers,
    *,
    rho: float = 0.95,
    damping: optax.ScalarOrSchedule = 1e-2,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies gradients by the inverse of the averaged Fisher, :math:`\bar F_k^{-1} g_k`.

    No learning rate, no sign and no limit: chain it with Optax's transforms. :func:`kfac` without
    its limit is ``optax.chain(precondition(layers), optax.scale_by_learning_rate(...))``.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      rho: decay of the factors' average, once per refresh.
      damping, damping_mode, refresh_every, inverse: see :func:`kfac`.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = optax.chain(
      ...     kw.precondition(net.layers, damping_mode="factored", refresh_every=5),
      ...     optax.clip_by_global_norm(1.0),
      ...     optax.trace(0.9),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> state = kw.TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
      >>> @jax.jit
      ... def step(state, key):
      ...     loss, grads, oracle = net.value_and_grad(state.params, x, targets=y, key=key)
      ...     return state.apply_gradients(grads=grads, oracle=oracle), loss
      >>> for i in range(40):
      ...     state, loss = step(state, jax.random.key(i))
      >>> bool(loss < 0.5)
      True
    """
    check_damping_mode(layers, damping_mode)
    solver = LinearSolver(damping_mode_of(damping_mode, inverse))
    newton_step = Member(
        fisher=AveragedFisher(layers, solver, rho, refresh_every, inverse),
        learning_rate=1.0,
        damping=damping,
        clip=Clip(None, None),
        weight_decay=0.0,
        calibrate=False,
        wake=None,
    )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        step, state = newton_step.update(updates, state, params, **extra_args)
        return optax.tree.scale(-1, step), state

    return optax.GradientTransformationExtraArgs(newton_step.init, update)
