"""``kldwrm train``: any optimizer on any network and data set."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff

from kldwrm_jax.experiments import data, recipes, training
from kldwrm_jax.experiments.progress import console, progress_bars


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train any optimizer on any network and data set; resumable.

    Metrics go to OUT/DATASET-MODEL-OPTIMIZER/seed-N.jsonl, one JSON line per epoch. The defaults
    are the paper's best settings.
    """

    dataset: str = "digits"  # digits or mnist.
    data_dir: Path | None = None  # MNIST's IDX files; default: $KLDWRM_DATA or a download.
    model: str | None = None  # paper-cnn (default for 28 x 28 images), cnn (for others) or mlp.
    optimizer: tuple[str, ...] = ("qe",)  # One or more of sgd, adam, kfac, so, q, qe.
    epochs: int = 10  # Passes over the training data.
    seeds: int = 1  # Number of seeds.
    first_seed: int = 0  # The first of them.
    batch_size: int = 512  # Examples per step.
    learning_rate: float | None = None  # Defaults to 0.01 (sgd: 0.05, adam: 0.003).
    # Other arguments of the optimizer, such as: rho 0.7 kl_clip None.
    set: dict[str, int | float | str | None] = dataclasses.field(default_factory=dict)
    fisher: Literal["empirical", "sampled", "exact"] = "empirical"  # Labels of the Fisher.
    bias: Literal["separate", "joint"] = "separate"  # Curvature blocks of biases.
    out: Path = Path("runs/train")  # Folder for the logs.
    resume: FlagCreatePairsOff[bool] = False  # Continue interrupted runs.

    def run(self) -> None:
        """Trains every seed of every optimizer."""
        rate = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        settings = [recipes.setting(name, {**rate, **self.set}) for name in self.optimizer]
        dataset = data.load(self.dataset, self.data_dir)
        model = self.model or ("paper-cnn" if dataset.train_x.shape[1] == 28 else "cnn")
        size = min(self.batch_size, len(dataset.train_y))
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        with progress_bars(console()) as progress:
            for setting in settings:
                task = dataset.name, model, setting, self.epochs, size, self.fisher, self.bias
                folder = self.out / f"{dataset.name}-{model}-{setting.optimizer}"
                options: Any = {"resume": self.resume, "progress": progress}
                training.train_seeds(training.Spec(*task), dataset, seeds, folder, **options)
        console().print(f"logs: {self.out}")
