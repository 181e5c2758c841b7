"""``kldwrm race``: steps and seconds to fixed targets, with and without calibrated blocks."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kldwrm_jax as kw
from kldwrm_jax.experiments import figures, options, runs
from kldwrm_jax.experiments.errors import check_name
from kldwrm_jax.experiments.progress import Screen
from kldwrm_jax.experiments.race_problems import PROBLEMS, Arrays, Problem
from kldwrm_jax.experiments.runs import Record

_TUNING_SEED = 100
Maker = Callable[[Any, Any, float], optax.GradientTransformation]
"""From layers, learning rate and the limit of a calibrated step's divergence."""


class Method(NamedTuple):
    """An optimizer and the learning rates that are tried."""

    title: str
    make: Maker
    rates: tuple[float, ...]


def _member(make: Callable[..., Any], **arguments: Any) -> Maker:
    return lambda layers, rate, limit: make(layers, rate, refresh_every=10, **arguments)


def _calibrated(make: Callable[..., Any], **arguments: Any) -> Maker:
    return lambda layers, rate, limit: make(
        layers, rate, refresh_every=10, calibrate=True, kl_clip=limit, **arguments
    )


_UNCALIBRATED_RATES, _CALIBRATED_RATES = (0.01, 0.03, 0.1), (0.1, 0.3, 1.0, 3.0)
METHODS = {
    "sgd": Method(
        "SGD with momentum", lambda _, rate, __: optax.sgd(rate, 0.9), (0.003, 0.03, 0.1, 0.3)
    ),
    "adam": Method("Adam", lambda _, rate, __: optax.adam(rate), (0.001, 0.003, 0.01)),
    "kfac": Method("K-FAC", _member(kw.kfac), _UNCALIBRATED_RATES),
    "so": Method("SO", _member(kw.so_kldwrm), _UNCALIBRATED_RATES),
    "q": Method("Q", _member(kw.q_kldwrm), _UNCALIBRATED_RATES),
    "qe": Method("QE, ten steps of SGD", _member(kw.qe_kldwrm), (0.01, 0.03)),
    "kfac-calibrated": Method("K-FAC, calibrated", _calibrated(kw.kfac), _CALIBRATED_RATES),
    "so-calibrated": Method("SO, calibrated", _calibrated(kw.so_kldwrm), _CALIBRATED_RATES),
    "q-calibrated": Method(
        "Q, calibrated", _calibrated(kw.q_kldwrm, block_clip=None), _CALIBRATED_RATES
    ),
    "qe-calibrated": Method(
        "QE, calibrated, two preconditioned steps",
        _calibrated(kw.qe_kldwrm, block_clip=None, inner="preconditioned", kl_scale=1.0),
        (0.1, 0.3, 1.0),
    ),
}


class Racer:
    """A method on a problem: compiled once for all seeds and learning rates."""

    def __init__(self, problem: Problem, method: Method, loaded: tuple[Any, Any, Arrays]) -> None:
        self.problem = problem
        self.model, self.likelihood, self.arrays = loaded
        like = jax.ShapeDtypeStruct(
            (problem.batch, *self.arrays.train_x.shape[1:]), self.arrays.train_x.dtype
        )
        net = kw.instrument(self.model, self.likelihood, like)

        def make(rate: Any) -> optax.GradientTransformationExtraArgs:
            return optax.with_extra_args_support(method.make(net.layers, rate, problem.limit))

        def init(key: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
            params = self.model.init(key, jnp.zeros((1, *like.shape[1:]), like.dtype))["params"]
            return params, make(rate).init(params)

        def step(
            state: tuple[Any, Any], rate: jax.Array, key: jax.Array, x: jax.Array, y: jax.Array
        ) -> tuple[Any, Any]:
            params, opt_state = state
            oracle = net.oracle(params, x, targets=y, key=key)
            grads = jax.grad(oracle.loss)(params)
            updates, opt_state = make(rate).update(grads, opt_state, params, oracle=oracle)
            return optax.apply_updates(params, updates), opt_state

        def judge(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            outputs: Any = self.model.apply({"params": params}, x)
            if problem.metric == "accuracy":
                return (outputs.argmax(-1) == y).mean()
            return self.likelihood.nll(outputs, y).mean()

        self.init, self.judge = jax.jit(init), jax.jit(judge)
        self.step = jax.jit(step, donate_argnums=0)
        # Compiles, so that no run's seconds have it in them.
        key, first = jax.random.key(0), slice(0, problem.batch)
        batch = self.arrays.train_x[first], self.arrays.train_y[first]
        state = self.step(self.init(key, 0.0), 0.0, key, *batch)
        jax.block_until_ready(self._value(state[0]))

    def run(self, rate: float, seed: int, tick: Callable[[], None]) -> Record:
        """The metric along a run, and how long it took."""
        key, rng = jax.random.key(seed), np.random.default_rng(seed)
        state = self.init(key, rate)
        seconds, curve = 0.0, []
        order: Iterator[np.ndarray] = iter(())
        for k in range(self.problem.steps):
            chosen = next(order, None)
            if chosen is None:
                order = _batches(rng, len(self.arrays.train_y), self.problem.batch)
                chosen = next(order)
            started = time.process_time()
            batch = self.arrays.train_x[chosen], self.arrays.train_y[chosen]
            state = self.step(state, rate, jax.random.fold_in(key, k), *batch)
            jax.block_until_ready(state)
            seconds += time.process_time() - started
            if (k + 1) % self.problem.every == 0:
                value = runs.number(self._value(state[0]))
                curve.append({"step": k + 1, "cpu_seconds": seconds, "value": value})
            tick()
        return {"curve": curve}

    def _value(self, params: Any) -> jax.Array:
        return self.judge(params, self.arrays.test_x, self.arrays.test_y)


def _batches(rng: np.random.Generator, examples: int, size: int) -> Iterator[np.ndarray]:
    order = rng.permutation(examples)
    return iter(order[: examples // size * size].reshape(-1, size))


def to_target(problem: Problem, record: Record, target: float) -> Record | None:
    """The first point of a curve that reaches a target."""
    for point in record["curve"]:
        if point["value"] is not None and problem.reached(point["value"], target):
            return point
    return None


def quality(problem: Problem, record: Record) -> tuple:
    """What the best learning rate has the least of: steps to the targets, then the metric."""
    hits = [to_target(problem, record, target) for target in reversed(problem.targets)]
    steps = [hit["step"] if hit else problem.steps + 1 for hit in hits]
    last = record["curve"][-1]["value"]
    last = float("inf") if last is None else last
    return (*steps, -last if problem.metric == "accuracy" else last)


def race(
    name: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    log: Path,
    data_dir: Path | None,
    screen: Screen,
) -> list[Record]:
    """Tunes every method on a seed of its own, then runs all seeds; goes on where it was stopped.

    Returns:
      The records of the log: one a run, tuning included.
    """
    problem = PROBLEMS[name]
    methods = [m for m in methods if m not in problem.without]
    records = _read(log)
    loaded = None
    racers: dict[str, Racer] = {}

    def done(method: str, seed: int, rate: float) -> Record | None:
        for record in records:
            if (record["method"], record["seed"], record["rate"]) == (method, seed, rate):
                return record
        return None

    def run(method: str, seed: int, rate: float) -> None:
        nonlocal loaded
        if done(method, seed, rate) is not None:
            return
        loaded = loaded or problem.load(data_dir)
        if method not in racers:
            racers[method] = Racer(problem, METHODS[method], loaded)
        record = {
            "problem": name,
            "method": method,
            "seed": seed,
            "rate": rate,
            **racers[method].run(rate, seed, lambda: None),
            **runs.provenance(),
        }
        runs.append(log, record)
        records.append(record)
        screen.emit(
            {"kind": "run", **{k: record[k] for k in ("problem", "method", "seed", "rate")}}
        )
        screen.say(f"{problem.title}: {METHODS[method].title}, rate {rate}, seed {seed}")

    for method in methods:
        for rate in METHODS[method].rates:
            run(method, _TUNING_SEED, rate)
    best = {method: tuned(problem, records, method) for method in methods}
    for seed in seeds:
        for method in methods:
            run(method, seed, best[method])
    return records


def tuned(problem: Problem, records: Sequence[Record], method: str) -> float:
    """The learning rate that was best on the tuning seed."""
    own = [r for r in records if r["method"] == method and r["seed"] == _TUNING_SEED]
    return min(own, key=lambda record: quality(problem, record))["rate"]


def counted(problem: Problem, records: Sequence[Record], method: str) -> list[Record]:
    """The runs of a method that count: not those of its tuning, nor any at another rate."""
    others = [r for r in records if r["method"] == method and r["seed"] != _TUNING_SEED]
    best = tuned(problem, records, method) if others else None
    return [r for r in others if r["rate"] == best]


def _read(log: Path) -> list[Record]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def summary(problem: Problem, records: Sequence[Record]) -> list[Record]:
    """A row a method: medians over the seeds; None where fewer than half reach a target."""
    rows = []
    for method, known in METHODS.items():
        tuning = [r for r in records if r["method"] == method and r["seed"] == _TUNING_SEED]
        own = counted(problem, records, method)
        if not own:
            continue
        row: Record = {"method": known.title, "rate": own[0]["rate"], "seeds": len(own)}
        for target in problem.targets:
            hits = [to_target(problem, record, target) for record in own]
            for unit in ("step", "cpu_seconds"):
                row[f"{unit} to {target:g}"] = _median([hit[unit] if hit else None for hit in hits])
        last = [record["curve"][-1]["value"] for record in own]
        row["end"] = _median(last)
        row["rates that reach the first target"] = sum(
            to_target(problem, record, problem.targets[0]) is not None for record in tuning
        )
        row["rates"] = len(tuning)
        rows.append(row)
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [np.inf if value is None else value for value in values]
    middle = statistics.median(known)
    return None if np.isinf(middle) else float(middle)


def markdown(problem: Problem, rows: Sequence[Record]) -> str:
    """The summary as a table."""
    columns = [
        f"{word} to {target:g}" for target in problem.targets for word in ("step", "cpu_seconds")
    ]
    heads = [c.replace("cpu_seconds", "seconds").replace("step ", "steps ") for c in columns]
    lines = [
        f"| | rate | {' | '.join(heads)} | end | rates that work |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for row in rows:
        cells = [_cell(row[c], "{:.0f}" if c.startswith("step") else "{:.1f}") for c in columns]
        end = _cell(row["end"], "{:.4f}" if problem.metric == "accuracy" else "{:.3g}")
        works = f"{row['rates that reach the first target']} of {row['rates']}"
        lines.append(
            f"| {row['method']} | {row['rate']:g} | {' | '.join(cells)} | {end} | {works} |"
        )
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Steps and seconds of a processor to fixed targets on four problems, with and without "
        "calibrated blocks. Every method's learning rate is tuned on a seed of its own."
    )
    parser.add_argument(
        "--problems", nargs="+", default=list(PROBLEMS), help=f"of {', '.join(PROBLEMS)}"
    )
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), help=f"of {', '.join(METHODS)}"
    )
    options.add_seeds(parser, 5)
    parser.add_argument("--data-dir", type=Path, help="where MNIST's files are, if you have them")
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Races, and reports."""
    screen = Screen()
    for name in args.problems:
        check_name("--problems", name, PROBLEMS)
    for name in args.methods:
        check_name("--methods", name, METHODS)
    for name in args.problems:
        log = args.out / f"{name}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        records = race(name, args.methods, args.seeds, log, args.data_dir, screen)
        problem = PROBLEMS[name]
        rows = summary(problem, records)
        for row in rows:
            screen.emit({"kind": "row", "problem": name, **row})
        table = f"## {problem.title}\n\n{markdown(problem, rows)}\n"
        (args.out / f"{name}.md").write_text(table)
        screen.say(table)
        curves = {
            METHODS[m].title: [
                [(p["step"], p["value"]) for p in r["curve"]] for r in counted(problem, records, m)
            ]
            for m in METHODS
        }
        path = figures.curves(
            args.out / f"{name}.png", problem.title, problem.metric, _known(curves)
        )
        screen.saved("figure", path)
    return 0


def _known(curves: dict[str, list]) -> dict[str, list]:
    return {title: own for title, own in curves.items() if own}
