"""Steps outside of ``jit``."""

import time

import jax
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


def grads_and_oracle(small, k=0):
    oracle = small.oracle(small.params, k)
    return jax.grad(oracle.loss)(small.params), oracle


def test_a_step_outside_of_jit_is_compiled_once_and_is_that_of_jit(small):
    tx = kw.kfac(small.layers, 0.1, refresh_every=2)
    state = expected_state = tx.init(small.params)
    compiled = jax.jit(tx.update)
    seconds = []
    for k in range(4):
        grads, oracle = grads_and_oracle(small, k)
        started = time.perf_counter()
        got, state = tx.update(grads, state, small.params, oracle=oracle)
        jax.block_until_ready(got)
        seconds.append(time.perf_counter() - started)
        expected, expected_state = compiled(grads, expected_state, small.params, oracle=oracle)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert max(seconds[1:]) < 0.1 * seconds[0]


def test_hyperparameters_that_are_arrays_run_one_by_one_and_say_so(small):
    tx = optax.inject_hyperparams(kw.kfac, static_args=("refresh_every", "inverse"))(
        small.layers, learning_rate=0.1
    )
    grads, oracle = grads_and_oracle(small)
    state = tx.init(small.params)
    with pytest.warns(RuntimeWarning, match="outside of jax.jit.*wrap the training step"):
        got, _ = tx.update(grads, state, small.params, oracle=oracle)
    plain = kw.kfac(small.layers, 0.1)
    expected, _ = plain.update(grads, plain.init(small.params), small.params, oracle=oracle)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
