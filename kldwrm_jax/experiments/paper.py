"""``kldwrm paper``: the paper's experiment, its sixteen settings on MNIST."""

import argparse
from pathlib import Path

from kldwrm_jax.experiments import options, recipes, report, runs, training
from kldwrm_jax.experiments.errors import check_name
from kldwrm_jax.experiments.progress import Screen
from kldwrm_jax.experiments.training import Spec

MODEL = "paper-cnn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Trains the paper's network in the settings of its tables, then reports as `kldwrm report` "
        "does. Stopped at any time and called again, it leaves out the runs that are finished and "
        "goes on with the one that is not. Every run is evaluated by both protocols."
    )
    options.add_data(parser, "mnist")
    parser.add_argument(
        "--protocol",
        choices=(*runs.PROTOCOLS, "both"),
        default="both",
        help="which evaluation to report, "
        + "; ".join(f"{name}: {meaning}" for name, meaning in runs.PROTOCOLS.items())
        + " (default: %(default)s)",
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        default=list(recipes.SOLVERS),
        metavar="NAME",
        help=f"some of {', '.join(recipes.SOLVERS)} (default: all)",
    )
    parser.add_argument(
        "--table",
        choices=("supplement", "main"),
        default="supplement",
        help="supplement: all sixteen settings, four a solver; main: the best of each solver "
        "(default: %(default)s)",
    )
    options.add_seeds(parser, 10)
    parser.add_argument("--epochs", type=options.count, default=50, help="default: %(default)s")
    parser.add_argument("--batch-size", type=options.count, default=512, help="default: 512")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then reports."""
    screen = Screen()
    for name in args.solvers:
        check_name("--solvers", name, recipes.SOLVERS)
    chosen = [
        entry
        for entry in recipes.PAPER_SETTINGS
        if entry.setting.optimizer in args.solvers and (entry.best or args.table == "supplement")
    ]
    dataset = options.load_data(args, screen)
    with screen.watching(len(chosen) * len(args.seeds)) as watcher:
        for entry in chosen:
            folder = args.out / entry.name
            spec = Spec(dataset.name, MODEL, entry.setting, args.epochs, args.batch_size)
            training.train_seeds(spec, dataset, args.seeds, folder, resume=True, watcher=watcher)
    report.write(args.out, report.protocols(args.protocol), screen)
    return 0
