"""Progress bars and tables."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


def console() -> Console:
    """Standard output, wide enough for the tables where it is not a terminal."""
    return Console(highlight=False, width=None if Console().is_terminal else 160)


def progress_bars(console: Console | None = None) -> Progress:
    """Progress bars with a note behind each; invisible outside a terminal or without a console."""
    bars = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    columns = "{task.description}", *bars, "{task.fields[note]}"
    visible = console is not None and console.is_terminal
    return Progress(*columns, console=console or Console(quiet=True), disable=not visible)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def print_markdown(text: str) -> None:
    """Prints Markdown, with its tables drawn."""
    console().print(Markdown(text))
