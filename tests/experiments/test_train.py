"""`kldwrm train`: what it writes, and that a run killed at random moments resumes to the bit."""

import os
import random
import subprocess
import sys
import time

import idx_files
import pytest

from kldwrm_jax.experiments import cli, runs


def test_every_optimizer_and_seed_has_a_log_and_resumes(tmp_path, capsys):
    command = [
        "train", "--model", "mlp", "--optimizer", "sgd", "kfac", "--epochs", "2", "--seeds", "2",
        "--set", "weight_decay", "0", "--learning-rate", "0.05", "--out", str(tmp_path),
    ]  # fmt: skip
    assert cli.main(command) == 0
    found = runs.read_all(tmp_path)
    names = [(run.path.parent.name, run.header["seed"]) for run in found]
    assert names == [(f"digits-mlp-{name}", i) for name in ("kfac", "sgd") for i in (0, 1)]
    assert all(len(run.epochs) == 2 and run.finished for run in found)
    for run in found:
        arguments = run.header["setting"]["arguments"]
        assert (arguments["weight_decay"], arguments["learning_rate"]) == (0, 0.05)
    assert cli.main(command) == 1
    assert "--resume" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    assert runs.read_all(tmp_path) == found


def test_the_network_and_the_batch_follow_the_data(tmp_path, monkeypatch):
    idx_files.write(tmp_path / "data", side=28)
    monkeypatch.setenv("KLDWRM_DATA", str(tmp_path / "data"))
    out = ["--epochs", "1", "--optimizer", "sgd", "--out", str(tmp_path / "runs")]
    assert cli.main(["train", "--dataset", "mnist", *out]) == 0
    assert cli.main(["train", *out, "--first-seed", "5"]) == 0
    digits, mnist = runs.read_all(tmp_path / "runs")
    assert (mnist.header["model"], mnist.header["batch_size"]) == ("paper-cnn", 24)
    assert (digits.header["model"], digits.header["batch_size"]) == ("cnn", 512)
    assert digits.header["seed"] == 5


def test_arguments_of_the_optimizer_are_numbers_words_or_none(tmp_path):
    values = ["--set", "rho", "0.7", "refresh_every", "2", "kl_clip", "None", "solver", "exact"]
    command = ["train", "--model", "mlp", "--optimizer", "q", "--epochs", "1", *values]
    assert cli.main([*command, "--out", str(tmp_path)]) == 0
    (run,) = runs.read_all(tmp_path)
    expected = {"rho": 0.7, "refresh_every": 2, "kl_clip": None, "solver": "exact"}
    assert run.header["setting"]["arguments"].items() >= expected.items()


EPOCHS = 40


class Command:
    """`kldwrm train` on a few examples, with sampled labels; the paper's CNN has dropout."""

    def __init__(self, folder, optimizer, model="paper-cnn"):
        self.folder, self.optimizer, self.model = folder, optimizer, model
        idx_files.write(folder / "data", train=24, test=12, side=16)
        self.environment = os.environ | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles quickly, and only once
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        }

    def start(self, out, *more):
        words = [
            "train", "--dataset", "mnist", "--data-dir", str(self.folder / "data"),
            "--model", self.model, "--optimizer", self.optimizer, "--epochs", str(EPOCHS),
            "--batch-size", "8", "--fisher", "sampled", "--set", "refresh_every", "3",
            "--learning-rate", "0.05", "--out", str(self.folder / out), *more,
        ]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "kldwrm_jax.experiments.cli", *words],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, out, *more):
        with self.start(out, *more) as process:
            _, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        return runs.read(self.log(out))

    def log(self, out):
        return runs.log_path(self.folder / out / f"mnist-{self.model}-{self.optimizer}", 0)

    def lines(self, out):
        return self.log(out).read_text().count("\n") if self.log(out).exists() else 0

    def kill_after(self, out, lines, delay):
        """Starts or resumes it, and kills it some time after its log has so many lines."""
        with self.start(out, "--resume") as process:
            while process.poll() is None and self.lines(out) < lines:
                time.sleep(0.001)
            time.sleep(delay)
            killed = process.poll() is None
            process.kill()
            process.communicate()
        assert killed, "it finished before it was killed"


def results(run):
    """Everything that does not depend on the clock."""
    return [{k: v for k, v in epoch.items() if "seconds" not in k} for epoch in run.epochs]


def kill_and_resume(command, kills):
    rng = random.Random(command.optimizer)
    whole = command.finish("whole")
    assert len(whole.epochs) == EPOCHS
    for i in range(kills):
        # From its first line on, and a little further each time.
        command.kill_after("killed", 1 + i * EPOCHS // (kills + 1), 0.02 * rng.random())
        left = runs.read(command.log("killed"))
        assert not left.finished
    resumed = command.finish("killed", "--resume")
    assert resumed.end["params_sha256"] == whole.end["params_sha256"]
    assert resumed.end["diagnostics"] == whole.end["diagnostics"]
    assert results(resumed) == results(whole)
    # Nothing is left but the log.
    assert list(resumed.path.parent.iterdir()) == [resumed.path]


@pytest.mark.outside
def test_a_run_killed_repeatedly_ends_with_the_same_bits(tmp_path):
    kill_and_resume(Command(tmp_path, "so", "mlp"), kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kfac", "so", "q", "qe"])
def test_every_optimizer_killed_many_times_ends_with_the_same_bits(optimizer, tmp_path):
    kill_and_resume(Command(tmp_path, optimizer), kills=7)
