"""The recursion against a minimiser that keeps the whole history (see `brute_force`)."""

import brute_force
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax import wake
from kldwrm_jax.curvature import (
    Dense,
    ExactSolver,
    FactoredDamping,
    Kronecker,
    LinearSolver,
    ProductDamping,
    StepScalars,
    average,
)

DIM, STEPS = 4, 11
CONSTANT = [0.3] * STEPS
VARYING = [0.3, 0.1, 0.5, 0.5, 0.02, 0.3, 0.3, 1.0, 0.2, 0.05, 0.4]
WITH_ZEROS = [0.3, 0.0, 0.5, 0.0, 0.0, 0.3, 0.1, 0.0, 0.2, 0.0, 0.4]

each_rho = pytest.mark.parametrize("rho", [0.0, 0.33, 0.9])
each_period = pytest.mark.parametrize("period", [1, 4])
each_schedule = pytest.mark.parametrize("lrs", [CONSTANT, VARYING], ids=["constant", "varying"])


def assert_steps_equal(got, expected):
    expected = np.asarray(expected)
    got = np.reshape(got, expected.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def problem(rng, period=1, dim=DIM):
    """Fresh Fishers, one a refresh, and gradients, one a step."""
    refreshed = [dense.spd(rng, dim) for _ in range(0, STEPS, period)]
    return refreshed, rng.normal(size=(STEPS, dim))


def operator_of_a_refresh(solver, block, f_bar, b, at):
    """The cache of a refresh, and its operator."""
    if isinstance(solver, LinearSolver):
        (cache,) = solver.damping_mode.invert([block], [f_bar], at.damping)
        return cache, solver.between(block, cache, at)
    (cache,), (operator,) = solver.refresh([block], [f_bar], [b], at)
    return cache, operator


def follow(
    solver,
    refreshed,
    gradients,
    lrs,
    rho,
    *,
    block=None,
    period=1,
    curvatures=None,
    nu=0.0,
    gamma=0.0,
    taken=False,
    take=lambda k, s: s,
):
    """The library's recursion: its minimisers, the steps taken, the pulls and ghat.

    ``taken`` chooses the wake of the steps that ``take`` makes of the minimisers, instead of the
    minimisers' own. ``curvatures`` replace the fresh factors as B_k at refreshes.
    """
    block = block or Dense()
    curvatures = curvatures or refreshed
    f_bar = jax.tree.map(jnp.zeros_like, refreshed[0])
    model_gradient = pull = jnp.zeros_like(gradients[0])
    proposals, steps, pulls, g_hats = [], [], [], []
    for k, (g, lr) in enumerate(zip(gradients, lrs, strict=True)):
        at = StepScalars(lr, rho, gamma, first=k == 0)
        if k % period == 0:
            f_bar = average(f_bar, refreshed[k // period], rho if k else 0.0)
            b = curvatures[k // period]
            cache, operator = operator_of_a_refresh(solver, block, f_bar, b, at)
        else:
            operator = solver.between(block, cache, at)
        model_gradient = wake.linear_model(nu, model_gradient, g)
        h = wake.effective_gradient(lr, model_gradient, pull)
        v = operator.solve(h)
        step = take(k, -v)
        pulls.append(pull)
        g_hats.append(wake.unscaled(lr, h, model_gradient))
        proposals.append(-v)
        steps.append(step)
        if taken:
            fisher_step = solver.damping_mode.multiply(block, f_bar, step, gamma)
        else:
            fisher_step = -operator.times_average(h, v)
        pull = wake.remember(rho, pull, fisher_step)
    return tuple(np.array(x) for x in (proposals, steps, pulls, g_hats))


def clip(k, step):
    """Every step is shortened, most of them by half or more."""
    return step * np.minimum(0.7, 0.1 / np.linalg.norm(step))


def stray(k, step):
    """The step taken has little to do with the minimiser."""
    return 0.2 * step + np.random.default_rng(k).normal(size=step.shape)


def test_the_brute_force_minimiser_minimises_the_objective(rng):
    fishers, gradients = problem(rng)
    steps = [0.1 * rng.normal(size=DIM) for _ in range(4)]
    arguments = 0.3, gradients[4], dense.spd(rng, DIM), fishers[:5], steps, 0.6
    best = brute_force.minimiser(*arguments)
    lowest = brute_force.objective(best, *arguments)
    for direction in rng.normal(size=(50, DIM)):
        for size in (1e-3, 1.0):
            assert brute_force.objective(best + size * direction, *arguments) > lowest


@each_period
@each_rho
def test_kfac_is_the_wake_with_a_momentum_model(rho, period, rng, x64):
    """Prop. 3.1, at a constant learning rate."""
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    f_bars = brute_force.averages(fishers, rho)
    literal = [-0.3 * np.linalg.solve(f_bars[k], gradients[k]) for k in range(STEPS)]

    assert_steps_equal(brute_force.run(fishers, gradients, CONSTANT, rho, nu=rho), literal)
    solver = LinearSolver(FactoredDamping())
    steps, *_ = follow(solver, refreshed, gradients, CONSTANT, rho, period=period, nu=rho)
    assert_steps_equal(steps, literal)


def test_kfac_is_no_wake_under_a_schedule(rng, x64):
    fishers, gradients = problem(rng)
    f_bars = brute_force.averages(fishers, 0.9)
    kfac = [-lr * np.linalg.solve(f_bars[k], gradients[k]) for k, lr in enumerate(VARYING)]
    steps = brute_force.run(fishers, gradients, VARYING, 0.9, nu=0.9)
    np.testing.assert_allclose(steps[0], kfac[0])
    assert not np.allclose(steps, kfac, rtol=0.1)


@each_schedule
@each_period
@each_rho
def test_so_kldwrm_is_proposition_4_1(rho, period, lrs, rng, x64):
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    f_bars = brute_force.averages(fishers, rho)
    literal = []
    for k, lr in enumerate(lrs):
        g_hat = gradients[k] - (rho * lrs[k - 1] / lr * gradients[k - 1] if k else 0)
        literal.append(-lr * np.linalg.solve(f_bars[k], g_hat))

    assert_steps_equal(brute_force.run(fishers, gradients, lrs, rho), literal)
    steps, *_ = follow(
        LinearSolver(FactoredDamping()), refreshed, gradients, lrs, rho, period=period
    )
    assert_steps_equal(steps, literal)


@pytest.mark.parametrize("model", ["fisher", "other"])
@each_schedule
@each_period
@each_rho
def test_q_kldwrm_is_propositions_4_2_and_a_1(rho, period, lrs, model, rng, x64):
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    f_bars = brute_force.averages(fishers, rho)
    fresh = refreshed if model == "fisher" else [dense.spd(rng, DIM) for _ in refreshed]
    curvatures = [f_bars[k] if k % period else fresh[k // period] for k in range(STEPS)]

    literal, g_hats = [], [gradients[0]]
    for k, lr in enumerate(lrs):
        lam = 1 / lr
        inverse = np.linalg.inv(f_bars[k] + curvatures[k] / lam)
        m_hat = f_bars[k] @ inverse
        g_hat = g_hats[k]
        literal.append(-inverse @ g_hat / lam)
        if k + 1 < STEPS:
            ratio = 1 / lrs[k + 1] / lam
            memory = g_hat - gradients[k] - m_hat @ g_hat
            g_hats.append(gradients[k + 1] + ratio * rho * memory)

    assert_steps_equal(
        brute_force.run(fishers, gradients, lrs, rho, curvatures=curvatures), literal
    )
    steps, _, _, followed = follow(
        ExactSolver(), refreshed, gradients, lrs, rho, period=period, curvatures=fresh
    )
    assert_steps_equal(steps, literal)
    assert_steps_equal(followed, g_hats)


@each_schedule
@each_rho
@pytest.mark.parametrize("nu", [0.0, 0.2, "rho"])
def test_the_linear_model_with_momentum_follows_the_minimiser(nu, rho, lrs, rng, x64):
    nu = rho if nu == "rho" else nu
    fishers, gradients = problem(rng)
    expected = brute_force.run(fishers, gradients, lrs, rho, nu=nu)
    steps, *_ = follow(LinearSolver(FactoredDamping()), fishers, gradients, lrs, rho, nu=nu)
    assert_steps_equal(steps, expected)


@pytest.mark.parametrize("take", [clip, stray])
@pytest.mark.parametrize(
    "solver", [LinearSolver(FactoredDamping()), ExactSolver()], ids=["so", "q"]
)
@each_period
@each_rho
def test_the_taken_wake_is_right_for_any_steps(rho, period, solver, take, rng, x64):
    """Fact 1: R_{k+1} = rho (R_k + Fbar_k s_k), whatever s_k is."""
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    f_bars = brute_force.averages(fishers, rho)
    curvatures = None
    if isinstance(solver, ExactSolver):
        curvatures = [f_bars[k] if k % period else refreshed[k // period] for k in range(STEPS)]

    proposals, steps, pulls, _ = follow(
        solver, refreshed, gradients, VARYING, rho, period=period, taken=True, take=take
    )
    for k in range(STEPS):
        assert_steps_equal(pulls[k], brute_force.pull(fishers, list(steps[:k]), rho))
    expected = brute_force.run(
        fishers, gradients, VARYING, rho, curvatures=curvatures, take=lambda k, s: steps[k]
    )
    assert_steps_equal(proposals, expected)


@pytest.mark.parametrize(
    "solver", [LinearSolver(FactoredDamping()), ExactSolver()], ids=["so", "q"]
)
@each_rho
def test_the_proposed_wake_is_that_of_the_minimisers_whatever_is_taken(rho, solver, rng, x64):
    """It is the exact wake of the path on which every minimiser would have been taken.

    The iterates of that path are imagined; its gradients are those met on the real one.
    """
    fishers, gradients = problem(rng)
    curvatures = fishers if isinstance(solver, ExactSolver) else None
    proposals, steps, pulls, _ = follow(solver, fishers, gradients, VARYING, rho, take=clip)
    imagined = brute_force.run(fishers, gradients, VARYING, rho, curvatures=curvatures)
    assert_steps_equal(proposals, imagined)
    for k in range(STEPS):
        assert_steps_equal(pulls[k], brute_force.pull(fishers, list(imagined[:k]), rho))

    real = brute_force.run(
        fishers, gradients, VARYING, rho, curvatures=curvatures, take=lambda k, s: steps[k]
    )
    assert np.allclose(real, imagined, rtol=1e-6) == (rho == 0)


@each_rho
def test_both_wakes_agree_when_the_minimisers_are_taken(rho, rng, x64):
    fishers, gradients = problem(rng)
    proposed = follow(ExactSolver(), fishers, gradients, VARYING, rho)
    taken = follow(ExactSolver(), fishers, gradients, VARYING, rho, taken=True)
    for a, b in zip(proposed, taken, strict=True):
        assert_steps_equal(a, b)


@pytest.mark.parametrize("taken", [False, True], ids=["proposed", "taken"])
@pytest.mark.parametrize(
    "solver", [LinearSolver(FactoredDamping()), ExactSolver()], ids=["so", "q"]
)
@each_period
@each_rho
def test_a_learning_rate_of_zero_leaves_the_wake_alone_and_later_steps_right(
    rho, period, solver, taken, rng, x64
):
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    f_bars = brute_force.averages(fishers, rho)
    curvatures = None
    if isinstance(solver, ExactSolver):
        curvatures = [f_bars[k] if k % period else refreshed[k // period] for k in range(STEPS)]
    steps, _, _, g_hats = follow(
        solver, refreshed, gradients, WITH_ZEROS, rho, period=period, taken=taken
    )
    expected = brute_force.run(fishers, gradients, WITH_ZEROS, rho, curvatures=curvatures)
    assert_steps_equal(steps, expected)
    assert np.isfinite(g_hats).all()
    for k, lr in enumerate(WITH_ZEROS):
        if lr == 0:
            np.testing.assert_array_equal(g_hats[k], gradients[k])


@pytest.mark.parametrize(
    "damping", [ProductDamping(), FactoredDamping()], ids=["product", "factored"]
)
@each_period
@each_rho
def test_so_kldwrm_with_damping_is_the_theory_of_damped_fishers(rho, period, damping, rng, x64):
    gamma = 0.2
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    damped = [f + gamma * np.eye(DIM) for f in fishers]
    for taken, take in [(False, lambda k, s: s), (True, stray)]:
        proposals, steps, *_ = follow(
            LinearSolver(damping),
            refreshed,
            gradients,
            VARYING,
            rho,
            period=period,
            gamma=gamma,
            taken=taken,
            take=take,
        )
        expected = brute_force.run(damped, gradients, VARYING, rho, take=lambda k, s: steps[k])
        assert_steps_equal(proposals, expected)


@pytest.mark.parametrize("damped_model", [False, True], ids=["B", "B + gamma I"])
@each_period
@each_rho
def test_q_kldwrm_with_damping_is_the_theory_of_damped_fishers(rho, period, damped_model, rng, x64):
    gamma, eye = 0.2, np.eye(DIM)
    refreshed, gradients = problem(rng, period)
    fishers = brute_force.between_refreshes(refreshed, rho, period, STEPS)
    damped = [f + gamma * eye for f in fishers]
    fresh = [f + gamma * eye * damped_model for f in refreshed]
    f_bars = brute_force.averages(damped, rho)
    curvatures = [f_bars[k] if k % period else fresh[k // period] for k in range(STEPS)]
    steps, *_ = follow(
        ExactSolver(),
        refreshed,
        gradients,
        VARYING,
        rho,
        period=period,
        gamma=gamma,
        curvatures=fresh,
    )
    expected = brute_force.run(damped, gradients, VARYING, rho, curvatures=curvatures)
    assert_steps_equal(steps, expected)


@pytest.mark.parametrize("solver", [LinearSolver(ProductDamping()), ExactSolver()], ids=["so", "q"])
@each_rho
def test_kronecker_blocks_with_a_constant_factor_are_exact(rho, solver, rng, x64):
    """With A constant the average of products is the product of averages."""
    a = dense.spd(rng, 3)
    factors = [(a, dense.spd(rng, 2)) for _ in range(STEPS)]
    fishers = [np.kron(*f) for f in factors]
    gradients = rng.normal(size=(STEPS, 3, 2))
    steps, *_ = follow(solver, factors, gradients, VARYING, rho, block=Kronecker())
    expected = brute_force.run(
        fishers,
        gradients.reshape(STEPS, 6),
        VARYING,
        rho,
        curvatures=fishers if isinstance(solver, ExactSolver) else None,
    )
    assert_steps_equal(steps, expected)


def test_a_sudden_drop_of_the_rate_can_point_uphill(rng, x64):
    """The schedule's hazard: the old wake counts tenfold against the new gradient."""
    g = rng.normal(size=DIM)
    gradients = np.stack([g, g])
    fishers = [np.eye(DIM)] * 2
    steady, *_ = follow(LinearSolver(FactoredDamping()), fishers, gradients, [0.1, 0.1], 0.5)
    dropped, *_ = follow(LinearSolver(FactoredDamping()), fishers, gradients, [0.1, 0.01], 0.5)
    assert steady[1] @ g < 0
    assert dropped[1] @ g > 0


def tree(rng):
    return {"a": {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}, "b": rng.normal()}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: wake.linear_model(0.3, x, y),
        lambda x, y: wake.effective_gradient(0.3, x, y),
        lambda x, y: wake.unscaled(0.3, x, y),
        lambda x, y: wake.unscaled(0.0, x, y),
        lambda x, y: wake.remember(0.3, x, y),
    ],
    ids=["linear_model", "effective_gradient", "unscaled", "unscaled at zero", "remember"],
)
def test_trees_are_treated_leaf_by_leaf(function, rng, x64):
    x, y = tree(rng), tree(rng)
    result = jax.jit(function)(x, y)
    assert jax.tree.structure(result) == jax.tree.structure(x)
    for got, a, b in zip(*map(jax.tree.leaves, (result, x, y)), strict=True):
        np.testing.assert_allclose(got, function(a, b), rtol=1e-12)


def test_the_functions_are_their_formulas():
    m, r = np.array([2.0, -1.0]), np.array([0.5, 3.0])
    np.testing.assert_allclose(wake.linear_model(0.5, m, r), [1.5, 2.5])
    np.testing.assert_allclose(wake.effective_gradient(0.5, m, r), [1.5, 2.5])
    np.testing.assert_allclose(wake.remember(0.5, m, r), [1.25, 1.0])
    np.testing.assert_allclose(wake.unscaled(0.5, m, r), [4.0, -2.0])
    np.testing.assert_array_equal(wake.unscaled(0.0, m, r), r)
