import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kldwrm_jax as kw
from kldwrm_jax.experiments import recipes
from kldwrm_jax.experiments.errors import UsageError


def test_there_are_four_settings_a_solver_and_one_of_them_is_best():
    for solver in recipes.SOLVERS:
        entries = [e for e in recipes.PAPER_SETTINGS if e.setting.optimizer == solver]
        assert len(entries) == 4
        assert [e.best for e in entries].count(True) == 1
    assert len({entry.name for entry in recipes.PAPER_SETTINGS}) == 16


def test_the_best_settings_are_those_of_the_papers_main_table():
    rows = {e.setting.optimizer: e.row for e in recipes.PAPER_SETTINGS if e.best}
    assert {name: row[5:] for name, row in rows.items()} == {
        "kfac": (96.19, 3.2, 0.26, 0.10),
        "so": (97.60, 0.85, 0.25, 0.04),
        "q": (97.69, 0.69, 0.26, 0.04),
        "qe": (98.01, 0.64, 0.23, 0.02),
    }
    assert {name: [str(n) for n in row[:5]] for name, row in rows.items()} == {
        "kfac": ["3", "3", "1", "5", "2"],
        "so": ["4", "2", "0", "7", "0"],
        "q": ["5", "4", "0", "4", "0"],
        "qe": ["8", "7", "2", "9", "0"],
    }


def test_debatable_counts_have_their_slash():
    slashes = [str(n) for entry in recipes.PAPER_SETTINGS for n in entry.row[:5] if n.low != n.high]
    assert slashes == ["7/8", "4/5", "6/7", "7/8", "9/10"]


def test_settings_survive_json():
    for entry in recipes.PAPER_SETTINGS:
        stored = json.loads(json.dumps(dataclasses.asdict(entry.setting)))
        assert recipes.Setting(**stored) == entry.setting


@pytest.fixture(scope="module")
def problem():
    model, x = nn.Dense(3), jnp.eye(6)
    net = kw.instrument(model, kw.Categorical(), x, fisher="empirical")
    params = model.init(jax.random.key(0), x)["params"]
    return net, params, net.value_and_grad(params, x, targets=jnp.arange(6) % 3)


@pytest.mark.parametrize("name", recipes.OPTIMIZERS)
def test_every_optimizer_goes_downhill_with_its_defaults(name, problem):
    net, params, (_, grads, oracle) = problem
    tx = recipes.transform(recipes.setting(name), net.layers)
    updates, _ = tx.update(grads, tx.init(params), params, oracle=oracle)
    assert optax.tree.vdot(updates, grads) < 0


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_weight_decay_of_first_order_methods_is_part_of_the_gradient(name, problem):
    net, params, (_, grads, oracle) = problem
    arguments = {"learning_rate": 0.5, "weight_decay": 0.1}
    tx = recipes.transform(recipes.setting(name, arguments), net.layers)
    updates, _ = tx.update(grads, tx.init(params), params, oracle=oracle)
    plain = {"sgd": optax.sgd(0.5, momentum=0.9), "adam": optax.adam(0.5)}[name]
    decayed = jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)
    expected, _ = plain.update(decayed, plain.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)


def test_unknown_names_get_the_list(problem):
    with pytest.raises(UsageError, match="sgd, adam, kfac, so, q, qe"):
        recipes.setting("lbfgs")
    with pytest.raises(UsageError, match=r"omega.*learning_rate, rho"):
        recipes.setting("kfac", {"omega": 0.1})
    with pytest.raises(UsageError, match="rho must be in"):
        recipes.transform(recipes.setting("kfac", {"rho": 1.5}), problem[0].layers)
