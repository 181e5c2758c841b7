"""``kldwrm bench``: what a step costs, in steps of SGD."""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kldwrm_jax.experiments import figures
from kldwrm_jax.experiments.bench_subjects import (
    COMPILE_TARGET,
    FIRST_ORDER,
    MLP,
    NETWORKS,
    PERIOD,
    SUBJECTS,
    batch_of,
    has_kfac_jax,
    kfac_jax_step,
    training_step,
)
from kldwrm_jax.experiments.provenance import machine, versions
from kldwrm_jax.experiments.runs import replace
from kldwrm_jax.experiments.timing import (
    Compiled,
    Timing,
    compile_step,
    interleaved,
    run_steps,
)

WIDTHS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (64, 128, 256, 512, 1024, 2048)
# An eigendecomposition of a very wide layer takes minutes on a CPU; QE has no wide case.
WIDEST = {"kfac-product": 2048, "q": 2048, "q-reweighted": 1024, "qe": 512}
SCALED = ("adam", "kfac", "so", "kfac-product", "q", "q-reweighted", "qe", "kfac-randomized")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--networks",
        nargs="*",
        default=list(NETWORKS),
        choices=list(NETWORKS),
        help="what to train",
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=list(SUBJECTS),
        choices=list(SUBJECTS),
        help="what to train it with; SGD is always there to compare with",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of 30 steps that count")
    parser.add_argument("--batch", type=int, default=512, help="examples in a batch")
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="also measure the cost against layer width (128 to 4096) and batch size: takes long",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("results/bench"), help="where results go"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints and saves."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for network in args.networks:
        result = compare(network, args.optimizers, args.batch, args.rounds, console)
        save(args.out / f"{network}.json", result)
        console.print(table(result))
    if args.scaling:
        path = args.out / "scaling.json"
        result = scaling(args.optimizers, console, lambda so_far: save(path, so_far))
        titles = {name: subject.title for name, subject in SUBJECTS.items()}
        figures.cost(args.out / "scaling.png", result, titles)
    console.print(f"saved in {args.out}")
    return 0


def save(path: pathlib.Path, result: dict[str, Any]) -> None:
    """A result with the machine it comes from, whole or not at all."""
    made = {"machine": {**machine(), "versions": versions()}, **result}
    replace(path, (json.dumps(made, indent=1) + "\n").encode())


def compare(
    network: str, names: Sequence[str], batch_size: int, rounds: int, console: Console
) -> dict[str, Any]:
    """One network under every optimizer, rounds of a period interleaved."""
    model, batch = NETWORKS[network], batch_of(batch_size)
    chosen = ["sgd", *(name for name in names if name != "sgd")]
    compile_step(*training_step(model, "kfac", batch), batch, attempts=1)  # warm up
    subjects: dict[str, Compiled] = {}
    with Progress(console=console, transient=True) as progress:
        extra = has_kfac_jax()
        bar = progress.add_task(network, total=len(chosen) + extra + rounds + 1)
        for name in chosen:
            progress.update(bar, description=f"{network}: compiling {name}")
            subjects[name] = compile_step(*training_step(model, name, batch), batch)
            progress.advance(bar)
        if extra:
            subjects["kfac-jax"] = _compiled_by_itself(*kfac_jax_step(model, batch), batch)
            progress.advance(bar)
        progress.update(bar, description=f"{network}: {rounds} rounds of {PERIOD} steps")
        timings = interleaved(
            subjects, subjects["sgd"], batch, PERIOD, rounds, lambda: progress.advance(bar)
        )
    return {
        "network": network,
        "batch": batch_size,
        "period": PERIOD,
        "rounds": rounds,
        "sgd_step_seconds": statistics.median(map(statistics.fmean, timings["sgd"].rounds)),
        "rows": [
            _row(network, name, subject, timings[name], subjects["sgd"])
            for name, subject in subjects.items()
        ],
    }


def _compiled_by_itself(step: Any, state: Any, batch: Any) -> Compiled:
    begin = time.perf_counter()
    state = jax.block_until_ready(step(state, batch))
    return Compiled(step, state, time.perf_counter() - begin, None)


def _row(network: str, name: str, subject: Compiled, own: Timing, sgd: Compiled) -> dict[str, Any]:
    known = SUBJECTS.get(name)
    slow = known.slowest.get(network) if known else None
    return {
        "name": name,
        "title": known.title if known else "kfac-jax, statistics every step",
        "ratio": own.ratio,
        "ratio_of_each_round": own.ratios,
        "target": known.targets.get(network) if known else None,
        "usual_step": own.usual,
        "slowest_step": own.slowest,
        "slowest_target": slow,
        "compile_seconds": subject.seconds,
        "compile_ratio": subject.seconds / sgd.seconds,
        "compile_target": None if name in (*FIRST_ORDER, "kfac-jax") else COMPILE_TARGET,
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(subject.state[1])),
        "temporary_bytes": subject.temporary_bytes,
    }


def table(result: dict[str, Any]) -> Table:
    """A comparison as people like to read it; what misses its target is red."""
    step = 1e3 * result["sgd_step_seconds"]
    shown = Table(
        title=f"{result['network']}, batch {result['batch']}: cost in steps of SGD ({step:.1f} ms)"
    )
    shown.add_column("optimizer")
    columns = ("ratio", "rounds", "usual step", "slowest", "compile", "state", "working memory")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in result["rows"]:
        each = row["ratio_of_each_round"]
        temporary = row["temporary_bytes"]
        shown.add_row(
            row["title"],
            _against(row["ratio"], row["target"]),
            f"{min(each):.2f} to {max(each):.2f}",
            f"{row['usual_step']:.2f}",
            _against(row["slowest_step"], row["slowest_target"]),
            _against(row["compile_ratio"], row["compile_target"]),
            f"{row['state_bytes'] / 1e6:.1f} MB",
            "" if temporary is None else f"{temporary / 1e6:.1f} MB",
        )
    return shown


def _against(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    colour = "green" if value <= target else "red"
    return f"[{colour}]{value:.2f}[/] (≤ {target:g})"


# --- Cost against width and batch size ------------------------------------------------------------


def scaling(
    names: Sequence[str], console: Console, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The cost of every optimizer for layers of many widths and for many batch sizes.

    ``keep`` is given what there is after every case.
    """
    chosen = [name for name in SCALED if name in names]
    cases = [
        ("width", width, MLP((width, width)), 512, name)
        for width in WIDTHS
        for name in chosen
        if width <= WIDEST.get(name, width)
    ]
    cases += [("batch", size, MLP(), size, name) for size in BATCHES for name in chosen]
    rows: list[dict[str, Any]] = []
    result = {"period": PERIOD, "rows": rows}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("scaling", total=len(cases))
        for axis, value, model, batch_size, name in cases:
            progress.update(bar, description=f"{axis} {value}: {name}")
            rows.append(
                {"axis": axis, axis: value, "name": name, **_beside_sgd(model, name, batch_size)}
            )
            keep(result)
            progress.advance(bar)
    return result


def _beside_sgd(model: MLP, name: str, batch_size: int) -> dict[str, float]:
    """Seconds of a step, from one with a refresh and some without, by their shares of a period.

    SGD is measured before and after, so that both meet the same machine.
    """
    batch = batch_of(batch_size)
    own, sgd = (
        compile_step(*training_step(model, each, batch), batch, attempts=1)
        for each in (name, "sgd")
    )
    base, before = run_steps(sgd.step, sgd.state, batch, 10)
    _, row = run_steps(own.step, own.state, batch, 9)
    _, after = run_steps(sgd.step, base, batch, 10)
    usual = statistics.median(row[4:])  # QE's buffer is full by then
    mean = usual if name in FIRST_ORDER else (row[0] + (PERIOD - 1) * usual) / PERIOD
    return {
        "seconds": mean,
        "usual_seconds": usual,
        "refresh_seconds": row[0],
        "sgd_seconds": statistics.median(before + after),
    }
