"""The same layer or network in two front ends, and whether their factors are the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from small_nets import jit

import kldwrm_jax as kw

KEY = jax.random.key(1)
GAUSSIAN = kw.Gaussian()


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


def tagged_factors(function, params, *args, options=None, likelihood=GAUSSIAN, **kwargs):
    """Those of a plain function, compiled as one program."""
    net = kw.instrument(function, likelihood, params, *args, **(options or {}))
    return jit(lambda p: net.oracle(p, *args, key=KEY, **kwargs).factors())(params)


def linen_factors(module, params, *args, options=None, likelihood=GAUSSIAN, **kwargs):
    net = kw.instrument(module, likelihood, *args, **(options or {}))
    return jit(lambda p: net.oracle(p, *args, key=KEY, **kwargs).factors())(params)


def dense(p, x):
    w, b = p["kernel"], p["bias"]
    return kw.tag(w, x, x @ w + b, bias=b)


def network(params, x):
    return dense(params["last"], jnp.tanh(dense(params["first"], x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="last")(jnp.tanh(nn.Dense(5, name="first")(x)))


def params_of(module, x):
    params = module.init(jax.random.key(0), x)["params"]
    return jax.tree.map(lambda p: p.astype(float) + 0.1, params)
