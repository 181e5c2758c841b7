"""Statistics as cotangents of probes, against sums written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import precision
import pytest

from kldwrm_jax.capture.observe import observe
from kldwrm_jax.capture.statistics import Lookup, MatrixProduct, Normalization

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def product():
    def make(rows=3, columns=2, **changes):
        plain = MatrixProduct(rows, columns, None, "joint", False, False, reduce=False)
        return dataclasses.replace(plain, **changes)

    return make


def zeros(observation):
    return {name: jnp.zeros(shape) for name, shape in observation.probes.items()}


def collect(observation, a, g, weights=None, statistic=None):
    """What the probes of ``observation`` get when ``g`` is the cotangent of a layer's output."""
    statistic = statistic or observation.statistic
    z = jnp.zeros_like(g)
    _, vjp = jax.vjp(lambda p: observe(statistic, z, a, p, weights), zeros(observation))
    return vjp(g)[0]


def moment(rows, weights=None):
    rows = np.reshape(rows, (-1, np.shape(rows)[-1]))
    weights = np.ones(len(rows)) if weights is None else np.reshape(weights, -1)
    return sum(w * np.outer(r, r) for w, r in zip(weights, rows, strict=True))


def with_ones(a):
    return np.concatenate([a, np.ones((*a.shape[:-1], 1))], axis=-1)


def test_observe_is_the_identity_and_so_is_its_gradient(rng, product):
    z, a, g = rng.normal(size=(4, 2)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    observation = product()
    out, vjp = jax.vjp(lambda z: observe(observation.statistic, z, a, zeros(observation), None), z)
    np.testing.assert_array_equal(out, z)
    np.testing.assert_array_equal(vjp(jnp.asarray(g))[0], g)


def test_factors_are_a_mean_of_inputs_and_a_sum_of_gradients(rng, product):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    observation = product()
    (got,) = observation.factors(collect(observation, a, g)).values()
    np.testing.assert_allclose(got[0], moment(with_ones(a)) / 20, rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g), rtol=1e-12)


@pytest.mark.parametrize("a_diagonal", [False, True])
@pytest.mark.parametrize("g_diagonal", [False, True])
def test_diagonal_sides_are_the_diagonals_of_full_ones(rng, product, a_diagonal, g_diagonal):
    a, g = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    w = rng.uniform(size=6)
    observation = product(bias="separate", a_diagonal=a_diagonal, g_diagonal=g_diagonal)
    made = observation.factors(collect(observation, a, g, w))
    full = moment(a, w) / w.sum()
    np.testing.assert_allclose(made["kernel"][0], np.diag(full) if a_diagonal else full, rtol=1e-12)
    np.testing.assert_allclose(
        made["kernel"][1], np.diag(moment(g)) if g_diagonal else moment(g), rtol=1e-12
    )
    for part, shapes in observation.shapes.items():
        assert tuple(x.shape for x in made[part]) == shapes


@pytest.mark.parametrize("tokens", [False, True], ids=["examples", "tokens"])
def test_reduced_rows_are_weighted_averages(rng, product, tokens):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    w = rng.uniform(size=(4, 5)) if tokens else rng.uniform(size=4)
    w_rows = w if tokens else np.repeat(w[:, None], 5, axis=1)
    observation = product(reduce=True)
    (got,) = observation.factors(collect(observation, a, g, w)).values()
    total = w_rows.sum(axis=1)
    mean = (a * w_rows[..., None]).sum(axis=1) / total[:, None]
    np.testing.assert_allclose(got[0], moment(with_ones(mean), total) / total.sum(), rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g.sum(axis=1)), rtol=1e-12)


def test_groups_are_products_side_by_side(rng, product):
    a, g, w = rng.normal(size=(4, 5, 2, 3)), rng.normal(size=(4, 5, 2, 2)), rng.uniform(size=4)
    for reduce in (False, True):
        grouped = product(groups=2, reduce=reduce)
        (got,) = grouped.factors(collect(grouped, a, g, w)).values()
        single = product(reduce=reduce)
        for k in range(2):
            (one,) = single.factors(collect(single, a[:, :, k], g[:, :, k], w)).values()
            np.testing.assert_allclose(got[0][k], one[0], rtol=1e-12)
            np.testing.assert_allclose(got[1][k], one[1], rtol=1e-12)


@pytest.mark.parametrize("reduce", [False, True])
def test_a_bias_alone_has_the_second_moment_of_summed_gradients(rng, product, reduce):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    observation = product(bias="separate", reduce=reduce)
    made = observation.factors(collect(observation, a, g))
    np.testing.assert_array_equal(made["bias"][0], [[1.0]])
    np.testing.assert_allclose(made["bias"][1], moment(g.sum(axis=1)), rtol=1e-12)


WEIGHTS = {
    "examples": ((4,), (4, 5), lambda w: np.repeat(w[:, None], 5, axis=1)),
    "tokens": ((4, 5), (4, 5), lambda w: w),
    "tokens and places": ((4, 5), (4, 5, 2), lambda w: np.repeat(w[..., None], 2, axis=-1)),
    "merged": ((4, 5), (20,), lambda w: w.reshape(-1)),
    "tokens of an example": ((4, 5), (4,), lambda w: w.sum(axis=1)),
    "tokens, other places": ((4, 5), (4, 3), lambda w: np.repeat(w.sum(axis=1)[:, None], 3, 1)),
}


@pytest.mark.parametrize(("shape", "rows", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_rows_have_the_weights_of_their_samples(rng, product, shape, rows, expected):
    w, a, g = rng.uniform(size=shape), rng.normal(size=(*rows, 3)), rng.normal(size=(*rows, 2))
    observation = product(bias="none")
    (got,) = observation.factors(collect(observation, a, g, w)).values()
    w_rows = expected(w)
    np.testing.assert_allclose(got[0], moment(a, w_rows) / w_rows.sum(), rtol=1e-12)


def test_weights_that_fit_no_row_are_an_error(rng, product):
    with pytest.raises(ValueError, match=r"weights of shape \(4,\).*rows of shape \(5, 4\)"):
        collect(product(), rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 2)), np.ones(4))


def test_a_layer_that_saw_no_rows_has_zero_factors(product):
    observation = product()
    (got,) = observation.factors(zeros(observation)).values()
    assert not any(x.any() for x in got)


def test_calls_under_scan_and_vmap_sum(rng, product):
    a, g = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 2))
    observation = product()

    def step(p, rows):
        return observe(observation.statistic, rows[:, :2], rows, p, None)

    def scanned(p):
        return jax.lax.scan(lambda carry, rows: (carry, step(p, rows)), None, a)[1]

    def mapped(p):
        return jax.vmap(lambda rows: step(p, rows))(a)

    (expected,) = observation.factors(
        collect(observation, a.reshape(20, 3), g.reshape(20, 2))
    ).values()
    for run in (scanned, mapped):
        _, vjp = jax.vjp(run, zeros(observation))
        (got,) = observation.factors(vjp(jnp.asarray(g))[0]).values()
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


def test_a_vmap_over_cotangents_counts_inputs_once_for_each(rng, product):
    a, g = rng.normal(size=(4, 3)), rng.normal(size=(6, 4, 2))
    observation = product()
    z = jnp.zeros((4, 2))
    _, vjp = jax.vjp(lambda p: observe(observation.statistic, z, a, p, None), zeros(observation))
    seen = jax.tree.map(lambda x: x.sum(axis=0), jax.vmap(lambda c: vjp(c)[0])(jnp.asarray(g)))
    (got,) = observation.factors(seen).values()
    np.testing.assert_allclose(got[0], moment(with_ones(a)) / 4, rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g), rtol=1e-12)


def test_bfloat16_operands_are_summed_in_full(product):
    with precision.x64(False):
        a = jnp.ones((3000, 3), jnp.bfloat16)
        observation = product(bias="none")
        seen = collect(observation, a, jnp.ones((3000, 2), jnp.bfloat16))
        assert {x.dtype for x in seen.values()} == {jnp.dtype("float32")}
        np.testing.assert_array_equal(seen["A"], np.full((3, 3), 3000))
        np.testing.assert_array_equal(seen["G"], np.full((2, 2), 3000))


@pytest.mark.parametrize("g_diagonal", [False, True])
def test_lookup_counts_tokens(rng, g_diagonal):
    tokens, g = np.array([[0, 3], [3, 3], [1, 0]]), rng.normal(size=(3, 2, 2))
    w = rng.uniform(size=3)
    observation = Lookup(5, 2, g_diagonal, attends=False)
    (got,) = observation.factors(collect(observation, tokens, g, w)).values()
    hot = np.eye(5)[tokens]
    expected = moment(hot, np.repeat(w[:, None], 2, axis=1)) / (2 * w.sum())
    np.testing.assert_allclose(got[0], np.diag(expected), rtol=1e-12)
    full = moment(g)
    np.testing.assert_allclose(got[1], np.diag(full) if g_diagonal else full, rtol=1e-12)


@pytest.mark.parametrize("g_diagonal", [False, True])
def test_a_table_used_both_ways_keeps_both_partial_traces(rng, g_diagonal):
    observation = Lookup(4, 3, g_diagonal, attends=True)
    tokens, g = np.array([0, 3, 3]), rng.normal(size=(3, 3))
    query, h = rng.normal(size=(2, 3)), rng.normal(size=(2, 4))
    seen = jax.tree.map(
        lambda x, y: x + y,
        collect(observation, tokens, g),
        collect(observation, query, h, statistic=observation.attend_statistic),
    )
    ((a, side),) = observation.factors(seen).values()
    keep = (lambda m: np.diag(np.diag(m))) if g_diagonal else (lambda m: m)
    total = np.kron(np.diag([1 / 3, 0, 0, 2 / 3]), keep(moment(g)))
    total += np.kron(np.diag(np.diag(moment(h))), keep(moment(query) / 2))
    total = total.reshape(4, 3, 4, 3)
    side = np.diag(side) if g_diagonal else side
    np.testing.assert_allclose(a * np.trace(side), np.einsum("iaia->i", total), rtol=1e-12)
    np.testing.assert_allclose(side * a.sum(), np.einsum("iaib->ab", total), rtol=1e-12)


def test_an_unused_table_is_zero_and_finite():
    observation = Lookup(4, 3, False, attends=True)
    (got,) = observation.factors(zeros(observation)).values()
    assert not any(x.any() for x in got)


def test_normalisations_sum_squares_over_examples(rng):
    x, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 3))
    observation = Normalization((-1,), (("scale", (3,)), ("bias", (3,))))
    got = observation.factors(collect(observation, x, g))
    np.testing.assert_allclose(got["scale"][0], ((x * g).sum(axis=1) ** 2).sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(got["bias"][0], (g.sum(axis=1) ** 2).sum(axis=0), rtol=1e-12)


def test_a_normalisation_of_one_example_has_no_axis_to_sum(rng):
    x, g = rng.normal(size=3), rng.normal(size=3)
    observation = Normalization((-1,), (("scale", (3,)),))
    got = observation.factors(collect(observation, x, g))
    np.testing.assert_allclose(got["scale"][0], (x * g) ** 2, rtol=1e-12)
