"""What is a million times too large is kept out; what is far three times in a row is believed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature import Dense, Diagonal, Kronecker, average, sift

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


def sifted(block, f_bar, f, strange=0, gamma=0.0):
    """Of one block, without the lists: what it is averaged with, and what ``sift`` says."""
    out = sift([block], [f_bar], [f], RHO, jnp.array([strange], jnp.int32), gamma)
    return out.factors[0], jax.tree.map(lambda x: np.asarray(x).item(), out._replace(factors=None))


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@each_form
@pytest.mark.parametrize("ratio", [1.0, 0.9e6, 1 / 0.9e6])
def test_what_is_less_than_a_million_times_off_is_averaged(block, made, ratio):
    factors, told = sifted(block, made(1.0), made(ratio), strange=2)
    same(factors, made(ratio))
    assert (told.kept_out, told.strange, told.finite) == (False, 0, True)
    assert told.rho == pytest.approx(RHO)


@each_form
@pytest.mark.parametrize("ratio", [1.1e6, 1e30])
def test_what_is_more_is_replaced_by_the_average_itself(block, made, ratio):
    for before in (0, 1):
        factors, told = sifted(block, made(1.0), made(ratio), strange=before)
        same(factors, made(1.0))
        assert (told.kept_out, told.strange, told.finite) == (True, before + 1, True)
        jax.tree.map(  # so that averaging it in changes nothing
            lambda new, old: np.testing.assert_allclose(new, old, rtol=1e-6),
            average(made(1.0), factors, told.rho),
            made(1.0),
        )


@each_form
@pytest.mark.parametrize("ratio", [1 / 1.1e6, 1e-30])
def test_what_is_less_is_averaged_but_remembered_as_strange(block, made, ratio):
    for before in (0, 1):
        factors, told = sifted(block, made(1.0), made(ratio), strange=before)
        same(factors, made(ratio))
        assert (told.kept_out, told.strange, told.finite) == (False, before + 1, True)
        assert told.rho == pytest.approx(RHO)


@each_form
@pytest.mark.parametrize("ratio", [1e12, 1e-12])
def test_the_third_time_in_a_row_the_average_begins_anew(block, made, ratio):
    factors, told = sifted(block, made(1.0), made(ratio), strange=2)
    assert (told.kept_out, told.strange, told.rho) == (False, 0, 0)
    same(average(made(1.0), factors, told.rho), made(ratio))


@each_form
def test_zero_is_not_far_from_anything(block, made):
    for f_bar, f in [(made(0.0), made(1e20)), (made(1e20), made(0.0)), (made(0.0), made(0.0))]:
        factors, told = sifted(block, f_bar, f)
        same(factors, f)
        assert not told.kept_out


@each_form
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_told(block, made, value):
    assert sifted(block, made(1.0), made(1.0))[1].finite
    assert not sifted(block, made(1.0), made(value))[1].finite


def test_one_entry_of_the_diagonal_is_enough_to_be_told():
    a, g = pair(1.0, 1.0)
    assert not sifted(Kronecker(), (a, g), (a, g.at[1, 1].set(np.nan)))[1].finite


GRADIENTS = {name: FORMS[name] for name in ("G", "stacked G", "diagonal", "dense")}


@pytest.mark.parametrize(("block", "made"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_below_the_damping_are_not_far_from_each_other(block, made):
    """As of a network that is sure of itself, with and without a surprise among its labels."""
    for f_bar, f in [(1e-9, 0.1), (0.1, 1e-9), (1e-12, 1e2)]:
        assert sifted(block, made(f_bar), made(f))[1].strange
        assert not sifted(block, made(f_bar), made(f), gamma=0.01)[1].strange


@each_form
def test_above_the_damping_what_is_far_is_far(block, made):
    for f_bar, f in [(1e-9, 1e9), (1e9, 1e-9), (1.0, 1e7), (1e7, 1.0)]:
        told = sifted(block, made(f_bar), made(f), gamma=0.01)[1]
        assert told.strange
        assert told.kept_out == (f > f_bar)


@pytest.mark.parametrize("name", ["A", "diagonal A"])
def test_inputs_have_a_scale_whatever_the_damping(name):
    block, made = FORMS[name]
    for f_bar, f in [(1e-9, 0.1), (0.1, 1e-9)]:
        assert sifted(block, made(f_bar), made(f), gamma=0.01)[1].strange


@pytest.mark.parametrize("inputs", [1e-4, 1.0, 1e4])
def test_the_damping_of_a_product_is_shared_with_its_inputs(inputs):
    """Far is what makes the damped product a million times larger."""
    gamma = 0.01
    limit = (1e6 * (gamma + inputs * 1e-9) - gamma) / inputs
    for factor, kept_out in [(0.9, False), (1.1, True)]:
        new = pair(inputs, factor * limit)
        told = sifted(Kronecker(), pair(inputs, 1e-9), new, gamma=gamma)[1]
        assert told.kept_out == kept_out


def test_blocks_are_judged_each_by_itself():
    blocks = [Diagonal(), Kronecker(), Diagonal()]
    f_bar = [jnp.ones(2), pair(1.0, 1.0), jnp.full(3, 1e20)]
    f = [jnp.full(2, 1e9), pair(2.0, 2.0), jnp.ones(3)]
    out = sift(blocks, f_bar, f, RHO, jnp.array([0, 1, 2], jnp.int32))
    assert out.kept_out.tolist() == [True, False, False]
    assert out.strange.tolist() == [1, 0, 0]
    np.testing.assert_allclose(out.rho, [RHO, RHO, 0])
    same(out.factors, [jnp.ones(2), pair(2.0, 2.0), jnp.ones(3)])


def test_a_layer_is_far_if_either_side_is():
    """The product of the two traces is where it was, and is not what counts."""
    _, told = sifted(Kronecker(), pair(1.0, 1.0), pair(1e8, 1e-8))
    assert told.kept_out
