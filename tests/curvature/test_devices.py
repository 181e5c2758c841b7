"""Who does what; that it is done is shown by test_many_devices.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from kldwrm_jax.curvature.devices import Devices, Task, share_out, shares

MESH = jax.make_mesh((1,), ("all",), axis_types=(AxisType.Auto,))


def task(matrices, n):
    return Task(jnp.negative, (jax.ShapeDtypeStruct((matrices, n, n), jnp.float32),))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_every_matrix_is_done_once_and_no_device_does_much_more_than_its_share(kinds, devices):
    tasks = [task(*kind) for kind in kinds]
    plan = shares(tasks, devices)
    done = sorted((i, j) for share in plan for i, which in share.items() for j in which)
    assert done == [(i, j) for i, own in enumerate(tasks) for j in range(own.matrices)]
    loads = [sum(tasks[i].cost * len(which) for i, which in share.items()) for share in plan]
    largest = max(own.cost for own in tasks)
    assert max(loads) <= sum(loads) / devices + largest


def test_one_device_does_it_all(rng):
    x = rng.normal(size=(3, 2, 2)).astype(np.float32)
    (got,) = share_out([Task(jnp.negative, (x,))], Devices(MESH, ("all",)))
    np.testing.assert_array_equal(got, -x)


def test_an_axis_that_the_mesh_does_not_have_is_an_error():
    with pytest.raises(ValueError, match="axis must be one of 'all', got 'model'"):
        Devices(MESH, ("model",))


def test_a_mesh_of_explicit_axes_is_an_error_that_says_how_to_make_another():
    explicit = jax.make_mesh((1,), ("all",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"mesh must leave.*axis_types=\(AxisType.Auto,\) \* 1"):
        Devices(explicit, ("all",))
