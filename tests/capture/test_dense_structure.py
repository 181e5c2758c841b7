"""The blocks of dense structures against Fishers made of jacobians, in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets
from flax import nnx

import kldwrm_jax as kw
from kldwrm_jax.paths import leaves_by_path

pytestmark = pytest.mark.usefixtures("x64")

BATCH = 6
each_structure = pytest.mark.parametrize("structure", ["layer", "network"])


class Plain(nn.Module):
    outputs: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(param_dtype=float, name="norm")(x)
        x = jnp.tanh(nn.Dense(4, param_dtype=float, name="first")(x))
        return nn.Dense(self.outputs, param_dtype=float, name="last")(x)


class Shared(nn.Module):
    """A layer that is called twice, and a parameter without a layer."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, param_dtype=float, name="shared")
        scale = self.param("scale", nn.initializers.ones, (4,), float)
        x = jnp.tanh(layer(jnp.tanh(layer(x)) * scale))
        return nn.Dense(3, param_dtype=float, name="last")(x)


class Positions(nn.Module):
    """A convolution, and a distribution at each of its positions."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(4, (3,), param_dtype=float, name="conv")(x))
        return nn.Dense(3, param_dtype=float, name="last")(x)


class Scanned(nn.Module):
    """Three layers in one stack of parameters."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(nn.Dense(4, param_dtype=float, name="own")(x)), None

        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(3, param_dtype=float, name="last")(stack(name="stack")(x, None)[0])


def output_fisher(likelihood, h):
    """Of one sample, from the second derivative of the log density's expectation."""
    if isinstance(likelihood, kw.Gaussian):
        return np.eye(len(h)) / likelihood.variance
    p = np.exp(h - h.max())
    p = p / p.sum()
    return np.diag(p) - np.outer(p, p)


def brute_force(outputs, params, parameters, likelihood, weights=None):
    """``sum_n w_n / W J_n' H_n J_n``, for the parameters one after another."""
    h, by_path = np.asarray(outputs(params)), leaves_by_path(jax.jacobian(outputs)(params))
    j = np.concatenate([by_path[p].reshape(*h.shape, -1) for p in parameters], axis=-1)
    h, j = h.reshape(-1, h.shape[-1]), j.reshape(-1, h.shape[-1], j.shape[-1])
    w = np.ones(len(h)) if weights is None else np.ravel(weights)
    samples = zip(w / w.sum(), h, j, strict=True)
    return sum(w * j.T @ output_fisher(likelihood, h) @ j for w, h, j in samples)


def paths_of(net, name):
    return [p.path for p in net.layers[name].parameters]


def assert_close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())


CASES = {
    "categorical": (Plain(), kw.Categorical(), (BATCH, 4)),
    "gaussian": (Plain(2), kw.Gaussian(variance=0.3), (BATCH, 4)),
    "a shared layer": (Shared(), kw.Categorical(), (BATCH, 4)),
    "a sample at every position": (Positions(), kw.Categorical(), (BATCH, 5, 2)),
}


def made(model, likelihood, shape, structure, **kwargs):
    x = jax.random.normal(jax.random.key(0), shape)
    params = model.init(jax.random.key(1), x)["params"]
    net = kw.instrument(model, likelihood, x, structure=structure, **kwargs)
    return net, params, x, lambda params: model.apply({"params": params}, x)


@each_structure
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_fisher_of_their_parameters(case, weighted, structure):
    model, likelihood, shape = CASES[case]
    net, params, x, outputs = made(model, likelihood, shape, structure)
    samples = outputs(params).shape[:-1]
    weights = jnp.arange(np.prod(samples), dtype=float).reshape(samples) if weighted else None
    factors = net.oracle(params, x, weights=weights).factors()
    assert factors.keys() == {block.name for block in net.layers}
    for name, f in factors.items():
        wanted = brute_force(outputs, params, paths_of(net, name), likelihood, weights)
        assert_close(f, wanted)


def test_padding_does_not_count():
    net, params, x, _ = made(Plain(), kw.Categorical(), (BATCH, 4), "network")
    padded = jnp.concatenate([x, jnp.ones((2, 4))])
    weights = jnp.array([1.0] * BATCH + [0.0] * 2)
    (whole,) = net.oracle(params, x).factors().values()
    (got,) = net.oracle(params, padded, weights=weights).factors().values()
    assert_close(got, whole)


@pytest.mark.parametrize("case", CASES)
def test_the_block_of_a_layer_is_a_diagonal_block_of_the_networks(case):
    model, likelihood, shape = CASES[case]
    net, params, x, _ = made(model, likelihood, shape, "network")
    whole = net.oracle(params, x).factors()["network"]
    places, start = {}, 0
    for p in net.layers["network"].parameters:
        places[p.path] = range(start, start + p.size)
        start += p.size
    layered = made(model, likelihood, shape, "layer")[0]
    for name, f in layered.oracle(params, x).factors().items():
        own = np.concatenate([places[path] for path in paths_of(layered, name)])
        assert_close(f, whole[np.ix_(own, own)])


def test_each_copy_of_a_stacked_layer_has_its_own_block():
    net, params, x, outputs = made(Scanned(), kw.Categorical(), (BATCH, 4), "layer")
    (stacked,) = (block for block in net.layers if block.name.startswith("stack"))
    f = net.oracle(params, x).factors()[stacked.name]
    whole = brute_force(outputs, params, paths_of(net, stacked.name), kw.Categorical())
    kernel, bias = np.arange(48).reshape(3, 16), 48 + np.arange(12).reshape(3, 4)
    for i in range(3):
        own = np.concatenate([kernel[i], bias[i]])
        assert_close(f[i], whole[np.ix_(own, own)])


@each_structure
def test_the_fisher_of_several_terms_is_their_sum(structure):
    model = Plain(4)
    likelihoods = {"policy": kw.Categorical(), "value": kw.Gaussian(0.5)}

    def split(h):
        return {"policy": h[:, :3], "value": h[:, 3:]}

    net, params, x, outputs = made(model, likelihoods, (BATCH, 4), structure, output=split)
    weights = {"policy": jnp.arange(1.0, 1 + BATCH), "value": None}
    for name, f in net.oracle(params, x, weights=weights).factors().items():
        paths, wanted = paths_of(net, name), 0.0
        for term, likelihood in likelihoods.items():
            own = lambda params, term=term: split(outputs(params))[term]  # noqa: E731
            wanted = wanted + brute_force(own, params, paths, likelihood, weights[term])
        assert_close(f, wanted)


@each_structure
def test_terms_may_have_batches_of_different_size(structure):
    model = nn.Sequential([nn.Dense(4, param_dtype=float), nn.tanh, nn.Dense(1, param_dtype=float)])
    residuals, likelihoods, (params, inside, border) = small_nets.equation(model)
    net = kw.instrument(residuals, likelihoods, params, inside, border, structure=structure)
    for name, f in net.oracle(params, inside, border).factors().items():
        paths, wanted = paths_of(net, name), 0.0
        for term in likelihoods:
            own = lambda params, term=term: residuals(params, inside, border)[term]  # noqa: E731
            wanted = wanted + brute_force(own, params, paths, kw.Gaussian())
        assert_close(f, wanted)


@each_structure
def test_models_of_nnx_and_functions_have_the_same_blocks(structure):
    model = nnx.Linear(4, 3, param_dtype=float, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (BATCH, 4))
    net = kw.instrument(model, kw.Categorical(), x, structure=structure)
    (f,) = net.oracle(model, x).factors().values()
    params = {"kernel": model.kernel[...], "bias": model.bias[...]}

    def outputs(params, x=x):
        return x @ params["kernel"] + params["bias"]

    assert_close(f, brute_force(outputs, params, ["kernel", "bias"], kw.Categorical()))
    net = kw.instrument(outputs, kw.Categorical(), params, x, structure="network")
    (f,) = net.oracle(params, x).factors().values()
    assert_close(f, brute_force(outputs, params, ["bias", "kernel"], kw.Categorical()))


@each_structure
def test_what_the_likelihood_does_not_see_stays_apart(structure):
    class TwoHeads(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="seen")(x), nn.Dense(2, name="unseen")(x)

    x = jnp.ones((4, 3))
    net = kw.instrument(
        TwoHeads(), kw.Categorical(), x, structure=structure, output=lambda out: out[0]
    )
    names = {block.name for block in net.layers if block.unseen}
    assert names == {"unseen/kernel", "unseen/bias"}
    assert len(net.layers) == 3


@each_structure
def test_every_parameter_is_covered(structure):
    net = made(Shared(), kw.Categorical(), (BATCH, 4), structure, uncovered="error")[0]
    assert {*net.layers.parameters} >= {"scale", "shared/kernel"}


def refused(match, model=None, shape=(BATCH, 4), **kwargs):
    with pytest.raises(ValueError, match=match):
        made(model or Plain(), kw.Categorical(), shape, **kwargs)


@each_structure
def test_only_the_exact_fisher_is_computed(structure):
    for fisher in ("sampled", "empirical"):
        refused(f"structure='{structure}' .*fisher='{fisher}'", structure=structure, fisher=fisher)
    assert made(*CASES["gaussian"], structure)[0].fisher == "exact"
    assert made(*CASES["gaussian"], structure, fisher="exact")[0].fisher == "exact"
    assert made(*CASES["gaussian"], "kronecker")[0].fisher == "sampled"


@pytest.mark.parametrize(
    "given", [{"bias": "separate"}, {"sharing": "reduce"}, {"max_factor": 16}], ids=str
)
@each_structure
def test_arguments_that_are_about_factors_are_refused(structure, given):
    (name,) = given
    refused(f"{name}=.*structure='kronecker'", structure=structure, **given)


def test_an_unknown_structure_is_refused():
    refused("structure must be", structure="dense")


def wide(structure):
    model, x = nn.Dense(1000), jax.ShapeDtypeStruct((2, 100), jnp.float32)
    return lambda: kw.instrument(model, kw.Categorical(), x, structure=structure)


@pytest.mark.parametrize(
    ("structure", "way_out"),
    [
        ("network", "use structure='layer', or structure='kronecker'"),
        ("layer", "use structure='kronecker'"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused_with_its_size(structure, way_out):
    with pytest.raises(ValueError, match=rf"101,000 rows and columns: 152.0 GiB .*{way_out}"):
        wide(structure)()


def measured(net, *args, **kwargs):
    jax.eval_shape(lambda: net.oracle(*args, **kwargs).factors())


@each_structure
def test_rows_that_do_not_fit_are_refused_and_can_be_had_in_parts(structure):
    net, params, _, _ = made(nn.Dense(200), kw.Categorical(), (2, 3), structure)
    x = jnp.ones((8000, 3))
    with pytest.raises(ValueError, match=rf"rows .* GiB, and structure='{structure}' .*micro_b"):
        measured(net, params, x)
    measured(net, params, x, micro_batches=10)


@each_structure
@pytest.mark.parametrize("at_survey", [False, True])
def test_examples_that_depend_on_each_other_are_refused(structure, at_survey):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(3)(x)
            return nn.Dense(2)(nn.BatchNorm(use_running_average=not train, name="norm")(x))

    x = jnp.ones((4, 3))
    variables = Normed().init(jax.random.key(0), x, train=False)
    params = variables.pop("params")
    net = kw.instrument(Normed(), kw.Categorical(), x, train=at_survey, structure=structure)
    with pytest.raises(ValueError, match=r"'norm'.*structure='kronecker'"):
        measured(net, params, x, train=True, variables=variables)


def test_dropout_is_refused():
    model = nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False), nn.Dense(2)])
    x, rngs = jnp.ones((4, 3)), {"dropout": jax.random.key(0)}
    params = model.init({"params": jax.random.key(0), **rngs}, x)["params"]
    net = kw.instrument(model, kw.Categorical(), x, rngs=rngs, structure="network")
    with pytest.raises(ValueError, match=r"structure='network' .* dropout"):
        measured(net, params, x, rngs=rngs)


def test_a_batch_that_replicas_share_is_refused():
    net, params, x, _ = made(*CASES["gaussian"], "network", axis_name="batch")
    factors = jax.pmap(lambda x: net.oracle(params, x).factors(), axis_name="batch")
    with pytest.raises(ValueError, match=r"structure='network' needs .* axis_name"):
        factors(x[None])


def test_bases_are_refused():
    net, params, x, _ = made(*CASES["gaussian"], "network")
    with pytest.raises(ValueError, match="bases are for the two sides"):
        net.oracle(params, x).factors({"network": (None, None)})


def test_the_table_names_the_matrix():
    net = made(*CASES["gaussian"], "network")[0]
    assert "(38, 38)" in str(net.layers)
