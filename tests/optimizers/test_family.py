"""Every member against its mathematics with dense matrices (see `dense_family`), in float64."""

import dataclasses

import brute_force
import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from dense_family import Inner, Member, Preconditioned, factored

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

STEPS = 8
CONSTANT = [0.3] * STEPS
VARYING = [0.3, 0.1, 0.5, 0.5, 0.02, 0.3, 0.3, 0.2]
SLOW = {"refresh_every": 4}


def schedule(lrs):
    return lambda count: jnp.asarray(lrs)[count]


def trajectory(problem, tx, steps=STEPS):
    """Params and state after every step."""
    step = small_nets.jit(problem.step(tx))
    params, state = problem.params, tx.init(problem.params)
    trace = []
    for k in range(steps):
        params, state = step(params, state, k)
        trace.append((params, state))
    return trace


def assert_close(got, expected, rtol=1e-9):
    expected = np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * max(np.abs(expected).max(), 1e-3))


def assert_follows(problem, tx, member, rtol=1e-9):
    """The whole trajectory, and what the state says of it."""
    blocks = dense_family.Blocks(problem.params)
    start = blocks.vector(problem.params)
    expected = dense_family.run(problem, member)
    got = trajectory(problem, tx, len(member.lrs))
    for (params, state), wanted in zip(got, expected, strict=True):
        assert_close(blocks.vector(params) - start, blocks.vector(wanted["params"]) - start, rtol)
        for name, value in wanted["factors"].items():
            jax.tree.map(lambda a, b: assert_close(a, b, rtol), state.factors[name], value)
        if member.wake is not None:
            assert_close(blocks.vector(state.g_prev), wanted["g"], rtol)
            assert_close(blocks.vector(state.g_hat), wanted["g_hat"], rtol)
        if member.wake == "taken":
            assert_close(blocks.vector(state.pull), wanted["pull"], rtol)
        scalars = kw.diagnostics(state)
        assert_close(scalars["kl_clip"], wanted["kl_clip"], rtol)
        assert_close(scalars["calibration"], wanted["calibration"], rtol)
        assert_close(scalars["objective_before"], wanted["objectives"][0], rtol)
        assert_close(scalars["objective_after"], wanted["objectives"][1], rtol)
    return got, expected


@pytest.fixture(scope="module")
def small():
    with precision.x64(True):
        return small_nets.problem(dtype=jnp.float64)


# Each case: the transform's arguments, and the same in the words of `dense_family`.
KFAC = {
    "product": ({"learning_rate": 0.3, "refresh_every": 1}, Member(CONSTANT, 0.95)),
    "factored, period 4, schedule, decay, clip": (
        {
            "learning_rate": schedule(VARYING),
            "damping_mode": "factored",
            "weight_decay": 0.1,
            "kl_clip": 0.01,
            **SLOW,
        },
        Member(VARYING, 0.95, mode=factored, period=4, weight_decay=0.1, kl_clip=0.01),
    ),
}
SO = {
    "product": ({"learning_rate": 0.3, "refresh_every": 1}, Member(CONSTANT, 0.33)),
    "period 4, schedule, decay, clip, nu between": (
        {
            "learning_rate": schedule(VARYING),
            "weight_decay": 0.1,
            "kl_clip": 0.01,
            "nu": 0.2,
            **SLOW,
        },
        Member(VARYING, 0.33, period=4, weight_decay=0.1, kl_clip=0.01, nu=0.2),
    ),
    "taken, clipped": (
        {"learning_rate": schedule(VARYING), "kl_clip": 0.01, "wake": "taken", **SLOW},
        Member(VARYING, 0.33, period=4, kl_clip=0.01, wake="taken"),
    ),
    "factored, inverted every other refresh": (
        {
            "learning_rate": schedule(VARYING),
            "damping_mode": "factored",
            "refresh_every": 2,
            "inverse": kw.Inverse(every=4),
        },
        Member(VARYING, 0.33, mode=factored, period=2, inverse_every=4),
    ),
}
Q = {
    "exact": (
        {"learning_rate": schedule(VARYING), "refresh_every": 1},
        Member(VARYING, 0.5, mode=factored, model="exact"),
    ),
    "exact, period 4, decay, both clips": (
        {
            "learning_rate": schedule(VARYING),
            "weight_decay": 0.1,
            "kl_clip": 0.01,
            "block_clip": 0.3,
            **SLOW,
        },
        Member(
            VARYING,
            0.5,
            mode=factored,
            model="exact",
            period=4,
            weight_decay=0.1,
            kl_clip=0.01,
            block_clip=0.3,
        ),
    ),
    "exact, taken, both clips, inverted every other refresh": (
        {
            "learning_rate": schedule(VARYING),
            "wake": "taken",
            "kl_clip": 0.01,
            "block_clip": 0.3,
            "refresh_every": 2,
            "inverse": kw.Inverse(every=4),
        },
        Member(
            VARYING,
            0.5,
            mode=factored,
            model="exact",
            wake="taken",
            kl_clip=0.01,
            block_clip=0.3,
            period=2,
            inverse_every=4,
        ),
    ),
    "exact, inverted every other refresh": (
        {"learning_rate": 0.3, "refresh_every": 2, "inverse": kw.Inverse(every=4)},
        Member(CONSTANT, 0.5, mode=factored, model="exact", period=2, inverse_every=4),
    ),
    "reweighted, period 4": (
        {"learning_rate": schedule(VARYING), "solver": "reweighted", "weight_decay": 0.1, **SLOW},
        Member(VARYING, 0.5, model="reweighted", period=4, weight_decay=0.1),
    ),
    "reweighted, factored": (
        {
            "learning_rate": 0.3,
            "solver": "reweighted",
            "damping_mode": "factored",
            "refresh_every": 1,
        },
        Member(CONSTANT, 0.5, mode=factored, model="reweighted"),
    ),
}
OFF = {"kl_clip": None}

# And with blocks that are multiplied by what they miss along the step.
KFAC["calibrated"] = (
    {"learning_rate": 0.3, "calibrate": True, "weight_decay": 0.1, "kl_clip": 0.01, **SLOW},
    Member(CONSTANT, 0.95, calibrate=True, weight_decay=0.1, kl_clip=0.01, period=4),
)
SO["calibrated"] = (
    {"learning_rate": schedule(VARYING), "calibrate": True, "nu": 0.2, "refresh_every": 2},
    Member(VARYING, 0.33, calibrate=True, nu=0.2, period=2, inverse_every=2),
)
SO["calibrated, taken"] = (
    {"learning_rate": schedule(VARYING), "calibrate": True, "kl_clip": 0.01, "wake": "taken"}
    | {"refresh_every": 1},
    Member(VARYING, 0.33, calibrate=True, kl_clip=0.01, wake="taken"),
)
Q["calibrated"] = (
    {"learning_rate": schedule(VARYING), "calibrate": True, "block_clip": 0.1, "refresh_every": 1},
    Member(VARYING, 0.5, mode=factored, model="exact", calibrate=True, block_clip=0.1),
)
Q["calibrated, reweighted"] = (
    {"learning_rate": 0.3, "calibrate": True, "solver": "reweighted", **SLOW},
    Member(CONSTANT, 0.5, model="reweighted", calibrate=True, period=4, inverse_every=4),
)


@pytest.mark.parametrize("case", KFAC)
def test_kfac_is_the_averaged_natural_gradient(case, small):
    arguments, member = KFAC[case]
    tx = kw.kfac(small.layers, **OFF | arguments)
    assert_follows(small, tx, dataclasses.replace(member, wake=None))


@pytest.mark.parametrize("case", SO)
def test_so_kldwrm_is_proposition_4_1(case, small):
    arguments, member = SO[case]
    assert_follows(small, kw.so_kldwrm(small.layers, **OFF | arguments), member)


@pytest.mark.parametrize("case", Q)
def test_q_kldwrm_is_propositions_4_2_and_a_1(case, small):
    arguments, member = Q[case]
    tx = kw.q_kldwrm(small.layers, **OFF | {"block_clip": None} | arguments)
    assert_follows(small, tx, member)


@pytest.mark.parametrize(
    ("arguments", "clipped"),
    [
        (KFAC["factored, period 4, schedule, decay, clip"][1], "kl_clip"),
        (SO["taken, clipped"][1], "kl_clip"),
        (Q["exact, taken, both clips, inverted every other refresh"][1], "block_clip"),
        (Q["exact, period 4, decay, both clips"][1], "block_clip"),
        (Q["exact, period 4, decay, both clips"][1], "weight_decay"),
    ],
)
def test_the_cases_above_do_clip_and_decay(arguments, clipped, small):
    """Without it the reference goes elsewhere: those tests could fail."""
    off = dataclasses.replace(arguments, **{clipped: 0.0 if clipped == "weight_decay" else None})
    with_it, without = (dense_family.run(small, m)[-1]["params"] for m in (arguments, off))
    blocks = dense_family.Blocks(small.params)
    assert np.abs(blocks.vector(with_it) - blocks.vector(without)).max() > 1e-3


@pytest.mark.parametrize("make", [kw.so_kldwrm, kw.q_kldwrm])
def test_calibrated_steps_minimise_the_whole_wake_with_every_fisher_times_todays_number(make):
    """Without any recursion, along the steps that were taken."""
    problem, lrs, gamma = small_nets.problem(dtype=jnp.float64), VARYING[:5], 0.01
    blocks = dense_family.Blocks(problem.params)
    # Damping is one matrix added to the average, which the wake counts as part of every Fisher.
    quadratic = {"block_clip": None, "solver": "reweighted"} if make is kw.q_kldwrm else {}
    tx = make(
        problem.layers,
        schedule(lrs),
        rho=0.4,
        damping=gamma,
        kl_clip=None,
        **quadratic,
        refresh_every=10,
        wake="taken",
        calibrate=True,
    )
    params, fishers, steps, c = problem.params, [], [], None
    got = trajectory(problem, tx, len(lrs))
    _, first = problem.measure(params, 0)
    f = blocks.matrix(jax.tree.map(np.asarray, first)) + gamma * np.eye(blocks.size)
    for k, (new, state) in enumerate(got):
        g = blocks.vector(problem.measure(params, k)[0])
        c = float(state.calibration)  # measured once, at the first step
        fishers.append(f)
        step = blocks.vector(new) - blocks.vector(params)
        if make is kw.q_kldwrm:
            b = _reweighted_curvature(blocks, first, gamma, lrs[k]) if lrs[k] else 0 * f
        else:
            b = 0 * f
        expected = brute_force.minimiser(lrs[k], g, c * b, [c * x for x in fishers], steps, 0.4)
        assert_close(step, expected)
        steps.append(step)
        params = new
    assert abs(c - 1) > 0.1


@pytest.mark.parametrize("make", [kw.kfac, kw.so_kldwrm, kw.q_kldwrm])
def test_a_rate_that_begins_at_zero_is_calibrated_as_the_limit_of_small_rates(make, small):
    rates = [0.0, 0.1, 0.3, 0.3]
    blocks = dense_family.Blocks(small.params)
    zero, almost = (
        trajectory(small, make(small.layers, schedule(own), refresh_every=1, calibrate=True), 4)
        for own in (rates, [lr or 1e-7 for lr in rates])
    )
    assert abs(float(zero[0][1].calibration) - 1) > 0.1
    for (params, state), (wanted, theirs) in zip(zero, almost, strict=True):
        assert_close(state.calibration, theirs.calibration, 1e-5)
        assert_close(blocks.vector(params), blocks.vector(wanted), 1e-5)


def test_a_gradient_of_zero_measures_nothing_and_the_first_that_is_measured_counts_whole(small):
    tx = kw.kfac(small.layers, 0.3, refresh_every=1, calibrate=True)
    oracle = small.oracle(small.params, 0)
    grads, _ = small.measure(small.params, 0)
    update = small_nets.jit(lambda g, s: tx.update(g, s, small.params, oracle=oracle)[1])
    zeros = jax.tree.map(jnp.zeros_like, grads)
    waited = update(grads, update(zeros, tx.init(small.params)))
    unmeasured = update(zeros, tx.init(small.params))
    assert unmeasured.calibration == 0
    assert kw.diagnostics(unmeasured)["calibration"] == 1
    assert_close(waited.calibration, update(grads, tx.init(small.params)).calibration)


def _reweighted_curvature(blocks, factors, gamma, lr):
    """What the author's scaling of both factors by 1 + lr adds to the damped average, over lr."""
    f = blocks.matrix(jax.tree.map(np.asarray, factors))
    scaled = {
        name: tuple((1 + lr) * np.asarray(x) for x in own)
        if isinstance(own, tuple)
        else (1 + lr) * np.asarray(own)
        for name, own in factors.items()
    }
    return (blocks.matrix(scaled) - f) / lr


def test_nu_equal_to_rho_is_kfac_and_nu_zero_is_so(small):
    """One knob between the two, at constant lambda."""
    common = {"learning_rate": 0.3, "rho": 0.6, "kl_clip": None, **SLOW}
    blocks = dense_family.Blocks(small.params)

    def end(tx):
        return blocks.vector(trajectory(small, tx)[-1][0])

    kfac, so = end(kw.kfac(small.layers, **common)), end(kw.so_kldwrm(small.layers, **common))
    # As under inject_hyperparams nu is an array: the momentum is kept even where it is zero.
    make = optax.inject_hyperparams(kw.so_kldwrm, static_args=("refresh_every",))
    step = small_nets.jit(small.step(make(small.layers, **common)))
    for nu, expected in [(0.6, kfac), (0.0, so), (0.3, None)]:
        tx = make(small.layers, nu=nu, **common)
        params, state = small.params, tx.init(small.params)
        for k in range(STEPS):
            params, state = step(params, state, k)
        if expected is not None:
            assert_close(blocks.vector(params), expected)
    between = blocks.vector(params)
    assert np.abs(between - kfac).max() > 1e-3
    assert np.abs(between - so).max() > 1e-3


@pytest.mark.parametrize("wake", ["proposed", "taken"])
@pytest.mark.parametrize("name", ["so", "q"])
def test_a_rate_of_zero_is_the_limit_of_small_rates(name, wake, small):
    rates = [0.3, 0.0, 0.1, 0.3, 0.0, 0.0, 0.2]
    almost = [lr or 1e-7 for lr in rates]
    common = {"rho": 0.4, "kl_clip": None, "wake": wake, "refresh_every": 3}
    if name == "so":
        tx = kw.so_kldwrm(small.layers, schedule(rates), **common)
        member = Member(almost, 0.4, period=3, inverse_every=3, wake=wake)
    else:
        tx = kw.q_kldwrm(small.layers, schedule(rates), block_clip=None, **common)
        member = Member(
            almost, 0.4, mode=factored, model="exact", period=3, inverse_every=3, wake=wake
        )
    blocks = dense_family.Blocks(small.params)
    expected = dense_family.run(small, member)
    for (params, state), wanted, lr in zip(
        trajectory(small, tx, len(rates)), expected, rates, strict=True
    ):
        assert_close(blocks.vector(params), blocks.vector(wanted["params"]), 1e-5)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        if lr == 0:
            assert_close(blocks.vector(state.g_hat), wanted["g"], 1e-5)


def test_a_rate_that_stays_zero_stops_kfac_at_once_and_the_others_soon(small):
    for make in (kw.kfac, kw.so_kldwrm):
        tx = make(small.layers, schedule([0.3, 0.3] + [0.0] * 28), rho=0.3, refresh_every=30)
        points = [dense_family.Blocks(small.params).vector(p) for p, _ in trajectory(small, tx, 30)]
        if make is kw.kfac:
            np.testing.assert_array_equal(points[1], points[-1])
        assert np.abs(points[-1] - points[-2]).max() < 1e-12


# --- QE -------------------------------------------------------------------------------------------


def divergence(problem):
    """The batch's symmetric KL, written out."""

    def logits(k, params):
        i = k % len(problem.x)
        rngs = {"dropout": jax.random.key(5)} if problem.model.dropout else None
        return problem.model.apply({"params": params}, jnp.asarray(problem.x)[i], rngs=rngs)

    def gaussian(k, p1, p2):
        return ((logits(k, p1) - logits(k, p2)) ** 2).sum(-1).mean() / 2

    def categorical(k, p1, p2):
        a, b = (jax.nn.log_softmax(logits(k, p)) for p in (p1, p2))
        return ((jnp.exp(a) - jnp.exp(b)) * (a - b)).sum(-1).mean() / 2

    return gaussian if isinstance(problem.net.likelihood, kw.Gaussian) else categorical


QE = {
    "Categorical, drop, dropout": (
        small_nets.problem,
        {"dropout": 0.4},
        {"tail": "drop", "capacity": 3, "refresh_every": 2, "block_clip": None},
        {"period": 2, "inverse_every": 2},
    ),
    "Gaussian, fold, both clips, taken": (
        small_nets.problem,
        {"likelihood": kw.Gaussian()},
        {"tail": "fold", "capacity": 2, "refresh_every": 2, "block_clip": 0.3, "wake": "taken"},
        {"period": 2, "inverse_every": 2, "block_clip": 0.3, "wake": "taken"},
    ),
}


PRECONDITIONED = {
    "Categorical": (
        {},
        {"capacity": 3, "refresh_every": 2, "block_clip": None},
        {"period": 2, "inverse_every": 2},
    ),
    "Gaussian, calibrated, too long at first": (
        {"likelihood": kw.Gaussian()},
        {"capacity": 2, "refresh_every": 1, "block_clip": None, "calibrate": True, "omega": 9.0},
        {"calibrate": True},
    ),
    "Categorical, calibrated, limited": (
        {},
        {"capacity": 2, "refresh_every": 1, "block_clip": None, "calibrate": True, "kl_clip": 3e-3},
        {"calibrate": True, "kl_clip": 3e-3},
    ),
}


@pytest.mark.parametrize("case", PRECONDITIONED)
def test_qe_preconditioned_takes_newton_like_steps_and_shortens_those_that_do_not_help(case):
    of_problem, arguments, of_member = PRECONDITIONED[case]
    problem = small_nets.problem(dtype=jnp.float64, **of_problem)
    lrs = VARYING[:5]
    common = {"rho": 0.5, "inner": "preconditioned", "kl_scale": 0.5}
    arguments = {"kl_clip": None} | arguments
    tx = kw.qe_kldwrm(problem.layers, schedule(lrs), inner_steps=4, **common, **arguments)
    capacity, omega = arguments["capacity"], arguments.get("omega", 1.0)
    inner = Preconditioned(divergence(problem), capacity, 4, omega, 0.5)
    member = Member(lrs, 0.5, mode=factored, model="exact", inner=inner, **of_member)
    got, _ = assert_follows(problem, tx, member)
    scalars = [kw.diagnostics(state) for _, state in got[capacity - 1 :]]
    if arguments["kl_clip"] is None:
        assert all(own["objective_after"] < own["objective_before"] for own in scalars)


def test_a_calibrated_qe_step_has_no_larger_divergence_than_its_limit():
    """At a rate and from steps that would be far too long."""
    problem, limit = small_nets.problem(dtype=jnp.float64), 1e-3
    common = {"inner": "preconditioned", "calibrate": True, "block_clip": None, "kl_scale": 1e-3}
    ends = {}
    for kl_clip in (limit, None):
        tx = kw.qe_kldwrm(
            problem.layers, 1.0, refresh_every=1, capacity=2, kl_clip=kl_clip, **common
        )
        points = [problem.params, *(params for params, _ in trajectory(problem, tx, 4))]
        ends[kl_clip] = [2 * divergence(problem)(k, *points[k : k + 2]) for k in range(1, 4)]
    assert max(ends[limit]) <= limit * (1 + 1e-9)
    assert min(ends[limit]) > 0
    assert max(ends[None]) > 10 * limit


def test_two_preconditioned_steps_lower_the_papers_objective_more_than_ten_of_sgd(small):
    """From the same state, on the objective without damping, written out."""
    lr, rho, capacity, kl_scale = 0.1, 0.5, 2, 1 / 330
    common = {"rho": rho, "refresh_every": 1, "capacity": capacity, "kl_scale": kl_scale}
    waiting = kw.qe_kldwrm(small.layers, lr, inner_steps=0, **common)
    params, state = trajectory(small, waiting, 1)[-1]
    blocks = dense_family.Blocks(small.params)
    grads, fresh = small.measure(params, 1)
    inner = Inner(divergence(small), capacity, 0, 0.0, kl_scale)
    problem = 1, [small.params, params], inner.weights(rho, 1), blocks.vector(grads)
    problem = *problem, blocks.matrix(jax.tree.map(np.asarray, fresh)), 1 / lr

    def objective(inner_steps, solver):
        tx = kw.qe_kldwrm(small.layers, lr, inner=solver, inner_steps=inner_steps, **common)
        moved, _ = small_nets.jit(small.step(tx))(params, state, 1)
        step = jax.tree.map(jnp.subtract, moved, params)
        return float(inner.value_and_grad(step, *problem)[0])

    q, sgd, preconditioned = (
        objective(0, "sgd"),
        objective(10, "sgd"),
        objective(2, "preconditioned"),
    )
    assert preconditioned < sgd < q


def test_a_q_step_that_is_too_long_is_shortened_in_float32_too():
    with precision.x64(False):
        problem = small_nets.problem(dtype=jnp.float32)
        common = {"refresh_every": 1, "capacity": 2, "inner": "preconditioned", "inner_steps": 6}
        tx = kw.qe_kldwrm(problem.layers, 1.0, kl_clip=None, kl_scale=100.0, **common)
        (_, _), (before, _), (after, state) = trajectory(problem, tx, 3)
        scalars = kw.diagnostics(state)
        assert scalars["objective_after"] < scalars["objective_before"]
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), after, before)
        assert max(jax.tree.leaves(moved)) > 0  # and is not given up


@pytest.mark.parametrize("kl_scale", [1.0, 1e3, 1e6])
def test_qe_preconditioned_never_ends_above_its_start(kl_scale, small):
    """Even where the Q step is far too long, and no step at all is the best one."""
    common = {"refresh_every": 1, "capacity": 2, "kl_clip": None, "inner": "preconditioned"}
    tx = kw.qe_kldwrm(small.layers, 10.0, kl_scale=kl_scale, **common)
    for params, state in trajectory(small, tx, 5)[1:]:
        scalars = kw.diagnostics(state)
        assert scalars["objective_after"] <= scalars["objective_before"]
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("case", QE)
def test_qe_kldwrm_is_the_inner_problem_written_out(case):
    make, of_problem, arguments, of_member = QE[case]
    problem = make(dtype=jnp.float64, **of_problem)
    common = {"omega": 0.3, "kl_scale": 0.5}
    lrs = VARYING[:6]
    tx = kw.qe_kldwrm(
        problem.layers,
        schedule(lrs),
        rho=0.5,
        kl_clip=0.05,
        inner_steps=4,
        **common,
        **arguments,
    )
    inner = Inner(divergence(problem), arguments["capacity"], 4, tail=arguments["tail"], **common)
    member = Member(lrs, 0.5, mode=factored, model="exact", kl_clip=0.05, inner=inner, **of_member)
    got, expected = assert_follows(problem, tx, member)

    capacity = arguments["capacity"]
    for k, (_, state) in enumerate(got):
        scalars = kw.diagnostics(state)
        if k < capacity - 1:
            assert scalars["objective_before"] == scalars["objective_after"] == 0
            continue
        assert scalars["objective_after"] < scalars["objective_before"]
        # The buffer holds the newest iterates, theta_k among them, each in its place.
        for i in range(k - capacity + 1, k + 1):
            iterate = problem.params if i == 0 else got[i - 1][0]
            stored = jax.tree.map(lambda h: h[i % capacity], state.history)
            jax.tree.map(np.testing.assert_array_equal, stored, iterate)

    q = dense_family.run(problem, dataclasses.replace(member, inner=None))
    distance = np.abs(q[capacity]["step"] - expected[capacity]["step"]).max()
    assert distance > 1e-4  # the inner solver did something


def test_the_qe_step_tends_to_the_q_step_as_the_inner_step_shrinks(small):
    """And is the Q step with no inner steps, or with a buffer that is not yet full."""
    common = {"learning_rate": 0.3, "rho": 0.5, "refresh_every": 2}
    static = ("refresh_every", "capacity", "inner_steps")
    make = optax.inject_hyperparams(kw.qe_kldwrm, static_args=static)
    blocks = dense_family.Blocks(small.params)
    q = trajectory(small, kw.q_kldwrm(small.layers, **common), 3)
    step = None
    distances = []
    for omega in (0.1, 0.01, 0.001, 0.0):
        tx = make(small.layers, omega=omega, capacity=3, kl_scale=0.5, **common)
        step = step or small_nets.jit(small.step(tx))
        params, state = small.params, tx.init(small.params)
        for k in range(3):
            params, state = step(params, state, k)
            if k < 2:
                assert_close(blocks.vector(params), blocks.vector(q[k][0]), 1e-12)
        distances.append(np.abs(blocks.vector(params) - blocks.vector(q[2][0])).max())
    assert distances[0] > 1e-5
    np.testing.assert_allclose(distances[1] / distances[0], 0.1, rtol=0.1)
    np.testing.assert_allclose(distances[2] / distances[1], 0.1, rtol=0.1)
    assert distances[3] < 1e-12

    none = trajectory(small, kw.qe_kldwrm(small.layers, inner_steps=0, capacity=1, **common), 2)
    assert_close(blocks.vector(none[1][0]), blocks.vector(q[1][0]), 1e-12)


def test_old_and_new_network_share_their_dropout_masks():
    """With other masks the divergence from the iterate to itself would not be zero."""
    problem = small_nets.problem(dtype=jnp.float64, dropout=0.5)
    oracle = problem.oracle(problem.params, 0)
    outputs = oracle.outputs(problem.params)
    assert np.abs(outputs).max() > 0
    assert oracle.divergence(outputs, oracle.outputs(problem.params)) == 0
    # At s = 0 nothing but the current iterate in the buffer: the objective starts at zero.
    tx = kw.qe_kldwrm(problem.layers, 0.3, capacity=1, kl_clip=1e-30)
    _, state = small_nets.jit(problem.step(tx))(problem.params, tx.init(problem.params), 0)
    assert abs(kw.diagnostics(state)["objective_before"]) < 1e-10


# --- Arguments ------------------------------------------------------------------------------------

BAD = [
    (kw.kfac, {"rho": 1.0}, r"rho must be in \[0, 1\), got 1.0"),
    (kw.kfac, {"rho": "much"}, r"rho must be in \[0, 1\), got 'much'"),
    (kw.so_kldwrm, {"nu": -0.1}, r"nu must be in \[0, 1\), got -0.1"),
    (kw.q_kldwrm, {"damping": -1.0}, "damping must be a number >= 0, got -1.0"),
    (kw.q_kldwrm, {"damping": float("nan")}, "damping must be a number >= 0, got nan"),
    (kw.qe_kldwrm, {"learning_rate": -0.1}, "learning_rate must be a number >= 0, got -0.1"),
    (kw.kfac, {"learning_rate": None}, "learning_rate must be a number >= 0, got None"),
    (kw.kfac, {"weight_decay": -0.1}, "weight_decay must be a number >= 0, got -0.1"),
    (kw.kfac, {"refresh_every": 0}, "refresh_every must be a whole number >= 1.*got 0"),
    (kw.kfac, {"refresh_every": 2.5}, "refresh_every must be a whole number >= 1.*got 2.5"),
    (kw.kfac, {"refresh_every": np.int64(0)}, "refresh_every must be a whole number.*0"),
    (kw.kfac, {"kl_clip": 0}, "kl_clip must be a number > 0, got 0"),
    (kw.q_kldwrm, {"block_clip": -1}, "block_clip must be a number > 0, got -1"),
    (kw.qe_kldwrm, {"capacity": 0}, "capacity must be a whole number >= 1.*got 0"),
    (kw.qe_kldwrm, {"inner_steps": -1}, "inner_steps must be a whole number >= 0.*got -1"),
    (kw.qe_kldwrm, {"omega": -1.0}, "omega must be a number >= 0, got -1.0"),
    (kw.qe_kldwrm, {"kl_scale": -1.0}, "kl_scale must be a number >= 0, got -1.0"),
    (kw.qe_kldwrm, {"tail": "cut"}, "tail must be one of 'drop', 'fold', got 'cut'"),
    (kw.q_kldwrm, {"solver": "lu"}, "solver must be one of 'exact', 'reweighted', got 'lu'"),
    (kw.kfac, {"damping_mode": "none"}, "damping_mode must be one of 'product', 'factored'"),
    (kw.q_kldwrm, {"damping_mode": "none"}, "damping_mode must be one of 'product', 'factored'"),
    (kw.so_kldwrm, {"wake": "mine"}, "wake must be one of 'proposed', 'taken', got 'mine'"),
    (kw.so_kldwrm, {"wake": None}, "wake must be one of 'proposed', 'taken', got None"),
    (kw.q_kldwrm, {"damping_mode": "product"}, "damping_mode='product'.*solver='exact'"),
    (
        kw.kfac,
        {"refresh_every": 4, "inverse": kw.Inverse(every=6)},
        r"Inverse\(every=6\) must be a multiple of refresh_every=4",
    ),
    (kw.kfac, {"inverse": 5}, "inverse must be a kldwrm_jax.Inverse.*5"),
    (kw.kfac, {"layers": ["first"]}, r"layers must be net.layers.*list"),
]


@pytest.mark.parametrize(("make", "wrong", "message"), BAD)
def test_a_bad_argument_is_named_with_its_value_and_what_is_allowed(make, wrong, message, small):
    with pytest.raises(ValueError, match=message):
        make(**{"layers": small.layers, "learning_rate": 0.1} | wrong)


def test_an_inverse_is_made_every_so_many_whole_steps():
    with pytest.raises(ValueError, match=r"every must be a whole number >= 1.*got 0"):
        kw.Inverse(every=0)


def test_parameters_of_another_model_are_named(small):
    tx = kw.kfac(small.layers, 0.1)
    other = small.params | {"third": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"'third/kernel'.*net.layers of the same model"):
        tx.init(other)
    wide = small.params | {"last": {"kernel": jnp.ones((3, 9)), "bias": jnp.ones(9)}}
    with pytest.raises(ValueError, match=r"'last/bias' has shape \(9,\), and \(3,\)"):
        tx.init(wide)


def test_half_a_joint_block_is_refused(small):
    mask = jax.tree.map(lambda _: True, small.params)
    mask["last"]["bias"] = False
    with pytest.raises(ValueError, match="'last/kernel', 'last/bias' share the block 'last'"):
        optax.masked(kw.kfac(small.layers, 0.1), mask).init(small.params)


@pytest.mark.parametrize("make", [kw.qe_kldwrm, lambda *a: kw.kfac(*a, weight_decay=0.1)])
def test_parameters_are_asked_for_where_they_are_needed(make, small):
    tx = make(small.layers, 0.1)
    oracle = small.oracle(small.params, 0)
    with pytest.raises(ValueError, match="update needs the parameters"):
        tx.update(small.params, tx.init(small.params), oracle=oracle)
