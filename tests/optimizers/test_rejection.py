"""What is not finite never reaches the parameters, and `diagnostics` says so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.curvature.outliers import PATIENCE

COMMON = {"learning_rate": 0.3, "refresh_every": 2}
NOTHING_SET = "kfac, nothing set"
RATED = {
    "kfac": (kw.kfac, COMMON),
    "so": (kw.so_kldwrm, COMMON | {"nu": 0.1}),
    "q": (kw.q_kldwrm, COMMON),
    "qe": (kw.qe_kldwrm, COMMON | {"capacity": 2, "inner_steps": 2, "kl_scale": 0.5}),
    "so, every step": (kw.so_kldwrm, COMMON | {"refresh_every": 1, "wake": "taken"}),
    "q, reweighted, inverted seldom": (
        kw.q_kldwrm,
        COMMON | {"solver": "reweighted", "inverse": kw.Inverse(every=4)},
    ),
}

MAKE = {NOTHING_SET: (kw.kfac, {"refresh_every": 2})} | RATED


def poisoned_oracle(oracle, poison):
    call = dataclasses.replace(oracle.call, args=(oracle.call.args[0].at[0, 0].add(poison),))
    return dataclasses.replace(oracle, call=call)


class Training:
    """A member that trains; gradients and the oracle's batch can be poisoned, each by itself."""

    def __init__(self, name, problem, tx):
        self.name, self.problem, self.tx = name, problem, tx

        @small_nets.jit
        def step(params, state, k, in_gradient, in_statistics):
            oracle = problem.oracle(params, k)
            grads = jax.grad(oracle.loss)(params)
            grads["last"]["kernel"] = grads["last"]["kernel"].at[0, 0].add(in_gradient)
            poisoned = poisoned_oracle(oracle, in_statistics)
            updates, state = tx.update(grads, state, params, oracle=poisoned)
            return optax.apply_updates(params, updates), state, updates

        self.step = step

    def start(self):
        return self.problem.params, self.tx.init(self.problem.params)

    def go(self, params, state, ks, in_gradient=0.0, in_statistics=0.0):
        for k in ks:
            params, state, _ = self.step(params, state, k, in_gradient, in_statistics)
        return params, state


@pytest.fixture(scope="module")
def trainings():
    problem = small_nets.problem(norm=False)
    return {
        name: Training(name, problem, make(problem.layers, **arguments))
        for name, (make, arguments) in MAKE.items()
    }


@pytest.fixture(params=MAKE)
def training(request, trainings):
    return trainings[request.param]


@pytest.fixture(params=RATED)
def rated(request, trainings):
    return trainings[request.param]


@pytest.fixture
def nothing_set(trainings):
    return trainings[NOTHING_SET]


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def assert_finite(params, state):
    """QE's objectives apart: they tell of an inner solver that diverged."""
    scalars = state.monitor._replace(objective_before=None, objective_after=None)
    everything = params, state._replace(monitor=scalars)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(everything))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [1, 4], ids=["between", "refresh"])
@pytest.mark.parametrize("where", ["gradient", "statistics"])
def test_with_nothing_set_a_bad_batch_undoes_the_step_that_led_to_it(
    nothing_set, poison, at, where
):
    """And the curvature stays; a second one changes no parameter; then training goes on."""
    bad = {"in_gradient": poison} if where == "gradient" else {"in_statistics": poison}
    earlier = nothing_set.go(*nothing_set.start(), range(at - 1))
    before = nothing_set.go(*earlier, [at - 1])
    params, state = nothing_set.go(*before, [at], **bad)
    assert_close(params, earlier[0])
    assert_finite(params, state)
    for field in ("count", "factors", "inverses", "calibration"):
        assert_same(getattr(state, field), getattr(before[1], field))
    assert state.fit.limit <= 0.5 * before[1].fit.limit
    assert state.fit.damping > before[1].fit.damping
    scalars, previously = kw.diagnostics(state), kw.diagnostics(before[1])
    assert scalars["rejected_steps"] == previously["rejected_steps"] + 1
    assert scalars["steps"] == previously["steps"]
    assert scalars["refreshes"] == previously["refreshes"]
    due = where == "statistics" and at % 2 == 0
    assert scalars["rejected_refreshes"] == previously["rejected_refreshes"] + due

    again, after = nothing_set.go(params, state, [at], **bad)
    assert_same(again, params)
    assert kw.diagnostics(after)["rejected_steps"] == previously["rejected_steps"] + 2

    recovered, after = nothing_set.go(again, after, range(at, at + 60))
    assert_finite(recovered, after)
    loss = nothing_set.problem.oracle(params, 0).loss
    assert loss(recovered) < 0.9 * loss(before[0])
    assert kw.diagnostics(after)["rejected_steps"] == previously["rejected_steps"] + 2


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_with_nothing_set_a_bad_first_gradient_changes_nothing(nothing_set, poison):
    start = nothing_set.start()
    params, state = nothing_set.go(*start, [0], in_gradient=poison)
    assert_same(params, start[0])
    assert_same(state._replace(monitor=None), start[1]._replace(monitor=None))
    assert kw.diagnostics(state)["rejected_steps"] == 1
    late, prompt = (nothing_set.go(*x, range(3)) for x in ((params, state), start))
    assert_same(late[0], prompt[0])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 4], ids=["first", "between", "refresh"])
def test_a_bad_gradient_gives_a_zero_update_and_an_unchanged_state(rated, poison, at):
    before = rated.go(*rated.start(), range(at))
    params, state, updates = rated.step(*before, at, poison, 0.0)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert_same(params, before[0])
    assert_same(state._replace(monitor=None), before[1]._replace(monitor=None))
    scalars, previously = kw.diagnostics(state), kw.diagnostics(before[1])
    assert scalars["rejected_steps"] == previously["rejected_steps"] + 1
    for counter in ("steps", "refreshes", "rejected_refreshes"):
        assert scalars[counter] == previously[counter]
    assert_finite(params, state)
    # Afterwards all is as if it had not happened.
    clean, poisoned = (rated.go(*x, [at, at + 1])[0] for x in (before, (params, state)))
    assert_same(poisoned, clean)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_bad_statistics_leave_the_last_good_inverse_in_use(rated, poison):
    before = rated.go(*rated.start(), range(4))
    params, state, updates = rated.step(*before, 4, 0.0, poison)
    assert_finite(params, state)
    assert any(x.any() for x in jax.tree.leaves(updates))
    assert_same(state.factors, before[1].factors)
    assert_same(state.inverses, before[1].inverses)
    scalars, previously = kw.diagnostics(state), kw.diagnostics(before[1])
    assert scalars["rejected_refreshes"] == 1
    assert scalars["refreshes"] == previously["refreshes"]
    assert scalars["rejected_steps"] == 0
    assert scalars["steps"] == 5

    # The step is that of a step without a refresh, with the same gradient.
    if rated.name in ("kfac", "so", "q"):
        grads, _ = rated.problem.measure(before[0], 4)
        later = before[1]._replace(count=before[1].count + 1)  # no refresh is due
        # Whose batch is just as bad, so that the true size of the step stays unknown.
        oracle = poisoned_oracle(rated.problem.oracle(before[0], 4), poison)
        expected, _ = small_nets.jit(rated.tx.update)(grads, later, before[0], oracle=oracle)
        assert_close(updates, expected)

    # The next good refresh is taken.
    params, state = rated.go(params, state, range(5, 9))
    assert_finite(params, state)
    scalars = kw.diagnostics(state)
    assert scalars["rejected_refreshes"] == 1
    assert scalars["refreshes"] > previously["refreshes"]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.factors, before[1].factors)
    assert max(jax.tree.leaves(moved)) > 0


def test_nothing_moves_before_the_first_good_refresh_and_then_all_is_normal(training):
    start = training.start()
    params, state = training.go(*start, [0, 0, 0], in_statistics=np.nan)
    assert_same(params, start[0])
    assert_finite(params, state)
    scalars = kw.diagnostics(state)
    assert scalars["rejected_refreshes"] == 3
    assert scalars["refreshes"] == scalars["steps"] == 0
    assert_same(state._replace(monitor=None), start[1]._replace(monitor=None))
    late, prompt = training.go(params, state, range(4)), training.go(*start, range(4))
    assert_same(late[0], prompt[0])
    assert kw.diagnostics(late[1])["refreshes"] == kw.diagnostics(prompt[1])["refreshes"]


def test_a_run_of_poisoned_batches_stays_finite_and_recovers(training):
    rng = np.random.default_rng(0)
    params, state = training.start()
    for k in range(30):
        in_gradient, in_statistics = rng.choice([0.0, 0.0, 0.0, np.nan, np.inf], size=2)
        params, state = training.go(params, state, [k], in_gradient, in_statistics)
        assert_finite(params, state)
    scalars = kw.diagnostics(state)
    assert scalars["rejected_steps"] > 3
    assert scalars["rejected_refreshes"] > 0
    assert scalars["steps"] > 5
    before = training.problem.oracle(params, 0).loss(training.problem.params)
    assert training.problem.oracle(params, 0).loss(params) < before


@pytest.mark.parametrize("size", [1e18, 1e30, 3e38])
def test_a_huge_but_finite_gradient_does_not_jam_the_optimizer(training, size):
    """Float32 may overflow on the way: the step is refused, and the next ones are taken."""
    before = training.go(*training.start(), range(2))
    params, state = training.go(*before, [2], in_gradient=size)
    assert_finite(params, state)
    params, state = training.go(params, state, range(3, 300))
    assert_finite(params, state)
    assert kw.diagnostics(state)["steps"] > 290


UNDAMPED = {
    "kfac, no rate": lambda layers, **own: kw.kfac(layers, damping=0.0, **own),
    "kfac": lambda layers, **own: kw.kfac(layers, 0.1, damping_mode="factored", damping=0.0, **own),
    "q": lambda layers, **own: kw.q_kldwrm(layers, 0.1, damping=0.0, **own),
}


@pytest.mark.parametrize("name", UNDAMPED)
def test_a_singular_block_without_damping_is_refused(name):
    """A constant input makes a singular factor; with no damping there is no inverse."""
    problem = small_nets.problem(norm=False)
    zeros = dataclasses.replace(problem, x=np.zeros_like(problem.x))
    tx = UNDAMPED[name](problem.layers)
    params, state = small_nets.jit(zeros.step(tx))(problem.params, tx.init(problem.params), 0)
    assert_same(params, problem.params)
    assert kw.diagnostics(state)["rejected_refreshes"] == 1
    assert kw.diagnostics(state)["steps"] == 0


@pytest.mark.parametrize("name", UNDAMPED)
def test_an_inversion_that_fails_later_leaves_the_last_inverses_and_training_goes_on(name):
    problem = small_nets.problem(kw.Gaussian(), norm=False)
    zeros = dataclasses.replace(problem, x=np.zeros_like(problem.x))
    tx = UNDAMPED[name](problem.layers, rho=0.0, refresh_every=1)
    good, bad = (small_nets.jit(own.step(tx)) for own in (problem, zeros))
    params, before = good(problem.params, tx.init(problem.params), 0)
    params, state = bad(params, before, 1)
    assert kw.diagnostics(state)["rejected_refreshes"] == 1
    assert_same(state.inverses, before.inverses)
    params, state = good(params, state, 2)
    assert kw.diagnostics(state)["rejected_refreshes"] == 1
    assert kw.diagnostics(state)["steps"] == 3
    assert_finite(params, state)


def test_a_diverging_inner_solver_leaves_the_q_step():
    problem = small_nets.problem(kw.Gaussian(), norm=False)
    common = {"learning_rate": 0.3, "refresh_every": 2}
    tx = kw.qe_kldwrm(
        problem.layers, capacity=1, omega=1e30, kl_scale=1e6, block_clip=None, **common
    )
    q = kw.q_kldwrm(problem.layers, block_clip=None, **common)
    params, state = small_nets.jit(problem.step(tx))(problem.params, tx.init(problem.params), 0)
    expected, _ = small_nets.jit(problem.step(q))(problem.params, q.init(problem.params), 0)
    assert_close(params, expected)
    assert_finite(params, state)
    assert not np.isfinite(kw.diagnostics(state)["objective_after"])


@pytest.mark.parametrize("name", ["so", "q", "qe"])
def test_where_averages_begin_anew_between_inversions_the_step_forgets_the_wake(name):
    problem = small_nets.problem(norm=False)
    make, arguments = MAKE[name]
    tx = make(problem.layers, **arguments | {"inverse": kw.Inverse(every=4)})
    step = small_nets.jit(problem.step(tx))
    params, state = problem.params, tx.init(problem.params)
    for k in range(2):
        params, state = step(params, state, k)
    tiny = jax.tree.map(lambda x: 1e-15 * x, state.factors)
    nearly = jax.tree.map(lambda n: np.full_like(n, PATIENCE - 1), state.outlier_streak)
    state = state._replace(factors=tiny, outlier_streak=nearly)
    forgetful = state._replace(pull=jax.tree.map(np.zeros_like, state.pull))
    assert_same(step(params, state, 2)[0], step(params, forgetful, 2)[0])


# --- Refused again and again ----------------------------------------------------------------------


def test_refusals_in_a_row_are_counted_and_a_step_taken_ends_the_count(training):
    params, state = training.go(*training.start(), range(2))
    params, state = training.go(params, state, [2] * 3, in_gradient=np.nan)
    assert kw.diagnostics(state)["refused_in_a_row"] == 3
    params, state = training.go(params, state, [2])
    assert kw.diagnostics(state)["refused_in_a_row"] == 0


def test_steps_that_wait_for_a_first_inverse_are_refusals(training):
    _, state = training.go(*training.start(), [0] * 4, in_statistics=np.nan)
    assert kw.diagnostics(state)["refused_in_a_row"] == 4


@pytest.fixture(scope="module", params=[NOTHING_SET, "kfac"])
def stuck(request, trainings):
    """A training that has stood still for ten steps, its last state, and the one before."""
    training = trainings[request.param]
    before = training.go(*training.start(), range(9), in_gradient=np.nan)
    return training, before, training.go(*before, [9], in_gradient=np.nan)


def test_ten_refusals_are_an_error_to_whoever_checks(stuck):
    _, (_, before), (_, state) = stuck
    kw.check_progress(before)
    with pytest.raises(FloatingPointError, match=r"the last 10 steps were refused.*checkpoint"):
        kw.check_progress((optax.EmptyState(), state))
    with pytest.raises(FloatingPointError, match="the last 9 steps"):
        kw.check_progress(before, refused=5)
    with pytest.raises(ValueError, match="refused must be a whole number >= 1"):
        kw.check_progress(before, refused=0)


def test_of_several_replicas_one_that_is_stuck_is_enough(stuck):
    _, (_, before), (_, state) = stuck
    both = jax.tree.map(lambda *xs: np.stack(xs), before, state)
    with pytest.raises(FloatingPointError, match="the last 10 steps"):
        kw.check_progress(both)


def test_diagnostics_warns_of_ten_refusals(stuck, recwarn):
    _, (_, before), (_, state) = stuck
    jax.jit(kw.diagnostics)(state)  # nobody can look
    kw.diagnostics(before)
    assert not [w for w in recwarn if "refused" in str(w.message)]
    with pytest.warns(RuntimeWarning, match="were refused.*checkpoint"):
        kw.diagnostics(state)


def test_a_step_outside_of_jit_after_ten_refusals_is_an_error(stuck):
    training, _, (params, state) = stuck
    oracle = training.problem.oracle(params, 0)
    with pytest.raises(FloatingPointError, match="the last 10 steps were refused"):
        training.tx.update(params, state, params, oracle=oracle)


# --- Learning rates below zero --------------------------------------------------------------------


@pytest.mark.parametrize("make", [kw.kfac, kw.so_kldwrm, kw.q_kldwrm])
@pytest.mark.parametrize("bad", [-0.1, np.nan])
def test_a_schedule_below_zero_takes_no_step_and_training_goes_on_after_it(make, bad):
    problem = small_nets.problem(norm=False)
    tx = make(problem.layers, lambda k: jnp.where((k == 1) | (k == 2), bad, 0.1), refresh_every=2)
    step = small_nets.jit(problem.step(tx))
    start = step(problem.params, tx.init(problem.params), 0)
    params, state = step(*step(*start, 1), 2)
    assert_same(params, start[0])
    scalars = kw.diagnostics(state)
    assert scalars["rejected_steps"] == scalars["refused_in_a_row"] == 2
    params, state = step(params, state, 3)
    assert kw.diagnostics(state)["refused_in_a_row"] == 0
    assert np.any(params["last"]["kernel"] != start[0]["last"]["kernel"])


def test_outside_of_jit_a_schedule_below_zero_is_an_error():
    problem = small_nets.problem(norm=False)
    tx, oracle = kw.kfac(problem.layers, lambda k: 0.1 - k), problem.oracle(problem.params, 0)
    state = tx.init(problem.params)._replace(count=jnp.array(1, jnp.int32))
    with pytest.raises(ValueError, match=r"learning_rate must be a number >= 0, got .*-0.9"):
        tx.update(problem.params, state, problem.params, oracle=oracle)
