"""The damped model's minimiser, against a singular value decomposition in float64."""

import jax.numpy as jnp
import numpy as np
import precision
import pytest

from kldwrm_jax.capture.sample_space import SampleSpace
from kldwrm_jax.optimizers.damped_model import DampedModel


def rows(n=60, parameters=200, smallest=1e-6):
    """Rows whose singular values fall to the smallest, and errors that they all explain."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(n, n)))
    v, _ = np.linalg.qr(rng.normal(size=(parameters, n)))
    values = np.logspace(0, np.log10(smallest), n)
    return u, values, v, u @ (values**0.5)


@pytest.mark.parametrize(
    ("dtype", "relative", "rtol"),
    [(jnp.float64, 1e-9, 1e-6), (jnp.float32, 1e-6, 1e-3), (jnp.float32, 1e-9, 2e-2)],
)
def test_the_solution_is_exact_far_below_the_rounding_of_the_gram_matrix(dtype, relative, rtol):
    u, values, v, errors = rows()
    j = (u * values) @ v.T
    gamma = relative * np.sum(values**2)
    wanted = -v @ (values / (values**2 + gamma) * (u.T @ errors))
    with precision.x64(dtype == jnp.float64):
        space = SampleSpace({"w": jnp.asarray(j, dtype)}, jnp.asarray(errors, dtype))
        g = space.transposed(space.errors)
        model = DampedModel(space, space.gram(), g, None)
        phi, damping = model.minimiser(jnp.asarray(gamma, dtype))
    assert damping == pytest.approx(gamma, rel=1e-6)
    error = np.linalg.norm(np.asarray(phi["w"], float) - wanted) / np.linalg.norm(wanted)
    assert error < rtol
