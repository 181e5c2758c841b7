"""Each kind of layer: its statistics, as cotangents of probes, against sums written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import precision
import pytest
from capture.collecting import collect, factors, moment, product, with_ones, zeros

from kldwrm_jax.capture.layer_call import (
    Operands,
    Options,
    embedding,
    normalization,
)
from kldwrm_jax.curvature import Kronecker

pytestmark = pytest.mark.usefixtures("x64")


def table(vocabulary, features, g_diagonal=False, attends=False):
    options = Options(max_factor=features - g_diagonal)
    operands = Operands("Embed", None, {"embedding": (vocabulary, features)}, options)
    return embedding(operands, attends=attends).spec


def norm(*names):
    shapes = dict.fromkeys(names, (3,))
    operands = Operands("Norm", np.zeros((4, 5, 3)), shapes, Options())
    return normalization(operands, (-1,), None).spec


def test_factors_are_a_mean_of_inputs_and_a_sum_of_gradients(rng):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    spec = product()
    (got,) = factors(spec, collect(spec, a, g)).values()
    np.testing.assert_allclose(got[0], moment(with_ones(a)) / 20, rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g), rtol=1e-12)


@pytest.mark.parametrize("a_diagonal", [False, True])
@pytest.mark.parametrize("g_diagonal", [False, True])
def test_diagonal_sides_are_the_diagonals_of_full_ones(rng, a_diagonal, g_diagonal):
    n, m = (3, 2) if a_diagonal else (2, 3)
    a, g = rng.normal(size=(6, n)), rng.normal(size=(6, m))
    w = rng.uniform(size=6)
    largest = {(False, False): 3, (True, True): 1}.get((a_diagonal, g_diagonal), 2)
    spec = product(n, m, bias="separate", max_factor=largest)
    assert spec.blocks[0].block == Kronecker(a_diagonal, g_diagonal)
    made = factors(spec, collect(spec, a, g, w))
    full = moment(a, w) / w.sum()
    np.testing.assert_allclose(made["kernel"][0], np.diag(full) if a_diagonal else full, rtol=1e-12)
    np.testing.assert_allclose(
        made["kernel"][1], np.diag(moment(g)) if g_diagonal else moment(g), rtol=1e-12
    )
    for block in spec.blocks:
        assert tuple(x.shape for x in made[block.name]) == block.shapes


@pytest.mark.parametrize("tokens", [False, True], ids=["examples", "tokens"])
def test_reduced_rows_are_weighted_averages(rng, tokens):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    w = rng.uniform(size=(4, 5)) if tokens else rng.uniform(size=4)
    w_rows = w if tokens else np.repeat(w[:, None], 5, axis=1)
    spec = product(sharing="reduce")
    (got,) = factors(spec, collect(spec, a, g, w)).values()
    total = w_rows.sum(axis=1)
    mean = (a * w_rows[..., None]).sum(axis=1) / total[:, None]
    np.testing.assert_allclose(got[0], moment(with_ones(mean), total) / total.sum(), rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g.sum(axis=1)), rtol=1e-12)


def test_groups_are_products_side_by_side(rng):
    a, g, w = rng.normal(size=(4, 5, 2, 3)), rng.normal(size=(4, 5, 2, 2)), rng.uniform(size=4)
    for sharing in ("expand", "reduce"):
        grouped = product(groups=2, sharing=sharing)
        (got,) = factors(grouped, collect(grouped, a, g, w)).values()
        single = product(sharing=sharing)
        for k in range(2):
            (one,) = factors(single, collect(single, a[:, :, k], g[:, :, k], w)).values()
            np.testing.assert_allclose(got[0][k], one[0], rtol=1e-12)
            np.testing.assert_allclose(got[1][k], one[1], rtol=1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_bias_alone_has_the_second_moment_of_summed_gradients(rng, sharing):
    a, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    spec = product(bias="separate", sharing=sharing)
    made = factors(spec, collect(spec, a, g))
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
def test_rows_have_the_weights_of_their_samples(rng, shape, rows, expected):
    w, a, g = rng.uniform(size=shape), rng.normal(size=(*rows, 3)), rng.normal(size=(*rows, 2))
    spec = product(biased=False)
    (got,) = factors(spec, collect(spec, a, g, w)).values()
    w_rows = expected(w)
    np.testing.assert_allclose(got[0], moment(a, w_rows) / w_rows.sum(), rtol=1e-12)


def test_weights_that_fit_no_row_are_an_error(rng):
    with pytest.raises(ValueError, match=r"weights of shape \(4,\).*rows of shape \(5, 4\)"):
        collect(product(), rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 2)), np.ones(4))


def test_a_layer_that_saw_no_rows_has_zero_factors():
    spec = product()
    (got,) = factors(spec, zeros(spec)).values()
    assert not any(x.any() for x in got)


def test_bfloat16_operands_are_summed_in_full():
    with precision.x64(False):
        a = jnp.ones((3000, 3), jnp.bfloat16)
        spec = product(biased=False)
        seen = collect(spec, a, jnp.ones((3000, 2), jnp.bfloat16))
        assert {x.dtype for x in seen.values()} == {jnp.dtype("float32")}
        np.testing.assert_array_equal(seen["A"], np.full((3, 3), 3000))
        np.testing.assert_array_equal(seen["G"], np.full((2, 2), 3000))


@pytest.mark.parametrize("g_diagonal", [False, True])
def test_lookup_counts_tokens(rng, g_diagonal):
    tokens, g = np.array([[0, 3], [3, 3], [1, 0]]), rng.normal(size=(3, 2, 2))
    w = rng.uniform(size=3)
    spec = table(5, 2, g_diagonal)
    (got,) = factors(spec, collect(spec, tokens, g, w)).values()
    hot = np.eye(5)[tokens]
    expected = moment(hot, np.repeat(w[:, None], 2, axis=1)) / (2 * w.sum())
    np.testing.assert_allclose(got[0], np.diag(expected), rtol=1e-12)
    full = moment(g)
    np.testing.assert_allclose(got[1], np.diag(full) if g_diagonal else full, rtol=1e-12)


@pytest.mark.parametrize("g_diagonal", [False, True])
def test_a_table_used_both_ways_keeps_both_partial_traces(rng, g_diagonal):
    spec = table(4, 3, g_diagonal, attends=True)
    tokens, g = np.array([0, 3, 3]), rng.normal(size=(3, 3))
    query, h = rng.normal(size=(2, 3)), rng.normal(size=(2, 4))
    seen = jax.tree.map(
        lambda x, y: x + y,
        collect(spec, tokens, g),
        collect(spec, query, h, statistic=spec.attend_statistic),
    )
    ((a, side),) = factors(spec, seen).values()
    keep = (lambda m: np.diag(np.diag(m))) if g_diagonal else (lambda m: m)
    total = np.kron(np.diag([1 / 3, 0, 0, 2 / 3]), keep(moment(g)))
    total += np.kron(np.diag(np.diag(moment(h))), keep(moment(query) / 2))
    total = total.reshape(4, 3, 4, 3)
    side = np.diag(side) if g_diagonal else side
    np.testing.assert_allclose(a * np.trace(side), np.einsum("iaia->i", total), rtol=1e-12)
    np.testing.assert_allclose(side * a.sum(), np.einsum("iaib->ab", total), rtol=1e-12)


def test_an_unused_table_is_zero_and_finite():
    spec = table(4, 3, attends=True)
    (got,) = factors(spec, zeros(spec)).values()
    assert not any(x.any() for x in got)


def test_normalisations_sum_squares_over_examples(rng):
    x, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 3))
    spec = norm("scale", "bias")
    got = factors(spec, collect(spec, x, g))
    np.testing.assert_allclose(got["scale"][0], ((x * g).sum(axis=1) ** 2).sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(got["bias"][0], (g.sum(axis=1) ** 2).sum(axis=0), rtol=1e-12)


def test_a_normalisation_of_one_example_has_no_axis_to_sum(rng):
    x, g = rng.normal(size=3), rng.normal(size=3)
    spec = norm("scale")
    got = factors(spec, collect(spec, x, g))
    np.testing.assert_allclose(got["scale"][0], (x * g) ** 2, rtol=1e-12)
