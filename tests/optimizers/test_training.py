"""They optimise: where first-order methods crawl, and on real images."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kldwrm_jax as kw

MEMBERS = {"kfac": kw.kfac, "so": kw.so_kldwrm, "q": kw.q_kldwrm, "qe": kw.qe_kldwrm}


class Regression(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(jnp.tanh(nn.Dense(8)(x)))


class IllConditioned:
    """Inputs whose principal axes, turned away from the coordinates, have scales from 1 to 0.01."""

    target = 0.01  # half the squared error; 0.54 at the start

    def __init__(self):
        rng = np.random.default_rng(0)
        z = rng.normal(size=(256, 8))
        turn, _ = np.linalg.qr(rng.normal(size=(8, 8)))
        self.x = jnp.asarray((z * np.logspace(0, -2, 8)) @ turn, jnp.float32)
        self.y = jnp.asarray(np.sin(z @ rng.normal(size=(8, 2)) / np.sqrt(8)), jnp.float32)
        self.model = Regression()
        self.params = self.model.init(jax.random.key(0), self.x)["params"]
        self.net = kw.instrument(self.model, kw.Gaussian(), self.x, fisher="exact")
        self.least = np.log(2 * np.pi)  # of the mean negative log-likelihood

    def losses(self, tx, steps):
        tx = optax.with_extra_args_support(tx)

        def step(carried, _):
            params, state = carried
            oracle = self.net.oracle(params, self.x, targets=self.y)
            loss, grads = jax.value_and_grad(oracle.loss)(params)
            updates, state = tx.update(grads, state, params, oracle=oracle)
            return (optax.apply_updates(params, updates), state), loss

        start = self.params, tx.init(self.params)
        return jax.lax.scan(step, start, None, length=steps)[1] - self.least

    def steps_to_target(self, losses):
        """Of every run; infinite for one that does not get there."""
        reached = np.asarray(losses) < self.target
        return np.where(reached.any(-1), reached.argmax(-1), np.inf)


@pytest.fixture(scope="module")
def ill_conditioned():
    return IllConditioned()


# Measured: K-FAC 22 steps, SO 26, Q 142, QE 90; Adam at its best rate 1,928; SGD more than 5,000.
STEPS = {"kfac": 40, "so": 45, "q": 190, "qe": 130}
FIRST_ORDER_STEPS = 1500


@pytest.mark.parametrize("name", MEMBERS)
def test_an_ill_conditioned_regression_takes_few_steps(name, ill_conditioned):
    tx = MEMBERS[name](ill_conditioned.net.layers, 0.3, damping=1e-4, refresh_every=1, kl_clip=0.01)
    losses = small_nets.jit(lambda: ill_conditioned.losses(tx, STEPS[name]))()
    assert ill_conditioned.steps_to_target(losses) < STEPS[name]
    assert losses[-1] < ill_conditioned.target


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda rate: optax.sgd(rate, momentum=0.9), [0.03, 0.1, 0.3, 0.5]),
        (optax.adam, [0.003, 0.01, 0.03, 0.1, 0.3]),
    ],
    ids=["SGD with momentum", "Adam"],
)
def test_first_order_methods_crawl_there(make, rates, ill_conditioned):
    """At no rate do they get there in seven times the steps that the slowest member is allowed."""
    run = jax.vmap(lambda rate: ill_conditioned.losses(make(rate), FIRST_ORDER_STEPS))
    losses = small_nets.jit(run)(jnp.array(rates))
    assert (ill_conditioned.steps_to_target(losses) == np.inf).all()
    assert max(STEPS.values()) * 7 < FIRST_ORDER_STEPS
    assert np.nanmin(losses) < 0.05  # they do learn


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 24):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    x = (data.images / 16).astype(np.float32)[..., None]
    split = train_test_split(x, data.target, test_size=0.25, random_state=0, stratify=data.target)
    return [np.asarray(part) for part in split]


BATCH, EPOCHS = 128, 6
REFRESH = 5


@pytest.mark.parametrize("name", MEMBERS)
def test_a_small_cnn_learns_digits_in_six_epochs(name, digits):
    """Sixty steps, with three draws of the Fisher's labels.

    Judged by the median: SO is at 99 % with most draws, and at 84 to 95 % with one in four.
    """
    x, x_test, y, y_test = digits
    model = CNN()
    net = kw.instrument(model, kw.Categorical(), x[:BATCH])
    batches = len(x) // BATCH
    rate = optax.linear_schedule(0.1, 0.01, EPOCHS * batches)
    inner = {"inner_steps": 2, "capacity": 2} if name == "qe" else {}
    tx = MEMBERS[name](
        net.layers, rate, refresh_every=REFRESH, damping=1e-3, kl_clip=0.005, **inner
    )
    params = model.init(jax.random.key(0), x[:1])["params"]

    # QE's inner steps are convolutions in a loop, which only pay if they are compiled well.
    options = small_nets.WELL if name == "qe" else small_nets.QUICKLY

    @functools.partial(jax.jit, compiler_options=options)
    def step(state, x, y, key):
        oracle = net.oracle(state.params, x, targets=y, key=key)
        grads = jax.grad(oracle.loss)(state.params)
        return state.apply_gradients(grads=grads, oracle=oracle)

    accuracies = []
    for labels in jax.random.split(jax.random.key(1), 3):
        state = kw.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        rng = np.random.default_rng(0)
        for epoch in range(EPOCHS):
            order = rng.permutation(len(x))[: batches * BATCH].reshape(batches, BATCH)
            for i, batch in enumerate(order):
                key = jax.random.fold_in(labels, epoch * batches + i)
                state = step(state, x[batch], y[batch], key)
        right = model.apply({"params": state.params}, x_test).argmax(-1) == y_test
        accuracies.append(right.mean())
    assert np.median(accuracies) > 0.97
    scalars = kw.diagnostics(state.opt_state)
    assert scalars["steps"] == EPOCHS * batches
    assert scalars["refreshes"] == -(-EPOCHS * batches // REFRESH)
    assert scalars["rejected_steps"] == scalars["rejected_refreshes"] == scalars["outliers"] == 0
