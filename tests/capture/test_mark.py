"""Marks in plain functions: identity outside an oracle, and right under every transformation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_nets import jit
from twins import assert_same, normal, tail

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(1)
GAUSSIAN = kw.Gaussian()


def factors(function, params, *args, options=None, likelihood=GAUSSIAN, **kwargs):
    net = kw.instrument(function, likelihood, params, *args, **(options or {}))
    return jit(lambda p: net.oracle(p, *args, key=KEY, **kwargs).factors())(params)


def linen_factors(module, params, *args, options=None, likelihood=GAUSSIAN, **kwargs):
    net = kw.instrument(module, likelihood, *args, **(options or {}))
    return jit(lambda p: net.oracle(p, *args, key=KEY, **kwargs).factors())(params)


def dense(p, x):
    w, b = p["kernel"], p["bias"]
    return kw.tag(w, x, x @ w + b, bias=b)


def network(params, x):
    return dense(params["last"], jnp.tanh(dense(params["first"], x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="last")(jnp.tanh(nn.Dense(5, name="first")(x)))


def params_of(module, x):
    params = module.init(jax.random.key(0), x)["params"]
    return jax.tree.map(lambda p: p.astype(float) + 0.1, params)


# --- The mark is the identity ---------------------------------------------------------------------


def test_outside_an_oracle_a_mark_leaves_no_trace():
    def bare(params, x):
        first, last = params["first"], params["last"]
        x = jnp.tanh(x @ first["kernel"] + first["bias"])
        return x @ last["kernel"] + last["bias"]

    x = normal(4, 4)
    params = params_of(Network(), x)
    assert str(jax.make_jaxpr(network)(params, x)) == str(jax.make_jaxpr(bare)(params, x))
    kw.instrument(network, GAUSSIAN, params, x)
    assert str(jax.make_jaxpr(network)(params, x)) == str(jax.make_jaxpr(bare)(params, x))


def test_a_function_form_is_called_with_bare_arrays_and_leaves_no_trace_either():
    def product(x, w):
        assert isinstance(w, jax.Array)
        return jax.lax.dot(x, w)

    def marked(params, x):
        return kw.tag(params["w"], x, product)

    x, params = normal(4, 4), {"w": normal(4, 3)}
    bare = jax.make_jaxpr(lambda p, x: jax.lax.dot(x, p["w"]))(params, x)
    assert str(jax.make_jaxpr(marked)(params, x)) == str(bare)
    assert_same(
        factors(marked, params, x), factors(lambda p, x: kw.tag(p["w"], x, x @ p["w"]), params, x)
    )


# --- Layouts --------------------------------------------------------------------------------------


def test_marked_layers_have_the_factors_of_linens():
    x = normal(6, 4)
    params = params_of(Network(), x)
    for options in ({}, {"bias": "separate"}, {"max_factor": 4}):
        assert_same(
            factors(network, params, x, options=options),
            linen_factors(Network(), params, x, options=options),
        )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_layouts_give_the_factors_of_the_same_product(sharing):
    x, w, b = normal(5, 2, 4), normal(4, 6), normal(6)
    options = {"sharing": sharing}

    def io(p, x):
        return tail(kw.tag(p["w"], x, x @ p["w"] + p["b"], bias=p["b"]))

    def oi(p, x):
        return tail(kw.tag(p["w"], x, x @ p["w"].T + p["b"], bias=p["b"], layout="oi"))

    def heads(p, x):
        z = jnp.einsum("bti,ihk->bthk", x, p["w"]) + p["b"]
        z = kw.tag(p["w"], x, z, bias=p["b"], layout="bti,ihk->bthk")
        return tail(z.reshape(5, 2, 6))

    expected = factors(io, {"w": w, "b": b}, x, options=options)
    assert_same(factors(oi, {"w": w.T, "b": b}, x, options=options), expected)
    split = {"w": w.reshape(4, 2, 3), "b": b.reshape(2, 3)}
    assert_same(factors(heads, split, x, options=options), expected)


def test_layouts_tell_the_optimizer_how_kernels_lie():
    x, w = normal(5, 4), normal(4, 3)

    def step(layout, w):
        def function(w, x):
            return kw.tag(w, x, x @ (w if layout == "io" else w.T), layout=layout)

        net = kw.instrument(function, GAUSSIAN, w, x)
        tx = kw.kfac(net.layers, 0.1)

        @jit
        def update(w):
            oracle = net.oracle(w, x, targets=jnp.ones((5, 3)), key=KEY)
            return tx.update(jax.grad(oracle.loss)(w), tx.init(w), w, oracle=oracle)[0]

        return update(w)

    np.testing.assert_allclose(step("oi", w.T).T, step("io", w), atol=1e-10)


@pytest.mark.parametrize(
    "numbers", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHW", "OIHW", "CHW")]
)
def test_marked_convolutions_have_the_factors_of_linens(numbers):
    class Convolutional(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tail(nn.Conv(3, (3, 2), strides=2, name="conv")(x))

    x = normal(2, 5, 6, 4)
    params = params_of(Convolutional(), x)
    expected = linen_factors(Convolutional(), params, x)

    left, right, out = numbers
    axes = "NHWC"

    def product(x, w):
        batched = x if "N" in left else x[None]
        specs = [s if "N" in s else f"N{s}" for s in (left, out)]
        z = jax.lax.conv_general_dilated(
            batched, w, (2, 2), "SAME", dimension_numbers=(specs[0], right, specs[1])
        )
        return z if "N" in left else z[0]

    def function(p, x):
        if "N" not in left:
            one = jax.vmap(lambda x: kw.tag(p["w"], x, product, layout=numbers, bias=p["b"]))
            z = jnp.moveaxis(one(x), 1, -1)
        else:
            z = kw.tag(p["w"], x, product, layout=numbers, bias=p["b"])
            z = z.transpose([out.index(c) for c in axes])
        return tail(z + jnp.asarray(p["b"]).reshape(-1))

    w = params["conv"]["kernel"].transpose(["HWIO".index(c) for c in right])
    b = params["conv"]["bias"].reshape((3,) if left == axes else (3, 1, 1))
    ours = {"w": w, "b": b}
    order = [axes.index(c) for c in (left if "N" in left else f"N{left}")]
    assert_same({"conv": factors(function, ours, x.transpose(order))["w"]}, expected)


def test_tables_and_scales_have_the_factors_of_linens():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = nn.Embed(6, 4, name="table")
            x = nn.LayerNorm(name="norm")(table(tokens))
            return table.attend(jnp.tanh(x))

    def function(p, tokens):
        table, norm = p["table"]["embedding"], p["norm"]
        x = kw.tag(table, tokens, table[tokens], layout="lookup")
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        z = x * norm["scale"] + norm["bias"]
        x = jnp.tanh(kw.tag(norm["scale"], x, z, bias=norm["bias"], layout="scale"))
        return kw.tag(table, x, x @ table.T, layout="attend")

    tokens = jax.random.randint(KEY, (4, 3), 0, 6)
    params = params_of(Tied(), tokens)
    weights = normal(4, 3) ** 2
    ours = factors(function, params, tokens, likelihood=kw.Categorical(), weights=weights)
    theirs = linen_factors(Tied(), params, tokens, likelihood=kw.Categorical(), weights=weights)
    assert_same(ours, theirs)


# --- Transformations ------------------------------------------------------------------------------


BLOCKS = {"kernel": normal(3, 4, 4), "bias": normal(3, 4, seed=2)}


def unrolled(blocks, x):
    for i in range(3):
        x = jnp.tanh(dense(blocks[str(i)], x))
    return x


def scanned(blocks, x):
    return jax.lax.scan(lambda x, p: (jnp.tanh(dense(p, x)), None), x, blocks)[0]


def remat(blocks, x):
    body = jax.checkpoint(lambda x, p: (jnp.tanh(dense(p, x)), None))
    return jax.lax.scan(body, x, blocks)[0]


_compiled_block = jax.jit(lambda p, x: jnp.tanh(dense(p, x)))


def compiled(blocks, x):
    return jax.lax.scan(lambda x, p: (_compiled_block(p, x), None), x, blocks)[0]


@pytest.mark.parametrize("function", [scanned, remat, compiled])
def test_scanned_blocks_have_the_factors_of_the_unrolled_network(function):
    x = normal(5, 2, 4)
    blocks = jax.tree.map(lambda p: p.astype(float), BLOCKS)
    apart = {str(i): jax.tree.map(lambda p: p[i], blocks) for i in range(3)}
    _compiled_block(apart["0"], x)  # warm
    weights = normal(5, 2) ** 2
    each = factors(unrolled, apart, x, weights=weights)
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *(each[str(i)] for i in range(3)))
    seen = factors(lambda p, x: function(p["blocks"], x), {"blocks": blocks}, x, weights=weights)
    assert_same(seen, {"blocks": expected})


def test_a_vmap_over_examples_equals_the_batched_function():
    """With several rows an example, and with weights; in one product, no matrix an example."""
    x = normal(6, 2, 4)
    params = params_of(Network(), x)
    weights = normal(6, 2) ** 2

    def per_example(params, x):
        return jax.vmap(lambda x: network(params, x))(x)

    def per_token(params, x):
        return jax.vmap(jax.vmap(lambda x: network(params, x)))(x)

    for options in ({}, {"sharing": "reduce", "bias": "separate"}):
        expected = factors(network, params, x, options=options, weights=weights)
        for function in (per_example, per_token):
            assert_same(factors(function, params, x, options=options, weights=weights), expected)

    net = kw.instrument(per_example, GAUSSIAN, params, x)
    jaxpr = str(jax.make_jaxpr(lambda p: net.oracle(p, x, key=KEY).factors())(params))
    assert "f64[6,5,5]" not in jaxpr
    assert "f64[6,6,6]" not in jaxpr


def test_an_input_that_a_vmap_does_not_map_counts_for_every_example():
    params, x = {"w": normal(4, 3), "v": normal(2, 3, seed=2)}, normal(5, 2)
    query = normal(4, seed=3)

    def function(params, x, mapped):
        def one(x, query):
            shift = kw.tag(params["v"], x, x @ params["v"])
            return jnp.tanh(kw.tag(params["w"], query, query @ params["w"] + shift))

        queries = jnp.broadcast_to(query, (5, 4))
        if mapped:
            return jax.vmap(one)(x, queries)
        return jax.vmap(lambda x: one(x, query))(x)

    assert_same(factors(function, params, x, False), factors(function, params, x, True))


def test_ensembles_have_a_block_for_each_member():
    x = normal(5, 4)
    members = {"kernel": normal(3, 4, 2), "bias": normal(3, 2, seed=2)}

    def ensemble(p, x):
        each = jax.vmap(lambda p: jax.vmap(lambda x: jnp.tanh(dense(p, x)))(x))(p["members"])
        return each.sum(axis=0)

    def apart(p, x):
        return sum(jnp.tanh(dense(p[str(i)], x)) for i in range(3))

    each = factors(apart, {str(i): jax.tree.map(lambda p: p[i], members) for i in range(3)}, x)
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *(each[str(i)] for i in range(3)))
    assert_same(factors(ensemble, {"members": members}, x), {"members": expected})


def test_exact_sums_over_directions_under_a_vmap_over_examples():
    x = normal(6, 2, 4)
    params = params_of(Network(), x)
    options = {"fisher": "exact"}
    seen = factors(lambda p, x: jax.vmap(lambda x: network(p, x))(x), params, x, options=options)
    assert_same(seen, linen_factors(Network(), params, x, options=options))


def test_oracles_can_be_mapped_over_batches():
    x = normal(3, 6, 4)
    params = params_of(Network(), x[0])
    net = kw.instrument(lambda p, x: jax.vmap(lambda x: network(p, x))(x), GAUSSIAN, params, x[0])
    factors_of = jit(lambda x: net.oracle(params, x, key=KEY).factors())
    together = jax.vmap(factors_of)(x)
    for i in range(3):
        assert_same(jax.tree.map(lambda t: t[i], together), factors_of(x[i]))


# --- What is not covered, and errors --------------------------------------------------------------


def test_what_no_mark_names_is_named_in_the_layers():
    def function(p, x):
        return dense(p["layer"], x) * p["gain"]

    params = {"layer": {"kernel": normal(4, 3), "bias": normal(3)}, "gain": normal(3)}
    net = kw.instrument(function, GAUSSIAN, params, normal(5, 4))
    assert net.model.uncovered == ("gain",)
    assert "gain: no mark names it" in str(net.layers)
    with pytest.raises(ValueError, match="no rule covers gain"):
        kw.instrument(function, GAUSSIAN, params, normal(5, 4), uncovered="error")


def test_a_kernel_that_is_no_leaf_is_an_error():
    params, x = {"w": normal(4, 3), "b": normal(3)}, normal(5, 4)
    wrong = {
        "a transpose": lambda p, x: kw.tag(p["w"].T, x, x @ p["w"], layout="oi"),
        "a constant": lambda p, x: kw.tag(jnp.ones((4, 3)), x, x @ jnp.ones((4, 3))),
    }
    for function in wrong.values():
        with pytest.raises(ValueError, match="kernel must be a leaf"):
            kw.instrument(function, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="bias must be a leaf"):
        kw.instrument(
            lambda p, x: kw.tag(p["w"], x, x @ p["w"] + p["b"], bias=2 * p["b"]),
            GAUSSIAN,
            params,
            x,
        )


def test_shapes_that_do_not_fit_the_layout_are_errors_that_show_them():
    params, x = {"w": normal(4, 4), "b": normal(4)}, normal(5, 4)

    def refused(match, **options):
        with pytest.raises(ValueError, match=match):
            kw.instrument(lambda p, x: mark(p, x, **options), GAUSSIAN, params, x)

    def mark(p, x, outputs=None, **options):
        z = x @ p["w"] if outputs is None else outputs
        return kw.tag(p["w"], x, z, **options)

    refused(r"layout='io' does not fit .*outputs of shape \(5, 3\)", outputs=jnp.ones((5, 3)))
    refused("layout='lookup' does not fit", layout="lookup")
    refused("got 'wrong'", layout="wrong")
    refused("it is no matrix product", layout="bi,io->b", outputs=jnp.ones(5))
    refused("three strings", layout=("NHWC", "HWIO"))
    refused("with the function that computes it", layout=("NC", "IO", "NC"))


def test_a_bias_of_another_size_and_a_grouped_convolution_are_errors():
    params, x = {"w": normal(4, 4), "b": normal(3)}, normal(5, 4)
    with pytest.raises(ValueError, match=r"a bias of shape \(3,\)"):
        kw.instrument(lambda p, x: kw.tag(p["w"], x, x @ p["w"], bias=p["b"]), GAUSSIAN, params, x)

    def grouped(p, x):
        def product(x, w):
            return jax.lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=2
            )

        return tail(kw.tag(p["w"], x, product, layout=("NHC", "HIO", "NHC")))

    with pytest.raises(ValueError, match="grouped convolutions cannot be marked"):
        kw.instrument(grouped, GAUSSIAN, {"w": normal(3, 2, 4)}, normal(5, 6, 4))


def test_parameters_given_to_lax_get_an_error_with_a_way_out():
    def function(p, x):
        return jax.lax.dot(x, p["w"])

    params, x = {"w": normal(4, 3)}, normal(5, 4)
    with pytest.raises((TypeError, ValueError)) as error:
        kw.instrument(function, GAUSSIAN, params, x)
    assert "jnp.asarray(w)" in "".join(error.value.__notes__)


def test_parameters_cast_all_at_once_are_an_error_with_a_way_out():
    def function(p, x):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return network(p, x.astype(jnp.bfloat16))

    def inside(p, x):
        w, b = p["w"], p["b"]
        z = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)
        return kw.tag(w, x.astype(jnp.bfloat16), z, bias=b)

    x = normal(6, 4)
    params = params_of(Network(), x)
    net = kw.instrument(function, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="cast to bfloat16"):
        net.oracle(params, x, key=KEY).factors()
    a, _ = factors(inside, {"w": normal(4, 3), "b": normal(3)}, x)["w"]
    assert a.dtype == jnp.float64


def test_a_mark_that_is_not_reached_is_an_error_that_names_it():
    def function(params, x, skip=False):
        z = dense(params["first"], x)
        return z if skip else dense(params["last"], jnp.tanh(z))

    x = normal(6, 4)
    params = params_of(Network(), x)
    net = kw.instrument(function, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="layers 'last' were instrumented but are not called"):
        net.oracle(params, x, skip=True, key=KEY).factors()


def test_a_kernel_marked_in_two_ways_is_named():
    def function(p, x):
        x = kw.tag(p["w"], x, x @ p["w"])
        return kw.tag(p["w"], x, x @ p["w"].T, layout="oi")

    net = kw.instrument(function, GAUSSIAN, {"w": normal(4, 4)}, normal(5, 4))
    assert "w: it is called in different ways" in str(net.layers)
    assert net.oracle({"w": normal(4, 4)}, normal(5, 4), key=KEY).factors()["w"].shape == (4, 4)


def test_what_is_not_a_function_of_parameters_is_an_error():
    with pytest.raises(ValueError, match="an example of its parameters and of its batch"):
        kw.instrument(network, GAUSSIAN)
    x = normal(6, 4)
    params = params_of(Network(), x)
    net = kw.instrument(network, GAUSSIAN, params, x)
    with pytest.raises(ValueError, match="rngs are for Flax models"):
        net.oracle(params, x, rngs={"dropout": KEY})


# --- Equinox and Haiku ----------------------------------------------------------------------------


def test_an_equinox_mlp_takes_the_steps_of_linens():
    eqx = pytest.importorskip("equinox")

    class MLP(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(4, 5, key=keys[0])
            self.last = eqx.nn.Linear(5, 3, key=keys[1])

        def __call__(self, x):
            for layer in (self.first, self.last):
                z = layer(x)  # kernels are (out, in)
                z = kw.tag(layer.weight, x, z, bias=layer.bias, layout="oi")
                x = jnp.tanh(z) if layer is self.first else z
            return x

    def batched(model, x):
        return jax.vmap(model)(x)

    x, y = normal(6, 4), normal(6, 3, seed=2)
    model = MLP(jax.random.key(0))
    model = jax.tree.map(lambda p: p.astype(float) if eqx.is_array(p) else p, model)
    net = kw.instrument(batched, GAUSSIAN, model, x, uncovered="error")
    params = {
        name: {"kernel": layer.weight.T, "bias": layer.bias}
        for name, layer in (("first", model.first), ("last", model.last))
    }
    linen = kw.instrument(Network(), GAUSSIAN, x)
    assert_same(net.oracle(model, x, key=KEY).factors(), linen.oracle(params, x, key=KEY).factors())

    @eqx.filter_jit
    def step(model, state, key):
        oracle = net.oracle(model, x, key=key)
        grads = eqx.filter_grad(lambda model: GAUSSIAN.nll(batched(model, x), y).mean())(model)
        params = eqx.filter(model, eqx.is_array)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return eqx.apply_updates(model, updates), state

    @jit
    def linen_step(params, state, key):
        oracle = linen.oracle(params, x, targets=y, key=key)
        grads = jax.grad(oracle.loss)(params)
        updates, state = linen_tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    tx, linen_tx = (kw.q_kldwrm(each.layers, 0.1, refresh_every=2) for each in (net, linen))
    state, linen_state = tx.init(eqx.filter(model, eqx.is_array)), linen_tx.init(params)
    before = model.first.weight
    for k in range(3):
        model, state = step(model, state, jax.random.key(k))
        params, linen_state = linen_step(params, linen_state, jax.random.key(k))
    assert not np.allclose(model.first.weight, before)
    np.testing.assert_allclose(model.first.weight.T, params["first"]["kernel"], atol=1e-9)
    np.testing.assert_allclose(model.last.bias, params["last"]["bias"], atol=1e-9)


def test_an_equinox_model_given_as_the_function_is_an_error():
    eqx = pytest.importorskip("equinox")
    with pytest.raises(ValueError, match=r"jax\.vmap\(model\)\(x\)"):
        kw.instrument(eqx.nn.Linear(4, 3, key=KEY), GAUSSIAN, normal(5, 4))


def test_a_haiku_model_has_the_factors_of_linens():
    hk = pytest.importorskip("haiku")

    class Marked(hk.Module):
        def __init__(self, size, name):
            super().__init__(name=name)
            self.size = size

        def __call__(self, x):
            w = hk.get_parameter("w", (x.shape[-1], self.size), init=jnp.zeros)
            b = hk.get_parameter("b", (self.size,), init=jnp.zeros)
            return kw.tag(w, x, jnp.dot(x, w) + b, bias=b)

    def forward(x):
        return Marked(3, "last")(jnp.tanh(Marked(5, "first")(x)))

    x = normal(6, 4)
    transformed = hk.without_apply_rng(hk.transform(forward))
    params = params_of(Network(), x)
    ours = transformed.init(KEY, x)
    assert jax.tree.map(jnp.shape, ours)["first"] == {"w": (4, 5), "b": (5,)}
    ours = {name: {"w": p["kernel"], "b": p["bias"]} for name, p in params.items()}
    assert_same(factors(transformed.apply, ours, x), linen_factors(Network(), params, x))
