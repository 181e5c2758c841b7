"""After very many steps: sound factors, no growth, counters that do not overflow."""

import gc
import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.optimizers.state import increment_if, next_count

LARGEST = np.iinfo(np.int32).max
NOTHING_SET = {"learning_rate": None}
MEMBERS = {
    "kfac, nothing set": (kw.kfac, NOTHING_SET),
    "so, nothing set": (kw.so_kldwrm, NOTHING_SET),
    "q, nothing set": (kw.q_kldwrm, NOTHING_SET),
    "kfac": (kw.kfac, {}),
    "so": (kw.so_kldwrm, {}),
    "q": (kw.q_kldwrm, {}),
    "qe": (kw.qe_kldwrm, {}),
}


def long_run(make, steps, **arguments):
    """A loop as a user writes it, over ever new batches; checks what must hold on its way."""
    problem = small_nets.problem(batches=64)
    tx = make(problem.layers, **{"learning_rate": 0.02} | arguments, refresh_every=5)
    plain, traces = problem.step(tx), itertools.count()

    @small_nets.jit
    def step(params, state, k):
        next(traces)
        return plain(params, state, k)

    def in_use():
        gc.collect()
        return len(jax.live_arrays())

    params, state = step(problem.params, tx.init(problem.params), 0)
    arrays, memory = in_use(), []
    for k in range(1, steps):
        params, state = step(params, state, k)
        if k % (steps // 10) == 0:
            check_factors(state.factors)
            assert in_use() <= arrays
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # in kB
    assert next(traces) == 1
    assert memory[-1] - memory[1] < 20_000
    scalars = kw.diagnostics(state)
    assert scalars["steps"] == steps
    assert scalars["refreshes"] == -(-steps // 5)
    assert scalars["rejected_steps"] == scalars["rejected_refreshes"] == 0
    # A LayerNorm over three units has gradients that explode now and then.
    assert scalars["outliers"] < scalars["refreshes"] / 1000
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    losses = [
        problem.oracle(params, k).loss(p) for k in range(64) for p in (problem.params, params)
    ]
    assert np.mean(losses[1::2]) < 0.7 * np.mean(losses[::2])


def check_factors(factors):
    """Symmetric, and positive semidefinite, as far as float32 can be."""
    for pair in factors.values():
        if not isinstance(pair, tuple):
            assert (np.asarray(pair) >= 0).all()
            continue
        for f in np.asarray(pair[0], np.float64), np.asarray(pair[1], np.float64):
            largest = np.linalg.norm(f, 2)
            assert np.abs(f - f.T).max() <= 1e-6 * largest
            assert np.linalg.eigvalsh(f).min() >= -1e-6 * largest


@pytest.mark.parametrize(
    ("make", "steps", "arguments"),
    [
        (kw.kfac, 3_000, NOTHING_SET),
        (kw.qe_kldwrm, 2_000, {"capacity": 2, "inner_steps": 2}),
    ],
    ids=["nothing set", "qe"],
)
def test_thousands_of_steps_leave_factors_sound_and_nothing_grows(make, steps, arguments):
    long_run(make, steps, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "arguments"), MEMBERS.values(), ids=MEMBERS)
def test_a_hundred_thousand_steps_leave_factors_sound_and_nothing_grows(make, arguments):
    long_run(make, 100_000, **arguments)


# --- Counters -------------------------------------------------------------------------------------


def test_a_full_counter_stays_full():
    full, nearly = jnp.array(LARGEST, jnp.int32), jnp.array(LARGEST - 1, jnp.int32)
    assert increment_if(jnp.array(True), full) == increment_if(jnp.array(True), nearly) == LARGEST
    assert increment_if(jnp.array(False), nearly) == LARGEST - 1


@pytest.mark.parametrize("period", [1, 7, 30, 360])
def test_a_full_count_goes_round_its_last_period(period):
    count, seen = jnp.array(LARGEST - 2 * period, jnp.int32), []
    for _ in range(4 * period):
        seen.append(int(count))
        count = next_count(count, period)
    np.testing.assert_array_equal(np.diff(np.array(seen) % period) % period, 1 % period)
    assert max(seen) == LARGEST
    assert min(seen[2 * period :]) > LARGEST - period


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (kw.kfac, {"learning_rate": None}),
        (kw.kfac, {}),
        (kw.so_kldwrm, {"nu": 0.1}),
        (kw.q_kldwrm, {"inverse": kw.Inverse(every=6)}),
        (kw.q_kldwrm, {"inverse": kw.Inverse(stagger=True)}),
        (kw.qe_kldwrm, {"capacity": 4, "inner_steps": 2}),
    ],
    ids=["nothing set", "kfac", "so", "q, inverted seldom", "q, staggered", "qe"],
)
def test_past_the_largest_count_all_goes_on_as_before_it(make, arguments):
    """The same steps from a count that is as far from a refresh, but not near the largest."""
    problem = small_nets.problem(norm=False)
    tx = make(problem.layers, **{"learning_rate": 0.1} | arguments, refresh_every=3)
    step = small_nets.jit(problem.step(tx))
    period = 60  # of everything that depends on the count
    late = LARGEST - 5
    early = period + late % period
    ends = []
    for count in (early, late):
        params, state = problem.params, tx.init(problem.params)
        for k in range(5):  # a state in the middle of training
            params, state = step(params, state, k)
        full = jnp.asarray(LARGEST if count == late else 5, jnp.int32)
        monitor = state.monitor._replace(refreshes=full, rejected_steps=full, outliers=full)
        state = state._replace(count=jnp.asarray(count, jnp.int32), monitor=monitor)
        for k in range(12):
            params, state = step(params, state, k)
        ends.append((params, state.factors, state.inverses))
        scalars = kw.diagnostics(state)
        assert scalars["refreshes"] == (LARGEST if count == late else 5 + 4)
        assert scalars["steps"] > 0
    jax.tree.map(np.testing.assert_array_equal, *ends)
