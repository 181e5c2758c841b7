"""The oracle: Fishers of each sort, weights, and being an ordinary pytree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import (
    assert_factors,
    block_fisher,
    categorical_fisher,
    categorical_root,
    factors,
    gaussian_root,
    initialised,
    kfac,
    shares,
)

import kldwrm_jax as kw
from kldwrm_jax.paths import leaves_by_path, replace_leaves

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 3))
LABELS = np.array([0, 1, 1, 0, 1])

mlp = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)])
linear = nn.Sequential([nn.Dense(4), nn.Dense(3), nn.Dense(2)])


def dense_blocks(net, params, outputs_of, fisher, share):
    """Every Kronecker block's Fisher from jacobians, for the block's own flattening."""

    @jax.jit
    def run():
        leaves = leaves_by_path(params)
        made = {}
        for block in net.layers:
            v = block.gather(leaves)

            def outputs(flat, block=block, v=v):
                own = block.scatter(flat.reshape(v.shape))
                return outputs_of(replace_leaves(params, own))

            made[block.name] = block_fisher(outputs, v.reshape(-1), fisher, share)
        return made

    return run()


def assert_kron(net, got, expected, rtol=1e-9):
    assert set(got) == set(expected) == {block.name for block in net.layers}
    for name, fisher in expected.items():
        np.testing.assert_allclose(
            jnp.kron(*got[name]), fisher, rtol=rtol, atol=1e-12, err_msg=name
        )


# --- Where K-FAC is exact -------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [1.0, 2.5])
def test_deep_linear_network_under_a_gaussian_is_the_dense_fisher(x64, variance):
    params = initialised(linear, X)
    net = kw.instrument(linear, kw.Gaussian(variance), X, fisher="exact")
    fisher = jnp.broadcast_to(jnp.eye(2) / variance, (5, 2, 2))
    expected = dense_blocks(
        net, params, lambda p: linear.apply({"params": p}, X), fisher, np.full(5, 0.2)
    )
    assert_kron(net, factors(net, params, X), expected)


def test_deep_linear_network_with_weights_is_the_dense_fisher(x64):
    weights = np.array([1.0, 0.0, 2.0, 0.5, 1.0])
    params = initialised(linear, X)
    net = kw.instrument(linear, kw.Gaussian(), X, fisher="exact")
    fisher = jnp.broadcast_to(jnp.eye(2), (5, 2, 2))
    expected = dense_blocks(
        net, params, lambda p: linear.apply({"params": p}, X), fisher, shares(weights)
    )
    assert_kron(net, factors(net, params, X, weights=weights), expected)


def test_separate_bias_is_a_block_of_its_own(x64):
    params = initialised(linear, X)
    net = kw.instrument(linear, kw.Gaussian(), X, fisher="exact", bias="separate")
    assert [block.name for block in net.layers][:2] == ["layers_0/kernel", "layers_0/bias"]
    fisher = jnp.broadcast_to(jnp.eye(2), (5, 2, 2))
    expected = dense_blocks(
        net, params, lambda p: linear.apply({"params": p}, X), fisher, np.full(5, 0.2)
    )
    assert_kron(net, factors(net, params, X), expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_separate_bias_of_shared_weights_sums_an_examples_gradients(x64, sharing):
    x = RNG.normal(size=(4, 3, 2))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(3, name="dense")(x)).sum(axis=1)

    params = initialised(Model(), x)
    net = kw.instrument(Model(), kw.Gaussian(), x, fisher="exact", bias="separate", sharing=sharing)

    def outputs_of(p):
        return jnp.tanh(x @ p["dense"]["kernel"] + p["dense"]["bias"]).sum(axis=1)

    fisher = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    expected = dense_blocks(net, params, outputs_of, fisher, np.full(4, 0.25))["dense/bias"]
    got = factors(net, params, x)
    a, g = got["dense/bias"]
    np.testing.assert_array_equal(a, [[1.0]])
    np.testing.assert_allclose(g, expected, rtol=1e-9)
    kernel = kfac(
        lambda tape: jnp.tanh(tape.dense("dense", x, params["dense"])).sum(axis=1),
        gaussian_root(np.zeros((4, 3))),
        reduce=sharing == "reduce",
        bias=(),
    )
    assert_factors({"dense/kernel": got["dense/kernel"]}, {"dense/kernel": kernel["dense"]})


def test_expand_is_exact_where_each_token_is_a_sample(x64):
    x = RNG.normal(size=(3, 4, 3))
    params = initialised(linear, x)
    net = kw.instrument(linear, kw.Gaussian(), x, fisher="exact")
    fisher = jnp.broadcast_to(jnp.eye(2), (3, 4, 2, 2))
    expected = dense_blocks(
        net, params, lambda p: linear.apply({"params": p}, x), fisher, np.full((3, 4), 1 / 12)
    )
    assert_kron(net, factors(net, params, x), expected)


def test_reduce_is_exact_where_tokens_are_averaged(x64):
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="last")(nn.Dense(4, name="first")(x).mean(axis=1))

    x = RNG.normal(size=(3, 4, 3))
    params = initialised(Pooled(), x)
    net = kw.instrument(Pooled(), kw.Gaussian(), x, fisher="exact", sharing="reduce")
    fisher = jnp.broadcast_to(jnp.eye(2), (3, 2, 2))
    expected = dense_blocks(
        net, params, lambda p: Pooled().apply({"params": p}, x), fisher, np.full(3, 1 / 3)
    )
    assert_kron(net, factors(net, params, x), expected)


@pytest.mark.parametrize("likelihood", [kw.Categorical(), kw.Bernoulli()])
def test_one_sample_is_the_dense_fisher(x64, likelihood):
    x = X[:1]
    params = initialised(mlp, x)
    net = kw.instrument(mlp, likelihood, x, fisher="exact")
    h = mlp.apply({"params": params}, x)
    if isinstance(likelihood, kw.Categorical):
        fisher = categorical_fisher(h)
    else:
        p = 1 / (1 + jnp.exp(-h))
        fisher = jax.vmap(jnp.diag)(p * (1 - p))
    expected = dense_blocks(net, params, lambda p: mlp.apply({"params": p}, x), fisher, jnp.ones(1))
    assert_kron(net, factors(net, params, x), expected)


def test_exact_takes_each_position_of_an_example_by_itself(x64):
    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.tanh(nn.Dense(3, name="first")(x))
            return nn.Dense(3, name="last")(x + jnp.cumsum(x, axis=1))

    x = RNG.normal(size=(2, 4, 3))
    params = initialised(Mixer(), x)

    def network(tape):
        z = jnp.tanh(tape.dense("first", x, params["first"]))
        return tape.dense("last", z + jnp.cumsum(z, axis=1), params["last"])

    root = categorical_root(Mixer().apply({"params": params}, x))
    for weights in (None, RNG.uniform(size=(2, 4))):
        net = kw.instrument(Mixer(), kw.Categorical(), x, fisher="exact")
        got = factors(net, params, x, weights=weights)
        assert_factors(got, kfac(network, root, weights=weights))


def test_exact_with_more_directions_than_are_taken_at_once(x64):
    wide = nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(19)])
    params = initialised(wide, X)
    net = kw.instrument(wide, kw.Categorical(), X, fisher="exact")

    def network(tape):
        return tape.dense(
            "layers_2", jnp.tanh(tape.dense("layers_0", X, params["layers_0"])), params["layers_2"]
        )

    root = categorical_root(wide.apply({"params": params}, X))
    assert_factors(factors(net, params, X), kfac(network, root))


def test_outputs_without_a_sample_axis_are_one_sample(x64):
    params = initialised(mlp, X[0])
    net = kw.instrument(mlp, kw.Categorical(), X[0], fisher="exact")
    one = factors(kw.instrument(mlp, kw.Categorical(), X[:1], fisher="exact"), params, X[:1])
    assert_factors(factors(net, params, X[0]), one)


def test_several_event_axes(x64):
    class Image(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.DenseGeneral((2, 3), name="dense")(x)

    params = initialised(Image(), X)
    net = kw.instrument(Image(), kw.Gaussian(event_ndim=2), X, fisher="exact")
    a, g = factors(net, params, X)["dense"]
    rows = np.hstack([X, np.ones((5, 1))])
    np.testing.assert_allclose(a, rows.T @ rows / 5, rtol=1e-12)
    np.testing.assert_allclose(g, np.eye(6), rtol=1e-12)


# --- Labels from the data, labels from the model --------------------------------------------------


def hand_written(params, x=X):
    def network(tape):
        z = jnp.tanh(tape.dense("layers_0", x, params["layers_0"]))
        return tape.dense("layers_2", z, params["layers_2"])

    return network


def test_empirical_is_the_per_example_gradient_formula(x64):
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X, fisher="empirical")
    got = factors(net, params, X, targets=LABELS)
    h = mlp.apply({"params": params}, X)
    residual = jax.nn.softmax(h) - jax.nn.one_hot(LABELS, 2)
    assert_factors(got, kfac(hand_written(params), residual[None], together=True))

    # For one example, kron(A, G) is the square of its gradient.
    def nll(p):
        z = mlp.apply({"params": p}, X[:1])[0]
        return jax.scipy.special.logsumexp(z) - z[LABELS[0]]

    one = factors(net, params, X[:1], targets=LABELS[:1])
    gradient = jax.jit(jax.grad(nll))(params)
    for block in net.layers:
        v = block.gather(leaves_by_path(gradient)).reshape(-1)
        np.testing.assert_allclose(
            jnp.kron(*one[block.name]), jnp.outer(v, v), rtol=1e-9, atol=1e-14
        )


@pytest.mark.parametrize("likelihood", [kw.Categorical(), kw.Gaussian(0.5), kw.Bernoulli()])
def test_sampled_converges_to_exact(x64, likelihood):
    params = initialised(mlp, X)
    exact = factors(kw.instrument(mlp, likelihood, X, fisher="exact"), params, X)
    net = kw.instrument(mlp, likelihood, X)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: net.oracle(params, X, key=key).factors()))
    draws = draw(keys)
    for name, (a, g) in exact.items():
        np.testing.assert_allclose(draws[name][0][0], a, rtol=1e-9)
        error = draws[name][1].std(axis=0) / np.sqrt(len(keys))
        assert (abs(draws[name][1].mean(axis=0) - g) < 4.5 * error + 1e-12).all()
        assert error.max() < 0.05 * abs(g).max()


def test_sampled_labels_follow_the_key(x64):
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    run = jax.jit(lambda key: net.oracle(params, X, key=key).factors())
    first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    assert_factors(first, again, rtol=0)
    assert not np.allclose(first["layers_2"][1], other["layers_2"][1])


def test_sampled_factors_do_not_depend_on_the_targets(x64):
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    key = jax.random.key(0)
    assert_factors(
        factors(net, params, X, key=key, targets=LABELS), factors(net, params, X, key=key), rtol=0
    )


# --- Weights --------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A layer of every kind, position by position, so that tokens can be masked too."""

    @nn.compact
    def __call__(self, tokens, mask):
        embed = nn.Embed(6, 4, name="embed")
        x = embed(tokens)
        attention = nn.MultiHeadDotProductAttention(2, name="attention")
        x = nn.LayerNorm(name="norm")(x + attention(x, mask=mask[:, None, None, :]))
        x = nn.Conv(4, (1,), name="conv")(x)
        x = nn.Conv(4, (1,), feature_group_count=2, use_bias=False, name="grouped")(x)
        x = nn.ConvTranspose(4, (1,), name="transposed")(jnp.tanh(x))
        x = nn.DenseGeneral((2, 2), name="general")(x)
        x = nn.Einsum((2, 2, 4), "bthd,hdo->bto", name="einsum")(x)
        x = x * self.param("gain", nn.initializers.ones, (4,))
        return embed.attend(nn.Dense(4, name="dense")(jnp.tanh(x)))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_with_weight_zero_changes_nothing(x64, sharing):
    rng = np.random.default_rng(4)
    batch, time, more, longer = 3, 2, 5, 4
    tokens, targets = (rng.integers(0, 6, (more, longer)) for _ in range(2))
    weights = np.zeros((more, longer))
    weights[:batch, :time] = rng.uniform(0.5, 2, (batch, time))
    mask = np.zeros((more, longer), bool)
    mask[:, :time] = True
    model = Everything()
    params = initialised(model, tokens, mask)
    net = kw.instrument(model, kw.Categorical(), tokens, mask, fisher="empirical", sharing=sharing)
    assert len(net.layers) == 14

    def made(cut, time):
        oracle = net.oracle(
            params,
            tokens[:cut, :time],
            mask[:cut, :time],
            targets=targets[:cut, :time],
            weights=weights[:cut, :time],
        )

        @jax.jit
        def ask(oracle):
            h = oracle.outputs(params)
            return oracle.factors(), oracle.loss(params), oracle.divergence(h, jnp.sin(h))

        return ask(oracle)

    got, padded = made(batch, time), made(more, longer)
    for result in (got[0], padded[0]):
        result.pop("gain")  # random signs, drawn for the batch's shape
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got[0]))
    assert_factors(padded[0], got[0])
    np.testing.assert_allclose(padded[1:], got[1:], rtol=1e-9)


def test_padding_with_weight_zero_of_convolutions_and_norms(x64):
    class Images(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3), name="conv")(x)
            x = nn.GroupNorm(2, name="norm")(x)
            x = nn.ConvTranspose(2, (2, 2), strides=(2, 2), name="up")(jnp.tanh(x))
            return nn.Dense(3, name="head")(x.reshape(x.shape[0], -1))

    x = RNG.normal(size=(5, 3, 3, 2))
    weights = np.array([1.0, 0.5, 2.0, 0.0, 0.0])
    params = initialised(Images(), x)
    net = kw.instrument(Images(), kw.Categorical(), x, fisher="exact")
    assert_factors(
        factors(net, params, x, weights=weights), factors(net, params, x[:3], weights=weights[:3])
    )


def test_padding_with_weight_zero_of_recurrent_networks(x64):
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.OptimizedLSTMCell(3, param_dtype=jnp.float64, name="cell")
            return nn.Dense(2, name="head")(nn.RNN(cell, name="rnn")(x))

    x = RNG.normal(size=(4, 3, 2))
    weights = np.ones((4, 3)) * np.array([[1.0], [2.0], [0.0], [0.0]])
    params = initialised(Tagger(), x)
    net = kw.instrument(Tagger(), kw.Categorical(), x, fisher="exact")
    assert_factors(
        factors(net, params, x, weights=weights), factors(net, params, x[:2], weights=weights[:2])
    )


def test_uncovered_parameters_are_weighted_in_expectation(x64):
    class Gain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("gain", nn.initializers.ones, (3,))

    weights = np.array([1.0, 0.0, 2.0, 0.0, 1.0])
    params = initialised(Gain(), X)
    net = kw.instrument(Gain(), kw.Gaussian(), X, fisher="exact")
    keys = jax.random.split(jax.random.key(0), 3000)
    draws = jax.jit(
        jax.vmap(lambda k: net.oracle(params, X, key=k, weights=weights).factors()["gain"])
    )(keys)
    expected = (shares(weights)[:, None] * X**2).sum(axis=0)
    error = draws.std(axis=0) / np.sqrt(len(keys))
    assert (abs(draws.mean(axis=0) - expected) < 4 * error).all()


def test_layers_that_merge_the_samples_axes_keep_the_weights(x64):
    class Merged(nn.Module):
        @nn.compact
        def __call__(self, x):
            flat = nn.Dense(2, name="dense")(x.reshape(-1, x.shape[-1]))
            return flat.reshape(*x.shape[:-1], 2)

    x, weights = RNG.normal(size=(3, 4, 2)), RNG.uniform(size=(3, 4))
    params = initialised(Merged(), x)
    net = kw.instrument(Merged(), kw.Gaussian(), x, fisher="exact")
    expected = kfac(
        lambda tape: tape.dense("dense", x, params["dense"]),
        gaussian_root(np.zeros((3, 4, 2))),
        weights=weights,
    )
    assert_factors(factors(net, params, x, weights=weights), expected)


def test_weights_that_do_not_fit_are_an_error():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X, fisher="exact")
    with pytest.raises(ValueError, match=r"weights .*\(4,\)"):
        net.oracle(params, X, weights=np.ones(4)).factors()
    with pytest.raises(ValueError, match=r"weights must have the shape .*\(5,\), got \(5, 2\)"):
        net.oracle(params, X, weights=np.ones((5, 2)), targets=LABELS).loss(params)

    class Turned(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, name="dense")(x.T).T

    net = kw.instrument(Turned(), kw.Gaussian(), X, fisher="exact")
    with pytest.raises(ValueError, match="examples along the first axis"):
        net.oracle(initialised(Turned(), X), X, weights=np.ones(5)).factors()


# --- Other questions ------------------------------------------------------------------------------


def test_loss_and_divergence_are_weighted_means(x64):
    weights = np.array([1.0, 0.0, 2.0, 0.5, 1.0])
    params, other = initialised(mlp, X), initialised(mlp, X, seed=1)
    net = kw.instrument(mlp, kw.Categorical(), X)
    oracle = net.oracle(params, X, targets=LABELS, weights=weights)
    h1, h2 = (mlp.apply({"params": p}, X) for p in (params, other))
    np.testing.assert_allclose(oracle.outputs(other), h2, rtol=1e-12)
    log_p, log_q = jax.nn.log_softmax(h1), jax.nn.log_softmax(h2)
    nll = -log_q[np.arange(5), LABELS]
    kl = 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(axis=-1)
    np.testing.assert_allclose(oracle.loss(other), shares(weights) @ nll, rtol=1e-12)
    np.testing.assert_allclose(oracle.divergence(h1, h2), shares(weights) @ kl, rtol=1e-12)


def test_missing_arguments_are_errors_that_say_so():
    params = initialised(mlp, X)
    with pytest.raises(ValueError, match=r"fisher='sampled' .*needs a key"):
        kw.instrument(mlp, kw.Categorical(), X).oracle(params, X).factors()
    empirical = kw.instrument(mlp, kw.Categorical(), X, fisher="empirical")
    with pytest.raises(ValueError, match="fisher='empirical' needs targets"):
        empirical.oracle(params, X).factors()
    with pytest.raises(ValueError, match="loss needs targets"):
        empirical.oracle(params, X).loss(params)
    with pytest.raises(ValueError, match="the batch is empty"):
        empirical.oracle(params, X[:0], targets=LABELS[:0]).factors()


# --- A pytree -------------------------------------------------------------------------------------


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, train, mode="plain", activation=None, extra=None, scale=1.0):
        assert isinstance(train, bool)
        assert isinstance(mode, str)
        x = nn.Dense(4, name="first")(x) * scale
        x = x if activation is None else activation(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2, name="last")(x if extra is None else x + extra)


def flagged_oracle(net, params, **changes):
    kwargs = {"mode": "plain", "activation": jnp.tanh, "extra": None, "scale": 2.0} | changes
    return net.oracle(
        params,
        X,
        True,
        targets=LABELS,
        key=jax.random.key(0),
        rngs={"dropout": jax.random.key(1)},
        **kwargs,
    )


def test_oracle_crosses_jit_with_its_static_arguments():
    params = initialised(Flagged(), X, train=True)
    net = kw.instrument(Flagged(), kw.Categorical(), X, True, activation=jnp.tanh)
    oracle = flagged_oracle(net, params)
    passed = jax.jit(lambda o: o)(oracle)
    assert passed.call.kwargs["mode"] == "plain"
    assert passed.call.kwargs["activation"] is jnp.tanh
    assert passed.call.args[1] is True
    eager, jitted = oracle.factors(), jax.jit(lambda o: o.factors())(oracle)
    assert_factors(jitted, eager, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda o, p: o.loss(p))(oracle, params), oracle.loss(params), rtol=1e-5
    )
    other = flagged_oracle(net, params, activation=jnp.sin)
    assert jax.tree.structure(oracle) != jax.tree.structure(other)
    assert jax.tree.structure(oracle) == jax.tree.structure(flagged_oracle(net, params))


def test_a_dtype_among_the_arguments_is_static():
    class Cast(nn.Module):
        @nn.compact
        def __call__(self, x, dtype):
            return nn.Dense(2, name="dense")(x.astype(dtype))

    params = initialised(Cast(), X, dtype=jnp.float32)
    net = kw.instrument(Cast(), kw.Gaussian(), X, dtype=jnp.float32, fisher="exact")
    factors(net, params, X, dtype=jnp.float32)


def test_oracle_crosses_scan_and_vmap():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    batches = RNG.normal(size=(3, 5, 3)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 3)

    def bind(x, key):
        return net.oracle(params, x, key=key)

    each = [bind(x, key).factors()["layers_0"] for x, key in zip(batches, keys, strict=True)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    stacked = jax.vmap(bind)(batches, keys)
    by_vmap = jax.vmap(lambda o: o.factors()["layers_0"])(stacked)
    _, by_scan = jax.lax.scan(lambda _, o: (None, o.factors()["layers_0"]), None, stacked)
    for got in (by_vmap, by_scan):
        assert_factors({"": got}, {"": expected}, rtol=1e-4, atol=1e-6)


def test_oracle_costs_nothing_until_it_is_asked():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    bound = net.oracle(params, X, targets=LABELS, key=jax.random.key(0))
    assert not jax.make_jaxpr(lambda o: o)(bound).eqns

    def bind(params, x, key, weights):
        return net.oracle(params, x, key=key, weights=weights)

    jaxpr = jax.make_jaxpr(bind)(params, X, jax.random.key(0), np.ones(5, np.float32))
    assert not jaxpr.eqns


def test_factors_are_those_of_a_branch_that_is_taken():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X)
    oracle = net.oracle(params, X, key=jax.random.key(0))

    @jax.jit
    def maybe(refresh, oracle):
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda o: o.factors(), oracle)
        )
        return jax.lax.cond(refresh, lambda o: o.factors(), lambda o: zeros, oracle)

    assert_factors(maybe(True, oracle), oracle.factors(), rtol=1e-5, atol=1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(maybe(False, oracle)))


# --- Bases ----------------------------------------------------------------------------------------


def orthogonal(*shape):
    return jnp.linalg.qr(RNG.normal(size=shape))[0]


def per_example_moments(net, gradients, bases):
    """``sum_n (U_A' grad_n U_G)^2`` from the gradients of every example, already scaled."""
    made = {}
    for name, basis in bases.items():
        block = net.layers[name]
        each = jax.vmap(lambda g, block=block: block.gather(leaves_by_path(g)))(gradients)
        eyes = map(jnp.eye, each.shape[-2:])
        u_a, u_g = (eye if u is None else u for eye, u in zip(eyes, basis, strict=True))
        made[name] = (jnp.einsum("...ia,n...ij,...jb->n...ab", u_a, each, u_g) ** 2).sum(axis=0)
    return made


class Shared(nn.Module):
    """A layer with weight sharing, a grouped one and a plain one."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(4, (3,), name="conv")(x))
        x = jnp.tanh(nn.Conv(4, (2,), feature_group_count=2, name="grouped")(x)).mean(axis=1)
        return nn.Dense(2, name="head")(x)


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("weights", [None, np.array([1.0, 0.0, 2.0, 0.5])], ids=["", "weighted"])
def test_bases_measure_the_second_moment_of_per_example_gradients(x64, bias, sharing, weights):
    x, y = RNG.normal(size=(4, 5, 2)), np.array([0, 1, 1, 0])
    params = initialised(Shared(), x)
    net = kw.instrument(
        Shared(), kw.Categorical(), x, fisher="empirical", bias=bias, sharing=sharing
    )
    bases = {
        block.name: tuple(orthogonal(*shape) for shape in block.shapes) for block in net.layers
    }
    head = next(name for name in bases if name.startswith("head"))
    bases[head] = (None, bases[head][1])
    oracle = net.oracle(params, x, targets=y, weights=weights)
    got = jax.jit(lambda o: o.factors(bases))(oracle)

    def nll(p, x, y, share):
        return jnp.sqrt(share) * kw.Categorical().nll(Shared().apply({"params": p}, x[None])[0], y)

    share = shares(np.ones(4) if weights is None else weights)
    gradients = jax.vmap(jax.grad(nll), in_axes=(None, 0, 0, 0))(params, x, y, share)
    expected = per_example_moments(net, gradients, bases)
    assert got.keys() == expected.keys()
    for name, moment in expected.items():
        np.testing.assert_allclose(got[name][2], moment, rtol=1e-9, atol=1e-14, err_msg=name)
    plain = jax.jit(lambda o: o.factors())(oracle)
    assert_factors({name: own[:2] for name, own in got.items()}, plain, rtol=1e-12)


def test_in_the_eigenbasis_of_one_example_the_moment_is_the_product_of_eigenvalues(x64):
    """There ``F = A x G`` exactly, so that ``S`` is the outer product of both spectra."""
    params = initialised(mlp, X[:1])
    net = kw.instrument(mlp, kw.Categorical(), X[:1], fisher="exact")
    oracle = net.oracle(params, X[:1])
    spectra = {
        name: tuple(jnp.linalg.eigh(side) for side in own) for name, own in oracle.factors().items()
    }
    bases = {name: tuple(side[1] for side in own) for name, own in spectra.items()}
    for name, (_, _, moment) in oracle.factors(bases).items():
        a, g = (side[0] for side in spectra[name])
        np.testing.assert_allclose(moment, jnp.outer(a, g), atol=1e-12)


def test_bases_of_stacked_layers_have_the_stack_in_front(x64):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(3, name="dense")(x)), None

    scanned = nn.scan(Step, variable_axes={"params": 1}, split_rngs={"params": True}, length=2)
    net = kw.instrument(
        scanned(), kw.Gaussian(), X, None, fisher="empirical", output=lambda out: out[0]
    )
    params = initialised(scanned(), X, None)
    targets = jnp.zeros((5, 3))
    bases = {"dense": (orthogonal(2, 4, 4), orthogonal(2, 3, 3))}
    got = net.oracle(params, X, None, targets=targets).factors(bases)["dense"][2]

    def nll(p, x):
        h = scanned().apply({"params": p}, x[None], None)[0][0]
        return kw.Gaussian().nll(h, jnp.zeros(3)) / jnp.sqrt(5.0)

    gradients = jax.vmap(jax.grad(nll), in_axes=(None, 0))(params, X)
    expected = per_example_moments(net, gradients, bases)["dense"]
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_bases_go_with_a_pass_that_is_done_and_with_micro_batches(x64):
    params = initialised(mlp, X[:4])
    net = kw.instrument(mlp, kw.Categorical(), X[:4], fisher="empirical")
    bases = {"layers_0": (orthogonal(4, 4), orthogonal(4, 4))}
    arguments = {"targets": LABELS[:4]}
    expected = net.oracle(params, X[:4], **arguments).factors(bases)
    done = net.value_and_grad(params, X[:4], **arguments)[2]
    split = net.oracle(params, X[:4], **arguments, micro_batches=2)
    for oracle in (done, split):
        got = oracle.factors(bases)
        assert len(got["layers_0"]) == 3
        assert len(got["layers_2"]) == 2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, expected)


def test_a_basis_for_no_block_is_an_error_that_names_the_blocks():
    params = initialised(mlp, X)
    net = kw.instrument(mlp, kw.Categorical(), X, fisher="exact")
    with pytest.raises(KeyError, match=r"no block is called 'wrong'; there are 'layers_0'"):
        net.oracle(params, X).factors({"wrong": (None, None)})
