"""Every member against its mathematics with dense matrices (see `dense_family`), in float64."""

import dataclasses

import dense_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from dense_family import Member, factored
from optimizers.trajectories import (
    CONSTANT,
    SLOW,
    STEPS,
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
