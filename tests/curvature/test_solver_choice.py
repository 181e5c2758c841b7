"""The names of solvers and dampings, and what they stand for."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kldwrm_jax as kw
from kldwrm_jax.curvature import (
    Devices,
    ExactSolver,
    FactoredDamping,
    ProductDamping,
    ReweightedSolver,
)
from kldwrm_jax.curvature.solver_choice import damping_mode_of, quadratic_solver_of

SHARED = kw.Inverse(mesh=Mesh(np.array(jax.devices()[:1]), ("devices",)))
each_inverse = pytest.mark.parametrize("inverse", [kw.Inverse(), SHARED], ids=["alone", "shared"])


@each_inverse
@pytest.mark.parametrize(
    ("name", "kind"),
    [(None, ProductDamping), ("product", ProductDamping), ("factored", FactoredDamping)],
)
def test_a_damping_is_made_by_its_name_with_the_devices_of_the_inverse(name, kind, inverse):
    assert damping_mode_of(name, inverse) == kind(inverse.devices)


def test_the_devices_of_a_mesh_are_those_of_its_axes():
    assert kw.Inverse().devices is None
    assert SHARED.devices == Devices(SHARED.mesh, ("devices",))


@each_inverse
@pytest.mark.parametrize(
    ("solver", "mode", "kind", "damping"),
    [
        ("exact", None, ExactSolver, FactoredDamping),
        ("exact", "factored", ExactSolver, FactoredDamping),
        ("reweighted", None, ReweightedSolver, ProductDamping),
        ("reweighted", "product", ReweightedSolver, ProductDamping),
        ("reweighted", "factored", ReweightedSolver, FactoredDamping),
    ],
)
def test_a_solver_is_made_by_its_name_with_a_damping_it_can_do(
    solver, mode, kind, damping, inverse
):
    assert quadratic_solver_of(solver, mode, inverse) == kind(damping(inverse.devices))


@pytest.mark.parametrize(
    ("solver", "mode", "message"),
    [
        ("lu", None, "solver must be one of 'exact', 'reweighted', got 'lu'"),
        (None, None, "solver must be one of 'exact', 'reweighted', got None"),
        ("exact", "none", "damping_mode must be one of 'product', 'factored', got 'none'"),
        ("reweighted", "none", "damping_mode must be one of 'product', 'factored', got 'none'"),
        ("exact", "product", "damping_mode='product' is not.*'factored', or solver='reweighted'"),
    ],
)
def test_what_does_not_go_together_is_named_with_a_way_out(solver, mode, message):
    with pytest.raises(ValueError, match=message):
        quadratic_solver_of(solver, mode, kw.Inverse())


@pytest.mark.parametrize("mode", ["product", "factored", None])
def test_an_inverse_of_another_type_is_named(mode):
    for choose in (damping_mode_of, lambda *own: quadratic_solver_of("reweighted", *own)):
        with pytest.raises(ValueError, match=r"inverse must be a kldwrm_jax.Inverse\(.*, got 5"):
            choose(mode, 5)
    with pytest.raises(ValueError, match=r"damping_mode must be one of.*got 'none'"):
        damping_mode_of("none", 5)
