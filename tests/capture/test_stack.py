"""Stacks: where copies of a layer are, and finding it out from shapes."""

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.capture.stack import Stack, find_stacks


@pytest.mark.parametrize(
    ("stack", "shape"),
    [
        (Stack(), (2, 3)),
        (Stack(0, (4,)), (4, 2, 3)),
        (Stack(1, (4,)), (2, 4, 3)),
        (Stack(-1, (4,)), (2, 3, 4)),
        (Stack(-2, (4,)), (2, 4, 3)),
        (Stack(0, (4, 5)), (4, 5, 2, 3)),
    ],
)
def test_spread_puts_copies_along_the_stacks_axes(stack, shape):
    x = jnp.arange(6.0).reshape(2, 3)
    spread = stack.spread(x)
    assert spread.shape == shape
    front = stack.to_front(spread)
    assert front.shape == (*stack.lengths, 2, 3)
    np.testing.assert_array_equal(front, jnp.broadcast_to(x, front.shape))
    np.testing.assert_array_equal(stack.from_front(front), spread)


@pytest.mark.parametrize(
    ("kernel", "bias", "expected"),
    [
        ((2, 3), (3,), [Stack()]),
        ((4, 2, 3), (4, 3), [Stack(0, (4,))]),
        ((2, 4, 3), (3, 4), [Stack(1, (4,))]),
        ((2, 3, 4), (3, 4), [Stack(-1, (4,))]),
        ((2, 4, 3), (4, 3), [Stack(-2, (4,))]),
        ((4, 5, 2, 3), (4, 5, 3), [Stack(0, (4, 5))]),
        ((4, 2, 3), (3,), []),
        ((4, 2, 3), (5, 3), []),
        ((4, 2, 5), (4, 5), []),
    ],
)
def test_stacks_are_found_from_shapes(kernel, bias, expected):
    inside, outside = {"kernel": (2, 3), "bias": (3,)}, {"kernel": kernel, "bias": bias}
    assert list(find_stacks(inside, outside)) == expected


def test_lengths_that_coincide_leave_several_candidates():
    square = {"kernel": (3, 3), "bias": (3,)}
    candidates = find_stacks(square, {"kernel": (3, 3, 3), "bias": (3, 3)})
    assert {stack.at for stack in candidates} == {0, 1, -1, -2}
