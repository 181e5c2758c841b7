"""Thousands of absurd batches: nothing that is not finite, nothing jammed, everything counted."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw

INPUTS, CLASSES, BATCH = 4, 3, 16
CHUNK = 100  # steps of a compiled loop
AFTERWARDS = 600  # honest steps in which it must be well again
WELL = 0.2  # loss; an undisturbed run comes to 0.1 from 3


class Net(nn.Module):
    """Hidden units that can die beside a path that cannot, and a diagonal block."""

    @nn.compact
    def __call__(self, x, shift):
        hidden = nn.relu(nn.Dense(4, name="hidden")(x) + shift)
        hidden = nn.LayerNorm(name="norm")(hidden)
        return nn.Dense(CLASSES, name="last")(hidden) + nn.Dense(CLASSES, name="skip")(x)


def rate(k):
    """Goes to zero and stays there a while, again and again."""
    return 0.05 * jnp.maximum(jnp.sin(k / 10) + 0.5, 0)


COMMON = {"learning_rate": rate, "refresh_every": 3}
MAKE = {
    "kfac, nothing set": (kw.kfac, {"refresh_every": 3}),
    "kfac": (kw.kfac, COMMON),
    "so": (kw.so_kldwrm, COMMON),
    "q": (kw.q_kldwrm, COMMON),
    "qe": (kw.qe_kldwrm, COMMON | {"capacity": 2, "inner_steps": 3}),
}
MORE = {
    "so, nothing set": (kw.so_kldwrm, {"refresh_every": 3}),
    "q, nothing set": (kw.q_kldwrm, {"refresh_every": 3}),
    "kfac, factored": (kw.kfac, COMMON | {"damping_mode": "factored"}),
    "so, taken, momentum": (kw.so_kldwrm, COMMON | {"wake": "taken", "nu": 0.2, "rho": 0.9}),
    "q, taken, every step": (kw.q_kldwrm, COMMON | {"wake": "taken", "refresh_every": 1}),
    "so, calibrated": (kw.so_kldwrm, COMMON | {"calibrate": True}),
    "q, reweighted": (kw.q_kldwrm, COMMON | {"solver": "reweighted"}),
    "so, staggered": (kw.so_kldwrm, COMMON | {"inverse": kw.Inverse(stagger=True)}),
    "q, low rank": (kw.q_kldwrm, COMMON | {"inverse": kw.Inverse(method="randomized", rank=2)}),
}
COUNTERS = ("refreshes", "rejected_refreshes", "outliers", "rejected_steps", "undone_steps")


class Steps(NamedTuple):
    """What is fed to steps, one along the first axis each: what a poison may spoil."""

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    shift: np.ndarray  # of the hidden units before their ReLU
    scale: np.ndarray  # of the gradient
    halved: np.ndarray  # whether the gradient was float16, of a loss times 1e5


def honest(count, seed):
    """Classes that lie apart."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, (count, BATCH))
    x = rng.normal(size=(count, BATCH, INPUTS)) + 3 * np.eye(CLASSES, INPUTS)[y]
    one = np.ones(count, np.float32)
    weights = np.ones((count, BATCH), np.float32)
    return Steps(x.astype(np.float32), y, weights, 0 * one, one, np.zeros(count, bool))


POISONS = {
    "a NaN": lambda s: {"x": s.x * np.where(np.arange(INPUTS) == 1, np.nan, 1)},
    "an infinity": lambda s: {"x": s.x - np.where(np.arange(INPUTS) == 2, np.inf, 0)},
    "1e30": lambda s: {"x": 1e30 * s.x},
    "one example of 1e30": lambda s: {"x": s.x * np.where(np.arange(BATCH) == 3, 1e30, 1)[:, None]},
    "1e15": lambda s: {"x": 1e15 * s.x},
    "1e6": lambda s: {"x": 1e6 * s.x},
    "1e-6": lambda s: {"x": 1e-6 * s.x},
    "zeros": lambda s: {"x": 0 * s.x},
    "constants": lambda s: {"x": np.ones_like(s.x)},
    "a single example": lambda s: {"weights": s.weights * (np.arange(BATCH) == 0)},
    "no example": lambda s: {"weights": 0 * s.weights},
    "one class only": lambda s: {"y": 0 * s.y},
    "labels that do not exist": lambda s: {"y": s.y + CLASSES},
    "dead units": lambda s: {"shift": s.shift - 1e9},
    "float16 overflow": lambda s: {"halved": ~s.halved},
    "a gradient of 1e18": lambda s: {"scale": 1e18 * s.scale},
    "a gradient of 1e36": lambda s: {"scale": 1e36 * s.scale},
    "no gradient": lambda s: {"scale": 0 * s.scale},
}


def spoil(steps, kind, places):
    """The steps, with one kind of poison in some places."""
    spoiled = POISONS[kind](Steps(*(field[places] for field in steps)))
    for name, values in spoiled.items():
        getattr(steps, name)[places] = values
    return steps


class Training:
    """A member, and a compiled loop over steps that keeps account of them."""

    def __init__(self, name):
        make, arguments = (MAKE | MORE)[name]
        self.usual = np.mean if name in MAKE else np.median  # variants have losses that leap
        model, (x, _, _, shift, _, _) = Net(), Steps(*(field[0] for field in honest(1, 0)))
        self.net = kw.instrument(model, kw.Categorical(), x, shift, fisher="sampled")
        self.params = model.init(jax.random.key(1), x, shift)["params"]
        self.tx = make(self.net.layers, **arguments)
        self.every = arguments["refresh_every"]
        self.state = self.tx.init(self.params)
        self.go = small_nets.jit(functools.partial(jax.lax.scan, self.step))

    def step(self, carried, fed):
        params, state = carried
        x, y, weights, shift, scale, halved = fed
        key = jax.random.fold_in(jax.random.key(2), state.count)
        oracle = self.net.oracle(params, x, shift, targets=y, key=key, weights=weights)
        loss, grads = jax.value_and_grad(oracle.loss)(params)

        def spoiled(g):
            return jnp.where(halved, (1e5 * g).astype(jnp.float16).astype(g.dtype) / 1e5, scale * g)

        grads = jax.tree.map(spoiled, grads)
        updates, new = self.tx.update(grads, state, params, oracle=oracle)
        moved = optax.apply_updates(params, updates)
        account = {
            "loss": loss,
            "finite": _finite(moved),
            "state finite": _finite(new._replace(monitor=None)),
            "moved": ~_equal(moved, params),
            "undone": _equal(moved, _before_the_last_step(params, state)),
            "gradient finite": _finite(grads),
            "inputs finite": jnp.isfinite(jnp.vdot(x, x)),
            "due": state.count % self.every == 0,
            "counters": {
                name: getattr(new.monitor, name) - getattr(state.monitor, name) for name in COUNTERS
            }
            | {"steps": new.count - state.count},
            "factors": new.factors,
        }
        return (moved, new), account

    def run(self, carried, steps):
        """All the steps, and the account of them."""
        accounts = []
        for i in range(0, len(steps.y), CHUNK):
            carried, account = self.go(carried, Steps(*(field[i : i + CHUNK] for field in steps)))
            accounts.append(account)
        return carried, jax.tree.map(lambda *xs: np.concatenate(xs), *accounts)

    def well(self, carried):
        """Whether honest steps lead to a good loss; and an account of some.

        In most of three runs: the losses of untroubled training leap, too.
        """
        accounts = [self.run(carried, honest(AFTERWARDS, seed))[1] for seed in (5, 6, 7)]
        losses = [self.usual(account["loss"][-100:]) for account in accounts]
        return np.median(losses) < WELL, accounts[0]


def _finite(tree):
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _before_the_last_step(params, state):
    """Where a step that sets itself goes back to; nowhere, where there is a rate."""
    if state.fit is None:
        return params
    return jax.tree.map(jnp.subtract, params, state.last_step)


def _equal(a, b):
    return jnp.stack(jax.tree.leaves(jax.tree.map(lambda x, y: (x == y).all(), a, b))).all()


training_of = functools.cache(Training)


def random_poison(count, seed):
    """Poisons for one step or several in a row, an honest step now and then."""
    rng = np.random.default_rng(seed)
    steps, start = honest(count, seed), 0
    while start < count:
        length = rng.choice([1, 1, 1, 2, 12])
        if rng.random() < 0.6:
            spoil(steps, rng.choice(list(POISONS)), slice(start, start + length))
        start += length
    return steps


def check(account):
    """What holds for every single step."""
    counters = account["counters"]
    assert account["finite"].all()
    assert account["state finite"].all()
    # A step is taken, or refused and counted; a refused one leaves the parameters alone, or, where
    # steps set themselves, undoes the last one, as one does that is found to have done harm.
    taken, refused = counters["steps"] == 1, counters["rejected_steps"] == 1
    waiting = np.cumsum(counters["refreshes"]) == 0  # for the first good statistics
    np.testing.assert_array_equal(taken + refused + (waiting & ~refused), 1)
    assert account["undone"][refused | (counters["undone_steps"] == 1)].all()
    assert not account["moved"][~taken & ~refused].any()
    # What is bad is refused and counted.
    assert refused[~account["gradient finite"]].all()
    bad = account["due"] & account["gradient finite"] & ~account["inputs finite"]
    assert (counters["rejected_refreshes"][bad] == 1).all()
    assert not counters["refreshes"][bad].any()
    assert not counters["rejected_refreshes"][~account["due"] & ~waiting].any()


def fuzz(name, steps):
    training = training_of(name)
    poison = random_poison(steps, seed=len(name))
    carried, account = training.run((training.params, training.state), poison)
    check(account)
    counters = {key: value.sum() for key, value in account["counters"].items()}
    assert counters["steps"] > steps / 3
    assert min(counters["rejected_steps"], counters["refreshes"]) > 0
    assert counters["outliers"] > 0 or steps < 10_000
    scalars = kw.diagnostics(carried[1])
    assert {key: scalars[key] for key in counters} == counters
    # The state is not jammed: it trains fresh parameters as well as a fresh state does.
    well, after = training.well((training.params, carried[1]))
    assert well, after["loss"][::50]
    check(after)
    if name in MAKE:  # and those that it has, if no momentum has carried them far away
        well, after = training.well(carried)
        assert well, after["loss"][::50]
        check(after)


@pytest.mark.parametrize(
    "name", ["kfac, nothing set", "kfac", "q", "qe", pytest.param("so", marks=pytest.mark.slow)]
)
def test_hundreds_of_poisoned_steps_are_counted_and_survived(name):
    fuzz(name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE | MORE)
def test_ten_thousand_poisoned_steps_are_counted_and_survived(name):
    fuzz(name, 10_000)


def poisoned_at(name, kind, places):
    """An honest run of a chunk but for one kind of poison in some places."""
    training = training_of(name)
    steps = spoil(honest(CHUNK, seed=4), kind, places)
    return training.run((training.params, training.state), steps)[1]


def at_step(account, k):
    return jax.tree.map(lambda x: x[k], account["factors"])


# Every third step is a refresh: 30, 33, 36, ...


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["1e15", "1e6"])
def test_one_absurd_batch_leaves_the_average_as_it_was(name, kind):
    account = poisoned_at(name, kind, [30])
    before, after, later = (at_step(account, k) for k in (29, 30, 33))
    absurd = {"hidden", "skip"}  # the LayerNorm shields the rest, more or less
    for block in absurd:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
            after[block],
            before[block],
        )
        assert np.abs(later[block][0] - after[block][0]).max() > 1e-4
    assert np.flatnonzero(account["counters"]["outliers"]).tolist() == [30]
    assert account["counters"]["refreshes"].sum() == -(-CHUNK // 3)


@pytest.mark.parametrize("at", [30, 45], ids=["all of it is measured", "between"])
def test_with_nothing_set_a_batch_of_absurd_scale_throws_the_parameters_nowhere(at):
    """Its outputs saturate: the loss has a slope, and no Fisher that would bound a step."""
    training = training_of("kfac, nothing set")
    steps = spoil(honest(2 * CHUNK, seed=4), "1e6", [at])
    (params, state), account = training.run((training.params, training.state), steps)
    check(account)
    assert max(np.abs(x).max() for x in jax.tree.leaves(params)) < 100
    honest_ones = np.delete(account["loss"], at)
    assert honest_ones.max() < 100
    assert np.median(account["loss"][-50:]) < WELL
    assert kw.diagnostics(state)["loss_scale"] == 1


@pytest.mark.parametrize("name", MAKE)
def test_a_true_change_of_scale_is_followed_at_its_third_refresh(name):
    account = poisoned_at(name, "1e6", slice(30, CHUNK))
    traces = np.trace(account["factors"]["skip"][0], axis1=-2, axis2=-1)
    assert traces[35] < 1e3
    assert traces[36] > 1e13
    assert np.flatnonzero(account["counters"]["outliers"]).tolist() == [30, 33]


WAKES = {
    "so": lambda layers: kw.so_kldwrm(layers, 0.1, refresh_every=1),
    "so, taken": lambda layers: kw.so_kldwrm(layers, 0.1, refresh_every=1, wake="taken"),
    "q": lambda layers: kw.q_kldwrm(layers, 0.1, refresh_every=1),
    "q, taken": lambda layers: kw.q_kldwrm(layers, 0.1, refresh_every=1, wake="taken"),
}


@pytest.mark.parametrize("name", WAKES)
def test_a_block_whose_average_begins_anew_has_no_wake_of_the_one_before(name):
    problem = small_nets.problem(norm=False)
    tx = WAKES[name](problem.layers)

    @small_nets.jit
    def step(params, state, scale):
        oracle = problem.net.oracle(params, problem.x[0] * scale, targets=problem.y[0])
        grads = jax.grad(problem.oracle(params, 0).loss)(params)
        return tx.update(grads, state, params, oracle=oracle)

    state = tx.init(problem.params)
    for scale in (1, 1, 1e7, 1e7):
        _, state = step(problem.params, state, scale)
    assert max(np.abs(x).max() for x in jax.tree.leaves(state.pull["first"])) > 1e-4
    none = optax.tree.zeros_like(state.pull["first"])
    without = state._replace(pull=state.pull | {"first": none})
    for scale, alike in ((1e7, True), (1, False)):  # the third in a row, and an outlier's end
        (ours, after), (theirs, other) = (step(problem.params, s, scale) for s in (state, without))
        pairs = zip(*map(jax.tree.leaves, ((ours, after.pull), (theirs, other.pull))), strict=True)
        assert all(np.allclose(x, y, rtol=1e-6, atol=1e-12) for x, y in pairs) == alike


def test_blocks_that_are_masked_are_not_judged():
    problem = small_nets.problem(norm=False)
    own = {"first": False, "last": True}
    tx = optax.masked(kw.kfac(problem.layers, 0.1, refresh_every=1), own)

    @small_nets.jit
    def step(params, state, scale):
        batch = problem.x[0] * scale
        oracle = problem.net.oracle(params, batch, targets=problem.y[0])
        grads = jax.grad(problem.oracle(params, 0).loss)(params)
        _, state = tx.update(grads, state, params, oracle=oracle)
        return state

    state = step(problem.params, tx.init(problem.params), 1.0)
    before = state.inner_state.factors
    state = step(problem.params, state, 1e7)  # tanh: the last layer's inputs stay as they are
    scalars = kw.diagnostics(state)
    assert (scalars["outliers"], scalars["refreshes"]) == (0, 2)
    assert np.abs(state.inner_state.factors["last"][0] - before["last"][0]).max() > 1e-4
    assert not state.inner_state.factors["first"][0].any()


def test_an_update_that_float16_cannot_hold_is_refused():
    problem = small_nets.problem(norm=False, dtype=jnp.float16)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e4), problem.params)

    def steps(rate):
        tx = kw.kfac(problem.layers, rate, kl_clip=None)
        oracle = problem.oracle(problem.params, 0)
        return small_nets.jit(tx.update)(grads, tx.init(problem.params), oracle=oracle)

    updates, state = steps(1.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    assert kw.diagnostics(state)["rejected_steps"] == 1
    assert not any(x.any() for x in jax.tree.leaves(updates))
    updates, state = steps(1e-3)
    assert kw.diagnostics(state)["steps"] == 1
    assert all(x.dtype == jnp.float16 and np.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_a_memory_that_overflows_fades_until_steps_are_taken_again():
    """It was made with an absurd curvature, which began anew: an honest gradient finds it there."""
    problem = small_nets.problem(norm=False)
    tx = kw.so_kldwrm(problem.layers, 0.3, wake="taken", nu=0.5, rho=0.9, refresh_every=1)
    step = small_nets.jit(problem.step(tx))
    params, state = step(problem.params, tx.init(problem.params), 0)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 1e25), state.pull)
    params, state = step(params, state._replace(pull=huge, momentum=huge), 1)
    assert kw.diagnostics(state)["rejected_steps"] == 1
    for k in range(300):
        params, state = step(params, state, k)
    scalars = kw.diagnostics(state)
    assert scalars["rejected_steps"] < 200
    assert scalars["steps"] > 100
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
