import functools

import dense
import jax
import numpy as np
import pytest

from kldwrm_jax.curvature import (
    ExactSolver,
    FactoredDamping,
    LinearSolver,
    ProductDamping,
    ReweightedSolver,
    StepScalars,
)

GAMMA, LR = 0.05, 0.3
DAMPING = {"product": ProductDamping(), "factored": FactoredDamping()}
each_block = pytest.mark.parametrize("block", dense.BLOCKS.values(), ids=dense.BLOCKS)
each_mode = pytest.mark.parametrize("mode", DAMPING)
STACK = (2,)
close = {"rtol": 1e-10, "atol": 1e-10}


def run(solver, block, f_bar, fresh, h, lr=LR, rho=0.5, first=False, gamma=GAMMA):
    """What a refresh says about ``h``, and what the steps after it say."""
    return _run(solver, block, f_bar, fresh, h, lr, rho, first, gamma)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(solver, block, f_bar, fresh, h, lr, rho, first, gamma):
    at = StepScalars(lr, rho, gamma, first)
    if isinstance(solver, LinearSolver):
        (cache,) = solver.damping_mode.invert([block], [f_bar], gamma)
        operators = [solver.between(block, cache, at)]
    else:
        (cache,), (operator,) = solver.refresh([block], [f_bar], [fresh], at)
        operators = [operator, solver.between(block, cache, at)]
    directions = [op.solve(h) for op in operators]
    return [
        (v, op.times_average(h, v), op.contraction)
        for op, v in zip(operators, directions, strict=True)
    ]


def two_refreshes(block, rng, rho):
    """The average before, the fresh factors, and the average after."""
    old, fresh = (dense.random_factors(block, rng, STACK) for _ in range(2))
    new = jax.tree.map(lambda bar, x: rho * bar + (1 - rho) * x, old, fresh)
    return old, fresh, new


@each_mode
@each_block
def test_linear_solves_with_the_damped_average_and_the_wake_remembers_h(block, mode, rng, x64):
    f_bar, h = dense.random_factors(block, rng, STACK), dense.random_direction(block, rng, STACK)
    f_bar_matrix = dense.damped(block, f_bar, GAMMA, mode, STACK)
    expected = dense.solve(f_bar_matrix, h)

    for v, pull, contraction in run(LinearSolver(DAMPING[mode]), block, f_bar, f_bar, h):
        np.testing.assert_allclose(v, expected, **close)
        np.testing.assert_allclose(pull, dense.times(f_bar_matrix, expected), **close)
        assert contraction == 0


@each_block
def test_exact_minimises_the_quadratic_model_at_a_refresh(block, rng, x64):
    _, fresh, f_bar = two_refreshes(block, rng, rho=0.5)
    h = dense.random_direction(block, rng, STACK)
    f_bar_matrix = dense.damped(block, f_bar, GAMMA, "factored", STACK)
    both = f_bar_matrix + LR * dense.matrix(block, fresh, STACK)

    (v, pull, contraction), _ = run(ExactSolver(), block, f_bar, fresh, h)
    np.testing.assert_allclose(v, dense.solve(both, h), **close)
    np.testing.assert_allclose(pull, dense.times(f_bar_matrix, dense.solve(both, h)), **close)
    m_hat = f_bar_matrix @ np.linalg.inv(both)
    np.testing.assert_allclose(contraction, dense.contraction(f_bar_matrix, m_hat), rtol=1e-10)


@each_block
def test_exact_takes_the_average_for_the_models_curvature_between_refreshes(block, rng, x64):
    _, fresh, f_bar = two_refreshes(block, rng, rho=0.5)
    h = dense.random_direction(block, rng, STACK)
    f_bar_matrix = dense.damped(block, f_bar, GAMMA, "factored", STACK)
    expected = dense.solve(f_bar_matrix + LR * f_bar_matrix, h)

    _, (v, pull, contraction) = run(ExactSolver(), block, f_bar, fresh, h)
    np.testing.assert_allclose(v, expected, **close)
    np.testing.assert_allclose(pull, dense.times(f_bar_matrix, expected), **close)
    m_hat = np.broadcast_to(np.eye(f_bar_matrix.shape[-1]) / (1 + LR), f_bar_matrix.shape)
    np.testing.assert_allclose(contraction, dense.contraction(f_bar_matrix, m_hat), rtol=1e-10)


@each_block
def test_exact_is_the_linear_solve_at_a_learning_rate_of_zero(block, rng, x64):
    f_bar, fresh = (dense.random_factors(block, rng, STACK) for _ in range(2))
    h = dense.random_direction(block, rng, STACK)
    exact = run(ExactSolver(), block, f_bar, fresh, h, lr=0.0)
    (linear,) = run(LinearSolver(FactoredDamping()), block, f_bar, fresh, h, lr=0.0)
    for step in exact:
        for got, expected in zip(step, linear, strict=True):
            np.testing.assert_allclose(got, expected, **close)


@each_mode
@each_block
def test_reweighted_solves_with_the_supplements_factors_at_a_refresh(block, mode, rng, x64):
    rho, lam = 0.4, 1 / LR
    old, fresh, f_bar = two_refreshes(block, rng, rho)
    h = dense.random_direction(block, rng, STACK)
    f_hat = jax.tree.map(lambda bar, new: rho * bar + ((1 - rho) * lam + 1) / lam * new, old, fresh)
    expected = dense.solve(dense.damped(block, f_hat, GAMMA, mode, STACK), h)

    (v, pull, _), _ = run(ReweightedSolver(DAMPING[mode]), block, f_bar, fresh, h, rho=rho)
    np.testing.assert_allclose(v, expected, **close)
    undamped = dense.matrix(block, f_bar, STACK)
    np.testing.assert_allclose(pull, dense.times(undamped, expected), **close)


@each_mode
@each_block
def test_reweighted_at_the_first_refresh_scales_the_factors_and_shrinks_the_pull(
    block, mode, rng, x64
):
    f, h = dense.random_factors(block, rng, STACK), dense.random_direction(block, rng, STACK)
    scaled = jax.tree.map(lambda x: (1 + LR) * x, f)
    expected = dense.solve(dense.damped(block, scaled, GAMMA, mode, STACK), h)

    (v, pull, contraction), _ = run(ReweightedSolver(DAMPING[mode]), block, f, f, h, first=True)
    np.testing.assert_allclose(v, expected, **close)
    np.testing.assert_allclose(pull, h / (1 + LR), **close)
    np.testing.assert_allclose(contraction, LR / (1 + LR), rtol=1e-12)


@each_mode
@each_block
def test_reweighted_scales_the_average_between_refreshes(block, mode, rng, x64):
    f_bar, h = dense.random_factors(block, rng, STACK), dense.random_direction(block, rng, STACK)
    lr = 0.7
    # Factored damping belongs to the cached factors, which are scaled with it.
    base = dense.factored(block, f_bar, GAMMA) if mode == "factored" else f_bar
    scaled = dense.matrix(block, jax.tree.map(lambda x: (1 + lr) * x, base), STACK)
    if mode == "product":
        scaled = scaled + GAMMA * np.eye(scaled.shape[-1])

    _, (v, pull, contraction) = run(ReweightedSolver(DAMPING[mode]), block, f_bar, f_bar, h, lr=lr)
    np.testing.assert_allclose(v, dense.solve(scaled, h), **close)
    np.testing.assert_allclose(pull, h / (1 + lr), **close)
    np.testing.assert_allclose(contraction, lr / (1 + lr), rtol=1e-12)


@pytest.mark.parametrize("memory", [1.0, 1e-6], ids=["old and new alike", "old forgotten"])
@pytest.mark.parametrize("rho", [0.0, 0.33, 0.9])
@each_block
def test_reweighteds_contraction_bounds_that_of_its_own_operator(block, rho, memory, rng, x64):
    old, fresh = (dense.random_factors(block, rng, STACK) for _ in range(2))
    f_bar = jax.tree.map(lambda bar, x: rho * memory * bar + (1 - rho) * x, old, fresh)
    f_hat = jax.tree.map(lambda bar, x: bar + LR * x, f_bar, fresh)
    f_bar_matrix = dense.matrix(block, f_bar, STACK)
    m_hat = f_bar_matrix @ np.linalg.inv(dense.matrix(block, f_hat, STACK))

    h = dense.random_direction(block, rng, STACK)
    (_, _, bound), _ = run(
        ReweightedSolver(ProductDamping()), block, f_bar, fresh, h, rho=rho, gamma=0.0
    )
    assert dense.contraction(f_bar_matrix, m_hat) <= bound * (1 + 1e-10)
    assert bound < 1


@each_mode
@each_block
def test_damping_multiplies_by_the_matrix_that_it_solves_with(block, mode, rng, x64):
    f, v = dense.random_factors(block, rng, STACK), dense.random_direction(block, rng, STACK)
    damping = DAMPING[mode]
    expected = dense.times(dense.damped(block, f, GAMMA, mode, STACK), v)

    @jax.jit
    def multiply_and_solve(f, v, w):
        (cache,) = damping.invert([block], [f], GAMMA)
        return damping.multiply(block, f, v, GAMMA), damping.solve(block, cache, w, GAMMA)

    product, solution = multiply_and_solve(f, v, expected)
    np.testing.assert_allclose(product, expected, **close)
    np.testing.assert_allclose(solution, v, **close)
