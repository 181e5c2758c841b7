"""Sides that are kept as their leading eigenvectors, against the matrices they stand for."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature import Kronecker, LowRank, decompose
from kldwrm_jax.curvature.sides import LowRankSide, low_rank

pytestmark = pytest.mark.usefixtures("x64")

N, RANK = 7, 3
each_stack = pytest.mark.parametrize("stack", [(), (2, 3)], ids=str)
close = {"rtol": 1e-10, "atol": 1e-10}


def transpose(m):
    return np.swapaxes(m, -1, -2)


def orthonormal(rng, n, rank, stack=()):
    return np.linalg.qr(rng.normal(size=(*stack, n, rank)))[0]


def random_low_rank(rng, stack=(), n=N, rank=RANK):
    values, tail = rng.uniform(1, 3, size=(*stack, rank)), rng.uniform(0.1, 1, size=stack)
    return LowRank(orthonormal(rng, n, rank, stack), values, jnp.asarray(tail))


def as_matrix(f):
    """``U D U' + t (I - U U')``."""
    u = np.asarray(f.vectors)
    outside = np.eye(u.shape[-2]) - u @ transpose(u)
    inside = (u * np.asarray(f.values)[..., None, :]) @ transpose(u)
    return inside + np.asarray(f.tail)[..., None, None] * outside


def with_spectrum(rng, values):
    vectors = orthonormal(rng, len(values), len(values))
    return (vectors * np.asarray(values)) @ vectors.T, vectors


# --- A matrix in this form ------------------------------------------------------------------------


@each_stack
def test_left_and_right_multiply_by_the_matrix(stack, rng):
    f = random_low_rank(rng, stack)
    v = rng.normal(size=(*stack, N, 2))
    np.testing.assert_allclose(jax.jit(LowRankSide.left)(f, v), as_matrix(f) @ v, **close)
    np.testing.assert_allclose(
        jax.jit(LowRankSide.right)(transpose(v), f), transpose(v) @ as_matrix(f), **close
    )


@each_stack
def test_scale_shift_and_inverse_are_those_of_the_matrix(stack, rng):
    f, c = random_low_rank(rng, stack), rng.uniform(0.5, 2, size=stack)
    m = as_matrix(f)
    np.testing.assert_allclose(as_matrix(LowRankSide.scale(f, 2.5)), 2.5 * m, **close)
    shifted = m + c[..., None, None] * np.eye(N)
    np.testing.assert_allclose(as_matrix(LowRankSide.shift(f, jnp.asarray(c))), shifted, **close)
    np.testing.assert_allclose(as_matrix(LowRankSide.inverse(f)), np.linalg.inv(m), **close)


@each_stack
def test_mean_eigenvalue_is_the_matrixs(stack, rng):
    f = random_low_rank(rng, stack)
    expected = np.linalg.eigvalsh(as_matrix(f)).mean(axis=-1)
    np.testing.assert_allclose(LowRankSide.mean_eigenvalue(f), expected, **close)


@each_stack
def test_weigh_is_a_function_of_the_matrix_times_rows(stack, rng):
    f, v = random_low_rank(rng, stack), rng.normal(size=(*stack, N, 2))
    scales = np.array([0.3, 2.0])  # of each column, as another side's values are
    got = LowRankSide.weigh(f, v, lambda values: 1 / (values[..., :, None] * scales + 0.1))
    for j, scale in enumerate(scales):
        expected = np.linalg.solve(scale * as_matrix(f) + 0.1 * np.eye(N), v[..., j : j + 1])
        np.testing.assert_allclose(got[..., j : j + 1], expected, **close)


@each_stack
def test_by_columns_is_a_function_of_the_matrix_times_columns(stack, rng):
    f, v = random_low_rank(rng, stack), rng.normal(size=(*stack, 2, N))
    other = rng.normal(size=(*stack, 2, 2))
    got = LowRankSide.by_columns(f, v, lambda x, values: other @ x / (values[..., None, :] + 0.1))
    expected = other @ v @ np.linalg.inv(as_matrix(f) + 0.1 * np.eye(N))
    np.testing.assert_allclose(got, expected, **close)


# --- Finding it -----------------------------------------------------------------------------------


def found_from(f, start):
    """Leading eigenvectors, from a subspace and nothing beside it."""
    return low_rank(f, start, start[..., :0])


def test_the_leading_eigenvectors_of_a_decaying_spectrum_are_found(rng):
    """Each of the two steps brings the discarded ones down by the ratio of the values."""
    spectrum = 10.0 ** -np.arange(20)
    f, vectors = with_spectrum(rng, spectrum)
    got = jax.jit(found_from)(f, rng.normal(size=(20, 5)))
    np.testing.assert_allclose(got.vectors.T @ got.vectors, np.eye(5), atol=1e-12)
    leading = vectors[:, :5]
    missed = np.linalg.norm(leading - got.vectors @ (got.vectors.T @ leading), axis=0)
    assert (missed < 100 * (spectrum[5] / spectrum[:5]) ** 2 + 1e-14).all()
    np.testing.assert_allclose(np.sort(got.values)[::-1][:4], spectrum[:4], rtol=1e-3)


@each_stack
def test_the_trace_is_kept_and_stacks_are_done_one_by_one(stack, rng):
    f, start = dense.spd(rng, N, stack), rng.normal(size=(*stack, N, RANK))
    got = jax.jit(found_from)(f, start)
    traces = np.trace(f, axis1=-2, axis2=-1)
    np.testing.assert_allclose(N * LowRankSide.mean_eigenvalue(got), traces, rtol=1e-12)
    assert (got.tail > 0).all()
    for i in np.ndindex(*stack):
        alone = found_from(f[i], start[i])
        np.testing.assert_allclose(as_matrix(got)[i], as_matrix(alone), **close)


@pytest.mark.parametrize("own", [0, 1, RANK])
def test_a_matrix_of_no_higher_rank_is_represented_exactly(own, rng):
    m = rng.normal(size=(N, own))
    got = jax.jit(found_from)(m @ m.T, rng.normal(size=(N, RANK)))
    np.testing.assert_allclose(got.tail, 0, atol=1e-12)
    np.testing.assert_allclose(as_matrix(got), m @ m.T, atol=1e-12)
    np.testing.assert_allclose(got.vectors.T @ got.vectors, np.eye(RANK), atol=1e-12)


def test_the_vectors_of_a_nearby_matrix_are_a_better_start_than_random_ones(rng):
    """On a spectrum so slow that two steps from anywhere do not suffice."""
    n, rank = 60, 10
    before, known = with_spectrum(rng, 1 / np.arange(1.0, n + 1))
    change = 1e-4 * rng.normal(size=(n, n))
    f = before + change @ change.T + 1e-4 * dense.spd(rng, n)
    best = np.linalg.eigh(f)[1][:, -rank:]

    def error(start):
        u = jax.jit(found_from)(f, start).vectors
        return np.linalg.norm(best - u @ (u.T @ best), ord=2)

    random, warm = error(rng.normal(size=(n, rank))), error(known[:, :rank])
    assert random > 0.1
    assert warm < 0.05 * random


def test_a_warm_start_finds_directions_that_were_not_there_before(rng):
    """As with one-hot inputs, where a token that comes later is orthogonal to all before it."""
    seen, new = np.zeros(20), np.zeros(20)
    seen[:8] = np.arange(8.0, 0.0, -1.0)
    new[:8], new[8:12] = 0.01 * seen[:8], [40.0, 30.0, 20.0, 10.0]
    first = found_from(np.diag(seen), rng.normal(size=(20, 4)))
    got = low_rank(np.diag(new), first.vectors, rng.normal(size=(20, 8)))
    np.testing.assert_allclose(np.sort(got.values), [10.0, 20.0, 30.0, 40.0], rtol=0.1)


# --- As sides of a Kronecker product --------------------------------------------------------------

INPUTS, OUTPUTS = 6, 5


def kronecker(which, rng, stack):
    """A block, factors of which one or both sides are low, and the same factors as matrices."""

    def side(n, low, diagonal=False):
        if low:
            f = random_low_rank(rng, stack, n, 2)
            return f, as_matrix(f)
        f = rng.uniform(0.2, 2, size=(*stack, n)) if diagonal else dense.spd(rng, n, stack)
        return f, dense.full(f, diagonal)

    a_diagonal = which == "g, beside a diagonal"
    (a, a_matrix) = side(INPUTS, which in ("a", "both"), a_diagonal)
    (g, g_matrix) = side(OUTPUTS, which != "a")
    return Kronecker(a_diagonal=a_diagonal), (a, g), (a_matrix, g_matrix)


each_side = pytest.mark.parametrize("which", ["a", "g", "both", "g, beside a diagonal"])


@each_stack
@each_side
def test_a_kronecker_product_with_low_sides_is_the_dense_one(which, stack, rng):
    block, f, matrices = kronecker(which, rng, stack)
    v = rng.normal(size=(*stack, INPUTS, OUTPUTS))
    gamma, c = 0.04, 1.7

    @jax.jit
    def everything(f, v):
        damped = block.damp(f, gamma)
        (inverse,) = decompose(lambda side: side.inverse, [block], [damped])
        (basis,) = decompose(lambda side: side.eigen, [block], [f])
        products = [block.multiply(x, v) for x in (f, damped, inverse)]
        return *products, block.eigen_solve(basis, v, gamma, c)

    product, damped_product, inverse_product, solution = everything(f, v)
    undamped, damped = (
        dense.matrix(Kronecker(), x, stack)
        for x in (matrices, dense.factored(Kronecker(), matrices, gamma))
    )
    np.testing.assert_allclose(product, dense.times(undamped, v), **close)
    np.testing.assert_allclose(damped_product, dense.times(damped, v), **close)
    np.testing.assert_allclose(inverse_product, dense.solve(damped, v), **close)
    scaled = c**2 * undamped + gamma * np.eye(INPUTS * OUTPUTS)
    np.testing.assert_allclose(solution, dense.solve(scaled, v), **close)
