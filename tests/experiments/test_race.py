import json

import numpy as np
import pytest

from kldwrm_jax.experiments import cli, models, race, race_cases
from kldwrm_jax.experiments.race_cases import METHODS, PROBLEMS


def _small_text():
    train, test = (race_cases.sentences(200, seed) for seed in (0, 1))
    _, likelihood, arrays = race_cases._text(train, test, length=8)
    model = models.Transformer(characters=26, width=4, heads=2, depth=1)
    return model, likelihood, arrays._replace(test_x=arrays.test_x[:8], test_y=arrays.test_y[:8])


@pytest.fixture
def tiny(monkeypatch):
    """The language model, small, for four steps."""
    short = PROBLEMS["text"]._replace(
        load=lambda _: _small_text(), batch=4, steps=4, every=2, targets=(9.0,)
    )
    monkeypatch.setitem(PROBLEMS, "text", short)


@pytest.fixture
def command(tiny, tmp_path):
    words = ["race", "--problems", "text", "--methods", "sgd", "kfac-calibrated"]
    return [*words, "--seeds", "1", "--out", str(tmp_path)]


def test_a_race_is_logged_and_continues_where_it_was_stopped(command, tmp_path, monkeypatch):
    assert cli.main(command) == 0
    log = tmp_path / "text.jsonl"
    first = log.read_text()
    records = [json.loads(line) for line in first.splitlines()]
    rates = METHODS["sgd"].rates + METHODS["kfac-calibrated"].rates
    assert len(records) == len(rates) + 2
    assert [r["rate"] for r in records if r["seed"] == 100] == list(rates)
    assert all([p["step"] for p in r["curve"]] == [2, 4] for r in records)
    assert all(np.isfinite(p["value"]) for r in records for p in r["curve"])
    assert all(0 < r["curve"][0]["cpu_seconds"] < r["curve"][1]["cpu_seconds"] for r in records)
    assert {"versions", "machine", "git_revision"} <= records[0].keys()
    assert (tmp_path / "text.png").read_bytes().startswith(b"\x89PNG")
    assert "K-FAC, calibrated" in (tmp_path / "text.md").read_text()

    log.write_text(first[: first.rindex("{") + 30])  # a kill truncated the last line
    assert cli.main(command) == 0
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert again[:-1] == records[:-1]
    assert [p["value"] for p in again[-1]["curve"]] == [p["value"] for p in records[-1]["curve"]]

    monkeypatch.setattr(race, "follow", lambda *_: pytest.fail("ran again"))
    finished = log.read_text()
    assert cli.main(command) == 0
    assert log.read_text() == finished


def test_methods_that_are_too_slow_for_a_problem_are_left_out(command, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBLEMS, "text", PROBLEMS["text"]._replace(methods=("sgd",)))
    assert cli.main(command) == 0
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"sgd"}


@pytest.mark.parametrize(
    ("argument", "complaint"), [("problems", "autoencoder"), ("methods", "kfac-calibrated")]
)
def test_an_unknown_name_gets_the_known_ones(argument, complaint, capsys):
    assert cli.main(["race", f"--{argument}", "chess"]) == 1
    assert complaint in capsys.readouterr().err
