"""What an optimizer of the family carries from step to step, and what it tells about itself."""

import warnings
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar, check_count
from kldwrm_jax.optimizers.found_damping import FoundDamping
from kldwrm_jax.optimizers.rejection import STUCK, WAY_OUT, check_not_stuck, is_stuck
from kldwrm_jax.optimizers.self_setting import FitState


class Monitor(NamedTuple):
    """Counters, and the last step's scalars."""

    refreshes: jax.Array  # int32 []: statistics averaged in
    rejected_refreshes: jax.Array  # int32 []: statistics or inverses that were not finite
    outliers: jax.Array  # int32 []: refreshes that rejected the statistics of some block
    rejected_steps: jax.Array  # int32 []: gradients or directions that were not finite
    undone_steps: jax.Array  # int32 []: steps that raised the loss, as the next batch saw it
    refused_in_a_row: jax.Array  # int32 []: steps since the last one that was taken
    kl_clip: jax.Array  # float []: 1 where nothing was clipped
    true_kl_clip: jax.Array  # float []: likewise, of the true divergence
    kl_ratio: jax.Array  # float []: a step's true size per output over the blocks', last measured
    block_size: jax.Array  # float []: the last step's s'F_bar s by the blocks, or more
    block_clip: jax.Array  # float []: the smallest over all parameters
    contraction: jax.Array  # float []: rho ||I - Mhat||
    wake_ratio: jax.Array  # float []: norm of the wake's pull over that of the gradient
    objective_before: jax.Array  # float []: QE's inner objective at the Q step
    objective_after: jax.Array  # float []: and after the inner solver
    learning_rate: jax.Array  # float []: what the preconditioned gradient was multiplied by
    momentum: jax.Array  # float []: what the last step was multiplied by
    damping: jax.Array  # float []: gamma
    reduction_ratio: jax.Array  # float []: realised over predicted decrease, where it is measured
    kl_limit: jax.Array  # float []: of a step that sets itself
    averaging: jax.Array  # float []: 1 where iterates are averaged, 0 where steps are fitted
    loss_scale: jax.Array  # float []: the loss over the likelihood's
    loss_agreement: jax.Array  # float []: how much of the loss's slopes the likelihood's explain


class KLDWRMState(NamedTuple):
    """State of every member of the family: arrays only.

    Trees of the parameters' structure are None for the members that do not need them.
    """

    count: chex.Array  # int32 []: steps taken
    factors: dict[str, Any]  # exponentially averaged factors, by block
    inverses: dict[str, Any]  # what the solver caches of them, by block
    outlier_streak: dict[str, jax.Array]  # int32 []: consecutive refreshes far from the average
    calibration: jax.Array  # float []: c of calibrated blocks; 0 until it is measured
    g_prev: optax.Updates | None  # g_{k-1}
    g_hat: optax.Updates | None  # ghat_{k-1}
    pull: optax.Updates | None  # R_k, the wake's pull at the next step
    momentum: optax.Updates | None  # sum_i nu^(k-i) g_i, if nu is used
    history: optax.Params | None  # QE: the newest iterates, (capacity, *shape)
    last_step: optax.Updates | None  # s_{k-1}, if there is momentum
    offset: optax.Updates | None  # z - x of averaged iterates, where steps set themselves
    fit: FitState | Any  # what steps that set themselves know; None for others
    monitor: Monitor


class NaturalGradientState(NamedTuple):
    """State of :func:`natural_gradient`: arrays only."""

    count: chex.Array  # int32 []: steps taken
    solution: optax.Updates | None  # phi_{k-1}: with a learning rate, before it, if memory needs it
    found: FoundDamping | None  # with nothing set
    monitor: Monitor


def increment_if(condition: jax.Array, counter: jax.Array) -> jax.Array:
    """One more if the condition holds; a counter that is full stays full."""
    return jnp.where(condition, optax.safe_increment(counter), counter)


def next_count(count: jax.Array, period: Scalar) -> jax.Array:
    """One more; past the largest integer, back by a period, so that refreshes go on."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count + 1 - period)


def new_monitor() -> Monitor:
    """A monitor before the first step."""
    zeros = {name: jnp.zeros((), float) for name in Monitor._fields}
    counters = {name: jnp.zeros((), jnp.int32) for name in Monitor._fields[:6]}
    factors = ("kl_clip", "true_kl_clip", "block_clip", "loss_scale", "loss_agreement")
    ones = {name: jnp.ones((), float) for name in factors}
    return Monitor(**zeros | counters | ones)


def diagnostics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    r"""Scalars that describe the state of an optimizer of the family.

    Args:
      opt_state: any Optax state that contains exactly one state of the family.

    Returns:
      A dict with

      * ``steps`` taken, and ``refreshes`` of the curvature;
      * ``rejected_steps``: gradients or directions that were not finite, or a learning rate below
        zero; no step was taken;
      * ``undone_steps``: steps that set themselves and raised the loss beyond doubt, as the next
        batch saw it; the update in place of the next one took them back;
      * ``refused_in_a_row``: steps since the last one that was taken, also for want of curvature.
        Above ten it is no accident: a warning here, an error in :func:`check_progress`;
      * ``rejected_refreshes``: statistics or inverses that were not finite; the last ones stayed;
      * ``outliers``: refreshes at which some block's statistics exceeded their average, both with
        the damping, a million times and were rejected. After three in a row the average is reset;
      * ``kl_clip``, ``true_kl_clip`` and ``block_clip``: the last step's factors (of the last, the
        smallest);
      * ``kl_ratio``: the true :math:`s'Fs` per output over the blocks' estimate, as last measured;
      * ``block_size``: what the blocks make of the last step's :math:`s'Fs`, momentum included;
      * ``calibration``: the ratio of the exact to the approximate quadratic KL along the steps;
      * ``contraction``: :math:`\rho \|I - \hat M\|`, below 1 if :math:`\hat g` is to stay bounded;
      * ``wake_ratio``: the norm of the wake's pull over the learning rate times the gradient's;
      * ``learning_rate``, ``momentum`` and ``damping`` of the last step. Where it set itself, the
        rate is what the preconditioned gradient was multiplied by, and ``reduction_ratio`` is the
        running mean of realised over predicted decreases of the loss, ``kl_limit`` the limit of a
        step's divergence, ``averaging`` is 1 where iterates are averaged, 0 where steps are fitted;
      * ``loss_scale``: the loss that the gradients are of over the likelihood's, as measured, and
        ``loss_agreement`` the part of its slopes that this explains. Where that is below a half,
        the gradients have little to do with the likelihood, and the scale is taken to be 1;
      * ``objective_before`` and ``objective_after`` of QE's inner solver: 0 before it starts and
        for other members, not finite where it diverged and the Q step was taken.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(4), jnp.array([0, 1, 2, 0])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> tx = kw.kfac(net.layers)
      >>> _, grads, oracle = net.value_and_grad(params, x, targets=y, key=jax.random.key(1))
      >>> _, state = tx.update(grads, tx.init(params), params, oracle=oracle)
      >>> scalars = kw.diagnostics(state)
      >>> int(scalars["refreshes"]), int(scalars["rejected_steps"])
      (1, 0)
    """
    state = _state_in(opt_state)
    refused = jnp.asarray(state.monitor.refused_in_a_row)
    if is_stuck(refused):
        message = f"the last steps, {STUCK} or more, were refused: {WAY_OUT}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    calibration = jnp.asarray(getattr(state, "calibration", 1.0))
    calibration = jnp.where(calibration > 0, calibration, 1)
    scalars = {"steps": state.count, "calibration": calibration, **state.monitor._asdict()}
    return {name: jnp.asarray(value) for name, value in scalars.items()}  # of nnx's variables, too


def check_progress(opt_state: optax.OptState, refused: int = STUCK) -> None:
    """An error if the last steps were all refused: nothing trains any more.

    A step that is not finite is refused, and inside ``jit`` nobody is told. Call this where the
    state is at hand, once an epoch or wherever the loss is printed. ``tx.update`` outside of
    ``jit`` does it by itself. Of a ``vmap`` over seeds, one that is stuck is enough.

    Args:
      opt_state: any Optax state that contains exactly one state of the family.
      refused: how many steps in a row are too many.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model, x = nn.Dense(3), jnp.eye(4)
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> state = kw.kfac(net.layers).init(model.init(jax.random.key(0), x)["params"])
      >>> kw.check_progress(state)
    """
    check_count("refused", refused)
    check_not_stuck(jnp.asarray(_state_in(opt_state).monitor.refused_in_a_row), refused)


def _state_in(opt_state: optax.OptState) -> KLDWRMState | NaturalGradientState:
    """The one state of the family that is somewhere in there."""
    kinds = (KLDWRMState, NaturalGradientState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    states = [node for node in nodes if isinstance(node, kinds)]
    if len(states) != 1:
        raise ValueError(
            f"opt_state must contain one state of kfac, so_kldwrm, q_kldwrm, qe_kldwrm, "
            f"natural_gradient or precondition, found {len(states)}: pass the part that belongs to "
            f"one of them"
        )
    return states[0]
