"""Steps and seconds to the targets of a race, tabulated from its log."""

from collections.abc import Sequence

import numpy as np

from kldwrm_jax.experiments.figures import Curves
from kldwrm_jax.experiments.progress import markdown
from kldwrm_jax.experiments.race_cases import METHODS, Problem
from kldwrm_jax.experiments.runs import Record

TUNING_SEED = 100
_MISSED = {"step": np.inf, "cpu_seconds": np.inf}


def to_targets(problem: Problem, record: Record) -> dict[str, float]:
    """Steps and seconds of a run to each target, infinite if missed, and its last value."""
    row = {"rate": np.inf if record["rate"] is None else record["rate"]}
    for target in problem.targets:
        hits = (point for point in record["curve"] if problem.reached(point["value"], target))
        hit = next(hits, _MISSED)
        row |= {f"steps to {target:g}": hit["step"], f"seconds to {target:g}": hit["cpu_seconds"]}
    last = record["curve"][-1]["value"]
    return {**row, "end": np.inf if last is None else last}


def _tuning(problem: Problem, records: Sequence[Record], method: str) -> list[dict[str, float]]:
    own = [r for r in records if r["method"] == method and r["seed"] == TUNING_SEED]
    return [to_targets(problem, record) for record in own]


def best_rate(problem: Problem, records: Sequence[Record], method: str) -> float | None:
    """The learning rate, if any, that reached the hardest targets first on the tuning seed."""
    if not METHODS[method].rates:
        return None
    steps = [f"steps to {target:g}" for target in reversed(problem.targets)]
    sign = -1 if problem.metric == "accuracy" else 1
    rows = _tuning(problem, records, method)
    if not rows:  # it has not been tuned yet
        return None
    return min(rows, key=lambda row: [*(row[name] for name in steps), sign * row["end"]])["rate"]


def counted(problem: Problem, records: Sequence[Record], method: str) -> list[Record]:
    """The runs of a method that count: at its best learning rate, without the tuning seed."""
    others = [r for r in records if r["method"] == method and r["seed"] != TUNING_SEED]
    return [r for r in others if r["rate"] == best_rate(problem, records, method)]


def summary(problem: Problem, records: Sequence[Record]) -> str:
    """A Markdown table of medians over seeds, with a dash where half or more miss a target."""
    end = "{:.4f}" if problem.metric == "accuracy" else "{:.3g}"
    forms = {"rate": "{:g}", "steps": "{:.0f}", "seconds": "{:.1f}", "end": end}
    heads, rows = [""], []
    for method, known in METHODS.items():
        if own := [to_targets(problem, record) for record in counted(problem, records, method)]:
            medians = {name: np.median([row[name] for row in own]) for name in own[0]}
            numbers = [forms[name.split(" ")[0]].format(x) for name, x in medians.items()]
            tried = _tuning(problem, records, method)
            works = [row for row in tried if np.isfinite(row[f"steps to {problem.targets[0]:g}"])]
            works_at = f"{len(works)} of {len(tried)}" if tried else "-"
            rows.append([known.title, *numbers, works_at])
            heads = ["", *medians, "rates that work"]
    cells = [[cell.replace("inf", "-") for cell in row] for row in rows]
    return f"## {problem.title}\n\n{markdown(heads, cells)}\n"


def curves(problem: Problem, records: Sequence[Record]) -> Curves:
    """The curves of the runs that count, by method; over seconds where these are limited."""
    found, place = {}, "cpu_seconds" if problem.seconds < np.inf else "step"
    for method, known in METHODS.items():
        if own := counted(problem, records, method):
            points = list(
                zip(*(record["curve"] for record in own), strict=False)
            )  # to the shortest
            places = [np.median([point[place] for point in each]) for each in points]
            values = [[point["value"] for point in each] for each in points]
            found[known.title] = places, np.array(values, float).T
    return found
