"""Tags in plain functions: identity outside an oracle, and right under every transformation."""

import jax
import jax.numpy as jnp
import pytest
from capture.twins import (
    GAUSSIAN,
    KEY,
    Network,
    assert_same,
    dense,
    linen_factors,
    network,
    normal,
    params_of,
    tagged_factors,
)
from small_nets import jit

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


# --- A tag is the identity ------------------------------------------------------------------------


def test_outside_an_oracle_a_tag_leaves_no_trace():
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

    def tagged(params, x):
        return kw.tag(params["w"], x, product)

    x, params = normal(4, 4), {"w": normal(4, 3)}
    bare = jax.make_jaxpr(lambda p, x: jax.lax.dot(x, p["w"]))(params, x)
    assert str(jax.make_jaxpr(tagged)(params, x)) == str(bare)
    assert_same(
        tagged_factors(tagged, params, x),
        tagged_factors(lambda p, x: kw.tag(p["w"], x, x @ p["w"]), params, x),
    )


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
    each = tagged_factors(unrolled, apart, x, weights=weights)
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *(each[str(i)] for i in range(3)))
    seen = tagged_factors(
        lambda p, x: function(p["blocks"], x), {"blocks": blocks}, x, weights=weights
    )
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
        expected = tagged_factors(network, params, x, options=options, weights=weights)
        for function in (per_example, per_token):
            assert_same(
                tagged_factors(function, params, x, options=options, weights=weights), expected
            )

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

    assert_same(
        tagged_factors(function, params, x, False), tagged_factors(function, params, x, True)
    )


def test_ensembles_have_a_block_for_each_member():
    x = normal(5, 4)
    members = {"kernel": normal(3, 4, 2), "bias": normal(3, 2, seed=2)}

    def ensemble(p, x):
        each = jax.vmap(lambda p: jax.vmap(lambda x: jnp.tanh(dense(p, x)))(x))(p["members"])
        return each.sum(axis=0)

    def apart(p, x):
        return sum(jnp.tanh(dense(p[str(i)], x)) for i in range(3))

    each = tagged_factors(
        apart, {str(i): jax.tree.map(lambda p: p[i], members) for i in range(3)}, x
    )
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *(each[str(i)] for i in range(3)))
    assert_same(tagged_factors(ensemble, {"members": members}, x), {"members": expected})


def test_exact_sums_over_directions_under_a_vmap_over_examples():
    x = normal(6, 2, 4)
    params = params_of(Network(), x)
    options = {"fisher": "exact"}
    seen = tagged_factors(
        lambda p, x: jax.vmap(lambda x: network(p, x))(x), params, x, options=options
    )
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


def test_a_kernel_tagged_in_two_ways_is_named():
    def function(p, x):
        x = kw.tag(p["w"], x, x @ p["w"])
        return kw.tag(p["w"], x, x @ p["w"].T, layout="oi")

    net = kw.instrument(function, GAUSSIAN, {"w": normal(4, 4)}, normal(5, 4))
    assert "w: it is called in different ways" in str(net.layers)
    assert net.oracle({"w": normal(4, 4)}, normal(5, 4), key=KEY).factors()["w"].shape == (4, 4)
