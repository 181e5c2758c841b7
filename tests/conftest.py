import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    """Most programs here run once, on tiny arrays: the time goes into compiling them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def x64():
    """Float64 for the length of a test."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def rng():
    """Numpy's generator, from a fixed seed."""
    return np.random.default_rng(0)
