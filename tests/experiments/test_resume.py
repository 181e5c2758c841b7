"""`kldwrm train`, killed hard at random moments, resumes to the very bits of an undisturbed run."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from kldwrm_jax.experiments import runs

EPOCHS = 40


class Command:
    """`kldwrm train` on a few examples, with sampled labels; the paper's CNN has dropout."""

    def __init__(self, folder, optimizer, model="paper-cnn"):
        self.folder, self.optimizer, self.model = folder, optimizer, model
        rng = np.random.default_rng(0)
        y = np.arange(36) % 3
        shape = (16, 16) if model == "paper-cnn" else (4,)
        x = rng.normal(size=(36, *shape)) + y.reshape(36, *(1 for _ in shape))
        np.savez(folder / "own.npz", x_train=x[:24], y_train=y[:24], x_test=x[24:], y_test=y[24:])
        self.environment = os.environ | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles quickly, and only once
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        }

    def start(self, out, *more):
        words = [
            "train", "--dataset", f"npz:{self.folder / 'own.npz'}", "--model", self.model,
            "--optimizer", self.optimizer, "--epochs", str(EPOCHS), "--batch-size", "8",
            "--fisher", "sampled", "--set", "refresh_every=3", "--learning-rate", "0.05",
            "--out", str(self.folder / out), *more,
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
        return runs.log_path(self.folder / out / f"npz-own-{self.model}-{self.optimizer}", 0)

    def lines(self, out):
        return self.log(out).read_text().count("\n") if self.log(out).exists() else 0

    def kill_after(self, out, lines, delay):
        """Starts or resumes it, and kills it so long after its log has so many lines."""
        with self.start(out, "--resume") as process:
            while process.poll() is None and self.lines(out) < lines:
                time.sleep(0.001)
            time.sleep(delay)
            killed = process.poll() is None
            process.kill()
            process.communicate()
        assert killed, "it was faster than its killer"


def results(run):
    """All that does not depend on the clock."""
    return [{k: v for k, v in epoch.items() if "seconds" not in k} for epoch in run.epochs]


def kill_and_resume(command, kills):
    rng = random.Random(command.optimizer)
    whole = command.finish("whole")
    assert len(whole.epochs) == EPOCHS
    for i in range(kills):
        # From its first line on, and always a little further than the time before.
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
def test_a_run_killed_hard_again_and_again_ends_with_the_same_bits(tmp_path):
    kill_and_resume(Command(tmp_path, "so", "mlp"), kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kfac", "so", "q", "qe"])
def test_every_optimizer_killed_many_times_ends_with_the_same_bits(optimizer, tmp_path):
    kill_and_resume(Command(tmp_path, optimizer), kills=7)
