"""Layouts of tags: the factors of the same layers in Linen, and errors for shapes that misfit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.twins import (
    GAUSSIAN,
    KEY,
    Network,
    assert_same,
    linen_factors,
    network,
    normal,
    params_of,
    tagged_factors,
    tail,
)
from small_nets import jit

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


def test_tagged_layers_have_the_factors_of_linens():
    x = normal(6, 4)
    params = params_of(Network(), x)
    for options in ({}, {"bias": "separate"}, {"max_factor": 4}):
        assert_same(
            tagged_factors(network, params, x, options=options),
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

    expected = tagged_factors(io, {"w": w, "b": b}, x, options=options)
    assert_same(tagged_factors(oi, {"w": w.T, "b": b}, x, options=options), expected)
    split = {"w": w.reshape(4, 2, 3), "b": b.reshape(2, 3)}
    assert_same(tagged_factors(heads, split, x, options=options), expected)


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
def test_tagged_convolutions_have_the_factors_of_linens(numbers):
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
    assert_same({"conv": tagged_factors(function, ours, x.transpose(order))["w"]}, expected)


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
    ours = tagged_factors(function, params, tokens, likelihood=kw.Categorical(), weights=weights)
    theirs = linen_factors(Tied(), params, tokens, likelihood=kw.Categorical(), weights=weights)
    assert_same(ours, theirs)


def test_shapes_that_do_not_fit_the_layout_are_errors_that_show_them():
    params, x = {"w": normal(4, 4), "b": normal(4)}, normal(5, 4)

    def refused(match, **options):
        with pytest.raises(ValueError, match=match):
            kw.instrument(lambda p, x: tagged(p, x, **options), GAUSSIAN, params, x)

    def tagged(p, x, outputs=None, **options):
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

    with pytest.raises(ValueError, match="Grouped convolutions cannot be tagged"):
        kw.instrument(grouped, GAUSSIAN, {"w": normal(3, 2, 4)}, normal(5, 6, 4))
