"""Models that take derivatives by their inputs: the rows that these add to their layers."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture import uses
from capture.twins import assert_same, normal
from flax import nnx
from small_nets import jit

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(3)
SIZES = (3, 5, 4, 1)


def weights_of(*sizes):
    """Kernels without biases."""
    shapes = itertools.pairwise(sizes)
    return [normal(*shape, seed=i) / np.sqrt(shape[0]) for i, shape in enumerate(shapes)]


def biased(kernels):
    return [{"kernel": w, "bias": 0.3 * normal(w.shape[1], seed=i)} for i, w in enumerate(kernels)]


def without_bias(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh(x) if i else x
        x = kw.tag(w, x, x @ w)
    return x


def network(params, x):
    for i, p in enumerate(params):
        x = jnp.tanh(x) if i else x
        x = kw.tag(p["kernel"], x, x @ p["kernel"] + p["bias"], bias=p["bias"])
    return x


def factors_of(function, params, x, fisher="exact", **kwargs):
    net = kw.instrument(function, kw.Gaussian(), params, x, fisher=fisher)
    return jit(lambda p: net.oracle(p, x, key=KEY, **kwargs).factors())(params)


def unit_directions(outputs):
    """Those of ``fisher="exact"`` with a Gaussian: one for every output of an example."""
    n, k = outputs.shape
    return [jnp.zeros((n, k)).at[:, i].set(1 / np.sqrt(n)) for i in range(k)]


def fisher_of(function, params, x):
    """The exact Fisher of a Gaussian's mean, for the row-major ``[W; b]`` of each layer."""
    jacobian = jax.jacobian(lambda p: function(p, x))(params)
    blocks = []
    for own in jacobian:
        j = np.concatenate([own["kernel"], own["bias"][..., None, :]], axis=-2)
        j = j.reshape(-1, j.shape[-2] * j.shape[-1])
        blocks.append(j.T @ j / len(x))
    return blocks


def value_and_laplacian(u, x):
    """At one point or at a batch of them, along every axis at once."""

    def along(v):
        v = jnp.broadcast_to(v, x.shape)
        (value, _), (_, second) = jax.jvp(lambda x: jax.jvp(u, (x,), (v,)), (x,), (v,))
        return value, second

    value, seconds = jax.vmap(along, out_axes=(None, 0))(jnp.eye(x.shape[-1]))
    return value, seconds.sum(axis=0)


def _along(f, x, v):
    return jax.jvp(f, (x,), (v,))[1]


def _energy(u, v):
    return lambda x: u(x)[0] * v[0]


# Ways to nest derivatives of a function of a point, along a direction.
NESTS = {
    "forward": lambda u, x, v: _along(u, x, v) + u(x) ** 2,
    "linearized": lambda u, x, v: jax.linearize(u, x)[1](v),
    "forward over forward": lambda u, x, v: _along(lambda x: _along(u, x, v), x, v),
    "reverse": lambda u, x, v: jax.grad(_energy(u, v))(x),
    "forward over reverse": lambda u, x, v: _along(jax.grad(_energy(u, v)), x, v),
    "reverse over forward": lambda u, x, v: jax.grad(lambda x: _along(_energy(u, v), x, v) * v[0])(
        x
    ),
    "reverse over reverse": lambda u, x, v: jax.grad(lambda x: jax.grad(_energy(u, v))(x) @ v)(x),
    "forward over reverse over forward": lambda u, x, v: _along(
        jax.grad(lambda x: _along(_energy(u, v), x, v) * v[0]), x, v
    ),
}


@pytest.mark.parametrize("nest", NESTS)
def test_every_product_of_a_derivative_is_a_row(nest):
    """Against the products with kernels in the program's jaxpr, found without any of our code."""
    params, x, v = weights_of(*SIZES), normal(6, 3), normal(6, 3, seed=8)

    def function(params, x):
        return jax.vmap(lambda x, v: NESTS[nest](lambda x: without_bias(params, x), x, v))(x, v)

    made = factors_of(function, params, x)
    expected = uses.terms(function, params, x, unit_directions(function(params, x)))
    assert len(made) == 3
    for (a, g), (a1, g1, a2, g2) in zip(made.values(), expected, strict=True):
        if "reverse" not in nest:
            np.testing.assert_allclose(a, a1, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(g, g1, rtol=1e-9, atol=1e-12)
        total = np.kron(a1, g1) + np.kron(a2, g2)
        total = total.reshape(len(a), len(g), len(a), len(g))
        assert np.trace(a) * np.trace(g) > 0
        np.testing.assert_allclose(
            a * np.trace(g), np.einsum("ikjk->ij", total), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            g * np.trace(a), np.einsum("kikj->ij", total), rtol=1e-9, atol=1e-12
        )


# One layer after fixed features, whose block is the exact Fisher.
FEATURES = normal(3, 6, seed=11)
RESIDUALS = {
    "slope": lambda u, x: jax.jvp(u, (x,), (jnp.array([0.7, -0.4, 0.2]),))[1],
    "Laplacian by jvp": lambda u, x: value_and_laplacian(u, x)[1],
    "Laplacian by jacfwd": lambda u, x: jnp.trace(jax.jacfwd(jax.jacfwd(u))(x)[0])[None],
    "Laplacian by hessian": lambda u, x: jnp.trace(jax.hessian(u)(x)[0])[None],
    "force": lambda u, x: -jax.grad(lambda x: u(x)[0])(x),
    "two outputs of one Jacobian": lambda u, x: jax.jacfwd(u)(x)[0, :2],
}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_one_layer_after_fixed_features_has_the_exact_fisher(residual):
    params, x = biased([normal(6, 1)]), normal(7, 3)

    def function(params, x):
        def u(x):
            return network(params, jnp.tanh(x @ FEATURES))

        return jax.vmap(lambda x: RESIDUALS[residual](u, x))(x)

    ((a, g),) = factors_of(function, params, x).values()
    (exact,) = fisher_of(function, params, x)
    assert np.trace(exact) > 0.1
    np.testing.assert_allclose(np.kron(a, g), exact, rtol=1e-10, atol=1e-10)


def laplacian_rows(params, x, added):
    """-(Laplacian u) - u^3, written out with the rows of nested ``jvp`` along every axis.

    Returns the residual and, of each layer, the inputs of its rows: of the value, of the slopes
    (twice: ``jvp`` of ``jvp`` has two), and of the Laplacian.
    """
    slope, inputs = jnp.eye(x.shape[1])[:, None] + 0 * x, []
    value, other, laplacian = x, slope, 0 * x
    for i, p in enumerate(params):
        if i:
            h, d1 = jnp.tanh(value), 1 - jnp.tanh(value) ** 2
            laplacian = d1 * laplacian - (2 * h * d1 * slope * other).sum(axis=0)
            value, slope, other = h, d1 * slope, d1 * other
        inputs.append((value, slope, other, laplacian))
        rows = [row @ p["kernel"] for row in inputs[-1]]
        rows[0] = rows[0] + p["bias"]
        value, slope, other, laplacian = map(jnp.add, rows, added[i])
    return -laplacian - value**3, inputs


def kfac_by_hand(params, x, directions):
    """``(A, G)`` of each layer of :func:`laplacian_rows`."""
    like = [(6, SIZES[i + 1]) for i in range(3)]
    zeros = [[jnp.zeros(s), *(jnp.zeros((3, *s)),) * 2, jnp.zeros(s)] for s in like]
    _, vjp, inputs = jax.vjp(lambda e: laplacian_rows(params, x, e), zeros, has_aux=True)
    made = []
    for i in range(3):
        a_sum, g_sum, count = 0, 0, 0
        for direction in directions:
            for row, (x_row, g_row) in enumerate(zip(inputs[i], vjp(direction)[0][i], strict=True)):
                one = np.full((*x_row.shape[:-1], 1), float(row == 0))
                a = np.concatenate([x_row, one], axis=-1).reshape(-1, x_row.shape[-1] + 1)
                g = np.reshape(g_row, (len(a), -1))
                live = np.any(a != 0, axis=1) & np.any(g != 0, axis=1)
                a_sum = a_sum + a[live].T @ a[live]
                g_sum = g_sum + g[live].T @ g[live]
                count = count + live.sum()
        made.append((a_sum / count, g_sum))
    return made


def residual_at(u, x):
    """At one point or at a batch of them."""
    value, laplacian = value_and_laplacian(u, x)
    return -laplacian - value**3


def residual(params, x):
    return residual_at(lambda x: network(params, x), x)


def cotangent(outputs, fisher, targets):
    if fisher == "exact":
        return unit_directions(outputs)
    if fisher == "sampled":
        targets = kw.Gaussian().sample(KEY, outputs)
    return [(outputs - targets) / np.sqrt(len(outputs))]


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_a_laplacian_has_the_factors_of_the_network_written_out(fisher):
    params, x = biased(weights_of(*SIZES)), normal(6, 3)
    made = factors_of(residual, params, x, fisher, targets=jnp.zeros((6, 1)))
    zeros = [[0, 0, 0, 0]] * 3
    outputs = laplacian_rows(params, x, zeros)[0]
    np.testing.assert_allclose(residual(params, x), outputs, rtol=1e-10)
    expected = kfac_by_hand(params, x, cotangent(outputs, fisher, jnp.zeros((6, 1))))
    assert_same(dict(enumerate(made.values())), dict(enumerate(expected)))


class Tanh(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(SIZES[1:]):
            x = nn.Dense(size, name=f"layer_{i}")(jnp.tanh(x) if i else x)
        return x


class TanhNNX(nnx.Module):
    def __init__(self, params):
        for i, p in enumerate(params):
            layer = nnx.Linear(*p["kernel"].shape, rngs=nnx.Rngs(0))
            layer.kernel, layer.bias = nnx.Param(p["kernel"]), nnx.Param(p["bias"])
            setattr(self, f"layer_{i}", layer)

    def __call__(self, x):
        for i in range(3):
            x = getattr(self, f"layer_{i}")(jnp.tanh(x) if i else x)
        return x


def test_tags_linen_and_nnx_give_the_same_factors_batched_and_one_by_one():
    params, x = biased(weights_of(*SIZES)), normal(6, 3)
    named = {f"layer_{i}": p for i, p in enumerate(params)}
    graph, state = nnx.split(TanhNNX(params))

    def linen(params, x):
        def one(x):
            return Tanh().apply({"params": params["network"]}, x)

        return jax.vmap(lambda x: residual_at(one, x))(x)

    def in_nnx(state, x):
        return residual_at(nnx.merge(graph, state), x)

    tagged = factors_of(residual, params, x)
    expected = {f"layer_{i}": own for i, own in enumerate(tagged.values())}
    assert_same(factors_of(in_nnx, state, x), expected)
    inside = {f"network/{name}": own for name, own in expected.items()}
    assert_same(factors_of(linen, {"network": named}, x), inside)


def test_layers_in_a_scan_have_the_rows_of_the_unrolled_ones():
    kernels = [normal(4, 4, seed=i) / 2 for i in range(3)]
    x, v = normal(6, 4), normal(6, 4, seed=5)

    def step(x, w):
        return kw.tag(w, jnp.tanh(x), jnp.tanh(x) @ w)

    def unrolled(kernels, x):
        def u(x):
            for w in kernels:
                x = step(x, w)
            return x

        return jnp.concatenate(jax.jvp(u, (x,), (v,)), axis=1)

    def scanned(stack, x):
        def u(x):
            return jax.lax.scan(lambda x, w: (step(x, w), None), x, stack)[0]

        return jnp.concatenate(jax.jvp(u, (x,), (v,)), axis=1)

    expected = factors_of(unrolled, kernels, x)
    ((a, g),) = factors_of(scanned, jnp.stack(kernels), x).values()
    for i, own in enumerate(expected.values()):
        np.testing.assert_allclose(a[i], own[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(g[i], own[1], rtol=1e-9, atol=1e-12)


def test_weights_reach_every_direction():
    """A weight of 0 or 1 is an example that is left out or not."""
    params, x = biased(weights_of(*SIZES)), normal(6, 3)
    weights = jnp.array([1.0, 0, 1, 1, 0, 1])
    made = factors_of(residual, params, x, weights=weights)
    assert_same(made, factors_of(residual, params, x[weights > 0]))


def test_a_separate_bias_has_the_rows_of_the_value_alone():
    params, x, v = biased([normal(3, 2)]), normal(6, 3), normal(6, 3, seed=5)

    def function(params, x):
        return sum(jax.jvp(lambda x: network(params, x), (x,), (v,)))

    net = kw.instrument(function, kw.Gaussian(), params, x, fisher="exact", bias="separate")
    made = jit(lambda p: net.oracle(p, x).factors())(params)
    rows = np.concatenate([x, v])
    np.testing.assert_allclose(made["0/kernel"][0], rows.T @ rows / 12, rtol=1e-10)
    np.testing.assert_allclose(made["0/kernel"][1], 2 * np.eye(2), atol=1e-10)
    np.testing.assert_allclose(made["0/bias"][0], [[1.0]])
    np.testing.assert_allclose(made["0/bias"][1], np.eye(2), atol=1e-10)


def test_a_convolution_and_a_normalisation_have_exact_blocks_where_those_are_exact():
    """Of a force through one place of a convolution; of a slope of a normalisation."""
    x, v = normal(5, 4, 2), normal(5, 4, 2, seed=5)
    model, norm = nn.Conv(1, (4,), padding="VALID", use_bias=False), nn.LayerNorm(use_bias=False)

    def force(params, x):
        energy = lambda x: model.apply({"params": params}, jnp.tanh(x)).sum()  # noqa: E731
        return jax.grad(energy)(x).reshape(5, -1)

    params = {"kernel": normal(4, 2, 1)}
    ((a, g),) = factors_of(force, params, x).values()
    j = jax.jacobian(lambda p: force(p, x))(params)["kernel"].reshape(-1, 8)
    np.testing.assert_allclose(a * g, j.T @ j / 5, rtol=1e-9, atol=1e-12)

    def slope(params, x):
        flat = x.reshape(5, -1), v.reshape(5, -1)
        return jax.jvp(lambda x: norm.apply({"params": params}, x), *[(y,) for y in flat])[1]

    params = {"scale": normal(8)}
    (diagonal,) = factors_of(slope, params, x).values()
    j = jax.jacobian(lambda p: slope(p, x))(params)["scale"].reshape(-1, 8)
    np.testing.assert_allclose(diagonal, (j**2).sum(axis=0) / 5, rtol=1e-9)


def test_both_ways_to_a_gradient_and_the_quadratic_model():
    params, x = biased(weights_of(*SIZES)), normal(6, 3)
    targets = jnp.zeros((6, 1))
    net = kw.instrument(residual, kw.Gaussian(), params, x)
    _, grads, oracle = jit(lambda p: net.value_and_grad(p, x, targets=targets, key=KEY))(params)
    own = jax.grad(lambda p: 0.5 * jnp.mean(residual(p, x) ** 2))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), grads, own)
    assert_same(oracle.factors(), net.oracle(params, x, key=KEY).factors())
    step = jax.tree.map(lambda p: 0.1 * jnp.cos(p), params)
    change = jax.jvp(lambda p: residual(p, x), (params,), (step,))[1]
    np.testing.assert_allclose(oracle.quadratic(step), 0.5 * jnp.mean(change**2), rtol=1e-9)


@pytest.mark.parametrize("function", ["energy", "poisson"])
def test_kfac_trains_what_it_could_not(function):
    params, x = biased(weights_of(2, 16, 16, 1)), normal(64, 2)
    truth = jnp.stack([jnp.cos(x[:, 0]), x[:, 1]], axis=1)

    def force(params, x):
        return -jax.grad(lambda x: network(params, x).sum())(x)

    model, y = (force, truth) if function == "energy" else (residual, jnp.ones((64, 1)))
    net = kw.instrument(model, kw.Gaussian(), params, x)
    tx = kw.kfac(net.layers, 1.0, damping=1e-2, kl_clip=1.0, calibrate=True, refresh_every=1)

    def step(carry, key):
        params, state = carry
        _, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return (jax.tree.map(jnp.add, params, updates), state), None

    keys = jax.random.split(KEY, 40)
    (trained, _), _ = jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys))(params)
    before, after = (jnp.mean((model(p, x) - y) ** 2) for p in (params, trained))
    assert after < 0.02 * before


def by_parameters(params, x):
    return jax.jvp(network, (params, x), (jax.tree.map(jnp.zeros_like, params), x))[1]


def past_inputs(params, x):
    def u(x):
        p = params[0]
        return kw.tag(p["kernel"], jax.lax.stop_gradient(x), x @ p["kernel"])

    return jax.jvp(u, (x,), (x,))[1]


def through_a_table(params, x):
    def u(x):
        kernel = params[0]["kernel"]
        return kw.tag(kernel, x, x @ kernel.T, layout="attend").sum()

    return jax.grad(u)(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_parameters, r"by the parameters of '0'.*lambda x: network\(params, x\)"),
        (past_inputs, "'0/kernel' has a derivative that its input has not"),
        (through_a_table, r"layer '0/kernel': a reverse-mode.*forward mode"),
    ],
)
def test_what_is_not_supported_is_refused_by_instrument(function, message):
    params = biased([normal(3, 3)])
    with pytest.raises(NotImplementedError, match=message):
        kw.instrument(function, kw.Gaussian(), params, normal(6, 3))


def test_a_reverse_derivative_that_was_not_instrumented_is_an_error():
    params, x = biased([normal(3, 1)]), normal(6, 3)

    def function(params, x, force=False):
        if force:
            return jax.grad(lambda x: (network(params, x) ** 2).sum())(x)
        return network(params, x)

    net = kw.instrument(function, kw.Gaussian(), params, x)
    with pytest.raises(ValueError, match="differentiated in another way"):
        net.oracle(params, x, force=True, key=KEY).factors()


def test_a_forward_laplacian_of_folx_has_a_row_for_value_slopes_and_laplacian():
    folx = pytest.importorskip("folx")
    params, x = biased(weights_of(*SIZES)), normal(6, 3)

    def laplacian(x, u):
        return folx.forward_laplacian(lambda x: u(x)[0])(x).laplacian[None]

    def function(params, x):
        return jax.vmap(lambda x: laplacian(x, lambda x: network(params, x)))(x)

    def written_out(params, x):
        """Each product is tagged by itself, without a bias for all but the value."""
        n, d = x.shape
        slopes, second = jnp.broadcast_to(jnp.eye(d), (n, d, d)), jnp.zeros_like(x)
        for i, p in enumerate(params):
            if i:
                h, d1 = jnp.tanh(x), 1 - jnp.tanh(x) ** 2
                second = d1 * second - 2 * h * d1 * (slopes**2).sum(axis=1)
                x, slopes = h, d1[:, None] * slopes
            x = x @ p["kernel"] + p["bias"]
            slopes, second = slopes @ p["kernel"], second @ p["kernel"]
        return second

    np.testing.assert_allclose(function(params, x), written_out(params, x), rtol=1e-9)
    made = factors_of(function, params, x)
    kernels = [p["kernel"] for p in params]
    biases = [p["bias"] for p in params]

    def of_kernels(kernels, x):
        own = [{"kernel": w, "bias": b} for w, b in zip(kernels, biases, strict=True)]
        return written_out(own, x)

    expected = uses.terms(of_kernels, kernels, x, unit_directions(function(params, x)))
    for (a, g), (a1, g1, *_) in zip(made.values(), expected, strict=True):
        np.testing.assert_allclose(a[:-1, :-1], a1, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(g, g1, rtol=1e-9, atol=1e-12)
