"""K-FAC and the KLD-WRM family of natural-gradient optimizers, as Optax transforms."""

from kldwrm_jax import capture, curvature, wake
from kldwrm_jax.capture import instrument
from kldwrm_jax.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "capture",
    "curvature",
    "instrument",
    "wake",
]
