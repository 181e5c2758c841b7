"""Which arguments of a model are leaves, and which are part of the program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import kldwrm_jax as kw
from kldwrm_jax.capture.call import Call


def call(*args, **kwargs):
    return Call(
        args, kwargs, {"batch_stats": {"mean": jnp.ones(2)}}, {"dropout": jax.random.key(0)}
    )


def test_bools_strings_none_and_callables_are_structure():
    given = call(np.ones(3), True, "mode", None, jnp.tanh, jnp.float32, 2, scale=1.5, flag=False)
    leaves = jax.tree.leaves(given)
    assert [leaf for leaf in leaves if not hasattr(leaf, "shape")] == [2, 1.5]
    assert len(leaves) == 5  # the array, 2, 1.5, the mean and the key


def test_a_call_survives_the_tree():
    given = call({"b": "text", "a": np.ones(3)}, [True, 1.0], f=jnp.tanh, n=None)
    again = jax.tree.map(lambda x: x, given)
    assert again.args[0]["b"] == "text"
    assert again.args[1][0] is True
    assert again.kwargs["f"] is jnp.tanh
    assert again.kwargs["n"] is None
    np.testing.assert_array_equal(again.args[0]["a"], np.ones(3))
    assert jax.tree.structure(given) == jax.tree.structure(again)


def test_static_arguments_tell_structures_apart():
    assert jax.tree.structure(call(1.0, True)) != jax.tree.structure(call(1.0, False))
    assert jax.tree.structure(call(1.0, "a")) != jax.tree.structure(call(1.0, "b"))
    assert jax.tree.structure(call(1.0)) == jax.tree.structure(call(2.0))


def test_xla_folds_no_product_of_a_batch_that_a_step_closes_over():
    x = jax.random.normal(jax.random.key(0), (512, 96))
    net = kw.instrument(nn.Dense(3), kw.Gaussian(), x)
    params = nn.Dense(3).init(jax.random.key(1), x)["params"]

    @jax.jit
    def factors(params):
        return net.oracle(params, x, key=jax.random.key(2)).factors()

    program = factors.lower(params).compile().as_text()
    products = [line for line in program.splitlines() if " dot(" in line or "custom-call" in line]
    assert any("f32[97,97]" in line or "f32[96,96]" in line for line in products), program
