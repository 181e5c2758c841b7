"""A run on disk: JSON lines that are whole after every epoch, beside a checkpoint to go on from.

The first line (``kind`` "run") says what was run, with which versions and where; one line an epoch
(``kind`` "epoch") says how it went; the last (``kind`` "end") that it is finished.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.provenance import machine, versions

Record = dict[str, Any]

PROTOCOLS = {
    "paper": "test images scaled to [0, 1] and not normalised, as in the paper",
    "corrected": "test images normalised as the training images are",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a log says."""

    path: Path
    header: Record
    epochs: tuple[Record, ...]
    end: Record | None

    @property
    def finished(self) -> bool:
        """Whether it came to its last epoch."""
        return self.end is not None

    def curve(self, metric: str, protocol: str | None = None) -> list[float]:
        """A metric epoch by epoch; test metrics (``accuracy``, ``loss``) need a protocol."""
        rows = [epoch["test"][protocol] if protocol else epoch for epoch in self.epochs]
        return [math.nan if row[metric] is None else row[metric] for row in rows]


def number(value: Any) -> float | None:
    """A number as JSON can have it: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def log_path(folder: Path, seed: int) -> Path:
    """Where a seed's log is."""
    return folder / f"seed-{seed}.jsonl"


def checkpoint_path(log: Path) -> Path:
    """Where a log's checkpoint is."""
    return log.with_suffix(".checkpoint")


def read(path: Path) -> Run:
    """Reads a log. A last line that was cut short by a kill is left out."""
    records: list[Record] = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise UsageError(f"{path}: line {number + 1} is not JSON ({error})") from error
    if not records or not isinstance(records[0], dict) or records[0].get("kind") != "run":
        raise UsageError(f"{path}: not the log of a run: its first line does not say what was run")
    epochs = tuple(record for record in records if record["kind"] == "epoch")
    ends = [record for record in records if record["kind"] == "end"]
    return Run(path, records[0], epochs, ends[-1] if ends else None)


def read_all(folder: Path) -> list[Run]:
    """All runs below a folder, in the order of their paths and seeds."""
    if not folder.exists():
        raise UsageError(f"{folder}: there is no such folder")
    found = sorted(folder.rglob("seed-*.jsonl"), key=lambda p: (p.parent, int(p.stem[5:])))
    if not found:
        raise UsageError(f"{folder}: no runs (seed-*.jsonl) in it; `kldwrm train` makes some")
    return [read(path) for path in found]


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a line, and has it on disk before it returns."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rewrite(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Puts these lines in place of all others, at once."""
    replace(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def replace(path: Path, content: bytes) -> None:
    """Writes a file under its name only when it is whole.

    What a kill leaves of it has another name, which the next call writes over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def provenance() -> Record:
    """Versions and machine."""
    return {"versions": versions(), "machine": machine()}
