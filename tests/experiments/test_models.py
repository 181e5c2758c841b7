import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.experiments import models
from kldwrm_jax.experiments.errors import UsageError


def flat_images(batch=6, side=28):
    """Images with a background: windows there are full of equals."""
    x = jax.random.normal(jax.random.key(0), (batch, side, side, 1))
    inner = jnp.zeros((side, side, 1)).at[side // 4 : -side // 4, side // 4 : -side // 4].set(1)
    return x * inner - 0.4


class Plain(nn.Module):
    """The paper's network in Flax's own layers."""

    @nn.compact
    def __call__(self, x, train=False):
        for features in (5, 7):
            x = nn.Conv(features, (5, 5), padding="VALID")(x)
            x = nn.relu(nn.max_pool(x, (2, 2), strides=(2, 2)))
        x = nn.relu(nn.Dense(30)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(10)(x)


@pytest.fixture(scope="module")
def fast():
    model = models.build("paper-cnn", (28, 28, 1), 10)
    return model, small_nets.jit(model.init)(jax.random.key(1), flat_images())["params"]


def test_the_papers_network_has_4712_parameters(fast):
    assert sum(p.size for p in jax.tree.leaves(fast[1])) == 4712


def test_its_weights_start_within_the_bounds_of_the_papers(fast):
    for layer, fan_in in {"Conv_0": 25, "Conv_1": 125, "Dense_0": 112, "Dense_1": 30}.items():
        for kind in ("kernel", "bias"):
            values = np.abs(fast[1][layer][kind])
            assert values.max() <= fan_in**-0.5
            assert values.max() > 0.5 * fan_in**-0.5


@pytest.mark.usefixtures("x64")
def test_the_fast_network_is_the_plain_one_curvature_and_dropout_included(fast):
    """Loss, gradient and factors; where pooled entries are equal, too."""
    model, params = fast
    params = jax.tree.map(lambda p: jnp.asarray(p, float), params)
    x, y = jnp.asarray(flat_images(), float), jnp.arange(6)

    def everything(model, params, x, y):
        net = kw.instrument(
            model, kw.Categorical(), x, train=True, fisher="empirical", bias="separate"
        )
        loss, grads, oracle = net.value_and_grad(
            params, x, train=True, targets=y, rngs={"dropout": jax.random.key(2)}
        )
        return loss, grads, oracle.factors()

    compiled = small_nets.jit(everything, static_argnums=0)
    ours, plain = compiled(model, params, x, y), compiled(Plain(), params, x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, plain)


@pytest.mark.parametrize("shape", [(2, 12, 28, 3), (3, 9, 11, 1), (2, 6, 12, 2)])
def test_convolution_and_pooling_are_those_of_flax_gradients_and_odd_sizes_included(shape):
    def sum_of(x, kernel, by_flax, weights):
        conv = nn.Conv(
            4,
            (4, 3),
            padding="VALID",
            use_bias=False,
            conv_general_dilated=None if by_flax else models.convolution_to_pool,
        )
        out = conv.apply({"params": {"kernel": kernel}}, x)
        pooled = nn.max_pool(out, (2, 2), strides=(2, 2)) if by_flax else models.max_pool(out)
        return (weights * pooled).sum(), pooled

    def small_integers(seed, shape):  # many equals, and exact sums
        return jax.random.randint(jax.random.key(seed), shape, -1, 2).astype(float)

    x, kernel = small_integers(0, shape), small_integers(1, (4, 3, shape[-1], 4))
    weights = small_integers(2, (shape[0], (shape[1] - 3) // 2, (shape[2] - 2) // 2, 4))
    compiled = small_nets.jit(jax.grad(sum_of, argnums=(0, 1), has_aux=True), static_argnums=2)
    ours, theirs = (compiled(x, kernel, by_flax, weights) for by_flax in (False, True))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("shape", [(2, 12, 28, 3), (3, 9, 11, 1), (2, 6, 12, 2)])
def test_a_tiled_convolution_is_that_of_flax(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    own, tiled = (
        nn.Conv(4, (4, 3), padding="VALID", conv_general_dilated=convolution)
        for convolution in (None, models.tiled_convolution)
    )
    params = own.init(jax.random.key(1), x)
    np.testing.assert_allclose(tiled.apply(params, x), own.apply(params, x), rtol=0, atol=1e-5)


def test_a_tiled_convolution_refuses_what_it_cannot_do():
    x = jnp.zeros((1, 6, 6, 1))
    for wrong in ({"strides": 2, "padding": "VALID"}, {"padding": "SAME"}):
        conv = nn.Conv(2, (3, 3), conv_general_dilated=models.tiled_convolution, **wrong)
        with pytest.raises(ValueError, match="window_strides"):
            conv.init(jax.random.key(0), x)


@pytest.mark.parametrize(("name", "shape"), [("cnn", (8, 8, 1)), ("mlp", (5,)), ("mlp", (4, 4, 2))])
def test_every_layer_of_the_other_networks_has_a_kronecker_block(name, shape):
    model = models.build(name, shape, 3)
    net = kw.instrument(model, kw.Categorical(), jnp.zeros((2, *shape)), uncovered="error")
    kinds = {line.kind for line in net.layers}
    assert kinds <= {"Conv", "Dense"}


def test_a_network_that_does_not_fit_the_images_is_refused():
    with pytest.raises(UsageError, match="16 x 16"):
        models.build("paper-cnn", (8, 8, 1), 10)
    with pytest.raises(UsageError, match="mlp"):
        models.build("cnn", (12,), 10)


def test_an_unknown_name_gets_the_list():
    with pytest.raises(UsageError, match="paper-cnn, cnn, mlp"):
        models.build("resnet", (8, 8, 1), 10)
