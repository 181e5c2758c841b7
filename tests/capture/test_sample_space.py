"""The rows of a batch against jacobians: J'J is the exact Fisher, J'e the gradient of the loss."""

import dense_fisher
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.capture import sample_space
from kldwrm_jax.paths import leaves_by_path

pytestmark = pytest.mark.usefixtures("x64")

BATCH = 6


class Positions(nn.Module):
    """A convolution, and a distribution at each of its positions."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(4, (3,), param_dtype=float)(x))
        return nn.Dense(3, param_dtype=float)(x)


def mlp(outputs):
    return nn.Sequential(
        [nn.Dense(5, param_dtype=float), nn.tanh, nn.Dense(outputs, param_dtype=float)]
    )


def targets_of(likelihood, outputs):
    return likelihood.sample(jax.random.key(7), outputs)


CASES = {
    "categorical": (mlp(3), kw.Categorical(), (BATCH, 4)),
    "gaussian": (mlp(2), kw.Gaussian(variance=0.3), (BATCH, 4)),
    "bernoulli": (mlp(3), kw.Bernoulli(), (BATCH, 4)),
    "means and scales": (mlp(4), kw.DiagonalGaussian(), (BATCH, 4)),
    "scaled": (mlp(3), kw.Scaled(kw.Categorical(), 2.5), (BATCH, 4)),
    "a sample at every position": (Positions(), kw.Categorical(), (BATCH, 5, 2)),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_fisher_and_the_gradient_are_made_of_the_rows(case, weighted):
    model, likelihood, shape = CASES[case]
    x = jax.random.normal(jax.random.key(0), shape)
    params = model.init(jax.random.key(1), x)["params"]
    net = kw.instrument(model, likelihood, x)
    outputs = model.apply({"params": params}, x)
    weights = jnp.arange(1.0, 1 + outputs[..., 0].size).reshape(outputs.shape[:-1])
    oracle = net.oracle(
        params, x, targets=targets_of(likelihood, outputs), weights=weights if weighted else None
    )
    space = sample_space(oracle, net.layers.parameters)
    rows = np.concatenate([np.asarray(j).reshape(len(j), -1) for j in space.rows.values()], axis=1)

    def own(params):
        return model.apply({"params": params}, x)

    fisher = dense_fisher.matrix(own, params, likelihood, weights if weighted else None)
    np.testing.assert_allclose(rows.T @ rows, fisher, rtol=0, atol=1e-12 * np.abs(fisher).max())
    np.testing.assert_allclose(space.gram(), rows @ rows.T, rtol=0, atol=1e-12)
    gradient = leaves_by_path(jax.grad(oracle.loss)(params))
    made = space.transposed(space.errors)
    for path, g in gradient.items():
        np.testing.assert_allclose(made[path], g, rtol=0, atol=1e-12)
    v = leaves_by_path(params)
    np.testing.assert_allclose(space.times(v), rows @ dense_fisher.vector(params), atol=1e-12)


def test_terms_of_different_size_have_their_own_rows():
    model = mlp(1)
    residuals, likelihoods, (params, inside, border) = small_nets.equation(model)
    net = kw.instrument(residuals, likelihoods, params, inside, border)
    oracle = net.oracle(params, inside, border)
    space = sample_space(oracle, net.layers.parameters)
    assert len(space.errors) == 10
    both = residuals(params, inside, border)
    wanted = np.concatenate([both["border"][:, 0] / np.sqrt(3), both["inside"][:, 0] / np.sqrt(7)])
    np.testing.assert_allclose(space.errors, wanted, rtol=1e-12)
    made = space.transposed(space.errors)
    for path, g in leaves_by_path(jax.grad(oracle.loss)(params)).items():
        np.testing.assert_allclose(made[path], g, rtol=0, atol=1e-12)


def test_errors_are_unknown_without_targets():
    model, x = mlp(2), jnp.ones((4, 3))
    params = model.init(jax.random.key(0), x)["params"]
    net = kw.instrument(model, kw.Gaussian(), x)
    assert sample_space(net.oracle(params, x), net.layers.parameters).errors is None


def refused(model, x, match, likelihood=None, **kwargs):
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    params = variables.pop("params")
    kwargs = {"variables": variables} | kwargs
    net = kw.instrument(model, likelihood or kw.Gaussian(), x, **kwargs)
    oracle = net.oracle(params, x, **kwargs)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: sample_space(oracle, net.layers.parameters).rows)


def test_examples_that_depend_on_each_other_are_refused():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(3)(x))
            return nn.Dense(2)(x)

    refused(Normed(), jnp.ones((4, 3)), "'norm', which normalises over the batch")


def test_dropout_is_refused():
    model = nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False), nn.Dense(2)])
    refused(model, jnp.ones((4, 3)), "rngs", rngs={"dropout": jax.random.key(0)})


def test_what_does_not_fit_is_refused_before_it_is_made():
    refused(nn.Dense(2000), jnp.ones((2000, 3)), r"4,000,000 rows .* GiB")


def test_outputs_that_are_not_one_per_example_are_refused():
    class Transposed(nn.Module):
        @nn.compact
        def __call__(self, x):  # examples along the second axis
            return nn.Dense(2)(jnp.swapaxes(x, 0, 1))

    refused(Transposed(), jnp.ones((3, 5, 4)), "along the first axis")
