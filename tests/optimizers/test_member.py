"""What a member is given: schedules, and what cannot be right and is refused."""

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from optimizers.trajectories import VARYING, assert_close, schedule

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def small():
    with precision.x64(True):
        return small_nets.problem(dtype=jnp.float64)


BAD = [
    (kw.kfac, {"rho": 1.0}, r"rho must be in \[0, 1\), got 1.0"),
    (kw.kfac, {"rho": "much"}, r"rho must be in \[0, 1\), got 'much'"),
    (kw.so_kldwrm, {"nu": -0.1}, r"nu must be in \[0, 1\), got -0.1"),
    (kw.q_kldwrm, {"damping": -1.0}, "damping must be a number >= 0, got -1.0"),
    (kw.q_kldwrm, {"damping": float("nan")}, "damping must be a number >= 0, got nan"),
    (kw.qe_kldwrm, {"learning_rate": -0.1}, "learning_rate must be a number >= 0, got -0.1"),
    (kw.kfac, {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    (kw.kfac, {"learning_rate": None, "momentum": -1}, r"momentum must be in \[0, 1\), got -1"),
    (kw.kfac, {"damping": kw.LevenbergMarquardt()}, "damping must be a number .* leave out learn"),
    (kw.kfac, {"fit": 0.5}, r"fit must be kldwrm_jax.Fit\(...\), got 0.5"),
    (kw.kfac, {"kl_clip": "none"}, "kl_clip must be a number > 0, None or 'auto', got 'none'"),
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


# --- Schedules ------------------------------------------------------------------------------------

REWEIGHTED = {"solver": "reweighted", "damping_mode": "product"}
DAMPED = {
    "kfac": (kw.kfac, {"weight_decay": 0.1}),
    "so": (kw.so_kldwrm, {"nu": 0.2}),
    "so, taken": (kw.so_kldwrm, {"wake": "taken"}),
    "q": (kw.q_kldwrm, REWEIGHTED),
    "qe": (kw.qe_kldwrm, REWEIGHTED | {"capacity": 2, "inner_steps": 2, "kl_scale": 0.5}),
    "qe, preconditioned": (
        kw.qe_kldwrm,
        REWEIGHTED | {"capacity": 2, "inner_steps": 2, "inner": "preconditioned"},
    ),
    "kfac, calibrated": (kw.kfac, {"calibrate": True}),
}


@pytest.mark.parametrize("case", DAMPED)
def test_every_step_of_a_schedule_of_damping_is_that_with_its_own_constant(case, small):
    make, arguments = DAMPED[case]
    gammas = [0.01, 0.3, 0.002, 0.1, 1.0]
    arguments = {"refresh_every": 3, "kl_clip": None} | arguments

    @small_nets.jit
    def with_constant(params, state, k, gamma):
        tx = make(small.layers, schedule(VARYING), damping=gamma, **arguments)
        return small.step(tx)(params, state, k)

    tx = make(small.layers, schedule(VARYING), damping=schedule(gammas), **arguments)
    step, blocks = small_nets.jit(small.step(tx)), dense_family.Blocks(small.params)
    params, state = small.params, tx.init(small.params)
    for k, gamma in enumerate(gammas):
        wanted = with_constant(params, state, k, gamma)
        other, _ = with_constant(params, state, k, 2 * gamma)
        before, (params, state) = blocks.vector(params), step(params, state, k)
        jax.tree.map(assert_close, (params, state), wanted)
        moved, elsewhere = blocks.vector(params) - before, blocks.vector(other) - before
        assert np.abs(moved - elsewhere).max() > 1e-3 * np.abs(moved).max() > 0
