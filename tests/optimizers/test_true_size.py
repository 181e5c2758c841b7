"""Steps whose true divergence is limited, whatever the blocks say of it."""

import functools

import heteroscedastic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.optimizers.true_size import limit_true_size

MEMBERS = {
    "kfac": kw.kfac,
    "kfac, momentum": functools.partial(kw.kfac, momentum=0.9),
    "so": kw.so_kldwrm,
    "q": kw.q_kldwrm,
    "qe": functools.partial(kw.qe_kldwrm, inner_steps=3),
}


@pytest.fixture(scope="module")
def regression():
    return heteroscedastic.Regression()


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


@pytest.mark.parametrize("member", MEMBERS)
def test_no_rate_makes_a_regression_with_a_learned_scale_explode(regression, member):
    losses = regression.losses(MEMBERS[member], (0.01, 0.1, 1.0, 10.0))
    assert losses.max() < 10
    assert losses.min(axis=1).max() < 0


def test_without_the_limit_it_explodes(regression):
    unlimited = functools.partial(kw.kfac, true_kl_clip=None)
    assert regression.losses(unlimited, (0.1, 1.0)).max() > 1e3


@pytest.mark.parametrize("member", MEMBERS)
def test_the_exact_quadratic_form_of_every_step_is_within_the_limit(small, member):
    limit = 1e-3
    tx = MEMBERS[member](small.layers, 0.3, true_kl_clip=limit, kl_clip=1e3, refresh_every=3)

    @small_nets.jit
    def step(params, state, k):
        oracle = small.oracle(params, k)
        grads = jax.grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        outputs = oracle.outputs(params)
        # s'Fs of softmax outputs, from their Jacobian along the step and F = diag(p) - pp'.
        along = jax.jvp(oracle.outputs, (params,), (updates,))[1]
        p = jax.nn.softmax(outputs)
        size = (p * along**2).sum(-1) - (p * along).sum(-1) ** 2
        return optax.apply_updates(params, updates), state, size.mean()

    params, state, sizes = small.params, tx.init(small.params), []
    for k in range(7):
        params, state, size = step(params, state, k)
        sizes.append(size)
    assert max(sizes) <= small_nets.OUTPUTS * limit * 1.001
    assert max(sizes) > small_nets.OUTPUTS * limit * 0.999  # it is this limit that holds
    assert kw.diagnostics(state)["true_kl_clip"] < 1


def test_momentum_counts_in_the_limit_by_the_blocks(small):
    """Without it, steps along one direction would have ten times the length of the limit."""
    limit, damping = 1e-4, 1e-2
    arguments = {"damping": damping, "kl_clip": limit, "true_kl_clip": None, "refresh_every": 1}
    tx = kw.kfac(small.layers, 1.0, momentum=0.9, rho=0.5, **arguments)
    params, state, sizes = small.params, tx.init(small.params), []
    step = small_nets.jit(small.step(tx))
    for _ in range(12):
        before = params
        params, state = step(params, state, 0)
        size = 0.0
        for name, (a, g) in state.factors.items():
            s = jax.tree.map(jnp.subtract, params[name], before[name])
            s = jnp.concatenate([s["kernel"], s["bias"][None]])
            size += jnp.vdot(s, a @ s @ g + damping * s)
        sizes.append(float(size))
    assert max(sizes) < 1.2 * limit  # the average moves between two steps
    assert kw.diagnostics(state)["kl_clip"] < 1


class Oracle:
    """One whose exact quadratic form is known, and that notes when it is asked."""

    event_size = 2

    def __init__(self, size):
        self.size, self.asked = size, 0

    def quadratic(self, step):
        self.asked += 1
        return jnp.asarray(self.size / 2) * step["w"] ** 2


@pytest.mark.parametrize(("size", "factor"), [(8.0, 0.5), (1.0, 1.0), (np.inf, 0.0), (np.nan, 1.0)])
def test_the_factor_is_the_root_of_limit_over_size(size, factor):
    s, one, yes = {"w": jnp.ones(())}, jnp.ones(()), jnp.ones((), bool)
    got = limit_true_size(s, one, 1.0, Oracle(size), jnp.zeros(()), yes)
    np.testing.assert_allclose(got.factor, factor, atol=1e-6)
    assert np.isfinite(got.ratio)


@pytest.mark.parametrize(
    ("ratio", "due", "measured"), [(0.09, 0, False), (0.11, 0, True), (0.09, 1, True)]
)
def test_it_is_measured_when_due_or_where_the_limit_is_near(ratio, due, measured):
    got = jax.jit(
        lambda ratio, due: (
            limit_true_size({"w": jnp.ones(())}, jnp.ones(()), 1.0, Oracle(1.0), ratio, due).ratio
        )
    )(ratio, jnp.asarray(due, bool))
    np.testing.assert_allclose(got, 0.5 if measured else ratio, rtol=1e-6)


def test_nothing_is_measured_without_a_limit(small):
    def program(**arguments):
        tx = kw.kfac(small.layers, 0.1, **arguments)
        return str(jax.make_jaxpr(small.step(tx))(small.params, tx.init(small.params), 0))

    off = program(true_kl_clip=None)
    assert program(kl_clip=None).count(" tanh ") == off.count(" tanh ") < program().count(" tanh ")
