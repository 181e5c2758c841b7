"""The factor between the user's loss and the likelihood's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kldwrm_jax as kw
from kldwrm_jax.optimizers import loss_scale

MEMBERS = {"kfac": kw.kfac, "so": kw.so_kldwrm, "q": kw.q_kldwrm}


def measured(user, likelihood, sizes=(1.0, 1.0, 1.0)):
    return loss_scale.update(loss_scale.unknown(), *map(jnp.asarray, (user, likelihood, sizes)))


def test_it_is_one_before_it_is_measured():
    assert loss_scale.factor(loss_scale.unknown()) == 1
    assert loss_scale.agreement(loss_scale.unknown()) == 1


@pytest.mark.parametrize("alpha", [1 / 64, 0.4, 2.0, 256.0])
def test_it_is_the_ratio_of_the_slopes(alpha):
    slopes = np.array([1.0, -2.0, 0.3], np.float32)
    scale = measured(alpha * slopes, slopes)
    assert float(loss_scale.factor(scale)) == pytest.approx(alpha, rel=1e-6)
    assert float(loss_scale.agreement(scale)) == pytest.approx(1.0)


def test_slopes_count_in_units_of_their_curvature():
    scale = measured([2.0, 30.0], [1.0, 10.0], [1.0, 1e8])
    assert float(loss_scale.factor(scale)) == pytest.approx(2.0, rel=1e-5)


def test_a_likelihood_that_explains_little_gives_no_factor():
    scale = measured([1.0, 5.0, 0.0], [1.0, -4.0, 9.0])
    assert loss_scale.factor(scale) == 1
    assert loss_scale.agreement(scale) < 0.5
    assert loss_scale.factor(measured([-3.0], [1.0], [1.0])) == 1  # uphill


def test_directions_without_curvature_and_what_is_not_finite_do_not_count():
    scale = measured([2.0, np.nan, 7.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    assert loss_scale.factor(scale) == 2


@pytest.mark.parametrize("slopes", [[1e30, 1e30, 1.0], [3e38, 0.0, 0.0]])
def test_a_measurement_whose_squares_overflow_leaves_it_as_it_was(slopes):
    before = measured([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    after = loss_scale.update(before, *map(jnp.asarray, (slopes, [1.0, 2.0, 3.0], [1.0] * 3)))
    assert loss_scale.factor(after) == 2
    assert after == before


def run(member, loss_of, steps=60):
    """The likelihood's loss after some steps with nothing set, and what was found."""
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(4)])
    x = jax.random.normal(jax.random.key(0), (512, 6))
    y = jnp.sin(x @ jnp.linspace(-1, 1, 24).reshape(6, 4))
    net = kw.instrument(model, kw.Gaussian(), x)
    params = model.init(jax.random.key(1), x)["params"]
    tx = MEMBERS[member](net.layers, refresh_every=10)

    @jax.jit
    def train(params, state):
        def step(carry, key):
            params, state = carry
            oracle = net.oracle(params, x, targets=y, key=key)
            grads = jax.grad(loss_of)(params, oracle, model.apply({"params": params}, x) - y)
            s, state = tx.update(grads, state, params, oracle=oracle)
            return (optax.apply_updates(params, s), state), None

        keys = jax.random.split(jax.random.key(2), steps)
        (params, state), _ = jax.lax.scan(step, (params, state), keys)
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2), state

    def loss_of(params, oracle, error, own=loss_of):
        del error
        return own(params, oracle, model.apply({"params": params}, x) - y)

    error, state = train(params, tx.init(params))
    return float(error), kw.diagnostics(state)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_loss_of_any_scale_trains_as_the_likelihoods_own(member):
    own, scalars = run(member, lambda params, oracle, error: oracle.loss(params))
    assert scalars["loss_scale"] == 1
    for alpha in (1 / 64, 0.4, 2.0, 256.0):
        error, scalars = run(member, lambda params, oracle, error, a=alpha: a * oracle.loss(params))
        assert error < 1.5 * own
        assert float(scalars["loss_scale"]) == pytest.approx(alpha, rel=0.05)


def test_the_users_mean_over_outputs_without_a_half_is_found():
    error, scalars = run("kfac", lambda params, oracle, error: jnp.mean(error**2))
    own, _ = run("kfac", lambda params, oracle, error: oracle.loss(params))
    assert error < 1.5 * own
    assert float(scalars["loss_scale"]) == pytest.approx(2 / 4, rel=0.05)


def test_a_regulariser_is_no_part_of_the_scale():
    def regularised(params, oracle, error):
        return 0.25 * oracle.loss(params) + 1e-3 * optax.tree.norm(params, squared=True)

    _, scalars = run("kfac", regularised)
    assert float(scalars["loss_scale"]) == pytest.approx(0.25, rel=0.2)


def test_a_gradient_that_has_nothing_to_do_with_the_likelihood_is_taken_as_it_is():
    def another(params, oracle, error):
        return jnp.mean(error @ jnp.ones(4)) + optax.tree.norm(params, squared=True)

    _, scalars = run("kfac", another)
    assert scalars["loss_agreement"] < 0.5
    assert scalars["loss_scale"] == 1
