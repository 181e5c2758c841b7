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


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
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
def test_what_is_no_log_is_refused(content, tmp_path):
    path = runs.log_path(tmp_path, 0)
    path.write_text(content)
    with pytest.raises(UsageError, match="not the log of a run"):
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


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    runs.replace(path, b"old")

    def full(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(runs.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        runs.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_says_with_what_and_where_it_was_made():
    made = runs.provenance()
    assert set(made["versions"]) >= {"python", "jax", "jaxlib", "flax", "optax", "kldwrm_jax"}
    assert made["machine"]["cores"] >= 1
