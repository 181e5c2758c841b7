import dataclasses
import importlib
import re
import subprocess
import sys

import pytest

from kldwrm_jax.experiments import cli

COMMANDS = ("demo", "train", "paper", "report", "bench", "race")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train", "--dataset", "minst"], "digits, mnist"),
        (["train", "--model", "resnet"], "paper-cnn, cnn, mlp"),
        (["train", "--model", "paper-cnn"], "--model cnn"),
        (["train", "--optimizer", "lbfgs"], "sgd, adam, kfac, so, q, qe"),
        (["train", "--optimizer", "kfac", "--set", "omega", "1"], "learning_rate, momentum"),
        (["train", "--optimizer", "kfac", "--set", "rho", "2"], "rho must be in"),
        (["train", "--epochs", "0"], "--epochs must be positive"),
        (["paper", "--solvers", "adam"], "kfac, so, q, qe"),
        (["report", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_wrong_value_gets_the_right_ones(words, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "demo, train, paper, report, bench"),
        (["trian"], "demo, train, paper, report, bench"),
        (["train", "--set", "rho"], "--set"),
        (["train", "--fisher", "full"], "empirical"),
        (["train", "--epochs", "many"], "--epochs"),
        (["report"], "PATH"),
    ],
)
def test_an_invalid_command_line_is_explained(words, complaint, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = getattr(importlib.import_module(f"kldwrm_jax.experiments.{name}"), name.title())
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert command.__doc__.splitlines()[0] in shown
    for field in dataclasses.fields(command):
        _, _, rest = shown.partition(f"--{field.name.replace('_', '-')} ")
        explained = rest or shown.partition("PATH")[2]  # an argument without a name
        assert re.match(r"[^.]*[A-Za-z][^.]*\.", explained), field.name


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


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
