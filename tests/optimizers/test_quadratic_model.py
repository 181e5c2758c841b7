"""The quadratic model of a step, against the dense Fisher."""

import dense_fisher
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kldwrm_jax as kw
from kldwrm_jax.optimizers.quadratic_model import QuadraticModel, measure
from kldwrm_jax.paths import leaves_by_path

pytestmark = pytest.mark.usefixtures("x64")

GAMMA = 0.3
BATCH = 12
LIKELIHOODS = {
    "categorical": kw.Categorical(),
    "bernoulli": kw.Bernoulli(),
    "gaussian": kw.Gaussian(variance=0.7),
}


class Net(nn.Module):
    """A layer, dropout, a layer."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4, param_dtype=x.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(3, param_dtype=x.dtype)(x)


def problem(rng, likelihood, dropout=0.0, weights=None):
    """An oracle, its outputs as a function of the parameters, and three directions."""
    x, model = jnp.asarray(rng.normal(size=(BATCH, 5))), Net(dropout)
    net = kw.instrument(model, likelihood, x)
    params = model.init(jax.random.key(0), x)["params"]
    rngs = {"dropout": jax.random.key(1)} if dropout else None
    y = likelihood.sample(jax.random.key(2), model.apply({"params": params}, x, rngs=rngs))
    oracle = net.oracle(params, x, targets=y, weights=weights, rngs=rngs)
    directions = [
        leaves_by_path(jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params))
        for _ in range(3)
    ]
    return oracle, directions


def model_of(oracle, directions, examples=BATCH):
    g = leaves_by_path(jax.grad(oracle.loss)(oracle.params))
    model, _ = measure(oracle, directions, (g, g), kw.Fit(examples=examples).examples_of)
    return model, g


def dense(oracle, directions):
    """``A``, ``N`` and ``V'g`` from the jacobian."""
    (term,) = oracle.terms.each
    fisher = dense_fisher.matrix(oracle.outputs, oracle.params, term.likelihood, term.weights)
    v = np.stack([dense_fisher.vector(d) for d in directions], axis=1)
    return v.T @ fisher @ v, v.T @ v


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("how", ["plain", "weights", "dropout"])
def test_slopes_fisher_and_norms_are_those_of_the_dense_fisher(name, how, rng):
    weights = jnp.asarray(rng.uniform(size=BATCH)) if how == "weights" else None
    dropout = 0.5 if how == "dropout" else 0.0
    oracle, directions = problem(rng, LIKELIHOODS[name], dropout, weights)
    got, g = model_of(oracle, directions)
    a, n = dense(oracle, directions)
    np.testing.assert_allclose(got.fisher, a, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got.norms, n, rtol=1e-12)
    slope = [dense_fisher.vector(d) @ dense_fisher.vector(g) for d in directions]
    np.testing.assert_allclose(got.loss_slope, slope, rtol=1e-10, atol=1e-12)
    share = 1 / BATCH if weights is None else weights / weights.sum()
    np.testing.assert_allclose(got.samples, 1 / np.sum(share**2 * np.ones(BATCH)), rtol=1e-12)


def test_directions_of_masked_parameters_stand_still(rng):
    oracle, directions = problem(rng, kw.Categorical())
    own = [{p: x for p, x in d.items() if p.startswith("Dense_1")} for d in directions]
    got = oracle.gram(own)
    whole = [{p: x * p.startswith("Dense_1") for p, x in d.items()} for d in directions]
    np.testing.assert_allclose(got, dense(oracle, whole)[0], rtol=1e-10)


def test_part_of_the_batch_is_every_nth_example(rng):
    oracle, directions = problem(rng, kw.Categorical())
    got, _ = model_of(oracle, directions, examples=4)
    part = oracle.part(lambda x: x[::3])
    np.testing.assert_allclose(got.fisher, dense(part, directions)[0], rtol=1e-10)
    np.testing.assert_allclose(got.samples, BATCH)


def test_micro_batches_measure_on_one_of_them(rng):
    likelihood, x = kw.Categorical(), jnp.asarray(rng.normal(size=(BATCH, 5)))
    net = kw.instrument(Net(), likelihood, x)
    params = Net().init(jax.random.key(0), x)["params"]
    direction = [leaves_by_path(jax.tree.map(jnp.ones_like, params))]
    y = jnp.zeros(BATCH, int)
    split = net.oracle(params, x, targets=y, micro_batches=3).thinned(lambda _: BATCH)
    assert split.batch_size == 4
    expected = dense(net.oracle(params, x[::3], targets=y[::3]), direction)[0]
    np.testing.assert_allclose(split.gram(direction), expected, rtol=1e-10)


@pytest.fixture
def quadratic(rng):
    root, v = rng.normal(size=(3, 9)), rng.normal(size=(3, 9))
    slope = jnp.asarray(rng.normal(size=3))
    return QuadraticModel(slope, slope + 1, *map(jnp.asarray, (root @ root.T, v @ v.T)), 9.0)


def test_two_coefficients_minimise_the_damped_model(quadratic):
    for mu in (1, 2):
        m = mu * np.asarray(quadratic.curvature(GAMMA))[np.ix_([0, 2], [0, 2])]
        expected = np.linalg.solve(m, -np.asarray(quadratic.slope)[[0, 2]])
        got = quadratic.minimiser(0, 2, GAMMA, mu)
        np.testing.assert_allclose(got, expected, rtol=1e-9)
        w = quadratic.minimiser_given(0, 2, got[1], GAMMA, mu)
        np.testing.assert_allclose(w, expected[0], rtol=1e-9)


def test_a_direction_that_is_zero_has_no_part(quadratic):
    keep = jnp.array([1.0, 1.0, 0.0])
    outer = keep[:, None] * keep
    empty = quadratic._replace(
        slope=keep * quadratic.slope,
        fisher=outer * quadratic.fisher,
        norms=outer * quadratic.norms,
    )
    rate, momentum = empty.minimiser(0, 2, GAMMA, 1)
    assert momentum == 0
    np.testing.assert_allclose(rate, -empty.slope[0] / empty.curvature(GAMMA)[0, 0], rtol=1e-9)


def test_parallel_directions_have_finite_coefficients_that_reach_the_minimum(quadratic):
    same = jnp.array([0, 1, 0])
    parallel = quadratic._replace(
        slope=quadratic.slope[same],
        fisher=quadratic.fisher[same][:, same],
        norms=quadratic.norms[same][:, same],
    )
    rate, momentum = parallel.minimiser(0, 2, GAMMA, 1)
    alone = -parallel.slope[0] / parallel.curvature(GAMMA)[0, 0]
    np.testing.assert_allclose(rate + momentum, alone, rtol=1e-2)


def test_change_and_divergence_are_those_of_the_loss_without_damping(quadratic):
    w = np.array([0.3, -0.2, 0.5])
    a = np.asarray(quadratic.fisher)
    np.testing.assert_allclose(quadratic.divergence(w), 0.5 * w @ a @ w)
    np.testing.assert_allclose(
        quadratic.change(w), w @ np.asarray(quadratic.loss_slope) + 0.5 * w @ a @ w
    )
