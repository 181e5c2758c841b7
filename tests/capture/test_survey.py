"""Which layers are found, how they are stacked, and what no layer covers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import (
    categorical_root,
    initialised,
)

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


WIDTH = 3


X = np.random.default_rng(0).normal(size=(4, WIDTH))


class Block(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(self.width, name="dense")(x))


class Step(nn.Module):
    """A block as ``nn.scan`` wants it."""

    remat: bool = False

    @nn.compact
    def __call__(self, x, _):
        block = nn.remat(Block) if self.remat else Block
        return block(name="block")(x), None


class Gain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("gain", nn.initializers.ones, (x.shape[-1],))


def test_a_layer_called_in_different_ways_is_named():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Einsum((3, 3), use_bias=False, name="layer")
            return layer(x, "bi,io->bo") + layer(x, "bi,oi->bo")

    net = kw.instrument(Model(), kw.Gaussian(), X)
    assert "different ways" in net.layers["layer/kernel"].note


def test_stacks_that_are_not_understood_are_an_error():
    inner = nn.scan(Step, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return inner(name="inner")(x, None)[0], None

    model = nn.scan(Outer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    with pytest.raises(ValueError, match=r"inner/block/dense.*leading axes"):
        kw.instrument(model, kw.Gaussian(), X, None, output=lambda out: out[0])


def test_uncovered_parameters_are_unbiased_for_the_fisher_diagonal():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(Gain(name="gain")(x))

    params = initialised(Model(), X)
    net = kw.instrument(Model(), kw.Categorical(), X, fisher="exact")
    assert "no rule for Gain" in net.layers["gain/gain"].note
    keys = jax.random.split(jax.random.key(0), 3000)
    draws = jax.jit(jax.vmap(lambda k: net.oracle(params, X, key=k).factors()["gain/gain"]))(keys)

    def outputs(gain):
        return (X * gain) @ params["head"]["kernel"] + params["head"]["bias"]

    jacobian = jax.jacobian(outputs)(params["gain"]["gain"])
    root = categorical_root(outputs(params["gain"]["gain"]))
    exact = (jnp.einsum("jne,nep->jnp", root, jacobian) ** 2).sum(axis=(0, 1)) / len(X)
    error = draws.std(axis=0) / np.sqrt(len(keys))
    assert (abs(draws.mean(axis=0) - exact) < 4 * error).all()


def test_all_layers_are_found_in_three_traces():
    traces = []

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            traces.append(1)
            for i in range(4):
                x = nn.LayerNorm(name=f"norm{i}")(jnp.tanh(nn.Dense(WIDTH, name=f"dense{i}")(x)))
            return x, None

    model = nn.scan(Deep, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    variables = jax.eval_shape(model.init, jax.random.key(0), X, None)
    traces.clear()
    net = kw.instrument(
        model, kw.Gaussian(), X, None, variables=variables, output=lambda out: out[0]
    )
    assert len(net.model.captured) == 8
    assert all(layer.stack.lengths == (2,) for layer in net.model.captured)
    once = len(traces)
    traces.clear()
    jax.eval_shape(model.apply, variables, X, None)
    assert once == 3 * len(traces)  # calls, stacks, dependence


def test_parameters_that_two_layers_claim_are_named():
    def function(p, x):
        x = kw.tag(p["w"], x, x @ p["w"] + p["b"], bias=p["b"])
        return kw.tag(p["v"], x, x @ p["v"] + p["b"], bias=p["b"])

    params = {"w": jnp.ones((3, 3)), "v": jnp.ones((3, 3)), "b": jnp.ones(3)}
    net = kw.instrument(function, kw.Gaussian(), params, X)
    assert set(net.model.uncovered) == {"w", "v", "b"}
    assert "b belongs to another layer too" in net.layers["w"].note
