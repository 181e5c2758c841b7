"""Arguments that several commands have."""

import argparse
from pathlib import Path

from kldwrm_jax.experiments import data
from kldwrm_jax.experiments.data import Dataset
from kldwrm_jax.experiments.progress import Screen


def add_data(parser: argparse.ArgumentParser, default: str) -> None:
    """``--dataset`` and ``--data-dir``."""
    parser.add_argument(
        "--dataset",
        default=default,
        metavar="NAME",
        help=f"{', '.join(data.NAMES)}; an npz file has x_train, y_train, x_test and y_test "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where the IDX files of MNIST or Fashion-MNIST are, gzip or raw, if you have them; "
        f"the variable {data.VARIABLE} does the same. Otherwise they are downloaded once and "
        "cached",
    )


def load_data(args: argparse.Namespace, screen: Screen) -> Dataset:
    """What :func:`add_data` asked for."""
    with screen.downloading() as watch:
        return data.load(args.dataset, args.data_dir, watch)


def add_seeds(parser: argparse.ArgumentParser, default: int) -> None:
    """``--seeds``."""
    parser.add_argument(
        "--seeds",
        type=seeds,
        default=seeds(str(default)),
        metavar="N",
        help=f"how many seeds, from 0 on, or which ones, such as 10-19 (default: {default})",
    )


def seeds(text: str) -> range:
    """Seeds from ``"3"`` (0, 1, 2) or ``"4-6"`` (4, 5, 6)."""
    first, dash, last = text.partition("-")
    try:
        found = range(int(first), int(last) + 1) if dash else range(int(first))
    except ValueError:
        found = range(0)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of seeds, such as 10, nor a range of them, such as 10-19"
        )
    return found


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
