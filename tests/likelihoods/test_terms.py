"""Several likelihoods, on batches of different size: sums over terms, against the jacobian."""

import functools

import dense_fisher
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

LIKELIHOODS = {"class": kw.Categorical(), "value": kw.Scaled(kw.Gaussian(variance=0.7), 3.0)}
N, M = 6, 4  # examples of the two terms


class Net(nn.Module):
    """A trunk with a normalisation, a head for each term."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4, param_dtype=float)(x))
        x = nn.LayerNorm(param_dtype=float)(x)
        heads = nn.Dense(3, param_dtype=float), nn.Dense(2, param_dtype=float)
        return heads[0](x), heads[1](x)


def function(params, x, z):
    """The outputs of the terms, each on points of its own."""
    network = Net()
    return {
        "class": network.apply({"params": params}, x)[0],
        "value": network.apply({"params": params}, z)[1],
    }


class Problem:
    """A batch for both terms, and what each is by itself."""

    def __init__(self, rng, sizes=(N, M), weighted=False, likelihoods=LIKELIHOODS):
        n, m = sizes
        self.likelihoods = likelihoods
        self.x, self.z = jnp.asarray(rng.normal(size=(n, 5))), jnp.asarray(rng.normal(size=(m, 5)))
        self.params = Net().init(jax.random.key(0), self.x)["params"]
        self.targets = {
            "class": jnp.asarray(rng.integers(3, size=n)),
            "value": jnp.asarray(rng.normal(size=(m, 2))),
        }
        weights = {"class": None, "value": jnp.asarray(rng.uniform(size=m))}
        self.weights = weights if weighted else None

    def net(self, **options):
        return kw.instrument(function, self.likelihoods, self.params, self.x, self.z, **options)

    def oracle(self, net=None, **options):
        given = {"targets": self.targets, "weights": self.weights, "key": jax.random.key(1)}
        given |= options
        return (net or self.net()).oracle(self.params, self.x, self.z, **given)

    def alone(self, name, **options):
        """The oracle of one term."""
        x = (self.x, self.z)
        net = kw.instrument(
            function,
            self.likelihoods[name],
            self.params,
            *x,
            output=lambda out: out[name],
            **options,
        )
        weights = self.weights[name] if self.weights else None
        return net.oracle(
            self.params, *x, targets=self.targets[name], weights=weights, key=jax.random.key(1)
        )

    def fisher(self):
        """The dense Fisher, of both terms."""
        return sum(
            dense_fisher.matrix(
                lambda p, name=name: function(p, self.x, self.z)[name],
                self.params,
                likelihood,
                self.weights and self.weights[name],
            )
            for name, likelihood in self.likelihoods.items()
        )


@pytest.fixture(params=[False, True], ids=["", "weighted"])
def problem(rng, request):
    return Problem(rng, weighted=request.param)


def test_the_loss_is_the_sum_of_the_terms_means(problem):
    oracle, h = problem.oracle(), function(problem.params, problem.x, problem.z)
    nll = {k: own.nll(h[k], problem.targets[k]) for k, own in problem.likelihoods.items()}
    share = problem.weights["value"] if problem.weights else jnp.ones(M)
    expected = nll["class"].mean() + (nll["value"] * share).sum() / share.sum()
    np.testing.assert_allclose(oracle.loss(problem.params), expected, rtol=1e-12)
    loss, gradient, _ = oracle.value_and_grad()
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14),
        gradient,
        jax.grad(oracle.loss)(problem.params),
    )


def test_quadratic_and_divergence_are_those_of_the_summed_fisher(problem, rng):
    oracle = problem.oracle()
    flat, unravel = ravel_pytree(problem.params)
    v = rng.normal(size=(2, flat.size))
    expected = v @ problem.fisher() @ v.T
    np.testing.assert_allclose(oracle.gram([*map(unravel, v)]), expected, rtol=1e-10)
    step = 1e-4 * v[0]
    moved = oracle.divergence(oracle.outputs(problem.params), oracle.outputs(unravel(flat + step)))
    np.testing.assert_allclose(moved, 0.5 * 1e-8 * expected[0, 0], rtol=1e-3)
    assert oracle.event_size == 5


@jax.jit
def factors(oracle):
    return oracle.factors()


def partial_traces(product):
    """Of ``A x G``: on either side."""
    a, g = product
    return a * jnp.trace(g), g * jnp.trace(a)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_blocks_have_the_partial_traces_of_the_sum_of_the_terms(problem, fisher):
    """A term's own factors know nothing of the other's points and weights."""
    got = factors(problem.oracle(problem.net(fisher=fisher)))
    each = [factors(problem.alone(name, fisher=fisher)) for name in LIKELIHOODS]
    for name, own in got.items():
        if not isinstance(own, tuple):
            np.testing.assert_allclose(own, sum(f[name] for f in each), rtol=1e-9, err_msg=name)
            continue
        seeing = [f[name] for f in each if name in f]  # a head is seen by its own term alone
        expected = [sum(side) for side in zip(*map(partial_traces, seeing), strict=True)]
        for side, wanted in zip(partial_traces(own), expected, strict=True):
            np.testing.assert_allclose(side, wanted, rtol=1e-9, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(own[0][-1, -1], 1, err_msg=name)  # a mean over rows


def linear(params, x, z):
    """One layer on fixed features."""
    layer = nn.Dense(params["kernel"].shape[1])
    return {k: layer.apply({"params": params}, v) for k, v in (("first", x), ("second", z))}


def layer(rng, outputs, m=M, likelihoods=None, **options):
    x, z = jnp.asarray(rng.normal(size=(N, 3))), jnp.asarray(rng.normal(size=(m, 3)) + 1)
    params = {"kernel": jnp.asarray(rng.normal(size=(3, outputs))), "bias": jnp.zeros(outputs)}
    likelihoods = likelihoods or {
        "first": kw.Scaled(kw.Residuals(variance=0.3), 2.0),
        "second": kw.Gaussian(variance=5.0),
    }
    net = kw.instrument(linear, likelihoods, params, x, z, **options)
    return net, params, (x, z)


def dense_layer(params, batch, likelihoods):
    matrix = jnp.concatenate([params["kernel"], params["bias"][None]])

    def outputs(m, name):
        return linear({"kernel": m[:-1], "bias": m[-1]}, *batch)[name]

    return sum(
        dense_fisher.matrix(lambda m, name=name: outputs(m, name), matrix, own)
        for name, own in likelihoods.items()
    )


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_block_of_a_layer_after_fixed_features_is_exact(outputs, rng):
    """Every G is a multiple of the identity, and the sum of Kronecker products is one."""
    net, params, batch = layer(rng, outputs, fisher="exact")
    ((a, g),) = net.oracle(params, *batch).factors().values()
    expected = dense_layer(params, batch, net.likelihood)
    np.testing.assert_allclose(jnp.kron(a, g), expected, rtol=1e-10, atol=1e-12)


def test_sampled_blocks_have_the_exact_one_as_their_expectation(rng):
    net, params, batch = layer(rng, 1)
    (name,) = (block.name for block in net.layers)

    @jax.vmap
    def draw(key):
        a, g = net.oracle(params, *batch, key=key).factors()[name]
        return jnp.kron(a, g)

    mean = draw(jax.random.split(jax.random.key(0), 4000)).mean(axis=0)
    expected = dense_layer(params, batch, net.likelihood)
    np.testing.assert_allclose(mean, expected, rtol=0.1, atol=0.05 * expected.max())


def test_every_term_draws_labels_of_its_own(rng):
    same = {"first": kw.Gaussian(), "second": kw.Gaussian()}
    net, params, (x, _) = layer(rng, 1, likelihoods=same)
    terms = net.oracle(params, x, x, key=jax.random.key(0)).terms
    (one, _), (two, _) = (term.directions(jnp.zeros((N, 1)), ()) for term in terms.each)
    assert not np.isclose(one, two).any()


@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
def test_a_scaled_likelihood_has_everything_times_the_factor(fisher, rng):
    one, other = (
        Problem(rng, likelihoods=LIKELIHOODS | {"class": own})
        for own in (kw.Categorical(), kw.Scaled(kw.Scaled(kw.Categorical(), 5.0), 0.5))
    )
    other.x, other.targets = one.x, one.targets
    plain, scaled = (own.alone("class", fisher=fisher) for own in (one, other))
    np.testing.assert_allclose(scaled.loss(one.params), 2.5 * plain.loss(one.params))
    scaled_factors = factors(scaled)
    for name, own in factors(plain).items():
        if "Dense_2" in name:  # unseen
            continue
        got, dense = (
            jnp.kron(*x) if isinstance(x, tuple) else x for x in (scaled_factors[name], own)
        )
        np.testing.assert_allclose(got, 2.5 * dense, rtol=1e-9, atol=1e-14, err_msg=name)
    h = plain.outputs(one.params)
    np.testing.assert_allclose(scaled.divergence(h, 2 * h), 2.5 * plain.divergence(h, 2 * h))
    np.testing.assert_allclose(scaled.samples, plain.samples)


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
def test_residuals_are_a_gaussian_without_targets(fisher, scale, rng):
    x, model = jnp.asarray(rng.normal(size=(N, 3))), nn.Dense(2, param_dtype=float)
    params = model.init(jax.random.key(0), x)["params"]
    families = kw.Residuals(variance=0.3), kw.Gaussian(variance=0.3)
    families = [kw.Scaled(own, scale) if scale else own for own in families]
    nets = [kw.instrument(model, own, x, fisher=fisher) for own in families]
    residuals, gaussian = (
        net.value_and_grad(params, x, key=jax.random.key(1), **given)
        for net, given in zip(nets, ({}, {"targets": jnp.zeros((N, 2))}), strict=True)
    )
    constant = (scale or 1) * np.log(2 * np.pi * 0.3)
    np.testing.assert_allclose(residuals[0], gaussian[0] - constant, rtol=1e-10)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
        (residuals[1], residuals[2].factors()),
        (gaussian[1], gaussian[2].factors()),
    )
    with pytest.raises(ValueError, match="takes no targets"):
        nets[0].oracle(params, x, targets=jnp.zeros((N, 2))).loss(params)


def test_moments_in_a_basis_are_sums_over_terms(problem):
    name = "Dense_0"
    a, g = (
        jnp.asarray(np.linalg.qr(np.random.default_rng(k).normal(size=(n, n)))[0])
        for k, n in ((0, 6), (1, 4))
    )
    bases = {name: (a, g)}
    *_, got = problem.oracle(problem.net(fisher="exact")).factors(bases)[name]
    each = [problem.alone(k, fisher="exact").factors(bases)[name][2] for k in LIKELIHOODS]
    np.testing.assert_allclose(got, sum(each), rtol=1e-10)


def test_every_term_is_thinned_by_itself(rng):
    problem = Problem(rng, (40, 12), weighted=True)
    oracle, step = problem.oracle(), jax.tree.map(jnp.ones_like, problem.params)
    thin = oracle.thinned(lambda shape: max(10, shape[0] // 8))
    assert thin.sample_shapes == [(10,), (12,)]
    problem.x = problem.x[::4]
    problem.targets["class"] = problem.targets["class"][::4]
    np.testing.assert_allclose(thin.quadratic(step), problem.oracle().quadratic(step), rtol=1e-12)
    np.testing.assert_allclose(thin.loss(problem.params), problem.oracle().loss(problem.params))
    small = oracle.thinned(lambda shape: 3)
    assert small.sample_shapes == [(3,), (3,)]


def test_a_term_whose_points_can_not_be_told_stays_whole(rng):
    def edges(params, x, z):
        return function(params, x, z.reshape(-1, 5))

    def mixed(params, x, z):
        return function(params, x, z * jnp.ones((40, 1)))

    problem = Problem(rng, (40, 12))
    targets, z = problem.targets, problem.z.reshape(3, 4, 5)
    net = kw.instrument(edges, LIKELIHOODS, problem.params, problem.x, z)
    oracle = net.oracle(problem.params, problem.x, z, targets=targets)
    assert oracle.thinned(lambda shape: 4).sample_shapes == [(4,), (12,)]
    # The other term's points have no length of their own: nothing is thinned.
    net = kw.instrument(mixed, LIKELIHOODS, problem.params, problem.x, problem.z[:1])
    oracle = net.oracle(problem.params, problem.x, problem.z[:1])
    assert oracle.thinned(lambda shape: 4) is oracle


def test_micro_batches_of_terms_of_one_size_are_those_of_the_whole(rng):
    problem = Problem(rng, (N, N))
    net = problem.net(fisher="exact")
    whole, split = problem.oracle(net), problem.oracle(net, micro_batches=3)
    params = problem.params
    for a, b in [
        (whole.outputs(params), split.outputs(params)),
        (whole.value_and_grad()[:2], split.value_and_grad()[:2]),
    ]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13), a, b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), factors(split), factors(whole)
    )


def test_micro_batches_that_can_not_be_made_are_an_error(rng):
    with pytest.raises(ValueError, match=r"batches of 6, 4 examples.*use micro_batches=1"):
        Problem(rng).oracle(micro_batches=2).value_and_grad()
    with pytest.raises(NotImplementedError, match="weights of several terms"):
        Problem(rng, (N, N), weighted=True).oracle(micro_batches=2).value_and_grad()


def test_replicas_measure_what_the_whole_batch_does(rng):
    whole = Problem(rng)
    net = whole.net(fisher="exact", axis_name="batch")

    @jax.jit
    def replicas(*parts):
        def here(x, z, targets):
            oracle = net.oracle(whole.params, x, z, targets=targets)
            return oracle.loss(whole.params), oracle.factors()

        return jax.vmap(here, axis_name="batch")(*parts)

    parts = (whole.x, whole.z, whole.targets)
    got = replicas(*jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), parts))
    one = whole.oracle(whole.net(fisher="exact"))
    expected = one.loss(whole.params), factors(one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-9), got, expected)


def test_what_has_another_structure_is_an_error(rng):
    problem = Problem(rng)
    with pytest.raises(ValueError, match="targets must have the structure of the likelihoods"):
        problem.oracle(targets=problem.targets["class"])
    with pytest.raises(ValueError, match="whose structure is not that of the likelihoods"):
        kw.instrument(Net(), LIKELIHOODS, problem.x)
    with pytest.raises(ValueError, match="or a tree of likelihoods of its structure"):
        kw.instrument(Net(), kw.Categorical(), problem.x)
    with pytest.raises(ValueError, match="loss needs targets"):
        problem.oracle(targets={"class": None, "value": None}).loss(problem.params)
    with pytest.raises(ValueError, match="likelihood must implement"):
        kw.instrument(Net(), {}, problem.x)


@pytest.mark.parametrize("inner", ["sgd", "preconditioned"])
def test_qe_takes_trees_of_outputs(inner, rng):
    net, params, batch = layer(rng, 1)
    targets = {"first": None, "second": jnp.ones((M, 1))}
    make = functools.partial(kw.qe_kldwrm, capacity=2, refresh_every=1, kl_scale=0.1, inner=inner)
    tx = make(net.layers, 0.3, rho=0.5, calibrate=True)

    def step(carried, key):
        params, state = carried
        loss, grads, oracle = net.value_and_grad(params, *batch, targets=targets, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return (optax.apply_updates(params, updates), state), loss

    keys = jax.random.split(jax.random.key(1), 20)
    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), keys))
    (_, state), losses = run(params)
    assert losses[-1] < 0.5 * losses[0]
    said = kw.diagnostics(state)
    assert said["objective_after"] < said["objective_before"]  # the inner solver ran


def test_with_nothing_set_an_equation_and_its_boundary_are_solved():
    """u'' = -pi^2 sin(pi x) on [0, 1], u(0) = u(1) = 0."""
    hidden = [own for _ in range(2) for own in (nn.Dense(12, param_dtype=float), nn.tanh)]
    model = nn.Sequential([*hidden, nn.Dense(1, param_dtype=float)])

    def equation(params, x, ends):
        def u(x):
            return model.apply({"params": params}, x)

        def slope(x):
            return jax.jvp(u, (x,), (jnp.ones_like(x),))[1]

        curvature = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
        return {"interior": curvature + jnp.pi**2 * jnp.sin(jnp.pi * x), "boundary": u(ends)}

    x, ends = jnp.linspace(0, 1, 40)[:, None], jnp.array([[0.0], [1.0]])
    params = model.init(jax.random.key(0), x)["params"]
    likelihoods = {"interior": kw.Residuals(), "boundary": kw.Scaled(kw.Residuals(), 10.0)}
    net = kw.instrument(equation, likelihoods, params, x, ends)
    tx = kw.kfac(net.layers)

    def step(carried, key):
        params, state = carried
        loss, grads, oracle = net.value_and_grad(params, x, ends, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return (optax.apply_updates(params, updates), state), loss

    keys = jax.random.split(jax.random.key(1), 200)
    (params, _), losses = jax.jit(
        lambda params: jax.lax.scan(step, (params, tx.init(params)), keys)
    )(params)
    assert losses[0] > 1
    assert losses[-1] < 1e-3
    error = model.apply({"params": params}, x) - jnp.sin(jnp.pi * x)
    assert jnp.abs(error).max() < 5e-3
