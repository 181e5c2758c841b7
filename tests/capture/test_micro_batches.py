"""A batch in parts against the whole batch."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


def close(a, b, rtol=1e-10):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-12), a, b)


@pytest.fixture(scope="module")
def small():
    return small_nets.problem()


def both(problem, parts=4, **arguments):
    arguments = {"targets": problem.y[0]} | arguments
    return [
        problem.net.oracle(problem.params, problem.x[0], micro_batches=n, **arguments)
        for n in (1, parts)
    ]


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("weighted", [False, True])
def test_factors_outputs_loss_and_gradient_are_those_of_the_whole(fisher, weighted):
    problem = small_nets.problem(dtype=jnp.float64, norm=False)
    problem = dataclasses.replace(
        problem,
        net=kw.instrument(problem.model, kw.Categorical(), problem.x[0], fisher=fisher),
    )
    weights = jnp.asarray(np.arange(small_nets.BATCH) % 3 > 0, float) if weighted else None
    whole, split = both(problem, weights=weights)
    close(split.factors(), whole.factors())
    close(split.outputs(problem.params), whole.outputs(problem.params))
    close(jax.grad(split.loss)(problem.params), jax.grad(whole.loss)(problem.params))
    loss, gradient, again = small_nets.jit(lambda o: o.value_and_grad())(split)
    close((loss, gradient), whole.value_and_grad()[:2])
    close(again.factors(), whole.factors())
    close(split.quadratic(problem.params), whole.quadratic(problem.params))


def test_a_part_without_weight_does_no_harm():
    problem = small_nets.problem(dtype=jnp.float64, norm=False)
    weights = jnp.asarray(np.arange(small_nets.BATCH) % 4 > 0, float)  # one of four parts is empty
    whole, split = both(problem, weights=weights)
    close(split.factors(), whole.factors())


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_parts_have_dropout_masks_of_their_own(make_key):
    problem = small_nets.problem(dtype=jnp.float64, dropout=0.5)
    _, split = both(problem, rngs={"dropout": make_key(5)})
    same = jnp.broadcast_to(jnp.asarray(problem.x[0])[0], problem.x[0].shape)
    alike = dataclasses.replace(split, call=dataclasses.replace(split.call, args=(same,)))
    out = np.asarray(alike.outputs(problem.params)).reshape(4, 4, -1)  # (within a part, part)
    assert np.abs(out[:, 0] - out[:, 1]).max() > 1e-3
    close(split.outputs(problem.params), split.outputs(problem.params))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_parts_have_sampled_labels_of_their_own(make_key):
    """Of one example many times over: with the same labels in all parts, G would be that of one."""
    model, x = nn.Dense(3), np.ones((64, 4))
    params = model.init(jax.random.key(0), x)["params"]
    net = kw.instrument(model, kw.Categorical(), x)
    ((_, parts),) = net.oracle(params, x, key=make_key(1), micro_batches=64).factors().values()
    ((_, one),) = net.oracle(params, x[:1], key=jax.random.key(1)).factors().values()
    assert np.linalg.matrix_rank(one, tol=1e-6) == 1
    assert np.linalg.matrix_rank(parts, tol=1e-6) == 2


def test_other_variables_are_the_mean_over_the_parts():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))

    model, x = Net(), np.random.default_rng(0).normal(size=(16, 4))
    y = np.arange(16) % 3
    variables = model.init(jax.random.key(0), x)
    net = kw.instrument(model, kw.Categorical(), x, fisher="empirical")
    stats = {"batch_stats": variables["batch_stats"]}
    _, _, oracle = net.value_and_grad(
        variables["params"], x, targets=y, variables=stats, micro_batches=4
    )
    (mean,) = (own["mean"] for own in oracle.variables["batch_stats"].values())
    np.testing.assert_allclose(mean, 0.5 * x.mean(axis=0), rtol=1e-6)


def test_parts_that_do_not_divide_the_batch_are_an_error(small):
    _, split = both(small, parts=5)
    with pytest.raises(ValueError, match="micro_batches must divide the batch of 16"):
        split.factors()
    with pytest.raises(ValueError, match=r"micro_batches must be a whole number >= 1.*got 0"):
        both(small, parts=0)


def test_weights_of_another_batch_are_an_error(small):
    for wrong in (8, 12, 32):
        _, split = both(small, parts=2, weights=jnp.ones(wrong))
        with pytest.raises(ValueError, match=rf"weights must.*16 examples, got \({wrong},\)"):
            split.value_and_grad()


def test_no_weight_at_all_is_no_batch(small):
    whole, split = both(small, weights=jnp.zeros(small_nets.BATCH))
    assert np.isnan(whole.loss(small.params))
    assert np.isnan(split.value_and_grad()[0])


def test_the_batch_is_that_of_the_outputs_wherever_it_comes_in():
    """Not of the first argument, which here is a table for all examples."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, table, scale, *, x):
            return nn.Dense(3)(x + scale * table.sum(axis=0))

    rng = np.random.default_rng(0)
    table, x = rng.normal(size=(4, 5)), rng.normal(size=(12, 5))
    model = Net()
    params = model.init(jax.random.key(0), table, 0.5, x=x)["params"]
    net = kw.instrument(model, kw.Categorical(), table, 0.5, x=x, fisher="exact")
    whole, split = (net.oracle(params, table, 0.5, x=x, micro_batches=n) for n in (1, 2))
    close(split.factors(), whole.factors())
