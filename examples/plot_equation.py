"""Draw the error of an equation's solution over seconds, from the runs of solve_equation.py.

python examples/plot_equation.py results/equations/poisson-2.jsonl
"""

import argparse
import collections
import json
import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

LABELS = {
    "natural_gradient": "natural gradient, nothing set",
    "kfac": "K-FAC, nothing set",
    "lbfgs": "L-BFGS, the same points",
    "adam": "Adam",
    "muon": "Muon",
}
LONG = 60.0  # seconds

Runs = dict[tuple[Any, int], list[tuple[float, float]]]  # of a rate and a seed: seconds and errors


def runs_of(rows: list[dict[str, Any]], optimizer: str) -> Runs:
    """The runs in float64 of one optimizer; of L-BFGS with the same points, as it needs."""
    runs: Runs = collections.defaultdict(list)
    for row in rows:
        settings = row["optimizer"], row["precision"], row["budget"], row["same_points"]
        if settings == (optimizer, "float64", LONG, optimizer == "lbfgs"):
            runs[row["rate"], row["seed"]].append((row["seconds"], row["error"]))
    return runs


def draw(axes: Axes, optimizer: str, runs: Runs) -> None:
    """The median and the range of the seeds, at the rate with the best end."""
    if not runs:
        return
    rates = {rate for rate, _ in runs}

    def end(rate: Any) -> float:
        return float(np.median([points[-1][1] for (r, _), points in runs.items() if r == rate]))

    best = min(rates, key=end)
    seconds = np.geomspace(1, LONG, 60)
    errors = np.array(
        [
            np.exp(np.interp(np.log(seconds), *np.log(np.array(points).T)))
            for (rate, _), points in runs.items()
            if rate == best
        ]
    )
    label = LABELS[optimizer] + (f", rate {best:g}" if best else "")
    (line,) = axes.plot(seconds, np.median(errors, axis=0), label=label)
    axes.fill_between(
        seconds, errors.min(axis=0), errors.max(axis=0), color=line.get_color(), alpha=0.2, lw=0
    )


def main() -> None:
    """A figure beside the file of runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=pathlib.Path, help="a file of JSON lines")
    path = parser.parse_args().runs
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for optimizer in LABELS:
        draw(axes, optimizer, runs_of(rows, optimizer))
    axes.set(
        xscale="log", yscale="log", xlabel="seconds of one core", ylabel="relative error in L2"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
