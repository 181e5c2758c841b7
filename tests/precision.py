"""Float64, on or off for a while."""

import contextlib

import jax


@contextlib.contextmanager
def x64(enabled):
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
