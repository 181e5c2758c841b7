"""How statistics enter the averaged Fisher, and how and when it is inverted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_blocks
from two_blocks import BLOCKS, LAYERS

import kldwrm_jax as kw
from kldwrm_jax.curvature import (
    AveragedFisher,
    CachedInverse,
    FactoredDamping,
    LinearSolver,
    ProductDamping,
    StepScalars,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("x64")

RHO, GAMMA = 0.8, 0.05
DAMPING = {"product": ProductDamping(), "factored": FactoredDamping()}
YES, NO = jnp.ones((), bool), jnp.zeros((), bool)


def averaged(mode="product", refresh_every=1, **inverse):
    solver = LinearSolver(DAMPING[mode])
    return AveragedFisher(LAYERS, solver, RHO, refresh_every, kw.Inverse(**inverse))


def at(first=False, damping=GAMMA):
    return StepScalars(lr=0.3, rho=RHO, damping=damping, first=jnp.asarray(first))


def observe(fisher, before, fresh, usable=YES, first=False, blocks=BLOCKS):
    return fisher.observe(blocks, before, fresh, usable, at(first))


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, expected)


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture
def first(rng):
    """An averaged Fisher after its first refresh and inversion, and its statistics."""
    fisher, fresh = averaged(), two_blocks.random_factors(rng)
    refreshed, _ = observe(fisher, fisher.init(), fresh, first=True)
    return fisher, fisher.invert(BLOCKS, refreshed, jnp.array(0), at(True)).averages, fresh


# --- Averages -------------------------------------------------------------------------------------


def test_it_begins_with_zeros_of_the_shapes_of_the_blocks():
    averages = averaged().init()
    assert not any(np.any(x) for x in jax.tree.leaves(averages))
    assert jax.tree.map(jnp.shape, averages.factors) == {"dense": ((4, 4), (2, 2)), "scale": (4,)}
    assert averages.outlier_streak.keys() == averages.inverses.keys() == {"dense", "scale"}


def test_the_first_statistics_count_whole_and_later_ones_by_one_minus_rho(rng):
    fisher, expected = averaged(), None
    averages = fisher.init()
    for k in range(4):
        fresh = two_blocks.random_factors(rng)
        refreshed, screened = observe(fisher, averages, fresh, first=k == 0)
        expected = (
            fresh
            if expected is None
            else jax.tree.map(lambda a, b: RHO * a + (1 - RHO) * b, expected, fresh)
        )
        assert_close(refreshed.averages.factors, expected)
        assert_same(screened, fresh)
        assert refreshed.refreshed
        assert not any([refreshed.rejected, refreshed.outlier, *refreshed.restart.values()])
        averages = refreshed.averages


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["A", "G", "diagonal"])
def test_statistics_that_are_not_finite_keep_all_averages_and_are_counted(value, place, first, rng):
    fisher, before, _ = first
    fresh = two_blocks.random_factors(rng)
    bad = fresh["scale"] if place == "diagonal" else fresh["dense"]["AG".index(place)]
    bad[(1,) * bad.ndim] = value
    for averages, is_first in [(before, False), (fisher.init(), True)]:
        refreshed, _ = observe(fisher, averages, fresh, first=is_first)
        assert_same(refreshed.averages, averages)
        assert not refreshed.refreshed
        assert refreshed.rejected


def test_statistics_of_a_gradient_that_is_not_finite_are_not_taken_and_are_not_to_blame(first, rng):
    fisher, before, _ = first
    refreshed, _ = observe(fisher, before, two_blocks.random_factors(rng), usable=NO)
    assert_same(refreshed.averages, before)
    assert not refreshed.refreshed
    assert not refreshed.rejected


def test_outliers_are_left_out_twice_and_the_third_in_a_row_restarts_its_block_alone(first, rng):
    fisher, averages, _ = first
    for streak in (1, 2, 0):
        before, fresh = averages, two_blocks.random_factors(rng)
        fresh["scale"] *= 1e9
        refreshed, screened = observe(fisher, before, fresh)
        averages = refreshed.averages
        assert refreshed.refreshed
        assert averages.outlier_streak == {"dense": 0, "scale": streak}
        assert_close(
            averages.factors["dense"],
            jax.tree.map(
                lambda a, b: RHO * a + (1 - RHO) * b, before.factors["dense"], fresh["dense"]
            ),
        )
        restarts = streak == 0
        assert refreshed.restart == {"dense": False, "scale": restarts}
        assert refreshed.outlier == (not restarts)
        own = fresh if restarts else before.factors
        assert_same(averages.factors["scale"], own["scale"])
        assert_same(screened, {"dense": fresh["dense"], "scale": own["scale"]})


def test_a_refresh_near_the_average_ends_a_row_of_outliers(first, rng):
    fisher, averages, _ = first
    for size, streak in [(1e9, 1), (1e9, 2), (1.0, 0), (1e9, 1)]:
        fresh = two_blocks.random_factors(rng)
        fresh["scale"] *= size
        refreshed, _ = observe(fisher, averages, fresh)
        averages = refreshed.averages
        assert averages.outlier_streak["scale"] == streak
        assert not any(refreshed.restart.values())


def test_a_row_of_outliers_is_not_ended_by_statistics_that_are_not_finite(first, rng):
    fisher, averages, _ = first
    streaks = []
    for size in (1e9, np.nan, 1e9):
        fresh = two_blocks.random_factors(rng)
        fresh["scale"] *= size
        averages = observe(fisher, averages, fresh)[0].averages
        streaks.append(int(averages.outlier_streak["scale"]))
    assert streaks == [1, 1, 2]


def test_blocks_that_are_masked_stay_as_they_are(first, rng):
    fisher, before, _ = first
    fresh = two_blocks.random_factors(rng)
    fresh["dense"][0][:] = np.nan
    refreshed, screened = observe(fisher, before, fresh, blocks=[LAYERS["scale"]])
    assert refreshed.refreshed
    assert refreshed.restart.keys() == screened.keys() == {"scale"}
    assert_same(refreshed.averages.factors["dense"], before.factors["dense"])
    assert np.any(refreshed.averages.factors["scale"] != before.factors["scale"])


# --- Inverses -------------------------------------------------------------------------------------


def refreshed_as(averages, refreshed=YES):
    return unchanged(averages, BLOCKS, GAMMA)._replace(refreshed=refreshed)


@pytest.mark.parametrize("mode", DAMPING)
def test_the_inverse_times_a_vector_is_a_solve_with_the_damped_matrix(mode, rng):
    fisher, fresh, v = averaged(mode), two_blocks.random_factors(rng), two_blocks.random_leaves(rng)
    refreshed, _ = observe(fisher, fisher.init(), fresh, first=True)
    averages = fisher.invert(BLOCKS, refreshed, jnp.array(0), at(True)).averages
    got = CachedInverse(BLOCKS, fisher.solver, averages.inverses, at()).times(v)
    matrix = two_blocks.damped(fresh, GAMMA, mode)
    assert {path: x.shape for path, x in got.items()} == two_blocks.SHAPES
    np.testing.assert_allclose(
        two_blocks.vector(got), np.linalg.solve(matrix, two_blocks.vector(v)), rtol=1e-9
    )
    back = fisher.times(BLOCKS, averages, got, GAMMA)
    np.testing.assert_allclose(two_blocks.vector(back), two_blocks.vector(v), rtol=1e-9)


def test_a_product_is_damped_when_it_is_solved_with_and_factors_when_they_are_inverted(rng):
    fresh, v = two_blocks.random_factors(rng), two_blocks.random_leaves(rng)
    for mode, gamma in [("product", 0.7), ("factored", GAMMA)]:
        fisher = averaged(mode)
        refreshed, _ = observe(fisher, fisher.init(), fresh, first=True)
        inverses = fisher.invert(BLOCKS, refreshed, jnp.array(0), at(True)).averages.inverses
        got = CachedInverse(BLOCKS, fisher.solver, inverses, at(damping=0.7)).times(v)
        matrix = two_blocks.damped(fresh, gamma, mode)
        expected = np.linalg.solve(matrix, two_blocks.vector(v))
        np.testing.assert_allclose(two_blocks.vector(got), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "due"),
    [
        ({"refresh_every": 1}, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
        ({"refresh_every": 2, "every": 4}, {0, 4, 8}),
        ({"refresh_every": 3}, {0, 3, 6}),
    ],
)
def test_inverses_are_made_on_the_steps_of_their_period_alone(arguments, due, first, rng):
    _, before, _ = first
    fisher = averaged(**arguments)
    changed = before._replace(factors=two_blocks.random_factors(rng))
    invert = jax.jit(lambda k: fisher.invert(BLOCKS, refreshed_as(changed), k, at()).averages)
    new = averaged().invert(BLOCKS, refreshed_as(changed), jnp.array(0), at()).averages.inverses
    assert np.any(new["scale"].values != before.inverses["scale"].values)
    for k in range(9):
        got = invert(jnp.array(k)).inverses
        assert_close(got, new if k in due else before.inverses)


def test_the_first_good_statistics_are_inverted_whatever_the_step(rng):
    fisher = averaged(refresh_every=2, every=4)
    fresh = two_blocks.random_factors(rng)
    refreshed, _ = observe(fisher, fisher.init(), fresh, first=True)
    inverted = fisher.invert(BLOCKS, refreshed, jnp.array(2), at(True))
    np.testing.assert_allclose(inverted.averages.inverses["scale"].values, fresh["scale"])
    assert inverted.refreshed


def test_averages_that_were_not_refreshed_are_not_inverted(first, rng):
    fisher, before, _ = first
    changed = before._replace(factors=two_blocks.random_factors(rng))
    kept = fisher.invert(BLOCKS, refreshed_as(changed, NO), jnp.array(0), at())
    assert_same(kept.averages, changed)
    assert not kept.rejected


@pytest.mark.parametrize("is_first", [True, False])
def test_an_inversion_that_fails_leaves_the_inverses_and_is_counted(is_first, rng):
    fisher = averaged("factored")
    good, _ = observe(fisher, fisher.init(), two_blocks.random_factors(rng), first=True)
    before = fisher.invert(BLOCKS, good, jnp.array(0), at(True)).averages
    singular = before._replace(factors=before.factors | {"dense": (np.ones((4, 4)), np.eye(2))})
    no_damping = at(is_first, damping=0.0)
    failed = fisher.invert(
        BLOCKS, refreshed_as(singular)._replace(damping=0.0), jnp.array(0), no_damping
    )
    assert_same(failed.averages, singular)
    assert failed.rejected
    assert failed.refreshed == (not is_first)  # with no inverse at all there is no step


def test_a_refresh_is_due_on_its_period_and_an_inversion_on_that_of_the_inverse():
    fisher = averaged(refresh_every=2, every=4)
    refresh, inversion = (
        [k for k in range(9) if if_due(jnp.array(k), lambda: YES, lambda: NO)]
        for if_due in (fisher.if_refresh, fisher.if_inversion)
    )
    assert refresh == [0, 2, 4, 6, 8]
    assert inversion == [0, 4, 8]
    assert fisher.invert_every == 4
    assert averaged(refresh_every=3).invert_every == 3


def test_nothing_restarts_and_nothing_is_counted_where_nothing_changed(first):
    _, averages, _ = first
    same = unchanged(averages, BLOCKS, GAMMA)
    assert same.averages is averages
    assert same.damping == GAMMA
    assert not any(jax.tree.leaves(same._replace(averages=None, damping=NO)))


def test_damping_that_is_not_given_is_found_at_the_first_refresh_in_units_of_the_mean_eigenvalue(
    rng,
):
    fisher = dataclasses.replace(averaged(), first_damping=0.3)
    fresh = two_blocks.random_factors(rng)
    found, _ = observe(fisher, fisher.init(), fresh, first=YES)
    matrix = two_blocks.matrix(fresh)
    assert_close(found.damping, 0.3 * np.trace(matrix) / len(matrix))
    later, _ = observe(fisher, found.averages, fresh, first=NO)
    assert later.damping == GAMMA
