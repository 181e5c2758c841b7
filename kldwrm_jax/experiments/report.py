"""``kldwrm report``: the paper's Table 1 and its figures, with the paper's numbers beside ours."""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from kldwrm_jax.experiments import figures, recipes, runs
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import Format, Screen
from kldwrm_jax.experiments.recipes import PAPER_SETTINGS, Count, PaperSetting, Setting
from kldwrm_jax.experiments.runs import Record, Run
from kldwrm_jax.experiments.table import Rule, difference, summarise
from kldwrm_jax.experiments.training import Spec

RULE = Rule()

COLUMNS = {
    "at_least_98": "runs acc. ≥ 98 %",
    "above_98": "runs acc. > 98 %",
    "at_least_985": "runs acc. ≥ 98.5 %",
    "loss_below_025": "runs loss < 0.25",
    "loss_below_02": "runs loss < 0.2",
    "mean_accuracy": "mean accuracy, %",
    "std_accuracy": "std accuracy, %",
    "mean_loss": "mean loss",
    "std_loss": "std loss",
    "epochs_to_98": "epochs to 98 %",
}
_DIGITS = {"mean_loss": 3, "std_loss": 3, "epochs_to_98": 1}  # two for all others


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone; ``paper``: the paper's row, if it has one for them."""

    label: str
    optimizer: str
    epochs: int
    runs: tuple[Run, ...]
    paper: PaperSetting | None

    @property
    def finished(self) -> tuple[Run, ...]:
        """Runs that came to their last epoch; the others are in figures, not in tables."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def problem(self) -> tuple:
        """What groups share that can be compared."""
        return tuple(self.runs[0].header[name] for name in ("dataset", "model", "epochs"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Makes the paper's Table 1 with its nine columns, and its figures (test accuracy, test "
        "loss, train loss; one line a seed), from all runs below a folder, and compares settings "
        "in pairs: RUNS/report/report.md and PNG files beside it."
    )
    parser.add_argument("folder", type=Path, metavar="RUNS", help="the folder of some runs")
    parser.add_argument(
        "--protocol",
        choices=(*runs.PROTOCOLS, "both"),
        default="both",
        help="which evaluation to report (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Reports."""
    write(args.folder, protocols(args.protocol), Screen())
    return 0


def protocols(choice: str) -> tuple[str, ...]:
    """Those that a choice of the command line stands for."""
    return tuple(runs.PROTOCOLS) if choice == "both" else (choice,)


def write(folder: Path, chosen: Sequence[str], screen: Screen) -> Path:
    """Writes the report of a folder of runs, and shows its tables.

    Args:
      folder: with runs anywhere below it.
      chosen: protocols, one table and one set of figures each.
      screen: where it is shown.

    Returns:
      The path of the Markdown file.
    """
    groups = _groups([run for run in runs.read_all(folder) if run.epochs])
    if not groups:
        raise UsageError(f"{folder}: no run in it has ended an epoch yet")
    out = folder / "report"
    parts = ["# Report", _preamble(groups)]
    if whole := {group.label: group.finished for group in groups if group.finished}:
        path = figures.by_protocol(out / "protocols.png", "Test accuracy", whole, chosen)
        parts.append(f"![{path.stem}]({path.name})")
    for protocol in chosen:
        parts.append(f"## Protocol `{protocol}`: {runs.PROTOCOLS[protocol]}")
        parts.append(_markdown(groups, protocol))
        parts += _differences(groups, protocol)
        parts += [f"![{path.stem}]({path.name})" for path in _figures(groups, protocol, out)]
        _show(groups, protocol, screen)
    path = out / "report.md"
    runs.replace(path, ("\n\n".join(parts) + "\n").encode())
    screen.say(str(RULE))
    screen.saved("report", path)
    return path


def _show(groups: Sequence[Group], protocol: str, screen: Screen) -> None:
    columns: dict[str, tuple[str, Format]] = {"setting": ("setting", str), "runs": ("runs", str)}
    columns |= {
        name: (heading, functools.partial(_text, name)) for name, heading in COLUMNS.items()
    }
    screen.table(f"Protocol {protocol}: ours (the paper's)", _rows(groups, protocol), columns)


def _groups(found: Sequence[Run]) -> list[Group]:
    by_identity: dict[str, list[Run]] = {}
    for each in found:
        by_identity.setdefault(json.dumps(_identity(each.header), sort_keys=True), []).append(each)
    groups = [_group(members) for members in by_identity.values()]
    order = [entry.label for entry in PAPER_SETTINGS]
    return sorted(groups, key=lambda g: order.index(g.label) if g.paper else len(order))


def _identity(header: Record) -> Record:
    return {name: header[name] for name in sorted(field.name for field in dataclasses.fields(Spec))}


def _group(members: Sequence[Run]) -> Group:
    header = members[0].header
    setting = Setting(**header["setting"])
    paper = next(
        (
            entry
            for entry in PAPER_SETTINGS
            if _identity(header)
            == Spec("mnist", "paper-cnn", entry.setting, header["epochs"]).record()
        ),
        None,
    )
    label = paper.label if paper else _label(header, setting)
    return Group(label, setting.optimizer, header["epochs"], tuple(members), paper)


def _label(header: Record, setting: Setting) -> str:
    defaults = recipes.OPTIMIZERS[setting.optimizer].defaults
    changed = [
        f"{name} = {value}"
        for name, value in setting.arguments.items()
        if defaults.get(name, ...) != value
    ]
    return ": ".join(
        [setting.title, ", ".join([f"{header['dataset']}, {header['model']}", *changed])]
    )


def _preamble(groups: Sequence[Group]) -> str:
    epochs = sorted({group.epochs for group in groups})
    unfinished = [
        f"{group.label}: {len(group.runs) - len(group.finished)}"
        for group in groups
        if len(group.finished) < len(group.runs)
    ]
    lines = [
        f"Means and deviations (of a sample, n - 1) are those after the last epoch "
        f"({', '.join(map(str, epochs))}). {RULE}",
        "In brackets: the paper's numbers, ten runs of 50 epochs each; a slash is the paper's own, "
        "where it calls the counting debatable.",
    ]
    if unfinished:
        lines.append(f"Unfinished runs, in the figures but not in tables: {'; '.join(unfinished)}.")
    return "\n\n".join(lines)


def _rows(groups: Sequence[Group], protocol: str) -> list[Record]:
    return [
        {"setting": group.label, "runs": len(group.finished), **_cells(group, protocol)}
        for group in groups
        if group.finished
    ]


def _cells(group: Group, protocol: str) -> Record:
    """By column, our number and the paper's, if it has one."""
    ours = dataclasses.asdict(summarise(group.finished, protocol, RULE))
    row = group.paper.row._asdict() if group.paper else {}
    return {
        name: {
            "ours": runs.number(value) if isinstance(value, float) else value,
            "paper": str(row[name]) if isinstance(row.get(name), Count) else row.get(name),
        }
        for name, value in ours.items()
    }


def _text(name: str, cell: Record) -> str:
    ours = _number(cell["ours"], _DIGITS.get(name, 2))
    return ours if cell["paper"] is None else f"{ours} ({_number(cell['paper'], 2)})"


def _number(value: float | str | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _markdown(groups: Sequence[Group], protocol: str) -> str:
    return _table(
        ["setting", "runs", *COLUMNS.values()],
        [
            [row["setting"], str(row["runs"]), *(_text(name, row[name]) for name in COLUMNS)]
            for row in _rows(groups, protocol)
        ],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def _differences(groups: Sequence[Group], protocol: str) -> list[str]:
    """Pairs of settings that can be compared; of the paper's, the best of each solver."""
    several = [g for g in groups if len(g.finished) > 1 and (g.paper is None or g.paper.best)]
    rows = []
    for one, other in itertools.combinations(several, 2):
        if one.problem == other.problem:
            found = difference(one.finished, other.finished, protocol)
            digits = {"p": 3, "ratio": 2, "ratio_p": 3}
            numbers = (_number(runs.number(getattr(found, name)), n) for name, n in digits.items())
            rows.append([one.label, other.label, f"{found.points:+.2f}", *numbers])
    if not rows:
        return []
    heads = "setting", "against", "mean accuracy, points", "p", "deviation, ratio", "p"
    return [
        f"Differences after the last epoch: of means, with p by Welch's t test, and of deviations, "
        f"with p by Brown and Forsythe's. Nothing makes up for there being {len(rows)} pairs.",
        _table(heads, rows),
    ]


def _figures(groups: Sequence[Group], protocol: str, out: Path) -> list[Path]:
    paths = []
    for name, optimizer in recipes.OPTIMIZERS.items():
        members = {g.label: g.runs for g in groups if g.optimizer == name}
        if members:
            paths.append(
                figures.every_seed(
                    out / f"{name}-{protocol}.png",
                    f"{optimizer.title}, protocol {protocol}",
                    members,
                    protocol,
                    (figures.ACCURACY, figures.LOSS, figures.TRAIN_LOSS),
                )
            )
    best = {g.label: g.runs for g in groups if g.paper and g.paper.best}
    if best:
        paths.insert(
            0,
            figures.every_seed(
                out / f"best-{protocol}.png",
                f"The best setting of each solver, protocol {protocol}",
                best,
                protocol,
                (figures.ACCURACY, figures.LOSS),
            ),
        )
    return paths
