"""Training runs: a log line and a checkpoint per epoch, resumable to the same bits."""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

import kldwrm_jax as kw
from kldwrm_jax.experiments import models, provenance, recipes, runs
from kldwrm_jax.experiments.checkpoints import Checkpoints
from kldwrm_jax.experiments.data import Dataset
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.learner import Learner, State
from kldwrm_jax.experiments.progress import progress_bars
from kldwrm_jax.experiments.runs import Record, Run

_CLOCKS = ("seconds", "cpu_seconds")


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything a run depends on except its seed and the data themselves."""

    dataset: str
    model: str
    setting: recipes.Setting
    epochs: int
    batch_size: int = 512
    fisher: str = "empirical"
    bias: str = "separate"


def train_seeds(
    spec: Spec,
    dataset: Dataset,
    seeds: Sequence[int],
    folder: Path,
    *,
    resume: bool = False,
    checkpoint: bool = True,
    progress: Progress | None = None,
) -> list[Run]:
    """Trains several seeds with one compiled step; finished runs are only read.

    The logs are ``folder/seed-N.jsonl``. With ``resume``, those that are there are continued;
    without, they are an error. A run that is killed and resumed gives the same bits as an
    uninterrupted one, provided that it saves a ``checkpoint`` after every epoch.
    """
    progress = progress or progress_bars()
    bar = progress.add_task(spec.setting.title, total=len(seeds), note="compiling")
    trainer, done = None, []
    for seed in seeds:
        log, identity = runs.log_path(folder, seed), {"seed": seed, **dataclasses.asdict(spec)}
        run = runs.read(log) if log.exists() else None
        if run is None:
            shutil.rmtree(log.with_suffix(".checkpoint"), ignore_errors=True)
        elif resume:
            fix = "resume it with the same settings, or choose another --out"
            runs.check_same(log, run.header, identity, fix)
        else:
            raise UsageError(f"{log} exists: add --resume, or choose another --out")
        if run is None or not run.finished:
            trainer = trainer or Trainer(spec, dataset)
            run = trainer.train(log, identity, checkpoint, progress)
        done.append(run)
        progress.update(bar, advance=1, note="")
    return done


class Trainer:
    """Trains the seeds of a spec, one after another, with programs compiled once."""

    def __init__(self, spec: Spec, dataset: Dataset) -> None:
        examples, mean, std = len(dataset.train_y), dataset.mean, dataset.std
        if spec.epochs < 1 or not 1 <= spec.batch_size <= examples:
            limits = f"--epochs must be positive, and --batch-size at most {examples}, the"
            raise UsageError(f"{limits} training examples; got {spec.epochs}, {spec.batch_size}")
        x, y = (dataset.train_x - mean) / std, dataset.train_y
        test_x, self.test_y = dataset.test_x, jnp.asarray(dataset.test_y)
        self.test_x = {"paper": test_x, "corrected": (test_x - mean) / std}
        self.spec, self.data, self.likelihood = spec, (x, y), kw.Categorical()
        self.data_sha256 = provenance.fingerprint((x, y, self.test_x, self.test_y))
        model = models.build(spec.model, x.shape[1:], classes=int(y.max()) + 1)
        batch = x[: spec.batch_size], y[: spec.batch_size]
        options: Any = {"fisher": spec.fisher, "bias": spec.bias, "train": {"train": True}}
        self.learner = Learner(model, self.likelihood, self._transform, batch, **options)

    def _transform(self, layers: Any, rate: Any) -> Any:
        return recipes.transform(self.spec.setting, layers)

    def train(self, log: Path, identity: Record, checkpoint: bool, progress: Progress) -> Run:
        """Trains one seed to the end, from its checkpoint if there is one."""
        epochs, seed = self.spec.epochs, identity["seed"]
        about = {**identity, "data_sha256": self.data_sha256}
        saved = Checkpoints(log.with_suffix(".checkpoint"), about)
        state, records = saved.load(self.learner.init(jax.random.key(seed), 0.0))
        runs.rewrite(log, [{"kind": "run", **identity, **provenance.record()}, *records])
        title = f"{self.spec.setting.title}, seed {seed}"
        bar = progress.add_task(title, total=epochs, completed=len(records), note="")
        for epoch in range(len(records), epochs):
            state, record = self._epoch(state, seed, epoch, progress)
            for clock in _CLOCKS:  # of the whole run
                record[clock] += records[-1][clock] if records else 0.0
            records.append(record)
            runs.append(log, record)
            if checkpoint:
                saved.save(state, records)
            accuracy = [f"{name} {test['accuracy']:.2%}" for name, test in record["test"].items()]
            progress.update(bar, advance=1, note=f"test accuracy: {', '.join(accuracy)}")
        curvature = self.spec.setting.optimizer in recipes.SOLVERS
        diagnostics = kw.diagnostics(state.opt_state) if curvature else {}
        end = {
            "kind": "end",
            **{clock: records[-1][clock] for clock in _CLOCKS},
            "compile_seconds": self.learner.compile_seconds,
            "params_sha256": provenance.fingerprint(state.params),
            "diagnostics": {name: runs.number(value) for name, value in diagnostics.items()},
        }
        runs.append(log, end)
        saved.delete()
        progress.remove_task(bar)
        accuracy = records[-1]["test"]["corrected"]["accuracy"]
        progress.console.print(f"{title}: {end['seconds']:.1f} s, test accuracy {accuracy:.2%}")
        return runs.read(log)

    def _epoch(self, state: State, seed: int, epoch: int, progress: Progress) -> Any:
        key, (x, y), size = jax.random.key(seed), self.data, self.spec.batch_size
        steps, losses = len(y) // size, []
        # The order depends on seed and epoch only, so that a run can resume.
        order = np.random.default_rng([seed, epoch]).permutation(len(y))[: steps * size]
        bar = progress.add_task(f"  epoch {epoch + 1}", total=steps, note="")
        started, cpu_started = time.perf_counter(), time.process_time()
        for chosen in order.reshape(steps, size):
            state, loss = self.learner.step(state, 0.0, key, x[chosen], y[chosen])
            # Blocks, so that the progress bar is accurate and Ctrl-C acts at once.
            losses.append(jax.block_until_ready(loss))
            progress.advance(bar)
        progress.remove_task(bar)
        return state, {
            "kind": "epoch",
            "epoch": epoch + 1,
            "steps": (epoch + 1) * steps,
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "train_loss": runs.number(np.mean(jax.device_get(losses))),
            "test": {protocol: self.test(state, x) for protocol, x in self.test_x.items()},
        }

    def test(self, state: State, x: np.ndarray) -> Record:
        """Accuracy and mean loss on test images."""
        logits = self.learner.outputs(state.params, x)
        loss = self.likelihood.nll(logits, self.test_y).mean()
        accuracy = (logits.argmax(-1) == self.test_y).mean()
        return {"accuracy": runs.number(accuracy), "loss": runs.number(loss)}
