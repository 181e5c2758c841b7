import dense
import jax
import numpy as np
import pytest

from kldwrm_jax.curvature import averaging_error, contraction


def weights(rho, n):
    return [(1 if i == 0 else 1 - rho) * rho ** (n - 1 - i) for i in range(n)]


def error_by_forming_products(factors, rho):
    """Frobenius norms of the error and of the average, from Kronecker products in full."""
    w = weights(rho, len(factors))
    of_products = sum(c * np.kron(a, g) for c, (a, g) in zip(w, factors, strict=True))
    a_bar, g_bar = (sum(c * f[side] for c, f in zip(w, factors, strict=True)) for side in (0, 1))
    return np.linalg.norm(of_products - np.kron(a_bar, g_bar)), np.linalg.norm(of_products)


def pairs(rng, n):
    return [(dense.spd(rng, 4), dense.spd(rng, 3)) for _ in range(n)]


@pytest.mark.parametrize("stack", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("block", dense.BLOCKS.values(), ids=dense.BLOCKS)
def test_contraction_is_the_norm_of_i_minus_m_hat(block, stack, rng, x64):
    f_bar, b = (dense.random_factors(block, rng, stack) for _ in range(2))
    f_bar_matrix, b_matrix = (dense.matrix(block, f, stack) for f in (f_bar, b))
    for lr in (0.01, 0.5, 10.0):
        m_hat = f_bar_matrix @ np.linalg.inv(f_bar_matrix + lr * b_matrix)
        expected = dense.contraction(f_bar_matrix, m_hat)
        got = jax.jit(contraction, static_argnums=0)(block, f_bar, b, lr)
        np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize("rho", [0.0, 0.33, 0.9])
@pytest.mark.parametrize("n", [1, 5])
def test_averaging_error_is_that_of_the_products_formed_in_full(n, rho, rng, x64):
    factors = pairs(rng, n)
    error, average = error_by_forming_products(factors, rho)
    got = averaging_error(factors, rho)
    np.testing.assert_allclose(got.error, error, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(got.average, average, rtol=1e-12)


@pytest.mark.parametrize("constant", [0, 1], ids=["A", "G"])
def test_averaging_is_exact_while_one_factor_stays_the_same(constant, rng, x64):
    factors = pairs(rng, 4)
    factors = [(factors[0][0], g) if constant == 0 else (a, factors[0][1]) for a, g in factors]
    got = averaging_error(factors, 0.7)
    assert got.error < 1e-14 * got.average


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_averaging_is_exact_without_memory_or_history(rho, rng, x64):
    factors = pairs(rng, 1 if rho else 4)
    got = averaging_error(factors, rho)
    assert got.error < 1e-14 * got.average


def test_averaging_error_does_not_drown_in_float32_rounding(rng):
    # Factors that hardly change: a difference of two large norms would leave rounding only.
    factors = [
        (np.eye(4) + 1e-3 * dense.spd(rng, 4), np.eye(3) + 1e-3 * dense.spd(rng, 3))
        for _ in range(4)
    ]
    error, _ = error_by_forming_products(factors, 0.7)
    in_float32 = [(a.astype(np.float32), g.astype(np.float32)) for a, g in factors]
    np.testing.assert_allclose(averaging_error(in_float32, 0.7).error, error, rtol=1e-2)


@pytest.mark.parametrize("rho", [-0.1, 1.0, float("nan"), None])
def test_a_decay_outside_zero_one_is_refused(rho, rng):
    with pytest.raises(ValueError, match=rf"rho must be in \[0, 1\), got {rho!r}"):
        averaging_error(pairs(rng, 2), rho)


def test_no_factors_are_refused():
    with pytest.raises(ValueError, match=r"at least one pair \(A, G\), got none"):
        averaging_error([], 0.5)
