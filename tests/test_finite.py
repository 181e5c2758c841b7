"""Whether trees of numbers are finite, and their sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.finite import all_finite, total, vdot

TYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
each_call = pytest.mark.parametrize(
    "check", [all_finite, jax.jit(all_finite)], ids=["no jit", "jit"]
)


@each_call
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TYPES)
def test_one_entry_that_is_not_finite_is_enough(value, dtype, check):
    good = {"a": jnp.ones(3, dtype), "b": (jnp.ones((2, 2), dtype), jnp.ones((), dtype))}
    assert check(good)
    leaves, structure = jax.tree.flatten(good)
    for i, leaf in enumerate(leaves):
        bad = leaf.at[(-1,) * leaf.ndim].set(value)
        assert not check(jax.tree.unflatten(structure, [*leaves[:i], bad, *leaves[i + 1 :]]))


@each_call
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_are_finite_though_their_sum_is_not(dtype, check):
    most = jnp.full(1000, jnp.finfo(dtype).max)
    assert not jnp.isfinite(most.sum())
    assert check({"up": most, "down": -most})


@each_call
def test_infinities_that_would_cancel_are_not_finite(check):
    assert not check([jnp.array(np.inf), jnp.array(-np.inf)])


@each_call
def test_whole_numbers_truths_and_leaves_without_entries_are_finite(check):
    assert check([jnp.arange(3), jnp.array([True, False]), jnp.zeros((0, 2))])
    assert check(jnp.zeros(0))
    assert not check([jnp.zeros(0), jnp.array(np.nan)])


def test_none_is_no_leaf():
    assert all_finite({"is": jnp.ones(2), "is not": None})


def test_every_replica_is_judged_by_itself():
    x = jnp.array([[1.0, 2.0], [np.nan, 1.0], [1.0, np.inf], [0.0, 0.0]])
    assert jax.vmap(all_finite)({"x": x}).tolist() == [True, False, False, True]


def test_the_total_is_the_sum():
    assert total([jnp.array(2.5)]) == 2.5
    assert total([jnp.array(x) for x in (1.0, -4.0, 0.5)]) == -2.5
    assert total([jnp.array(1.0), jnp.array(2)]) == 3
    assert jnp.isnan(total([jnp.array(1.0), jnp.array(np.nan)]))


def test_the_inner_product_of_trees_is_that_of_their_vectors():
    a, b = (
        {"x": jnp.arange(6.0).reshape(2, 3), "y": jnp.array(2.0)},
        {"x": jnp.ones((2, 3)), "y": 3.0},
    )
    assert vdot(a, b) == 15 + 6
