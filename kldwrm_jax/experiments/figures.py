"""Figures, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kldwrm_jax.experiments.runs import Run

Groups = Mapping[str, Sequence[Run]]  # runs by the label of their setting
Curves = Mapping[str, tuple[Sequence, np.ndarray]]  # by label, x and an array (seeds, points)
Panels = Mapping[str, Curves]  # by the label of the x-axis


def every_seed(path: Path, title: str, groups: Groups, protocol: str, metrics: Any) -> Path:
    """The paper's figures: one column per setting, one row per metric, one line per seed."""
    figure = Figure(figsize=(3.2 * len(groups), 2.4 * len(metrics)), layout="constrained")
    axes = figure.subplots(len(metrics), len(groups), sharex="col", sharey="row", squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        name = metric.removeprefix("test ").replace(" ", "_")
        curves = {label: [r.curve(name, protocol) for r in groups[label]] for label in groups}
        for panel, own in zip(row, curves.values(), strict=True):
            for curve in own:
                panel.plot(range(1, len(curve) + 1), curve, linewidth=0.8, alpha=0.8)
        _finish(row, metric, [curve for own in curves.values() for curve in own])
    for column, label in zip(axes.T, groups, strict=True):
        column[0].set_title(label.replace(": ", ":\n"), fontsize=9)
        column[-1].set_xlabel("epoch")
        column[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return _save(figure, path, title)


def bands(path: Path, title: str, metric: str, panels: Panels, middle: Any = np.mean) -> Path:
    """Panels side by side: the mean or median of curves over seeds, and their range."""
    figure = Figure(figsize=(1 + 4.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (xlabel, curves) in zip(axes, panels.items(), strict=True):
        for label, (x, values) in curves.items():
            (line,) = panel.plot(x, middle(values, axis=0), label=label, linewidth=1.5)
            low, high = values.min(axis=0), values.max(axis=0)
            panel.fill_between(x, low, high, color=line.get_color(), alpha=0.15)
        panel.set_xlabel(xlabel)
    _finish(axes, metric, [v.ravel() for curves in panels.values() for _, v in curves.values()])
    axes[-1].legend(fontsize=8)
    return _save(figure, path, title)


def by_protocol(path: Path, title: str, groups: Groups, protocols: Sequence[str]) -> Path:
    """Test accuracy under each protocol: mean and range over seeds."""
    panels: dict[str, dict] = {}
    for protocol in protocols:
        panel = panels[f"epoch, protocol {protocol}"] = {}
        for label, members in groups.items():
            values = np.array([run.curve("accuracy", protocol) for run in members])
            panel[f"{label}, {len(members)} runs"] = np.arange(1, values.shape[1] + 1), values
    return bands(path, title, "test accuracy", panels)


def _finish(row: Sequence[Axes], metric: str, curves: Sequence[Any]) -> None:
    """Scales and labels the panels of a row, which share the y-axis."""
    for panel in row:
        panel.grid(alpha=0.3)
    row[0].set_ylabel(metric)
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if not metric.endswith("accuracy"):
        row[0].set_yscale("log")
    elif len(values):
        row[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        low, high = np.quantile(values, 0.1), values.max()  # without the first epochs
        margin = max(0.1 * (high - low), 0.002)
        row[0].set_ylim(low - margin, min(high + margin, 1.0))


def _save(figure: Figure, path: Path, title: str) -> Path:
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
