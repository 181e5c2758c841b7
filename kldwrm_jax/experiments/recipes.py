"""Optimizers by name, with the paper's best settings as their defaults."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax

import kldwrm_jax as kw
from kldwrm_jax.experiments.errors import UsageError, check_names

Arguments = Mapping[str, float | int | str | None]


def _first_order(make: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer of Optax to which weight decay comes as part of the gradient."""

    @functools.wraps(make)
    def decayed(layers: Any, *, weight_decay: float = 0.0, **arguments: Any) -> Any:
        return optax.chain(optax.add_decayed_weights(weight_decay), make(**arguments))

    return decayed


class Optimizer(NamedTuple):
    """Its name in tables, its factory and its default arguments."""

    title: str
    make: Callable[..., Any]
    defaults: Arguments


# The paper adds its weight decay of 0.001 to the damping and to the effective gradient.
_STEP: Arguments = {"learning_rate": 0.01, "damping": 0.011, "weight_decay": 0.001}
_PAPER: Arguments = {**_STEP, "refresh_every": 30, "kl_clip": 0.1}
_Q: Arguments = {**_PAPER, "solver": "reweighted", "block_clip": 2.0, "rho": 0.5}
_INNER: Arguments = {"inner_steps": 10, "omega": 0.07, "capacity": 4}
_KL: Arguments = {"kl_scale": 1 / 660, "tail": "fold"}
_plain = functools.partial(functools.partial, true_kl_clip=None)  # a limit the paper does not have
_SGD: Arguments = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.001}

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer("SGD with momentum", _first_order(optax.sgd), _SGD),
    "adam": Optimizer(
        "Adam", _first_order(optax.adam), {"learning_rate": 0.003, "weight_decay": 0.001}
    ),
    "kfac": Optimizer("K-FAC", _plain(kw.kfac), {**_PAPER, "rho": 0.95}),
    "so": Optimizer("SO-KLD-WRM", _plain(kw.so_kldwrm), {**_PAPER, "rho": 0.33}),
    "q": Optimizer("Q-KLD-WRM", _plain(kw.q_kldwrm), _Q),
    "qe": Optimizer("QE-KLD-WRM", _plain(kw.qe_kldwrm), {**_Q, **_INNER, **_KL}),
}
SOLVERS = ("kfac", "so", "q", "qe")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An optimizer and its arguments."""

    optimizer: str
    arguments: Arguments

    @property
    def title(self) -> str:
        """The optimizer's name in tables."""
        return OPTIMIZERS[self.optimizer].title


def setting(optimizer: str, arguments: Arguments = MappingProxyType({})) -> Setting:
    """An optimizer with its default arguments, some of them replaced."""
    check_names("--optimizer", [optimizer], OPTIMIZERS)
    title, make, defaults = OPTIMIZERS[optimizer]
    known = {**dict.fromkeys(inspect.signature(make).parameters), "weight_decay": None}
    check_names(f"--set, arguments of {title}", arguments, known)
    return Setting(optimizer, {**defaults, **arguments})


def transform(chosen: Setting, layers: Any) -> optax.GradientTransformationExtraArgs:
    """The Optax transform of a setting."""
    try:
        tx = OPTIMIZERS[chosen.optimizer].make(layers, **chosen.arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--optimizer {chosen.optimizer}: {error}") from error
    return optax.with_extra_args_support(tx)
