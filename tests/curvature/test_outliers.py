"""Statistics a million times too large are rejected; after three in a row the average restarts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature import Dense, Diagonal, Kronecker, average, judge_outlier, traces

RHO = 0.9


def pair(a, g, stack=()):
    """Factors of a Kronecker block, with traces over rows of ``a`` and ``g``."""
    return tuple(
        jnp.broadcast_to(value * jnp.eye(n), (*stack, n, n)) for value, n in ((a, 3), (g, 2))
    )


def with_diagonal_a(a, g):
    return jnp.full(5, a), pair(a, g)[1]


# A block, and a function that makes factors of which one has a trace ``x`` times that at 1.
FORMS = {
    "A": (Kronecker(), lambda x: pair(x, 1.0)),
    "G": (Kronecker(), lambda x: pair(1.0, x)),
    "diagonal A": (Kronecker(a_diagonal=True), lambda x: with_diagonal_a(x, 1.0)),
    "stacked G": (Kronecker(), lambda x: pair(1.0, x, (4,))),
    "diagonal": (Diagonal(), lambda x: x * jnp.arange(1.0, 4.0)),
    "diagonal of a matrix": (Diagonal(), lambda x: x * jnp.arange(6.0).reshape(2, 3)),
    "dense": (Dense(), lambda x: x * jnp.eye(4)),
}
each_form = pytest.mark.parametrize(("block", "made"), FORMS.values(), ids=FORMS)


def screened(block, f_bar, f, streak=0, damping=0.0):
    """What the block is averaged with, and the decisions."""
    new, old = traces(block, f), traces(block, f_bar)
    verdict = judge_outlier(new, old, RHO, jnp.array(streak, jnp.int32), damping)
    factors = jax.tree.map(lambda x, y: jnp.where(verdict.rejected, x, y), f_bar, f)
    return factors, jax.tree.map(lambda x: np.asarray(x).item(), verdict)


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@each_form
@pytest.mark.parametrize("ratio", [1.0, 0.9e6, 1 / 0.9e6])
def test_statistics_less_than_a_million_times_off_are_averaged(block, made, ratio):
    factors, decided = screened(block, made(1.0), made(ratio), streak=2)
    same(factors, made(ratio))
    assert (decided.rejected, decided.streak) == (False, 0)
    assert decided.rho == pytest.approx(RHO)


@each_form
@pytest.mark.parametrize("ratio", [1.1e6, 1e30])
def test_larger_statistics_are_replaced_by_the_average_itself(block, made, ratio):
    for before in (0, 1):
        factors, decided = screened(block, made(1.0), made(ratio), streak=before)
        same(factors, made(1.0))
        assert (decided.rejected, decided.streak) == (True, before + 1)
        jax.tree.map(  # so that averaging it in changes nothing
            lambda new, old: np.testing.assert_allclose(new, old, rtol=1e-6),
            average(made(1.0), factors, decided.rho),
            made(1.0),
        )


@each_form
@pytest.mark.parametrize("ratio", [1 / 1.1e6, 1e-30])
def test_smaller_statistics_are_averaged_but_count_in_the_streak(block, made, ratio):
    for before in (0, 1):
        factors, decided = screened(block, made(1.0), made(ratio), streak=before)
        same(factors, made(ratio))
        assert (decided.rejected, decided.streak) == (False, before + 1)
        assert decided.rho == pytest.approx(RHO)


@each_form
@pytest.mark.parametrize("ratio", [1e12, 1e-12])
def test_the_third_time_in_a_row_the_average_restarts(block, made, ratio):
    factors, decided = screened(block, made(1.0), made(ratio), streak=2)
    assert (decided.rejected, decided.streak, decided.rho) == (False, 0, 0)
    same(average(made(1.0), factors, decided.rho), made(ratio))


@each_form
def test_zero_is_not_far_from_anything(block, made):
    for f_bar, f in [(made(0.0), made(1e20)), (made(1e20), made(0.0)), (made(0.0), made(0.0))]:
        factors, decided = screened(block, f_bar, f)
        same(factors, f)
        assert not decided.rejected


@each_form
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_traces_are_finite_only_if_the_statistics_are(block, made, value):
    assert np.isfinite(traces(block, made(1.0))).all()
    assert not np.isfinite(traces(block, made(value))).all()


def test_one_entry_of_the_diagonal_is_enough():
    a, g = pair(1.0, 1.0)
    assert not np.isfinite(traces(Kronecker(), (a, g.at[1, 1].set(np.nan)))).all()


GRADIENTS = {name: FORMS[name] for name in ("G", "stacked G", "diagonal", "dense")}


@pytest.mark.parametrize(("block", "made"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_below_the_damping_are_not_far_from_each_other(block, made):
    """As of a network that is sure of itself, with and without a surprise among its labels."""
    for f_bar, f in [(1e-9, 0.1), (0.1, 1e-9), (1e-12, 1e2)]:
        assert screened(block, made(f_bar), made(f))[1].streak
        assert not screened(block, made(f_bar), made(f), damping=0.01)[1].streak


@each_form
def test_above_the_damping_what_is_far_is_far(block, made):
    for f_bar, f in [(1e-9, 1e9), (1e9, 1e-9), (1.0, 1e7), (1e7, 1.0)]:
        decided = screened(block, made(f_bar), made(f), damping=0.01)[1]
        assert decided.streak
        assert decided.rejected == (f > f_bar)


@pytest.mark.parametrize("name", ["A", "diagonal A"])
def test_inputs_have_a_scale_whatever_the_damping(name):
    block, made = FORMS[name]
    for f_bar, f in [(1e-9, 0.1), (0.1, 1e-9)]:
        assert screened(block, made(f_bar), made(f), damping=0.01)[1].streak


@pytest.mark.parametrize("inputs", [1e-4, 1.0, 1e4])
def test_the_damping_of_a_product_is_shared_with_its_inputs(inputs):
    """Far is what makes the damped product a million times larger."""
    gamma = 0.01
    limit = (1e6 * (gamma + inputs * 1e-9) - gamma) / inputs
    for factor, rejected in [(0.9, False), (1.1, True)]:
        new = pair(inputs, factor * limit)
        decided = screened(Kronecker(), pair(inputs, 1e-9), new, damping=gamma)[1]
        assert decided.rejected == rejected


def test_a_layer_is_far_if_either_side_is():
    """The product of the two traces is where it was, and is not what counts."""
    _, decided = screened(Kronecker(), pair(1.0, 1.0), pair(1e8, 1e-8))
    assert decided.rejected
