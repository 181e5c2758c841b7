"""Capture: how a model's layers are found and their statistics computed."""

from kldwrm_jax.capture.instrument import Instrumented, instrument
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.capture.tag import tag

__all__ = ["Instrumented", "Oracle", "instrument", "tag"]
