"""Figures, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kldwrm_jax.experiments.runs import Record, Run

Row = tuple[str, str, bool]  # heading, metric, whether it is a test metric

ACCURACY: Row = ("test accuracy", "accuracy", True)
LOSS: Row = ("test loss", "loss", True)
TRAIN_LOSS: Row = ("train loss", "train_loss", False)


def every_seed(
    path: Path, title: str, groups: Mapping[str, Sequence[Run]], protocol: str, rows: Sequence[Row]
) -> Path:
    """The paper's figures: a column a setting, a row a metric, a line a seed."""
    figure = _figure(3.2 * len(groups), 2.4 * len(rows))
    axes = figure.subplots(len(rows), len(groups), sharex="col", sharey="row", squeeze=False)
    for column, (label, runs) in enumerate(groups.items()):
        for row, (heading, metric, test) in enumerate(rows):
            panel: Axes = axes[row, column]
            for run in runs:
                curve = run.curve(metric, protocol if test else None)
                panel.plot(range(1, len(curve) + 1), curve, linewidth=0.8, alpha=0.8)
            _finish(panel, metric)
            if column == 0:
                panel.set_ylabel(heading)
            if row == 0:
                panel.set_title(label.replace(": ", ":\n"), fontsize=9)
            if row == len(rows) - 1:
                panel.set_xlabel("epoch")
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for row, (_, metric, test) in enumerate(rows):
        curves = [r.curve(metric, protocol if test else None) for rs in groups.values() for r in rs]
        _zoom(axes[row, 0], np.concatenate(curves), metric)
    figure.suptitle(title, fontsize=11)
    return _save(figure, path)


def mean_and_band(
    path: Path, title: str, groups: Mapping[str, Sequence[Run]], protocol: str
) -> Path:
    """Test loss and accuracy against epochs and seconds: the mean over seeds, and their range."""
    figure = _figure(10, 7)
    axes = figure.subplots(2, 2, sharey="row")
    every: dict[str, list[np.ndarray]] = {"loss": [], "accuracy": []}
    for label, runs in groups.items():
        epochs = min(len(run.epochs) for run in runs)
        seconds = np.mean([run.curve("seconds")[:epochs] for run in runs], axis=0)
        for row, metric in enumerate(("loss", "accuracy")):
            curves = np.array([run.curve(metric, protocol)[:epochs] for run in runs])
            every[metric].append(curves.ravel())
            for column, x in enumerate((np.arange(1, epochs + 1), seconds)):
                panel: Axes = axes[row, column]
                _band(panel, x, curves, label)
    for row, metric in enumerate(("loss", "accuracy")):
        for column, heading in enumerate(("epoch", "seconds of training")):
            _finish(axes[row, column], metric)
            axes[row, column].set_xlabel(heading)
        axes[row, 1].set_xscale("log")  # a step may cost ten times another's
        axes[row, 0].set_ylabel(f"test {metric}")
        _zoom(axes[row, 0], np.concatenate(every[metric]), metric)
    axes[0, 1].legend(fontsize=9)
    figure.suptitle(title, fontsize=11)
    return _save(figure, path)


def by_protocol(
    path: Path, title: str, groups: Mapping[str, Sequence[Run]], protocols: Sequence[str]
) -> Path:
    """Test accuracy under each protocol: the mean over seeds, and their range."""
    figure = _figure(1 + 4.5 * len(protocols), 4)
    axes = figure.subplots(1, len(protocols), sharey=True, squeeze=False)[0]
    every = []
    for panel, protocol in zip(axes, protocols, strict=True):
        for label, runs in groups.items():
            curves = np.array([run.curve("accuracy", protocol) for run in runs])
            every.append(curves.ravel())
            _band(panel, np.arange(1, curves.shape[1] + 1), curves, f"{label}, {len(runs)} runs")
        _finish(panel, "accuracy")
        panel.set_title(f"protocol {protocol}", fontsize=10)
        panel.set_xlabel("epoch")
    _zoom(axes[0], np.concatenate(every), "accuracy")
    axes[0].set_ylabel("test accuracy")
    axes[-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    return _save(figure, path)


def _band(panel: Axes, x: np.ndarray, curves: np.ndarray, label: str) -> None:
    """The mean of some curves, and their range."""
    (line,) = panel.plot(x, curves.mean(axis=0), label=label, linewidth=1.5)
    panel.fill_between(
        x, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.15
    )


def cost(path: Path, result: Record, titles: Mapping[str, str]) -> Path:
    """What ``kldwrm bench --scaling`` found: cost in steps of SGD against width and batch size."""
    figure = _figure(11, 4.2)
    axes = figure.subplots(1, 2, sharey=True)
    headings = {"width": "layer width, batch 512", "batch": "batch size, width 512"}
    for (axis, heading), panel in zip(headings.items(), axes, strict=True):
        rows = [row for row in result["rows"] if row["axis"] == axis]
        for name in dict.fromkeys(row["name"] for row in rows):
            own = [(r[axis], r["seconds"] / r["sgd_seconds"]) for r in rows if r["name"] == name]
            panel.plot(*zip(*own, strict=True), marker="o", label=titles[name])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(heading)
        panel.grid(alpha=0.3, which="both")
    axes[0].set_ylabel(f"cost in steps of SGD, refresh every {result['period']}")
    axes[1].legend(fontsize=7)
    return _save(figure, path)


def curves(
    path: Path, title: str, metric: str, groups: Mapping[str, Sequence[Sequence[tuple]]]
) -> Path:
    """What ``kldwrm race`` found: a metric against steps, the median over seeds and its range."""
    figure = _figure(7, 4.5)
    panel: Axes = figure.subplots()
    for label, runs in groups.items():
        steps = [step for step, _ in runs[0]]
        values = np.array([[np.nan if v is None else v for _, v in run] for run in runs])
        (line,) = panel.plot(steps, np.median(values, axis=0), label=label, linewidth=1.5)
        panel.fill_between(
            steps, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.12
        )
    _finish(panel, metric)
    every = [v for runs in groups.values() for run in runs for _, v in run if v is not None]
    _zoom(panel, np.array(every), metric)
    panel.set_xlabel("steps")
    panel.set_ylabel(f"test {metric}")
    panel.legend(fontsize=7)
    panel.set_title(title, fontsize=11)
    return _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _finish(panel: Axes, metric: str) -> None:
    panel.grid(alpha=0.3)
    if metric == "accuracy":
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        panel.set_yscale("log")


def _zoom(panel: Axes, values: np.ndarray, metric: str) -> None:
    """Accuracies of the first epochs are far below all others: leaves the lowest tenth out."""
    values = values[np.isfinite(values)]
    if metric == "accuracy" and len(values):
        low, high = np.quantile(values, 0.1), values.max()
        margin = max(0.1 * (high - low), 0.002)
        panel.set_ylim(low - margin, min(high + margin, 1.0))


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
