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
    """Images with a background, whose pooling windows consist of equal entries."""
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
    """Loss, gradient and factors, also where pooled entries are equal."""
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


@pytest.mark.parametrize(("name", "shape"), [("cnn", (8, 8, 1)), ("mlp", (4, 4, 2))])
def test_every_layer_of_the_other_networks_has_a_kronecker_block(name, shape):
    model = models.build(name, shape, 3)
    net = kw.instrument(model, kw.Categorical(), jnp.zeros((2, *shape)), uncovered="error")
    kinds = {line.kind for line in net.layers}
    assert kinds <= {"Conv", "Dense"}


def test_a_network_that_is_too_large_for_the_images_is_refused():
    with pytest.raises(UsageError, match=r"16 pixels.*--model cnn"):
        models.build("paper-cnn", (8, 8, 1), 10)
    with pytest.raises(UsageError, match=r"6 pixels.*--model mlp"):
        models.build("cnn", (4, 4, 1), 10)


def test_an_unknown_name_gets_the_list():
    with pytest.raises(UsageError, match="paper-cnn, cnn, mlp"):
        models.build("resnet", (8, 8, 1), 10)
