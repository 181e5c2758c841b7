import argparse
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

from kldwrm_jax.experiments import bench, figures
from kldwrm_jax.experiments.bench_subjects import MLP, SUBJECTS
from kldwrm_jax.experiments.timing import Compiled, Timing, interleaved


@pytest.fixture
def small(monkeypatch):
    """Networks and sizes that take no time."""
    monkeypatch.setattr(bench, "NETWORKS", {"mlp": MLP((8,))})
    monkeypatch.setattr(bench, "WIDTHS", (4, 8))
    monkeypatch.setattr(bench, "BATCHES", (2,))
    monkeypatch.setattr(bench, "WIDEST", {"kfac": 4})


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(list(arguments)))


def test_a_benchmark_prints_its_table_and_saves_ratios_spread_and_machine(small, tmp_path, capsys):
    out = tmp_path / "bench"
    assert (
        run(
            *("--networks", "mlp", "--optimizers", "kfac", "--rounds", "2", "--batch", "4"),
            *("--out", str(out)),
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert SUBJECTS["kfac"].title in printed
    assert "2.25" in printed  # the target
    result = json.loads((out / "mlp.json").read_text())
    assert {"versions", "cores", "processor"} <= set(result["machine"])
    sgd, kfac = result["rows"][:2]
    assert sgd["ratio"] > 0  # beside another of its rounds: how noisy the machine is
    assert kfac["ratio"] > 0
    assert len(kfac["ratio_of_each_round"]) == 2
    assert kfac["slowest_step"] >= kfac["usual_step"]
    assert kfac["state_bytes"] > sgd["state_bytes"]


def test_scaling_covers_widths_and_batch_sizes_and_draws_them(small, tmp_path):
    kept = []
    result = bench.scaling(
        ["adam", "kfac"], Console(quiet=True), lambda so_far: kept.append(len(so_far["rows"]))
    )
    assert kept == [1, 2, 3, 4, 5]
    assert all(row["sgd_seconds"] > 0 for row in result["rows"])
    cases = {(row["axis"], row[row["axis"]], row["name"]) for row in result["rows"]}
    assert cases == {
        ("width", 4, "adam"),
        ("width", 4, "kfac"),
        ("width", 8, "adam"),  # and too wide for the other
        ("batch", 2, "adam"),
        ("batch", 2, "kfac"),
    }
    figures.cost(tmp_path / "scaling.png", result, {"adam": "Adam", "kfac": "K-FAC"})
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_an_unknown_optimizer_gets_the_list_of_known_ones(capsys):
    with pytest.raises(SystemExit):
        run("--optimizers", "lbfgs")
    assert "kfac-product" in capsys.readouterr().err


def test_every_round_is_compared_with_its_neighbour_and_the_median_counts():
    timing = Timing(
        ((1.0, 5.0), (10.0, 1000.0), (1.0, 4.0)), ((1.0, 1.0), (10.0, 10.0), (0.5, 0.5))
    )
    assert timing.ratios == [3.0, 50.5, 5.0]
    assert timing.ratio == 5.0
    assert timing.usual == 5.0
    assert timing.slowest == 8.0


def test_the_slowest_step_is_one_that_is_slow_in_most_rounds():
    timing = Timing(((9.0, 2.0), (1.0, 2.0), (1.0, 9.0)), ((1.0, 1.0),) * 3)
    assert timing.slowest == 2.0


def test_the_base_runs_right_before_every_subject():
    order = []

    def subject(name):
        def step(state, batch):
            order.append(name)
            return state + batch

        return Compiled(step, jnp.zeros(()), 0.0, None)

    timings = interleaved({"a": subject("a"), "b": subject("b")}, subject("base"), 1.0, 2, rounds=1)
    one_round = ["base", "base", "a", "a", "base", "base", "b", "b"]
    assert order == 2 * one_round
    assert all(len(timing.rounds) == len(timing.beside) == 1 for timing in timings.values())
