"""Whether gradients, parameters and oracle belong to one model, and to the optimizer's layers."""

from typing import Any

import optax

from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import Layers
from kldwrm_jax.paths import leaves_by_path


def check_same_model(
    layers: Layers, updates: optax.Updates, params: optax.Params | None, oracle: Any
) -> Oracle:
    """The oracle; an error if there is none, or if it belongs to something else."""
    if oracle is None:
        raise ValueError(
            "update needs the batch's curvature: tx.update(grads, state, params, "
            "oracle=net.oracle(params, x, ...)). With a flax TrainState use "
            "kldwrm_jax.TrainState, whose apply_gradients(grads=grads, oracle=oracle) "
            "forwards it"
        )
    if not isinstance(oracle, Oracle):
        raise ValueError(
            f"oracle must be made by net.oracle(params, x, ...) or net.value_and_grad(...) of "
            f"net = kldwrm_jax.instrument(...), got a {type(oracle).__name__}"
        )
    known = layers.parameters
    layers.active({p: x for p, x in leaves_by_path(oracle.params).items() if p in known})
    g, theta = leaves_by_path(updates), leaves_by_path(params)
    if params is not None and theta.keys() != g.keys():
        raise ValueError(
            f"gradients and parameters must have the same structure; only one of them has "
            f"{', '.join(map(repr, sorted(theta.keys() ^ g.keys())))}"
        )
    return oracle
