"""The solver and the damping that an optimizer's arguments ask for."""

from kldwrm_jax.arguments import check_choice
from kldwrm_jax.curvature.devices import Devices
from kldwrm_jax.curvature.inverse import Inverse
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
