"""NNX models: the same factors as Linen's, whatever transforms them, and a model left alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from capture.twins import assert_same, normal, tail
from flax import nnx
from small_nets import jit

import kldwrm_jax as kw
from kldwrm_jax.paths import leaves_by_path

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(1)
GAUSSIAN = kw.Gaussian()


def pure(state):
    return nnx.to_pure_dict(state)


def factors(net, *args, **kwargs):
    """Compiled as one program, which is quicker than op by op."""
    return jit(lambda: net.oracle(*args, key=KEY, **kwargs).factors())()


# --- Layers ---------------------------------------------------------------------------------------


class LinenHeaded(nn.Module):
    layer: nn.Module
    call: tuple = ()

    @nn.compact
    def __call__(self, x):
        return tail(self.layer(x, **dict(self.call)))


class Headed(nnx.Module):
    def __init__(self, layer, call=()):
        self.layer, self.call = layer, call

    def __call__(self, x):
        return tail(self.layer(x, **dict(self.call)))


R = nnx.Rngs(params=0, dropout=1)
IMAGE, SIGNAL = (2, 6, 5, 4), (3, 7, 4)
CONV = {"strides": 2, "padding": "CIRCULAR", "kernel_dilation": 2}

# The layer in NNX, the same in Linen, the shape of an input.
LAYERS = {
    "linear": (lambda: nnx.Linear(4, 3, rngs=R), nn.Dense(3), (5, 4)),
    "no_bias": (
        lambda: nnx.Linear(4, 3, use_bias=False, rngs=R),
        nn.Dense(3, use_bias=False),
        SIGNAL,
    ),
    "general": (
        lambda: nnx.LinearGeneral((5, 4), (2, 3), axis=(-2, -1), rngs=R),
        nn.DenseGeneral((2, 3), axis=(-2, -1)),
        IMAGE,
    ),
    "batched": (
        lambda: nnx.LinearGeneral(4, 3, axis=-1, batch_axis={0: 2}, rngs=R),
        nn.DenseGeneral(3, axis=-1, batch_dims=(0,)),
        (2, 5, 4),
    ),
    "einsum": (
        lambda: nnx.Einsum("bti,iho->bhto", (4, 2, 3), (2, 3), rngs=R),
        nn.Einsum((4, 2, 3), "bti,iho->bhto"),
        SIGNAL,
    ),
    "conv": (lambda: nnx.Conv(4, 3, (3, 2), rngs=R), nn.Conv(3, (3, 2)), IMAGE),
    "conv_options": (
        lambda: nnx.Conv(4, 3, (3, 3), **CONV, rngs=R),
        nn.Conv(3, (3, 3), **CONV),
        IMAGE,
    ),
    "conv_groups": (
        lambda: nnx.Conv(4, 6, (3,), feature_group_count=2, rngs=R),
        nn.Conv(6, (3,), feature_group_count=2),
        SIGNAL,
    ),
    "conv_transpose": (
        lambda: nnx.ConvTranspose(4, 3, (3,), strides=2, rngs=R),
        nn.ConvTranspose(3, (3,), strides=(2,)),
        SIGNAL,
    ),
    "conv_transposed_kernel": (
        lambda: nnx.ConvTranspose(4, 3, (3,), transpose_kernel=True, rngs=R),
        nn.ConvTranspose(3, (3,), transpose_kernel=True),
        SIGNAL,
    ),
    "embed": (lambda: nnx.Embed(6, 4, dtype=float, rngs=R), nn.Embed(6, 4), (4, 3)),
    "layer_norm": (lambda: nnx.LayerNorm(4, rngs=R), nn.LayerNorm(), SIGNAL),
    "rms_norm": (lambda: nnx.RMSNorm(4, rngs=R), nn.RMSNorm(), SIGNAL),
    "instance_norm": (lambda: nnx.InstanceNorm(4, rngs=R), nn.InstanceNorm(), SIGNAL),
    "group_norm": (
        lambda: nnx.GroupNorm(4, num_groups=2, rngs=R),
        nn.GroupNorm(num_groups=2),
        SIGNAL,
    ),
    "attention": (
        lambda: nnx.MultiHeadAttention(2, 4, dtype=float, decode=False, rngs=R),
        nn.MultiHeadDotProductAttention(2),
        SIGNAL,
    ),
}


def assert_twins(name, **options):
    make, twin, shape = LAYERS[name]
    x = jax.random.randint(KEY, shape, 0, 6) if name == "embed" else normal(*shape)
    model = Headed(make())
    params = pure(nnx.state(model, nnx.Param))
    params = jax.tree.map(lambda p: p.astype(float) + 0.1, params)  # no zero biases
    nnx.update(model, params)
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error", **options)
    linen = kw.instrument(LinenHeaded(twin), GAUSSIAN, x, uncovered="error", **options)
    rtol = 1e-5 if name == "attention" else 1e-9  # NNX computes the attention itself in float32
    assert_same(factors(net, model, x), factors(linen, params, x), rtol)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_the_factors_of_its_linen_twin(name):
    assert_twins(name)


@pytest.mark.parametrize("name", ["linear", "conv_options", "attention"])
def test_separate_biases_and_reduced_places_as_in_linen(name):
    assert_twins(name, bias="separate", sharing="reduce")


@pytest.mark.parametrize("average", [False, True])
def test_batchnorm_has_the_factors_of_its_linen_twin(average):
    x, call = normal(6, 5, 4), (("use_running_average", average),)
    model = Headed(nnx.BatchNorm(4, rngs=R), call)
    model.layer.mean[...] += 0.3
    params = pure(nnx.state(model, nnx.Param))
    stats = {"batch_stats": pure(nnx.state(model, nnx.BatchStat))}
    before = jax.tree.map(np.asarray, stats)

    net = kw.instrument(model, GAUSSIAN, x)
    linen = kw.instrument(LinenHeaded(nn.BatchNorm(), call), GAUSSIAN, x)
    assert_same(factors(net, model, x), factors(linen, params, x, variables=stats), 1e-6)
    after = {"batch_stats": pure(nnx.state(model, nnx.BatchStat))}
    jax.tree.map(np.testing.assert_array_equal, after, before)

    exact = kw.instrument(model, GAUSSIAN, x, fisher="exact")
    if average:
        factors(exact, model, x)
    else:
        with pytest.raises(ValueError, match="'layer', which normalises over the batch"):
            exact.oracle(model, x).factors()


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(6, 4, rngs=R)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.embed(tokens)))


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(6, 4, name="embed")
        return embed.attend(jnp.tanh(embed(tokens)))


def test_a_tied_head_has_the_factors_of_its_linen_twin():
    model, tokens = Tied(), jax.random.randint(KEY, (4, 3), 0, 6)
    net = kw.instrument(model, kw.Categorical(), tokens, max_factor=4)
    linen = kw.instrument(LinenTied(), kw.Categorical(), tokens, max_factor=4)
    assert net.layers["embed"].kind == "Embed, tied"
    params = pure(nnx.state(model, nnx.Param))
    assert_same(factors(net, model, tokens), factors(linen, params, tokens))


# --- Structure ------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up, self.down = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Identity(nnx.Module):
    def __call__(self, x):
        return x


class Unrolled(nnx.Module):
    def __init__(self, blocks=3):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stacked(nnx.Module):
    """Blocks made by ``nnx.vmap`` and called by ``nnx.scan``."""

    def __init__(self, remat=False, axes=0, blocks=3):
        @nnx.split_rngs(splits=blocks)
        @nnx.vmap(in_axes=0, out_axes=axes)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(nnx.Rngs(0))
        self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(1))
        self.remat, self.axes = remat, axes

    def __call__(self, x):
        def forward(x, block):
            return block(x)

        forward = nnx.remat(forward) if self.remat else forward
        scan = nnx.scan(forward, in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)
        return self.head(scan(x, self.blocks))


def unstacked(model, blocks=3):
    """The parameters of the unrolled network, from those of the stacked one."""
    params = pure(nnx.state(model, nnx.Param))
    slices = {
        i: jax.tree.map(lambda p: jnp.moveaxis(p, model.axes, 0)[i], params["blocks"])
        for i in range(blocks)
    }
    return {"blocks": slices, "head": params["head"]}


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_blocks_have_the_factors_of_the_unrolled_network(remat):
    stacked, unrolled, x = Stacked(remat), Unrolled(), normal(5, 2, 4)
    weights = normal(5, 2) ** 2 if remat else None
    nnx.update(unrolled, unstacked(stacked))
    net, flat = (kw.instrument(m, GAUSSIAN, x, uncovered="error") for m in (stacked, unrolled))
    assert net.layers["blocks/up"].shapes == ((3, 5, 5), (3, 5, 5))
    together = factors(net, stacked, x, weights=weights)
    apart = factors(flat, unrolled, x, weights=weights)
    for name in ("up", "down", "norm/scale", "norm/bias"):
        each = [apart[f"blocks/{i}/{name}"] for i in range(3)]
        expected = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
        assert_same({name: together[f"blocks/{name}"]}, {name: expected})
    assert_same({"head": together["head"]}, {"head": apart["head"]})


def test_blocks_may_be_stacked_along_another_axis():
    stacked, x = Stacked(axes=1, blocks=4), normal(5, 4)
    stacked.blocks.norm = Identity()
    net = kw.instrument(stacked, GAUSSIAN, x, bias="separate")
    assert net.layers["blocks/down/kernel"].parameters[0].stack == (1,)
    a, g = factors(net, stacked, x)["blocks/down/kernel"]
    assert a.shape == (4, 5, 5)
    assert g.shape == (4, 4, 4)


def test_an_ensemble_made_by_vmap_has_a_block_for_each_member():
    class Ensemble(nnx.Module):
        def __init__(self):
            make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(4, 3, rngs=rngs)))
            self.members = make(nnx.Rngs(0))

        def __call__(self, x):
            each = nnx.vmap(lambda member, x: tail(member(x)), in_axes=(0, None))
            return each(self.members, x).mean(axis=0)

    model, x = Ensemble(), normal(5, 4)
    seen = factors(kw.instrument(model, GAUSSIAN, x, uncovered="error"), model, x)["members"]

    kernel, bias = model.members.kernel[...], model.members.bias[...]

    def taps(t):
        return jnp.mean(jnp.stack([tail(x @ kernel[i] + bias[i] + t[i]) for i in range(3)]), 0)

    outputs, vjp = jax.vjp(taps, jnp.zeros((3, 5, 3)))
    targets = GAUSSIAN.sample(KEY, outputs)
    (g,) = vjp((outputs - targets) / np.sqrt(5))
    ones = jnp.concatenate([x, jnp.ones((5, 1))], 1)
    np.testing.assert_allclose(seen[0], jnp.stack([ones.T @ ones / 5] * 3), atol=1e-10)
    np.testing.assert_allclose(seen[1], jnp.einsum("mbi,mbj->mij", g, g), atol=1e-10)


@pytest.mark.parametrize("lift", [nnx.jit, nnx.remat])
def test_inner_transforms_that_are_warm_change_nothing(lift):
    class Lifted(Unrolled):
        def __call__(self, x):
            for block in self.blocks:
                x = lift(Block.__call__)(block, x)
            return self.head(x)

    lifted, plain, x = Lifted(2), Unrolled(2), normal(5, 4)
    expected = factors(kw.instrument(plain, GAUSSIAN, x), plain, x)
    lifted(x)
    net = kw.instrument(lifted, GAUSSIAN, x)
    for _ in range(2):  # the second time its functions are compiled
        assert_same(net.oracle(lifted, x, key=KEY).factors(), expected)


_call_compiled = nnx.jit(lambda layer, x: layer(x))


def test_a_compiled_function_of_layers_is_never_silently_zero():
    class Compiled(nnx.Module):
        def __init__(self):
            self.first, self.last = nnx.Linear(4, 4, rngs=R), nnx.Linear(4, 4, rngs=R)

        def __call__(self, x):
            return _call_compiled(self.last, jnp.tanh(_call_compiled(self.first, x)))

    model, x = Compiled(), normal(5, 4)
    model(x)
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error")
    first = net.oracle(model, x, key=KEY).factors()
    assert_same(net.oracle(model, x, key=KEY).factors(), first)
    ones = jnp.concatenate([x, jnp.ones((5, 1))], 1)
    np.testing.assert_allclose(first["first"][0], ones.T @ ones / 5, atol=1e-10)


def test_a_layer_that_is_skipped_is_an_error_that_names_it():
    class Skipping(nnx.Module):
        def __init__(self):
            self.first, self.last = nnx.Linear(4, 4, rngs=R), nnx.Linear(4, 4, rngs=R)

        def __call__(self, x, skip=False):
            return self.last(x if skip else self.first(x))

    model, x = Skipping(), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x)
    with pytest.raises(ValueError, match="layers 'first' were instrumented but are not called"):
        factors(net, model, x, skip=True)


def test_a_vmap_over_examples_equals_the_batched_model():
    class PerExample(Unrolled):
        def __call__(self, x):
            return nnx.vmap(Unrolled.__call__, in_axes=(None, 0))(self, x)

    one, batched, x = PerExample(1), Unrolled(1), normal(5, 2, 4)
    weights = jnp.array([1.0, 2.0, 0.0, 1.0, 0.5])
    weights = jnp.repeat(weights[:, None], 2, axis=1)
    for options, w in (({}, weights), ({"sharing": "reduce", "bias": "separate"}, None)):
        nets = [kw.instrument(m, GAUSSIAN, x, **options) for m in (one, batched)]
        assert_same(factors(nets[0], one, x, weights=w), factors(nets[1], batched, x, weights=w))


# --- Which layers are seen ------------------------------------------------------------------------


def test_a_subclass_is_seen_through_the_call_of_its_base():
    class Gained(nnx.Linear):
        def __init__(self, *sizes, rngs):
            super().__init__(*sizes, rngs=rngs)
            self.gain = nnx.Param(jnp.full(sizes[1], 2.0))

        def __call__(self, x):
            return super().__call__(x) * self.gain

    model, x = Headed(Gained(4, 3, rngs=R)), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x)
    assert net.layers["layer"].kind == "Linear"
    assert net.layers["layer/gain"].note.startswith("there is no rule for Gained")
    plain = Headed(model.layer)
    scaled = kw.instrument(plain, GAUSSIAN, x)
    assert_same(factors(net, model, x), factors(scaled, plain, x))


def test_a_subclass_with_its_own_product_is_named():
    class Own(nnx.Linear):
        def __call__(self, x):
            return x @ (self.kernel * 2) + self.bias

    net = kw.instrument(Headed(Own(4, 3, rngs=R)), GAUSSIAN, normal(5, 4))
    assert net.model.uncovered == ("layer/bias", "layer/kernel")
    assert "there is no rule for Own" in str(net.layers)
    with pytest.raises(ValueError, match="no rule covers layer/bias"):
        kw.instrument(Headed(Own(4, 3, rngs=R)), GAUSSIAN, normal(5, 4), uncovered="error")


@pytest.mark.parametrize("tie", ["module", "parameters"])
def test_layers_that_share_everything_are_one_layer_called_twice(tie):
    class Twice(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(4, 4, rngs=R)
            self.second = self.first
            if tie == "parameters":
                self.second = nnx.Linear(4, 4, rngs=R)
                self.second.kernel, self.second.bias = self.first.kernel, self.first.bias

        def __call__(self, x):
            return tail(self.second(jnp.tanh(self.first(x))))

    class LinenTwice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="first")
            return tail(layer(jnp.tanh(layer(x))))

    model, x = Twice(), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error")
    linen = kw.instrument(LinenTwice(), GAUSSIAN, x)
    params = pure(nnx.state(model, nnx.Param))
    assert_same(factors(net, model, x), factors(linen, params, x))


def test_layers_that_share_a_part_are_named():
    class Partly(nnx.Module):
        def __init__(self):
            self.first, self.second = nnx.Linear(4, 4, rngs=R), nnx.Linear(4, 4, rngs=R)
            self.second.kernel = self.first.kernel

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    net = kw.instrument(Partly(), GAUSSIAN, normal(5, 4))
    assert set(net.model.uncovered) == {"first/kernel", "first/bias", "second/bias"}
    assert "shares some of its parameters with another layer" in str(net.layers)


def test_reparametrised_layers_are_named():
    wrapped = nnx.WeightNorm(nnx.Linear(4, 3, rngs=R), rngs=R)
    net = kw.instrument(Headed(wrapped), GAUSSIAN, normal(5, 4))
    assert "its parameters are reparametrised by WeightNorm" in str(net.layers)


def test_a_layer_of_which_a_part_is_no_param_is_named():
    layer = nnx.Linear(4, 3, rngs=R)
    layer.kernel = nnx.Variable(layer.kernel[...])
    net = kw.instrument(Headed(layer), GAUSSIAN, normal(5, 4))
    assert net.model.uncovered == ("layer/bias",)
    assert "only some of its parameters are nnx.Param" in str(net.layers)


def test_a_bridge_is_an_error_that_says_what_is_not_seen():
    x = normal(5, 4)
    to_nnx = nnx.bridge.lazy_init(nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)), x)
    with pytest.raises(ValueError, match="'layer': the layers of a Linen module behind"):
        kw.instrument(Headed(to_nnx), GAUSSIAN, x)
    to_linen = nnx.bridge.to_linen(nnx.Linear, 4, 3)
    with pytest.raises(ValueError, match="the layers of an NNX module behind"):
        kw.instrument(to_linen, GAUSSIAN, x)


# --- The user's model -----------------------------------------------------------------------------


def test_the_model_and_its_classes_are_left_alone():
    model, x = Stacked(remat=True), normal(5, 4)
    call, graph, state = nnx.Linear.__call__, *nnx.split(model)
    types = {path: type(module) for path, module in nnx.iter_modules(model)}
    arrays = [id(leaf) for leaf in jax.tree.leaves(state)]
    subclasses = {cls: cls.__call__ for cls in (nnx.Linear, nnx.LayerNorm, Block)}

    net = kw.instrument(model, GAUSSIAN, x)
    factors(net, model, x)
    jit(lambda: net.value_and_grad(model, x, targets=normal(5, 3), key=KEY)[:2])()

    assert nnx.Linear.__call__ is call
    assert {cls: cls.__call__ for cls in subclasses} == subclasses
    assert {path: type(module) for path, module in nnx.iter_modules(model)} == types
    after_graph, after = nnx.split(model)
    assert after_graph == graph
    assert [id(leaf) for leaf in jax.tree.leaves(after)] == arrays


def test_an_oracle_keeps_the_parameters_it_was_made_with():
    model, x = Unrolled(1), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x)
    oracle = net.oracle(model, x, key=KEY)
    expected = factors(net, model, x)
    model.head.kernel[...] = jnp.zeros((4, 3))
    assert_same(jit(oracle.factors)(), expected)


def test_dropout_masks_are_those_of_the_model_when_the_oracle_is_made():
    class Dropped(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 3, rngs=R)
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(5))

        def __call__(self, x):
            return tail(self.layer(self.dropout(x)))

    model, x = Dropped(), normal(6, 4)
    net = kw.instrument(model, GAUSSIAN, x)
    oracle = net.oracle(model, x, key=KEY)
    count = int(model.dropout.rngs.count[...])
    seen = jit(oracle.factors)()["layer"][0]
    assert int(model.dropout.rngs.count[...]) == count
    dropped = model.dropout(x)
    assert (dropped == 0).any()
    ones = jnp.concatenate([dropped, jnp.ones((6, 1))], 1)
    np.testing.assert_allclose(seen, ones.T @ ones / 6, atol=1e-10)
    assert not np.allclose(factors(net, model, x)["layer"][0], seen)

    params = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"no parameters \(dropout/rngs/count, dropout/rngs/key\)"):
        net.oracle(params, x, key=KEY)
    others = nnx.state(model, nnx.Not(nnx.Param))
    assert_same(factors(net, params, x, variables=others), factors(net, model, x))


def test_keys_given_to_the_oracle_reach_the_call():
    class Keyed(nnx.Module):
        def __init__(self):
            self.layer, self.dropout = nnx.Linear(4, 3, rngs=R), nnx.Dropout(0.5)

        def __call__(self, x, rngs=None):
            return tail(self.layer(self.dropout(x, rngs=rngs)))

    model, x = Keyed(), normal(6, 4)
    net = kw.instrument(model, GAUSSIAN, x, rngs={"dropout": jax.random.key(0)})
    for given in ({"dropout": jax.random.key(3)}, jax.random.key(3)):
        made = nnx.Rngs(**given) if isinstance(given, dict) else nnx.Rngs(given)
        dropped = model.dropout(x, rngs=made)
        ones = jnp.concatenate([dropped, jnp.ones((6, 1))], 1)
        seen = factors(net, model, x, rngs=given)["layer"][0]
        np.testing.assert_allclose(seen, ones.T @ ones / 6, atol=1e-10)


class Streamed(nnx.Module):
    """As in Flax's MNIST example, the streams of dropout come with the call."""

    def __init__(self):
        self.layer, self.dropout = nnx.Linear(4, 3, rngs=R), nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return tail(self.layer(self.dropout(x, rngs=rngs)))


STREAMS = {"keyword": lambda rngs: ((), {"rngs": rngs}), "positional": lambda rngs: ((rngs,), {})}


@pytest.mark.parametrize("how", STREAMS)
def test_streams_given_to_the_oracle_are_copied_and_serve_every_pass(how):
    model, x, y, rngs = Streamed(), normal(6, 4), normal(6, 3, seed=2), nnx.Rngs(dropout=3)
    args, kwargs = STREAMS[how](rngs)
    net = kw.instrument(model, GAUSSIAN, x, *args, **kwargs)
    oracle = net.oracle(model, x, *args, targets=y, key=KEY, **kwargs)
    assert int(rngs.dropout.count[...]) == 0
    seen = oracle.factors()["layer"][0]
    loss = oracle.loss(nnx.state(model, nnx.Param))
    own = GAUSSIAN.nll(model(x, nnx.clone(rngs)), y).mean()
    np.testing.assert_allclose(loss, own)
    ones = jnp.concatenate([model.dropout(x, rngs=rngs), jnp.ones((6, 1))], 1)
    np.testing.assert_allclose(seen, ones.T @ ones / 6, atol=1e-10)


@pytest.mark.parametrize("how", STREAMS)
def test_value_and_grad_has_new_masks_at_every_step(how):
    model, x, y, rngs = Streamed(), normal(6, 4), normal(6, 3, seed=2), nnx.Rngs(3)
    args, kwargs = STREAMS[how](rngs)
    net = kw.instrument(model, GAUSSIAN, x, *args, **kwargs)

    @nnx.jit
    def losses(model, rngs):
        args, kwargs = STREAMS[how](rngs)
        loss, _, oracle = net.value_and_grad(model, x, *args, targets=y, key=KEY, **kwargs)
        return loss, oracle.loss(nnx.state(model, nnx.Param))

    made = [losses(model, rngs) for _ in range(3)]
    assert len({float(loss) for loss, _ in made}) == 3
    for loss, again in made:
        np.testing.assert_allclose(loss, again)


def test_micro_batches_have_masks_of_their_own():
    model, rngs = Streamed(), nnx.Rngs(3)
    x = jnp.tile(normal(1, 4), (8, 1))
    net = kw.instrument(model, GAUSSIAN, x, rngs)
    outputs = net.oracle(model, x, rngs, key=KEY, micro_batches=4).outputs(
        nnx.state(model, nnx.Param)
    )
    assert len(np.unique(np.round(outputs, 6), axis=0)) > 2  # one for each example of a part


def test_the_mode_may_not_change_between_instrument_and_oracle():
    model, x = Headed(nnx.Linear(4, 3, rngs=R)), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x)
    model.layer = nnx.Linear(4, 3, use_bias=False, rngs=R)
    with pytest.raises(ValueError, match="instrumented with layer/bias, layer/kernel"):
        net.oracle(model, x, key=KEY)


def test_value_and_grad_is_nnx_grad_and_gives_the_updated_variables():
    class Normed(nnx.Module):
        def __init__(self):
            self.layer, self.norm = nnx.Linear(4, 3, rngs=R), nnx.BatchNorm(3, rngs=R)

        def __call__(self, x):
            return self.norm(self.layer(x))

    model, x, y = Normed(), normal(6, 4), normal(6, 3, seed=2)
    net = kw.instrument(model, GAUSSIAN, x)
    loss, grads, oracle = jit(lambda: net.value_and_grad(model, x, targets=y, key=KEY))()
    expected_factors = factors(net, model, x)
    expected_loss, expected = nnx.value_and_grad(lambda m: GAUSSIAN.nll(m(x), y).mean())(model)
    np.testing.assert_allclose(loss, expected_loss)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, expected)
    assert_same(jit(lambda oracle: oracle.factors())(oracle), expected_factors)
    stats = nnx.state(model, nnx.BatchStat)  # which nnx.grad has updated
    for path, value in leaves_by_path(oracle.variables).items():
        np.testing.assert_allclose(value, leaves_by_path(stats)[path])


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nnx_optimizer_takes_the_steps_of_the_transform_on_stacked_blocks():
    x, y = normal(12, 4), jax.random.randint(KEY, (12,), 0, 3)
    model, likelihood = Stacked(), kw.Categorical()
    net = kw.instrument(model, likelihood, x)
    tx = kw.q_kldwrm(net.layers, 0.1, refresh_every=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = pure(nnx.state(model, nnx.Param))
    state = tx.init(params)

    @nnx.jit
    def train_step(model, optimizer, key):
        oracle = net.oracle(model, x, targets=y, key=key)
        loss, grads = nnx.value_and_grad(lambda m: likelihood.nll(m(x), y).mean())(model)
        optimizer.update(model, grads, oracle=oracle)
        return loss

    @jit
    def plain_step(params, state, key):
        oracle = net.oracle(params, x, targets=y, key=key)
        grads = jax.grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    losses = []
    for k in range(4):
        losses.append(train_step(model, optimizer, jax.random.key(k)))
        params, state = plain_step(params, state, jax.random.key(k))
    assert losses[-1] < losses[0]
    after = leaves_by_path(nnx.state(model, nnx.Param))
    for path, value in leaves_by_path(params).items():
        np.testing.assert_allclose(after[path], value, atol=1e-5)  # nnx keeps float32
    told = kw.diagnostics(optimizer.opt_state)
    assert int(told["refreshes"]) == 2
    assert int(told["rejected_steps"]) == 0


# --- Tags -----------------------------------------------------------------------------------------


def lora_function(params, x):
    """A LoRALinear, written out."""
    lora = params["lora"]
    z = kw.tag(params["kernel"], x, x @ params["kernel"] + params["bias"], bias=params["bias"])
    low = kw.tag(lora["lora_a"], x, x @ lora["lora_a"])
    return tail(z + kw.tag(lora["lora_b"], low, low @ lora["lora_b"]))


def random_params(model):
    return jax.tree.map(lambda p: normal(*p.shape, seed=p.size), pure(nnx.state(model, nnx.Param)))


def with_params(model, params):
    nnx.update(model, nnx.State(params))
    return model


@pytest.mark.parametrize("wrapped", [False, True])
def test_lora_has_the_blocks_of_its_two_products(wrapped):
    x = normal(6, 4)
    if wrapped:
        inner = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=R), rngs=R)
    else:
        inner = nnx.LoRALinear(4, 3, lora_rank=2, rngs=R)
    model = Headed(inner)
    params = random_params(model)
    with_params(model, params)
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error")
    own = params["layer"]
    if wrapped:
        own = own["base_module"] | {"lora": {k: own[k] for k in ("lora_a", "lora_b")}}
    plain = kw.instrument(lora_function, GAUSSIAN, own, x)
    expected = factors(plain, own, x)
    got = factors(net, model, x)
    names = (
        ("layer/base_module", "layer/lora_a", "layer/lora_b")
        if wrapped
        else ("layer", "layer/lora/lora_a", "layer/lora/lora_b")
    )
    theirs = (expected[name] for name in ("kernel", "lora/lora_a", "lora/lora_b"))
    assert_same(got, dict(zip(names, theirs, strict=True)))


def test_lora_alone_trains():
    x = normal(64, 16)
    y, rngs = jnp.argmax(x @ normal(16, 3, seed=1), axis=-1), nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.LoRALinear(16, 16, lora_rank=2, rngs=rngs),
        nnx.tanh,
        nnx.LoRALinear(16, 3, lora_rank=2, rngs=rngs),
    )
    net = kw.instrument(model, kw.Categorical(), x)
    optimizer = nnx.Optimizer(model, kw.kfac(net.layers, 0.3, refresh_every=5), wrt=nnx.LoRAParam)
    kernel = model.layers[0].kernel[...].copy()

    @nnx.jit
    def step(model, optimizer, key):
        oracle = net.oracle(model, x, targets=y, key=key)
        loss, grads = nnx.value_and_grad(
            lambda model: kw.Categorical().nll(model(x), y).mean(),
            argnums=nnx.DiffState(0, nnx.LoRAParam),
        )(model)
        optimizer.update(model, grads, oracle=oracle)
        return loss

    losses = [step(model, optimizer, jax.random.key(i)) for i in range(30)]
    assert losses[-1] < 0.05 * losses[0]  # 0.16 with diagonal blocks
    np.testing.assert_array_equal(model.layers[0].kernel[...], kernel)


class Tagged(nnx.Module):
    """A product of its own; its kernel is given to the tag as ``read`` has it."""

    def __init__(self, rngs, read=lambda w: w):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.b = nnx.Param(jnp.ones(4))
        self.read = read

    def __call__(self, x):
        return jnp.tanh(kw.tag(self.read(self.w), x, x @ self.w + self.b, bias=self.b))


@pytest.mark.parametrize("read", [lambda w: w, lambda w: w[...]], ids=["variable", "value"])
def test_a_tag_inside_a_module_makes_the_block_of_a_linear(read):
    x, rngs = normal(5, 4), nnx.Rngs(0)
    model = nnx.Sequential(Tagged(rngs, read), nnx.Linear(4, 3, rngs=rngs))
    linear = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), jnp.tanh, nnx.Linear(4, 3, rngs=rngs))
    linear.layers[0].kernel[...], linear.layers[0].bias[...] = model.layers[0].w[...], jnp.ones(4)
    linear.layers[2].kernel[...] = model.layers[1].kernel[...]
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error")
    expected = factors(kw.instrument(linear, GAUSSIAN, x), linear, x)
    got = factors(net, model, x)
    assert_same(got, {"layers/0": expected["layers/0"], "layers/1": expected["layers/2"]}, 1e-5)


def test_tags_under_a_scan_over_modules_are_stacked():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Tagged(rngs)

    class Deep(nnx.Module):
        def __init__(self):
            self.blocks = make(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )

    def unrolled(params, x):
        for w, b in params:
            x = jnp.tanh(kw.tag(w, x, x @ w + b, bias=b))
        return x

    model, x = Deep(), normal(5, 4)
    net = kw.instrument(model, GAUSSIAN, x, uncovered="error")
    (a, g), params = (
        factors(net, model, x)["blocks"],
        list(zip(model.blocks.w, model.blocks.b, strict=True)),
    )
    expected = factors(kw.instrument(unrolled, GAUSSIAN, params, x), params, x)
    for i in range(3):
        assert_same({"": (a[i], g[i])}, {"": expected[str(i)]})


def test_a_tag_of_something_else_is_an_error_with_the_way_out():
    model = Tagged(nnx.Rngs(0), lambda w: w[...].T)
    with pytest.raises(ValueError, match="in an NNX module the variable itself"):
        kw.instrument(model, GAUSSIAN, normal(5, 4))
