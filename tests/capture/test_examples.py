"""Which arguments hold the examples of a batch, and what is measured on a part of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kldwrm_jax as kw

N, LEFT = 12, 4
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 6)), jnp.float32)
IMAGES = jnp.asarray(RNG.normal(size=(N, 8, 8, 2)), jnp.float32)
SEQUENCES = jnp.asarray(RNG.normal(size=(N, 5, 4)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(7, size=(N, 5)))
W = {"w": jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32)}


def oracle_of(model, *args, likelihood=None, params=None, batched=None, **kwargs):
    """The oracle of a Flax model, or of a function and its parameters."""
    if params is None and isinstance(model, nn.Module):
        variables = dict(model.init({"params": KEY, "dropout": KEY}, *args))
        params = variables.pop("params")
        kwargs |= {"variables": variables}
    elif isinstance(model, nnx.Module):
        params = model
    first = () if isinstance(model, nn.Module | nnx.Module) else (params,)
    net = kw.instrument(
        model, likelihood or kw.Gaussian(), *first, *args, batched=batched, uncovered="diagonal"
    )
    return net.oracle(params, *args, **kwargs)


def thinned(oracle, left=LEFT, place=0):
    return oracle.thinned(lambda _: left, place)


def ones(oracle):
    return jax.tree.map(jnp.ones_like, oracle.params)


class CNN(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.max_pool(nn.GroupNorm(2)(x), (2, 2), (2, 2))
        x = nn.avg_pool(
            nn.Conv(4, (3, 3), strides=2, padding="VALID", feature_group_count=2)(x), (1, 1)
        )
        return nn.Dense(3)(x.reshape(len(x), -1))


class Transformer(nn.Module):
    causal: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 8)(tokens) + self.param("places", nn.initializers.normal(), (5, 8))
        mask = nn.make_causal_mask(tokens) if self.causal else None
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h, mask=mask)
        x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return nn.remat(nn.Dense)(7)(x)


class Recurrent(nn.Module):
    time_major: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(5), time_major=self.time_major)(x))


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False)(nn.softmax(nn.Dense(8)(x)))
        return nn.Dense(3)(x)


class Layered(nn.Module):
    """A scan over layers."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.tanh(nn.Dense(6)(x)), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x, None)[0]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.attention(self.embed(tokens))))


def mlp(params, x):
    return jnp.tanh(kw.tag(params["w"], x, lambda x, w: x @ w))


def with_derivative(params, x):
    """A value and a derivative at every point, as physics-informed networks have."""

    def point(x):
        value, slope = jax.jvp(lambda x: mlp(params, x[None])[0], (x,), (jnp.ones_like(x),))
        return value + slope

    return jax.vmap(point)(x)


ORDINARY = {
    "mlp": (nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(3)]), X),
    "cnn": (CNN(), IMAGES),
    "transformer": (Transformer(), TOKENS),
    "transformer without mask": (Transformer(causal=False), TOKENS),
    "recurrent": (Recurrent(), SEQUENCES),
    "layers in a scan": (Layered(), X),
    "nnx": (Net(nnx.Rngs(0)), TOKENS),
}
FUNCTIONS = [mlp, with_derivative]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_measured_on_the_chosen_rows(name):
    model, x = ORDINARY[name]
    oracle = oracle_of(model, x)
    for place in range(3):
        thin, chosen = thinned(oracle, place=place), oracle_of(model, x[place::3])
        assert thin.batch_size == LEFT
        step = ones(oracle)
        expected = chosen.__class__(oracle.model, chosen.terms, oracle.params, chosen.call)
        np.testing.assert_allclose(thin.quadratic(step), expected.quadratic(step), rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ordinary_functions_are_measured_on_the_chosen_rows(function):
    thin = thinned(oracle_of(function, X, params=W))
    np.testing.assert_allclose(thin.outputs(W), function(W, X[::3]), rtol=1e-5)


def test_dropout_has_masks_of_the_part():
    oracle = oracle_of(Dropping(), X, rngs={"dropout": KEY})
    assert thinned(oracle).batch_size == LEFT


def test_a_random_mask_of_every_example_is_no_tie_between_them():
    def noisy(params, x, key):
        keys = jax.random.split(key, len(x))
        return mlp(params, x) + jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)

    assert thinned(oracle_of(noisy, X, KEY, params=W)).batch_size == LEFT


def test_a_layer_that_normalises_over_the_batch_takes_the_part_for_the_whole():
    oracle = oracle_of(CNN(norm=True), IMAGES)
    thin, chosen = thinned(oracle), oracle_of(CNN(norm=True), IMAGES[::3])
    assert thin.batch_size == LEFT
    np.testing.assert_allclose(
        thin.outputs(oracle.params), chosen.outputs(oracle.params), rtol=1e-5, atol=1e-6
    )


# --- Other models: the whole batch --------------------------------------------------------------

EDGES = jnp.asarray(RNG.integers(N, size=(N, 2)))


def graph(params, x, edges):
    h, (senders, receivers) = mlp(params, x), edges.T
    return jax.ops.segment_sum(h[senders], receivers, num_segments=len(x))


def contrast(params, x):
    h = mlp(params, x)
    return h @ h.T


def contracted(params, x):
    h = mlp(params, x)
    return h @ jnp.einsum("ni,nj->ij", h, h)


@pytest.mark.parametrize("function", [contrast, contracted])
def test_examples_that_depend_on_each_other_are_measured_together(function):
    oracle = oracle_of(function, X, params=W)
    assert thinned(oracle) is oracle


def test_a_graph_is_measured_whole():
    oracle = oracle_of(graph, X, EDGES, params=W)
    assert thinned(oracle) is oracle


@pytest.mark.parametrize("examples", [N, 7])
def test_sequences_with_time_first_are_measured_whole(examples):
    x = jnp.asarray(RNG.normal(size=(N, examples, 4)), jnp.float32)
    oracle = oracle_of(Recurrent(time_major=True), x)
    assert thinned(oracle) is oracle


def test_a_graph_with_batch_normalisation_is_measured_whole():
    class Graph(nn.Module):
        @nn.compact
        def __call__(self, x, edges):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
            return x + x[edges[:, 0]]

    oracle = oracle_of(Graph(), X, EDGES)
    assert thinned(oracle) is oracle


def centred(params, x, centres):
    """Distances to as many centres as there happen to be examples."""
    return mlp(params, jnp.exp(-((x[:, None] - centres) ** 2).sum(1)))


def looked_up(params, x, table):
    return mlp(params, x) + table[jnp.argmax(x, axis=1)]


def multiplied(params, x, matrix):
    return mlp(params, (x @ matrix.T)[:, :6])


CHANCE = [(centred, X[::-1]), (looked_up, X[:, :3]), (multiplied, X[::-1])]


@pytest.mark.parametrize(("function", "other"), CHANCE)
def test_an_argument_as_long_as_the_batch_by_chance_is_cut_only_if_batched_says_so(function, other):
    oracle = oracle_of(function, X, other, params=W)
    assert thinned(oracle) is oracle
    thin = thinned(oracle_of(function, X, other, params=W, batched=(True, False)))
    np.testing.assert_allclose(thin.outputs(W), function(W, X[::3], other), rtol=1e-5)


# --- Terms with batches of their own ------------------------------------------------------------


def inside_and_border(params, points):
    return {"inside": mlp(params, points["x"]), "border": mlp(params, points["z"])}


LIKELIHOODS = {"border": kw.Gaussian(), "inside": kw.Gaussian()}


def test_terms_with_batches_of_different_sizes_are_thinned_each_by_itself():
    points = {"x": X, "z": X[:9]}
    oracle = oracle_of(inside_and_border, points, params=W, likelihood=LIKELIHOODS)
    assert thinned(oracle, 3).sample_shapes == [(3,), (3,)]
    assert thinned(oracle, 5).sample_shapes == [(9,), (6,)]


def test_a_tree_of_bools_says_which_arrays_of_an_argument_are_batched():
    points = {"x": X, "z": X[:9]}
    for flags, shapes in [
        ({"x": True, "z": False}, [(9,), (4,)]),
        ({"x": False, "z": True}, [(4,), (12,)]),
        (True, [(4,), (4,)]),
    ]:
        oracle = oracle_of(
            inside_and_border, points, params=W, likelihood=LIKELIHOODS, batched=(flags,)
        )
        assert thinned(oracle).sample_shapes == shapes


# --- What `batched` says ------------------------------------------------------------------------


def test_batched_is_believed_where_examples_depend_on_each_other():
    thin = thinned(oracle_of(contracted, X, params=W, batched=True))
    np.testing.assert_allclose(thin.outputs(W), contracted(W, X[::3]), rtol=1e-4)


def test_nothing_is_cut_if_batched_is_false():
    oracle = oracle_of(mlp, X, params=W, batched=False)
    assert thinned(oracle) is oracle


def test_micro_batches_split_what_batched_says():
    table = X[:, :3]
    net = kw.instrument(looked_up, kw.Gaussian(), W, X, table, batched=(True, False))
    split = net.oracle(W, X, table, micro_batches=3)
    np.testing.assert_allclose(split.outputs(W), looked_up(W, X, table), rtol=1e-5)
    assert thinned(split).batch_size == LEFT


@pytest.mark.parametrize(
    "batched", [(True,), "all", 0, (True, 0), (True, {"a": True}), (True, None)]
)
def test_a_batched_of_another_structure_is_an_error(batched):
    with pytest.raises(ValueError, match=r"batched must be True, False, or a tuple .*(got|is) "):
        oracle_of(looked_up, X, X[:, :3], params=W, batched=batched)


def test_an_argument_that_is_not_as_long_as_the_batch_is_an_error():
    oracle = oracle_of(looked_up, X, X[:7, :3], params=W, batched=True)
    with pytest.raises(ValueError, match=r"args\[1\].*shape is \(7, 3\).* 12 examples.*False"):
        thinned(oracle)
    with pytest.raises(ValueError, match=r"args\[1\]"):
        oracle.part(lambda x: x[::2])


def test_outputs_that_do_not_follow_the_batched_arguments_are_an_error():
    def fixed(params, x):
        return jnp.broadcast_to(mlp(params, x).sum(axis=0), (N, 3))

    with pytest.raises(ValueError, match=r"batched=True.*\(12,\).* instead of \[\(4,\)\]"):
        thinned(oracle_of(fixed, X, params=W, batched=True))


def test_replicas_measure_a_part_of_what_they_have():
    """Under ``shard_map``, where JAX tracks what varies, the model is traced as well."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("batch",))
    net = kw.instrument(CNN(), kw.Gaussian(), IMAGES, axis_name="batch")
    params = CNN().init(KEY, IMAGES)["params"]
    sizes = []

    def here(x):
        oracle = net.oracle(params, x)
        sizes.append(thinned(oracle).batch_size)
        return thinned(oracle).quadratic(jax.tree.map(jnp.ones_like, params))

    shards = jax.sharding.PartitionSpec("batch")
    run = jax.shard_map(here, mesh=mesh, in_specs=shards, out_specs=jax.sharding.PartitionSpec())
    expected = oracle_of(CNN(), IMAGES[::3])
    np.testing.assert_allclose(
        jax.jit(run)(IMAGES), expected.quadratic(jax.tree.map(jnp.ones_like, params)), rtol=1e-4
    )
    assert {*sizes} == {LEFT}
