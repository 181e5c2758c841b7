"""Runs in a file of JSON lines: none is done twice, and each is appended once it is over."""

import json
import pathlib
from typing import Any


def missing(path: pathlib.Path | None, settings: dict[str, Any], seeds: list[int]) -> list[int]:
    """The seeds of which the file has no run with these settings; all of them without a file."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    done = [{name: run[name] for name in (*settings, "seed")} for run in map(json.loads, lines)]
    return [seed for seed in seeds if settings | {"seed": seed} not in done]


def append(path: pathlib.Path | None, rows: list[dict[str, Any]]) -> None:
    """Adds a run, if there is a file to add it to."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
