import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

from kldwrm_jax.experiments.banded_convolution import banded_convolution, max_pool


@pytest.mark.parametrize("shape", [(2, 12, 28, 3), (3, 9, 11, 1), (2, 6, 12, 2)])
def test_convolution_and_pooling_are_those_of_flax_gradients_and_odd_sizes_included(shape):
    def sum_of(x, kernel, by_flax, weights):
        conv = nn.Conv(
            4,
            (4, 3),
            padding="VALID",
            use_bias=False,
            conv_general_dilated=None if by_flax else banded_convolution,
        )
        out = conv.apply({"params": {"kernel": kernel}}, x)
        pooled = nn.max_pool(out, (2, 2), strides=(2, 2)) if by_flax else max_pool(out)
        return (weights * pooled).sum(), pooled

    def small_integers(seed, shape):  # many ties, and exact sums
        return jax.random.randint(jax.random.key(seed), shape, -1, 2).astype(float)

    x, kernel = small_integers(0, shape), small_integers(1, (4, 3, shape[-1], 4))
    weights = small_integers(2, (shape[0], (shape[1] - 3) // 2, (shape[2] - 2) // 2, 4))
    compiled = small_nets.jit(jax.grad(sum_of, argnums=(0, 1), has_aux=True), static_argnums=2)
    ours, theirs = (compiled(x, kernel, by_flax, weights) for by_flax in (False, True))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("shape", [(2, 12, 28, 3), (3, 9, 11, 1), (2, 6, 12, 2)])
def test_a_banded_convolution_is_that_of_flax(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    own, banded = (
        nn.Conv(4, (4, 3), padding="VALID", conv_general_dilated=convolution)
        for convolution in (None, banded_convolution)
    )
    params = own.init(jax.random.key(1), x)
    np.testing.assert_allclose(banded.apply(params, x), own.apply(params, x), rtol=0, atol=1e-5)


def test_a_banded_convolution_refuses_what_it_cannot_do():
    x = jnp.zeros((1, 6, 6, 1))
    for wrong in ({"strides": 2, "padding": "VALID"}, {"padding": "SAME"}):
        conv = nn.Conv(2, (3, 3), conv_general_dilated=banded_convolution, **wrong)
        with pytest.raises(ValueError, match="window_strides"):
            conv.init(jax.random.key(0), x)
