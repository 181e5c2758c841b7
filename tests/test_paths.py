"""Leaves by the path that people write."""

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax.core import freeze

from kldwrm_jax.paths import leaves_by_path, replace_leaves

TREE = {"block": {"dense": {"kernel": jnp.ones(2), "bias": jnp.zeros(1)}}, "gain": jnp.ones(3)}


@pytest.mark.parametrize("wrap", [dict, freeze], ids=["dict", "FrozenDict"])
def test_paths_join_keys_by_slashes(wrap):
    tree = wrap(TREE)
    assert set(leaves_by_path(tree)) == {"block/dense/kernel", "block/dense/bias", "gain"}
    assert leaves_by_path(tree)["gain"].shape == (3,)
    new = replace_leaves(tree, {"block/dense/bias": jnp.full(1, 7.0)})
    assert type(new) is type(tree)
    assert leaves_by_path(new)["block/dense/bias"][0] == 7
    assert leaves_by_path(tree)["block/dense/bias"][0] == 0


def test_boxes_are_not_part_of_a_path():
    tree = {"dense": {"kernel": nn.Partitioned(jnp.ones((2, 3)), names=(None, "model"))}}
    assert set(leaves_by_path(tree)) == {"dense/kernel"}
    new = replace_leaves(tree, {"dense/kernel": jnp.zeros((2, 3))})
    assert isinstance(new["dense"]["kernel"], nn.Partitioned)
    assert not new["dense"]["kernel"].value.any()


def test_a_parameter_may_be_called_value():
    tree = {"attention": {"value": {"kernel": jnp.ones(2)}}, "value": jnp.ones(3)}
    assert set(leaves_by_path(tree)) == {"attention/value/kernel", "value"}
