"""``kldwrm paper``: the paper's experiment, sixteen settings on MNIST."""

import dataclasses
from pathlib import Path
from typing import Literal

from kldwrm_jax.experiments import data, recipes, report, training
from kldwrm_jax.experiments.errors import check_names
from kldwrm_jax.experiments.progress import console, progress_bars
from kldwrm_jax.experiments.table import PAPER_SETTINGS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """Reproduce the paper's experiment: sixteen settings on MNIST; resumable.

    Trains the paper's network in the settings of its tables, then writes the report of `kldwrm
    report`. When called again, finished runs are skipped and an interrupted one continues.
    """

    table: Literal["supplement", "main"] = "supplement"  # All settings, or each solver's best.
    solvers: tuple[str, ...] = recipes.SOLVERS  # Some of kfac, so, q, qe.
    seeds: int = 10  # Number of seeds.
    first_seed: int = 0  # The first of them.
    epochs: int = 50  # Passes over the training data.
    batch_size: int = 512  # Examples per step.
    data_dir: Path | None = None  # MNIST's IDX files; default: $KLDWRM_DATA or a download.
    out: Path = Path("runs/paper")  # Folder for logs and report.

    def run(self) -> None:
        """Trains what is missing, then writes the report."""
        check_names("--solvers", self.solvers, recipes.SOLVERS)
        dataset, size = data.load("mnist", self.data_dir), self.batch_size
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        with progress_bars(console()) as progress:
            for name, _, setting, _, best in PAPER_SETTINGS:
                if setting.optimizer in self.solvers and (best or self.table == "supplement"):
                    spec = training.Spec(dataset.name, "paper-cnn", setting, self.epochs, size)
                    folder = self.out / name
                    training.train_seeds(
                        spec, dataset, seeds, folder, resume=True, progress=progress
                    )
        report.Report(self.out).run()
