"""``kldwrm train``: any optimizer on any network and data set."""

import argparse
from pathlib import Path

from kldwrm_jax.experiments import models, options, recipes, training
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import Screen, percent
from kldwrm_jax.experiments.recipes import Arguments, Value
from kldwrm_jax.experiments.runs import PROTOCOLS, Run
from kldwrm_jax.experiments.training import Spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Trains a network and writes its metrics, one JSON line an epoch, to "
        "OUT/DATASET-MODEL-OPTIMIZER/seed-N.jsonl. Defaults are the paper's best settings."
    )
    options.add_data(parser, "digits")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(models.MODELS)} (default: paper-cnn for 28 x 28 images, cnn for "
        "digits, mlp for all else)",
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        default=["qe"],
        metavar="NAME",
        help=f"one or several of {', '.join(recipes.OPTIMIZERS)} (default: qe)",
    )
    parser.add_argument("--epochs", type=options.count, default=10, help="default: %(default)s")
    options.add_seeds(parser, 1)
    parser.add_argument("--batch-size", type=options.count, default=512, help="default: 512")
    parser.add_argument(
        "--learning-rate", type=float, help="1/lambda (default: 0.01; sgd 0.05, adam 0.003)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the optimizer, such as rho=0.7 or kl_clip=none; may be repeated",
    )
    parser.add_argument(
        "--fisher",
        choices=("empirical", "sampled", "exact"),
        default="empirical",
        help="labels of the curvature: the data's, drawn from the model, or the full expectation "
        "(default: %(default)s, as in the paper)",
    )
    parser.add_argument(
        "--bias",
        choices=("separate", "joint"),
        default="separate",
        help="whether biases have curvature blocks of their own (default: %(default)s, as in the "
        "paper)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="default: %(default)s")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with runs that were killed, where their last epoch ended",
    )


def run(args: argparse.Namespace) -> int:
    """Trains."""
    screen = Screen()
    settings = [recipes.setting(name, _arguments(args)) for name in args.optimizer]
    dataset = options.load_data(args, screen)
    model = args.model or _default_model(dataset.train_x.shape[1:])
    finished: list[Run] = []
    with screen.watching(len(settings) * len(args.seeds)) as watcher:
        for setting in settings:
            spec = Spec(
                dataset.name,
                model,
                setting,
                args.epochs,
                batch_size=min(args.batch_size, len(dataset.train_y)),
                fisher=args.fisher,
                bias=args.bias,
            )
            folder = args.out / f"{_slug(dataset.name)}-{model}-{setting.optimizer}"
            finished += training.train_seeds(
                spec, dataset, args.seeds, folder, resume=args.resume, watcher=watcher
            )
    _summarise(screen, finished)
    return 0


def _default_model(shape: tuple[int, ...]) -> str:
    if len(shape) != 3:
        return "mlp"
    return "paper-cnn" if shape[:2] == (28, 28) else "cnn"


def _slug(dataset: str) -> str:
    return f"npz-{Path(dataset).stem}" if dataset.startswith("npz:") else dataset


def _arguments(args: argparse.Namespace) -> Arguments:
    given: dict[str, Value] = {}
    if args.learning_rate is not None:
        given["learning_rate"] = args.learning_rate
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected NAME=VALUE, such as rho=0.7")
        given[name.replace("-", "_")] = _value(value)
    return given


def _value(text: str) -> Value:
    if text.lower() == "none":
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _summarise(screen: Screen, finished: list[Run]) -> None:
    screen.table(
        "After the last epoch",
        [
            {
                "optimizer": run.header["setting"]["optimizer"],
                "seed": run.header["seed"],
                **{name: run.epochs[-1]["test"][name]["accuracy"] for name in PROTOCOLS},
                "train_loss": run.curve("train_loss")[-1],
                "seconds": run.epochs[-1]["seconds"],
            }
            for run in finished
        ],
        {
            "optimizer": ("optimizer", lambda name: recipes.OPTIMIZERS[name].title),
            "seed": ("seed", str),
            "paper": ("test accuracy (paper)", percent),
            "corrected": ("test accuracy (corrected)", percent),
            "train_loss": ("train loss", "{:.4f}".format),
            "seconds": ("seconds", "{:.1f}".format),
        },
    )
    for name, meaning in PROTOCOLS.items():
        screen.say(f"{name}: {meaning}")
    for folder in sorted({run.path.parent for run in finished}):
        screen.saved("logs", folder)
