"""Likelihoods: what a network's outputs mean, and what they say of a batch."""

from kldwrm_jax.likelihoods.families import Bernoulli, Categorical, Gaussian, Likelihood
from kldwrm_jax.likelihoods.term import LikelihoodTerm

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "LikelihoodTerm"]
