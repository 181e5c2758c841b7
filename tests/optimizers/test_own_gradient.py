"""Gradients of the user's own, and centred rows: variational Monte Carlo."""

import functools
import pathlib
import sys

import dense_fisher
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from jax.flatten_util import ravel_pytree

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

WALKERS = 30
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


class Amplitude(nn.Module):
    """The logarithm of a wave function: its modulus, and for two columns its phase."""

    columns: int

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8, param_dtype=float)(x))
        return nn.Dense(self.columns, param_dtype=float)(x)


class Walkers:
    """A wave function at walkers, with a batch for every step, and what a dense solve needs."""

    def __init__(self, columns=1, weighted=False):
        rng = np.random.default_rng(0)
        self.x = jnp.asarray(rng.normal(size=(3, WALKERS, 3)), float)
        self.model = Amplitude(columns)
        self.params = self.model.init(jax.random.key(0), self.x[0])["params"]
        self.net = kw.instrument(self.model, kw.Gaussian(), self.x[0])
        self.weights = jnp.asarray(rng.uniform(size=WALKERS)) if weighted else None
        shares = np.ones(WALKERS) if self.weights is None else np.asarray(self.weights, np.float64)
        self.shares = shares / shares.sum()
        energies = rng.normal(size=(3, WALKERS, columns))
        self.excess = energies - np.tensordot(self.shares, energies, (0, 1))[:, None]

    def oracle(self, params, k):
        return self.net.oracle(params, self.x[k], weights=self.weights)

    def gradient(self, params, k):
        """``2 Re <(E - <E>)^* O>``."""
        _, vjp = jax.vjp(lambda p: self.model.apply({"params": p}, self.x[k]), params)
        (g,) = vjp(jnp.asarray(2 * self.shares[:, None] * self.excess)[k].astype(float))
        return g

    def rows(self, params, k, center=True):
        """``sqrt(w_n) (O_n - <O>)`` in float64, walker by walker and column by column."""
        flat, unravel = ravel_pytree(params)
        jacobian = jax.jacobian(lambda p: self.model.apply({"params": unravel(p)}, self.x[k]))(flat)
        o = np.asarray(jacobian, np.float64)
        o = o - np.tensordot(self.shares, o, (0, 0)) * center
        return (np.sqrt(self.shares)[:, None, None] * o).reshape(-1, len(flat))

    def slope(self, k):
        """What the rows make the gradient of."""
        return 2 * (np.sqrt(self.shares)[:, None] * self.excess[k]).reshape(-1)


def solution(rows, e, gamma, anchor=None):
    """``a - (J'J + gamma)^-1 J' (e + J a)``, by singular values: nothing is squared."""
    a = np.zeros(rows.shape[1]) if anchor is None else anchor
    u, s, vt = np.linalg.svd(rows, full_matrices=False)
    return a - vt.T @ (s / (s**2 + gamma) * (u.T @ (e + rows @ a)))


@pytest.mark.parametrize(
    ("columns", "weighted", "mu", "jitted"),
    [(1, False, 0.0, False), (2, False, 0.0, True), (1, True, 0.9, False), (2, True, 0.9, True)],
)
def test_centred_steps_solve_the_dense_system(columns, weighted, mu, jitted):
    walkers, gamma = Walkers(columns, weighted), 1e-3
    tx = kw.natural_gradient(walkers.net.layers, 0.5, damping=gamma, memory=mu, center=True)

    def step(params, state, k):
        g = walkers.gradient(params, k)
        return tx.update(g, state, params, oracle=walkers.oracle(params, k))

    step = small_nets.jit(step) if jitted else step
    params, state, last = walkers.params, tx.init(walkers.params), None
    for k in range(3):
        updates, state = step(params, state, k)
        anchor = None if last is None else mu * last
        last = solution(walkers.rows(params, k), walkers.slope(k), gamma, anchor)
        np.testing.assert_allclose(
            dense_fisher.vector(updates), 0.5 * last, rtol=0, atol=1e-9 * np.abs(last).max()
        )
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize(
    ("dtype", "dampings", "error"),
    [(np.float64, (1e-2, 1e-5, 1e-8), 1e-9), (np.float32, (1e-2, 1e-4, 1e-6), 1e-3)],
)
@pytest.mark.parametrize("center", [True, False])
def test_small_damping_costs_no_digits_without_targets(dtype, dampings, error, center):
    with precision.x64(dtype == np.float64):
        walkers = Walkers()
        params, layers = walkers.params, walkers.net.layers
        g, rows = walkers.gradient(params, 0), walkers.rows(params, 0, center)

        @small_nets.jit
        def step(damping):
            tx = kw.natural_gradient(layers, 1.0, damping=damping, center=center)
            return tx.update(g, tx.init(params), params, oracle=walkers.oracle(params, 0))

        for damping in np.sum(rows**2) * np.array(dampings):
            updates, state = step(damping)
            assert kw.diagnostics(state)["damping"] == pytest.approx(damping)
            wanted = solution(rows, walkers.slope(0), damping)
            got = dense_fisher.vector(updates)
            assert np.linalg.norm(got - wanted) <= error * np.linalg.norm(wanted)


def test_what_no_walker_accounts_for_is_divided_by_the_damping():
    """Weight decay, here of a parameter that the batch says nothing of: the output's bias."""
    walkers, gamma = Walkers(), 1e-4
    g = walkers.gradient(walkers.params, 0)
    decayed = jax.tree.map(lambda g, p: g + 1e-2 * (p + 1), g, walkers.params)
    tx = kw.natural_gradient(walkers.net.layers, 1.0, damping=gamma, center=True)
    oracle = walkers.oracle(walkers.params, 0)
    updates, _ = tx.update(decayed, tx.init(walkers.params), walkers.params, oracle=oracle)
    rows = walkers.rows(walkers.params, 0)
    s = rows.T @ rows + gamma * np.eye(rows.shape[1])
    wanted = -np.linalg.solve(s, dense_fisher.vector(decayed))
    np.testing.assert_allclose(dense_fisher.vector(updates), wanted, rtol=1e-9, atol=1e-9)
    assert float(updates["Dense_1"]["bias"][0]) == pytest.approx(-1e-2 / gamma)


def test_a_limit_of_the_norm_is_chained_and_the_memory_is_of_what_was_before_it():
    walkers, limit = Walkers(), 1e-2
    free = kw.natural_gradient(walkers.net.layers, 0.5, memory=0.9, center=True)
    tx = optax.chain(free, optax.clip_by_global_norm(limit))
    params = walkers.params
    state, alone = tx.init(params), free.init(params)
    for k in range(3):
        g, oracle = walkers.gradient(params, k), walkers.oracle(params, k)
        updates, state = tx.update(g, state, params, oracle=oracle)
        whole, alone = free.update(g, alone, params, oracle=oracle)
        whole = dense_fisher.vector(whole)
        assert np.linalg.norm(whole) > 2 * limit
        np.testing.assert_allclose(
            dense_fisher.vector(updates), limit * whole / np.linalg.norm(whole), rtol=1e-6
        )
        np.testing.assert_allclose(dense_fisher.vector(state[0].solution), 2 * whole, rtol=1e-6)
        params = optax.apply_updates(params, updates)


def test_center_needs_a_learning_rate():
    with pytest.raises(ValueError, match=r"center=True needs a learning rate.*got learning_rate="):
        kw.natural_gradient(Walkers().net.layers, center=True)


def test_center_is_for_outputs_of_a_fixed_variance():
    walkers = Walkers(columns=2)
    net = kw.instrument(walkers.model, kw.Categorical(), walkers.x[0])
    tx = kw.natural_gradient(net.layers, 0.1, center=True)
    oracle = net.oracle(walkers.params, walkers.x[0])
    with pytest.raises(ValueError, match=r"got Categorical\(\): instrument the model with"):
        tx.update(walkers.params, tx.init(walkers.params), walkers.params, oracle=oracle)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import two_electrons

    monkeypatch.setattr(two_electrons, "WALKERS", 64)
    yield two_electrons
    for name in ("runs", "two_electrons"):
        del sys.modules[name]


@pytest.mark.usefixtures("a_second_a_step")
def test_the_example_of_two_electrons_lowers_their_energy(example):
    run = example.compiled("natural_gradient", rate=0.1, blocks=50)
    (first,) = run(seed=0, budget=1e-9)  # one step
    *_, last = run(seed=0, budget=60)
    assert abs(last["energy"] - example.EXACT) < min(0.03, 0.5 * (first["energy"] - example.EXACT))
    assert last["deviation"] < 0.5 * first["deviation"]


def test_the_exact_ground_state_has_the_exact_local_energy(example):
    x = jax.random.normal(jax.random.key(0), (20, 4))

    def ground(x):
        return jnp.log1p(example.distance(x)) - jnp.sum(x**2, axis=-1) / 2

    np.testing.assert_allclose(example.local_energy(ground, x), example.EXACT)


@pytest.mark.parametrize("norm", [10.0, 1e-2])
def test_memory_is_spring(example, norm):
    """The step of the library and SPRING's formula, written out, on the same walkers."""
    model = example.LogPsi((6,))
    x = jax.random.normal(jax.random.key(0), (3, 40, 4))
    params = model.init(jax.random.key(1), x[0])["params"]
    net = kw.instrument(model, kw.Gaussian(), x[0])
    settings = (lambda count: 0.1, 1e-3, 0.9, norm)
    ours, theirs = example.natural_gradient(net.layers, *settings), example.spring(model, *settings)
    state, other = ours.init(params), theirs.init(params)

    @small_nets.jit
    def both(params, state, other, x):
        def log_psi(params, x):
            return model.apply({"params": params}, x)[:, 0]

        energies = example.local_energy(functools.partial(log_psi, params), x)
        excess = example.deviations(energies)
        (g,) = jax.vjp(lambda params: log_psi(params, x), params)[1](2 * excess / len(x))
        got, state = ours.update(g, state, params, oracle=net.oracle(params, x))
        wanted, other = theirs.update(g, other, params, x=x, excess=excess)
        return got, state, wanted, other

    for walkers in x:
        got, state, wanted, other = both(params, state, other, walkers)
        wanted = dense_fisher.vector(wanted)
        np.testing.assert_allclose(
            dense_fisher.vector(got), wanted, rtol=0, atol=1e-9 * np.abs(wanted).max()
        )
        params = optax.apply_updates(params, got)
