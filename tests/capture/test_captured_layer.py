"""A captured layer: what it attaches beside its parameters, and what it makes of the cotangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kldwrm_jax as kw
from kldwrm_jax.capture.stack import Stack
from kldwrm_jax.capture.trace import PROBE

pytestmark = pytest.mark.usefixtures("x64")

X = np.ones((5, 4))
KERNELS = jnp.ones((3, 4, 4))


def captured(function, params, **options):
    (layer,) = kw.instrument(function, kw.Gaussian(), params, X, **options).model.captured
    return layer


@pytest.fixture
def stacked():
    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (kw.tag(w, x, x @ w), None), x, w)[0]

    return captured(scanned, KERNELS)


def test_probes_are_zeros_for_every_copy(stacked):
    assert stacked.stack == Stack(0, (3,))
    shapes = {name: x.shape for name, x in stacked.probes({}).items()}
    assert shapes == {
        f"{PROBE}A.2": (3, 4, 4),
        f"{PROBE}G.2": (3, 4, 4),
        f"{PROBE}count.0": (3, 1, 1),
    }
    assert not any(x.any() for x in stacked.probes({}).values())


def test_a_basis_asks_for_one_more_statistic_and_travels_with_the_stack(stacked):
    (block,) = stacked.blocks
    bases = {block.name: (jnp.stack([jnp.eye(4)] * 3), None)}
    assert stacked.probes(bases)[f"{PROBE}S.2"].shape == (3, 4, 4)
    weights = jnp.ones((5, 2))
    shapes = {name: x.shape for name, x in stacked.constants(weights, bases).items()}
    assert shapes == {
        "constant:weights.2": (3, 5, 2),
        "constant:U_A.2": (3, 4, 4),
        "constant:S.0": (3, 1, 1),
    }
    assert not stacked.constants(None, {"another": bases[block.name]})


def test_factors_are_made_of_the_cotangents_and_scaled(stacked):
    probes = {k: jnp.full(x.shape, 2.0) for k, x in stacked.probes({}).items()}
    ((a, g),) = stacked.factors(probes, 3.0).values()
    np.testing.assert_array_equal(a, np.ones((3, 4, 4)))  # the sum over the count
    np.testing.assert_array_equal(g, np.full((3, 4, 4), 6.0))


def test_a_layer_is_reached_if_it_counted_rows(stacked):
    zeros = stacked.probes({})
    assert not stacked.reached(zeros)
    assert stacked.reached(zeros | {f"{PROBE}count.0": jnp.ones((3, 1, 1))})


def test_a_diagonal_block_is_shaped_like_its_parameter():
    def scale(p, x):
        return kw.tag(p["scale"], x, x * p["scale"], layout="scale")

    layer = captured(scale, {"scale": jnp.ones(4)})
    probes = {k: jnp.full(x.shape, 2.0) for k, x in layer.probes({}).items()}
    (diagonal,) = layer.factors(probes, 3.0).values()
    np.testing.assert_array_equal(diagonal, np.full(4, 6.0))
    with pytest.raises(ValueError, match=r"bases\['scale'\] must be .*matrix product"):
        layer.probes({"scale": (None, None)})


@pytest.mark.parametrize("basis", [(np.eye(3), None), (None, np.eye(4), None), (np.eye(4),)])
def test_bases_of_other_shapes_are_an_error(basis):
    layer = captured(lambda w, x: kw.tag(w, x, x @ w), jnp.ones((4, 4)))
    with pytest.raises(ValueError, match=r"must be a pair .*\(\(4, 4\), \(4, 4\)\).*got shapes"):
        layer.probes({layer.name: basis})
