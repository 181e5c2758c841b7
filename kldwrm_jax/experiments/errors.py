"""What the command line reports without a traceback."""

from collections.abc import Collection


class UsageError(Exception):
    """What the user can put right: the message names the argument, the value and the way out."""


def check_name(argument: str, name: str, known: Collection[str]) -> str:
    """The name, if it is known; otherwise an error that lists the right ones."""
    if name not in known:
        raise UsageError(f"{argument}: unknown name {name!r}; choose from {', '.join(known)}")
    return name
