"""Dense blocks as algebra; what they are of a model is in capture/test_dense_structure.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature import Dense, Diagonal, Inverse, Kronecker, LayerBlock, Parameter
from kldwrm_jax.curvature.solvers import ProductDamping

pytestmark = pytest.mark.usefixtures("x64")

KERNEL, BIAS = Parameter("kernel", (3, 2)), Parameter("bias", (2,))
STACKED = (Parameter("kernel", (3, 4, 2), stack=(1,)), Parameter("bias", (2, 4), stack=(1,)))


def leaves(rng, parameters, rows=()):
    return {p.path: rng.normal(size=(*rows, *p.shape)) for p in parameters}


@pytest.mark.parametrize("parameters", [(KERNEL,), (KERNEL, BIAS), STACKED])
def test_what_is_gathered_is_scattered_again(rng, parameters):
    own = leaves(rng, parameters)
    v = Dense().gather(parameters, own)
    assert v.shape == (*parameters[0].stacked, sum(p.slice_size for p in parameters))
    jax.tree.map(np.testing.assert_array_equal, Dense().scatter(parameters, v), own)


def test_parameters_are_flattened_by_rows_one_after_another(rng):
    own = leaves(rng, (KERNEL, BIAS))
    wanted = np.concatenate([own["kernel"].ravel(), own["bias"]])
    np.testing.assert_array_equal(Dense().gather((KERNEL, BIAS), own), wanted)


def test_the_statistics_are_the_products_of_the_rows(rng):
    rows = leaves(rng, (KERNEL, BIAS), (5,))
    j = np.concatenate([rows["kernel"].reshape(5, -1), rows["bias"]], axis=1)
    f = Dense().statistics((KERNEL, BIAS), rows)
    np.testing.assert_allclose(f, j.T @ j, rtol=0, atol=1e-12)


def test_copies_of_a_stacked_layer_have_a_matrix_each(rng):
    rows = leaves(rng, STACKED, (5,))
    f = Dense().statistics(STACKED, rows)
    for i in range(4):
        parts = rows["kernel"][:, :, i].reshape(5, -1), rows["bias"][:, :, i]
        j = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(f[i], j.T @ j, rtol=0, atol=1e-12)


def test_the_fisher_of_a_sum_of_terms_is_the_sum(rng):
    f = list(rng.normal(size=(3, 4, 4)))
    np.testing.assert_allclose(Dense().sum_of_terms(f), sum(f), rtol=1e-14)


def of_width(block, width):
    return LayerBlock("own", "Dense", block, (Parameter("own", (width,)),), ((width, width),))


def test_however_wide_they_are_they_are_inverted_in_full():
    auto = Inverse()
    assert not auto.takes_average([of_width(Dense(), 5000)])
    wide = LayerBlock("own", "Dense", Kronecker(), (KERNEL,), ((5000, 5000), (2, 2)))
    assert auto.takes_average([wide])


def test_unless_leading_eigenvectors_are_asked_for(rng):
    m = rng.normal(size=(12, 3))
    f, v = jnp.asarray(m @ m.T + 0.1 * np.eye(12)), rng.normal(size=12)
    inverse, mode = Inverse(method="randomized", rank=4), ProductDamping()
    assert inverse.takes_average([of_width(Dense(), 12)])
    (cache,) = inverse.make(mode, [Dense()], [f], 0.2)
    got = mode.solve(Dense(), cache, v, 0.2)
    np.testing.assert_allclose(got, np.linalg.solve(f + 0.2 * np.eye(12), v), rtol=1e-9)


def test_only_dense_blocks_are_the_fisher_itself():
    assert Dense().is_whole
    assert not Diagonal().is_whole
    assert not Kronecker().is_whole
