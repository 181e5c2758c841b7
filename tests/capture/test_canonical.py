"""Convolutions in the canonical layout: the same results, from another program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.capture.canonical import canonical_convolutions

CASES = {  # x, kernel, dimension numbers, other arguments
    "strided": ((2, 9, 8, 4), (3, 3, 4, 6), "NHWC", {"window_strides": (2, 1), "padding": "SAME"}),
    "dilated": ((2, 9, 8, 4), (3, 2, 4, 6), "NHWC", {"padding": "VALID", "rhs_dilation": (2, 1)}),
    "grouped": ((2, 6, 6, 4), (3, 3, 2, 6), "NHWC", {"padding": "SAME", "feature_group_count": 2}),
    "channels first": ((2, 4, 9, 8), (6, 4, 3, 3), "NCHW", {"padding": "SAME"}),
    "one-dimensional": ((3, 11, 2), (4, 2, 5), "NWC", {"padding": [(2, 0)]}),
}
KERNELS = {"NHWC": "HWIO", "NCHW": "OIHW", "NWC": "WIO"}
each_case = pytest.mark.parametrize("case", CASES)


def backward(case, rng):
    """From a convolution's cotangent to that of its inputs; an example of the cotangent."""
    x, kernel, layout, settings = CASES[case]
    x, kernel = jnp.asarray(rng.normal(size=x)), jnp.asarray(rng.normal(size=kernel))
    settings = {"window_strides": (1,) * (x.ndim - 2)} | settings
    numbers = (layout, KERNELS[layout], layout)

    @jax.jit
    def convolve(x):
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **settings)

    z, vjp = jax.vjp(lambda x: jnp.tanh(convolve(x)), x)
    return vjp, jnp.asarray(rng.normal(size=z.shape))


def assert_close(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-10, atol=1e-12)


@each_case
def test_results_are_the_same(case, rng, x64):
    vjp, g = backward(case, rng)
    expected, got = vjp(g), jax.jit(canonical_convolutions(vjp))(g)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, expected
    )


def layouts(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation.params["dimension_numbers"]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value if hasattr(value, "eqns") else None)
            if inner is not None:
                yield from layouts(inner)


@each_case
def test_channels_come_last_and_a_kernels_inputs_before_its_outputs(case, rng, x64):
    vjp, g = backward(case, rng)
    n = g.ndim
    images, kernels = (0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2))
    plain = [*layouts(jax.make_jaxpr(vjp)(g).jaxpr)]
    written = [*layouts(jax.make_jaxpr(canonical_convolutions(vjp))(g).jaxpr)]
    assert len(plain) == len(written) == 1
    assert tuple(written[0]) == (images, kernels, images)
    assert tuple(plain[0]) != (images, kernels, images)


def test_a_function_without_convolutions_is_what_it_was(rng):
    x = jnp.asarray(rng.normal(size=(3, 4)))

    def function(x, scale):
        return {"sorted": jnp.sort(x, axis=0), "summed": jax.lax.cumsum(x) * scale}

    got = canonical_convolutions(function)(x, 2.0)
    jax.tree.map(np.testing.assert_array_equal, got, function(x, 2.0))


def test_it_can_be_mapped(rng, x64):
    vjp, g = backward("strided", rng)
    many = jnp.stack([g, 2 * g])
    got, expected = jax.vmap(canonical_convolutions(vjp))(many), jax.vmap(vjp)(many)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, expected
    )
