"""Training states: our own, Flax's, and NNX's optimizer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets
from flax import nnx
from flax.training import train_state

import kldwrm_jax as kw

as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name before flax 0.12.7

MEMBERS = [kw.kfac, kw.so_kldwrm, kw.q_kldwrm, kw.qe_kldwrm]
# Trained with nothing set, and with a rate.
TRAINED = [(kw.kfac, None), (kw.kfac, 0.3), (kw.qe_kldwrm, 0.3)]
MORE = [(kw.q_kldwrm, None), (kw.so_kldwrm, 0.3), (kw.q_kldwrm, 0.3)]
each_trained = pytest.mark.parametrize(
    ("make", "rate"), TRAINED + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


def create(problem, tx, cls=kw.TrainState, **fields):
    return cls.create(apply_fn=problem.model.apply, params=problem.params, tx=tx, **fields)


@each_trained
def test_the_train_state_trains(make, rate, small):
    tx = optax.chain(optax.add_decayed_weights(1e-3), make(small.layers, rate, refresh_every=3))

    @small_nets.jit
    def step(state, k):
        oracle = small.oracle(state.params, k)
        loss, grads = jax.value_and_grad(oracle.loss)(state.params)
        return state.apply_gradients(grads=grads, oracle=oracle), loss

    state = create(small, tx)
    losses = []
    for k in range(30):
        state, loss = step(state, k)
        losses.append(loss)
    assert state.step == 30
    assert kw.diagnostics(state.opt_state)["steps"] == 30
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])


class Counting(kw.TrainState):
    """A user's own state, with a field and a static one."""

    batch_stats: dict
    note: str = ""


def recording(seen):
    """A transform that keeps what it was given."""

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_keywords_that_name_fields_are_replaced_and_all_others_go_to_the_transform(small):
    seen = {}
    state = create(small, recording(seen), Counting, batch_stats={"mean": 0.0})
    grads = jax.tree.map(jnp.ones_like, small.params)
    after = state.apply_gradients(
        grads=grads, oracle="an oracle", value=3.0, batch_stats={"mean": 1.0}, note="new"
    )
    assert seen == {"oracle": "an oracle", "value": 3.0}
    assert after.batch_stats == {"mean": 1.0}
    assert after.note == "new"
    assert after.step == 1
    assert after.tx is state.tx
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b + 1), after.params, small.params)
    assert state.batch_stats == {"mean": 0.0}


def test_transforms_that_take_no_extra_arguments_are_not_given_them(small):
    grads = jax.tree.map(jnp.ones_like, small.params)
    after = create(small, optax.sgd(0.1)).apply_gradients(grads=grads, oracle=None)
    expected = create(small, optax.sgd(0.1), train_state.TrainState).apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, after.params, expected.params)


def test_gradients_that_overwrite_are_treated_as_flax_does():
    """Flax's own train state takes `_overwrite_with_gradient` (fp8 scales) as they are."""
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.array([7.0])}}
    ours, theirs = (
        cls.create(apply_fn=None, params=params, tx=optax.sgd(0.1)).apply_gradients(grads=grads)
        for cls in (kw.TrainState, train_state.TrainState)
    )
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert ours.params["_overwrite_with_gradient"]["scale"] == 7


@pytest.mark.parametrize("make", MEMBERS)
@pytest.mark.parametrize("given", [True, False], ids=["with oracle", "without"])
def test_a_plain_flax_train_state_gives_an_error_that_names_ours(make, given, small):
    state = create(small, optax.chain(make(small.layers, 0.1)), train_state.TrainState)
    extra = {"oracle": small.oracle(small.params, 0)} if given else {}
    with pytest.raises(ValueError, match=r"kldwrm_jax\.TrainState"):
        state.apply_gradients(grads=small.params, **extra)


@each_trained
def test_an_nnx_optimizer_trains_a_model(make, rate, small):
    """nnx.Optimizer.update forwards keywords; the model here is a bridged Linen one."""
    x, y = jnp.asarray(small.x[0]), jnp.asarray(small.y[0])
    model = nnx.bridge.ToNNX(small.model, rngs=nnx.Rngs(0)).lazy_init(x)
    optimizer = nnx.Optimizer(model, make(small.layers, rate, refresh_every=3), wrt=nnx.Param)

    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def step(model, optimizer):
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        oracle = small.net.oracle(params, x, targets=y)
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads, oracle=oracle)
        return loss

    losses = [step(model, optimizer) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.step[...] == 15
    told = kw.diagnostics(as_pure(optimizer.opt_state))
    assert told["steps"] == 15
    assert told["refreshes"] == 5


def test_boxed_parameters_are_updated_in_their_boxes():
    """nn.with_partitioning puts parameters into boxes: a step keeps them."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model, x, y = nn.Dense(3, kernel_init=init), jnp.eye(4), jnp.array([0, 1, 2, 0])
    net = kw.instrument(model, kw.Categorical(), x, fisher="empirical")
    params = model.init(jax.random.key(0), x)["params"]
    assert isinstance(params["kernel"], nn.Partitioned)
    state = kw.TrainState.create(
        apply_fn=model.apply, params=params, tx=kw.qe_kldwrm(net.layers, 0.1, capacity=1)
    )

    @small_nets.jit
    def step(state):
        oracle = net.oracle(state.params, x, targets=y)
        grads = jax.grad(oracle.loss)(state.params)
        return state.apply_gradients(grads=grads, oracle=oracle), oracle.loss(state.params)

    state, first = step(state)
    state, second = step(state)
    assert isinstance(state.params["kernel"], nn.Partitioned)
    assert second < first
