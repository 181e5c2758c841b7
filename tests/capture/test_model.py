"""A model with known layers: what is called for a batch must be what was instrumented."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import (
    assert_factors,
    factors,
    gaussian_root,
    initialised,
    kfac,
)

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


WIDTH = 3


X = np.random.default_rng(0).normal(size=(4, WIDTH))


ROOT = gaussian_root(np.zeros((4, WIDTH)))


def instrumented(model, *args, likelihood=None, **kwargs):
    args = args or (X,)
    return kw.instrument(
        model, likelihood or kw.Gaussian(), *args, fisher="exact", uncovered="error", **kwargs
    )


class Block(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(self.width, name="dense")(x))


def test_output_picks_what_the_likelihood_sees():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(name="body")(x)
            return {"logits": nn.Dense(2, name="head")(x), "features": x}

    params = initialised(Two(), X)
    net = instrumented(Two(), output=lambda out: out["logits"])
    expected = kfac(
        lambda tape: tape.dense(
            "head", jnp.tanh(tape.dense("body/dense", X, params["body"]["dense"])), params["head"]
        ),
        ROOT[:2, :, :2],
    )
    assert_factors(factors(net, params, X), expected)
    with pytest.raises(ValueError, match=r"returns a dict.*output="):
        kw.instrument(Two(), kw.Gaussian(), X).oracle(params, X, key=jax.random.key(0)).factors()


class Skipping(nn.Module):
    def setup(self):
        self.sometimes = nn.Dense(WIDTH)
        self.always = nn.Dense(2)

    def __call__(self, x, skip=False):
        return self.always(x if skip else self.sometimes(x))


def test_another_batch_shape_is_fine():
    params = initialised(Skipping(), X)
    net = instrumented(Skipping())
    x = np.random.default_rng(2).normal(size=(2, 5, WIDTH))
    shapes = jax.tree.map(jnp.shape, factors(net, params, x))
    assert shapes == jax.tree.map(jnp.shape, factors(net, params, X))


@pytest.mark.parametrize("jit", [False, True])
def test_a_layer_that_is_not_called_is_an_error_that_names_it(jit):
    params = initialised(Skipping(), X)
    oracle = instrumented(Skipping()).oracle(params, X, skip=True)
    run = jax.jit(lambda o: o.factors()) if jit else lambda o: o.factors()
    with pytest.raises(ValueError, match="layers 'sometimes' were instrumented but are not called"):
        run(oracle)
    with pytest.raises(ValueError, match="call instrument with the arguments"):
        run(oracle)


def test_a_layer_called_in_another_way_is_an_error_that_names_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, tied=False):
            embed = nn.Embed(5, 3, name="embed")
            x = embed(tokens)
            return embed.attend(x) if tied else x

    tokens = np.array([0, 1, 2])
    params = initialised(Model(), tokens)
    oracle = kw.instrument(Model(), kw.Gaussian(), tokens, fisher="exact").oracle
    with pytest.raises(ValueError, match="'embed' are called in another way"):
        oracle(params, tokens, tied=True).factors()


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="last")(Block(name="block")(x))


def hiding(compiled):
    """A model that may call its submodule through a compiled function of its own."""

    class Outer(nn.Module):
        def setup(self):
            self.inner = Inner()

        def __call__(self, x, hide=False):
            if hide and not self.is_initializing():
                return compiled({"params": self.inner.variables["params"]}, x)
            return self.inner(x)

    return Outer()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("hidden_at_first", [False, True])
def test_an_inner_compiled_apply_is_never_silently_zero(warm, hidden_at_first):
    compiled = jax.jit(Inner().apply)
    model = hiding(compiled)
    params = initialised(model, X)
    if warm:
        compiled({"params": params["inner"]}, X)
    net = kw.instrument(model, kw.Gaussian(), X, hide=hidden_at_first, fisher="exact")
    assert sum(block.size for block in net.layers) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    if hidden_at_first:  # nothing is known of its layers, and that is said
        assert all(isinstance(block.block, kw.curvature.Diagonal) for block in net.layers)
        assert all(block.note for block in net.layers)
        assert all(leaf.any() for leaf in jax.tree.leaves(factors(net, params, X, hide=True)))
        return
    plain = factors(net, params, X, hide=False)
    for _ in range(2):  # the second time the compiled function is warm with the probes too
        assert_factors(factors(net, params, X, hide=True), plain)
    weights = np.array([1.0, 0.0, 2.0, 1.0])
    assert_factors(
        factors(net, params, X, hide=True, weights=weights),
        factors(net, params, X, hide=False, weights=weights),
    )


def test_an_inner_compiled_function_of_constants_is_an_error():
    frozen = {}

    class Outer(nn.Module):
        def setup(self):
            self.inner = Inner()

        def __call__(self, x, hide=False):
            return Inner(parent=None).apply({"params": frozen}, x) if hide else self.inner(x)

    params = initialised(Outer(), X)
    frozen.update(params["inner"])
    net = instrumented(Outer())
    with pytest.raises(ValueError, match="'inner/block/dense', 'inner/last'"):
        factors(net, params, X, hide=True)


def test_no_tracer_outlives_its_trace():
    params = initialised(Skipping(), X)
    with jax.checking_leaks():
        net = instrumented(Skipping())
        factors(net, params, X)
