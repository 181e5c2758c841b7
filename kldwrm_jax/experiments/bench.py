"""``kldwrm bench``: step time relative to Adam, first calls and memory."""

import dataclasses
import json
from pathlib import Path

import jax
from rich.progress import Progress

from kldwrm_jax.experiments import bench_table, provenance
from kldwrm_jax.experiments.bench_cases import (
    FIRST_ORDER,
    GRADIENTS,
    OPTIMIZERS,
    PERIOD,
    training_step,
)
from kldwrm_jax.experiments.bench_networks import NETWORKS
from kldwrm_jax.experiments.errors import check_names
from kldwrm_jax.experiments.progress import console, markdown, print_markdown, progress_bars
from kldwrm_jax.experiments.runs import Record
from kldwrm_jax.experiments.timing import compile_step, interleaved, relative

HEADS = ["optimizer", "gradient", "relative to Adam", "rounds", "process time"]
HEADS += ["without refresh", "slowest step", "first call, s", "state, MB", "temp, MB"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure step time relative to Adam, the time of first calls, and memory.

    All optimizers run in one process, in interleaved rounds of 20 steps, each right after some
    steps of Adam. To measure on fewer cores, restrict the process, for example with `taskset -c 0`.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)  # Networks to train.
    # Beside Adam and SGD.
    optimizers: tuple[str, ...] = ("kfac-nothing-set", "kfac", "so", "q", "kfac-staggered")
    gradients: tuple[str, ...] = GRADIENTS  # jax.grad and net.oracle, or net.value_and_grad.
    fisher: str = "sampled"  # The labels of the statistics: sampled or empirical.
    rounds: int = 5  # Rounds that count.
    batch_size: int | None = None  # Examples per step, if not those of the network.
    out: Path = Path("results/bench")  # Folder for the results: a file per network and cores.
    tables: tuple[Path, ...] = ()  # Markdown files whose table of costs is made anew from `out`.

    def run(self) -> None:
        """Measures, prints and saves."""
        check_names("--networks", self.networks, NETWORKS)
        check_names("--optimizers", self.optimizers, OPTIMIZERS)
        check_names("--gradients", self.gradients, GRADIENTS)
        check_names("--fisher", (self.fisher,), ("sampled", "empirical"))
        self.out.mkdir(parents=True, exist_ok=True)
        with progress_bars(console()) as progress:
            for network in self.networks:
                result = {**provenance.record(), **self.compare(network, progress)}
                cores = result["machine"]["usable_cores"]
                path = self.out / f"{network}-{cores}-core{'s' * (cores != 1)}.json"
                path.write_text(json.dumps(result, indent=1) + "\n")
                table = markdown(HEADS, map(_cells, result["rows"]))
                print_markdown(f"**{network}, batch {result['batch']}**\n\n{table}")
        for path in self.tables:
            bench_table.rewrite(path, self.out)

    def compare(self, network: str, progress: Progress) -> Record:
        """One network under every optimizer."""
        _, model, make_batch, examples = NETWORKS[network]
        batch = make_batch(self.batch_size or examples)
        cases = [(name, "own") for name in FIRST_ORDER]
        for gradient in self.gradients:
            cases += [(name, gradient) for name in self.optimizers if name not in FIRST_ORDER]
        bar = progress.add_task(network, total=len(cases) + self.rounds + 1, note="")
        compile_step(*training_step(model, "adam", batch), batch)  # the first one is slower
        compiled = {}
        for name, gradient in cases:
            progress.update(bar, advance=1, note=f"compiling {name}")
            step, state = training_step(model, name, batch, gradient, self.fisher)
            compiled[name, gradient] = compile_step(step, state, batch)
        progress.update(bar, note=f"{self.rounds} rounds of {PERIOD} steps")
        rounds = interleaved(compiled, compiled[cases[0]], batch, PERIOD, self.rounds)
        for timings in rounds:  # noqa: B007
            progress.advance(bar)
        rows = []
        for (name, gradient), case in compiled.items():
            row = {"name": name, "gradient": gradient, **relative(timings[name, gradient])}
            row["compile_seconds"] = case.seconds
            row["compile_ratio"] = case.seconds / compiled[cases[0]].seconds
            row["state_bytes"] = sum(x.nbytes for x in jax.tree.leaves(case.state[1]))
            rows.append({**row, "temporary_bytes": case.temporary_bytes})
        size = {"batch": self.batch_size or examples, "period": PERIOD, "rounds": self.rounds}
        return {"network": network, "fisher": self.fisher, **size, "rows": rows}


def _cells(row: Record) -> list[str]:
    """A row of the table; the last three columns are seconds and megabytes."""
    each, sizes = row["ratio_of_each_round"], (row["state_bytes"], row["temporary_bytes"] or 0)
    names = "process_ratio", "usual_step", "slowest_step", "compile_seconds"
    rounds, numbers = f"{min(each):.2f}-{max(each):.2f}", [f"{row[name]:.2f}" for name in names]
    first = row["name"], row["gradient"], f"{row['ratio']:.2f}", rounds
    return [*first, *numbers, *(f"{size / 1e6:.1f}" for size in sizes)]
