"""Curvature blocks as plain matrices, in numpy: what the library's algebra is compared with."""

import numpy as np

from kldwrm_jax.curvature import Dense, Diagonal, Kronecker

INPUTS, OUTPUTS = 3, 2

BLOCKS = {
    "full": Kronecker(),
    "a_diagonal": Kronecker(a_diagonal=True),
    "g_diagonal": Kronecker(g_diagonal=True),
    "both_diagonal": Kronecker(a_diagonal=True, g_diagonal=True),
    "diagonal": Diagonal(),
    "dense": Dense(),
}


def spd(rng, n, stack=()):
    """Random symmetric positive definite matrices, not too badly conditioned."""
    m = rng.normal(size=(*stack, n, 2 * n))
    return m @ np.swapaxes(m, -1, -2) / (2 * n)


def random_factors(block, rng, stack=(), inputs=INPUTS, outputs=OUTPUTS):
    def side(n, diagonal):
        return rng.uniform(0.2, 2, size=(*stack, n)) if diagonal else spd(rng, n, stack)

    match block:
        case Kronecker():
            return side(inputs, block.a_diagonal), side(outputs, block.g_diagonal)
        case Diagonal():
            return rng.uniform(0.2, 2, size=(*stack, inputs, outputs))
        case Dense():
            return spd(rng, inputs * outputs, stack)


def random_direction(block, rng, stack=(), inputs=INPUTS, outputs=OUTPUTS):
    own = (inputs * outputs,) if isinstance(block, Dense) else (inputs, outputs)
    return rng.normal(size=stack + own)


def full(side, diagonal):
    """One side of a Kronecker product as a matrix."""
    side = np.asarray(side)
    return side[..., None] * np.eye(side.shape[-1]) if diagonal else side


def matrix(block, f, stack=()):
    """The matrices that the factors stand for, ``(*stack, n, n)``, on row-major directions."""
    match block:
        case Kronecker():
            a, g = full(f[0], block.a_diagonal), full(f[1], block.g_diagonal)
            n = a.shape[-1] * g.shape[-1]
            product = np.empty((*stack, n, n), a.dtype)
            for i in np.ndindex(*stack):
                product[i] = np.kron(a[i], g[i])
            return product
        case Diagonal():
            return full(np.reshape(f, (*stack, -1)), diagonal=True)
        case Dense():
            return np.asarray(f)


def times(m, v):
    """``m v`` for stacked matrices and directions of any shape."""
    flat = np.reshape(v, (*m.shape[:-1], 1))
    return (m @ flat).reshape(np.shape(v))


def solve(m, v):
    """``m^-1 v`` for stacked matrices and directions of any shape."""
    flat = np.reshape(v, (*m.shape[:-1], 1))
    return np.linalg.solve(m, flat).reshape(np.shape(v))


def contraction(f_bar, m_hat):
    """The norm of ``I - m_hat`` in the metric of ``f_bar^-1``, the largest of the stack."""
    whitener = np.linalg.cholesky(np.linalg.inv(f_bar))
    transposed = np.swapaxes(whitener, -1, -2)
    deviation = transposed @ (np.eye(f_bar.shape[-1]) - m_hat) @ np.linalg.inv(transposed)
    return np.linalg.norm(deviation, ord=2, axis=(-2, -1)).max()


def factored(block, f, gamma):
    """Factors with ``sqrt(gamma)`` shared by the mean eigenvalues (Kronecker), or ``f + gamma``."""
    match block:
        case Kronecker():
            a, g = full(f[0], block.a_diagonal), full(f[1], block.g_diagonal)
            mean_a, mean_g = (np.trace(x, axis1=-2, axis2=-1) / x.shape[-1] for x in (a, g))
            pi, root = np.sqrt(mean_a / mean_g), np.sqrt(gamma)

            def shift(side, diagonal, c):
                n = np.shape(side)[-1]
                return side + c[..., None] if diagonal else side + c[..., None, None] * np.eye(n)

            damped_a = shift(f[0], block.a_diagonal, pi * root)
            return damped_a, shift(f[1], block.g_diagonal, root / pi)
        case Diagonal():
            return f + gamma
        case Dense():
            return f + gamma * np.eye(f.shape[-1])


def damped(block, f, gamma, mode, stack=()):
    """The damped matrix, ``mode`` being ``"product"`` or ``"factored"``."""
    if mode == "factored":
        return matrix(block, factored(block, f, gamma), stack)
    undamped = matrix(block, f, stack)
    return undamped + gamma * np.eye(undamped.shape[-1])
