"""A step's size, measured in three ways."""

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")
LIKELIHOODS = [kw.Categorical(), kw.Gaussian(variance=0.3), kw.Bernoulli()]


def step_of(problem, size=0.1):
    return jax.tree.map(lambda g: -size * g, problem.measure(problem.params, 0)[0])


@pytest.fixture(params=LIKELIHOODS, ids=lambda own: type(own).__name__)
def problem(request):
    made = small_nets.problem(request.param, dtype=jnp.float64)
    if isinstance(request.param, kw.Bernoulli):
        made.y[:] = made.y > 0
    return made


def test_the_quadratic_is_that_of_the_exact_fisher_from_the_jacobian(problem):
    step = step_of(problem)
    v = dense_family.Blocks(problem.params).vector(step)
    expected = v @ dense_family.fisher(problem, problem.params, 0) @ v / 2
    oracle = problem.oracle(problem.params, 0)
    np.testing.assert_allclose(small_nets.jit(oracle.quadratic)(step), expected, rtol=1e-12)


def test_the_report_tells_the_divergence_the_quadratic_and_the_blocks(problem):
    step, blocks = step_of(problem), dense_family.Blocks(problem.params)
    _, factors = problem.measure(problem.params, 0)
    oracle = problem.oracle(problem.params, 0)
    report = kw.kl_report(oracle, problem.params, step)
    v = blocks.vector(step)
    np.testing.assert_allclose(report.blocks, v @ blocks.matrix(factors) @ v / 2, rtol=1e-12)
    np.testing.assert_allclose(report.quadratic, oracle.quadratic(step), rtol=1e-12)
    moved = jax.tree.map(jnp.add, problem.params, step)
    h1, h2 = (oracle.outputs(p) for p in (problem.params, moved))
    np.testing.assert_allclose(
        report.kl, problem.net.likelihood.symmetric_kl(h1, h2).mean(), rtol=1e-12
    )
    np.testing.assert_allclose(report.calibration, report.quadratic / report.blocks)
    np.testing.assert_allclose(report.blocks_ratio, report.blocks / report.kl)


def test_short_steps_have_the_divergence_of_the_quadratic(problem):
    oracle = problem.oracle(problem.params, 0)
    errors = [
        abs(kw.kl_report(oracle, problem.params, step_of(problem, size)).quadratic_ratio - 1)
        for size in (1e-2, 1e-4)
    ]
    assert errors[1] < 1e-3
    assert errors[1] < errors[0] / 10 or errors[0] < 1e-9


def test_weights_masked_updates_given_factors_and_other_parameters_are_respected():
    problem = small_nets.problem(dtype=jnp.float64)
    params, step = problem.params, step_of(problem)
    weights = jnp.arange(small_nets.BATCH) % 2
    whole = problem.net.oracle(params, problem.x[0], targets=problem.y[0], weights=weights)
    half = problem.net.oracle(params, problem.x[0][1::2], targets=problem.y[0][1::2])
    for ours, theirs in zip(
        *(kw.kl_report(oracle, params, step) for oracle in (whole, half)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)

    oracle = problem.oracle(params, 0)
    masked = step | {"first": jax.tree.map(jnp.zeros_like, step["first"])}
    hidden = step | {"first": jax.tree.map(lambda _: optax.MaskedNode(), step["first"])}
    np.testing.assert_allclose(oracle.quadratic(hidden), oracle.quadratic(masked), rtol=1e-12)

    doubled = jax.tree.map(lambda x: 2 * x, oracle.factors())
    once, twice = (kw.kl_report(oracle, params, step, f).blocks for f in (None, doubled))
    assert twice > 1.9 * once
    moved = jax.tree.map(jnp.add, params, step)
    elsewhere = kw.kl_report(oracle, moved, step)
    np.testing.assert_allclose(
        elsewhere.quadratic, problem.oracle(moved, 0).quadratic(step), rtol=1e-12
    )
    assert abs(elsewhere.quadratic - oracle.quadratic(step)) > 1e-6
