"""The averaged inverse Fisher alone, and chained with Optax's own transforms."""

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from optimizers.trajectories import VARYING, assert_close, schedule, trajectory

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

STEPS = 5
GAMMAS = [0.01, 1.0, 0.05, 0.3, 0.002]
SETTINGS = {
    "product": {"rho": 0.7, "refresh_every": 2},
    "factored, inverted every other refresh": {
        "rho": 0.7,
        "damping": 0.1,
        "damping_mode": "factored",
        "refresh_every": 1,
        "inverse": kw.Inverse(every=2),
    },
}


@pytest.fixture(scope="module")
def small():
    with precision.x64(True):
        return small_nets.problem(dtype=jnp.float64)


def assert_same_run(problem, tx, other):
    blocks = dense_family.Blocks(problem.params)
    start = blocks.vector(problem.params)
    runs = (trajectory(problem, own, STEPS) for own in (tx, other))
    for (params, _), (wanted, _) in zip(*runs, strict=True):
        assert np.abs(blocks.vector(wanted) - start).max() > 1e-3
        assert_close(blocks.vector(params) - start, blocks.vector(wanted) - start)


def updates_at_start(problem, tx, steps):
    """The gradient at the first iterate, and what repeated updates make of it, as vectors."""
    blocks, params = dense_family.Blocks(problem.params), problem.params
    oracle, (grads, _) = problem.oracle(params, 0), problem.measure(params, 0)
    update = small_nets.jit(lambda g, state: tx.update(g, state, params, oracle=oracle))
    state, out = tx.init(params), []
    for _ in range(steps):
        updates, state = update(grads, state)
        out.append(blocks.vector(updates))
    return blocks.vector(grads), out


def damped(problem, gamma, mode=dense_family.product):
    """The batch's damped Fisher at the first iterate, as a matrix."""
    _, factors = problem.measure(problem.params, 0)
    blocks = dense_family.Blocks(problem.params)
    return mode(blocks, jax.tree.map(np.asarray, factors), gamma)


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("lr", [0.3, schedule(VARYING)], ids=["constant", "schedule"])
def test_with_a_learning_rate_it_is_kfac_without_its_limit(case, lr, small):
    chained = optax.chain(
        kw.precondition(small.layers, **SETTINGS[case]), optax.scale_by_learning_rate(lr)
    )
    assert_same_run(small, chained, kw.kfac(small.layers, lr, kl_clip=None, **SETTINGS[case]))


def test_momentum_after_it_is_momentum_of_kfacs_steps(small):
    own = SETTINGS["product"]
    chained = optax.chain(
        kw.precondition(small.layers, **own), optax.trace(0.9), optax.scale_by_learning_rate(0.1)
    )
    kfac = optax.chain(kw.kfac(small.layers, 0.1, kl_clip=None, **own), optax.trace(0.9))
    assert_same_run(small, chained, kfac)


@pytest.mark.parametrize("mode", ["product", "factored"])
def test_it_is_a_solve_with_the_damped_fisher_and_has_the_sign_of_the_gradient(mode, small):
    tx = kw.precondition(small.layers, damping=0.2, damping_mode=mode)
    g, (update,) = updates_at_start(small, tx, 1)
    matrix = damped(small, 0.2, getattr(dense_family, mode))
    assert_close(update, np.linalg.solve(matrix, g))
    assert g @ update > 0


def test_a_schedule_of_the_damping_is_followed_between_refreshes_where_the_product_is_damped(small):
    tx = kw.precondition(small.layers, damping=schedule(GAMMAS), refresh_every=len(GAMMAS))
    g, updates = updates_at_start(small, tx, len(GAMMAS))
    for gamma, update in zip(GAMMAS, updates, strict=True):
        assert_close(update, np.linalg.solve(damped(small, gamma), g))


def test_damped_factors_follow_a_schedule_when_they_are_inverted(small):
    tx = kw.precondition(
        small.layers, damping=schedule(GAMMAS), damping_mode="factored", refresh_every=2
    )
    g, updates = updates_at_start(small, tx, len(GAMMAS))
    for k, update in enumerate(updates):
        matrix = damped(small, GAMMAS[k - k % 2], dense_family.factored)
        assert_close(update, np.linalg.solve(matrix, g))


def test_it_takes_no_more_than_it_needs_and_says_what_is_missing(small):
    tx = kw.precondition(small.layers)
    with pytest.raises(ValueError, match=r"update needs the batch's curvature.*oracle=net.oracle"):
        tx.update(small.params, tx.init(small.params))
    grads, oracle = small.measure(small.params, 0)[0], small.oracle(small.params, 0)
    without, _ = tx.update(grads, tx.init(small.params), oracle=oracle)
    with_params, _ = tx.update(grads, tx.init(small.params), small.params, oracle=oracle)
    jax.tree.map(np.testing.assert_array_equal, without, with_params)
