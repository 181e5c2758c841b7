"""What a step is solved for: gradient, pull and weight decay."""

import jax.numpy as jnp
import numpy as np
import pytest
import two_blocks

from kldwrm_jax.optimizers.gradients import Gradients

pytestmark = pytest.mark.usefixtures("x64")

LR = 0.3


@pytest.fixture
def gradients(rng):
    return Gradients(*(two_blocks.random_leaves(rng) for _ in range(4)))


def restarts(**blocks):
    return {block.name: jnp.asarray(blocks.get(block.name, False)) for block in two_blocks.BLOCKS}


@pytest.mark.parametrize(
    ("restart", "emptied"),
    [
        (restarts(), set()),
        (restarts(dense=True), {"dense/kernel", "dense/bias"}),
        (restarts(scale=True), {"scale"}),
        (restarts(dense=True, scale=True), {"dense/kernel", "dense/bias", "scale"}),
    ],
)
def test_only_blocks_that_restart_forget_their_wake_and_nothing_else(restart, emptied, gradients):
    left = gradients.forget(two_blocks.BLOCKS, restart)
    assert left.pull.keys() == gradients.pull.keys()
    for path, pull in gradients.pull.items():
        np.testing.assert_array_equal(left.pull[path], 0 * pull if path in emptied else pull)
    assert left._replace(pull=None) == gradients._replace(pull=None)


def test_a_wake_that_is_not_finite_is_forgotten_too(gradients):
    gradients.pull["scale"][:] = np.nan
    left = gradients.forget(two_blocks.BLOCKS, restarts(scale=True))
    np.testing.assert_array_equal(left.pull["scale"], np.zeros(4))


def test_without_a_wake_there_is_nothing_to_forget(gradients):
    without = gradients._replace(pull=None)
    assert without.forget(two_blocks.BLOCKS, restarts(dense=True)) is without


def test_the_effective_gradient_is_the_rate_times_the_models_plus_the_pull(gradients):
    vector, h = two_blocks.vector, gradients.effective(LR)
    np.testing.assert_allclose(vector(h), LR * vector(gradients.m) + vector(gradients.pull))
    alone = gradients._replace(pull=None).effective(LR)
    np.testing.assert_allclose(vector(alone), LR * vector(gradients.m))


def test_weight_decay_is_on_the_right_side_and_not_in_what_is_remembered(gradients):
    vector, h = two_blocks.vector, gradients.effective(LR)
    before = vector(h)
    right = gradients.right_side(LR, h)
    np.testing.assert_allclose(vector(right), before + LR * vector(gradients.decay))
    np.testing.assert_array_equal(vector(h), before)
    np.testing.assert_array_equal(vector(gradients.effective(LR)), before)


def test_without_weight_decay_both_are_the_same_object(gradients):
    """By which the direction knows that it needs no second solve."""
    h = gradients.effective(LR)
    assert gradients._replace(decay=None).right_side(LR, h) is h


def test_a_rate_of_zero_leaves_the_pull_alone(gradients):
    h = gradients.effective(0.0)
    np.testing.assert_array_equal(two_blocks.vector(h), two_blocks.vector(gradients.pull))
    np.testing.assert_array_equal(
        two_blocks.vector(gradients.right_side(0.0, h)), two_blocks.vector(gradients.pull)
    )
