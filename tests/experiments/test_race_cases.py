import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kldwrm_jax as kw
from kldwrm_jax.experiments import race_cases
from kldwrm_jax.experiments.race_cases import METHODS, PROBLEMS


def test_the_text_is_the_same_every_time_and_its_two_parts_differ():
    (_, _, one), (_, _, two) = (PROBLEMS["text"].load(None) for _ in range(2))
    np.testing.assert_array_equal(one.train_x, two.train_x)
    np.testing.assert_array_equal(one.train_x[:, 1:], one.train_y[:, :-1])
    assert race_cases.sentences(5, 0) != race_cases.sentences(5, 1)
    assert race_cases.sentences(2, 0).count(". ") == 2


def test_the_language_reference_is_real_text_in_two_parts():
    train, test = race_cases.reference()
    assert len(train) > 5 * len(test) > 10_000
    assert "statement" in train
    assert test[:200] not in train


def test_accuracies_are_to_be_raised_and_losses_lowered():
    accuracy, loss = PROBLEMS["digits"], PROBLEMS["text"]
    assert [accuracy.reached(value, 0.9) for value in (0.8, 0.9, 1.0, None)] == [0, 1, 1, 0]
    assert [loss.reached(value, 0.9) for value in (0.8, 0.9, 1.0, None)] == [1, 1, 0, 0]


@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_problem_has_data_for_its_network(name):
    model, likelihood, arrays = PROBLEMS[name].load(None)
    x, y = arrays.train_x[:3], arrays.train_y[:3]
    outputs, _ = model.init_with_output(jax.random.key(0), x)
    assert likelihood.nll(outputs, y).shape[0] == 3
    assert len(arrays.train_x) == len(arrays.train_y) >= PROBLEMS[name].batch
    assert arrays.test_x.shape[1:] == x.shape[1:]


def test_the_autoencoder_has_its_known_size_and_a_linear_bottleneck(tmp_path):
    import idx_files

    idx_files.write(tmp_path, side=28)
    model, _, arrays = PROBLEMS["autoencoder"].load(tmp_path)
    widths = (784, 400, 200, 100, 30, 100, 200, 400, 784)
    params = model.init(jax.random.key(0), arrays.train_x[:1])["params"]
    size = sum(x.size for x in jax.tree.leaves(params))
    assert size == sum((n + 1) * m for n, m in itertools.pairwise(widths))
    np.testing.assert_array_equal(arrays.train_x, arrays.train_y)
    assert sum(layer is race_cases.nn.tanh for layer in model.layers) == 6
    after_code = [type(layer).__name__ for layer in model.layers[6:8]]
    assert model.layers[6].features == 30
    assert after_code == ["Dense", "Dense"]


@pytest.fixture(scope="module")
def small():
    x, y = jnp.eye(6), jnp.arange(6) % 3
    model = race_cases.nn.Dense(3)
    net = kw.instrument(model, kw.Categorical(), x)
    params = model.init(jax.random.key(0), x)["params"]
    return net, params, net.value_and_grad(params, x, targets=y, key=jax.random.key(1))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_downhill(name, small):
    net, params, (_, grads, oracle) = small
    rate = METHODS[name].rates[:1] or (None,)
    tx = optax.with_extra_args_support(METHODS[name].make(net.layers, *rate, 0.1))
    updates, _ = tx.update(grads, tx.init(params), params, oracle=oracle)
    assert optax.tree.vdot(updates, grads) < 0
