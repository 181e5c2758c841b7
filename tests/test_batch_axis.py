"""A batch that is split over a named axis against the whole batch.

Replicas are made by ``vmap(..., axis_name=...)``, or by ``shard_map`` over one device, where JAX
checks types as it does with many. ``test_axis_name.py`` has two devices.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import kldwrm_jax as kw
from kldwrm_jax.batch_axis import BatchAxis

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)), RNG.integers(0, 3, 8)
W = np.array([1.0, 0.0, 2.0, 0.5, 0.1, 0.0, 0.0, 0.3])
MODEL = nn.Sequential([nn.Dense(3, param_dtype=float), nn.tanh, nn.Dense(3, param_dtype=float)])
PARAMS = jax.tree.map(
    lambda p: np.asarray(p, np.float64), MODEL.init(jax.random.key(0), X)["params"]
)
STEP = jax.tree.map(lambda p: 0.1 * p + 0.01, PARAMS)


def instrument(model=MODEL, x=X, **options):
    return kw.instrument(model, kw.Categorical(), x, **options)


def split(x):
    return np.stack(np.split(x, 2))


def on_replicas(function, *batch):
    """``function`` of each half of the batch, whose results must agree."""
    out = jax.vmap(function, axis_name="batch")(*map(split, batch))
    jax.tree.map(lambda x: np.testing.assert_allclose(x[0], x[1], rtol=1e-12, atol=1e-14), out)
    return jax.tree.map(lambda x: x[0], out)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), a, b)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("parts", [1, 2])
def test_everything_measured_is_that_of_the_whole_batch(fisher, parts):
    def measured(net):
        def measure(x, y):
            loss, gradient, oracle = net.value_and_grad(PARAMS, x, targets=y, micro_batches=parts)
            report = kw.kl_report(oracle, PARAMS, STEP)
            slope = jax.jvp(oracle.loss, (PARAMS,), (STEP,))[1]
            evidence = oracle.evidence([gradient, STEP])  # by which steps set themselves
            own = jax.grad(oracle.loss)(PARAMS)
            return loss, gradient, own, slope, report, evidence, oracle.factors()

        return measure

    whole = measured(instrument(fisher=fisher))(X, Y)
    part = measured(instrument(fisher=fisher, axis_name="batch"))
    close(on_replicas(part, X, Y), whole)


def test_weights_count_by_their_sum_over_the_replicas():
    def measured(net):
        def measure(x, y, w):
            oracle = net.oracle(PARAMS, x, targets=y, weights=w)
            return oracle.loss(PARAMS), oracle.quadratic(STEP), jax.grad(oracle.loss)(PARAMS)

        return measure

    whole = measured(instrument())(X, Y, W)
    close(on_replicas(measured(instrument(axis_name="batch")), X, Y, W), whole)


def test_replicas_draw_labels_of_their_own():
    """From one key, for one example many times over: otherwise G would be that of one label."""
    net = instrument(axis_name="batch")

    def factors(x):
        return net.oracle(PARAMS, x, key=jax.random.key(1)).factors()["layers_2"]

    same = np.broadcast_to(X[:1], (64, 1, 4))
    _, g = jax.vmap(factors, axis_name="batch")(same)
    assert np.linalg.matrix_rank(g[0], tol=1e-6) == 2
    np.testing.assert_allclose(g[0], g[-1], rtol=1e-12)


class Named(nn.Module):
    """As in Flax's ImageNet example."""

    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, param_dtype=float)(x)
        x = nn.BatchNorm(False, axis_name=self.axis_name, param_dtype=float)(x)
        return nn.Dense(3, param_dtype=float)(x)


class NamedNNX(nnx.Module):
    """The same."""

    def __init__(self, axis_name):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 4, param_dtype=float, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, param_dtype=float, rngs=rngs)
        self.last = nnx.Linear(4, 3, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def test_a_model_with_a_named_axis_normalises_over_the_whole_batch():
    variables = Named(None).init(jax.random.key(0), X)
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    whole = instrument(Named(None), fisher="empirical")
    part = instrument(Named(), fisher="empirical", axis_name="batch")
    assert [b.name for b in part.layers] == [b.name for b in whole.layers]

    def measured(net):
        def measure(x, y):
            loss, gradient, oracle = net.value_and_grad(params, x, targets=y, variables=stats)
            return loss, gradient, oracle.variables, oracle.factors()

        return measure

    close(on_replicas(measured(part), X, Y), measured(whole)(X, Y))


def test_an_nnx_model_with_a_named_axis_does_so_too():
    def measured(axis_name):
        model = NamedNNX(axis_name)
        net = instrument(model, fisher="empirical", axis_name=axis_name)
        params, others = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))

        def measure(x, y):
            return net.oracle(params, x, targets=y, variables=others).factors()

        return measure

    close(on_replicas(measured("batch"), X, Y), measured(None)(X, Y))


def test_other_variables_are_the_mean_over_the_replicas():
    model = Named(None)  # each replica normalises its own part
    variables = model.init(jax.random.key(0), X)
    net = instrument(model, fisher="empirical", axis_name="batch")

    def after(x, y):
        stats = {"batch_stats": variables["batch_stats"]}
        return net.value_and_grad(variables["params"], x, targets=y, variables=stats)[2].variables

    def alone(x):
        return model.apply(variables, x, mutable="batch_stats")[1]

    parts = [alone(x) for x in split(X)]
    close(on_replicas(after, X, Y), jax.tree.map(lambda a, b: (a + b) / 2, *parts))


@pytest.mark.parametrize("model", [Named(), NamedNNX("batch")], ids=["linen", "nnx"])
def test_a_named_axis_that_instrument_does_not_know_is_an_error(model):
    with pytest.raises(ValueError, match=r"pass instrument\(\.\.\., axis_name='batch'\)"):
        instrument(model)
    with pytest.raises(ValueError, match=r"got axis_name=.*other"):
        instrument(model, axis_name="other")


def test_an_axis_that_is_not_bound_is_an_error():
    oracle = instrument(axis_name="batch", fisher="exact").oracle(PARAMS, X, targets=Y)
    for measure in (oracle.factors, lambda: oracle.loss(PARAMS), oracle.value_and_grad):
        with pytest.raises(ValueError, match=r"'batch'.* is not bound: call this inside jax"):
            measure()


@pytest.mark.parametrize("wrong", [3, ("batch", 1), b"batch"])
def test_an_axis_is_given_by_its_name(wrong):
    with pytest.raises(ValueError, match="axis_name must be the name of an axis"):
        instrument(axis_name=wrong)


@pytest.mark.parametrize("what", ["batch", "parameters"])
def test_explicit_shardings_are_an_error_with_the_way_out(what):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    sharded = jax.NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(PARAMS, sharded) if what == "parameters" else PARAMS
    x = jax.device_put(X, sharded) if what == "batch" else X
    net = instrument(fisher="exact")

    @jax.jit
    def factors(params, x):
        return net.oracle(params, x).factors()

    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"the {what} .*'data'.*Auto"):
        factors(params, x)
    with jax.set_mesh(mesh):  # of which nothing is sharded over it
        close(factors(PARAMS, X), net.oracle(PARAMS, X).factors())


def test_two_axes_are_one_batch():
    net = instrument(fisher="exact", axis_name=("rows", "columns"))
    x = X.reshape(2, 2, 2, 4)

    def factors(x):
        return net.oracle(PARAMS, x).factors()

    mapped = jax.vmap(jax.vmap(factors, axis_name="columns"), axis_name="rows")(x)
    whole = instrument(fisher="exact").oracle(PARAMS, X).factors()
    close(jax.tree.map(lambda f: f[1, 0], mapped), whole)


def test_the_gradient_is_averaged_and_the_value_untouched():
    axis = BatchAxis(("batch",))

    def f(x, c):
        return c * axis.averaging_gradient({"x": x, "n": 3})["x"] ** 2

    gradient = jax.vmap(jax.grad(f), (None, 0), axis_name="batch")(2.0, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(gradient, 2 * 2.0 * 2.0)


class Every(nn.Module):
    """Every kind of layer."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(5, 4, param_dtype=float)(tokens)[..., None]
        x = nn.tanh(nn.Conv(2, (2, 2), param_dtype=float)(x))
        x = nn.LayerNorm(param_dtype=float)(x.reshape(x.shape[0], -1))
        x = x * self.param("gain", nn.initializers.ones, x.shape[-1:], float)
        return nn.Dense(3, param_dtype=float)(x)


@pytest.mark.parametrize("fisher", ["empirical", "exact", "sampled"])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_layer_has_the_types_that_shard_map_checks(fisher, parts):
    tokens, y = RNG.integers(0, 5, (4, 3)), Y[:4]
    model = Every()
    params = model.init(jax.random.key(0), tokens)["params"]
    net = instrument(model, tokens, fisher=fisher, axis_name="batch")
    whole = instrument(model, tokens, fisher=fisher)
    bases = {"Dense_0": (jnp.eye(25), None), "Conv_0": (None, jnp.eye(2))}
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))

    def factors(net, tokens, y):
        key = jax.random.key(1)
        oracle = net.oracle(params, tokens, targets=y, key=key, micro_batches=parts)
        return oracle.factors(bases)

    def here(tokens, y):
        return factors(net, tokens, y)

    checked = jax.shard_map(
        here, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec()
    )
    got = jax.jit(checked)(tokens, y)
    if fisher != "sampled":  # keys differ
        expected = factors(whole, tokens, y)
        for name in ("Dense_0", "Conv_0", "Embed_0"):
            close(got[name], expected[name])
