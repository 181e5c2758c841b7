"""With nothing set, no run ends above its initial loss or not finite: 240 of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
from sklearn import datasets

import kldwrm_jax as kw

pytestmark = pytest.mark.slow

SEEDS, STEPS = 5, 400


def digits():
    x, y = datasets.load_digits(return_X_y=True)
    return x / 16, y


def classes():
    """Handwritten digits."""
    return *digits(), kw.Categorical(), (32, 10)


def noise():
    """Handwritten digits with random labels: there is nothing to learn but noise."""
    x, y = digits()
    return x, np.random.default_rng(0).permutation(y), kw.Categorical(), (32, 10)


def autoencoder():
    """Handwritten digits through a bottleneck."""
    x, _ = digits()
    return x, x, kw.Bernoulli(), (32, 8, 32, 64)


def regression():
    """Badly scaled inputs: the diabetes data with columns of very different size."""
    x, y = datasets.load_diabetes(return_X_y=True)
    return x * np.logspace(0, 3, 10), (y[:, None] - y.mean()) / y.std(), kw.Gaussian(), (32, 32, 1)


PROBLEMS = {make.__name__: make for make in (classes, noise, autoencoder, regression)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("batch", [16, 64, 256, None])
@pytest.mark.parametrize("name", PROBLEMS)
def test_with_nothing_set_no_run_ends_above_its_initial_loss(name, batch, dtype):
    with precision.x64(dtype == "float64"):
        before, after = losses(name, batch, jnp.dtype(dtype))
    assert np.isfinite(after).all()
    assert (after < before).all(), (before, after)


def losses(name, batch, dtype):
    """The loss of the whole data before and after, by seed."""
    x, y, likelihood, widths = PROBLEMS[name]()
    x = jnp.asarray(x, dtype)
    y = jnp.asarray(y) if y.dtype.kind == "i" else jnp.asarray(y, dtype)
    layers = [each for w in widths for each in (nn.Dense(w, dtype, param_dtype=dtype), nn.tanh)]
    model, batch = nn.Sequential(layers[:-1]), batch or len(x)
    net = kw.instrument(model, likelihood, x[:batch])
    tx = kw.kfac(net.layers, refresh_every=20)

    def step(carry, key):
        params, state = carry
        chosen = jax.random.choice(key, len(x), (batch,), replace=False)
        _, grads, oracle = net.value_and_grad(params, x[chosen], targets=y[chosen], key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return (optax.apply_updates(params, updates), state), None

    def loss(params):
        return net.oracle(params, x, targets=y).loss(params)

    def train(seed):
        key = jax.random.key(seed)
        params = model.init(key, x[:1])["params"]
        keys = jax.random.split(key, STEPS)
        (trained, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
        return loss(params), loss(trained)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(train))(jnp.arange(SEEDS)))
