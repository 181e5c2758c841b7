"""Sums over rows, against loops in numpy."""

import numpy as np
import pytest

from kldwrm_jax.curvature import statistics

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("diagonal", [False, True])
def test_second_moment_is_a_weighted_sum_of_outer_products(rng, diagonal):
    x, w = rng.normal(size=(5, 2, 3)), rng.uniform(size=5)
    got = statistics.second_moment(x, w, diagonal=diagonal)
    for group in range(2):
        full = sum(w[r] * np.outer(x[r, group], x[r, group]) for r in range(5))
        np.testing.assert_allclose(got[group], np.diag(full) if diagonal else full, rtol=1e-12)


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("groups", [(), (2,)])
def test_gradient_moment_squares_the_gradient_of_each_example(rng, places, groups):
    a, g = rng.normal(size=(5, places, *groups, 3)), rng.normal(size=(5, places, *groups, 2))
    gradients = np.einsum("nt...i,nt...j->n...ij", a, g)
    np.testing.assert_allclose(
        statistics.gradient_moment(a, g), (gradients**2).sum(axis=0), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("shape", "expected"), [((3,), (1, 1, 3)), ((5, 3), (5, 1, 3)), ((5, 2, 4, 3), (5, 8, 3))]
)
def test_examples_come_first_and_then_all_their_places(shape, expected):
    assert statistics.by_example(np.zeros(shape), 1).shape == expected


def test_half_precision_is_widened_and_double_is_kept():
    assert statistics.full_precision(np.zeros(2, np.float16)).dtype == np.float32
    assert statistics.full_precision(np.zeros(2, np.float64)).dtype == np.float64


def test_row_weights_are_none_without_weights():
    assert statistics.row_weights((4, 5), None) is None


def test_row_weights_are_summed_over_lost_axes_and_repeated_over_new_ones(rng):
    w = rng.uniform(size=(4, 5))
    np.testing.assert_allclose(statistics.row_weights((4,), w), w.sum(axis=1))
    new = statistics.row_weights((4, 5, 2), w)
    np.testing.assert_allclose(new, np.repeat(w[..., None], 2, axis=-1))


def test_a_mean_over_nothing_is_zero():
    got = statistics.mean(np.array([[4.0, 2.0], [0.0, 0.0]]), np.array([2.0, 0.0]))
    np.testing.assert_array_equal(got, [[2.0, 1.0], [0.0, 0.0]])


def test_places_are_averaged_by_their_weights(rng):
    a, w = rng.normal(size=(3, 4, 2)), rng.uniform(size=(3, 4))
    mean, total = statistics.average_places(a, w)
    np.testing.assert_allclose(total, w.sum(axis=1))
    expected = [np.average(a[n], axis=0, weights=w[n]) for n in range(3)]
    np.testing.assert_allclose(mean, expected, rtol=1e-12)
    np.testing.assert_allclose(statistics.average_places(a, None)[0], a.mean(axis=1))


@pytest.mark.parametrize("diagonal", [False, True])
def test_partial_traces_of_a_sum_of_products_are_kept(rng, diagonal):
    a1, a2 = rng.uniform(size=(2, 4))
    g1, g2 = (m @ m.T for m in rng.normal(size=(2, 3, 3)))
    if diagonal:
        g1, g2 = np.diag(g1), np.diag(g2)
    a, g = statistics.same_partial_traces((a1, g1), (a2, g2), (True, diagonal))
    trace = np.sum if diagonal else np.trace
    np.testing.assert_allclose(a * trace(g), a1 * trace(g1) + a2 * trace(g2), rtol=1e-12)
    np.testing.assert_allclose(a.sum() * g, a1.sum() * g1 + a2.sum() * g2, rtol=1e-12)
