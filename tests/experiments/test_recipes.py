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


def test_settings_survive_json():
    for name in recipes.OPTIMIZERS:
        setting = recipes.setting(name)
        stored = json.loads(json.dumps(dataclasses.asdict(setting)))
        assert recipes.Setting(**stored) == setting


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
def test_weight_decay_of_first_order_methods_is_added_to_the_gradient(name, problem):
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
    with pytest.raises(UsageError, match=r"omega.*learning_rate, momentum"):
        recipes.setting("kfac", {"omega": 0.1})
    with pytest.raises(UsageError, match=r"nu.*learning_rate, momentum, .*weight_decay"):
        recipes.setting("sgd", {"nu": 0.1})
    with pytest.raises(UsageError, match="rho must be in"):
        recipes.transform(recipes.setting("kfac", {"rho": 1.5}), problem[0].layers)


def test_the_defaults_are_the_papers():
    assert recipes.setting("q").arguments == {
        "learning_rate": 0.01,
        "damping": 0.011,
        "weight_decay": 0.001,
        "refresh_every": 30,
        "kl_clip": 0.1,
        "solver": "reweighted",
        "block_clip": 2.0,
        "rho": 0.5,
    }
    extra = recipes.setting("qe").arguments.items() - recipes.setting("q").arguments.items()
    assert dict(extra) == {
        "inner_steps": 10,
        "omega": 0.07,
        "capacity": 4,
        "kl_scale": 1 / 660,
        "tail": "fold",
    }
    rho = {name: recipes.setting(name).arguments["rho"] for name in recipes.SOLVERS}
    assert rho == {"kfac": 0.95, "so": 0.33, "q": 0.5, "qe": 0.5}
