"""The table of costs in the documents, made from the benchmark's results."""

import json
from collections.abc import Mapping
from pathlib import Path

from kldwrm_jax.experiments.bench_networks import NETWORKS
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import markdown
from kldwrm_jax.experiments.runs import Record

BEGIN, END = "<!-- kldwrm bench: begin -->", "<!-- kldwrm bench: end -->"
# The case, the field of its row, and its digits.
Column = tuple[tuple[str, str], str, int]
COLUMNS: dict[str, Column] = {
    "K-FAC, nothing set": (("kfac-nothing-set", "oracle"), "process_ratio", 2),
    "K-FAC": (("kfac", "oracle"), "process_ratio", 2),
    "SO": (("so", "oracle"), "process_ratio", 2),
    "Q": (("q", "oracle"), "process_ratio", 2),
    "K-FAC, `value_and_grad`": (("kfac", "value_and_grad"), "process_ratio", 2),
    "K-FAC, staggered": (("kfac-staggered", "oracle"), "process_ratio", 2),
    "slowest step, nothing set": (("kfac-nothing-set", "oracle"), "slowest_step", 1),
    "slowest step": (("kfac", "oracle"), "slowest_step", 1),
    "slowest, staggered": (("kfac-staggered", "oracle"), "slowest_step", 1),
    "first call, nothing set": (("kfac-nothing-set", "oracle"), "compile_ratio", 1),
    "first call": (("kfac", "oracle"), "compile_ratio", 1),
}


def rewrite(document: Path, results: Path) -> None:
    """Puts the table of the results between the document's two marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"--tables {document} has no lines {BEGIN} and {END} for the table")
    document.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


def table(results: Path) -> str:
    """Every network that was measured on one core, relative to Adam: steps and first calls.

    A case that was measured on none of them has no column.
    """
    networks = {}
    for name, network in NETWORKS.items():
        path = results / f"{name}-1-core.json"
        if path.exists():
            result = json.loads(path.read_text())
            found = {(row["name"], row["gradient"]): row for row in result["rows"]}
            networks[f"{network.title}, batch {result['batch']}"] = found
    columns = {
        head: column
        for head, column in COLUMNS.items()
        if any(column[0] in found for found in networks.values())
    }
    rows = [
        [title, *(_number(found, column) for column in columns.values())]
        for title, found in networks.items()
    ]
    return markdown(["", *columns], rows)


def _number(found: Mapping[tuple[str, str], Record], column: Column) -> str:
    case, field, digits = column
    return f"{found[case][field]:.{digits}f}" if case in found else "-"
