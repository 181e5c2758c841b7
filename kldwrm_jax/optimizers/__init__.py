"""The optimizers: Optax transforms, and what their states tell."""

from kldwrm_jax.optimizers.family import kfac, q_kldwrm, qe_kldwrm, so_kldwrm
from kldwrm_jax.optimizers.levenberg_marquardt import LevenbergMarquardt
from kldwrm_jax.optimizers.natural_gradient import natural_gradient
from kldwrm_jax.optimizers.precondition import precondition
from kldwrm_jax.optimizers.self_setting import Fit
from kldwrm_jax.optimizers.state import (
    KLDWRMState,
    Monitor,
    NaturalGradientState,
    check_progress,
    diagnostics,
)

__all__ = [
    "Fit",
    "KLDWRMState",
    "LevenbergMarquardt",
    "Monitor",
    "NaturalGradientState",
    "check_progress",
    "diagnostics",
    "kfac",
    "natural_gradient",
    "precondition",
    "q_kldwrm",
    "qe_kldwrm",
    "so_kldwrm",
]
