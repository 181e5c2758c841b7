"""A training run: one compiled step for all seeds, a log line and a checkpoint every epoch."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import kldwrm_jax as kw
from kldwrm_jax.experiments import checkpoints, models, recipes, runs
from kldwrm_jax.experiments.checkpoints import Checkpoint
from kldwrm_jax.experiments.data import Dataset
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.provenance import fingerprint
from kldwrm_jax.experiments.recipes import Setting
from kldwrm_jax.experiments.runs import Record, Run

_TEST_CHUNK = 1000  # images evaluated at once
_CLOCKS = ("seconds", "cpu_seconds")  # of training alone; the second does not see other programs


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything a run depends on but its seed and the data themselves."""

    dataset: str
    model: str
    setting: Setting
    epochs: int
    batch_size: int = 512
    fisher: str = "empirical"
    bias: str = "separate"

    def record(self) -> Record:
        """As it stands in a log."""
        return {**dataclasses.asdict(self), "setting": dataclasses.asdict(self.setting)}


class State(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any
    step: jax.Array


class Watcher:
    """Is told how a run goes; does nothing. See :mod:`kldwrm_jax.experiments.progress`."""

    def compiling(self) -> None:
        """Programs are about to be compiled."""

    def start(self, title: str, seed: int, epochs: int, steps: int, done: int) -> None:
        """A run of ``epochs`` epochs of ``steps`` steps begins, of which ``done`` are done."""

    def step(self) -> None:
        """A step was taken."""

    def epoch(self, header: Record, record: Record) -> None:
        """An epoch ended."""

    def end(self, header: Record, record: Record) -> None:
        """The run ended."""

    def skip(self) -> None:
        """The run was finished before."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """A spec's programs, compiled once for all seeds, and its data. Made by :func:`prepare`."""

    spec: Spec
    train_x: jax.Array  # normalised
    train_y: jax.Array
    test_x: jax.Array  # (chunks, chunk, ...), as they are
    test_y: jax.Array  # (chunks, chunk), -1 for padding
    data_sha256: str  # of the data as they came
    moments: dict[str, tuple[float, float]]  # by protocol, what test images are normalised by
    init: Callable[[jax.Array], State]
    step: Callable[..., tuple[State, jax.Array]]
    evaluate: Callable[..., tuple[jax.Array, jax.Array]]
    compile_seconds: float

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; what is left over waits for another epoch's shuffle."""
        return len(self.train_y) // self.spec.batch_size

    def test(self, params: Any) -> Record:
        """Accuracy and mean loss on the test data, by protocol."""
        result = {}
        for protocol, (mean, std) in self.moments.items():
            correct, loss = self.evaluate(params, self.test_x, self.test_y, mean, std)
            result[protocol] = {"accuracy": runs.number(correct), "loss": runs.number(loss)}
        return result


def prepare(spec: Spec, dataset: Dataset, watcher: Watcher | None = None) -> Trainer:
    """Builds and compiles a spec's programs.

    Args:
      spec: what to run.
      dataset: the data that ``spec.dataset`` names.
      watcher: told that this takes a while.
    """
    if not 1 <= spec.batch_size <= len(dataset.train_y):
        raise UsageError(
            f"--batch-size must lie between 1 and the {len(dataset.train_y)} training examples, "
            f"got {spec.batch_size}"
        )
    (watcher or Watcher()).compiling()
    model = models.build(spec.model, dataset.train_x.shape[1:], dataset.classes)
    train_x = jnp.asarray((dataset.train_x - dataset.mean) / dataset.std, jnp.float32)
    train_y = jnp.asarray(dataset.train_y)
    test_x, test_y = _chunks(dataset.test_x, dataset.test_y)
    example = jax.ShapeDtypeStruct((spec.batch_size, *train_x.shape[1:]), train_x.dtype)
    net = kw.instrument(
        model, kw.Categorical(), example, train=True, fisher=spec.fisher, bias=spec.bias
    )
    tx = recipes.transform(spec.setting, net.layers)
    programs = _programs(model, example.shape[1:])

    def init(key: jax.Array) -> State:
        params = programs.init(key)
        return State(params, tx.init(params), jnp.zeros((), jnp.int32))

    def step(
        state: State, key: jax.Array, chosen: jax.Array, x: jax.Array, y: jax.Array
    ) -> tuple[State, jax.Array]:
        dropout, labels = jax.random.split(jax.random.fold_in(key, state.step))
        # Not net.value_and_grad: what it keeps for a refresh costs more than a refresh in thirty.
        oracle = net.oracle(
            state.params,
            x[chosen],
            train=True,
            targets=y[chosen],
            key=labels,
            rngs={"dropout": dropout},
        )
        loss, grads = jax.value_and_grad(oracle.loss)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, oracle=oracle)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1), loss

    started = time.perf_counter()
    key = jax.random.key(0)
    state = init(key)
    jax.block_until_ready(programs.evaluate(state.params, test_x, test_y, 0.0, 1.0))
    indices = jnp.zeros(spec.batch_size, jnp.int32)
    lowered = jax.jit(step, donate_argnums=0).lower(state, key, indices, train_x, train_y)
    return Trainer(
        spec,
        train_x,
        train_y,
        test_x,
        test_y,
        fingerprint([dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y]),
        {"paper": (0.0, 1.0), "corrected": (dataset.mean, dataset.std)},
        init,
        lowered.compile(),
        programs.evaluate,
        time.perf_counter() - started,
    )


def _chunks(x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
    size = min(_TEST_CHUNK, len(y))
    missing = -len(y) % size
    x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
    y = np.concatenate([y, np.full(missing, -1, y.dtype)])
    return jnp.asarray(x.reshape(-1, size, *x.shape[1:])), jnp.asarray(y.reshape(-1, size))


class _Programs(NamedTuple):
    init: Callable[[jax.Array], Any]
    evaluate: Callable[..., tuple[jax.Array, jax.Array]]


@functools.lru_cache(maxsize=8)
def _programs(model: nn.Module, shape: tuple[int, ...]) -> _Programs:
    """What does not depend on the optimizer, compiled once for all of them."""

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, *shape)))["params"]

    def evaluate(
        params: Any, x: jax.Array, y: jax.Array, mean: jax.Array, std: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Accuracy and mean loss."""

        def chunk(batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            images, labels = batch
            logits: Any = model.apply({"params": params}, (images - mean) / std)
            real = labels >= 0
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
            right = (logits.argmax(-1) == labels) & real
            return right.sum(), jnp.where(real, loss, 0).sum()

        right, loss = jax.lax.map(chunk, (x, y))
        count = (y >= 0).sum()
        return right.sum() / count, loss.sum() / count

    return _Programs(jax.jit(init), jax.jit(evaluate))


def train_seeds(
    spec: Spec,
    dataset: Dataset,
    seeds: Sequence[int],
    folder: Path,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> list[Run]:
    """Trains some seeds with one compiled step; those that are finished cost nothing.

    Args:
      spec: what to run.
      dataset: the data that ``spec.dataset`` names.
      seeds: which ones.
      folder: where the logs ``seed-N.jsonl`` are.
      resume: goes on with logs that are there; without it, a log that is there is an error.
      watcher: told every step and epoch.

    Returns:
      The runs as they stand in the logs.
    """
    watcher = watcher or Watcher()
    trainer: Trainer | None = None
    done = []
    for seed in seeds:
        before = _before(spec, seed, folder, resume)
        if before is not None and before.finished:
            watcher.skip()
            done.append(before)
        else:
            trainer = trainer or prepare(spec, dataset, watcher)
            done.append(train(trainer, seed, folder, resume=resume, watcher=watcher))
    return done


def train(
    trainer: Trainer,
    seed: int,
    folder: Path,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Run:
    """Trains one seed to the end, and logs it.

    Killed at any moment and called again with ``resume``, it goes on from the last epoch that ended
    and comes to the very numbers of a run that was not killed.

    Args:
      trainer: made by :func:`prepare`.
      seed: of initial weights, shuffles, dropout and sampled labels.
      folder: where the log ``seed-N.jsonl`` is.
      resume: goes on with a log that is there, or starts one; without it, a log that is there is an
        error.
      watcher: told every step and epoch.

    Returns:
      The run as it stands in the log.
    """
    watcher = watcher or Watcher()
    spec, log = trainer.spec, runs.log_path(folder, seed)
    key = jax.random.key(seed)
    header = _header(spec, seed)
    identity = _same(header) | {"data_sha256": trainer.data_sha256}
    stored = runs.checkpoint_path(log)
    before = _before(spec, seed, folder, resume)
    checkpoint, records = Checkpoint(trainer.init(key), 0), []
    if before is None:
        stored.unlink(missing_ok=True)  # of a run whose log is gone
    elif stored.exists():
        checkpoint = checkpoints.load(stored, checkpoint.state, identity)
        records = _records(before, checkpoint.epoch, stored)
    runs.rewrite(log, [header, *records])
    state = checkpoint.state
    seconds, cpu_seconds = (records[-1][name] if records else 0.0 for name in _CLOCKS)
    steps = trainer.steps_per_epoch
    watcher.start(spec.setting.title, seed, spec.epochs, steps, checkpoint.epoch)
    for epoch in range(checkpoint.epoch, spec.epochs):
        started, cpu_started = time.perf_counter(), time.process_time()
        losses = []
        for chosen in _batches(seed, epoch, len(trainer.train_y), spec.batch_size):
            state, loss = trainer.step(state, key, chosen, trainer.train_x, trainer.train_y)
            losses.append(loss)
            # Waits, so that the bar shows what is done and Ctrl-C does not wait for an epoch.
            jax.block_until_ready(loss)
            watcher.step()
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        record = {
            "kind": "epoch",
            "epoch": epoch + 1,
            "steps": (epoch + 1) * steps,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "train_loss": runs.number(np.mean(jax.device_get(losses))),
            "test": trainer.test(state.params),
        }
        runs.append(log, record)
        checkpoints.save(stored, Checkpoint(state, epoch + 1), identity)
        watcher.epoch(header, record)
    end = {
        "kind": "end",
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "compile_seconds": trainer.compile_seconds,
        "params_sha256": fingerprint(state.params),
        "diagnostics": _diagnostics(spec, state.opt_state),
    }
    runs.append(log, end)
    stored.unlink(missing_ok=True)
    watcher.end(header, end)
    return runs.read(log)


def _diagnostics(spec: Spec, opt_state: Any) -> Record:
    if spec.setting.optimizer not in recipes.SOLVERS:  # a first-order method has none
        return {}
    return {name: runs.number(value) for name, value in kw.diagnostics(opt_state).items()}


def _batches(seed: int, epoch: int, examples: int, batch_size: int) -> Iterator[np.ndarray]:
    """An epoch's shuffle. It depends on seed and epoch alone: a resumed run has it, too."""
    order = np.random.default_rng([seed, epoch]).permutation(examples).astype(np.int32)
    for i in range(examples // batch_size):
        yield order[i * batch_size : (i + 1) * batch_size]


def _header(spec: Spec, seed: int) -> Record:
    return {"kind": "run", "seed": seed, **spec.record(), **runs.provenance()}


def _before(spec: Spec, seed: int, folder: Path, resume: bool) -> Run | None:
    """What is in the log already, if it is a log of the same run."""
    log = runs.log_path(folder, seed)
    if not log.exists():
        return None
    if not resume:
        raise UsageError(
            f"{log} exists: continue it with --resume, or name another folder by --out"
        )
    before = runs.read(log)
    for name, value in _same(_header(spec, seed)).items():
        if before.header.get(name) != value:
            raise UsageError(
                f"{log} was run with {name} = {before.header.get(name)!r}, not {value!r}: "
                f"ask for the same to resume it, or name another folder by --out"
            )
    return before


def _same(header: Record) -> Record:
    """What a run that goes on must share with the one that was killed."""
    return {name: value for name, value in header.items() if name not in ("versions", "machine")}


def _records(before: Run, epochs: int, stored: Path) -> list[Record]:
    """The log, cut back to what led to a checkpoint."""
    if epochs > len(before.epochs):
        raise UsageError(
            f"{stored} is of epoch {epochs}, and {before.path} ends with epoch "
            f"{len(before.epochs)}: delete the checkpoint, and --resume starts this run again"
        )
    return list(before.epochs[:epochs])
