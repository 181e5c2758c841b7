"""A step called outside of ``jit``: its arguments can be looked at, and it is compiled here."""

import dataclasses
import warnings
from typing import Any

import jax


def holds_arrays(settings: Any) -> bool:
    """Whether an optimizer's settings are arrays, as ``optax.inject_hyperparams`` makes them.

    It makes a new optimizer on every step, which would be compiled every time.
    """
    if dataclasses.is_dataclass(settings):
        own = (getattr(settings, field.name) for field in dataclasses.fields(settings))
        return any(map(holds_arrays, own))
    return isinstance(settings, jax.Array)


def warn_of_slow_steps() -> None:
    """To be told once: the default filter of warnings shows a line's first one only."""
    warnings.warn(
        "a step whose hyperparameters are arrays (optax.inject_hyperparams) was called outside of "
        "jax.jit and is run operation by operation, which takes up to a second: wrap the training "
        "step in jax.jit",
        RuntimeWarning,
        stacklevel=4,
    )
