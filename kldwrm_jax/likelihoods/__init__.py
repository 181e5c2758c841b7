"""Likelihoods: what a network's outputs mean, and what they say of a batch."""

from kldwrm_jax.likelihoods.families import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Gaussian,
    Likelihood,
    Residuals,
    Scaled,
)
from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.likelihoods.terms import LikelihoodTerms

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Gaussian",
    "Likelihood",
    "LikelihoodTerm",
    "LikelihoodTerms",
    "Residuals",
    "Scaled",
]
