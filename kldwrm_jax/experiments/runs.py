"""The log of a training run: JSON lines of kind "run" (settings), "epoch" and "end"."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kldwrm_jax.experiments.errors import UsageError

Record = dict[str, Any]

PROTOCOLS = {
    "paper": "test images scaled to [0, 1] and not normalised, as in the paper",
    "corrected": "test images normalised as the training images are",
}


class Run(NamedTuple):
    """The contents of a log; a run without ``end`` has not reached its last epoch."""

    path: Path
    header: Record
    epochs: tuple[Record, ...]
    end: Record | None

    @property
    def finished(self) -> bool:
        """Whether the run reached its last epoch."""
        return self.end is not None

    def curve(self, metric: str, protocol: str | None = None) -> list[float]:
        """A metric per epoch; test metrics (``accuracy``, ``loss``) need a protocol."""
        test = metric in ("accuracy", "loss")
        rows = [epoch["test"][protocol] if test else epoch for epoch in self.epochs]
        return [math.nan if row[metric] is None else row[metric] for row in rows]


def number(value: Any) -> float | None:
    """A number for JSON: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def log_path(folder: Path, seed: int) -> Path:
    """Path of a seed's log."""
    return folder / f"seed-{seed}.jsonl"


def read(path: Path) -> Run:
    """Reads a log, ignoring a last line that was truncated by a kill."""
    records: list[Record] = []
    for line in path.read_text().split("\n")[:-1]:
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}: line {len(records) + 1} is not a record: {error}") from error
    if not records or records[0].get("kind") != "run":
        raise UsageError(f"{path}: not the log of a run: the first line does not describe one")
    epochs = tuple(record for record in records if record["kind"] == "epoch")
    return Run(path, records[0], epochs, records[-1] if records[-1]["kind"] == "end" else None)


def read_all(folder: Path) -> list[Run]:
    """Reads all logs below a folder, ordered by path and seed."""
    found = sorted(folder.rglob("seed-*.jsonl"), key=lambda p: (p.parent, int(p.stem[5:])))
    if not found:
        raise UsageError(f"{folder}: contains no runs (seed-*.jsonl); `kldwrm train` makes some")
    return [read(path) for path in found]


def check_same(path: Path, stored: Record, wanted: Record, fix: str) -> None:
    """Raises an error that names the first setting in which a stored run differs."""
    for name, value in wanted.items():
        if stored.get(name) != value:
            difference = f"{name} = {stored.get(name)!r}, not {value!r}"
            raise UsageError(f"{path} belongs to a run with {difference}: {fix}")


def append(path: Path, record: Record) -> None:
    """Appends a line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def rewrite(path: Path, records: Sequence[Record]) -> None:
    """Replaces a log atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    temporary.replace(path)
