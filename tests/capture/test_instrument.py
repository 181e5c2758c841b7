"""``instrument``: what it refuses, what it says, and whole models, every parameter accounted."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import assert_factors, factors, initialised

import kldwrm_jax as kw
from kldwrm_jax.paths import leaves_by_path

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
mlp = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)])


def parameter_count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def assert_accounted(net, params):
    """Every parameter is in exactly one block, which has the factors it says."""
    paths = [p.path for block in net.layers for p in block.parameters]
    assert len(paths) == len(set(paths))
    assert set(paths) == set(leaves_by_path(params))
    assert sum(block.size for block in net.layers) == parameter_count(params)
    for path, leaf in leaves_by_path(params).items():
        assert net.layers.parameters[path].shape == leaf.shape


def assert_runs_under_jit(net, params, *args, **kwargs):
    oracle = net.oracle(params, *args, key=jax.random.key(0), **kwargs)
    got = jax.jit(lambda o: o.factors())(oracle)
    assert set(got) == {block.name for block in net.layers}
    for block in net.layers:
        arrays = got[block.name]
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        assert tuple(a.shape for a in arrays) == block.shapes
        assert all(np.isfinite(a).all() and a.any() for a in arrays), block.name
        direction = block.gather(leaves_by_path(params))
        block.block.multiply(got[block.name], direction)
    return got


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("fisher", "true"),
        ("bias", "none"),
        ("sharing", "sum"),
        ("uncovered", "ignore"),
        ("max_factor", 0),
        ("max_factor", 2.5),
    ],
)
def test_unknown_choices_are_errors_that_name_the_argument(argument, value):
    with pytest.raises(ValueError, match=argument):
        kw.instrument(mlp, kw.Categorical(), X, **{argument: value})


def test_models_and_likelihoods_of_other_types_are_errors():
    with pytest.raises(ValueError, match=r"model must be a flax\.linen\.Module"):
        kw.instrument("mlp", kw.Categorical(), X)
    with pytest.raises(ValueError, match="likelihood must implement"):
        kw.instrument(mlp, "categorical", X)
    with pytest.raises(ValueError, match="likelihood must implement"):
        kw.instrument(mlp, X, kw.Categorical())


def test_uncovered_error_names_the_parameters_and_the_way_out():
    class Gain(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x * self.param("gain", nn.initializers.ones, (3,))
            return nn.Dense(2, name="dense")(x) + self.param("shift", nn.initializers.zeros, (2,))

    with pytest.raises(ValueError, match=r"gain \(.*shift \(.*uncovered='diagonal'") as error:
        kw.instrument(Gain(), kw.Gaussian(), X, uncovered="error")
    assert "dense" not in str(error.value)
    net = kw.instrument(Gain(), kw.Gaussian(), X)
    assert [block.name for block in net.layers] == ["dense", "gain", "shift"]


def test_shapes_are_enough_and_nothing_is_computed():
    calls = []

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            jax.debug.callback(lambda: calls.append(1))
            return nn.Dense(2, name="dense")(x)

    by_shape = kw.instrument(Model(), kw.Gaussian(), jax.ShapeDtypeStruct((4, 3), jnp.float32))
    by_value = kw.instrument(Model(), kw.Gaussian(), X)
    jax.effects_barrier()
    assert by_shape.layers == by_value.layers
    assert not calls


def test_variables_may_be_given_instead_of_initialised():
    class NoInit(nn.Module):
        @nn.compact
        def __call__(self, x):
            if self.is_initializing():
                raise RuntimeError("init takes other arguments")
            return nn.Dense(2, name="dense")(x)

    params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
    shapes = jax.eval_shape(lambda: {"params": params})
    net = kw.instrument(NoInit(), kw.Gaussian(), X, variables=shapes)
    assert_accounted(net, params)
    assert_runs_under_jit(net, params, X)


def test_other_random_streams_are_given_by_name():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            return nn.Dense(2, name="dense")(x + noise)

    rngs = {"noise": jax.random.key(0)}
    params = Noisy().init({"params": jax.random.key(0), **rngs}, X)["params"]
    net = kw.instrument(Noisy(), kw.Gaussian(), X, rngs=rngs)
    assert_runs_under_jit(net, params, X, rngs=rngs)


def test_one_key_serves_all_streams_as_in_flax():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="dense")(nn.Dropout(0.2, deterministic=False)(x))

    key = jax.random.key(0)
    params = Dropped().init(key, X)["params"]
    net = kw.instrument(Dropped(), kw.Gaussian(), X, rngs=key)
    assert_runs_under_jit(net, params, X, rngs=key)


# --- The user's model -----------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(3), name="rnn")(x)
        x = nn.LayerNorm(name="norm")(nn.Conv(4, (2,), name="conv")(x))
        return nn.remat(nn.Dense)(2, name="head")(jnp.tanh(x))


def test_the_plain_models_program_is_unchanged_by_instrumenting():
    x = np.ones((2, 3, 3), np.float32)
    params = initialised(Net(), x)
    model = Net()

    def program():
        return str(jax.make_jaxpr(jax.grad(lambda p: model.apply({"params": p}, x).sum()))(params))

    before = program()
    net = kw.instrument(model, kw.Gaussian(), x)
    factors(net, params, x, key=jax.random.key(0))
    assert program() == before


def test_gradients_through_an_instrumented_call_are_the_models_own():
    x = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    params = initialised(Net(), x)
    net = kw.instrument(Net(), kw.Gaussian(), x)
    call = net.oracle(params, x).call

    def plain(p):
        return (Net().apply({"params": p}, x) ** 2).sum()

    def instrumented(p):
        out, _ = net.model.observed_outputs(p, call, net.model.probes())
        return (out**2).sum()

    expected = jax.jit(jax.value_and_grad(plain))(params)
    got = jax.jit(jax.value_and_grad(instrumented))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-7), got, expected)


def test_statistics_and_gradient_come_from_one_pass():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Gaussian(), X)
    call = net.oracle(params, X).call

    def loss(p, probes):
        return (net.model.observed_outputs(p, call, probes)[0] ** 2).sum()

    gradient, seen = jax.grad(loss, argnums=(0, 1))(params, net.model.probes())
    plain = jax.grad(lambda p: (mlp.apply({"params": p}, X) ** 2).sum())(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient, plain)
    assert all(np.any(x) for probes in seen.values() for x in probes.values())


# --- Whole models ---------------------------------------------------------------------------------


class Transformer(nn.Module):
    vocabulary: int = 11
    width: int = 8
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embed")
        x = embed(tokens) + self.param(
            "positions", nn.initializers.normal(), (tokens.shape[1], self.width)
        )
        h = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(tokens)
        h = nn.MultiHeadDotProductAttention(2, dtype=self.dtype, normalize_qk=True)(h, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=not train)(h)
        h = nn.RMSNorm(dtype=self.dtype)(x)
        x = x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(nn.Dense(16, dtype=self.dtype)(h)))
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def test_transformer_block():
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
    model = Transformer()
    params = initialised(model, tokens)
    net = kw.instrument(model, kw.Categorical(), tokens, train=True)
    half = kw.instrument(Transformer(dtype=jnp.bfloat16), kw.Categorical(), tokens, train=True)
    assert half.layers == net.layers
    assert_accounted(net, params)
    assert_runs_under_jit(net, params, tokens, train=True, rngs={"dropout": jax.random.key(1)})
    kinds = {block.name: block.kind for block in net.layers}
    assert kinds["embed"] == "Embed, tied"
    assert kinds["MultiHeadDotProductAttention_0/query"] == "DenseGeneral"
    assert "positions" in str(net.layers)
    assert "no rule for Transformer" in net.layers["positions"].note


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        def norm():
            return nn.BatchNorm(use_running_average=not train)

        y = nn.relu(norm()(nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)))
        y = norm()(nn.Conv(4, (3, 3), use_bias=False)(y))
        shortcut = norm()(nn.Conv(4, (1, 1), strides=2, use_bias=False)(x))
        return nn.Dense(3)(nn.relu(y + shortcut).mean(axis=(1, 2)))


@pytest.mark.parametrize("train", [True, False])
def test_residual_block_with_batchnorm(train):
    x = np.random.default_rng(0).normal(size=(4, 6, 6, 2)).astype(np.float32)
    variables = Residual().init(jax.random.key(0), x, train=train)
    net = kw.instrument(Residual(), kw.Categorical(), x, train=train, uncovered="error")
    assert_accounted(net, variables["params"])
    others = {"batch_stats": variables["batch_stats"]}
    params = initialised(Residual(), x, train=train)
    assert_runs_under_jit(net, params, x, train=train, variables=others)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.max_pool(nn.Conv(5, (5, 5), padding="VALID")(x), (2, 2), (2, 2)))
        x = nn.relu(nn.max_pool(nn.Conv(7, (5, 5), padding="VALID")(x), (2, 2), (2, 2)))
        return nn.Dense(10)(nn.relu(nn.Dense(30)(x.reshape(x.shape[0], -1))))


@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_the_papers_convolutional_network(bias):
    x = np.random.default_rng(0).normal(size=(2, 28, 28, 1)).astype(np.float32)
    params = initialised(Convolutional(), x)
    net = kw.instrument(Convolutional(), kw.Categorical(), x, bias=bias, uncovered="error")
    assert sum(block.size for block in net.layers) == 4712
    assert len(net.layers) == (4 if bias == "joint" else 8)
    assert_accounted(net, params)
    assert_runs_under_jit(net, params, x)


# --- Sizes ----------------------------------------------------------------------------------------


def test_sides_beyond_max_factor_are_diagonal_and_named():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Gaussian(), X, fisher="exact", max_factor=3)
    full = kw.instrument(mlp, kw.Gaussian(), X, fisher="exact")
    assert net.layers["layers_0"].shapes == ((4,), (4,))
    assert net.layers["layers_2"].shapes == ((5,), (2, 2))
    assert "an input side of 5 is diagonal (max_factor=3)" in str(net.layers)
    assert "an output side of 4 is diagonal (max_factor=3)" in str(net.layers)
    expected = factors(full, params, X)
    expected = {
        "layers_0": tuple(jnp.diag(side) for side in expected["layers_0"]),
        "layers_2": (jnp.diag(expected["layers_2"][0]), expected["layers_2"][1]),
    }
    assert_factors(factors(net, params, X), expected, rtol=1e-5, atol=1e-6)


def largest_array(function, *args):
    """The largest array that a program makes, its inner programs included."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
            for parameter in jax.tree.leaves(equation.params):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_never_squared(tied):
    vocabulary, width = 32_000, 8

    class Language(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(vocabulary, width, name="embed")
            x = embed(tokens)
            return embed.attend(x) if tied else nn.Dense(vocabulary, name="head")(x)

    tokens = np.zeros((2, 3), np.int32)
    params = jax.eval_shape(Language().init, jax.random.key(0), tokens)["params"]
    net = kw.instrument(Language(), kw.Categorical(), tokens)
    shapes = [shape for block in net.layers for shape in block.shapes]
    assert max(int(np.prod(shape)) for shape in shapes) == vocabulary
    assert "diagonal" in net.layers["embed"].note
    if not tied:
        assert net.layers["head"].shapes == ((9, 9), (vocabulary,))

    def run(params, key):
        return net.oracle(params, tokens, key=key).factors()

    assert largest_array(run, params, jax.random.key(0)) <= vocabulary * 2 * width


# --- The table ------------------------------------------------------------------------------------


def test_the_table_names_everything_and_adds_up():
    tokens = np.zeros((2, 5), np.int32)
    net = kw.instrument(Transformer(), kw.Categorical(), tokens, max_factor=10)
    params = jax.eval_shape(Transformer().init, jax.random.key(0), tokens)["params"]
    text = str(net.layers)
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == len(net.layers) + 2
    assert len({len(line) for line in lines if line[0] in "│┌├└"}) == 1
    for block in net.layers:
        (row,) = [line for line in rows if line.split("│")[1].strip() == block.name]
        assert block.kind in row
        assert f"{block.size:,}" in row
        assert all(str(shape[-1]) in row for shape in block.shapes)
    assert f"{parameter_count(params):,}" in rows[-1]
    notes = text.split("Less than a full Kronecker block:")[1]
    for block in net.layers:
        less = not isinstance(block.block, kw.curvature.Kronecker) or (
            block.block.a_diagonal or block.block.g_diagonal
        )
        assert (block.name in notes.replace(",", "").replace(":", "").split()) == less
        assert bool(block.note) == less


def test_a_model_without_parameters_has_no_blocks():
    class Nothing(nn.Module):
        def __call__(self, x):
            return x

    net = kw.instrument(Nothing(), kw.Gaussian(), X)
    assert len(net.layers) == 0
    assert net.oracle({}, X, key=jax.random.key(0)).factors() == {}
    print(net.layers)


def test_weights_below_zero_are_an_error_that_names_the_way_out():
    net = kw.instrument(nn.Dense(3), kw.Categorical(), X)
    params = nn.Dense(3).init(jax.random.key(0), X)["params"]
    weights = jnp.ones(len(X)).at[1].set(-0.5)
    with pytest.raises(ValueError, match=r"weights must be >= 0, got .*-0.5.* loss of your own"):
        net.oracle(params, X, key=jax.random.key(0), weights=weights)


class Pair(nn.Module):
    """Returns a tuple."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x), x


PAIR = jnp.ones((4, 5))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (None, ValueError, "the model returns a tuple"),
        (lambda out: out, ValueError, "output returns a tuple"),
        (0, ValueError, "output must be a function"),
        (lambda out: out[0].sum(), ValueError, r"an array of shape \(\), and its events have 1"),
        (lambda out: out[1], ValueError, "depends on none of the model's parameters"),
        (lambda out: out[2], IndexError, "out of range"),
    ],
)
def test_outputs_that_the_likelihood_cannot_take_are_errors_of_instrument(output, error, message):
    with pytest.raises(error, match=message) as caught:
        kw.instrument(Pair(), kw.Categorical(), PAIR, output=output)
    if error is IndexError:
        assert "output is given what the model returns, here a tuple" in caught.value.__notes__


def test_the_class_of_a_likelihood_is_an_error():
    with pytest.raises(
        ValueError, match=r"as kldwrm_jax\.Categorical\(\) does, or be a tree .*, got <class"
    ):
        kw.instrument(nn.Dense(3), kw.Categorical, PAIR)


@pytest.mark.parametrize("init", [nn.initializers.lecun_normal(), nn.initializers.zeros])
def test_layers_of_width_zero_are_an_error(init):
    with pytest.raises(ValueError, match="layers of width 0"):
        kw.instrument(nn.Dense(0, kernel_init=init), kw.Gaussian(), PAIR)


def test_an_exact_fisher_of_many_passes_warns_with_their_number():
    x = jax.ShapeDtypeStruct((2, 16, 4), jnp.float32)
    with pytest.warns(UserWarning, match="32,000 backward passes.*fisher='sampled' takes one"):
        kw.instrument(nn.Dense(2000), kw.Categorical(), x, fisher="exact")


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_few_passes_need_no_warning(fisher):
    classes = 10 if fisher == "exact" else 2000
    kw.instrument(nn.Dense(classes), kw.Categorical(), jnp.ones((2, 16, 4)), fisher=fisher)
