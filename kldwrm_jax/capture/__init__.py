"""Capture: how a model's layers are found and their statistics computed."""

from kldwrm_jax.capture.instrument import Instrumented, instrument
from kldwrm_jax.capture.kl_report import KLReport, kl_report
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.capture.tag import tag

__all__ = ["Instrumented", "KLReport", "Oracle", "instrument", "kl_report", "tag"]
