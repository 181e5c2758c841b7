import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw
from kldwrm_jax.experiments import models, recipes, runs, training
from kldwrm_jax.experiments.data import Dataset
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.training import Spec, Watcher


@pytest.fixture(scope="module")
def blobs():
    """Three classes that an MLP learns in a few steps."""
    rng = np.random.default_rng(0)
    y = np.arange(70) % 3
    x = (rng.normal(size=(70, 4)) + 2 * np.eye(3, 4)[y]).astype(np.float32)
    y = y.astype(np.int32)
    mean, std = float(x[:50].mean()), float(x[:50].std())
    return Dataset("blobs", x[:50], y[:50], x[50:], y[50:], mean, std)


SPEC = Spec(
    "blobs",
    "mlp",
    recipes.setting("q", {"learning_rate": 0.1, "refresh_every": 3}),
    epochs=4,
    batch_size=16,
    fisher="sampled",
)


@pytest.fixture(scope="module")
def trainer(blobs):
    return training.prepare(SPEC, blobs)


def results(run):
    """All that does not depend on the clock."""
    return [{k: v for k, v in epoch.items() if "seconds" not in k} for epoch in run.epochs]


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory):
    return training.train(trainer, 1, tmp_path_factory.mktemp("whole"))


class Killer(Watcher):
    """Ctrl-C after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [1, 3, 7, 9])
def test_a_killed_run_resumes_to_the_very_numbers_of_one_that_was_not(
    steps, trainer, whole, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(steps))
    left = runs.read(runs.log_path(tmp_path, 1))
    assert len(left.epochs) == (steps - 1) // trainer.steps_per_epoch
    resumed = training.train(trainer, 1, tmp_path, resume=True)
    assert results(resumed) == results(whole)
    assert resumed.end["diagnostics"] == whole.end["diagnostics"]
    assert resumed.end["params_sha256"] == whole.end["params_sha256"]
    assert resumed.finished


def test_a_run_killed_between_log_and_checkpoint_loses_an_epoch_only(trainer, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(4))
    checkpoint = runs.checkpoint_path(runs.log_path(tmp_path, 1))
    old = checkpoint.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, resume=True, watcher=Killer(4))
    checkpoint.write_bytes(old)
    assert len(runs.read(runs.log_path(tmp_path, 1)).epochs) == 2
    assert results(training.train(trainer, 1, tmp_path, resume=True)) == results(whole)


def test_a_checkpoint_that_is_ahead_of_its_log_is_refused(trainer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(7))
    log = runs.log_path(tmp_path, 1)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UsageError, match=r"is of epoch 2, and .* ends with epoch 1: delete"):
        training.train(trainer, 1, tmp_path, resume=True)


def test_a_checkpoint_whose_log_is_gone_is_not_taken_for_that_of_a_new_run(
    trainer, whole, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(7))
    runs.log_path(tmp_path, 1).unlink()
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(1))
    assert results(training.train(trainer, 1, tmp_path, resume=True)) == results(whole)


def test_data_that_changed_under_the_same_name_are_refused(trainer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, 1, tmp_path, watcher=Killer(4))
    other = dataclasses.replace(trainer, data_sha256="0" * 64)
    with pytest.raises(UsageError, match=r"data_sha256 = '\w{64}', not '0{64}'"):
        training.train(other, 1, tmp_path, resume=True)


def test_a_run_matches_a_training_loop_that_a_user_would_write(trainer, whole, blobs):
    model = models.build("mlp", (4,), 3)
    x = jnp.asarray((blobs.train_x - blobs.mean) / blobs.std)
    y = jnp.asarray(blobs.train_y)
    net = kw.instrument(model, kw.Categorical(), x, bias="separate")
    tx = kw.q_kldwrm(net.layers, **SPEC.setting.arguments)
    params = small_nets.jit(model.init)(jax.random.key(1), x)["params"]
    state = tx.init(params)

    @small_nets.jit
    def step(params, state, x, y, key):
        loss, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for epoch in range(SPEC.epochs):
        order = np.random.default_rng([1, epoch]).permutation(50)
        for batch in order[:48].reshape(3, 16):
            key = jax.random.split(jax.random.fold_in(jax.random.key(1), len(losses)))[1]
            params, state, loss = step(params, state, x[batch], y[batch], key)
            losses.append(loss)
    means = np.reshape(losses, (SPEC.epochs, 3)).mean(axis=1)
    np.testing.assert_allclose(whole.curve("train_loss"), means, rtol=1e-3)
    for protocol, test_x in {
        "paper": blobs.test_x,
        "corrected": (blobs.test_x - blobs.mean) / blobs.std,
    }.items():
        logits = model.apply({"params": params}, test_x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, blobs.test_y).mean()
        accuracy = (logits.argmax(-1) == blobs.test_y).mean()
        assert whole.curve("loss", protocol)[-1] == pytest.approx(float(loss), rel=1e-2)
        assert whole.curve("accuracy", protocol)[-1] == pytest.approx(float(accuracy))


def test_it_learns(whole):
    losses = whole.curve("train_loss")
    assert losses[-1] < 0.7 * losses[0]


def test_test_data_in_several_chunks_count_once(monkeypatch, blobs, trainer):
    params = trainer.init(jax.random.key(0)).params
    expected = trainer.test(params)
    monkeypatch.setattr(training, "_TEST_CHUNK", 8)  # 20 images: the last chunk is padded
    x, y = training._chunks(blobs.test_x, blobs.test_y)
    assert x.shape == (3, 8, 4)
    chunked = dataclasses.replace(trainer, test_x=x, test_y=y).test(params)
    for protocol, metrics in expected.items():
        assert chunked[protocol] == pytest.approx(metrics)


def test_the_log_says_all_there_is_to_say(whole):
    assert whole.header["setting"] == dataclasses.asdict(SPEC.setting)
    assert whole.header["seed"] == 1
    assert set(whole.header) >= {"versions", "machine", "dataset", "model", "batch_size"}
    for clock in ("seconds", "cpu_seconds"):
        seconds = whole.curve(clock)
        assert 0 < seconds[0] < seconds[-1] == whole.end[clock]
    assert whole.end["compile_seconds"] > 0
    assert whole.end["diagnostics"]["steps"] == whole.epochs[-1]["steps"] == 12
    assert not runs.checkpoint_path(whole.path).exists()


def test_seeds_share_one_compiled_step_and_finished_runs_need_none(
    blobs, trainer, monkeypatch, tmp_path
):
    prepared = []

    def prepare(*args):
        prepared.append(args)
        return trainer

    monkeypatch.setattr(training, "prepare", prepare)
    done = training.train_seeds(SPEC, blobs, (0, 1), tmp_path)
    assert len(prepared) == 1
    assert done[0].curve("train_loss") != done[1].curve("train_loss")
    assert training.train_seeds(SPEC, blobs, (0, 1), tmp_path, resume=True) == done
    assert len(prepared) == 1


def test_a_log_is_not_overwritten(trainer, tmp_path):
    training.train(trainer, 0, tmp_path)
    with pytest.raises(UsageError, match="--resume"):
        training.train(trainer, 0, tmp_path)
    other = dataclasses.replace(trainer, spec=dataclasses.replace(SPEC, epochs=9))
    with pytest.raises(UsageError, match="epochs = 4, not 9"):
        training.train(other, 0, tmp_path, resume=True)


def test_a_batch_larger_than_the_data_is_refused(blobs):
    with pytest.raises(UsageError, match="50 training examples"):
        training.prepare(dataclasses.replace(SPEC, batch_size=51), blobs)
