import json
import math

import pytest

from kldwrm_jax.experiments import runs
from kldwrm_jax.experiments.errors import UsageError

HEADER = {"kind": "run", "seed": 3}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "train_loss": None,
    "test": {"paper": {"accuracy": 0.5}, "corrected": {"accuracy": 0.75}},
}


def test_a_line_truncated_by_a_kill_is_ignored(tmp_path):
    path = runs.log_path(tmp_path, 3)
    runs.rewrite(path, [HEADER, EPOCH])
    with path.open("a") as file:
        file.write('{"kind": "epo')
    found = runs.read(path)
    assert found.header == HEADER
    assert found.epochs == (EPOCH,)
    assert not found.finished


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = runs.log_path(tmp_path, 3)
    path.write_text(json.dumps(HEADER) + "\n{oops\n" + json.dumps(EPOCH) + "\n")
    with pytest.raises(UsageError, match="line 2"):
        runs.read(path)


@pytest.mark.parametrize("content", ["", "3\n", '{"kind": "epoch"}\n'])
def test_another_file_is_refused(content, tmp_path):
    path = runs.log_path(tmp_path, 0)
    path.write_text(content)
    with pytest.raises(UsageError, match=r"seed-0\.jsonl: (not the log of a run|line 1 is not)"):
        runs.read(path)


def test_curves_are_those_of_a_protocol_and_what_was_not_finite_is_nan(tmp_path):
    path = runs.log_path(tmp_path, 3)
    runs.rewrite(path, [HEADER, EPOCH])
    found = runs.read(path)
    assert found.curve("accuracy", "paper") == [0.5]
    assert found.curve("accuracy", "corrected") == [0.75]
    assert math.isnan(found.curve("train_loss")[0])
    assert runs.number(float("nan")) is runs.number(float("inf")) is None


def test_all_runs_below_a_folder_are_found_by_seed(tmp_path):
    for seed in (10, 9):
        runs.rewrite(runs.log_path(tmp_path / "kfac", seed), [{**HEADER, "seed": seed}])
    assert [found.header["seed"] for found in runs.read_all(tmp_path)] == [9, 10]


def test_a_folder_without_runs_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match=str(folder)):
            runs.read_all(folder)


def test_a_rewrite_that_is_killed_leaves_the_old_log(tmp_path, monkeypatch):
    path = runs.log_path(tmp_path, 3)
    runs.rewrite(path, [HEADER, EPOCH])

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs.Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            runs.rewrite(path, [HEADER])
    assert runs.read(path).epochs == (EPOCH,)
    runs.rewrite(path, [HEADER])
    assert runs.read(path).epochs == ()
    assert list(tmp_path.iterdir()) == [path]


def test_a_setting_that_differs_is_named(tmp_path):
    runs.check_same(tmp_path, {"a": 1, "b": 2}, {"a": 1}, "fix")
    with pytest.raises(UsageError, match="belongs to a run with b = 2, not 3: fix"):
        runs.check_same(tmp_path, {"a": 1, "b": 2}, {"a": 1, "b": 3}, "fix")
