"""Natural gradients in the space of samples, against dense solves with the exact Fisher."""

import itertools

import dense_fisher
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from jax.flatten_util import ravel_pytree

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

LIKELIHOODS = {"categorical": kw.Categorical(), "gaussian": kw.Gaussian(variance=0.3)}


@pytest.fixture(scope="module", params=LIKELIHOODS)
def small(request):
    with precision.x64(True):
        return small_nets.problem(LIKELIHOODS[request.param], dtype=jnp.float64)


def dense_solution(problem, params, k, last, g, gamma, mu):
    """``(F + gamma)^-1 (gamma mu last - g)``."""

    def outputs(params):
        return problem.model.apply({"params": params}, problem.x[k])

    fisher = dense_fisher.matrix(outputs, params, problem.net.likelihood)
    return np.linalg.solve(fisher + gamma * np.eye(len(last)), gamma * mu * last - g)


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_steps_solve_the_dense_system(small, mu):
    gamma, rates = 1e-3, [0.5, 0.25, 1.0]
    tx = kw.natural_gradient(
        small.layers, lambda count: jnp.array(rates)[count], damping=gamma, memory=mu
    )
    params, state = small.params, tx.init(small.params)
    last = np.zeros(dense_fisher.vector(params).shape)
    for k in range(3):
        oracle = small.oracle(params, k)
        grads = jax.grad(oracle.loss)(params)
        last = dense_solution(small, params, k, last, dense_fisher.vector(grads), gamma, mu)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        np.testing.assert_allclose(
            dense_fisher.vector(updates), rates[k] * last, rtol=0, atol=1e-9 * np.abs(last).max()
        )
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("targets", [True, False])
def test_a_gradient_of_the_users_own_is_solved_for_as_it_is(small, targets):
    tx = kw.natural_gradient(small.layers, 1.0, damping=1e-2)
    params = small.params
    y = small.y[0] if targets else None
    oracle = small.net.oracle(params, small.x[0], targets=y)
    flat, unravel = ravel_pytree(params)
    own = unravel(jnp.asarray(np.random.default_rng(0).normal(size=flat.shape)))
    updates, _ = tx.update(own, tx.init(params), params, oracle=oracle)
    g = dense_fisher.vector(own)
    wanted = dense_solution(small, params, 0, np.zeros(flat.shape), g, 1e-2, 0)
    np.testing.assert_allclose(dense_fisher.vector(updates), wanted, rtol=1e-9, atol=1e-9)


def test_parameters_that_are_masked_stay(small):
    def only_last(tree):
        return {name: name == "last" for name in tree}

    tx = optax.masked(kw.natural_gradient(small.layers, 1.0, damping=1e-3), only_last)
    params = small.params
    oracle = small.oracle(params, 0)
    grads = jax.grad(oracle.loss)(params)
    updates, _ = tx.update(grads, tx.init(params), params, oracle=oracle)

    def outputs(last):
        return small.model.apply({"params": params | {"last": last}}, small.x[0])

    fisher = dense_fisher.matrix(outputs, params["last"], small.net.likelihood)
    g = dense_fisher.vector(grads["last"])
    wanted = -np.linalg.solve(fisher + 1e-3 * np.eye(len(g)), g)
    np.testing.assert_allclose(dense_fisher.vector(updates["last"]), wanted, rtol=1e-9)
    for kept in ("first", "norm"):  # optax.masked passes their gradients on
        np.testing.assert_array_equal(
            dense_fisher.vector(updates[kept]), dense_fisher.vector(grads[kept])
        )


def regression(dtype=jnp.float64, examples=40):
    model = nn.Sequential(
        [nn.Dense(12, param_dtype=dtype), nn.tanh, nn.Dense(1, param_dtype=dtype)]
    )
    x = jnp.linspace(-1, 1, examples, dtype=dtype)[:, None]
    net = kw.instrument(model, kw.Gaussian(), x)
    params = model.init(jax.random.key(0), x)["params"]
    return model, net, params, x, jnp.sin(3 * x)


def train(tx, net, params, x, y, steps):
    @jax.jit
    def step(params, state):
        loss, grads, oracle = net.value_and_grad(params, x, targets=y)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, state, losses


def test_linear_regression_takes_a_few_steps():
    x = jax.random.normal(jax.random.key(0), (30, 4))
    y = jax.random.normal(jax.random.key(1), (30, 2))
    model = nn.Dense(2, param_dtype=float)
    net = kw.instrument(model, kw.Gaussian(), x)
    params = model.init(jax.random.key(2), x)["params"]
    params, _, _ = train(kw.natural_gradient(net.layers), net, params, x, y, steps=4)
    inputs = np.concatenate([x, np.ones((30, 1))], axis=1)
    wanted = np.linalg.lstsq(inputs, np.asarray(y), rcond=None)[0]
    np.testing.assert_allclose(params["kernel"], wanted[:-1], rtol=0, atol=1e-7)
    np.testing.assert_allclose(params["bias"], wanted[-1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_loss_of_a_batch_never_rises_with_nothing_set(dtype):
    with precision.x64(dtype == jnp.float64):
        _, net, params, x, y = regression(dtype)
        _, state, losses = train(kw.natural_gradient(net.layers), net, params, x, y, steps=60)
    assert all(new <= old for old, new in itertools.pairwise(losses))
    constant = 0.5 * np.log(2 * np.pi)  # of the density
    assert losses[-1] - constant < 1e-4 * (losses[0] - constant)
    assert int(kw.diagnostics(state)["rejected_steps"]) == 0


def test_damping_far_below_rounding_is_raised_to_it():
    model, net, params, x, y = regression()
    params, _, _ = train(kw.natural_gradient(net.layers), net, params, x, y, steps=30)
    for damping in (0.0, 1e-14, 1e-300):
        tx = kw.natural_gradient(net.layers, damping=damping)
        after, state, _ = train(tx, net, params, x, y, steps=20)
        assert jnp.abs(model.apply({"params": after}, x) - y).max() < 0.01
        assert kw.diagnostics(state)["damping"] > 1e-16


def test_damping_follows_the_rate_of_the_last_step():
    """Far from the solution it is raised, near to it lowered."""
    _, net, params, x, y = regression()
    tx = kw.natural_gradient(net.layers)
    state, dampings, rates = tx.init(params), [], []
    for _ in range(40):
        _, grads, oracle = net.value_and_grad(params, x, targets=y)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        params = optax.apply_updates(params, updates)
        dampings.append(float(kw.diagnostics(state)["damping"]))
        rates.append(float(kw.diagnostics(state)["learning_rate"]))
        # The next batch is the same: every promise is kept.
        assert kw.diagnostics(state)["reduction_ratio"] == pytest.approx(1)
    wanted = [1 / 5 if rate >= 0.5 else 2 if rate < 0.25 else 1 for rate in rates[:-1]]
    floor = 0.1 * np.finfo(float).eps
    ratios = np.divide(dampings[1:], dampings[:-1])
    free = np.array(dampings[1:]) > 200 * floor  # where the lowest damping does not bind
    np.testing.assert_allclose(ratios[free], np.array(wanted)[free])
    assert {1 / 5, 2} <= {*np.array(wanted)[free]}


def test_damping_rises_where_the_next_batch_denies_the_decrease():
    """Every batch is noise of its own: whatever lowers its loss raises the others'."""
    _, net, params, x, _ = regression(examples=12)
    tx = kw.natural_gradient(net.layers)
    state, shares, dampings = tx.init(params), [], []
    for i in range(60):
        y = jax.random.normal(jax.random.key(i), x.shape)
        _, grads, oracle = net.value_and_grad(params, x, targets=y)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        params = optax.apply_updates(params, updates)
        shares.append(float(kw.diagnostics(state)["reduction_ratio"]))
        dampings.append(float(kw.diagnostics(state)["damping"]))
    assert shares[-1] < 0.25
    assert dampings[-1] > 1e3 * dampings[0]


def test_kl_clip_limits_the_divergence_of_a_step(small):
    tx = kw.natural_gradient(small.layers, 1.0, damping=1e-4, kl_clip=1e-3)
    oracle = small.oracle(small.params, 0)
    grads = jax.grad(oracle.loss)(small.params)
    updates, state = tx.update(grads, tx.init(small.params), small.params, oracle=oracle)
    assert 2 * oracle.quadratic(updates) == pytest.approx(1e-3)
    assert kw.diagnostics(state)["kl_clip"] < 1


def test_a_step_that_is_not_finite_is_refused(small):
    tx = kw.natural_gradient(small.layers, memory=0.5)
    state, oracle = tx.init(small.params), small.oracle(small.params, 0)
    grads = jax.grad(oracle.loss)(small.params)
    _, state = tx.update(grads, state, small.params, oracle=oracle)
    poison = jax.tree.map(lambda g: g * jnp.nan, grads)
    nothing, after = tx.update(poison, state, small.params, oracle=oracle)
    assert not dense_fisher.vector(nothing).any()
    np.testing.assert_array_equal(
        dense_fisher.vector(after.solution), dense_fisher.vector(state.solution)
    )
    assert int(kw.diagnostics(after)["rejected_steps"]) == 1
    for _ in range(9):
        _, after = tx.update(poison, after, small.params, oracle=oracle)
    with pytest.raises(FloatingPointError, match="were refused"):
        tx.update(grads, after, small.params, oracle=oracle)


def test_without_targets_a_learning_rate_is_needed(small):
    tx = kw.natural_gradient(small.layers)
    oracle = small.net.oracle(small.params, small.x[0])
    with pytest.raises(ValueError, match="line search, which needs the loss"):
        tx.update(small.params, tx.init(small.params), small.params, oracle=oracle)


def test_a_state_without_memory_is_not_one_with(small):
    tx = kw.natural_gradient(small.layers, 0.1, memory=0.9)
    other = kw.natural_gradient(small.layers, 0.1).init(small.params)
    oracle = small.oracle(small.params, 0)
    with pytest.raises(ValueError, match=r"memory=0.9"):
        tx.update(small.params, other, small.params, oracle=oracle)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("learning_rate", -1.0), ("damping", -1e-3), ("memory", 1.0), ("kl_clip", 0.0)],
)
def test_settings_out_of_range_are_errors(small, setting, value):
    with pytest.raises(ValueError, match=f"{setting} must be"):
        kw.natural_gradient(small.layers, **{setting: value})
