import pathlib

import made_runs
import pytest

from kldwrm_jax.experiments import cli, recipes, report, runs
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.table import PAPER_SETTINGS

PNG = b"\x89PNG"
PUBLISHED = pathlib.Path(__file__).parents[2] / "results" / "paper"


def write_paper(folder, entries):
    """Two runs of each of the paper's settings, and a third that is not finished."""
    for entry in entries:
        for seed in (0, 1):
            made_runs.write(folder / entry.name, seed, [0.9, 0.97], setting=entry.setting)
        made_runs.write(
            folder / entry.name, 2, [0.9], setting=entry.setting, finished=False, epochs=2
        )


@pytest.fixture
def no_figures(monkeypatch, tmp_path):
    (tmp_path / "report").mkdir()
    for name in ("every_seed", "by_protocol"):
        monkeypatch.setattr(report.figures, name, lambda path, *args: path)


@pytest.fixture
def sixteen(tmp_path, no_figures):
    """All the paper's settings, without figures."""
    write_paper(tmp_path, PAPER_SETTINGS)
    return tmp_path


def test_the_table_has_the_papers_nine_columns_with_its_numbers_beside_ours_and_one_more(sixteen):
    path = report.write(sixteen)
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [line for line in lines if line.count("|") == 2 + 9 + 1 + 1]
    assert len(table) == 2 * (2 + 16)
    assert len(lines) - len(table) == 2 * (2 + 6)  # pairs of the four best
    assert table[2].split("|")[1].strip() == "K-FAC: ρ = 0.33"
    assert "| 97.00 (95.42) | 0.00 (3.73) | 0.300 (0.28) | 0.000 (0.09) |" in table[2]
    assert "| 0 (7/8) |" in table[2 + 5]
    assert "98.00 (95.42)" in table[2 + 16 + 2]  # the corrected protocol
    assert table[2].endswith("| – |")  # two epochs do not reach 98 %
    assert "| 2 (1 unfinished) |" in table[2]
    assert "0.1 percentage points" in text


@pytest.mark.usefixtures("no_figures")
def test_best_settings_on_one_problem_are_compared_in_pairs(tmp_path):
    kfac, so, q = [entry for entry in PAPER_SETTINGS if entry.best][:3]
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
    text = report.write(tmp_path).read_text()
    pairs = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count("|") == 7]
    one_protocol = [
        [kfac.label, so.label, "-2.00"],
        [kfac.label, "SGD with momentum: mnist, paper-cnn", "+3.00"],
        [so.label, "SGD with momentum: mnist, paper-cnn", "+5.00"],
    ]
    heads = ["setting", "against", "mean accuracy, points"]
    shown = [pair[:3] for pair in pairs if pair[0] != "---"]
    assert shown == 2 * [heads, *one_protocol]
    assert "Not corrected for the 3 comparisons" in text


def test_figures_are_drawn_for_every_solver_and_linked(tmp_path):
    write_paper(tmp_path, [entry for entry in PAPER_SETTINGS if entry.best][:2])
    path = report.write(tmp_path)
    names = [f"{name}-{p}.png" for name in ("best", "kfac", "so") for p in ("paper", "corrected")]
    names.append("protocols.png")
    for name in names:
        assert (path.parent / name).read_bytes().startswith(PNG)
        assert f"]({name})" in path.read_text()


@pytest.mark.usefixtures("no_figures")
def test_the_command_prints_the_tables(tmp_path, capsys):
    made_runs.write(tmp_path, 0, [0.9, 0.97])
    assert cli.main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "97.00" in shown
    assert "(96.19)" in shown
    assert "best-paper" not in shown  # figures
    assert "normalised as the training images are" in shown
    assert str(tmp_path / "report" / "report.md") in shown.replace("\n", "")


def test_runs_that_are_not_the_papers_have_no_brackets(tmp_path):
    setting = recipes.setting("kfac", {"rho": 0.6})
    made_runs.write(tmp_path / "a", 0, [0.9], setting=setting)
    made_runs.write(tmp_path / "b", 0, [0.9], dataset="fashion-mnist")
    text = report.write(tmp_path).read_text()
    assert "| K-FAC: mnist, paper-cnn, rho = 0.6 | 1 | 0 | 0 |" in text
    assert "| K-FAC: fashion-mnist, paper-cnn | 1 | 0 | 0 |" in text
    assert "–" in text


def test_runs_without_an_epoch_are_an_error(tmp_path):
    made_runs.write(tmp_path, 0, [], loss=[], finished=False, epochs=2)
    with pytest.raises(UsageError, match="no run has completed an epoch"):
        report.write(tmp_path)


def test_diverged_runs_are_drawn_and_reported(tmp_path):
    made_runs.write(tmp_path, 0, [0.9, 0.1], loss=[0.3, None])
    assert "–" in report.write(tmp_path).read_text()


@pytest.mark.skipif(not PUBLISHED.exists(), reason="a source distribution has no results")
def test_the_published_runs_give_the_published_numbers():
    """Every number in the tables of results/paper, from the logs beside them."""
    published = (PUBLISHED / "report" / "report.md").read_text().split("## Protocol ")[1:]
    groups = report._groups(runs.read_all(PUBLISHED))
    assert len(groups) == 6
    for protocol, text in zip(runs.PROTOCOLS, published, strict=True):
        rows = [report._row(group, protocol) for group in groups]
        assert all(f"| {' | '.join(row)} |" in text for row in rows)
        _, differences = report._differences(groups, protocol)
        lines = differences.splitlines()[2:]
        assert len(lines) == 15
        assert all(line in text for line in lines)
