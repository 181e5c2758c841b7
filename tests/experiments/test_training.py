import dataclasses
import shutil

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
from kldwrm_jax.experiments.progress import progress_bars
from kldwrm_jax.experiments.training import Spec, Trainer, train_seeds


@pytest.fixture(scope="module")
def blobs():
    """Three classes that an MLP learns in a few steps."""
    rng = np.random.default_rng(0)
    y = np.arange(70) % 3
    x = (rng.normal(size=(70, 4)) + 2 * np.eye(3, 4)[y]).astype(np.float32).reshape(70, 2, 2, 1)
    y = y.astype(np.int32)
    mean, std = float(x[:50].mean()), float(x[:50].std())
    return Dataset("blobs", x[:50], y[:50], x[50:], y[50:], mean, std)


SPEC = Spec(
    "blobs",
    "mlp",
    recipes.setting("q", {"learning_rate": 0.02, "refresh_every": 3}),
    epochs=4,
    batch_size=16,
    fisher="sampled",
)
NOTHING_SET = {"learning_rate": None, "damping": None, "momentum": None, "kl_clip": None}
UNSET = dataclasses.replace(
    SPEC, setting=recipes.setting("kfac", NOTHING_SET | {"weight_decay": 0.0, "refresh_every": 3})
)


def results(run):
    """Everything that does not depend on the clock."""
    return [{k: v for k, v in epoch.items() if "seconds" not in k} for epoch in run.epochs]


@pytest.fixture(scope="module")
def trainer(blobs):
    return Trainer(SPEC, blobs)


@pytest.fixture
def train(trainer, blobs, tmp_path, monkeypatch):
    """Trains seed 1, with programs compiled once, and may be interrupted after some steps."""
    monkeypatch.setattr(training, "Trainer", lambda *_: trainer)

    def train(spec=SPEC, seeds=(1,), folder=tmp_path, kill_after=None, **options):
        bars, left = progress_bars(), kill_after

        def advance(task, advance=1.0):
            nonlocal left
            left = left and left - 1
            if left == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(bars, "advance", advance)
        return train_seeds(spec, blobs, seeds, folder, progress=bars, **options)

    return train


@pytest.fixture(scope="module")
def whole(trainer, blobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "Trainer", lambda *_: trainer)
        return train_seeds(SPEC, blobs, [1], folder)[0]


def log_and_checkpoint(folder):
    log = runs.log_path(folder, 1)
    return log, log.with_suffix(".checkpoint")


@pytest.mark.parametrize("steps", [1, 3, 7, 9])
def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(steps, train, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=steps)
    left = runs.read(runs.log_path(tmp_path, 1))
    assert len(left.epochs) == (steps - 1) // 3
    (resumed,) = train(resume=True)
    assert results(resumed) == results(whole)
    assert resumed.end["diagnostics"] == whole.end["diagnostics"]
    assert resumed.end["params_sha256"] == whole.end["params_sha256"]
    assert resumed.finished


def test_a_run_with_nothing_set_that_is_killed_resumes_to_the_same_bits(
    blobs, train, tmp_path, monkeypatch
):
    trainer = Trainer(UNSET, blobs)
    monkeypatch.setattr(training, "Trainer", lambda *_: trainer)
    (whole,) = train(UNSET, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(UNSET, kill_after=8)
    assert len(runs.read(runs.log_path(tmp_path, 1)).epochs) == 2
    (resumed,) = train(UNSET, resume=True)
    assert results(resumed) == results(whole)
    assert resumed.end["diagnostics"] == whole.end["diagnostics"]
    assert resumed.end["params_sha256"] == whole.end["params_sha256"]
    assert resumed.end["diagnostics"]["kl_limit"] > 0  # the steps did set themselves
    losses = whole.curve("train_loss")
    assert losses[-1] < 0.7 * losses[0]


def test_a_resumed_run_continues_from_its_last_epoch(train, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=7)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=3, resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=6, resume=True)  # two epochs were completed before, one since
    (resumed,) = train(resume=True)
    assert len(resumed.epochs) == 4


def test_a_run_killed_between_log_and_checkpoint_loses_one_epoch_only(train, whole, tmp_path):
    log, checkpoint = log_and_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=4)
    shutil.copytree(checkpoint, tmp_path / "old")
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=4, resume=True)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "old", checkpoint)
    assert len(runs.read(log).epochs) == 2
    assert results(train(resume=True)[0]) == results(whole)


def test_a_log_that_lost_epochs_is_restored_from_the_checkpoint(train, whole, tmp_path):
    log, _ = log_and_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=7)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    assert results(train(resume=True)[0]) == results(whole)


def test_a_checkpoint_whose_log_is_gone_is_not_used(train, whole, tmp_path):
    log, _ = log_and_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=7)
    log.unlink()
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=1)
    assert runs.read(log).epochs == ()
    assert results(train(resume=True)[0]) == results(whole)


def test_a_damaged_checkpoint_is_reported(train, tmp_path):
    _, checkpoint = log_and_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=7)
    for file in checkpoint.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(UsageError, match=r"seed-1\.checkpoint is damaged.*delete it"):
        train(resume=True)


def test_data_that_changed_under_the_same_name_are_refused(train, trainer, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=4)
    monkeypatch.setattr(trainer, "data_sha256", "0" * 64)
    with pytest.raises(UsageError, match=r"data_sha256 = '\w{64}', not '0{64}'"):
        train(resume=True)


def test_a_run_matches_a_training_loop_that_a_user_would_write(whole, blobs):
    model = models.build("mlp", (2, 2, 1), 3)
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


def test_the_log_holds_settings_seed_provenance_and_clocks(whole):
    assert whole.header["setting"] == dataclasses.asdict(SPEC.setting)
    assert whole.header["seed"] == 1
    assert whole.header.keys() >= {"versions", "machine", "git_revision", "dataset", "model"}
    for clock in ("seconds", "cpu_seconds"):
        seconds = whole.curve(clock)
        assert 0 < seconds[0] < seconds[-1] == whole.end[clock]
    assert whole.end["compile_seconds"] > 0
    assert whole.end["diagnostics"]["steps"] == whole.epochs[-1]["steps"] == 12
    assert list(whole.path.parent.iterdir()) == [whole.path]


def test_seeds_share_one_compiled_step_and_finished_runs_need_none(
    blobs, trainer, monkeypatch, tmp_path
):
    compiled = []
    monkeypatch.setattr(training, "Trainer", lambda *args: compiled.append(args) or trainer)
    done = train_seeds(SPEC, blobs, (0, 1), tmp_path)
    assert len(compiled) == 1
    assert done[0].curve("train_loss") != done[1].curve("train_loss")
    assert train_seeds(SPEC, blobs, (0, 1), tmp_path, resume=True) == done
    assert len(compiled) == 1


def test_a_run_without_checkpoints_gives_the_same_bits(train, whole, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("saved a checkpoint")

    monkeypatch.setattr(training.Checkpoints, "save", fail)
    (run,) = train(checkpoint=False)
    assert run.end["params_sha256"] == whole.end["params_sha256"]
    assert list(tmp_path.iterdir()) == [run.path]


def test_a_log_is_not_overwritten(train):
    train()
    with pytest.raises(UsageError, match="--resume"):
        train()
    with pytest.raises(UsageError, match="epochs = 4, not 9"):
        train(dataclasses.replace(SPEC, epochs=9), resume=True)


@pytest.mark.parametrize("change", [{"batch_size": 51}, {"batch_size": 0}, {"epochs": 0}])
def test_impossible_sizes_are_refused(change, blobs):
    with pytest.raises(UsageError, match=r"--epochs must be positive.* 50, the training examples"):
        Trainer(dataclasses.replace(SPEC, **change), blobs)
