"""With nothing set, long after convergence, no run blows up, falls back or stands still.

Some of the runs of ``benchmarks/long_runs.py`` by default, and all of them under ``slow``.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import long_runs
import numpy as np
import optax
import precision
import pytest

import kldwrm_jax as kw

QUICK = [
    long_runs.Case("digits", None, "float32"),
    long_runs.Case("iris", 16, "float32"),
    long_runs.Case("exercise", None, "float64"),
    long_runs.Case("wine", 64, "bfloat16"),
]
_RELAPSED = 0.02  # of all runs at most


def found(case, **settings):
    with precision.x64(case.precision == "float64"):
        losses = long_runs.losses(case, **settings)
    learnable = long_runs.PROBLEMS[case.problem]().learnable
    return [long_runs.summary(own, learnable) for own in losses]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_run_stays_where_it_has_come(case):
    for run in found(case):
        assert (run["finite"], run["learned"], run["relapsed"]) == (True, True, False), run


@pytest.mark.slow
@pytest.mark.parametrize("problem", long_runs.PROBLEMS)
@pytest.mark.parametrize("kind", long_runs.PRECISIONS)
def test_of_all_runs_none_ends_high_and_few_relapse(problem, kind):
    cases = [c for c in long_runs.cases() if (c.problem, c.precision) == (problem, kind)]
    runs = [run for case in cases for run in found(case)]
    assert all(run["finite"] and run["learned"] for run in runs), runs
    assert sum(run["relapsed"] for run in runs) <= max(1, _RELAPSED * len(runs)), runs


def test_the_example_of_the_readme_never_falls_back():
    seeds, steps = 24, 400
    model = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(3)])

    def spirals(key):
        keys = jax.random.split(key, 3)
        y = jax.random.randint(keys[0], (1024,), 0, 3)
        radius = jnp.sqrt(jax.random.uniform(keys[1], (1024,)))
        angle = 6 * radius + 2 * jnp.pi / 3 * y
        x = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)
        return x + 0.05 * jax.random.normal(keys[2], x.shape), y

    net = kw.instrument(model, kw.Categorical(), jnp.zeros((1024, 2)))
    tx = kw.kfac(net.layers)

    def run(key):
        data, start, steps_key = jax.random.split(key, 3)
        x, y = spirals(data)
        params = model.init(start, x)["params"]

        def step(carry, key):
            params, state = carry
            loss, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
            updates, state = tx.update(grads, state, params, oracle=oracle)
            return (optax.apply_updates(params, updates), state), loss

        carry = params, tx.init(params)
        return jax.lax.scan(step, carry, jax.random.split(steps_key, steps))[1]

    losses = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), seeds)))
    assert losses[:, 150:].max() < 0.1
