"""Runs of a member on a small problem, and their comparison with dense matrices."""

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import small_nets

import kldwrm_jax as kw

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
