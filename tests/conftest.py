import functools
import itertools
import time

import jax
import numpy as np
import precision
import pytest

# Most programs here run once, on tiny arrays: the time goes into compiling them.
jax.config.update("jax_disable_most_optimizations", True)

collect_ignore = ["eight_devices.py", "two_replicas.py"]  # programs of their own


@pytest.fixture
def x64():
    """Float64 for the length of a test."""
    with precision.x64(True):
        yield


@pytest.fixture
def rng():
    """Numpy's generator, from a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def a_second_a_step(monkeypatch):
    """A clock that does not depend on the machine."""
    monkeypatch.setattr(time, "process_time", functools.partial(next, itertools.count()))
