"""Plain functions: their parameters as any tree, what their tags cover, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from capture.twins import (
    GAUSSIAN,
    KEY,
    Network,
    assert_same,
    dense,
    linen_factors,
    network,
    normal,
    params_of,
    tagged_factors,
)
from small_nets import jit

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


def test_what_is_not_tagged_is_named_in_the_layers():
    def function(p, x):
        return dense(p["layer"], x) * p["gain"]

    params = {"layer": {"kernel": normal(4, 3), "bias": normal(3)}, "gain": normal(3)}
    net = kw.instrument(function, GAUSSIAN, params, normal(5, 4))
    assert net.model.uncovered == ("gain",)
    assert "gain: no tag or known layer uses it" in str(net.layers)
    with pytest.raises(ValueError, match="no rule covers gain"):
        kw.instrument(function, GAUSSIAN, params, normal(5, 4), uncovered="error")


def test_parameters_given_to_lax_get_an_error_with_a_way_out():
    def function(p, x):
        return jax.lax.dot(x, p["w"])

    params, x = {"w": normal(4, 3)}, normal(5, 4)
    with pytest.raises((TypeError, ValueError)) as error:
        kw.instrument(function, GAUSSIAN, params, x)
    assert "jnp.asarray(w)" in "".join(error.value.__notes__)


def test_parameters_cast_all_at_once_are_an_error_with_a_way_out():
    def function(p, x):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return network(p, x.astype(jnp.bfloat16))

    def inside(p, x):
        w, b = p["w"], p["b"]
        z = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)
        return kw.tag(w, x.astype(jnp.bfloat16), z, bias=b)

    x = normal(6, 4)
    params = params_of(Network(), x)
    with pytest.raises(ValueError, match="cast to bfloat16"):
        kw.instrument(function, GAUSSIAN, params, x)
    a, _ = tagged_factors(inside, {"w": normal(4, 3), "b": normal(3)}, x)["w"]
    assert a.dtype == jnp.float64


def test_a_tag_that_is_not_reached_is_an_error_that_names_it():
    def function(params, x, skip=False):
        z = dense(params["first"], x)
        return z if skip else dense(params["last"], jnp.tanh(z))

    x = normal(6, 4)
    params = params_of(Network(), x)
    net = kw.instrument(function, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="layers 'last' were instrumented but are not called"):
        net.oracle(params, x, skip=True, key=KEY).factors()


def test_what_is_not_a_function_of_parameters_is_an_error():
    with pytest.raises(ValueError, match="an example of its parameters and of its batch"):
        kw.instrument(network, GAUSSIAN)
    x = normal(6, 4)
    params = params_of(Network(), x)
    net = kw.instrument(network, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="rngs are for Flax models"):
        net.oracle(params, x, rngs={"dropout": KEY})


def test_an_equinox_mlp_takes_the_steps_of_linens():
    eqx = pytest.importorskip("equinox")

    class MLP(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(4, 5, key=keys[0])
            self.last = eqx.nn.Linear(5, 3, key=keys[1])

        def __call__(self, x):
            for layer in (self.first, self.last):
                z = layer(x)  # kernels are (out, in)
                z = kw.tag(layer.weight, x, z, bias=layer.bias, layout="oi")
                x = jnp.tanh(z) if layer is self.first else z
            return x

    def batched(model, x):
        return jax.vmap(model)(x)

    x, y = normal(6, 4), normal(6, 3, seed=2)
    model = MLP(jax.random.key(0))
    model = jax.tree.map(lambda p: p.astype(float) if eqx.is_array(p) else p, model)
    net = kw.instrument(batched, GAUSSIAN, model, x, uncovered="error")
    params = {
        name: {"kernel": layer.weight.T, "bias": layer.bias}
        for name, layer in (("first", model.first), ("last", model.last))
    }
    linen = kw.instrument(Network(), GAUSSIAN, x)
    assert_same(net.oracle(model, x, key=KEY).factors(), linen.oracle(params, x, key=KEY).factors())

    @eqx.filter_jit
    def step(model, state, key):
        oracle = net.oracle(model, x, key=key)
        grads = eqx.filter_grad(lambda model: GAUSSIAN.nll(batched(model, x), y).mean())(model)
        params = eqx.filter(model, eqx.is_array)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return eqx.apply_updates(model, updates), state

    @jit
    def linen_step(params, state, key):
        oracle = linen.oracle(params, x, targets=y, key=key)
        grads = jax.grad(oracle.loss)(params)
        updates, state = linen_tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    tx, linen_tx = (kw.q_kldwrm(each.layers, 0.1, refresh_every=2) for each in (net, linen))
    state, linen_state = tx.init(eqx.filter(model, eqx.is_array)), linen_tx.init(params)
    before = model.first.weight
    for k in range(3):
        model, state = step(model, state, jax.random.key(k))
        params, linen_state = linen_step(params, linen_state, jax.random.key(k))
    assert not np.allclose(model.first.weight, before)
    np.testing.assert_allclose(model.first.weight.T, params["first"]["kernel"], atol=1e-9)
    np.testing.assert_allclose(model.last.bias, params["last"]["bias"], atol=1e-9)


def test_an_equinox_model_given_as_the_function_is_an_error():
    eqx = pytest.importorskip("equinox")
    with pytest.raises(ValueError, match=r"jax\.vmap\(model\)\(x\)"):
        kw.instrument(eqx.nn.Linear(4, 3, key=KEY), GAUSSIAN, normal(5, 4))


def test_a_haiku_model_has_the_factors_of_linens():
    hk = pytest.importorskip("haiku")

    class Tagged(hk.Module):
        def __init__(self, size, name):
            super().__init__(name=name)
            self.size = size

        def __call__(self, x):
            w = hk.get_parameter("w", (x.shape[-1], self.size), init=jnp.zeros)
            b = hk.get_parameter("b", (self.size,), init=jnp.zeros)
            return kw.tag(w, x, jnp.dot(x, w) + b, bias=b)

    def forward(x):
        return Tagged(3, "last")(jnp.tanh(Tagged(5, "first")(x)))

    x = normal(6, 4)
    transformed = hk.without_apply_rng(hk.transform(forward))
    params = params_of(Network(), x)
    ours = transformed.init(KEY, x)
    assert jax.tree.map(jnp.shape, ours)["first"] == {"w": (4, 5), "b": (5,)}
    ours = {name: {"w": p["kernel"], "b": p["bias"]} for name, p in params.items()}
    assert_same(tagged_factors(transformed.apply, ours, x), linen_factors(Network(), params, x))
