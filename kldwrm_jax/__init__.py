"""K-FAC and the KLD-WRM family of natural-gradient optimizers, as Optax transforms."""

from kldwrm_jax import curvature, wake
from kldwrm_jax.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "curvature", "wake"]
