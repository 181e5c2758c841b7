"""Steps that set themselves: their coefficients against a dense reference, and how they train."""

import itertools

import dense_fisher
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.optimizers import self_setting

WHOLE = kw.Fit(examples=1.0)
MEMBERS = {
    "kfac": (kw.kfac, {}),
    "so": (kw.so_kldwrm, {}),
    "so, taken": (kw.so_kldwrm, {"wake": "taken"}),
    "q": (kw.q_kldwrm, {}),
    "qe": (kw.qe_kldwrm, {"capacity": 2, "inner_steps": 1}),
}


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


# --- The fit --------------------------------------------------------------------------------------


def recorded(problem, tx, steps):
    """Every step's parameters, update, state after it, and gradient."""
    step = small_nets.jit(lambda p, s, k: update(problem, tx, p, s, k))
    params, state, rows = problem.params, tx.init(problem.params), []
    for k in range(steps):
        s, after, g = step(params, state, k)
        rows.append((params, s, after, g))
        params, state = optax.apply_updates(params, s), after
    return rows


def update(problem, tx, params, state, k):
    oracle = problem.oracle(params, k)
    g = jax.grad(oracle.loss)(params)
    return *tx.update(g, state, params, oracle=oracle), g


def proposals(problem, rows, gammas):
    """``-(F_bar + gamma)^-1 g`` along the same parameters, by the averaged inverse alone."""
    tx = kw.precondition(
        problem.layers,
        damping=lambda k: jnp.asarray(gammas)[k],
        damping_mode="factored",
        refresh_every=1,
    )
    step = small_nets.jit(lambda p, s, k: update(problem, tx, p, s, k))
    state = tx.init(problem.params)
    for k, (params, *_) in enumerate(rows):
        v, state, _ = step(params, state, k)
        yield -dense_fisher.vector(v)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_steps_and_reduction_ratios_are_those_of_the_dense_fisher(dropout):
    """The two coefficients, the limit's factor, and what the next batch says of every step."""
    problem = small_nets.problem(dtype=jnp.float64, dropout=dropout)
    steps = 8
    rows = recorded(problem, kw.kfac(problem.layers, refresh_every=1, fit=WHOLE), steps)
    assert all(after.fit.fitting for *_, after, _ in rows)
    gammas = [float(after.monitor.damping) for *_, after, _ in rows]
    last, share, promise, limit, before = None, 1.0, None, None, None
    for k, ((params, s, after, g), delta) in enumerate(
        zip(rows, proposals(problem, rows, gammas), strict=True)
    ):
        oracle = problem.oracle(params, k)
        fisher = dense_fisher.matrix(oracle.outputs, params, problem.net.likelihood)
        slope, taken = dense_fisher.vector(g), dense_fisher.vector(s)
        v = delta[:, None] if last is None else np.stack([delta, last], axis=1)
        damped = v.T @ (fisher + gammas[k] * np.eye(len(fisher))) @ v
        step = v @ np.linalg.solve(damped, -v.T @ slope)
        if last is not None:
            change = float(oracle.loss(params) - oracle.loss(before))
            share = 0.9 * share + 0.1 * np.clip(-change / promise, -1, 1)
        np.testing.assert_allclose(after.monitor.reduction_ratio, share, rtol=1e-6)
        divergence = 0.5 * step @ fisher @ step
        limit = 0.01 * divergence if limit is None else float(after.fit.limit)
        np.testing.assert_allclose(after.fit.limit, limit, rtol=1e-7)
        short = min(1.0, np.sqrt(limit / divergence))
        np.testing.assert_allclose(taken, short * step, rtol=1e-6, atol=1e-12)
        before = params
        last, promise = taken, abs(slope @ taken + 0.5 * taken @ fisher @ taken)


@pytest.mark.usefixtures("x64")
def test_on_linear_regression_the_first_fitted_step_is_the_minimiser(rng):
    """With one output the block is the whole Fisher; the limit alone shortens the step."""
    x, model = jnp.asarray(rng.normal(size=(20, 3))), nn.Dense(1, param_dtype=jnp.float64)
    y = jnp.asarray(rng.normal(size=(20, 1)))
    net = kw.instrument(model, kw.Gaussian(), x, fisher="exact")
    params = model.init(jax.random.key(0), x)["params"]
    tx = kw.kfac(net.layers, damping=1e-12, damping_mode="product", fit=WHOLE)
    _, grads, oracle = net.value_and_grad(params, x, targets=y)
    s, state = tx.update(grads, tx.init(params), params, oracle=oracle)
    rows = np.concatenate([x, np.ones((20, 1))], axis=1)
    best = np.linalg.lstsq(rows, y, rcond=None)[0]
    start = np.concatenate([params["kernel"], params["bias"][None]])
    whole = np.concatenate([s["kernel"], s["bias"][None]]) / float(state.monitor.kl_clip)
    np.testing.assert_allclose(start + whole, best, rtol=1e-8)
    np.testing.assert_allclose(state.monitor.kl_clip, 0.1)


@pytest.mark.usefixtures("x64")
def test_momentum_that_is_given_is_kept_and_the_rate_is_fitted(small):
    problem = small_nets.problem(dtype=jnp.float64)
    tx = kw.kfac(problem.layers, momentum=0.5, damping=0.1, refresh_every=1, fit=WHOLE)
    rows = recorded(problem, tx, 6)
    deltas = proposals(problem, rows, [0.1] * len(rows))
    last = None
    for k, ((params, s, after, g), delta) in enumerate(zip(rows, deltas, strict=True)):
        assert after.monitor.damping == 0.1
        short, taken = float(after.monitor.kl_clip), dense_fisher.vector(s)
        if last is not None:
            fisher = dense_fisher.matrix(
                problem.oracle(params, k).outputs, params, problem.net.likelihood
            ) + 0.1 * np.eye(len(last))
            slope = dense_fisher.vector(g) + 0.5 * fisher @ last
            rate = -slope @ delta / (delta @ fisher @ delta)
            np.testing.assert_allclose(taken, short * (rate * delta + 0.5 * last), rtol=1e-6)
        last = taken


def test_with_a_learning_rate_momentum_adds_the_last_step(small):
    plain, heavy = (
        kw.kfac(small.layers, 0.1, momentum=m, kl_clip=None, true_kl_clip=None) for m in (None, 0.9)
    )
    (_, s0, first, _), (params, s1, _, _) = recorded(small, heavy, 2)
    alone, _, _ = update(small, plain, params, first._replace(last_step=None), 1)
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a, b + 0.9 * c, rtol=1e-4, atol=1e-6),
        s1,
        alone,
        s0,
    )


def test_between_two_fits_the_last_coefficients_serve(small):
    tx = kw.kfac(small.layers, fit=kw.Fit(examples=1.0, every=3), refresh_every=2)
    fits = [after.fit for *_, after, _ in recorded(small, tx, 7)]
    same = [bool(jnp.all(a.w == b.w)) for a, b in itertools.pairwise(fits)]
    assert same == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"examples": 0}, "examples must be a whole number >= 1"),
        ({"examples": 1.5}, r"examples must be in \[0, 1\], got 1.5"),
        ({"every": 0}, "every must be a whole number >= 1"),
    ],
)
def test_wrong_arguments_of_fit_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        kw.Fit(**wrong)


def test_a_fraction_of_the_batch_has_at_least_128_samples():
    fit = kw.Fit(examples=0.125)
    assert fit.examples_of((2048,)) == 256
    assert fit.examples_of((256,)) == 128
    assert fit.examples_of((64,)) == 64
    assert fit.examples_of((32, 64)) == 4
    assert kw.Fit(examples=10).examples_of((64,)) == 10


# --- Safety ---------------------------------------------------------------------------------------


def test_a_step_that_leads_to_no_finite_gradient_is_taken_back(small):
    tx = kw.kfac(small.layers, refresh_every=2)
    *_, (params, s, state, g) = recorded(small, tx, 5)
    bad = jax.tree.map(lambda x: x * jnp.nan, g)
    oracle = small.oracle(params, 5)
    back, after = tx.update(bad, state, params, oracle=oracle)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, -b), back, s)
    assert after.fit.limit <= 0.5 * state.fit.limit
    assert after.fit.damping == 3 * state.fit.damping
    again, last = tx.update(bad, after, params, oracle=oracle)
    assert not any(np.any(x) for x in jax.tree.leaves(again))
    assert int(last.monitor.rejected_steps) == 2
    jax.tree.map(np.testing.assert_array_equal, last.factors, state.factors)


def test_kl_clip_bounds_the_divergence_of_a_step_that_sets_itself(small):
    tx = kw.kfac(small.layers, kl_clip=1e-6, refresh_every=1, fit=WHOLE)
    for k, (params, s, *_) in enumerate(recorded(small, tx, 10)):
        assert 2 * float(small.oracle(params, k).quadratic(s)) < 1.01e-6


# --- Training -------------------------------------------------------------------------------------


def spread(problem, tx, steps=60):
    rows = recorded(problem, tx, steps)
    losses = [float(problem.oracle(params, 0).loss(params)) for params, *_ in rows[:: steps - 1]]
    return losses, rows[-1][2]


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_trains_with_nothing_set(name, small):
    make, arguments = MEMBERS[name]
    (before, after), state = spread(small, make(small.layers, refresh_every=5, **arguments))
    assert after < before
    scalars = kw.diagnostics(state)
    assert scalars["rejected_steps"] == 0
    assert scalars["learning_rate"] > 0
    assert scalars["damping"] > 0
    assert scalars["kl_limit"] > 0


def classes(key, examples=64):
    """Labels that have nothing to do with the inputs: all that a batch says is noise."""
    x, y = jax.random.split(key)
    return jax.random.normal(x, (examples, 6)), jax.random.randint(y, (examples,), 0, 4)


def teacher(_, examples=64):
    """The same batch again and again: it says all."""
    x = jax.random.normal(jax.random.key(3), (examples, 6))
    return x, jnp.sin(x @ jnp.linspace(-1, 1, 24).reshape(6, 4))


@pytest.mark.parametrize(
    ("batches", "likelihood", "fits"),
    [(classes, kw.Categorical(), False), (teacher, kw.Gaussian(), True)],
    ids=["noise", "signal"],
)
def test_the_regime_is_chosen_by_what_the_batches_say(batches, likelihood, fits):
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(4)])
    x, _ = batches(jax.random.key(0))
    net = kw.instrument(model, likelihood, x)
    params = model.init(jax.random.key(1), x)["params"]
    tx = kw.kfac(net.layers, refresh_every=10)

    @jax.jit
    def train(params, state):
        def step(carry, key):
            params, state = carry
            x, y = batches(key)
            _, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
            s, state = tx.update(grads, state, params, oracle=oracle)
            return (optax.apply_updates(params, s), state), state.fit.fitting

        return jax.lax.scan(step, (params, state), jax.random.split(jax.random.key(2), 100))

    (params, state), fitting = train(params, tx.init(params))
    assert fitting[:5].all()
    assert fitting[20:60].mean() > 0.9 if fits else not fitting[60:].any()
    assert np.isfinite(state.monitor.learning_rate)


def test_a_run_that_is_stored_in_the_middle_goes_on_bit_by_bit(small):
    tx = kw.kfac(small.layers, refresh_every=3)
    step = small_nets.jit(small.step(tx))
    params, state = small.params, tx.init(small.params)
    for k in range(30):
        if k == 15:
            stored = flax.serialization.to_bytes((params, state))
        params, state = step(params, state, k)
    others, other = flax.serialization.from_bytes((small.params, tx.init(small.params)), stored)
    for k in range(15, 30):
        others, other = step(others, other, k)
    jax.tree.map(np.testing.assert_array_equal, (params, state), (others, other))


def test_the_count_past_the_largest_integer_keeps_every_period(small):
    setting = self_setting.SelfSetting(
        kw.Fit(every=6), None, kw.LevenbergMarquardt(every=5), mu=1, highest_limit=None
    )
    assert setting.periods == (30, 6, 5)
