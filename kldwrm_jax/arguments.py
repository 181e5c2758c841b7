"""Checks of arguments: each names the argument, the value it got and what is allowed.

Values that are not known yet (traced, or a schedule) pass: they cannot be looked at.
"""

import numbers
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Scalar = float | jax.Array  # a number, known or traced


def is_known(tree: Any) -> bool:
    """Whether all leaves are numbers or arrays whose values this process can look at."""

    def known(leaf: Any) -> bool:
        if isinstance(leaf, jax.Array):
            return not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable
        return isinstance(leaf, np.ndarray | np.generic | numbers.Number)

    return all(map(known, jax.tree.leaves(tree)))


def _known(name: str, value: Any, allowed: str) -> bool:
    """True if the value can be looked at; an error if it can be no number at all."""
    if isinstance(value, jax.core.Tracer) or callable(value):
        return False
    dtype = np.asarray(value).dtype
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if np.ndim(value) or not real:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return True


def check_decay(name: str, value: Any) -> None:
    """A decay: a number in [0, 1)."""
    if _known(name, value, "in [0, 1)") and not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def check_fraction(name: str, value: Any) -> None:
    """A mixing weight: a number in [0, 1]."""
    if _known(name, value, "in [0, 1]") and not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")


def check_non_negative(name: str, value: Any) -> None:
    """A number >= 0."""
    if _known(name, value, "a number >= 0") and not value >= 0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")


def check_all_non_negative(name: str, values: Any) -> None:
    """An array of numbers >= 0."""
    if is_known(values) and np.any(np.asarray(values) < 0):
        raise ValueError(
            f"{name} must be >= 0, got {np.min(np.asarray(values))!r} among them: they say how "
            f"much an example counts in the Fisher. Signed factors, such as advantages, belong in "
            f"a loss of your own, whose gradient tx.update takes"
        )


def check_positive(name: str, value: Any) -> None:
    """A number > 0."""
    if _known(name, value, "a number > 0") and not value > 0:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """A static whole number, at least ``least``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} must be a whole number >= {least}, known when the program is built, "
            f"got {value!r}"
        )


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """One of a few names, which is returned."""
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {names}, got {value!r}")
    return value
