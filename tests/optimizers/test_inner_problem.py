"""QE's inner problem, written out: by SGD, as in the paper, and preconditioned."""

import dataclasses

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from dense_family import Inner, Member, Preconditioned, factored
from optimizers.trajectories import VARYING, assert_close, assert_follows, schedule, trajectory

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def small():
    with precision.x64(True):
        return small_nets.problem(dtype=jnp.float64)


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
        true_kl_clip=None,
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
