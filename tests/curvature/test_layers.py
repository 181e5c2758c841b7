import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock, Layers, Parameter
from kldwrm_jax.curvature.parameters import MatrixView

DENSE_KERNEL = Parameter("dense/kernel", (3, 4), view=MatrixView((3, 4), (), (0,), (1,)))
DENSE_BIAS = Parameter("dense/bias", (4,), view=MatrixView((4,), output_axes=(0,)))
DENSE = LayerBlock(
    name="dense",
    kind="Dense",
    block=Kronecker(),
    parameters=(DENSE_KERNEL, DENSE_BIAS),
    shapes=((4, 4), (4, 4)),
)
SCALE = LayerBlock(
    name="norm/scale",
    kind="LayerNorm",
    block=Diagonal(),
    parameters=(Parameter("norm/scale", (2, 5)),),
    shapes=((2, 5),),
    note="diagonal: scales have no Kronecker block",
)
LAYERS = Layers((DENSE, SCALE))


def values(shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def test_a_dense_kernel_is_its_own_matrix_and_a_bias_is_one_row():
    kernel, bias = values((3, 4)), values((4,))
    np.testing.assert_array_equal(DENSE_KERNEL.to_matrix(kernel), kernel)
    np.testing.assert_array_equal(DENSE_BIAS.to_matrix(bias), bias[None])


def test_a_stack_axis_anywhere_comes_to_the_front():
    parameter = Parameter("k", (3, 4, 5), (1,), MatrixView((3, 5), (), (0,), (1,)))
    x = values((3, 4, 5))
    matrix = parameter.to_matrix(x)
    assert matrix.shape == (4, 3, 5)
    for i in range(4):
        np.testing.assert_array_equal(matrix[i], x[:, i, :])
    np.testing.assert_array_equal(parameter.from_matrix(matrix), x)


def test_stack_axes_keep_the_order_in_which_they_are_named():
    parameter = Parameter("k", (2, 3, 4, 5), (3, 0), MatrixView((3, 4), (), (0,), (1,)))
    x = values((2, 3, 4, 5))
    matrix = parameter.to_matrix(x)
    assert parameter.stacked == (5, 2)
    for i, j in np.ndindex(5, 2):
        np.testing.assert_array_equal(matrix[i, j], x[j, :, :, i])
    np.testing.assert_array_equal(parameter.from_matrix(matrix), x)


def test_a_convolution_kernel_flattens_window_and_channels_in_rows():
    parameter = Parameter("k", (3, 3, 2, 5), (), MatrixView((3, 3, 2, 5), (), (2, 0, 1), (3,)))
    x = values((3, 3, 2, 5))
    matrix = np.asarray(parameter.to_matrix(x))
    for i, j, c, o in np.ndindex(*x.shape):
        assert matrix[(c * 3 + i) * 3 + j, o] == x[i, j, c, o]
    np.testing.assert_array_equal(parameter.from_matrix(matrix), x)


def test_a_grouped_kernel_has_one_matrix_a_group():
    # Flax: (window, inputs / groups, outputs), outputs ordered by group; here within a stack.
    parameter = Parameter("k", (3, 7, 2, 6), (1,), MatrixView((3, 2, 2, 3), (2,), (0, 1), (3,)))
    x = values((3, 7, 2, 6))
    matrix = np.asarray(parameter.to_matrix(x))
    assert matrix.shape == (7, 2, 6, 3)
    for window, s, c, o in np.ndindex(*x.shape):
        assert matrix[s, o // 3, window * 2 + c, o % 3] == x[window, s, c, o]
    np.testing.assert_array_equal(parameter.from_matrix(matrix), x)


@st.composite
def parameters(draw):
    """A parameter with its axes dealt out to stack, groups, rows and columns in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    axes = draw(st.permutations(range(len(shape))))
    n_stack = draw(st.integers(0, len(shape)))
    stack = tuple(axes[:n_stack])
    split = tuple(n for axis, n in enumerate(shape) if axis not in stack)
    own = draw(st.permutations(range(len(split))))
    cuts = sorted(draw(st.lists(st.integers(0, len(split)), min_size=2, max_size=2)))
    groups, rows, columns = own[: cuts[0]], own[cuts[0] : cuts[1]], own[cuts[1] :]
    view = MatrixView(split, tuple(groups), tuple(rows), tuple(columns))
    return Parameter("k", shape, stack, view)


@settings(deadline=None, max_examples=15)
@given(parameter=parameters())
def test_matrices_read_back_as_their_parameters_and_equal_numpys_transpose(parameter):
    x, view = values(parameter.shape), parameter.view
    matrix = parameter.to_matrix(x)
    np.testing.assert_array_equal(parameter.from_matrix(matrix), x)
    remaining = [axis for axis in range(x.ndim) if axis not in parameter.stack]
    own = [remaining[a] for a in view.group_axes + view.input_axes + view.output_axes]
    expected = np.transpose(x, [*parameter.stack, *own]).reshape(matrix.shape)
    np.testing.assert_array_equal(matrix, expected)
    assert matrix.ndim == len(parameter.stack) + bool(view.group_axes) + 2


def test_per_slice_names_the_axes_of_one_copy():
    parameter = Parameter("k", (3, 4, 5), (1,), MatrixView((3, 5), (), (0,), (1,)))
    assert parameter.per_slice(values((3, 4, 5))) == (0, 2)


def test_a_joint_block_has_the_bias_as_its_last_row():
    leaves = {"dense/kernel": values((3, 4)), "dense/bias": -values((4,)), "other": values((2,))}
    v = DENSE.gather(leaves)
    np.testing.assert_array_equal(v, np.vstack([leaves["dense/kernel"], leaves["dense/bias"]]))
    scattered = DENSE.scatter(v)
    assert scattered.keys() == {"dense/kernel", "dense/bias"}
    for path, x in scattered.items():
        np.testing.assert_array_equal(x, leaves[path])


def test_a_joint_block_of_stacked_groups_pairs_each_matrix_with_its_bias():
    kernel = Parameter("kernel", (3, 5, 4), (1,), MatrixView((3, 2, 2), (1,), (0,), (2,)))
    bias = Parameter("bias", (5, 4), (0,), MatrixView((2, 2), (0,), (), (1,)))
    block = LayerBlock("conv", "Conv", Kronecker(), (kernel, bias), ((5, 2, 4, 4), (5, 2, 2, 2)))
    leaves = {"kernel": values((3, 5, 4)), "bias": -values((5, 4))}
    v = block.gather(leaves)
    assert v.shape == (5, 2, 4, 2)
    for s, group in np.ndindex(5, 2):
        own = slice(2 * group, 2 * group + 2)
        np.testing.assert_array_equal(v[s, group, :3], leaves["kernel"][:, s, own])
        np.testing.assert_array_equal(v[s, group, 3], leaves["bias"][s, own])
    for path, x in block.scatter(v).items():
        np.testing.assert_array_equal(x, leaves[path])


def test_a_single_parameter_is_gathered_as_a_matrix_or_for_a_diagonal_as_it_is():
    kernel = LayerBlock("k", "Dense", Kronecker(), (DENSE_KERNEL,), ((3, 3), (4, 4)))
    x = values((3, 4))
    np.testing.assert_array_equal(
        kernel.scatter(kernel.gather({"dense/kernel": x}))["dense/kernel"], x
    )

    scale = values((2, 5))
    gathered = SCALE.gather({"norm/scale": scale})
    np.testing.assert_array_equal(gathered, scale)
    np.testing.assert_array_equal(SCALE.scatter(gathered)["norm/scale"], scale)


def test_factors_have_the_structure_that_the_block_works_on():
    a, g, d = jnp.eye(4), jnp.eye(4), jnp.ones((2, 5))
    pair = DENSE.factors_like((a, g))
    assert pair[0] is a
    assert pair[1] is g
    assert SCALE.factors_like((d,)) is d


def test_layers_are_found_by_name_and_parameters_by_path():
    assert LAYERS["dense"] is DENSE
    assert list(LAYERS) == [DENSE, SCALE]
    assert len(LAYERS) == 2
    assert list(LAYERS.parameters) == ["dense/kernel", "dense/bias", "norm/scale"]


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(
        KeyError, match=r"no block is called 'conv'; there are 'dense', 'norm/scale'"
    ):
        LAYERS["conv"]


def test_sizes_count_parameters_factors_and_state():
    assert (DENSE.size, SCALE.size) == (16, 10)
    assert (DENSE.factor_size, SCALE.factor_size) == (32, 10)
    assert LAYERS.state_bytes == 2 * 4 * (32 + 10)


def test_the_table_shows_every_block_the_totals_and_the_notes():
    lines = str(LAYERS).splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert cells == [
        ["layer", "kind", "parameters", "factors", "state"],
        ["dense", "Dense", "16", "(4, 4) x (4, 4)", "256 B"],
        ["norm/scale", "LayerNorm", "10", "(2, 5)", "80 B"],
        ["total", "2 blocks", "26", "", "336 B"],
    ]
    assert len({len(line) for line in lines[: len(cells) + 4]}) == 1
    assert lines[-1].strip() == "norm/scale: diagonal: scales have no Kronecker block"


def test_a_table_without_notes_says_nothing_of_lesser_blocks():
    assert "Less than" in str(LAYERS)
    assert "Less than" not in str(Layers((DENSE,)))


@pytest.mark.parametrize(
    ("side", "shown"), [(10, "800 B"), (100, "80.0 kB"), (3000, "72.0 MB"), (20_000, "3.2 GB")]
)
def test_memory_is_shown_in_readable_units(side, shown):
    block = LayerBlock("k", "Dense", Kronecker(), (DENSE_KERNEL,), ((side, side),))
    assert f" {shown} " in str(Layers((block,)))
