"""Averaged iterates, against the recursion with both of them kept."""

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.optimizers import iterate_average as average

pytestmark = pytest.mark.usefixtures("x64")


def test_the_offset_alone_gives_the_steps_of_fast_iterate_and_mean(rng):
    z = x = rng.normal(size=3)
    y, offset, beta = z.copy(), np.zeros(3), 0.9
    for k in range(30):
        state = average.no_average()._replace(age=jnp.asarray(float(k)))
        d, c = rng.normal(size=3), float(average.weight(state.age))
        z = z + d
        x = (1 - c) * x + c * z
        of_step, of_offset = average.coefficients(state)
        y = y + of_step * d + of_offset * offset
        offset = (1 - c) * (offset + d)
        np.testing.assert_allclose(offset, z - x, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(y, (1 - beta) * z + beta * x, rtol=1e-9, atol=1e-12)


def test_the_mean_forgets_its_beginning():
    weights = [float(average.weight(jnp.asarray(float(k)))) for k in range(4000)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == pytest.approx(0.2)
    of_first = np.prod(1 - np.array(weights))
    assert of_first < 1e-8  # a mean with equal weights would have 1 / 4000


def after(slope, steps=200):
    state = average.no_average()
    for k in range(steps):
        state = average.adapt(
            state._replace(age=jnp.asarray(float(k))), jnp.asarray(slope), jnp.ones(())
        )
    return float(state.rate)


def test_the_rate_falls_where_the_loss_rises_towards_the_fast_iterate_and_grows_otherwise():
    assert after(0.5) < 0.5
    assert after(-0.5) == 2.0
    assert after(0.03) == pytest.approx(1.0)
    assert after(1e6, 5000) == pytest.approx(0.02)


def test_the_rate_waits_for_the_average_to_mean_something():
    assert after(0.5, 20) == 1.0
    nothing = average.adapt(
        average.no_average()._replace(age=jnp.asarray(50.0)), jnp.zeros(()), jnp.zeros(())
    )
    assert nothing.rate == 1.0
