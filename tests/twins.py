"""The same layer in two front ends: what it is given, and whether its factors are the same."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=7):
    return jax.random.normal(jax.random.key(seed), shape)


def tail(z):
    """Three outputs for every example, whatever a layer gives."""
    mix = np.random.default_rng(3).normal(size=(z[0].size, 3))
    return jnp.tanh(z).reshape(z.shape[0], -1) @ mix


def assert_same(factors, expected, rtol=1e-9):
    assert factors.keys() == expected.keys()
    for name, arrays in expected.items():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=rtol / 10, rtol=rtol),
            factors[name],
            arrays,
        )
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(arrays))
