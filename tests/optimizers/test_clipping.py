"""The limits of a step: of its divergence as a whole, and of every parameter's size."""

import jax.numpy as jnp
import numpy as np
import pytest
import two_blocks

from kldwrm_jax.curvature import Kronecker, LayerBlock, Parameter
from kldwrm_jax.optimizers.clipping import Clip, block_clip_factors, kl_clip_factor

pytestmark = pytest.mark.usefixtures("x64")

LR = 0.3


def rms_factor(tau, x):
    """min(1, tau lr / rms(x))."""
    return min(1.0, tau * LR / np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.0099, 0.01, 0.0101, 4.0, 1e30])
def test_the_factor_of_the_whole_step_is_the_root_of_the_limit_over_the_size(size):
    expected = 1.0 if size == 0 else min(1.0, np.sqrt(0.01 / size))
    np.testing.assert_allclose(kl_clip_factor(0.01, jnp.asarray(size)), expected, rtol=1e-12)
    assert expected**2 * size <= 0.01 * (1 + 1e-12)


def test_the_factor_of_a_parameter_brings_its_root_mean_square_down_to_the_limit(rng):
    v = two_blocks.random_leaves(rng)
    v["dense/bias"] *= 100
    v["scale"] *= 1e-3
    factors = block_clip_factors(2.0, LR, v, two_blocks.BLOCKS)
    assert factors.keys() == v.keys()
    for path, x in v.items():
        np.testing.assert_allclose(np.ravel(factors[path]), [rms_factor(2.0, x)])
    assert factors["dense/bias"] < 0.1  # and neither is clipped by the other
    assert factors["scale"] == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_copy_of_a_stacked_layer_is_clipped_by_itself(axis, rng):
    copies = [scale * rng.normal(size=(3, 2)) for scale in (0.01, 1.0, 5.0, 0.0)]
    x = np.stack(copies, axis=axis)
    block = LayerBlock("a", "Dense", Kronecker(), (Parameter("a", x.shape, (axis,)),), ())
    clipped = np.asarray(Clip(None, 2.0).blocks({"a": jnp.asarray(x)}, LR, [block])["a"])
    expected = [c if not c.any() else rms_factor(2.0, c) * c for c in copies]
    np.testing.assert_allclose(clipped, np.stack(expected, axis=axis))
    np.testing.assert_array_equal(np.take(clipped, 0, axis), copies[0])
    assert np.abs(np.take(clipped, 2, axis)).max() < np.abs(copies[2]).max()


@pytest.mark.parametrize("kl", [None, 0.01, 100.0])
@pytest.mark.parametrize("block", [None, 0.5, 100.0])
def test_a_step_is_minus_the_direction_times_both_factors_each_of_the_unclipped(kl, block, rng):
    v, size = two_blocks.random_leaves(rng), 2.5
    s, kl_factor, smallest = Clip(kl, block).step(v, jnp.asarray(size), LR, two_blocks.BLOCKS)
    whole = 1.0 if kl is None else min(1.0, np.sqrt(kl / size))
    own = {path: 1.0 if block is None else rms_factor(block, x) for path, x in v.items()}
    for path, x in v.items():
        np.testing.assert_allclose(s[path], -whole * own[path] * x)
    np.testing.assert_allclose(kl_factor, whole)
    np.testing.assert_allclose(smallest, min(own.values()))


def test_none_turns_a_limit_off_whatever_the_size(rng):
    v = {path: 1e20 * x for path, x in two_blocks.random_leaves(rng).items()}
    s, *factors = Clip(None, None).step(v, jnp.asarray(1e40), LR, two_blocks.BLOCKS)
    for path, x in v.items():
        np.testing.assert_array_equal(s[path], -x)
    assert factors == [1, 1]
    assert Clip(0.01, None).blocks(v, LR, two_blocks.BLOCKS) is v


def test_a_rate_of_zero_allows_no_step_but_that_of_zero(rng):
    v = two_blocks.random_leaves(rng)
    clip = Clip(None, 1.0)
    assert not two_blocks.vector(clip.blocks(v, 0.0, two_blocks.BLOCKS)).any()
    zeros = {path: 0 * x for path, x in v.items()}
    _, _, smallest = clip.step(zeros, jnp.zeros(()), 0.0, two_blocks.BLOCKS)
    assert smallest == 1


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "much"])
def test_a_limit_is_a_positive_number(limit):
    for name, arguments in [("kl_clip", (limit, None)), ("block_clip", (None, limit))]:
        with pytest.raises(ValueError, match=f"{name} must be a number > 0, got"):
            Clip(*arguments)
