import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs here run once, on tiny arrays: the time goes into compiling them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
