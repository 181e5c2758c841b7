"""Every layer that is read as a matrix product: its rows are those of the layer's jacobian."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import (
    Tape,
    assert_factors,
    categorical_root,
    factors,
    gaussian_root,
    initialised,
    kfac,
)

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")


def tail(z, samples=1):
    """Something nonlinear after a layer: three outputs for each of the samples in front."""
    mix = np.random.default_rng(3).normal(size=(z[(0,) * samples].size, 3))
    return jnp.tanh(z).reshape(*z.shape[:samples], -1) @ mix


class Headed(nn.Module):
    layer: nn.Module
    samples: int = 1

    @nn.compact
    def __call__(self, x):
        return tail(self.layer(x), self.samples)


def normal(*shape, seed=7):
    return jax.random.normal(jax.random.key(seed), shape)


def jacobian_rows(layer, params, x, output_axis=-1, groups=1):
    """Inputs of a layer with outputs in the last axis, from its jacobian: one array a group.

    Output ``c`` depends on the kernel's column ``c`` alone, through the row that it multiplies.
    """
    jacobian = jax.jacfwd(lambda k: layer.apply({"params": {**params, "kernel": k}}, x))(
        params["kernel"]
    )
    kernel_axes = range(jacobian.ndim - params["kernel"].ndim, jacobian.ndim)
    jacobian = jnp.moveaxis(jacobian, kernel_axes[output_axis], -1)
    outputs = jacobian.shape[-1]
    by_column = jnp.moveaxis(jacobian, kernel_axes[0] - 1, -2)  # (*rows, *inputs, output, column)
    rows = by_column.shape[: kernel_axes[0] - 1]
    by_column = by_column.reshape(*rows, -1, outputs, outputs)
    firsts = range(0, outputs, outputs // groups)
    return [by_column[..., c, c] for c in firsts]


def expected_factors(layer, params, x, samples=1, output_axis=-1, groups=1, **options):
    """Factors of each group, stacked, from the layer's jacobian; targets are zero."""
    inner = params["layer"]
    z = layer.apply({"params": inner}, x)
    size = z.shape[-1] // groups
    made = []
    for group, a in enumerate(jacobian_rows(layer, inner, x, output_axis, groups)):
        mine = slice(group * size, (group + 1) * size)

        def network(tape, a=a, mine=mine):
            return tail(z.at[..., mine].set(tape("layer", a, z[..., mine])), samples)

        bias = ("layer",) if "bias" in inner else ()
        made.append(kfac(network, tail(z, samples)[None], together=True, bias=bias, **options))
    if groups == 1:
        return made[0]
    return {"layer": tuple(jnp.stack([m["layer"][i] for m in made]) for i in (0, 1))}


def check(layer, x, samples=1, output_axis=-1, groups=1, sharing="expand"):
    model = Headed(layer, samples)
    params = initialised(model, x)
    net = kw.instrument(model, kw.Gaussian(), x, fisher="empirical", sharing=sharing)
    expected = jax.jit(
        lambda p: expected_factors(
            layer, p, x, samples, output_axis, groups, reduce=sharing == "reduce"
        )
    )(params)
    got = factors(net, params, x, targets=np.zeros((*x.shape[:samples], 3)))
    assert_factors(got, expected)
    block = net.layers["layer"]
    assert block.size == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert tuple(a.shape for a in got["layer"]) == block.shapes
    return net, params


CONVOLUTIONS = {
    "1d": (nn.Conv(2, (3,)), (2, 5, 2)),
    "1d by an integer": (nn.Conv(2, 3), (2, 5, 2)),
    "1d causal": (nn.Conv(2, (3,), padding="CAUSAL"), (2, 5, 2)),
    "1d causal dilated": (nn.Conv(2, (2,), padding="CAUSAL", kernel_dilation=2), (2, 5, 2)),
    "2d same": (nn.Conv(2, (3, 2)), (2, 4, 3, 2)),
    "2d valid": (nn.Conv(2, (3, 2), padding="VALID"), (2, 4, 3, 2)),
    "2d circular": (nn.Conv(2, (3, 2), padding="CIRCULAR"), (2, 4, 3, 2)),
    "2d circular strided": (nn.Conv(2, (3, 2), 2, padding="CIRCULAR"), (2, 4, 4, 1)),
    "2d reflect": (nn.Conv(2, (3, 3), padding="REFLECT"), (2, 4, 3, 2)),
    "2d integer": (nn.Conv(2, (3, 2), padding=2), (2, 4, 3, 2)),
    "2d pairs": (nn.Conv(2, (3, 2), padding=((1, 0), (0, 2))), (2, 4, 3, 2)),
    "2d strided": (nn.Conv(2, (3, 2), strides=(2, 1)), (2, 5, 4, 2)),
    "2d dilated kernel": (nn.Conv(2, (2, 2), kernel_dilation=(2, 1)), (2, 5, 4, 2)),
    "2d dilated input": (nn.Conv(2, (2, 2), input_dilation=(1, 2), padding=1), (2, 3, 3, 2)),
    "2d without bias": (nn.Conv(2, (2, 2), use_bias=False), (2, 3, 3, 2)),
    "2d one place": (nn.Conv(3, (1, 1)), (2, 3, 3, 2)),
    "3d": (nn.Conv(2, (2, 1, 2), strides=(1, 2, 1)), (2, 2, 3, 2, 2)),
}


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution_factors_are_patch_moments(layer, shape):
    check(layer, normal(*shape))


def test_convolution_with_several_batch_axes():
    check(nn.Conv(2, (2, 2)), normal(2, 2, 3, 3, 1), samples=2)


def test_convolution_without_a_batch_axis():
    layer, x = nn.Conv(2, (2,)), normal(4, 2)

    class Single(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tail(nn.Conv(2, (2,), name="layer")(x)[None])

    params = initialised(Single(), x)
    net = kw.instrument(Single(), kw.Gaussian(), x, fisher="exact")
    (a,) = jacobian_rows(layer, params["layer"], x)
    z = layer.apply({"params": params["layer"]}, x)
    root = gaussian_root(tail(z[None]))
    assert_factors(
        factors(net, params, x), kfac(lambda tape: tail(tape("layer", a, z)[None]), root)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_convolution_has_a_block_for_each_group(bias):
    layer = nn.Conv(6, (2, 2), feature_group_count=2, use_bias=bias)
    net, _ = check(layer, normal(2, 3, 3, 4), groups=2)
    assert net.layers["layer"].shapes[1] == (2, 3, 3)


def test_depthwise_convolution_has_a_block_for_each_channel():
    check(nn.Conv(6, (3,), feature_group_count=3), normal(2, 4, 3), groups=3)


def test_reduced_convolution_averages_patches_and_sums_gradients():
    check(nn.Conv(2, (3, 2), strides=2), normal(2, 4, 3, 2), sharing="reduce")
    check(nn.Conv(4, (2,), feature_group_count=2), normal(2, 4, 2), groups=2, sharing="reduce")


TRANSPOSED = {
    "strided same": (nn.ConvTranspose(2, (3,), strides=(2,)), (2, 4, 2)),
    "valid": (nn.ConvTranspose(2, (3,), strides=(2,), padding="VALID"), (2, 4, 2)),
    "circular": (nn.ConvTranspose(2, (3,), strides=(2,), padding="CIRCULAR"), (2, 4, 2)),
    "pairs": (nn.ConvTranspose(2, (3,), padding=((1, 2),)), (2, 4, 2)),
    "dilated": (nn.ConvTranspose(2, (2,), kernel_dilation=(2,)), (2, 4, 2)),
    "2d": (nn.ConvTranspose(2, (2, 3), strides=(2, 1)), (2, 2, 3, 2)),
    "without bias": (nn.ConvTranspose(3, (2, 2), use_bias=False), (2, 2, 3, 2)),
}


@pytest.mark.parametrize(("layer", "shape"), TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_convolution_factors_are_patch_moments(layer, shape):
    check(layer, normal(*shape))


def test_transposed_kernel_of_a_transposed_convolution():
    layer = nn.ConvTranspose(2, (3,), strides=(2,), transpose_kernel=True)
    check(layer, normal(2, 4, 3), output_axis=-2)


@pytest.mark.parametrize(
    "layer",
    [nn.ConvLocal(2, (2,)), nn.Conv(2, (2,), mask=np.ones((2, 3, 2)))],
    ids=["local", "masked"],
)
def test_convolutions_that_are_no_matrix_product_are_named(layer):
    net = kw.instrument(Headed(layer), kw.Gaussian(), normal(2, 4, 3))
    assert not any(isinstance(block.block, kw.curvature.Kronecker) for block in net.layers)
    assert "convolution" in net.layers["layer/kernel"].note.lower().replace(
        "convlocal", "convolution"
    )


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 3), (2, 2, 2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layer_sees_all_leading_axes_as_rows(shape, bias):
    check(nn.Dense(2, use_bias=bias), normal(*shape))


def test_reduced_dense_layer():
    check(nn.Dense(2), normal(3, 4, 3), sharing="reduce")
    check(nn.Dense(2), normal(3, 2, 2, 3), sharing="reduce")


def matrix_of(net, params, name="layer"):
    """``[W; b]`` as the layer's block sees it."""
    from kldwrm_jax.paths import leaves_by_path

    return net.layers[name].gather(leaves_by_path(params))


GENERAL = {
    # layer, input shape, einsum of the input to (*rows, [group,] input axes), of the output
    "one axis": (nn.DenseGeneral(2), (3, 2, 4), "bti->bti", "bto->bto"),
    "several features": (nn.DenseGeneral((2, 3)), (3, 4), "bi->bi", "bop->bop"),
    "two axes": (nn.DenseGeneral(3, axis=(-2, -1)), (3, 2, 2, 4), "btij->btij", "bto->bto"),
    "axes apart": (nn.DenseGeneral(3, axis=(1, 3)), (3, 2, 2, 4), "bitj->btij", "bto->bto"),
    "axes unsorted": (nn.DenseGeneral(3, axis=(2, 1)), (3, 2, 4), "bij->bij", "bo->bo"),
    "middle axis": (nn.DenseGeneral((3, 2), axis=1), (3, 2, 4), "bit->bti", "btop->btop"),
    "no bias": (
        nn.DenseGeneral((3, 2), axis=(-1, -2), use_bias=False), (3, 2, 4), "bij->bij", "bop->bop",
    ),
    "einsum": (nn.Einsum((4, 2, 3), "...i,iop->...op"), (3, 2, 4), "bti->bti", "btop->btop"),
    "einsum two axes": (nn.Einsum((2, 3, 4), "bji,oij->bo"), (3, 4, 3), "bji->bij", "bo->bo"),
    "einsum permuted": (nn.Einsum((3, 4), "bit,oi->bot"), (3, 4, 2), "bit->bti", "bot->bto"),
    "einsum to a number": (
        nn.Einsum((4,), "bti,i->bt", kernel_init=nn.initializers.ones),
        (3, 2, 4), "bti->bti", "bt->bt",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "shape", "inputs", "outputs"), GENERAL.values(), ids=GENERAL)
def test_general_products_are_matrix_products(layer, shape, inputs, outputs):
    x = normal(*shape)
    model = Headed(layer)
    params = initialised(model, x)
    net = kw.instrument(model, kw.Gaussian(), x, fisher="empirical")
    sample_axes = len(set(inputs.split("->")[1]) & set(outputs.split("->")[1]))
    rows = jnp.einsum(inputs, x)
    rows = rows.reshape(*rows.shape[:sample_axes], -1)
    z = layer.apply({"params": params["layer"]}, x)
    back = "->".join(reversed(outputs.split("->")))
    ordered = jnp.einsum(outputs, z)
    flat = ordered.reshape(*ordered.shape[:sample_axes], -1)

    w = matrix_of(net, params)
    ones = jnp.ones((*rows.shape[:-1], 1 if "bias" in params["layer"] else 0))
    np.testing.assert_allclose(jnp.concatenate([rows, ones], -1) @ w, flat, rtol=1e-10)

    def network(tape):
        return tail(jnp.einsum(back, tape("layer", rows, flat).reshape(ordered.shape)))

    bias = ("layer",) if "bias" in params["layer"] else ()
    expected = kfac(network, network(Tape())[None], together=True, bias=bias)
    assert_factors(factors(net, params, x, targets=np.zeros((len(x), 3))), expected)


GROUPED = {
    # rows (example, group, input), outputs (example, group, output)
    "batch dims": (
        nn.DenseGeneral(2, axis=-1, batch_dims=(0,)), (3, 4, 5), "gbi->b g i", "gbo->b g o",
    ),
    "two batch dims": (
        nn.DenseGeneral((2, 1), axis=(-1,), batch_dims=(1, 0)),
        (3, 2, 4, 5), "fgbi->b fg i", "fgbop->b fg op",
    ),
    "einsum": (nn.Einsum((3, 5, 2), "bgi,gio->bgo"), (4, 3, 5), "bgi->b g i", "bgo->b g o"),
    "einsum permuted": (
        nn.Einsum((5, 3, 2), "bgi,igo->bog"), (4, 3, 5), "bgi->b g i", "bog->b g o",
    ),
    "no bias": (
        nn.Einsum((3, 5, 2), "bgi,gio->bgo", use_bias=False),
        (4, 3, 5), "bgi->b g i", "bgo->b g o",
    ),
}  # fmt: skip


def regroup(x, recipe):
    """An einsum whose result has an axis for every word."""
    inputs, outputs = recipe.split("->")
    lengths = dict(zip(inputs, x.shape, strict=True))
    x = jnp.einsum(f"{inputs}->{outputs.replace(' ', '')}", x)
    return x.reshape([np.prod([lengths[c] for c in word]) for word in outputs.split()])


@pytest.mark.parametrize(("layer", "shape", "inputs", "outputs"), GROUPED.values(), ids=GROUPED)
def test_products_with_a_batch_of_kernels_have_a_block_each(layer, shape, inputs, outputs):
    x = normal(*shape)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tail(regroup(layer.copy(name="layer")(x), outputs))

    params = initialised(Model(), x)
    net = kw.instrument(Model(), kw.Gaussian(), x, fisher="empirical")
    rows, z = regroup(x, inputs), regroup(layer.apply({"params": params["layer"]}, x), outputs)
    bias = "bias" in params["layer"]
    w = matrix_of(net, params)
    ones = jnp.ones((*rows.shape[:-1], int(bias)))
    product = jnp.einsum("bgi,gio->bgo", jnp.concatenate([rows, ones], -1), w)
    np.testing.assert_allclose(product, z, rtol=1e-10)

    def one_group(group):
        def network(tape):
            return tail(z.at[:, group].set(tape("layer", rows[:, group], z[:, group])))

        own = ("layer",) if bias else ()
        return kfac(network, tail(z)[None], together=True, bias=own)["layer"]

    each = [one_group(group) for group in range(z.shape[1])]
    expected = {"layer": tuple(jnp.stack([g[i] for g in each]) for i in (0, 1))}
    assert_factors(factors(net, params, x, targets=np.zeros((len(z), 3))), expected)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Einsum((3, 5), "bi,...i->b..."), "ellipsis"),
        (nn.Einsum((5, 2), "bi,ko->bo", use_bias=False), "sums an axis"),
        (nn.Einsum((5,), "bi,i->bi", kernel_init=nn.initializers.ones), "contracts no axis"),
        (nn.Einsum((5, 5, 2), "bi,iio->bo", use_bias=False), "repeats an axis"),
    ],
)
def test_einsums_that_are_no_matrix_product_are_named(layer, reason):
    net = kw.instrument(Headed(layer), kw.Gaussian(), normal(4, 5))
    assert reason in net.layers["layer/kernel"].note
    assert net.layers["layer/kernel"].kind == "Einsum"


def test_einsum_given_at_the_call():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((5, 3), name="layer")(x, "bi,io->bo")

    x = normal(4, 5)
    params = initialised(Model(), x)
    net = kw.instrument(Model(), kw.Gaussian(), x, fisher="exact")
    expected = kfac(lambda tape: tape.dense("layer", x, params["layer"]), gaussian_root(x[:, :3]))
    assert_factors(factors(net, params, x), expected)


def attention(tape, p, x, heads):
    """Self-attention, written out; queries, keys and values are products with flattened heads."""
    width = p["query"]["kernel"].shape[-1]

    def project(name):
        kernel, bias = p[name]["kernel"], p[name]["bias"]
        z = tape(name, x, x @ kernel.reshape(x.shape[-1], -1) + bias.reshape(-1))
        return z.reshape(*x.shape[:-1], heads, width)

    q, k, v = project("query"), project("key"), project("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)
    flat = mixed.reshape(*x.shape[:-1], -1)
    out = p["out"]
    return tape(
        "out", flat, flat @ out["kernel"].reshape(-1, out["kernel"].shape[-1]) + out["bias"]
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_attention_projections(sharing):
    x = normal(2, 3, 4)
    model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=4, out_features=3)
    params = initialised(model, x)
    net = kw.instrument(model, kw.Gaussian(), x, fisher="exact", sharing=sharing)
    expected = kfac(
        lambda tape: attention(tape, params, x, heads=2),
        gaussian_root(normal(2, 3, 3)),
        reduce=sharing == "reduce",
    )
    assert_factors(factors(net, params, x), expected)


TOKENS = np.array([[0, 3, 3], [1, 0, 3]])


def test_embedding_is_token_frequencies_times_output_gradients():
    model = Headed(nn.Embed(5, 2))
    params = initialised(model, TOKENS)
    net = kw.instrument(model, kw.Gaussian(), TOKENS, fisher="exact")
    table, hot = params["layer"]["embedding"], jax.nn.one_hot(TOKENS, 5)
    expected = kfac(
        lambda tape: tail(tape("layer", hot, hot @ table)),
        gaussian_root(tail(table[TOKENS])),
        bias=(),
    )
    a, g = expected["layer"]
    np.testing.assert_allclose(a, np.diag(np.diag(a)))
    np.testing.assert_allclose(np.diag(a), [2 / 6, 1 / 6, 0, 3 / 6, 0])
    assert_factors(factors(net, params, TOKENS), {"layer": (jnp.diag(a), g)})


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(5, 2, name="embed")
        return embed.attend(jnp.tanh(embed(tokens)))


def test_attend_alone_is_squared_gradients_times_query_moments():
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tail(nn.Embed(5, 2, name="layer").attend(x))

    x = normal(3, 2)
    params = initialised(Head(), x)
    net = kw.instrument(Head(), kw.Gaussian(), x, fisher="exact")
    table = params["layer"]["embedding"]
    expected = kfac(
        lambda tape: tail(tape("layer", x, x @ table.T)), gaussian_root(tail(x @ table.T)), bias=()
    )
    queries, gradients = expected["layer"]  # the table's rows are the product's outputs
    a, g = factors(net, params, x)["layer"]
    np.testing.assert_allclose(
        jnp.kron(jnp.diag(a), g), jnp.kron(jnp.diag(jnp.diag(gradients)), queries), rtol=1e-9
    )
    assert net.layers["layer"].kind == "Embed, tied"


def test_tied_embedding_has_the_partial_traces_of_the_sum_of_its_uses():
    params = initialised(Tied(), TOKENS)
    net = kw.instrument(Tied(), kw.Categorical(), TOKENS, fisher="exact")
    table, hot = params["embed"]["embedding"], jax.nn.one_hot(TOKENS, 5)

    def network(tape):
        query = jnp.tanh(tape("look up", hot, hot @ table))
        return tape("attend", query, query @ table.T)

    both = kfac(network, categorical_root(network(Tape())), bias=())
    look_up = jnp.kron(*both["look up"])
    attended = jnp.kron(jnp.diag(jnp.diag(both["attend"][1])), both["attend"][0])
    total = (look_up + attended).reshape(5, 2, 5, 2)
    a, g = factors(net, params, TOKENS)["embed"]
    np.testing.assert_allclose(a * jnp.trace(g), jnp.diag(jnp.einsum("iaja->ij", total)), rtol=1e-9)
    np.testing.assert_allclose(g * a.sum(), jnp.einsum("iaib->ab", total), rtol=1e-9)
    assert net.layers["embed"].kind == "Embed, tied"


def unrolled_gru(tape, p, x):
    h = jnp.zeros((x.shape[0], p["hn"]["kernel"].shape[0]))
    for t in range(x.shape[1]):
        i = {gate: tape.dense("i" + gate, x[:, t], p["i" + gate]) for gate in "rzn"}
        r = jax.nn.sigmoid(i["r"] + tape.dense("hr", h, p["hr"]))
        z = jax.nn.sigmoid(i["z"] + tape.dense("hz", h, p["hz"]))
        n = jnp.tanh(i["n"] + r * tape.dense("hn", h, p["hn"]))
        h = (1 - z) * n + z * h
    return h


def unrolled_lstm(tape, p, x):
    h = c = jnp.zeros((x.shape[0], p["hi"]["kernel"].shape[0]))
    for t in range(x.shape[1]):
        i, f, g, o = (
            tape.dense("i" + gate, x[:, t], p["i" + gate])
            + tape.dense("h" + gate, h, p["h" + gate])
            for gate in "ifgo"
        )
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h


class Recurrent(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x):
        return nn.RNN(self.cell(2, name="cell", param_dtype=jnp.float64), name="rnn")(x)[:, -1]


@pytest.mark.parametrize(
    ("cell", "unrolled"),
    [
        (nn.GRUCell, unrolled_gru),
        (nn.LSTMCell, unrolled_lstm),
        (nn.OptimizedLSTMCell, unrolled_lstm),
    ],
)
def test_recurrent_cells_equal_the_unrolled_network(cell, unrolled):
    x = normal(3, 2, 4)
    params = initialised(Recurrent(cell), x)
    net = kw.instrument(Recurrent(cell), kw.Gaussian(), x, fisher="exact", uncovered="error")
    inner = params["cell"]
    biased = {name for name, layer in inner.items() if "bias" in layer}
    expected = kfac(
        lambda tape: unrolled(tape, inner, x), gaussian_root(jnp.zeros((3, 2))), bias=biased
    )
    assert_factors(
        factors(net, params, x), {f"cell/{name}": made for name, made in expected.items()}
    )


def test_optimized_lstm_is_seen_as_the_lstm_of_its_gates():
    x = normal(2, 3, 3)
    params = initialised(Recurrent(nn.LSTMCell), x)
    made = [
        factors(kw.instrument(Recurrent(cell), kw.Gaussian(), x, fisher="exact"), params, x)
        for cell in (nn.LSTMCell, nn.OptimizedLSTMCell)
    ]
    assert_factors(*made, rtol=1e-12)


class Normalised(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        return tail(self.norm(nn.Dense(x.shape[-1], name="before")(x)))


NORMS = {
    "layer": (nn.LayerNorm(), (3, 2, 4)),
    "layer, two axes": (nn.LayerNorm(feature_axes=(-1, -2), reduction_axes=(-1, -2)), (3, 2, 4)),
    "layer, without bias": (nn.LayerNorm(use_bias=False), (3, 4)),
    "rms": (nn.RMSNorm(), (3, 2, 4)),
    "group": (nn.GroupNorm(2), (3, 2, 4)),
    "instance": (nn.InstanceNorm(), (3, 5, 4)),
    "batch, averages": (nn.BatchNorm(use_running_average=True), (3, 2, 4)),
    "batch, middle axis": (nn.BatchNorm(use_running_average=True, axis=1), (3, 2, 4)),
}


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
def test_norms_sum_squared_per_example_gradients(norm, shape):
    x = normal(*shape)
    model = Normalised(norm)
    params = initialised(model, x)
    params["norm"]["scale"] = params["norm"]["scale"].at[..., 0].set(0)  # not to be divided by
    others = {}
    if isinstance(norm, nn.BatchNorm):
        features = params["norm"]["scale"].shape
        stats = {"mean": normal(*features, seed=1), "var": 0.5 + normal(*features, seed=2) ** 2}
        others = {"batch_stats": {"norm": stats}}
    net = kw.instrument(
        model, kw.Gaussian(), x, fisher="exact", variables={"params": params} | others
    )

    @jax.jit
    def squares(own):
        def single(own, one):
            return model.apply({"params": params | {"norm": own}, **others}, one[None])[0]

        per_example = jax.vmap(jax.jacrev(single), in_axes=(None, 0))(own, x)
        return jax.tree.map(lambda j: (j**2).sum(axis=(0, 1)) / len(x), per_example)

    got = factors(net, params, x, variables=others)
    expected = squares(params["norm"])
    assert set(got) == {"before"} | {f"norm/{name}" for name in expected}
    for name, value in expected.items():
        assert value.all()
        np.testing.assert_allclose(got[f"norm/{name}"], value, rtol=1e-9, atol=1e-12)
        assert net.layers[f"norm/{name}"].note
