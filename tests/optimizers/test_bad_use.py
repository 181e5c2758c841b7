"""What cannot work is an error that names it and the way out, before anything is trained."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_nets

import kldwrm_jax as kw

MEMBERS = {"kfac": kw.kfac, "so": kw.so_kldwrm, "q": kw.q_kldwrm, "qe": kw.qe_kldwrm}


class Other(nn.Module):
    """Like the small network, but for a width or a name."""

    width: int = 3
    name_of_last: str = "last"

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(self.width, name="first")(x))
        return nn.Dense(small_nets.OUTPUTS, name=self.name_of_last)(x)


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


def instrumented(model, x, likelihood=None, **options):
    """A network and its parameters."""
    net = kw.instrument(model, likelihood or kw.Categorical(), x, **options)
    return net, model.init(jax.random.key(0), x)["params"]


def update(tx, small, *, grads=None, state=None, params=None, oracle=None):
    """A step with what is right for the small network, but for what is given."""
    tx.update(
        small.params if grads is None else grads,
        tx.init(small.params) if state is None else state,
        small.params if params is None else params,
        oracle=small.oracle(small.params, 0) if oracle is None else oracle,
    )


def test_an_optimizer_made_for_another_model_names_the_parameters_it_does_not_know(small):
    net, _ = instrumented(small_nets.Small(), small.x[0])  # it has a LayerNorm
    _, params = instrumented(Other(name_of_last="head"), small.x[0])
    tx = kw.kfac(net.layers, 0.1)
    with pytest.raises(ValueError, match=r"'head/bias', 'head/kernel' are not among the layers"):
        tx.init(params)


def test_a_width_that_changed_is_named(small):
    net, _ = instrumented(Other(width=5), small.x[0])
    with pytest.raises(
        ValueError, match=r"'first/bias' has shape \(3,\), and \(5,\) in the layers"
    ):
        kw.kfac(net.layers, 0.1).init(small.params)


def test_a_renamed_layer_is_named(small):
    tx = kw.q_kldwrm(small.layers, 0.1)
    renamed = {"first": small.params["first"], "renamed": small.params["last"]}
    with pytest.raises(ValueError, match=r"'renamed/bias', 'renamed/kernel' are not among"):
        tx.init(renamed)
    with pytest.raises(ValueError, match=r"'renamed/bias', 'renamed/kernel' are not among"):
        update(tx, small, grads=renamed)


@pytest.mark.parametrize("name", MEMBERS)
def test_gradients_of_another_structure_are_told_apart_from_the_parameters(name, small):
    tx = MEMBERS[name](small.layers, 0.1)
    part = {"last": small.params["last"]}
    with pytest.raises(ValueError, match=r"the same structure; only one of them has 'first/"):
        update(tx, small, grads=part)
    with pytest.raises(ValueError, match=r"'last/kernel', 'last/bias' share the block 'last'"):
        update(tx, small, grads={"last": {"kernel": part["last"]["kernel"]}})


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "no jit"])
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_an_oracle_of_parameters_of_other_shapes_is_refused(jit, refresh_every, small):
    tx = kw.kfac(small.layers, 0.1, refresh_every=refresh_every)
    net, params = instrumented(Other(width=5), small.x[0])
    oracle = net.oracle(params, small.x[0], targets=small.y[0], key=jax.random.key(0))
    step = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(
        ValueError, match=r"'first/bias' has shape \(5,\), and \(3,\) in the layers"
    ):
        step(small.params, tx.init(small.params), small.params, oracle=oracle)


def test_an_oracle_of_other_blocks_is_refused(small):
    """The parameters are the same, but the biases have blocks of their own."""
    tx = kw.kfac(small.layers, 0.1)
    net, params = instrumented(small.model, small.x[0], bias="separate")
    oracle = net.oracle(params, small.x[0], targets=small.y[0], key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"block 'first' has .* None in the oracle.*the same net"):
        update(tx, small, oracle=oracle)


def test_a_state_of_another_model_is_refused(small):
    net, params = instrumented(small_nets.Small(), small.x[0])
    state = kw.kfac(net.layers, 0.1).init(params)
    with pytest.raises(
        ValueError, match=r"the state has the blocks .*'norm/scale'.*init\(params\)"
    ):
        update(kw.kfac(small.layers, 0.1), small, state=state)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (kw.kfac, kw.so_kldwrm),
        (kw.so_kldwrm, kw.kfac),
        (kw.qe_kldwrm, kw.q_kldwrm),
        (kw.q_kldwrm, kw.qe_kldwrm),
        (kw.so_kldwrm, lambda *args: kw.so_kldwrm(*args, nu=0.1)),
    ],
)
def test_a_state_of_another_member_is_refused(one, another, small):
    state = one(small.layers, 0.1).init(small.params)
    with pytest.raises(ValueError, match=r"another member of the family.*init\(params\)"):
        update(another(small.layers, 0.1), small, state=state)


def test_qe_without_parameters_asks_for_them(small):
    tx = kw.qe_kldwrm(small.layers, 0.1)
    oracle = small.oracle(small.params, 0)
    with pytest.raises(
        ValueError, match=r"needs the parameters for .*QE: tx.update\(grads, state, "
    ):
        tx.update(small.params, tx.init(small.params), oracle=oracle)


def test_an_oracle_without_key_or_targets_says_so_when_it_is_used(small):
    net, params = instrumented(small.model, small.x[0], fisher="sampled")
    tx = kw.kfac(net.layers, 0.1)
    with pytest.raises(ValueError, match=r"fisher='sampled' .*needs a key: net.oracle\("):
        update(tx, small, oracle=net.oracle(params, small.x[0], targets=small.y[0]))
    tx = kw.kfac(small.layers, 0.1)
    with pytest.raises(ValueError, match=r"fisher='empirical' needs targets: net.oracle\("):
        update(tx, small, oracle=small.net.oracle(params, small.x[0]))


@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
def test_an_empty_batch_is_refused(fisher, small):
    net, params = instrumented(small.model, small.x[0], fisher=fisher)
    oracle = net.oracle(params, small.x[0][:0], targets=small.y[0][:0], key=jax.random.key(0))
    with pytest.raises(ValueError, match="the batch is empty"):
        oracle.loss(params)
    with pytest.raises(ValueError, match="the batch is empty"):
        update(kw.kfac(net.layers, 0.1), small, oracle=oracle)


def test_integer_parameters_are_refused(small):
    tx = kw.kfac(small.layers, 0.1)
    whole = jax.tree.map(lambda x: x.astype(jnp.int32), small.params)
    message = r"'first/bias' is of type int32, and only real floating-point numbers"
    with pytest.raises(ValueError, match=message):
        tx.init(whole)
    with pytest.raises(ValueError, match=message):
        update(tx, small, grads=whole)
    complex_ones = jax.tree.map(lambda x: x.astype(jnp.complex64), small.params)
    with pytest.raises(ValueError, match="'first/bias' is of type complex64"):
        tx.init(complex_ones)


# --- A likelihood that does not fit the outputs ---------------------------------------------------


def test_labels_beyond_the_logits_are_refused_where_they_can_be_seen():
    labels = np.array([0, 6, 9, 1])
    with pytest.raises(ValueError, match=r"below the number of logits, 7, got 9: give the model"):
        kw.Categorical().nll(jnp.zeros((4, 7)), labels)
    # 6 is the largest that fits.
    assert np.isfinite(kw.Categorical().nll(jnp.zeros((4, 7)), np.minimum(labels, 6))).all()


def test_labels_beyond_the_logits_on_the_device_stop_the_training_and_are_counted(small):
    tx = kw.q_kldwrm(small.layers, 0.1, refresh_every=1)

    @small_nets.jit
    def step(params, state, y):
        oracle = small.net.oracle(params, small.x[0], targets=y)
        loss, grads = jax.value_and_grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return loss, updates, state

    loss, updates, state = step(small.params, tx.init(small.params), jnp.full(16, 9))
    assert np.isnan(loss)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert kw.diagnostics(state)["rejected_steps"] == 1


@pytest.mark.parametrize(
    ("likelihood", "targets", "message"),
    [
        (kw.Categorical(), np.zeros((16, 3)), r"integer class indices of shape \(16,\)"),
        (kw.Categorical(), np.zeros(15, int), r"integer class indices of shape \(16,\)"),
        (kw.Gaussian(), np.zeros(16), r"the shape of the outputs, \(16, 3\), got \(16,\)"),
        (kw.Bernoulli(), np.zeros((16, 1)), r"the shape of the outputs, \(16, 3\), got \(16, 1\)"),
    ],
)
def test_targets_of_another_form_than_the_outputs_are_refused(likelihood, targets, message, small):
    net, params = instrumented(small.model, small.x[0], likelihood, fisher="empirical")
    oracle = net.oracle(params, small.x[0], targets=targets)
    with pytest.raises(ValueError, match=message):
        oracle.loss(params)
    with pytest.raises(ValueError, match=message):
        update(kw.kfac(net.layers, 0.1), small, oracle=oracle)


@pytest.mark.parametrize("oracle", [(1, 2), "oracle", 1.0])
def test_what_is_no_oracle_is_refused(oracle, small):
    with pytest.raises(ValueError, match=f"made by net.oracle.*got a {type(oracle).__name__}"):
        update(kw.kfac(small.net.layers, 0.1), small, oracle=oracle)
