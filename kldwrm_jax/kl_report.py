"""The size of a step: by the KL divergence, by the Fisher, and by its Kronecker blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.curvature import per_block
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.paths import leaves_by_path


class KLReport(NamedTuple):
    """The size of a step, measured in three ways: means over the batch, in nats."""

    kl: jax.Array  # the symmetric KL divergence between the networks before and after
    quadratic: jax.Array  # s'Fs / 2 with the exact Fisher of the whole network
    blocks: jax.Array  # s'Fs / 2 with its blocks

    @property
    def quadratic_ratio(self) -> jax.Array:
        """The ratio of the second-order expansion to the divergence."""
        return self.quadratic / self.kl

    @property
    def blocks_ratio(self) -> jax.Array:
        """The ratio of the blocks' quadratic form to the divergence."""
        return self.blocks / self.kl

    @property
    def calibration(self) -> jax.Array:
        """The factor by which the blocks underestimate the exact quadratic form."""
        return self.quadratic / self.blocks


def kl_report(
    oracle: Oracle, params: Any, updates: Any, factors: Mapping[str, Factors] | None = None
) -> KLReport:
    r"""The size of a step: by the KL divergence, by the Fisher, and by its Kronecker blocks.

    .. math:: D_{KL}(\theta, \theta + s), \qquad \tfrac12 s'Fs, \qquad
              \tfrac12 \sum_b s_b'(A_b \otimes G_b)\, s_b

    A natural-gradient step is computed with the last of them. If the ratios are far from one, its
    learning rate and its ``kl_clip`` are off by as much, which ``calibrate=True`` corrects.

    Args:
      oracle: the batch's ``net.oracle(...)``.
      params: the parameters before the step, such as ``oracle.params``.
      updates: the step, as ``tx.update`` returns it.
      factors: of the blocks, such as the average ``state.factors``. Defaults to the batch's.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x, fisher="exact")
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> oracle = net.oracle(params, x, targets=y)
      >>> step = jax.tree.map(lambda g: -0.01 * g, jax.grad(oracle.loss)(params))
      >>> report = kw.kl_report(oracle, params, step)
      >>> bool(abs(report.quadratic_ratio - 1) < 0.01)
      True
    """
    if params is not oracle.params:
        oracle = dataclasses.replace(oracle, params=params)
    known = oracle.factors() if factors is None else factors
    step = leaves_by_path(optax.tree.cast(updates, float))
    blocks = [own for own in oracle.model.layers.active(step) if not own.unseen]
    curved = per_block(blocks, lambda b, v: b.block.multiply(known[b.name], v), step)
    return KLReport(
        kl=oracle.divergence(
            oracle.outputs(params), oracle.outputs(optax.apply_updates(params, updates))
        ),
        quadratic=oracle.quadratic(updates),
        blocks=0.5 * jnp.asarray(optax.tree.vdot({path: step[path] for path in curved}, curved)),
    )
