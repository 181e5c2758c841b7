import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

from kldwrm_jax.experiments import bench_cases
from kldwrm_jax.experiments.bench_cases import OPTIMIZERS, training_step
from kldwrm_jax.experiments.bench_networks import images


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_a_step(optimizer, monkeypatch):
    step, state = training_step(nn.Dense(10), optimizer, flat(8))
    after = small_nets.jit(step)(state, flat(8))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[0], state[0])
    assert all(0 < x < 1 for x in jax.tree.leaves(moved))


def flat(size):
    x, y = images(size)
    return x.reshape(size, -1)[:, :12], y


def test_both_ways_of_getting_the_gradient_give_the_same_step():
    after = []
    for gradient in bench_cases.GRADIENTS:
        step, state = training_step(nn.Dense(10), "kfac", flat(8), gradient)
        after.append(small_nets.jit(step)(state, flat(8))[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *after)


def test_first_order_steps_are_those_of_optax():
    (x, y), model = flat(8), nn.Dense(10)
    step, (params, opt_state) = training_step(model, "sgd", (x, y))
    after, _ = step((params, opt_state), (x, y))

    def loss(params):
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    expected = jax.tree.map(lambda p, g: p - bench_cases.LR * g, params, jax.grad(loss)(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), after, expected)


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))
        return nn.Dense(10)(nn.relu(x))


@pytest.mark.parametrize("gradient", bench_cases.GRADIENTS)
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_networks_with_batch_statistics_can_be_added(gradient, optimizer):
    step, state = training_step(Normalised(), optimizer, flat(8), gradient, "empirical")
    params, _ = small_nets.jit(step)(state, flat(8))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
