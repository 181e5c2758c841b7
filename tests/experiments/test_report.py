import io
import json

import made_runs
import pytest
from rich.console import Console

from kldwrm_jax.experiments import recipes, report
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.progress import Screen

PNG = b"\x89PNG"


def screen():
    return Screen(Console(file=io.StringIO()))


def lines(shown):
    return [json.loads(line) for line in shown.console.file.getvalue().splitlines()]


def write_paper(folder, entries):
    """Two runs of each of the paper's settings, and a third that is not finished."""
    for entry in entries:
        for seed in (0, 1):
            made_runs.write(folder / entry.name, seed, [0.9, 0.97], setting=entry.setting)
        made_runs.write(
            folder / entry.name, 2, [0.9], setting=entry.setting, finished=False, epochs=2
        )


@pytest.fixture
def no_figures(monkeypatch):
    for name in ("every_seed", "by_protocol"):
        monkeypatch.setattr(report.figures, name, lambda path, *args: path)


@pytest.fixture
def sixteen(tmp_path, no_figures):
    """All the paper's settings, without figures."""
    write_paper(tmp_path, recipes.PAPER_SETTINGS)
    return tmp_path


def test_the_table_has_the_papers_nine_columns_with_its_numbers_beside_ours_and_one_more(sixteen):
    path = report.write(sixteen, ("paper", "corrected"), screen())
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [line for line in lines if line.count("|") == 2 + 9 + 1 + 1]
    assert len(table) == 2 * (2 + 16)
    assert len(lines) - len(table) == 2 * (2 + 6)  # pairs of the four best
    assert table[2].split("|")[1].strip() == "K-FAC: ρ = 0.33"
    assert "| 97.00 (95.42) | 0.00 (3.73) | 0.300 (0.28) | 0.000 (0.09) |" in table[2]
    assert "| 0 (7/8) |" in table[2 + 5]
    assert "98.00 (95.42)" in table[2 + 16 + 2]  # the corrected protocol
    assert table[2].endswith("| – |")  # two epochs do not get to 98 %
    assert "0.1 percentage points" in text
    assert "Unfinished runs" in text


@pytest.mark.usefixtures("no_figures")
def test_best_settings_on_one_problem_are_compared_in_pairs(tmp_path):
    kfac, so, q = [entry for entry in recipes.PAPER_SETTINGS if entry.best][:3]
    sgd, worse = recipes.setting("sgd"), recipes.setting("kfac", {"rho": 0.33})
    for name, setting, accuracies, dataset in (
        ("a", kfac.setting, [0.95, 0.96, 0.97], "mnist"),
        ("b", so.setting, [0.97, 0.98, 0.99], "mnist"),
        ("c", q.setting, [0.9], "mnist"),  # one run has no spread
        ("d", sgd, [0.90, 0.92, 0.97], "mnist"),
        ("e", worse, [0.1, 0.2], "mnist"),  # not the best of its solver
        ("f", kfac.setting, [0.7, 0.8], "fashion-mnist"),
    ):
        for seed, accuracy in enumerate(accuracies):
            made_runs.write(tmp_path / name, seed, [accuracy], setting=setting, dataset=dataset)
    text = report.write(tmp_path, ("paper",), screen()).read_text()
    pairs = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count("|") == 7]
    assert [pair[:3] for pair in pairs[2:]] == [
        [kfac.label, so.label, "-2.00"],
        [kfac.label, "SGD with momentum: mnist, paper-cnn", "+3.00"],
        [so.label, "SGD with momentum: mnist, paper-cnn", "+5.00"],
    ]
    assert "3 pairs" in text


def test_figures_are_drawn_for_every_solver_and_linked(tmp_path):
    write_paper(tmp_path, [entry for entry in recipes.PAPER_SETTINGS if entry.best][:2])
    path = report.write(tmp_path, ("paper",), screen())
    names = ["protocols.png", *(f"{name}-paper.png" for name in ("best", "kfac", "so"))]
    for name in names:
        assert (path.parent / name).read_bytes().startswith(PNG)
        assert f"]({name})" in path.read_text()


def test_a_program_gets_numbers(sixteen):
    shown = screen()
    report.write(sixteen, ("paper",), shown)
    rows = [line for line in lines(shown) if line["kind"] == "row"]
    assert len(rows) == 16
    assert rows[0]["runs"] == 2
    assert rows[0]["mean_accuracy"] == {"ours": pytest.approx(97.0), "paper": 95.42}
    assert rows[5]["at_least_98"] == {"ours": 0, "paper": "7/8"}
    assert lines(shown)[-1]["what"] == "report"


def test_runs_that_the_paper_has_not_stand_without_its_numbers(tmp_path):
    setting = recipes.setting("kfac", {"rho": 0.6})
    made_runs.write(tmp_path / "a", 0, [0.9], setting=setting)
    made_runs.write(tmp_path / "b", 0, [0.9], dataset="fashion-mnist")
    text = report.write(tmp_path, ("paper",), screen()).read_text()
    assert "| K-FAC: mnist, paper-cnn, rho = 0.6 | 1 | 0 | 0 |" in text
    assert "| K-FAC: fashion-mnist, paper-cnn | 1 | 0 | 0 |" in text
    assert "–" in text


def test_runs_without_an_epoch_are_no_report(tmp_path):
    made_runs.write(tmp_path, 0, [], loss=[], finished=False, epochs=2)
    with pytest.raises(UsageError, match="no run in it has ended an epoch"):
        report.write(tmp_path, ("paper",), screen())


def test_diverged_runs_are_drawn_and_reported(tmp_path):
    made_runs.write(tmp_path, 0, [0.9, 0.1], loss=[0.3, None])
    assert "–" in report.write(tmp_path, ("paper",), screen()).read_text()
