"""The same network in Linen, in NNX and as a plain function: one optimizer, one trajectory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_nets import jit

import kldwrm_jax as kw
from kldwrm_jax.paths import leaves_by_path

LIKELIHOOD = kw.Categorical()
MEMBERS = {
    "kfac": lambda layers: kw.kfac(layers, 0.1, refresh_every=2),
    "so": lambda layers: kw.so_kldwrm(layers, 0.1, refresh_every=2),
    "q": lambda layers: kw.q_kldwrm(layers, 0.1, refresh_every=2),
    "qe": lambda layers: kw.qe_kldwrm(layers, 0.1, refresh_every=2, capacity=2, inner_steps=2),
}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(3, (3,), name="conv")(x)).mean(axis=1)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(4, name="head")(x)


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 3, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(3, rngs=rngs)
        self.head = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(jnp.tanh(self.conv(x)).mean(axis=1)))


def function(params, x):
    """One example at a time, under a ``vmap``."""
    conv, norm, head = params["conv"], params["norm"], params["head"]
    numbers = ("HC", "HIO", "HC")

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x[None], w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )[0]

    def one(x):
        z = kw.tag(conv["kernel"], x, convolve, bias=conv["bias"], layout=numbers) + conv["bias"]
        x = jnp.tanh(z).mean(axis=0)
        x = (x - x.mean()) / jnp.sqrt(x.var() + 1e-6)
        z = x * norm["scale"] + norm["bias"]
        x = kw.tag(norm["scale"], x, z, bias=norm["bias"], layout="scale")
        return kw.tag(head["kernel"], x, x @ head["kernel"] + head["bias"], bias=head["bias"])

    return jax.vmap(one)(x)


def batch():
    x = np.random.default_rng(0).normal(size=(12, 5, 2))
    return jnp.asarray(x), jnp.asarray(np.abs(x).sum(axis=(1, 2)).astype(int) % 4)


def start():
    model = NNX(nnx.Rngs(0))
    state = jax.tree.map(lambda p: p.astype(float), nnx.state(model, nnx.Param))
    nnx.update(model, state)
    return model, nnx.to_pure_dict(state)


def assert_close(ours, theirs):
    ours, theirs = leaves_by_path(ours), leaves_by_path(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-8, atol=1e-9, err_msg=path)


def test_factors_are_the_same(x64):
    (x, _), (model, params) = batch(), start()
    net = {
        "linen": kw.instrument(Linen(), LIKELIHOOD, x, uncovered="error"),
        "nnx": kw.instrument(model, LIKELIHOOD, x, uncovered="error"),
        "function": kw.instrument(function, LIKELIHOOD, params, x, uncovered="error"),
    }
    weights = jnp.linspace(0, 1, 12)
    key = jax.random.key(1)

    given = {"linen": params, "nnx": model, "function": params}

    @jit
    def measure():
        return {
            name: net[name].oracle(given[name], x, key=key, weights=weights).factors()
            for name in net
        }

    factors = measure()
    assert set(factors["linen"]) == {"conv", "norm/scale", "norm/bias", "head"}
    assert_close(factors["nnx"], factors["linen"])
    assert_close(factors["function"], factors["linen"])


@pytest.mark.parametrize(
    "member",
    ["kfac", "qe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("so", "q"))],
)
def test_trajectories_are_the_same(x64, member):
    (x, y), (model, params) = batch(), start()
    linen = kw.instrument(Linen(), LIKELIHOOD, x)
    plain = kw.instrument(function, LIKELIHOOD, params, x)
    net = kw.instrument(model, LIKELIHOOD, x)
    optimizer = nnx.Optimizer(model, MEMBERS[member](net.layers), wrt=nnx.Param)

    def stepper(net, model):
        tx = MEMBERS[member](net.layers)

        def step(carried, key):
            params, state = carried
            grads = jax.grad(lambda p: LIKELIHOOD.nll(model(p, x), y).mean())(params)
            oracle = net.oracle(params, x, targets=y, key=key)
            updates, state = tx.update(grads, state, params, oracle=oracle)
            return (optax.apply_updates(params, updates), state), None

        return jit(lambda p, keys: jax.lax.scan(step, (p, tx.init(p)), keys)[0][0])

    @nnx.jit
    def nnx_step(model, optimizer, key):
        oracle = net.oracle(model, x, targets=y, key=key)
        grads = nnx.grad(lambda m: LIKELIHOOD.nll(m(x), y).mean())(model)
        optimizer.update(model, grads, oracle=oracle)

    keys = jax.random.split(jax.random.key(2), 4)
    expected = stepper(linen, lambda p, x: Linen().apply({"params": p}, x))(params, keys)
    assert_close(stepper(plain, function)(params, keys), expected)
    for key in keys:
        nnx_step(model, optimizer, key)
    assert_close(nnx.state(model, nnx.Param), expected)
    assert not np.allclose(expected["head"]["kernel"], params["head"]["kernel"])


# --- A small language model -----------------------------------------------------------------------

CORPUS = "the cat sat on the mat. the dog sat on the log. the cat saw the dog on the mat. "
WIDTH, LENGTH = 16, 12


class DecoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.between = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.before(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class LanguageModel(nnx.Module):
    def __init__(self, vocabulary, rngs):
        self.embed = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=2)(nnx.vmap(DecoderBlock))
        self.blocks = make(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        step = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(self.norm(step(x, self.blocks)))  # a tied head


@pytest.mark.parametrize("make", [kw.kfac, pytest.param(kw.q_kldwrm, marks=pytest.mark.slow)])
def test_a_language_model_learns_a_toy_corpus(make):
    letters = sorted({*CORPUS})
    text = np.array([letters.index(c) for c in 4 * CORPUS])
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[:64:2]
    x, y = jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:])
    model = LanguageModel(len(letters), nnx.Rngs(0))
    net = kw.instrument(model, LIKELIHOOD, x, uncovered="error")

    sizes = {path: p.size for path, p in leaves_by_path(nnx.state(model, nnx.Param)).items()}
    accounted = {p.path: p.size for block in net.layers for p in block.parameters}
    assert accounted == sizes
    assert net.layers["embed"].kind == "Embed, tied"
    assert net.layers["blocks/attention/query"].shapes == ((2, 17, 17), (2, 16, 16))
    assert net.layers["blocks/up"].shapes == ((2, 17, 17), (2, 32, 32))

    tx = make(net.layers, 0.05, refresh_every=5, damping=0.03)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, keys):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def step(carry, key):
            model, optimizer = carry
            oracle = net.oracle(model, x, targets=y, key=key)
            loss, grads = nnx.value_and_grad(lambda m: LIKELIHOOD.nll(m(x), y).mean())(model)
            optimizer.update(model, grads, oracle=oracle)
            return carry, loss

        return step((model, optimizer), keys)[1]

    losses = train(model, optimizer, jax.random.split(jax.random.key(3), 100))
    assert losses[0] > 2.5
    assert losses[-1] < 0.5
    assert int(kw.diagnostics(optimizer.opt_state)["rejected_steps"]) == 0
