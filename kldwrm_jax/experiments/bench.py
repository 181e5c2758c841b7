"""``kldwrm bench``: step time relative to SGD, compile time and memory."""

import dataclasses
import json
from pathlib import Path

import jax
from rich.progress import Progress

from kldwrm_jax.experiments import provenance
from kldwrm_jax.experiments.bench_cases import (
    FIRST_ORDER,
    GRADIENTS,
    NETWORKS,
    OPTIMIZERS,
    PERIOD,
    training_step,
)
from kldwrm_jax.experiments.errors import check_names
from kldwrm_jax.experiments.progress import console, markdown, print_markdown, progress_bars
from kldwrm_jax.experiments.runs import Record
from kldwrm_jax.experiments.timing import compile_step, interleaved, relative

HEADS = ["optimizer", "gradient", "step time relative to SGD", "rounds", "relative to Adam"]
HEADS += ["process time", "without refresh", "slowest step", "compile, s", "state, MB", "temp, MB"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure step time relative to SGD, compile time and memory.

    All optimizers run in one process, in interleaved rounds of 30 steps, each right after a round
    of SGD. To measure on fewer cores, restrict the process, for example with `taskset -c 0`.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)  # Networks to train.
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)  # Optimizers beside SGD and Adam.
    gradients: tuple[str, ...] = GRADIENTS[:1]  # value_and_grad, or jax.grad and oracle, or both.
    rounds: int = 5  # Rounds that count.
    batch_size: int = 512  # Examples per step.
    out: Path = Path("results/bench")  # Folder for the results, one JSON file per network.

    def run(self) -> None:
        """Measures, prints and saves."""
        check_names("--networks", self.networks, NETWORKS)
        check_names("--optimizers", self.optimizers, OPTIMIZERS)
        check_names("--gradients", self.gradients, GRADIENTS)
        self.out.mkdir(parents=True, exist_ok=True)
        with progress_bars(console()) as progress:
            for network in self.networks:
                result = {**provenance.record(), **self.compare(network, progress)}
                (self.out / f"{network}.json").write_text(json.dumps(result, indent=1) + "\n")
                table = markdown(HEADS, map(_cells, result["rows"]))
                print_markdown(f"**{network}, batch {self.batch_size}**\n\n{table}")

    def compare(self, network: str, progress: Progress) -> Record:
        """One network under every optimizer."""
        model, make_batch = NETWORKS[network]
        batch = make_batch(self.batch_size)
        cases = [(name, "own") for name in FIRST_ORDER]
        for gradient in self.gradients:
            cases += [(name, gradient) for name in self.optimizers if name not in FIRST_ORDER]
        bar = progress.add_task(network, total=len(cases) + self.rounds + 1, note="")
        compile_step(*training_step(model, "adam", batch), batch)  # the first one is slower
        compiled = {}
        for name, gradient in cases:
            progress.update(bar, advance=1, note=f"compiling {name}")
            step, state = training_step(model, name, batch, gradient)
            compiled[name, gradient] = compile_step(step, state, batch)
        progress.update(bar, note=f"{self.rounds} rounds of {PERIOD} steps")
        rounds = interleaved(compiled, compiled[cases[0]], batch, PERIOD, self.rounds)
        for timings in rounds:  # noqa: B007
            progress.advance(bar)
        rows = []
        for (name, gradient), case in compiled.items():
            row = {"name": name, "gradient": gradient, **relative(timings[name, gradient])}
            row["adam_ratio"] = row["ratio"] / relative(timings[cases[1]])["ratio"]
            row["compile_seconds"] = case.seconds
            row["state_bytes"] = sum(x.nbytes for x in jax.tree.leaves(case.state[1]))
            rows.append({**row, "temporary_bytes": case.temporary_bytes})
        size = {"batch": self.batch_size, "period": PERIOD, "rounds": self.rounds}
        return {"network": network, **size, "rows": rows}


def _cells(row: Record) -> list[str]:
    """A row of the table; the last three columns are seconds and megabytes."""
    each, sizes = row["ratio_of_each_round"], (row["state_bytes"], row["temporary_bytes"] or 0)
    names = "adam_ratio", "process_ratio", "usual_step", "slowest_step", "compile_seconds"
    rounds, numbers = f"{min(each):.2f}-{max(each):.2f}", [f"{row[name]:.2f}" for name in names]
    first = row["name"], row["gradient"], f"{row['ratio']:.2f}", rounds
    return [*first, *numbers, *(f"{size / 1e6:.1f}" for size in sizes)]
