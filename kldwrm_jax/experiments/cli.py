"""The command ``kldwrm``. Each subcommand is a dataclass of options with a method ``run``."""

import sys
from collections.abc import Sequence
from typing import Any

from kldwrm_jax.experiments.errors import UsageError

EXTRA = {"matplotlib", "orbax", "pooch", "rich", "scipy", "sklearn", "tyro"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    try:
        _parse(argv).run()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        fix = "pip install 'kldwrm_jax[experiments]'"
        return _fail(f"the package {package} is missing; install the extra `experiments`: {fix}")
    except UsageError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what is in the logs can be resumed", status=130)
    return 0


def _fail(message: str, status: int = 1) -> int:
    print(f"kldwrm: {message}", file=sys.stderr)
    return status


def _parse(argv: Sequence[str] | None) -> Any:
    import tyro

    from kldwrm_jax.experiments import bench, demo, paper, race, report, train

    commands = demo.Demo, train.Train, paper.Paper, report.Report, bench.Bench, race.Race
    by_name: dict[str, Any] = {command.__name__.lower(): command for command in commands}
    about = "Experiments with K-FAC and the KLD-WRM family of natural-gradient optimizers."
    parse = tyro.extras.subcommand_cli_from_dict
    return parse(by_name, prog="kldwrm", description=about, args=argv)


if __name__ == "__main__":
    sys.exit(main())
