"""The command ``kldwrm``. Each of its commands is a module with ``add_arguments`` and ``run``."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kldwrm_jax.experiments.errors import UsageError


class Command(NamedTuple):
    """Where a command is, and what it does in a line."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command(
        "kldwrm_jax.experiments.demo",
        "six optimizers on handwritten digits: a table and a figure in two minutes",
    ),
    "train": Command(
        "kldwrm_jax.experiments.train", "any optimizer on any network and data set, resumable"
    ),
    "paper": Command(
        "kldwrm_jax.experiments.paper", "the paper's sixteen settings on MNIST, resumable"
    ),
    "report": Command(
        "kldwrm_jax.experiments.report", "the paper's table and figures from runs on disk"
    ),
    "bench": Command("kldwrm_jax.experiments.bench", "what a step of each optimizer costs"),
    "race": Command(
        "kldwrm_jax.experiments.race", "steps to fixed targets, with and without calibration"
    ),
    "predict": Command(
        "kldwrm_jax.experiments.predict", "what a step would cost on many accelerators"
    ),
}
EXTRA = {"matplotlib", "platformdirs", "rich", "sklearn"}
INTERRUPTED = 130  # as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: what stands after ``kldwrm``; None takes it from the command line.

    Returns:
      The exit status: 0 if all went well, 1 for what could not be done, 2 for a wrong command line,
      130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(_overview())
        return 0 if name else 2
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"kldwrm: unknown command {name!r}; choose from {known}", file=sys.stderr)
        return 2
    try:
        return _run(name, words[1:])
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(
            f"kldwrm {name} needs the package {package}, which is not installed.\n"
            f"Install all that the experiments need: pip install 'kldwrm_jax[experiments]'",
            file=sys.stderr,
        )
    except UsageError as error:
        print(f"kldwrm {name}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"\nkldwrm {name}: interrupted. Every epoch that ended is in the logs: `kldwrm report` "
            f"reads them, `kldwrm train --resume` and `kldwrm paper` go on with them.",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 1


def _run(name: str, words: Sequence[str]) -> int:
    module = importlib.import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser(prog=f"kldwrm {name}")
    module.add_arguments(parser)
    if parser.description is None:
        parser.description = COMMANDS[name].summary
    return module.run(parser.parse_args(words))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kldwrm COMMAND [arguments]",
            "",
            "Natural-gradient optimizers at work: K-FAC and the KLD-WRM family.",
            "",
            *lines,
            "",
            "`kldwrm COMMAND --help` explains a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
