"""The direction of a step, against dense matrices of two blocks made by hand."""

import types

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_blocks
from two_blocks import BLOCKS, LAYERS

import kldwrm_jax as kw
from kldwrm_jax.curvature import (
    AveragedFisher,
    Averages,
    CachedInverse,
    ExactSolver,
    FactoredDamping,
    LinearSolver,
    ProductDamping,
    ReweightedSolver,
    StepScalars,
    unchanged,
)
from kldwrm_jax.curvature.outliers import PATIENCE
from kldwrm_jax.optimizers import direction
from kldwrm_jax.optimizers.direction import StepInputs
from kldwrm_jax.optimizers.gradients import Gradients

pytestmark = pytest.mark.usefixtures("x64")

LR, GAMMA, C = 0.3, 0.05, 1.7
NO_RESTART = {block.name: jnp.zeros((), bool) for block in BLOCKS}
each_decay = pytest.mark.parametrize("decays", [False, True], ids=["no decay", "decay"])


def step_inputs(rng, decays=True, wake=True, calibration=1.0, oracle=None):
    g, m, pull, decay = (two_blocks.random_leaves(rng) for _ in range(4))
    gradients = Gradients(g, m, pull if wake else None, decay if decays else None)
    at = StepScalars(LR, 0.8, GAMMA, jnp.zeros((), bool), calibration)
    return StepInputs(BLOCKS, jnp.array(0), oracle, gradients, at)


def right_sides(inputs):
    """``h`` and ``rhs``, as vectors."""
    vector, gradients = two_blocks.vector, inputs.gradients
    lr = inputs.at.lr / inputs.at.calibration
    h = lr * vector(gradients.m)
    if gradients.pull is not None:
        h = h + vector(gradients.pull)
    return h, h if gradients.decay is None else h + lr * vector(gradients.decay)


def cached(solver, factors, at):
    inverses = solver.damping_mode.invert(
        [block.block for block in BLOCKS], [factors[block.name] for block in BLOCKS], GAMMA
    )
    names = [block.name for block in BLOCKS]
    return CachedInverse(BLOCKS, solver, dict(zip(names, inverses, strict=True)), at)


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def assert_direction(got, inputs, s_matrix, f_matrix):
    """``v = S^-1 rhs``, ``fisher_v = F S^-1 h`` and ``size = v' rhs``."""
    h, rhs = right_sides(inputs)
    v = np.linalg.solve(s_matrix, rhs)
    assert {path: x.shape for path, x in got.v.items()} == two_blocks.SHAPES
    assert_close(two_blocks.vector(got.v), v)
    assert_close(two_blocks.vector(got.fisher_v), f_matrix @ np.linalg.solve(s_matrix, h))
    assert_close(got.size, v @ rhs)


@each_decay
@pytest.mark.parametrize("calibration", [1.0, C])
@pytest.mark.parametrize("mode", [ProductDamping(), FactoredDamping()], ids=["product", "factored"])
def test_a_linear_model_is_solved_with_the_damped_average(mode, calibration, decays, rng):
    inputs = step_inputs(rng, decays, calibration=calibration)
    factors = two_blocks.random_factors(rng)
    operators = cached(LinearSolver(mode), factors, inputs.at).operators
    got = direction.solve(operators, inputs, NO_RESTART)
    name = "product" if isinstance(mode, ProductDamping) else "factored"
    matrix = two_blocks.damped(factors, GAMMA, name)
    assert_direction(got, inputs, matrix, matrix)
    assert got.contraction == 0
    assert got.b is None


@each_decay
def test_a_quadratic_model_between_refreshes_has_the_average_as_its_curvature(decays, rng):
    inputs, factors = step_inputs(rng, decays), two_blocks.random_factors(rng)
    got = direction.solve(cached(ExactSolver(), factors, inputs.at).operators, inputs, NO_RESTART)
    matrix = two_blocks.damped(factors, GAMMA, "factored")
    assert_direction(got, inputs, (1 + LR) * matrix, matrix)
    assert_close(got.contraction, LR / (1 + LR))


@each_decay
def test_a_quadratic_model_at_a_refresh_has_the_batchs_curvature(decays, rng):
    inputs, f_bar, fresh = (
        step_inputs(rng, decays),
        two_blocks.random_factors(rng),
        two_blocks.random_factors(rng),
    )
    kinds, own = [b.block for b in BLOCKS], [[f[b.name] for b in BLOCKS] for f in (f_bar, fresh)]
    _, operators = ExactSolver().refresh(kinds, *own, inputs.at)
    got = direction.solve(operators, inputs, NO_RESTART)
    f_matrix = two_blocks.damped(f_bar, GAMMA, "factored")
    s_matrix = f_matrix + LR * two_blocks.matrix(fresh)
    assert_direction(got, inputs, s_matrix, f_matrix)
    m_hat = f_matrix @ np.linalg.inv(s_matrix)
    assert_close(got.contraction, dense.contraction(f_matrix, m_hat))


def test_without_a_wake_nothing_is_remembered(rng):
    inputs, factors = step_inputs(rng, wake=False), two_blocks.random_factors(rng)
    solver = LinearSolver(ProductDamping())
    got = direction.solve(cached(solver, factors, inputs.at).operators, inputs, NO_RESTART)
    _, rhs = right_sides(inputs)
    assert got.fisher_v == {}
    assert_close(two_blocks.vector(got.v), np.linalg.solve(two_blocks.damped(factors, GAMMA), rhs))


def test_a_block_that_restarts_is_solved_without_its_pull(rng):
    inputs, factors = step_inputs(rng), two_blocks.random_factors(rng)
    operators = cached(LinearSolver(ProductDamping()), factors, inputs.at).operators
    got = direction.solve(operators, inputs, NO_RESTART | {"scale": jnp.ones((), bool)})
    pull = inputs.gradients.pull | {"scale": np.zeros(4)}
    emptied = inputs._replace(gradients=inputs.gradients._replace(pull=pull))
    matrix = two_blocks.damped(factors, GAMMA)
    assert_direction(got, emptied, matrix, matrix)


def test_gradients_times_a_number_have_the_direction_times_it_and_its_square_as_size(rng):
    inputs, factors = step_inputs(rng), two_blocks.random_factors(rng)
    operators = cached(LinearSolver(ProductDamping()), factors, inputs.at).operators
    scaled = inputs._replace(
        gradients=Gradients(*jax.tree.map(lambda x: C * x, tuple(inputs.gradients)))
    )
    expected = direction.solve(operators, scaled, NO_RESTART)
    got = direction.solve(operators, inputs, NO_RESTART).scaled(C)
    jax.tree.map(assert_close, got, expected)


# --- Refreshes ------------------------------------------------------------------------------------


def oracle_of(factors):
    return types.SimpleNamespace(factors=lambda: factors)


def averaged(solver):
    return AveragedFisher(LAYERS, solver, 0.8, 1, kw.Inverse())


@pytest.mark.parametrize(
    "solver", [LinearSolver(ProductDamping()), ExactSolver(), ReweightedSolver(ProductDamping())]
)
def test_the_first_step_is_made_with_the_statistics_of_its_own_batch(solver, rng):
    fresh = two_blocks.random_factors(rng)
    inputs = step_inputs(rng, oracle=oracle_of(fresh))
    inputs = inputs._replace(at=inputs.at._replace(first=jnp.ones((), bool)))
    fisher = averaged(solver)
    refreshed, got = direction.advance(fisher, fisher.init(), inputs)
    jax.tree.map(assert_close, refreshed.averages.factors, fresh)
    assert refreshed.refreshed
    _, rhs = right_sides(inputs)
    s_matrix = {
        LinearSolver: lambda: two_blocks.damped(fresh, GAMMA),
        ExactSolver: lambda: (
            two_blocks.damped(fresh, GAMMA, "factored") + LR * two_blocks.matrix(fresh)
        ),
        ReweightedSolver: lambda: two_blocks.damped(
            jax.tree.map(lambda x: (1 + LR) * x, fresh), GAMMA
        ),
    }[type(solver)]()
    assert_close(two_blocks.vector(got.v), np.linalg.solve(s_matrix, rhs))


def test_a_step_by_the_stored_inverses_is_that_of_their_operators(rng):
    inputs, factors = step_inputs(rng), two_blocks.random_factors(rng)
    solver = LinearSolver(ProductDamping())
    inverse, fisher = cached(solver, factors, inputs.at), averaged(solver)
    averages = fisher.init()._replace(inverses=inverse.inverses)
    got = direction.solve_cached(fisher, inputs, unchanged(averages, BLOCKS, GAMMA))
    expected = direction.solve(inverse.operators, inputs, NO_RESTART)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"scale": np.ones(5)},
            r"block 'scale' has factors of shape \(5,\) in the oracle and \(4,\) in the optimizer",
        ),
        (
            {"dense": (np.eye(4), np.eye(3))},
            r"block 'dense' has factors of shape \(\(4, 4\), \(3, 3\)\) in the oracle and "
            r"\(\(4, 4\), \(2, 2\)\) in the optimizer",
        ),
        ({"more": np.ones(1)}, r"block 'more' has factors of shape \(1,\) in the oracle and None"),
        ({"scale": None}, r"block 'scale' has factors of shape None in the oracle and \(4,\)"),
    ],
    ids=["diagonal", "side", "more", "missing"],
)
def test_statistics_of_other_shapes_are_named_with_both(changed, message, rng):
    factors = two_blocks.random_factors(rng) | changed
    inputs = step_inputs(rng, oracle=oracle_of(factors))
    fisher = averaged(LinearSolver(ProductDamping()))
    with pytest.raises(ValueError, match=message + r".*net = kldwrm_jax.instrument"):
        direction.observe(fisher, fisher.init(), inputs, inputs.gradients.g)


def test_statistics_are_not_observed_where_the_gradient_is_not_finite(rng):
    inputs = step_inputs(rng, oracle=oracle_of(two_blocks.random_factors(rng)))
    fisher = averaged(LinearSolver(ProductDamping()))
    assert direction.observe(fisher, fisher.init(), inputs, inputs.gradients.g)[0].refreshed
    inputs.gradients.g["scale"][0] = np.nan
    refreshed, _ = direction.observe(fisher, fisher.init(), inputs, inputs.gradients.g)
    assert not refreshed.refreshed
    assert not any(np.any(x) for x in jax.tree.leaves(refreshed.averages.factors))


class Failing(ExactSolver):
    """Its inverses are not finite."""

    def refresh(self, blocks, f_bar, fresh, at):
        caches, operators = super().refresh(blocks, f_bar, fresh, at)
        return jax.tree.map(lambda x: x * np.nan, caches), operators


def test_where_an_inversion_fails_a_block_that_restarts_is_solved_without_its_pull_too(rng):
    far = two_blocks.random_factors(rng)
    inputs = step_inputs(rng, oracle=oracle_of(far | {"scale": 1e12 * far["scale"]}))
    fisher, near = averaged(Failing()), two_blocks.random_factors(rng)
    inverse = cached(fisher.solver, near, inputs.at)
    streak = {"dense": jnp.array(0, jnp.int32), "scale": jnp.array(PATIENCE - 1, jnp.int32)}
    before = Averages(jax.tree.map(jnp.asarray, near), inverse.inverses, streak)
    refreshed, got = direction.advance(fisher, before, inputs)
    assert refreshed.rejected
    assert refreshed.restart["scale"]
    expected = direction.solve(inverse.operators, inputs, refreshed.restart)
    jax.tree.map(assert_close, got, expected)
    assert np.any(
        expected.v["scale"]
        != direction.solve_cached(fisher, inputs, unchanged(before, BLOCKS, GAMMA)).v["scale"]
    )
