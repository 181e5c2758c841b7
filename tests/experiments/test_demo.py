import made_runs
import pytest

from kldwrm_jax.experiments import cli, demo, runs


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(demo, "SETTINGS", {"sgd": {}, "adam": {}})


@pytest.mark.usefixtures("two")
def test_a_demo_ends_with_a_table_and_a_figure(tmp_path, capsys):
    earlier = made_runs.write(tmp_path / "sgd", 7, [0.1])
    assert cli.main(["demo", "--epochs", "2", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert not earlier.path.exists()
    shown = capsys.readouterr().out
    assert "means over 2 seeds after 2 epochs" in shown
    assert str(tmp_path / "demo.png") in shown.replace("\n", "")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    done = runs.read_all(tmp_path)
    assert [run.finished for run in done] == [True] * 4
    lines = [line.strip() for line in shown.splitlines()]
    for title, members in {"Adam": done[:2], "SGD with momentum": done[2:]}.items():
        _, accuracy, loss, seconds, steps = demo.row(title, members)
        (line,) = [line for line in lines if line.startswith(title) and "seed" not in line]
        assert line.split()[-4:] == [accuracy, loss, seconds, steps]
        assert 10 < float(accuracy.rstrip("%")) <= 100


@pytest.mark.usefixtures("two")
def test_after_ctrl_c_the_table_shows_what_was_done(tmp_path, monkeypatch, capsys):
    train_seeds = demo.training.train_seeds

    def interrupted(spec, *args, **kwargs):
        if spec.setting.optimizer == "adam":
            raise KeyboardInterrupt
        return train_seeds(spec, *args, **kwargs)

    monkeypatch.setattr(demo.training, "train_seeds", interrupted)
    assert cli.main(["demo", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert "after 1 epochs" in shown.out
    assert "Adam" not in shown.out
    assert "interrupted" in shown.err
    assert (tmp_path / "demo.png").exists()


def test_the_row_has_means_and_the_steps_of_the_first_epoch_that_reaches_the_target(tmp_path):
    reached = made_runs.write(tmp_path, 0, [0.9, 0.961, 0.95], loss=[1, 1, 0.4])  # corrected: +1 %
    later = made_runs.write(tmp_path, 1, [0.9, 0.95, 0.97], loss=[1, 1, 0.8])
    assert demo.row("K-FAC", [reached]) == ["K-FAC", "96.00%", "0.2000", "6.00", str(2 * 117)]
    expected = ["K-FAC", "97.00%", "0.3000", "6.00", str(round(2.5 * 117))]
    assert demo.row("K-FAC", [reached, later]) == expected
    never = made_runs.write(tmp_path, 2, [0.9, 0.95])
    assert demo.row("K-FAC", [reached, never])[-1] == "–"
