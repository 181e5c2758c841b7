"""What the outputs depend on, through every construct that programs are made of."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.twins import GAUSSIAN, normal
from flax import nnx

import kldwrm_jax as kw

X = normal(4, 3, seed=2)
PARAMS = {"w": normal(3, 3), "v": normal(3, 3, seed=1)}


def product(w, x):
    return jnp.tanh(kw.tag(w, x, x @ w))


def survey(function, params=PARAMS):
    """Parameters by what became of them: with a block of their own, uncovered, unseen."""
    net = kw.instrument(function, GAUSSIAN, params, X)
    return {
        path: "unseen" if path in net.model.unseen else net.layers[path].note or "block"
        for path in params
    }


def plain(f, h, w):
    return f(h, w)


def scanned(f, h, w):
    return jax.lax.scan(lambda h, _: (f(h, w), None), h, None, length=2)[0]


def carried(f, h, w):
    """The use is in the second round only, of what the first has carried."""

    def body(carry, _):
        h, late = carry
        return (h + late, f(h, w)), None

    return jax.lax.scan(body, (h, jnp.zeros_like(h)), None, length=2)[0][0]


def looped(f, h, w):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], w)), (0, h))[1]


def branched(f, h, w):
    return jax.lax.cond(h.sum() > 0, lambda h: f(h, w), lambda h: h, h)


def custom(f, h, w):
    @jax.custom_jvp
    def g(h, w):
        return f(h, w)

    g.defjvps(lambda dh, y, h, w: dh, None)
    return g(h, w)


CONSTRUCTS = {
    "plain": plain,
    "jit": lambda f, h, w: jax.jit(f)(h, w),
    "remat": lambda f, h, w: jax.checkpoint(f)(h, w),
    "vmap": lambda f, h, w: jax.vmap(f, (0, None))(h, w),
    "scan": scanned,
    "carry of a scan": carried,
    "while": looped,
    "cond": branched,
    "custom_jvp": custom,
}
each_construct = pytest.mark.parametrize("name", CONSTRUCTS)


@each_construct
def test_a_use_outside_the_layer_is_found(name):
    def function(p, x):
        h = product(p["v"], product(p["w"], x))
        return CONSTRUCTS[name](lambda h, w: jnp.tanh(h @ jnp.asarray(w).T), h, p["w"])

    found = survey(function)
    assert found["v"] == "block"
    assert "w is also used outside its layer" in found["w"]


@each_construct
def test_the_layers_own_use_is_no_other(name):
    def function(p, x):
        h = product(p["v"], x)
        return CONSTRUCTS[name](lambda h, w: product(w, h), h, p["w"])

    assert survey(function) == {"w": "block", "v": "block"}


def test_a_use_before_the_layer_is_found():
    found = survey(lambda p, x: product(p["v"], product(p["w"], x @ jnp.asarray(p["w"]).T)))
    assert "w is also used outside its layer" in found["w"]
    assert found["v"] == "block"


def test_a_bias_may_be_added_after_its_tag():
    def function(p, x):
        return kw.tag(p["w"], x, x @ p["w"], bias=p["b"]) + p["b"]

    net = kw.instrument(function, GAUSSIAN, {"w": normal(3, 2), "b": normal(2)}, X)
    assert len(net.layers) == 1
    assert not net.model.uncovered


def test_what_stops_the_gradient_is_no_use():
    def function(p, x):
        h = product(p["w"], x)
        frozen = jax.lax.stop_gradient(h @ jnp.asarray(p["w"]).T)
        return product(p["v"], h) + frozen + jnp.argmax(jnp.asarray(p["v"]), axis=0)

    assert survey(function) == {"w": "block", "v": "block"}


def test_what_the_output_leaves_out_is_unseen():
    params = PARAMS | {"loose": normal(3), "gain": normal(3)}

    def function(p, x):
        h = product(p["w"], x) * p["gain"]
        return h, product(p["v"], jax.lax.stop_gradient(h)) * p["loose"]

    net = kw.instrument(function, GAUSSIAN, params, X, output=lambda out: out[0])
    assert set(net.model.unseen) == {"v", "loose"}
    assert net.model.uncovered == ("gain",)
    assert [layer.name for layer in net.model.captured] == ["w"]
    factors = net.oracle(params, X, key=jax.random.key(0)).factors()
    np.testing.assert_array_equal(factors["v"], np.ones((3, 3)))
    assert np.abs(factors["w"][1]).max() > 0
    assert "loose, v: the likelihood does not see it" in str(net.layers)
    with pytest.raises(ValueError, match=r"gain.*loose \(the likelihood does not see it.*; v \("):
        kw.instrument(function, GAUSSIAN, params, X, output=lambda out: out[0], uncovered="error")


def test_outputs_that_depend_on_no_parameter_are_an_error():
    with pytest.raises(ValueError, match="depends on none of the model's parameters"):
        kw.instrument(
            lambda p, x: (product(p["w"], x), x), GAUSSIAN, PARAMS, X, output=lambda o: o[1]
        )


class Tied(nn.Module):
    attend: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 4, name="embed")
        h = nn.Dense(4, name="dense")(embed(tokens))
        return embed.attend(h) if self.attend else h @ embed.embedding.T


def test_a_table_multiplied_by_hand_is_named_with_the_way_out():
    tokens = jnp.zeros((2, 5), int)
    by_hand = kw.instrument(Tied(attend=False), kw.Categorical(), tokens)
    assert "a tied head is counted if it calls attend" in by_hand.layers["embed/embedding"].note
    with pytest.raises(ValueError, match="embed/embedding is also used outside its layer"):
        kw.instrument(Tied(attend=False), kw.Categorical(), tokens, uncovered="error")
    kw.instrument(Tied(attend=True), kw.Categorical(), tokens, uncovered="error")


def test_both_uses_of_a_parameter_are_in_its_diagonal():
    def function(p, x):
        return jnp.tanh(kw.tag(p["w"], x, x @ p["w"])) @ jnp.asarray(p["w"]).T

    x, y, params = X[:1], jnp.ones((1, 3)), {"w": PARAMS["w"]}
    net = kw.instrument(function, GAUSSIAN, params, x, fisher="empirical")

    def loss(w):
        return 0.5 * ((jnp.tanh(x @ w) @ w.T - y) ** 2).sum()

    seen = net.oracle(params, x, targets=y).factors()["w"]
    np.testing.assert_allclose(seen, jax.grad(loss)(params["w"]) ** 2, rtol=1e-5)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        x = nn.remat(nn.Dense)(4, name="dense")(nn.GroupNorm(2)(x))
        shared = nn.Dense(4, name="shared")
        return nn.RNN(nn.GRUCell(3), name="rnn")(shared(jnp.tanh(shared(x))))


def test_ordinary_layers_raise_no_alarm():
    net = kw.instrument(Attention(), GAUSSIAN, jnp.ones((2, 3, 4)), uncovered="error")
    assert not net.model.unseen
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs)),
    )
    assert not kw.instrument(model, GAUSSIAN, jnp.ones((2, 3, 4)), uncovered="error").model.unseen


def test_a_penalty_that_the_output_leaves_out_is_no_use():
    class Penalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(2, name="dense")
            z = dense(x)
            kernel = self.variables["params"]["dense"]["kernel"]
            return z, (kernel**2).sum()

    kw.instrument(Penalised(), GAUSSIAN, X, output=lambda out: out[0], uncovered="error")


def test_a_dot_general_of_its_own_is_noted():
    def doubled(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    linen = kw.instrument(nn.Dense(2, dot_general=doubled), GAUSSIAN, X)
    model = nnx.Linear(3, 2, dot_general=doubled, rngs=nnx.Rngs(0))
    for layers in (linen.layers, kw.instrument(model, GAUSSIAN, X).layers):
        assert "dot_general is taken for a matrix product" in layers["root"].note
    assert not kw.instrument(nn.Dense(2), GAUSSIAN, X).layers["root"].note
