"""The examples that solve differential equations against the clock."""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import precision
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import equations
    import plot_equation
    import solve_equation

    monkeypatch.setattr(solve_equation, "LARGE", (16, 16))
    yield {"equations": equations, "solve": solve_equation, "plot": plot_equation}
    for name in ("equations", "plot_equation", "runs", "solve_equation"):
        del sys.modules[name]


@pytest.mark.parametrize("name", ["poisson-2", "poisson-5", "cubic-2", "heat-1"])
def test_the_solution_leaves_no_residuals(examples, name):
    equation = examples["equations"].EQUATIONS[name]
    with precision.x64(True):
        for points in equation.points(jax.random.key(0)):
            assert points.dtype == jnp.float64
            assert equation.error(equation.solution, points) == 0
        interior, _ = equation.points(jax.random.key(0))
        assert jnp.abs(equation.residual(equation.solution, interior)).max() < 1e-10


@pytest.mark.usefixtures("a_second_a_step")
@pytest.mark.parametrize(("enabled", "most"), [(True, 1e-3), (False, 3e-3)])
def test_a_small_network_solves_a_small_equation_in_either_precision(examples, enabled, most):
    equation = examples["equations"].EQUATIONS["heat-1"]
    equation = dataclasses.replace(equation, interior=100, boundary=40)
    with precision.x64(enabled):
        run = examples["solve"].compiled(equation, "natural_gradient", None, same_points=False)
        *_, last = run(seed=0, budget=60)
    assert last["error"] < most


def test_a_run_is_not_repeated_and_its_errors_are_drawn(examples, monkeypatch, tmp_path):
    out = tmp_path / "heat-1.jsonl"
    command = ["solve", "heat-1", "--points", "20", "8", "--seconds", "0.2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--optimizer", "adam", "--rate", "1e-2"])
    before = jax.config.read("jax_enable_x64")
    try:
        examples["solve"].main()
        rows = out.read_text()
        examples["solve"].main()
    finally:
        jax.config.update("jax_enable_x64", before)
    assert out.read_text() == rows
    monkeypatch.setattr(examples["plot"], "LONG", json.loads(rows.splitlines()[0])["budget"])
    monkeypatch.setattr(sys, "argv", ["plot", str(out)])
    examples["plot"].main()
    assert out.with_suffix(".png").stat().st_size > 1000


def test_a_rate_is_asked_for_where_it_is_needed(examples, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["solve", "heat-1", "--optimizer", "adam"])
    with pytest.raises(SystemExit):
        examples["solve"].arguments()
    assert "--rate is for adam and muon" in capsys.readouterr().err
