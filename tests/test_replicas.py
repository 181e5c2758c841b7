"""Seeds trained side by side by ``vmap``: the same as one by one, and refreshed only when due."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.replicas import shared_any, shared_count

SEEDS, STEPS, EVERY = 3, 6, 4
MEMBERS = {
    "kfac, nothing set": (kw.kfac, {"learning_rate": None}),
    "kfac": (kw.kfac, {}),
    "kfac, staggered": (kw.kfac, {"inverse": kw.Inverse(stagger=True)}),
    "kfac, calibrated": (kw.kfac, {"calibrate": True}),
    "so": (kw.so_kldwrm, {}),
    "q": (kw.q_kldwrm, {}),
    "qe": (kw.qe_kldwrm, {"capacity": 2, "inner_steps": 1}),
}
each_member = pytest.mark.parametrize("name", MEMBERS)


def training(name):
    """A function that trains from one seed."""
    problem = small_nets.problem(norm=False)
    make, settings = MEMBERS[name]
    tx = make(problem.layers, **{"learning_rate": 0.05} | settings, refresh_every=EVERY)
    step = problem.step(tx)

    def train(seed):
        def shifted(p):
            return p + 0.01 * jax.random.normal(jax.random.key(seed), p.shape)

        params = jax.tree.map(shifted, problem.params)
        carried = params, tx.init(params)
        return jax.lax.scan(lambda c, k: (step(*c, k), None), carried, jnp.arange(STEPS))[0]

    return train


@each_member
def test_replicas_are_trained_as_each_would_be_alone(name, x64):
    train = training(name)
    seeds = jnp.arange(SEEDS)
    together, state = small_nets.jit(jax.vmap(train))(seeds)
    alone = small_nets.jit(train)
    for seed in range(SEEDS):
        expected, own = alone(seeds[seed])
        jax.tree.map(
            lambda x, y, seed=seed: np.testing.assert_allclose(x[seed], y, rtol=1e-9, atol=1e-11),
            together,
            expected,
        )
        assert state.monitor.refreshes[seed] == own.monitor.refreshes == 2


def branches_around(jaxpr, depth=0):
    """For each factorisation of a program, how many branches it lies in."""
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, equation.params
        if name in ("cholesky", "eigh"):
            yield depth
        by_platform = given.get("branches_platforms") is not None  # settled when it is compiled
        inner = depth + (name == "cond" and not by_platform)
        for value in jax.tree.leaves(list(given.values()), is_leaf=is_program):
            if is_program(value):
                yield from branches_around(getattr(value, "jaxpr", value), inner)


def is_program(value):
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")


@each_member
def test_a_vmap_keeps_the_refresh_in_its_branch(name):
    """A branch that has become a select runs on every step: there would be one branch less."""
    problem = small_nets.problem(norm=False)
    make, settings = MEMBERS[name]
    tx = make(problem.layers, **{"learning_rate": 0.05} | settings, refresh_every=EVERY)
    step, state = problem.step(tx), tx.init(problem.params)
    several = jax.tree.map(lambda x: jnp.stack([x] * SEEDS), (problem.params, state))
    alone = jax.make_jaxpr(step)(problem.params, state, 0)
    together = jax.make_jaxpr(jax.vmap(step, (0, 0, None)))(*several, 0)
    assert min(branches_around(together.jaxpr)) == min(branches_around(alone.jaxpr)) > 0


def test_the_decision_of_replicas_is_one():
    counts, flags = jnp.array([4, 4, 4]), jnp.array([False, True, False])
    count = jax.vmap(shared_count, out_axes=None)(counts)
    assert count == 4
    assert jax.vmap(shared_any, out_axes=None)(flags)
    assert shared_count(jnp.array(3)) == 3
