"""``kldwrm race``: steps and seconds to fixed targets."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
from rich.progress import Progress

from kldwrm_jax.experiments import figures, provenance, race_summary, runs
from kldwrm_jax.experiments.errors import check_names
from kldwrm_jax.experiments.learner import Learner
from kldwrm_jax.experiments.progress import console, print_markdown, progress_bars
from kldwrm_jax.experiments.race_cases import METHODS, PROBLEMS, Loaded, Problem
from kldwrm_jax.experiments.runs import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
    """Count steps and seconds to fixed targets on several problems; resumable.

    The learning rate of every method is tuned on a seed of its own. Seconds are process time.
    """

    problems: tuple[str, ...] = tuple(PROBLEMS)  # Problems to solve.
    methods: tuple[str, ...] = tuple(METHODS)  # Methods to compare.
    seeds: int = 5  # Number of seeds.
    data_dir: Path | None = None  # MNIST's IDX files; default: $KLDWRM_DATA or a download.
    out: Path = Path("runs/race")  # Folder for logs, tables and figures.

    def run(self) -> None:
        """Races, and writes a table and a figure per problem."""
        check_names("--problems", self.problems, PROBLEMS)
        check_names("--methods", self.methods, METHODS)
        for name in self.problems:
            with progress_bars(console()) as progress:
                records = self.race(name, progress)
            problem, path = PROBLEMS[name], self.out / f"{name}.png"
            text = race_summary.summary(problem, records)
            path.with_suffix(".md").write_text(text)
            place = "seconds of one core" if problem.seconds < np.inf else "steps"
            panels = {place: race_summary.curves(problem, records)}
            figures.bands(path, problem.title, f"test {problem.metric}", panels, np.median)
            print_markdown(f"{text}\n\nfigure: {path}")

    def race(self, name: str, progress: Progress) -> list[Record]:
        """Tunes every method, then runs all seeds; returns the log, one record per run."""
        problem, log = PROBLEMS[name], self.out / f"{name}.jsonl"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        records = [json.loads(line) for line in lines]
        runs.rewrite(log, records)  # without a last line that was truncated by a kill
        methods = [method for method in self.methods if method in problem.methods]
        total = sum(len(METHODS[method].rates) + self.seeds for method in methods)
        bar, loaded = progress.add_task(name, total=total, note=""), None
        for method in methods:
            learner, rates = None, METHODS[method].rates
            tuning = [(race_summary.TUNING_SEED, rate) for rate in rates]
            for seed, given in [*tuning, *((seed, None) for seed in range(self.seeds))]:
                rate = given or race_summary.best_rate(problem, records, method)
                about = {"problem": name, "method": method, "seed": seed, "rate": rate}
                progress.update(bar, advance=1, note=f"{method}, rate {rate}, seed {seed}")
                if not any(about.items() <= record.items() for record in records):
                    loaded = loaded or problem.load(self.data_dir)
                    learner = learner or _learner(problem, method, loaded)
                    curve = follow(problem, loaded, learner, rate, seed)
                    records.append({**about, "curve": curve, **provenance.record()})
                    runs.append(log, records[-1])
        return records


def _learner(problem: Problem, method: str, loaded: Loaded) -> Learner:
    model, likelihood, (x, y, *_) = loaded
    batch, make = (x[: problem.batch], y[: problem.batch]), METHODS[method].make
    return Learner(model, likelihood, lambda layers, rate: make(layers, rate, problem.limit), batch)


def follow(
    problem: Problem, loaded: Loaded, learner: Learner, rate: float | None, seed: int
) -> list[Record]:
    """The test metric along a run, and the process seconds of its steps."""
    _, likelihood, (x, y, test_x, test_y) = loaded
    key, rng, order = jax.random.key(seed), np.random.default_rng(seed), np.array([], int)
    rate = rate or 0.0  # of a step that sets itself, which takes none
    state, seconds, curve = learner.init(key, rate), 0.0, []
    for k in range(1, problem.steps + 1):
        if seconds >= problem.seconds:
            break
        if len(order) < problem.batch:
            order = rng.permutation(len(y))
        chosen, order = np.split(order, [problem.batch])
        started = time.process_time()
        state, _ = jax.block_until_ready(learner.step(state, rate, key, x[chosen], y[chosen]))
        seconds += time.process_time() - started
        if k % problem.every == 0:
            outputs = learner.outputs(state.params, test_x)
            accuracy = problem.metric == "accuracy"
            score = outputs.argmax(-1) == test_y if accuracy else likelihood.nll(outputs, test_y)
            value = runs.number(score.mean())
            curve.append({"step": k, "cpu_seconds": seconds, "value": value})
    return curve
