"""The solver and the damping that an optimizer's arguments ask for."""

from typing import Any

from kldwrm_jax.arguments import check_choice
from kldwrm_jax.curvature.devices import Devices
from kldwrm_jax.curvature.inverse import Inverse
from kldwrm_jax.curvature.layers import Layers
from kldwrm_jax.curvature.solvers import (
    DampingMode,
    ExactSolver,
    FactoredDamping,
    ProductDamping,
    ReweightedSolver,
    Solver,
)

_MODES: dict[str, type[ProductDamping] | type[FactoredDamping]] = {
    "product": ProductDamping,
    "factored": FactoredDamping,
}


def check_damping_mode(layers: Any, mode: str | None) -> None:
    """An error if a mode of damping is asked for where there is one only."""
    if mode is None or not isinstance(layers, Layers) or not layers.is_whole:
        return
    raise ValueError(
        f"damping_mode={mode!r} says how Kronecker products are damped, and these layers have "
        f"dense blocks, to which damping is added as it is: leave damping_mode out, or use "
        f"instrument(..., structure='kronecker')"
    )


def damping_mode_of(mode: str | None, inverse: Inverse) -> DampingMode:
    """What ``damping_mode`` names; ``"product"`` with None."""
    mode = "product" if mode is None else mode
    check_choice("damping_mode", mode, _MODES)
    return _MODES[mode](_devices(inverse))


def quadratic_solver_of(solver: str, mode: str | None, inverse: Inverse) -> Solver:
    """What ``solver`` names, with a damping that it can do."""
    check_choice("solver", solver, ("exact", "reweighted"))
    if solver == "reweighted":
        return ReweightedSolver(damping_mode_of(mode, inverse))
    if mode is not None:
        check_choice("damping_mode", mode, _MODES)
    if mode == "product":
        raise ValueError(
            "damping_mode='product' is not diagonal in the basis of solver='exact': use "
            "damping_mode='factored', or solver='reweighted'"
        )
    return ExactSolver(FactoredDamping(_devices(inverse)))


def _devices(inverse: Inverse) -> Devices | None:
    if not isinstance(inverse, Inverse):
        raise ValueError(f"inverse must be a kldwrm_jax.Inverse(...), got {inverse!r}")
    return inverse.devices
