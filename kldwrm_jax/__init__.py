"""K-FAC and the KLD-WRM family of natural-gradient optimizers, as Optax transforms."""

from kldwrm_jax import capture, curvature, wake
from kldwrm_jax.capture import instrument, kl_report, tag
from kldwrm_jax.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kldwrm_jax.optimizers import (
    Inverse,
    TrainState,
    diagnostics,
    kfac,
    q_kldwrm,
    qe_kldwrm,
    so_kldwrm,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Inverse",
    "Likelihood",
    "TrainState",
    "capture",
    "curvature",
    "diagnostics",
    "instrument",
    "kfac",
    "kl_report",
    "q_kldwrm",
    "qe_kldwrm",
    "so_kldwrm",
    "tag",
    "wake",
]
