"""The collecting primitive under every transformation, against sums written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.collecting import collect, factors, moment, observed, product, with_ones, zeros

pytestmark = pytest.mark.usefixtures("x64")


def test_observe_is_the_identity_and_so_is_its_gradient(rng):
    z, a, g = rng.normal(size=(4, 2)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    spec = product()
    out, vjp = jax.vjp(lambda z: observed(spec, z, a, zeros(spec)), z)
    np.testing.assert_array_equal(out, z)
    np.testing.assert_array_equal(vjp(jnp.asarray(g))[0], g)


def test_calls_under_scan_and_vmap_sum(rng):
    a, g = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 2))
    spec = product()

    def step(p, rows):
        return observed(spec, rows[:, :2], rows, p)

    def scanned(p):
        return jax.lax.scan(lambda carry, rows: (carry, step(p, rows)), None, a)[1]

    def mapped(p):
        return jax.vmap(lambda rows: step(p, rows))(a)

    (expected,) = factors(spec, collect(spec, a.reshape(20, 3), g.reshape(20, 2))).values()
    for run in (scanned, mapped):
        _, vjp = jax.vjp(run, zeros(spec))
        (got,) = factors(spec, vjp(jnp.asarray(g))[0]).values()
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


def test_a_vmap_over_cotangents_counts_inputs_once_for_each(rng):
    a, g = rng.normal(size=(4, 3)), rng.normal(size=(6, 4, 2))
    spec = product()
    z = jnp.zeros((4, 2))
    _, vjp = jax.vjp(lambda p: observed(spec, z, a, p), zeros(spec))
    seen = jax.tree.map(lambda x: x.sum(axis=0), jax.vmap(lambda c: vjp(c)[0])(jnp.asarray(g)))
    (got,) = factors(spec, seen).values()
    np.testing.assert_allclose(got[0], moment(with_ones(a)) / 4, rtol=1e-12)
    np.testing.assert_allclose(got[1], moment(g), rtol=1e-12)


def test_copies_with_their_own_probes_have_their_own_statistics(rng):
    """A vmap over layers and, within it, over examples."""
    a, g, w = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 5, 2)), rng.uniform(size=5)
    spec = product(inputs=4)
    probes = jax.tree.map(lambda x: jnp.stack([x] * 3), zeros(spec))

    def copies(p):
        def one_layer(p, a):
            return jax.vmap(lambda row: observed(spec, row[:2], row, p, w))(a)

        return jax.vmap(one_layer)(p, jnp.asarray(a))

    _, vjp = jax.vjp(copies, probes)
    got = vjp(jnp.asarray(g))[0]
    for i in range(3):
        expected = collect(spec, a[i], g[i], w)
        for name, x in expected.items():
            np.testing.assert_allclose(got[name][i], x, rtol=1e-12, err_msg=name)


def test_weights_that_a_vmap_maps_are_an_error(rng):
    spec, a, w = product(), jnp.asarray(rng.normal(size=(5, 3))), jnp.ones(5)
    with pytest.raises(ValueError, match="weights are mapped by a vmap"):
        jax.vmap(lambda row, w: observed(spec, row[:2], row, zeros(spec), w[None]))(a, w)


def test_probes_that_are_cast_are_an_error():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), zeros(product()))
    with pytest.raises(ValueError, match=r"cast to bfloat16.*kernel\.astype"):
        observed(product(), jnp.ones((4, 2)), jnp.ones((4, 3)), half)


def test_forward_derivatives_pass_through(rng):
    spec, z, dz = product(), rng.normal(size=(4, 2)), rng.normal(size=(4, 2))
    a = rng.normal(size=(4, 3))
    out, tangent = jax.jvp(lambda z: observed(spec, z, a, zeros(spec)), (z,), (dz,))
    np.testing.assert_array_equal(out, z)
    np.testing.assert_array_equal(tangent, dz)


def test_statistics_that_are_not_asked_for_are_not_computed(rng):
    spec, z, a = product(), rng.normal(size=(4, 2)), rng.normal(size=(4, 3))
    program = jax.make_jaxpr(jax.grad(lambda z: observed(spec, z, a, zeros(spec)).sum()))(z)
    assert "dot_general" not in str(program)
