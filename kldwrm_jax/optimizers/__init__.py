"""The optimizers: Optax transforms, their state, and a training state that feeds them."""

from kldwrm_jax.optimizers.family import kfac, q_kldwrm, qe_kldwrm, so_kldwrm
from kldwrm_jax.optimizers.inverse import Inverse
from kldwrm_jax.optimizers.state import KLDWRMState, Monitor, diagnostics
from kldwrm_jax.optimizers.train_state import TrainState

__all__ = [
    "Inverse",
    "KLDWRMState",
    "Monitor",
    "TrainState",
    "diagnostics",
    "kfac",
    "q_kldwrm",
    "qe_kldwrm",
    "so_kldwrm",
]
