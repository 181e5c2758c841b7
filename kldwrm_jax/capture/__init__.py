"""Capture: how a model's layers are found and their statistics computed."""

from kldwrm_jax.capture.instrument import Instrumented, instrument
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.capture.sample_space import SampleSpace, sample_space
from kldwrm_jax.capture.tag import tag

__all__ = ["Instrumented", "Oracle", "SampleSpace", "instrument", "sample_space", "tag"]
