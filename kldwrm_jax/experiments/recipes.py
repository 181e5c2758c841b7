"""Optimizers by name, and the paper's sixteen settings with the numbers it has for them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

import kldwrm_jax as kw
from kldwrm_jax.experiments.errors import UsageError, check_name

Value = float | int | str | None
Arguments = Mapping[str, Value]


def sgd(
    layers: Any, learning_rate: float, *, momentum: float = 0.9, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """SGD with momentum; the weight decay is part of the gradient."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=momentum)
    )


def adam(
    layers: Any,
    learning_rate: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Adam; the weight decay is part of the gradient."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay), optax.adam(learning_rate, b1=b1, b2=b2)
    )


class Optimizer(NamedTuple):
    """An optimizer: its name in tables, its factory, and its arguments in `kldwrm train`."""

    title: str
    make: Callable[..., optax.GradientTransformation]
    defaults: Arguments


# The author adds the weight decay to the damping and to the effective gradient.
_PAPER: Arguments = {
    "learning_rate": 0.01,
    "damping": 0.011,
    "weight_decay": 0.001,
    "refresh_every": 30,
    "kl_clip": 0.1,
}
_PAPER_Q: Arguments = {**_PAPER, "solver": "reweighted", "block_clip": 2.0}

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        "SGD with momentum", sgd, {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.001}
    ),
    "adam": Optimizer("Adam", adam, {"learning_rate": 0.003, "weight_decay": 0.001}),
    "kfac": Optimizer("K-FAC", kw.kfac, {**_PAPER, "rho": 0.95}),
    "so": Optimizer("SO-KLD-WRM", kw.so_kldwrm, {**_PAPER, "rho": 0.33}),
    "q": Optimizer("Q-KLD-WRM", kw.q_kldwrm, {**_PAPER_Q, "rho": 0.5}),
    "qe": Optimizer(
        "QE-KLD-WRM",
        kw.qe_kldwrm,
        {
            **_PAPER_Q,
            "rho": 0.5,
            "inner_steps": 10,
            "omega": 0.07,
            "capacity": 4,
            "kl_scale": 1 / 660,
            "tail": "fold",
        },
    ),
}
SOLVERS = ("kfac", "so", "q", "qe")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An optimizer and its arguments: what runs that differ in their seed alone share."""

    optimizer: str
    arguments: Arguments

    @property
    def title(self) -> str:
        """What tables call it."""
        return OPTIMIZERS[self.optimizer].title


def settable(optimizer: str) -> tuple[str, ...]:
    """The arguments of an optimizer that are numbers or words."""
    names = inspect.signature(OPTIMIZERS[optimizer].make).parameters
    return tuple(name for name in names if name not in ("layers", "inverse"))


def setting(optimizer: str, arguments: Arguments | None = None) -> Setting:
    """An optimizer with its defaults, but for the arguments given."""
    check_name("--optimizer", optimizer, OPTIMIZERS)
    arguments = arguments or {}
    for name in arguments:
        if name not in settable(optimizer):
            raise UsageError(
                f"--set {name}: {optimizer} has no such argument; it has "
                f"{', '.join(settable(optimizer))}"
            )
    return Setting(optimizer, {**OPTIMIZERS[optimizer].defaults, **arguments})


def transform(chosen: Setting, layers: Any) -> optax.GradientTransformationExtraArgs:
    """The Optax transform of a setting."""
    try:
        tx = OPTIMIZERS[chosen.optimizer].make(layers, **chosen.arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--optimizer {chosen.optimizer}: {error}") from error
    return optax.with_extra_args_support(tx)


class Count(NamedTuple):
    """How many runs, by the paper: a number, or two where it calls the counting debatable."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}/{self.high}"


class Row(NamedTuple):
    """A row of the paper's Table 1. Accuracies in percent."""

    at_least_98: Count
    above_98: Count
    at_least_985: Count
    loss_below_025: Count
    loss_below_02: Count
    mean_accuracy: float
    std_accuracy: float
    mean_loss: float
    std_loss: float


class PaperSetting(NamedTuple):
    """One of the paper's sixteen settings; ``best``: one of the four of its main table."""

    name: str
    label: str
    setting: Setting
    row: Row
    best: bool


def _row(*numbers: float | tuple[int, int]) -> Row:
    counts = [Count(*n) if isinstance(n, tuple) else Count(int(n), int(n)) for n in numbers[:5]]
    return Row(*counts, *numbers[5:])  # type: ignore[arg-type]


_TABLE: list[tuple[str, Arguments, Row]] = [
    ("kfac", {"rho": 0.33}, _row(3, 1, 1, 6, 1, 95.42, 3.73, 0.28, 0.09)),
    ("kfac", {"rho": 0.5}, _row(3, 2, 1, 5, 2, 95.69, 2.85, 0.27, 0.08)),
    ("kfac", {"rho": 0.7}, _row(4, 2, 1, 5, 2, 96.13, 2.58, 0.26, 0.07)),
    ("kfac", {"rho": 0.95}, _row(3, 3, 1, 5, 2, 96.19, 3.2, 0.26, 0.10)),
    ("so", {"rho": 0.33}, _row(4, 2, 0, 7, 0, 97.60, 0.85, 0.25, 0.04)),
    ("so", {"rho": 0.5}, _row((7, 8), (4, 5), 0, 3, 0, 97.79, 0.41, 0.26, 0.02)),
    ("so", {"rho": 0.7}, _row(6, 5, 0, 0, 0, 97.94, 0.5, 0.30, 0.02)),
    ("so", {"rho": 0.8}, _row(5, 3, 0, 0, 0, 97.93, 0.37, 0.34, 0.02)),
    ("q", {"rho": 0.33}, _row(3, 1, 0, 7, 0, 97.47, 0.69, 0.24, 0.02)),
    ("q", {"rho": 0.5}, _row(5, 4, 0, 4, 0, 97.69, 0.69, 0.26, 0.04)),
    ("q", {"rho": 0.7}, _row((6, 7), 4, 0, 0, 0, 98.03, 0.27, 0.29, 0.01)),
    ("q", {"rho": 0.8}, _row(4, 1, 0, 0, 0, 97.88, 0.27, 0.35, 0.02)),
    (
        "qe",
        {"rho": 0.5, "inner_steps": 10, "omega": 0.04, "capacity": 4},
        _row((7, 8), 7, 2, 8, 0, 97.85, 0.67, 0.24, 0.03),
    ),
    (
        "qe",
        {"rho": 0.5, "inner_steps": 10, "omega": 0.07, "capacity": 4},
        _row(8, 7, 2, 9, 0, 98.01, 0.64, 0.23, 0.02),
    ),
    (
        "qe",
        {"rho": 0.5, "inner_steps": 7, "omega": 0.1, "capacity": 4},
        _row(7, 6, 2, 9, 0, 97.93, 0.46, 0.23, 0.02),
    ),
    (
        "qe",
        {"rho": 0.7, "inner_steps": 10, "omega": 0.04, "capacity": 8},
        _row((9, 10), 8, 0, 0, 0, 98.07, 0.44, 0.28, 0.02),
    ),
]

_SYMBOLS = {"rho": "ρ", "inner_steps": "N_IS", "omega": "ω", "capacity": "N_cap"}


def _paper_setting(optimizer: str, arguments: Arguments, row: Row) -> PaperSetting:
    chosen = setting(optimizer, arguments)
    label = ", ".join(f"{_SYMBOLS[name]} = {value}" for name, value in arguments.items())
    name = "-".join([optimizer, *(str(value) for value in arguments.values())])
    best = chosen == setting(optimizer)
    return PaperSetting(name, f"{chosen.title}: {label}", chosen, row, best)


PAPER_SETTINGS = tuple(_paper_setting(*entry) for entry in _TABLE)
