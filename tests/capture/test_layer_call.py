"""Calls as operations on rows: rows times the kernel's matrix are the layer's outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.capture import layer_call
from kldwrm_jax.capture.layer_call import Operands, Options

pytestmark = pytest.mark.usefixtures("x64")


def operands(inputs, **arrays):
    shapes = {name: x.shape for name, x in arrays.items()}
    return Operands("Layer", inputs, shapes, Options())


def product(call, inputs, *arrays):
    """The rows of the inputs, with ones, times the parameters as their block reads them."""
    (block,) = call.spec.blocks
    rows = call.collector.input_rows(inputs)
    if len(arrays) == 2:
        rows = jnp.concatenate([rows, jnp.ones_like(rows[..., :1])], axis=-1)
    leaves = dict(zip(call.spec.parameters, arrays, strict=True))
    return jnp.einsum("...i,...io->...o", rows, block.gather(leaves))


EINSUMS = {
    "dense": ("...i,io->...o", (5, 2, 4), (4, 3)),
    "transposed": ("bi,oi->bo", (5, 4), (3, 4)),
    "heads": ("btd,dhk->bthk", (5, 2, 4), (4, 2, 3)),
    "two axes, permuted": ("bji,oij->bo", (5, 4, 3), (2, 3, 4)),
    "groups": ("bgi,igo->bog", (5, 3, 4), (4, 3, 2)),
}


@pytest.mark.parametrize(("equation", "x", "w"), EINSUMS.values(), ids=EINSUMS)
def test_an_einsum_is_rows_times_a_matrix(rng, equation, x, w):
    x, w = jnp.asarray(rng.normal(size=x)), jnp.asarray(rng.normal(size=w))
    out = jnp.einsum(equation, x, w)
    call = layer_call.einsum(operands(x, kernel=w), equation)
    rows = call.collector.output_rows(out)
    np.testing.assert_allclose(product(call, x, w), rows, rtol=1e-10)
    assert call.inputs() is x


def test_what_is_no_matrix_product_is_said_in_words(rng):
    x, w = rng.normal(size=(5, 4)), rng.normal(size=(4,))
    assert "contracts no axis" in layer_call.einsum(operands(x, kernel=w), "bi,i->bi")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_patches_times_a_matrix(rng, groups):
    x, w = (
        jnp.asarray(rng.normal(size=(2, 7, 4))),
        jnp.asarray(rng.normal(size=(3, 4 // groups, 6))),
    )
    b = jnp.asarray(rng.normal(size=6))

    def convolve(x, w, groups):
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            x, w, (2,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def patches(x):
        units = jnp.asarray(layer_call.window_units((3,)), x.dtype)
        return jax.vmap(lambda one: convolve(one, units, 1))(x)

    call = layer_call.convolution(operands(x, kernel=w, bias=b), groups, patches)
    out = call.collector.output_rows(convolve(x, w, groups) + b)
    np.testing.assert_allclose(product(call, x, w, b), out, rtol=1e-10)
    assert call.spec.blocks[0].kind == ("Layer" if groups == 1 else "Layer, 2 groups")


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_a_transposed_convolution_is_patches_times_a_matrix(rng, transpose_kernel):
    x, w = jnp.asarray(rng.normal(size=(2, 5, 4))), jnp.asarray(rng.normal(size=(3, 4, 6)))
    w = jnp.swapaxes(w, -1, -2) if transpose_kernel else w

    def convolve(x, w):
        return jax.lax.conv_transpose(x, w, (2,), "SAME", transpose_kernel=transpose_kernel)

    call = layer_call.transposed_convolution(
        operands(x, kernel=w), convolve, transpose_kernel=transpose_kernel
    )
    np.testing.assert_allclose(product(call, x, w), convolve(x, w), rtol=1e-10)


@pytest.mark.parametrize(("bias", "parts"), [("joint", [""]), ("separate", ["kernel", "bias"])])
def test_blocks_are_those_of_the_option_bias(bias, parts):
    made = Operands("Dense", np.ones((5, 3)), {"kernel": (3, 2), "bias": (2,)}, Options(bias))
    spec = layer_call.einsum(made, "...i,io->...o").spec
    assert [block.name for block in spec.blocks] == parts
    assert spec.parameters == ("kernel", "bias")
    inputs = [block.shapes[0] for block in spec.blocks]
    assert inputs == ([(4, 4)] if bias == "joint" else [(3, 3), (1, 1)])


def test_an_embedding_merges_look_ups_and_products_and_nothing_else():
    table = Operands("Embed", np.zeros(4, int), {"embedding": (5, 2)}, Options())
    look_up, attend = (layer_call.embedding(table, attends=a).spec for a in (False, True))
    for one, other in ((look_up, attend), (attend, look_up)):
        assert one.merge(other) == attend
    assert look_up.merge(look_up) == look_up
    other = layer_call.embedding(
        Operands("Embed", np.zeros(4, int), {"embedding": (6, 2)}, Options()), attends=True
    ).spec
    dense = layer_call.einsum(
        Operands("Dense", np.ones((5, 3)), {"kernel": (3, 2)}, Options()), "...i,io->...o"
    ).spec
    assert look_up.merge(other) is None
    assert look_up.merge(dense) is None
    assert dense.merge(look_up) is None


def test_a_normalization_has_a_block_for_each_parameter_that_it_has():
    x = np.ones((4, 5, 3))
    made = Operands("Norm", x, {"scale": (3,)}, Options())
    call = layer_call.normalization(made, (2,), lambda: x)
    assert [block.name for block in call.spec.blocks] == ["scale"]
    assert call.spec.feature_axes == (-1,)
    assert call.inputs() is x
