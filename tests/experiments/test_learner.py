import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kldwrm_jax as kw
from kldwrm_jax.experiments.learner import Learner


class Net(nn.Module):
    """It has dropout in training."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.5, deterministic=not train)(nn.tanh(nn.Dense(8)(x)))
        return nn.Dense(3)(x)


X, Y = jax.random.normal(jax.random.key(0), (12, 5)), jnp.arange(12) % 3


@pytest.fixture(scope="module")
def learner():
    def make(layers, rate):
        return kw.kfac(layers, rate, refresh_every=2)

    return Learner(Net(), kw.Categorical(), make, (X, Y), {"train": True}, fisher="sampled")


def steps(learner, rate, count, key):
    state, losses = learner.init(jax.random.key(1), rate), []
    for _ in range(count):
        state, loss = learner.step(state, rate, key, X, Y)
        losses.append(float(loss))
    return state, losses


def test_steps_are_those_of_a_loop_that_a_user_would_write(learner):
    model, key = Net(), jax.random.key(2)
    state, losses = steps(learner, 0.1, 3, key)
    net = kw.instrument(model, kw.Categorical(), X, train=True)
    tx = kw.kfac(net.layers, 0.1, refresh_every=2)
    params = model.init(jax.random.key(1), X[:1])["params"]
    opt_state = tx.init(params)
    for k in range(3):
        dropout, labels = jax.random.split(jax.random.fold_in(key, k))
        rngs = {"dropout": dropout}
        loss, grads, oracle = net.value_and_grad(
            params, X, targets=Y, key=labels, rngs=rngs, train=True
        )
        updates, opt_state = tx.update(grads, opt_state, params, oracle=oracle)
        params = optax.apply_updates(params, updates)
        assert losses[k] == pytest.approx(float(loss), rel=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.params, params
    )
    assert state.step == 3


def test_the_learning_rate_needs_no_new_compilation(learner):
    compiled = learner.step._cache_size()
    slow, fast = (steps(learner, rate, 1, jax.random.key(2))[0].params for rate in (0.01, 0.1))
    assert learner.step._cache_size() == compiled
    start = learner.init(jax.random.key(1), 0.0).params
    moved = [optax.tree.norm(optax.tree.sub(p, start)) for p in (slow, fast)]
    assert moved[1] > 2 * moved[0]
    assert learner.compile_seconds > 0


@pytest.mark.parametrize("count", [1, 12, 1003])
def test_outputs_are_those_of_the_model_without_dropout_whatever_the_number(learner, count):
    params = learner.init(jax.random.key(1), 0.0).params
    x = jax.random.normal(jax.random.key(3), (count, 5))
    expected = Net().apply({"params": params}, x)
    np.testing.assert_allclose(learner.outputs(params, x), expected, rtol=1e-5, atol=1e-6)
