"""``kldwrm report``: the paper's Table 1 and figures, with the paper's numbers beside ours."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tyro.conf import Positional

from kldwrm_jax.experiments import figures, recipes, runs
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import console, markdown, print_markdown
from kldwrm_jax.experiments.runs import Record, Run
from kldwrm_jax.experiments.table import COLUMNS, PAPER_SETTINGS, RULE, Row, difference, summarise
from kldwrm_jax.experiments.training import Spec

_DIGITS = {"mean_loss": 3, "std_loss": 3, "epochs_to_98": 1}  # otherwise 2


@dataclasses.dataclass(frozen=True)
class Report:
    """Make the paper's table and figures from a folder of runs.

    Writes RUNS/report/report.md, with Table 1 and pairwise comparisons of the settings, and the
    paper's figures (test accuracy, test loss and train loss, one line per seed) beside it.
    """

    runs: Positional[Path]  # Folder with runs anywhere below it.

    def run(self) -> None:
        """Writes and prints the report."""
        path = write(self.runs)
        parts = path.read_text().split("\n\n")
        print_markdown("\n\n".join(part for part in parts if not part.startswith("![")))
        console().print(f"report: {path}")


class Group(NamedTuple):
    """Runs that differ in their seeds only; tables show the ``finished`` ones, figures all."""

    label: str
    runs: Sequence[Run]
    finished: Sequence[Run]
    optimizer: str
    task: list  # what comparable groups share
    paper: Row  # the paper's numbers for this setting, if any
    best: bool  # one of the four settings of the paper's main table


def write(folder: Path) -> Path:
    """Writes the report of a folder of runs; returns the Markdown file."""
    groups = _groups([run for run in runs.read_all(folder) if run.epochs])
    if not groups:
        raise UsageError(f"{folder}: no run has completed an epoch yet")
    path = folder / "report" / "report.md"
    epochs = ", ".join(str(epochs) for epochs in sorted({group.task[-1] for group in groups}))
    parts = [
        "# Report",
        f"Means and sample standard deviations (n - 1) after the last epoch ({epochs}). {RULE}",
        "In brackets: the paper's numbers, from ten runs of 50 epochs; a slash is the paper's own, "
        "where it calls the counting debatable.",
    ]
    if finished := {group.label: group.finished for group in groups if group.finished}:
        overview, protocols = path.with_name("protocols.png"), list(runs.PROTOCOLS)
        parts += _links([figures.by_protocol(overview, "Test accuracy", finished, protocols)])
    for protocol, meaning in runs.PROTOCOLS.items():
        rows = [_row(group, protocol) for group in groups if group.finished]
        table = markdown(["setting", "runs", *COLUMNS.values()], rows)
        parts += [f"## Protocol `{protocol}`: {meaning}", table]
        parts += _differences(groups, protocol) + _links(_figures(groups, protocol, path.parent))
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _groups(found: Sequence[Run]) -> list[Group]:
    by_spec: dict[str, list[Run]] = {}
    for run in found:
        spec = {field.name: run.header[field.name] for field in dataclasses.fields(Spec)}
        by_spec.setdefault(json.dumps(spec, sort_keys=True), []).append(run)
    groups = [_group(json.loads(spec), members) for spec, members in by_spec.items()]
    order = [entry.label for entry in PAPER_SETTINGS]
    return sorted(groups, key=lambda g: order.index(g.label) if g.paper else len(order))


def _group(spec: Record, members: Sequence[Run]) -> Group:
    setting, task = recipes.Setting(**spec["setting"]), [spec["dataset"], spec["model"]]
    defaults = recipes.OPTIMIZERS[setting.optimizer].defaults
    changed = [f"{k} = {v}" for k, v in setting.arguments.items() if defaults.get(k, ...) != v]
    row: Row = {}
    label, best = f"{setting.title}: {', '.join([*task, *changed])}", False
    for entry in PAPER_SETTINGS:
        if dataclasses.asdict(Spec("mnist", "paper-cnn", entry.setting, spec["epochs"])) == spec:
            _, label, _, row, best = entry
    finished, task = [run for run in members if run.finished], [*task, spec["epochs"]]
    return Group(label, members, finished, setting.optimizer, task, row, best)


def _links(paths: Sequence[Path]) -> list[str]:
    return [f"![{path.stem}]({path.name})" for path in paths]


def _number(value: float | str, digits: int) -> str:
    if not isinstance(value, float):
        return str(value)
    return "–" if runs.number(value) is None else f"{value:.{digits}f}"


def _row(group: Group, protocol: str) -> list[str]:
    """A row of Table 1: our numbers and, in brackets, the paper's."""
    unfinished = len(group.runs) - len(group.finished)
    row = [group.label, f"{len(group.finished)}{f' ({unfinished} unfinished)' * bool(unfinished)}"]
    ours = summarise(group.finished, protocol)
    for name in COLUMNS:
        papers = f" ({_number(group.paper[name], 2)})" if name in group.paper else ""
        row.append(_number(ours[name], _DIGITS.get(name, 2)) + papers)
    return row


def _differences(groups: Sequence[Group], protocol: str) -> list[str]:
    """Pairwise comparisons; of the paper's settings, the best of each solver only."""
    several = [g for g in groups if len(g.finished) > 1 and (not g.paper or g.best)]
    rows = []
    for one, other in itertools.combinations(several, 2):
        if one.task == other.task:
            points, p, ratio, ratio_p = difference(one.finished, other.finished, protocol)
            numbers = f"{points:+.2f}", _number(p, 3), _number(ratio, 2), _number(ratio_p, 3)
            rows.append([one.label, other.label, *numbers])
    heads = "setting", "against", "mean accuracy, points", "p", "std ratio", "p"
    explained = (
        f"Differences after the last epoch: means, with p of Welch's t-test, and standard "
        f"deviations, with p of the Brown-Forsythe test. Not corrected for the {len(rows)} "
        f"comparisons."
    )
    return [explained, markdown(heads, rows)] if rows else []


def _figures(groups: Sequence[Group], protocol: str, out: Path) -> list[Path]:
    titles = {name: known.title for name, known in recipes.OPTIMIZERS.items()}
    metrics, paths = ("test accuracy", "test loss", "train loss"), []
    for name, title in {"best": "The best setting of each solver", **titles}.items():
        best = name == "best"
        chosen = {g.label: g.runs for g in groups if (g.best if best else g.optimizer == name)}
        if chosen:
            path, heading = out / f"{name}-{protocol}.png", f"{title}, protocol {protocol}"
            shown = metrics[:2] if best else metrics
            paths.append(figures.every_seed(path, heading, chosen, protocol, shown))
    return paths
