"""What the state holds, and what `diagnostics` reads out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.optimizers import KLDWRMState

KEYS = {
    "steps",
    "refreshes",
    "rejected_refreshes",
    "outliers",
    "calibration",
    "rejected_steps",
    "refused_in_a_row",
    "kl_clip",
    "true_kl_clip",
    "kl_ratio",
    "block_size",
    "block_clip",
    "contraction",
    "wake_ratio",
    "objective_before",
    "objective_after",
    "learning_rate",
    "momentum",
    "damping",
    "reduction_ratio",
    "kl_limit",
    "averaging",
    "loss_scale",
    "loss_agreement",
    "undone_steps",
}


@pytest.fixture(scope="module")
def small():
    return small_nets.problem()


def fields(state):
    return {name for name, value in state._asdict().items() if value is not None}


def test_every_member_holds_what_it_needs_and_nothing_else(small):
    common = {"count", "factors", "inverses", "outlier_streak", "calibration", "monitor"}
    wake = common | {"g_prev", "g_hat", "pull"}
    for tx, expected in [
        (kw.kfac(small.layers, 0.1), common),
        (kw.kfac(small.layers, 0.1, momentum=0.5), common | {"last_step"}),
        (kw.kfac(small.layers), common | {"last_step", "offset", "fit"}),
        (kw.so_kldwrm(small.layers, 0.1), wake),
        (kw.so_kldwrm(small.layers, 0.1, nu=0.1), wake | {"momentum"}),
        (kw.q_kldwrm(small.layers, 0.1), wake),
        (kw.qe_kldwrm(small.layers, 0.1), wake | {"history"}),
    ]:
        state = tx.init(small.params)
        assert isinstance(state, KLDWRMState)
        assert fields(state) == expected
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        assert all(x.size for x in jax.tree.leaves(state))


def test_the_state_follows_layers_whatever_is_masked(small):
    tx = kw.qe_kldwrm(small.layers, 0.1, capacity=3)
    whole, part = tx.init(small.params), tx.init({"last": small.params["last"]})
    assert set(whole.factors) == {"first", "norm/scale", "norm/bias", "last"}
    assert jax.tree.structure(part.factors) == jax.tree.structure(whole.factors)
    assert jax.tree.structure(part.inverses) == jax.tree.structure(whole.inverses)
    assert set(part.history) == set(part.g_hat) == {"last"}
    assert whole.history["last"]["kernel"].shape == (3, 3, 3)
    a, g = whole.factors["first"]
    assert a.shape == (5, 5)
    assert g.shape == (3, 3)


def test_fields_after_two_steps_are_what_their_names_say(small):
    rho, lr = 0.4, 0.2
    tx = kw.so_kldwrm(small.layers, lr, rho=rho, refresh_every=1, kl_clip=None)
    step = small_nets.jit(small.step(tx))
    params1, state1 = step(small.params, tx.init(small.params), 0)
    _, state2 = step(params1, state1, 1)
    g0, f0 = small.measure(small.params, 0)
    g1, f1 = small.measure(params1, 1)

    def close(got, expected):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected
        )

    close(state1.g_prev, g0)
    close(state1.g_hat, g0)
    close(state1.factors, f0)
    close(state2.g_prev, g1)
    close(state2.g_hat, jax.tree.map(lambda a, b: a - rho * b, g1, g0))
    close(state2.pull, jax.tree.map(lambda g: -rho * lr * g, g1))
    close(state2.factors, jax.tree.map(lambda a, b: rho * a + (1 - rho) * b, f0, f1))
    scalars = kw.diagnostics(state2)
    wake = rho * optax.tree.norm(g0) / optax.tree.norm(g1)
    np.testing.assert_allclose(scalars["wake_ratio"], wake, rtol=1e-4)
    assert scalars["contraction"] == 0


def test_the_contraction_of_a_step_without_refresh_is_rho_lr_over_one_plus_lr(small):
    tx = kw.q_kldwrm(small.layers, 0.2, rho=0.4, refresh_every=2)
    step = small_nets.jit(small.step(tx))
    params, state = step(small.params, tx.init(small.params), 0)
    # On the first step B = F_0 <= the damped average: no more than that.
    assert 0 < kw.diagnostics(state)["contraction"] <= 0.4 * 0.2 / 1.2 + 1e-6
    _, state = step(params, state, 1)
    np.testing.assert_allclose(kw.diagnostics(state)["contraction"], 0.4 * 0.2 / 1.2, rtol=1e-6)


def wrappers(layers, params):
    tx = kw.q_kldwrm(layers, 0.1)
    everything = jax.tree.map(lambda _: True, params)
    return {
        "bare": tx,
        "chain": optax.chain(optax.clip(1.0), tx, optax.scale(0.5)),
        "masked": optax.masked(tx, everything),
        "partition": optax.partition(
            {"ours": tx, "adam": optax.adam(0.1)}, {"first": "ours", "norm": "adam", "last": "adam"}
        ),
        "inject_hyperparams": optax.inject_hyperparams(kw.q_kldwrm)(layers, 0.1),
        "MultiSteps": optax.MultiSteps(tx, 2),
        "apply_if_finite": optax.apply_if_finite(tx, 3),
        "all": optax.apply_if_finite(
            optax.chain(optax.masked(optax.chain(optax.identity(), tx), everything)), 3
        ),
    }


def test_diagnostics_finds_the_state_however_deep(small):
    for tx in wrappers(small.layers, small.params).values():
        scalars = kw.diagnostics(tx.init(small.params))
        assert set(scalars) == KEYS
        assert all(jnp.shape(value) == () for value in scalars.values())
        assert scalars["steps"] == scalars["refreshes"] == scalars["objective_after"] == 0
        assert scalars["kl_clip"] == scalars["block_clip"] == 1


def test_diagnostics_works_under_jit_and_on_a_train_state(small):
    state = kw.TrainState.create(apply_fn=None, params=small.params, tx=kw.kfac(small.layers, 0.1))
    assert set(jax.jit(kw.diagnostics)(state.opt_state)) == KEYS
    assert kw.diagnostics(state)["steps"] == 0


def test_diagnostics_refuses_none_and_many(small):
    with pytest.raises(ValueError, match="found 0"):
        kw.diagnostics(optax.adam(0.1).init(small.params))
    two = optax.chain(kw.kfac(small.layers, 0.1), kw.so_kldwrm(small.layers, 0.1))
    state = two.init(small.params)
    with pytest.raises(ValueError, match="found 2: pass the part"):
        kw.diagnostics(state)
    assert kw.diagnostics(state[0])["steps"] == 0
