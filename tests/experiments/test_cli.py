import json
import subprocess
import sys

import made_runs
import numpy as np
import pytest

from kldwrm_jax.experiments import cli, demo, options, recipes, runs
from kldwrm_jax.experiments.training import Spec


@pytest.fixture
def own(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 4)) + 2 * np.eye(3, 4)[y]
    path = tmp_path / "own.npz"
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return f"npz:{path}"


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_train_writes_json_lines_and_resumes(own, tmp_path, capsys):
    command = [
        "train", "--dataset", own, "--optimizer", "sgd", "kfac", "--epochs", "2", "--seeds", "2",
        "--set", "weight_decay=0", "--learning-rate", "0.05", "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert cli.main(command) == 0
    lines = json_lines(capsys.readouterr().out)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert len(epochs) == 2 * 2 * 2
    found = runs.read_all(tmp_path / "runs")
    assert [run.path.parent.name for run in found] == ["npz-own-mlp-kfac"] * 2 + [
        "npz-own-mlp-sgd"
    ] * 2
    arguments = found[0].header["setting"]["arguments"]
    assert arguments["weight_decay"] == 0
    assert arguments["learning_rate"] == 0.05
    assert cli.main(command) == 1
    assert "--resume" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0


def test_report_reads_what_train_wrote(own, tmp_path, capsys):
    out = str(tmp_path / "runs")
    cli.main(["train", "--dataset", own, "--optimizer", "sgd", "--epochs", "1", "--out", out])
    assert cli.main(["report", out, "--protocol", "corrected"]) == 0
    assert (tmp_path / "runs" / "report" / "sgd-corrected.png").exists()
    assert "SGD with momentum" in (tmp_path / "runs" / "report" / "report.md").read_text()


def test_paper_trains_what_is_missing_then_reports(tmp_path, capsys):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 10
    x = rng.integers(0, 256, (40, 28, 28)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x[:24], y_train=y[:24], x_test=x[24:], y_test=y[24:])
    command = [
        "paper", "--dataset", f"npz:{tmp_path / 'own.npz'}", "--batch-size", "8", "--solvers", "so",
        "--table", "main", "--epochs", "1", "--out", str(tmp_path / "runs"), "--protocol", "paper",
        "--seeds", "2",
    ]  # fmt: skip
    assert cli.main(command) == 0
    log = runs.log_path(tmp_path / "runs" / "so-0.33", 0)
    first = log.read_text()
    lines = json_lines(capsys.readouterr().out)
    assert [line["kind"] for line in lines] == ["epoch", "end"] * 2 + ["row", "file"]
    assert cli.main(command) == 0
    assert log.read_text() == first
    lines = json_lines(capsys.readouterr().out)
    assert [line["kind"] for line in lines] == ["row", "file"]
    assert lines[0]["runs"] == 2


def test_demo_ends_with_a_table_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SETTINGS", {"sgd": {}, "adam": {}})
    earlier = made_runs.write(tmp_path / "sgd", 7, [0.1])
    assert cli.main(["demo", "--epochs", "2", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert not earlier.path.exists()
    lines = json_lines(capsys.readouterr().out)
    assert [line["optimizer"] for line in lines[:2]] == ["SGD with momentum", "Adam"]
    assert all(0.1 < line["accuracy"] <= 1 and line["seconds"] > 0 for line in lines[:2])
    assert lines[2]["path"] == str(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_shows_what_was_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SETTINGS", {"sgd": {}, "adam": {}})
    train_seeds = demo.training.train_seeds

    def interrupted(spec, *args, **kwargs):
        if spec.setting.optimizer == "adam":
            raise KeyboardInterrupt
        return train_seeds(spec, *args, **kwargs)

    monkeypatch.setattr(demo.training, "train_seeds", interrupted)
    assert cli.main(["demo", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert [line.get("optimizer") for line in json_lines(shown.out)][:1] == ["SGD with momentum"]
    assert "interrupted" in shown.err


def test_steps_to_the_target_are_those_of_the_first_epoch_that_reaches_it(tmp_path):
    reached = made_runs.write(tmp_path, 0, [0.9, 0.961, 0.95])  # one percent more, corrected
    assert demo.steps_to_target(reached) == 2 * 117
    assert demo.steps_to_target(made_runs.write(tmp_path, 1, [0.9, 0.95])) is None


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["trian"], 2, "demo, train, paper, report, bench"),
        (["train", "--dataset", "minst"], 1, "digits, mnist, fashion-mnist"),
        (["train", "--model", "resnet"], 1, "paper-cnn, cnn, mlp"),
        (["train", "--model", "paper-cnn"], 1, "--model cnn"),
        (["train", "--optimizer", "lbfgs"], 1, "sgd, adam, kfac, so, q, qe"),
        (["train", "--optimizer", "kfac", "--set", "omega=1"], 1, "learning_rate, rho"),
        (["train", "--set", "rho"], 1, "NAME=VALUE"),
        (["train", "--optimizer", "kfac", "--set", "rho=2"], 1, "rho must be in"),
        (["paper", "--solvers", "adam"], 1, "kfac, so, q, qe"),
        (["report", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    ],
)
def test_a_wrong_name_gets_the_right_ones(words, status, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == status
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "x", "3-1", "-2"])
def test_seeds_that_are_none_are_explained(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", f"--seeds={text}"])
    assert "10-19" in capsys.readouterr().err


def test_seeds_are_counted_or_listed():
    assert list(options.seeds("3")) == [0, 1, 2]
    assert list(options.seeds("4-6")) == [4, 5, 6]


@pytest.mark.parametrize("name", ["demo", "train", "paper", "report"])
def test_help_explains(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    assert "default" in capsys.readouterr().out


def test_without_arguments_the_commands_are_listed(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
{body}
"""


def run_without(absent, body):
    program = PROGRAM.format(absent=set(absent), body=body)
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )


def test_without_the_extra_the_error_says_how_to_install_it():
    body = "from kldwrm_jax.experiments.cli import main; sys.exit(main(['demo']))"
    ended = run_without(["matplotlib"], body)
    assert ended.returncode == 1
    assert "pip install 'kldwrm_jax[experiments]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_library_itself_needs_nothing_of_the_extra():
    ours = cli.EXTRA - {"rich"}  # which Flax imports itself
    ended = run_without(ours, "import kldwrm_jax, kldwrm_jax.experiments.cli")
    assert ended.returncode == 0, ended.stderr


def test_the_specs_of_the_paper_are_the_papers():
    """Batch 512, the empirical Fisher, biases apart; 50 epochs is a default of the command."""
    spec = Spec("mnist", "paper-cnn", recipes.setting("q"), 50)
    assert (spec.batch_size, spec.fisher, spec.bias) == (512, "empirical", "separate")
    assert spec.setting.arguments == {
        "learning_rate": 0.01,
        "damping": 0.011,
        "weight_decay": 0.001,
        "refresh_every": 30,
        "kl_clip": 0.1,
        "solver": "reweighted",
        "block_clip": 2.0,
        "rho": 0.5,
    }
