"""K-FAC and the KLD-WRM family of natural-gradient optimizers, as Optax transforms."""

from kldwrm_jax import capture, curvature, wake
from kldwrm_jax.capture import instrument, tag
from kldwrm_jax.curvature import Inverse
from kldwrm_jax.kl_report import kl_report
from kldwrm_jax.likelihoods import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Gaussian,
    Likelihood,
    Residuals,
    Scaled,
)
from kldwrm_jax.optimizers import (
    Fit,
    LevenbergMarquardt,
    check_progress,
    diagnostics,
    kfac,
    natural_gradient,
    precondition,
    q_kldwrm,
    qe_kldwrm,
    so_kldwrm,
)
from kldwrm_jax.train_state import TrainState

__version__ = "0.2.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Fit",
    "Gaussian",
    "Inverse",
    "LevenbergMarquardt",
    "Likelihood",
    "Residuals",
    "Scaled",
    "TrainState",
    "capture",
    "check_progress",
    "curvature",
    "diagnostics",
    "instrument",
    "kfac",
    "kl_report",
    "natural_gradient",
    "precondition",
    "q_kldwrm",
    "qe_kldwrm",
    "so_kldwrm",
    "tag",
    "wake",
]
