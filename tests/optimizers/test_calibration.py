"""Blocks that are multiplied by what they miss along the step."""

import dataclasses

import brute_force
import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import precision
import pytest
import small_nets
from dense_family import Member, factored
from optimizers.trajectories import (
    CONSTANT,
    SLOW,
    VARYING,
    assert_close,
    assert_follows,
    schedule,
    trajectory,
)

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def small():
    with precision.x64(True):
        return small_nets.problem(dtype=jnp.float64)


# Each case: the transform, its arguments, and the same in the words of `dense_family`.
CASES = {
    "kfac": (
        kw.kfac,
        {"learning_rate": 0.3, "weight_decay": 0.1, "kl_clip": 0.01, **SLOW},
        Member(CONSTANT, 0.95, wake=None, weight_decay=0.1, kl_clip=0.01, period=4),
    ),
    "so": (
        kw.so_kldwrm,
        {"learning_rate": schedule(VARYING), "nu": 0.2, "refresh_every": 2},
        Member(VARYING, 0.33, nu=0.2, period=2, inverse_every=2),
    ),
    "so, taken": (
        kw.so_kldwrm,
        {
            "learning_rate": schedule(VARYING),
            "kl_clip": 0.01,
            "wake": "taken",
            "refresh_every": 1,
        },
        Member(VARYING, 0.33, kl_clip=0.01, wake="taken"),
    ),
    "q": (
        kw.q_kldwrm,
        {"learning_rate": schedule(VARYING), "block_clip": 0.1, "refresh_every": 1},
        Member(VARYING, 0.5, mode=factored, model="exact", block_clip=0.1),
    ),
    "q, reweighted": (
        kw.q_kldwrm,
        {"learning_rate": 0.3, "solver": "reweighted", "block_clip": None, **SLOW},
        Member(CONSTANT, 0.5, model="reweighted", period=4, inverse_every=4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_calibrated_member_is_the_one_with_all_blocks_times_what_was_measured(case, small):
    make, arguments, member = CASES[case]
    tx = make(small.layers, calibrate=True, **{"kl_clip": None} | arguments)
    assert_follows(small, tx, dataclasses.replace(member, calibrate=True))


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
