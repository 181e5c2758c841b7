"""Steps to targets: on a problem that takes no time, and on made-up curves."""

import dataclasses
import json

import numpy as np
import pytest

from kldwrm_jax.experiments import cli, race, race_problems
from kldwrm_jax.experiments.race import METHODS, quality, summary, to_target, tuned
from kldwrm_jax.experiments.race_problems import PROBLEMS

LOSS = dataclasses.replace(PROBLEMS["text"], targets=(1.0, 0.5), steps=30, every=10)


def record(values, method="adam", seed=0, rate=0.1):
    curve = [
        {"step": 10 * (i + 1), "cpu_seconds": i + 1.0, "value": v} for i, v in enumerate(values)
    ]
    return {"method": method, "seed": seed, "rate": rate, "curve": curve}


def test_the_first_point_that_reaches_a_target_counts():
    assert to_target(LOSS, record([2.0, 0.9, 0.4]), 1.0)["step"] == 20
    assert to_target(LOSS, record([2.0, None, 0.4]), 1.0)["step"] == 30
    assert to_target(LOSS, record([2.0, 1.5, 1.1]), 1.0) is None
    assert to_target(PROBLEMS["digits"], record([0.5, 0.96]), 0.95)["step"] == 20


def test_the_rate_that_is_first_at_the_hardest_target_is_taken():
    tuning = [
        record([0.9, 0.6, 0.6], seed=100, rate=1.0),
        record([2.0, 1.0, 0.5], seed=100, rate=2.0),
        record([None, None, None], seed=100, rate=3.0),
    ]
    assert tuned(LOSS, tuning, "adam") == 2.0
    assert tuned(LOSS, tuning[::2], "adam") == 1.0
    assert quality(LOSS, tuning[1]) < quality(LOSS, tuning[0]) < quality(LOSS, tuning[2])


def test_the_summary_has_medians_and_says_what_most_seeds_did_not_reach():
    found = [record([2.0, 0.9, x], seed=i) for i, x in enumerate((0.4, 0.6, 0.7))]
    found += [record([0.1, 0.1, 0.1], seed=100), record([9.0, 9.0, 9.0], seed=100, rate=0.2)]
    found += [record([0.1, 0.1, 0.1], seed=0, rate=0.2)]  # of a rate that is not the best any more
    (row,) = summary(LOSS, found)
    assert (row["step to 1"], row["cpu_seconds to 1"], row["step to 0.5"]) == (20, 2.0, None)
    assert (row["seeds"], row["end"]) == (3, 0.6)
    assert (row["rates that reach the first target"], row["rates"]) == (1, 2)
    assert "| Adam | 0.1 | 20 | 2.0 | - | - | 0.6 | 1 of 2 |" in race.markdown(LOSS, [row])


@pytest.fixture
def tiny(monkeypatch):
    """The language model, with little to learn and little time."""
    short = dataclasses.replace(
        PROBLEMS["text"],
        load=lambda _: _small_text(),
        batch=4,
        steps=4,
        every=2,
        targets=(9.0,),
    )
    monkeypatch.setitem(PROBLEMS, "text", short)


def _small_text():
    _, likelihood, arrays = race_problems._text(None, length=8)
    model = race_problems.Transformer(characters=26, width=4, heads=2, depth=1)
    return model, likelihood, arrays._replace(test_x=arrays.test_x[:8], test_y=arrays.test_y[:8])


def test_a_race_is_logged_and_goes_on_where_it_was_stopped(tiny, tmp_path, capsys):
    command = ["race", "--problems", "text", "--methods", "sgd", "kfac-calibrated"]
    command += ["--seeds", "1", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    log = tmp_path / "text.jsonl"
    first = log.read_text()
    records = [json.loads(line) for line in first.splitlines()]
    rates = len(METHODS["sgd"].rates) + len(METHODS["kfac-calibrated"].rates)
    assert len(records) == rates + 2
    assert all(np.isfinite(p["value"]) for r in records for p in r["curve"])
    assert {"versions", "machine"} <= records[0].keys()
    assert (tmp_path / "text.png").exists()
    assert "K-FAC, calibrated" in (tmp_path / "text.md").read_text()
    assert cli.main(command) == 0
    assert log.read_text() == first
    capsys.readouterr()
    assert cli.main(["race", "--problems", "chess"]) == 1
    assert "autoencoder" in capsys.readouterr().err


def test_the_text_is_the_same_every_time_and_its_two_parts_differ():
    _, _, one = race_problems._text(None)
    _, _, two = race_problems._text(None)
    np.testing.assert_array_equal(one.train_x, two.train_x)
    np.testing.assert_array_equal(one.train_x[:, 1:], one.train_y[:, :-1])
    assert race_problems.sentences(5, 0) != race_problems.sentences(5, 1)
