"""What an optimizer of the family carries from step to step, and what it tells about itself."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar


class Monitor(NamedTuple):
    """Counters, and the last step's scalars."""

    refreshes: jax.Array  # int32 []: statistics taken into the average
    rejected_refreshes: jax.Array  # int32 []: statistics or inverses that were not finite
    outliers: jax.Array  # int32 []: refreshes that kept a block's absurd statistics out
    rejected_steps: jax.Array  # int32 []: gradients or directions that were not finite
    kl_clip: jax.Array  # float [], 1 where nothing was clipped
    block_clip: jax.Array  # float [], the smallest over all parameters
    contraction: jax.Array  # float []: rho ||I - Mhat||
    wake_ratio: jax.Array  # float []: norm of the wake's pull over that of the gradient
    objective_before: jax.Array  # float []: QE's inner objective at the Q step
    objective_after: jax.Array  # float []: and where the inner solver left it


class KLDWRMState(NamedTuple):
    """State of every member of the family: arrays only.

    Trees of the parameters' structure are None for the members that do not need them.
    """

    count: chex.Array  # int32 []: steps taken
    factors: dict[str, Any]  # exponentially averaged factors, by block
    inverses: dict[str, Any]  # what the solver keeps of them
    strange: jax.Array  # int32 (blocks,): refreshes in a row far from the average, by name
    calibration: jax.Array  # float []: what the blocks are multiplied by, 1 if it is not asked for
    g_prev: optax.Updates | None  # the gradient of the step before
    g_hat: optax.Updates | None  # the effective gradient of the step before
    pull: optax.Updates | None  # R, the wake's pull, for the step to come
    momentum: optax.Updates | None  # sum_i nu^(k-i) g_i, if nu is used
    history: optax.Params | None  # QE: the newest iterates, (capacity, *shape)
    monitor: Monitor


def raised(counter: jax.Array, by: jax.Array) -> jax.Array:
    """One more if ``by`` is true; a full counter stays full."""
    return jnp.where(by, optax.safe_increment(counter), counter)


def next_count(count: jax.Array, period: Scalar) -> jax.Array:
    """One more; past the largest number, round its last period, so that refreshes go on."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count + 1 - period)


def new_monitor() -> Monitor:
    """A monitor before the first step."""
    counters = (jnp.zeros((), jnp.int32) for _ in range(4))
    clips = (jnp.ones((), float) for _ in range(2))
    scalars = (jnp.zeros((), float) for _ in range(4))
    return Monitor(*counters, *clips, *scalars)


def diagnostics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    r"""What an optimizer of the family tells about itself: a dict of scalars.

    Args:
      opt_state: any Optax state that holds one state of the family, however deep.

    Returns:
      ``steps`` taken; ``refreshes`` of the curvature; ``rejected_refreshes`` (statistics or
      inverses that were not finite: the last good ones stay in use); ``outliers`` (refreshes at
      which some block's statistics were a million times larger than their average, both with the
      damping, and were kept out of it; the third in a row is believed); ``rejected_steps``
      (gradients or directions that were not finite: no step was taken); ``kl_clip`` and
      ``block_clip``, the last step's factors (the smallest for the latter); ``calibration``, how
      many times the blocks' divergence the Fisher's is along the steps, if ``calibrate`` asks for
      it; ``contraction``,
      :math:`\rho \|I - \hat M\|`, which must stay below 1 for :math:`\hat g` to stay bounded;
      ``wake_ratio``, the norm of the wake's pull over that of the learning rate times the gradient;
      ``objective_before`` and ``objective_after`` of QE's inner solver (0 before it starts, and for
      other members; not finite where it diverged and the Q step was taken).

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(4), jnp.array([0, 1, 2, 0])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> tx = kw.q_kldwrm(net.layers, 0.1)
      >>> state = tx.init(params)
      >>> oracle = net.oracle(params, x, targets=y, key=jax.random.key(1))
      >>> grads = jax.grad(oracle.loss)(params)
      >>> updates, state = tx.update(grads, state, params, oracle=oracle)
      >>> told = kw.diagnostics(state)
      >>> int(told["refreshes"]), int(told["rejected_steps"])
      (1, 0)
    """
    states = [
        node
        for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, KLDWRMState))
        if isinstance(node, KLDWRMState)
    ]
    if len(states) != 1:
        raise ValueError(
            f"opt_state must hold one state of kfac, so_kldwrm, q_kldwrm or qe_kldwrm, found "
            f"{len(states)}: pass the part of it that belongs to the optimizer you ask about"
        )
    state = states[0]
    told = {"steps": state.count, "calibration": state.calibration, **state.monitor._asdict()}
    return {name: jnp.asarray(value) for name, value in told.items()}  # of nnx's variables, too
