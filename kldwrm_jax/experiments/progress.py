"""What is seen while it runs: bars and tables on a terminal, JSON lines everywhere else."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kldwrm_jax.experiments.download import Advance
from kldwrm_jax.experiments.runs import Record
from kldwrm_jax.experiments.training import Watcher

Format = Callable[[Any], str]


def percent(fraction: float | None) -> str:
    """A fraction for a reader."""
    return "not a number" if fraction is None else f"{100 * fraction:.2f} %"


class Screen:
    """Standard output: for a reader if it is a terminal, for a program if it is not."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    @property
    def terminal(self) -> bool:
        """Whether someone is looking."""
        return self.console.is_terminal

    def say(self, text: str) -> None:
        """A remark, for a reader only."""
        if self.terminal:
            self.console.print(text, highlight=False)

    def emit(self, record: Record) -> None:
        """A JSON line, for a program only."""
        if not self.terminal:
            self.console.file.write(json.dumps(record) + "\n")
            self.console.file.flush()

    def table(
        self, title: str, rows: Sequence[Record], columns: Mapping[str, tuple[str, Format]]
    ) -> None:
        """A table; ``columns`` has, by key, the heading and the format that a reader sees."""
        for row in rows:
            self.emit({"kind": "row", "table": title, **row})
        if self.terminal:
            table = Table(title=title, title_style="bold")
            for i, (heading, _) in enumerate(columns.values()):
                table.add_column(heading, justify="right" if i else "left", no_wrap=not i)
            for row in rows:
                table.add_row(*(text(row[key]) for key, (_, text) in columns.items()))
            self.console.print(table)

    def saved(self, what: str, path: Path) -> None:
        """A file that was written."""
        self.emit({"kind": "file", "what": what, "path": str(path)})
        self.say(f"{what}: [bold]{path}[/bold]")

    @contextlib.contextmanager
    def watching(self, runs: int, every_epoch: bool = True) -> Iterator[Watcher]:
        """A watcher of so many runs; ``every_epoch``: a program gets a line an epoch, too."""
        if not self.terminal:
            yield _Lines(self, every_epoch)
            return
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        with progress:
            yield _Bars(progress, runs)

    @contextlib.contextmanager
    def downloading(self) -> Iterator[Callable[[str], Advance]]:
        """Given a file's name, what to tell the bytes."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.terminal,
        )

        def watch(filename: str) -> Advance:
            task = progress.add_task(filename, total=None, visible=False)
            return lambda done, total: progress.update(
                task, completed=done, total=total, visible=True
            )

        with progress:
            yield watch


class _Lines(Watcher):
    def __init__(self, screen: Screen, every_epoch: bool) -> None:
        self._screen = screen
        self._every_epoch = every_epoch

    def _emit(self, header: Record, record: Record) -> None:
        setting = header["setting"]
        self._screen.emit({"optimizer": setting["optimizer"], "seed": header["seed"], **record})

    def epoch(self, header: Record, record: Record) -> None:
        if self._every_epoch:
            self._emit(header, record)

    def end(self, header: Record, record: Record) -> None:
        if self._every_epoch:
            self._emit(header, record)


class _Bars(Watcher):
    """A bar for all runs, one for the run's epochs, one for the epoch's steps."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self._progress = progress
        self._runs = progress.add_task("runs", total=runs, note="")
        self._epochs = progress.add_task("epochs", total=None, note="", visible=False)
        self._steps = progress.add_task("steps", total=None, note="", visible=False)
        self._title = ""

    def compiling(self) -> None:
        self._progress.update(self._runs, note="compiling")

    def start(self, title: str, seed: int, epochs: int, steps: int, done: int) -> None:
        self._title = f"{title}, seed {seed}"
        self._progress.update(self._runs, note="")
        self._progress.reset(
            self._epochs, total=epochs, completed=done, description=self._title, visible=True
        )
        self._progress.reset(self._steps, total=steps, description="  epoch", visible=True)

    def step(self) -> None:
        self._progress.advance(self._steps)

    def epoch(self, header: Record, record: Record) -> None:
        tests = "; ".join(
            f"{protocol} {percent(test['accuracy'])}" for protocol, test in record["test"].items()
        )
        self._progress.update(self._epochs, advance=1, note=f"test accuracy: {tests}")
        self._progress.reset(self._steps)

    def end(self, header: Record, record: Record) -> None:
        self._progress.advance(self._runs)
        self._progress.console.print(
            f"{self._title}: {record['seconds']:.1f} s", style="dim", highlight=False
        )

    def skip(self) -> None:
        self._progress.advance(self._runs)
