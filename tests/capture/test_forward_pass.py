"""Loss, gradient and statistics from one forward pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets
from capture.references import initialised
from flax.core import freeze

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3))
Y = RNG.normal(size=(6, 2))
LABELS = np.array([0, 1, 1, 0, 1, 0])
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 0.0, 1.0])
KEY = jax.random.key(3)

mlp = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)])
each_fisher = pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])


class Everything(nn.Module):
    """Dropout, running averages, a layer that is scanned and rematerialised, and a bare gain."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(nn.remat(nn.Dense)(3, name="dense")(x)), None

        x = nn.Dropout(0.3, deterministic=False, name="drop")(nn.Dense(3, name="first")(x))
        x = nn.BatchNorm(use_running_average=not self.train, name="norm")(x)
        scanned = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scanned(name="scanned")(x, None)
        return nn.Dense(2, name="last")(x * self.param("gain", nn.initializers.ones, (3,)))


def others():
    stats = {"mean": jnp.array([0.1, 0.2, 0.3]), "var": jnp.array([0.5, 1.0, 2.0])}
    return {"batch_stats": {"norm": stats}}


def assert_close(got, expected, rtol=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(expected)

    def close(a, b):
        atol = rtol * max(np.abs(b).max(), 1e-6)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        assert a.dtype == b.dtype

    jax.tree.map(close, got, expected)


def assert_agrees(net, params, *args, rtol=1e-9, **kwargs):
    """With the loss and its gradient taken by hand, and statistics of a pass of their own."""

    @jax.jit
    def at_once(params):
        loss, grads, oracle = net.value_and_grad(params, *args, **kwargs)
        return loss, grads, oracle.factors()

    @jax.jit
    def one_by_one(params):
        oracle = net.oracle(params, *args, **kwargs)
        return *jax.value_and_grad(oracle.loss)(params), oracle.factors()

    expected = one_by_one(params)
    assert all(np.any(x) for x in jax.tree.leaves(expected[1:]))
    assert_close(at_once(params), expected, rtol)


@each_fisher
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_it_is_the_gradient_of_the_loss_and_the_factors_of_the_oracle(fisher, weights, bias):
    net = kw.instrument(mlp, kw.Categorical(), X, fisher=fisher, bias=bias)
    params = initialised(mlp, X)
    assert_agrees(net, params, X, targets=LABELS, key=KEY, weights=weights)


@pytest.mark.parametrize("likelihood", [kw.Gaussian(2.5), kw.Bernoulli()], ids=["gauss", "logits"])
def test_other_likelihoods(likelihood):
    net = kw.instrument(mlp, likelihood, X, fisher="empirical")
    assert_agrees(net, initialised(mlp, X), X, targets=(Y > 0).astype(float), weights=WEIGHTS)


def test_weights_of_tokens():
    x, labels = RNG.normal(size=(3, 4, 3)), RNG.integers(0, 2, size=(3, 4))
    weights = RNG.integers(0, 3, size=(3, 4))
    net = kw.instrument(mlp, kw.Categorical(), x, fisher="empirical")
    assert_agrees(net, initialised(mlp, x), x, targets=labels, weights=weights)


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_a_model_of_everything_in_training_mode(fisher, bias):
    model = Everything()
    net = kw.instrument(model, kw.Gaussian(), X, fisher=fisher, bias=bias)
    assert net.layers["gain"].block == kw.curvature.Diagonal()
    assert_agrees(
        net,
        initialised(model, X),
        X,
        targets=Y,
        key=KEY,
        weights=WEIGHTS,
        rngs={"dropout": jax.random.key(7)},
        variables=others(),
    )


def test_a_model_of_everything_with_the_exact_fisher():
    model = Everything(train=False)
    net = kw.instrument(model, kw.Gaussian(), X, fisher="exact")
    rngs = {"dropout": jax.random.key(7)}
    assert_agrees(net, initialised(model, X), X, targets=Y, rngs=rngs, variables=others())


def test_the_exact_fisher_is_refused_where_examples_depend_on_each_other():
    model = Everything()
    net = kw.instrument(model, kw.Gaussian(), X, fisher="exact")

    def factors(params):
        rngs = {"dropout": KEY}
        return net.value_and_grad(params, X, targets=Y, rngs=rngs, variables=others())[2].factors()

    with pytest.raises(ValueError, match="'norm', which normalises over the batch"):
        jax.eval_shape(factors, initialised(model, X))


def test_the_containers_and_types_of_the_parameters_are_kept():
    net = kw.instrument(mlp, kw.Categorical(), X, fisher="empirical")
    params = jax.tree.map(lambda p: p.astype(jnp.float32), initialised(mlp, X))
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    for held in (params, freeze(params), low):
        _, grads, _ = jax.eval_shape(
            lambda p: net.value_and_grad(p, X.astype(np.float32), targets=LABELS), held
        )
        assert jax.tree.structure(grads) == jax.tree.structure(held)
        assert [x.dtype for x in jax.tree.leaves(grads)] == [x.dtype for x in jax.tree.leaves(held)]
    assert_agrees(net, freeze(params), X.astype(np.float32), targets=LABELS, rtol=1e-5)


def test_boxed_parameters_have_boxed_gradients():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(2, kernel_init=init)
    net = kw.instrument(model, kw.Categorical(), X, fisher="empirical")
    params = model.init(jax.random.key(0), X)["params"]
    assert isinstance(params["kernel"], nn.Partitioned)
    assert_agrees(net, params, X, targets=LABELS)


def test_updated_variables_are_those_of_the_model():
    model, rngs = Everything(), {"dropout": jax.random.key(7)}
    net = kw.instrument(model, kw.Gaussian(), X)
    params = initialised(model, X)
    *_, oracle = jax.jit(
        lambda p: net.value_and_grad(p, X, targets=Y, rngs=rngs, variables=others())
    )(params)
    _, expected = model.apply({"params": params, **others()}, X, mutable=["batch_stats"], rngs=rngs)
    assert_close(oracle.variables, dict(expected))
    before, after = (v["batch_stats"]["norm"]["mean"] for v in (others(), oracle.variables))
    assert (before != after).all()


def test_variables_before_a_pass_are_an_error_that_says_what_to_do():
    net = kw.instrument(mlp, kw.Gaussian(), X)
    oracle = net.oracle(initialised(mlp, X), X, targets=Y)
    with pytest.raises(ValueError, match=r"net.oracle\(.*make it by net.value_and_grad\("):
        _ = oracle.variables


def test_missing_arguments_are_errors_that_say_so():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    with pytest.raises(ValueError, match="loss needs targets"):
        net.value_and_grad(params, X)
    *_, oracle = net.value_and_grad(params, X, targets=LABELS)
    with pytest.raises(ValueError, match=r"fisher='sampled'.*needs a key"):
        oracle.factors()


# --- As a pytree ----------------------------------------------------------------------------------


@each_fisher
def test_an_oracle_with_its_pass_crosses_jit(fisher):
    net = kw.instrument(mlp, kw.Categorical(), X, fisher=fisher)
    params = initialised(mlp, X)
    make = functools.partial(net.value_and_grad, targets=LABELS, key=KEY)
    loss, _, oracle = jax.jit(make)(params, X)
    expected = jax.jit(lambda p: net.oracle(p, X, key=KEY, targets=LABELS).factors())(params)
    factors = jax.jit(lambda oracle: oracle.factors())
    assert_close(factors(oracle), expected)
    np.testing.assert_allclose(oracle.loss(params), loss)
    again = jax.tree.unflatten(jax.tree.structure(oracle), jax.tree.leaves(oracle))
    assert_close(factors(again), expected)
    assert factors._cache_size() == 1


def test_it_can_be_mapped_and_scanned_over_batches():
    net = kw.instrument(mlp, kw.Categorical(), X, fisher="empirical")
    params = initialised(mlp, X)
    x, labels = RNG.normal(size=(3, *X.shape)), RNG.integers(0, 2, size=(3, *LABELS.shape))

    def run(x, y):
        loss, grads, oracle = net.value_and_grad(params, x, targets=y)
        return loss, grads, oracle.factors()

    alone = [jax.jit(run)(*batch) for batch in zip(x, labels, strict=True)]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *alone)
    assert_close(jax.jit(jax.vmap(run))(x, labels), expected)
    assert_close(jax.jit(lambda *b: jax.lax.map(lambda own: run(*own), b))(x, labels), expected)


# --- Training -------------------------------------------------------------------------------------


def steps(net, tx):
    """A step with one pass, and one with the gradient taken by hand."""

    def at_once(params, state, key):
        _, grads, oracle = net.value_and_grad(params, X, targets=LABELS, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    def one_by_one(params, state, key):
        oracle = net.oracle(params, X, targets=LABELS, key=key)
        updates, state = tx.update(jax.grad(oracle.loss)(params), state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    return at_once, one_by_one


@pytest.mark.parametrize("make", [kw.kfac, kw.q_kldwrm, kw.qe_kldwrm])
def test_training_is_the_same_either_way(make):
    net = kw.instrument(mlp, kw.Categorical(), X)
    extra = {"capacity": 2, "inner_steps": 1} if make is kw.qe_kldwrm else {}
    tx = make(net.layers, 0.3, refresh_every=2, **extra)
    start = initialised(mlp, X)
    ends = []
    for step in map(small_nets.jit, steps(net, tx)):
        params, state = start, tx.init(start)
        for k in range(4):
            params, state = step(params, state, jax.random.key(k))
        ends.append((params, state._replace(inverses=None)))
        assert step._cache_size() == 1
    assert_close(*ends, rtol=1e-7)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, start)
    assert min(jax.tree.leaves(moved)) > 1e-3


def compiled(step, params, state):
    return small_nets.jit(step).lower(params, state, KEY).compile(compiler_options=small_nets.WELL)


@each_fisher
@pytest.mark.parametrize("every", [1, 5])
def test_value_and_grad_costs_no_more_than_the_two_calls(fisher, every):
    """In operations, and in the memory of a step."""
    net = kw.instrument(mlp, kw.Categorical(), X, fisher=fisher)
    tx, params = kw.kfac(net.layers, 0.1, refresh_every=every), initialised(mlp, X)
    one, two = (compiled(step, params, tx.init(params)) for step in steps(net, tx))
    assert one.cost_analysis()["flops"] <= 1.001 * two.cost_analysis()["flops"]
    memory = [own.memory_analysis().temp_size_in_bytes for own in (one, two)]
    assert memory[0] <= 1.01 * memory[1] + 64
