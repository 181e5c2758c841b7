"""Errors that the command line reports without a traceback."""

from collections.abc import Iterable


class UsageError(Exception):
    """An error that the user can fix; the message names the argument or file, and the fix."""


def check_names(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises an error that lists the known names if one of ``names`` is not among them."""
    for name in names:
        if name not in known:
            raise UsageError(f"{argument}: unknown name {name!r}; choose from {', '.join(known)}")
