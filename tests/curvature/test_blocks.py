import dataclasses
import operator

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kldwrm_jax.curvature import Dense, Diagonal, Kronecker, average, decompose

each_block = pytest.mark.parametrize("block", dense.BLOCKS.values(), ids=dense.BLOCKS)
each_stack = pytest.mark.parametrize("stack", [(), (2,), (2, 3)], ids=str)
fewer_stacks = pytest.mark.parametrize("stack", [(), (2, 3)], ids=str)
kronecker_blocks = [b for b in dense.BLOCKS.values() if isinstance(b, Kronecker)]
assert_close = np.testing.assert_allclose


def made(operation, block, *factors):
    """A decomposition of one block."""
    return decompose(operator.attrgetter(operation), [block], *([f] for f in factors))[0]


@each_stack
@each_block
def test_multiply_is_the_matrix_times_the_flattened_direction(block, stack, rng, x64):
    f, v = dense.random_factors(block, rng, stack), dense.random_direction(block, rng, stack)
    expected = dense.times(dense.matrix(block, f, stack), v)
    assert_close(block.multiply(f, v), expected, rtol=1e-10, atol=1e-10)


@fewer_stacks
@each_block
def test_inverse_has_the_factors_of_the_inverse_matrix(block, stack, rng, x64):
    f = dense.random_factors(block, rng, stack)
    inverse = dense.matrix(block, jax.jit(lambda f: made("inverse", block, f))(f), stack)
    assert_close(inverse, np.linalg.inv(dense.matrix(block, f, stack)), rtol=1e-10, atol=1e-10)


@fewer_stacks
@each_block
def test_eigen_solve_solves_the_scaled_matrix_plus_damping(block, stack, rng, x64):
    f, v = dense.random_factors(block, rng, stack), dense.random_direction(block, rng, stack)
    eigen_solve = jax.jit(
        lambda f, v, damping, c: block.eigen_solve(made("eigen", block, f), v, damping, c)
    )
    for damping, c in [(0.1, 1.0), (1e-3, 1.7)]:
        scaled = dense.matrix(block, block.scale(f, c), stack)
        expected = dense.solve(scaled + damping * np.eye(scaled.shape[-1]), v)
        assert_close(eigen_solve(f, v, damping, c), expected, rtol=1e-10, atol=1e-10)


@fewer_stacks
def test_damping_a_dense_block_adds_to_the_diagonal_of_each_of_its_matrices(stack, rng, x64):
    f = dense.random_factors(Dense(), rng, stack)
    damped = Dense().damp(f, 0.3)
    assert_close(damped, f + 0.3 * np.eye(f.shape[-1]))
    assert Dense().damp(f.astype(jnp.float32), 0.3).dtype == jnp.float32


@each_block
def test_eigen_solve_scales_by_one_unless_told(block, rng, x64):
    f, v = dense.random_factors(block, rng), dense.random_direction(block, rng)
    basis = made("eigen", block, f)
    assert_close(block.eigen_solve(basis, v, 0.1), block.eigen_solve(basis, v, 0.1, 1.0))


@each_block
def test_scale_squares_for_a_product_of_two_factors(block, rng, x64):
    f = dense.random_factors(block, rng)
    growth = 9 if isinstance(block, Kronecker) else 3
    assert_close(dense.matrix(block, block.scale(f, 3)), growth * dense.matrix(block, f))


@fewer_stacks
@each_block
def test_a_pencil_solves_inverts_and_bounds_two_matrices_at_once(block, stack, rng, x64):
    f_bar, b = (dense.random_factors(block, rng, stack) for _ in range(2))
    v = dense.random_direction(block, rng, stack)
    f_bar_matrix, b_matrix = (dense.matrix(block, f, stack) for f in (f_bar, b))
    basis = jax.jit(lambda f, b: made("pencil", block, f, b))(f_bar, b)

    pencil_solve = jax.jit(block.pencil_solve)
    for weight in (0.0, 0.3, 20.0):
        expected = dense.solve(f_bar_matrix + weight * b_matrix, v)
        assert_close(pencil_solve(basis, v, weight), expected, rtol=1e-10, atol=1e-10)

    inverse = dense.matrix(block, made("outer", block, basis), stack)
    assert_close(inverse, np.linalg.inv(f_bar_matrix), rtol=1e-10, atol=1e-10)

    generalised = np.linalg.eigvals(np.linalg.solve(f_bar_matrix, b_matrix)).real
    assert_close(block.pencil_norm(basis), generalised.max(), rtol=1e-10)


@each_stack
@pytest.mark.parametrize("block", kronecker_blocks)
def test_kronecker_damping_shares_its_root_by_the_mean_eigenvalues(block, stack, rng, x64):
    f, gamma = dense.random_factors(block, rng, stack), 0.04
    a, g = (dense.full(s, d) for s, d in zip(f, (block.a_diagonal, block.g_diagonal), strict=True))
    damped = jax.jit(block.damp)(f, gamma)
    for i in np.ndindex(*stack):
        pi = np.sqrt((np.trace(a[i]) / dense.INPUTS) / (np.trace(g[i]) / dense.OUTPUTS))
        expected_a = a[i] + pi * 0.2 * np.eye(dense.INPUTS)
        expected_g = g[i] + 0.2 / pi * np.eye(dense.OUTPUTS)
        assert_close(dense.full(damped[0], block.a_diagonal)[i], expected_a, rtol=1e-12)
        assert_close(dense.full(damped[1], block.g_diagonal)[i], expected_g, rtol=1e-12)


@each_stack
@pytest.mark.parametrize("block", [Diagonal(), Dense()])
def test_damping_of_diagonal_and_dense_blocks_adds_to_the_spectrum(block, stack, rng, x64):
    f = dense.random_factors(block, rng, stack)
    undamped = dense.matrix(block, f, stack)
    expected = undamped + 0.04 * np.eye(undamped.shape[-1])
    assert_close(dense.matrix(block, block.damp(f, 0.04), stack), expected, rtol=1e-12)


@pytest.mark.parametrize("zero", ["a", "g", "both"])
def test_damping_of_a_zero_factor_is_shared_evenly(zero):
    a, g = jnp.diag(jnp.array([1.0, 2.0])), jnp.diag(jnp.array([3.0, 5.0]))
    a, g = a * (zero == "g"), g * (zero == "a")
    damped_a, damped_g = jax.jit(Kronecker().damp)((a, g), 0.04)
    assert_close(damped_a, a + 0.2 * jnp.eye(2))
    assert_close(damped_g, g + 0.2 * jnp.eye(2))


HARD_FACTORS = {  # ranks of A and G, scales of A and G
    "rank one": (1, 1, 1.0, 1.0),
    "zero G": (8, 0, 1.0, 1.0),
    "zero A": (0, 4, 1.0, 1.0),
    "both zero": (0, 0, 1.0, 1.0),
    "tiny": (1, 1, 1e-20, 1e-20),
    "tiny G": (1, 1, 1.0, 1e-20),
    "huge A, tiny G": (1, 1, 1e20, 1e-20),
    "tiny A, huge G": (1, 1, 1e-20, 1e20),
    "huge A, zero G": (8, 0, 1e20, 1.0),
}


def hard_factors(block, rng):
    """Singular factors of all kinds and scales, stacked, in float32."""

    def side(n, rank, scale, diagonal):
        if diagonal:
            return scale * np.where(np.arange(n) < rank, 1.0, 0.0)
        vectors, _ = np.linalg.qr(rng.normal(size=(n, n)))
        return scale * vectors[:, :rank] @ vectors[:, :rank].T

    pairs = [
        (side(8, rank_a, scale_a, block.a_diagonal), side(4, rank_g, scale_g, block.g_diagonal))
        for rank_a, rank_g, scale_a, scale_g in HARD_FACTORS.values()
    ]
    return tuple(jnp.asarray(np.stack(sides), jnp.float32) for sides in zip(*pairs, strict=True))


def assert_each_close(got, expected):
    for name, x, y in zip(HARD_FACTORS, got, expected, strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max(), err_msg=name)


@pytest.mark.parametrize("block", kronecker_blocks)
def test_product_damping_of_singular_factors_is_accurate_in_float32(block, rng):
    f = hard_factors(block, rng)
    v = rng.normal(size=(len(HARD_FACTORS), 8, 4)).astype(np.float32)
    wide = [np.asarray(x, np.float64) for x in f]
    undamped = dense.matrix(block, wide, (len(HARD_FACTORS),))
    got = jax.jit(lambda f, v: block.eigen_solve(made("eigen", block, f), v, 1e-2))(f, v)
    assert_each_close(got, dense.solve(undamped + 1e-2 * np.eye(32), v))


@pytest.mark.parametrize("block", kronecker_blocks)
def test_factored_damping_of_singular_factors_is_accurate_in_float32(block, rng):
    f = hard_factors(block, rng)
    v = rng.normal(size=(len(HARD_FACTORS), 8, 4)).astype(np.float32)
    a = dense.full(np.asarray(f[0], np.float64), block.a_diagonal)
    g = dense.full(np.asarray(f[1], np.float64), block.g_diagonal)
    expected = np.empty_like(v, dtype=np.float64)
    for i, (a_i, g_i) in enumerate(zip(a, g, strict=True)):
        means = np.trace(a_i) / 8, np.trace(g_i) / 4
        pi = np.sqrt(means[0] / means[1]) if min(means) > 0 else 1.0
        damped_a, damped_g = a_i + pi * 0.1 * np.eye(8), g_i + 0.1 / pi * np.eye(4)
        expected[i] = np.linalg.solve(damped_a, v[i]) @ np.linalg.inv(damped_g)
    got = jax.jit(lambda f, v: block.multiply(made("inverse", block, block.damp(f, 1e-2)), v))(f, v)
    assert_each_close(got, expected)


@pytest.mark.parametrize("block", kronecker_blocks)
def test_a_pencil_of_damped_singular_factors_is_finite_in_float32(block, rng):
    f = hard_factors(block, rng)
    v = jnp.asarray(rng.normal(size=(len(HARD_FACTORS), 8, 4)), jnp.float32)

    @jax.jit
    def everything(f, v):
        basis = made("pencil", block, block.damp(f, 1e-2), f)
        return (
            block.pencil_solve(basis, v, 0.1),
            made("outer", block, basis),
            block.pencil_norm(basis),
        )

    solution, (a_inverse, g_inverse), norm = everything(f, v)
    for i, name in enumerate(HARD_FACTORS):
        assert jnp.isfinite(solution[i]).all(), name
        assert jnp.isfinite(a_inverse[i]).all(), name
        assert jnp.isfinite(g_inverse[i]).all(), name
    assert 0 <= norm <= 1 + 1e-3


def test_slightly_negative_eigenvalues_do_not_undo_the_damping():
    a, g = jnp.diag(jnp.array([1.0, -1e-2])), jnp.eye(2)
    block = Kronecker()
    solution = block.eigen_solve(made("eigen", block, (a, g)), jnp.ones((2, 2)), 1e-2)
    assert_close(solution[1], 100, rtol=1e-5)


@settings(
    deadline=None,
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    block=st.sampled_from(kronecker_blocks),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    stack=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    seed=st.integers(0, 2**31),
)
@example(block=Kronecker(), inputs=1, outputs=1, stack=(), seed=0)
def test_solves_invert_products_for_every_shape(block, inputs, outputs, stack, seed, x64):
    rng = np.random.default_rng(seed)
    f, b = (dense.random_factors(block, rng, stack, inputs, outputs) for _ in range(2))
    v = dense.random_direction(block, rng, stack, inputs, outputs)

    @jax.jit
    def round_trips(f, b, v):
        f, b = block.damp(f, 0.1), block.damp(b, 0.1)
        eigen = block.eigen_solve(made("eigen", block, f), block.multiply(f, v) + 0.3 * v, 0.3)
        both = block.multiply(f, v) + 0.3 * block.multiply(b, v)
        return (
            block.multiply(made("inverse", block, f), block.multiply(f, v)),
            eigen,
            block.pencil_solve(made("pencil", block, f, b), both, 0.3),
        )

    for recovered in round_trips(f, b, v):
        assert_close(recovered, v, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rho", [0.0, 0.33, 0.95])
def test_averages_are_the_weighted_sum_whose_first_term_has_weight_one(rho, rng, x64):
    history = [dense.random_factors(Kronecker(), rng) for _ in range(5)]
    f_bar = jax.tree.map(np.zeros_like, history[0])
    for i, f in enumerate(history):
        f_bar = average(f_bar, f, rho if i else 0.0)
    kappa = [1] + [1 - rho] * 4
    for side in (0, 1):
        expected = sum(k * rho ** (4 - i) * history[i][side] for i, k in enumerate(kappa))
        assert_close(f_bar[side], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [Kronecker, Diagonal, Dense])
def test_blocks_are_values(kind):
    """Equal, hashable and unchangeable, as parts of a program's structure must be."""
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().anything = 1


def test_factored_damping_is_finite_for_sides_as_different_as_float32_allows():
    f = (1e-37 * jnp.eye(2), 3e38 * jnp.eye(2))
    for own in (f, f[::-1]):
        assert all(np.isfinite(x).all() for x in Kronecker().damp(own, 100.0))
