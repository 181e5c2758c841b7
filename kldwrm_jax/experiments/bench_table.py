"""The table of costs in the documents, made from the benchmark's results."""

import json
from collections.abc import Mapping
from pathlib import Path

from kldwrm_jax.experiments.bench_networks import NETWORKS
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import markdown
from kldwrm_jax.experiments.runs import Record

BEGIN, END = "<!-- kldwrm bench: begin -->", "<!-- kldwrm bench: end -->"
CASES = {
    "K-FAC": ("kfac", "oracle"),
    "SO": ("so", "oracle"),
    "Q": ("q", "oracle"),
    "K-FAC, `value_and_grad`": ("kfac", "value_and_grad"),
    "K-FAC, staggered": ("kfac-staggered", "oracle"),
}


def rewrite(document: Path, results: Path) -> None:
    """Puts the table of the results between the document's two marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"--tables {document} has no lines {BEGIN} and {END} for the table")
    document.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


def table(results: Path) -> str:
    """Step time relative to Adam for every network that was measured on one core.

    The last columns are K-FAC's slowest step, without and with staggered inversions, and its first
    call relative to Adam's.
    """
    heads = ["", *CASES, "slowest step", "slowest, staggered", "first call"]
    rows = []
    for name, network in NETWORKS.items():
        path = results / f"{name}-1-core.json"
        if path.exists():
            result = json.loads(path.read_text())
            found = {(row["name"], row["gradient"]): row for row in result["rows"]}
            ratios = [_number(found, case, "process_ratio", 2) for case in CASES.values()]
            slowest = [
                _number(found, (case, "oracle"), "slowest_step", 1)
                for case in ("kfac", "kfac-staggered")
            ]
            first = _number(found, ("kfac", "oracle"), "compile_ratio", 1)
            rows.append([f"{network.title}, batch {result['batch']}", *ratios, *slowest, first])
    return markdown(heads, rows)


def _number(
    found: Mapping[tuple[str, str], Record], case: tuple[str, str], field: str, digits: int
) -> str:
    return f"{found[case][field]:.{digits}f}" if case in found else "-"
