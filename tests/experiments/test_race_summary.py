import json
import pathlib

import numpy as np
import pytest

from kldwrm_jax.experiments import race_summary
from kldwrm_jax.experiments.race_cases import PROBLEMS
from kldwrm_jax.experiments.race_summary import best_rate, counted, summary, to_targets

PUBLISHED = pathlib.Path(__file__).parents[2] / "results" / "race"
LOSS = PROBLEMS["text"]._replace(targets=(1.0, 0.5), steps=30, every=10)


def record(values, method="adam", seed=0, rate=0.1):
    curve = [
        {"step": 10 * (i + 1), "cpu_seconds": i + 1.0, "value": v} for i, v in enumerate(values)
    ]
    return {"method": method, "seed": seed, "rate": rate, "curve": curve}


def test_the_first_point_that_reaches_a_target_counts():
    found = to_targets(LOSS, record([2.0, 0.9, 0.4]))
    assert found == {
        "rate": 0.1,
        "steps to 1": 20,
        "seconds to 1": 2.0,
        "steps to 0.5": 30,
        "seconds to 0.5": 3.0,
        "end": 0.4,
    }
    assert to_targets(LOSS, record([2.0, None, 0.4]))["steps to 1"] == 30
    missed = to_targets(LOSS, record([2.0, 1.5, None]))
    assert missed["steps to 1"] == missed["seconds to 1"] == missed["end"] == np.inf
    assert to_targets(PROBLEMS["digits"], record([0.5, 0.96]))["steps to 0.95"] == 20


def test_the_rate_that_is_first_at_the_hardest_target_is_taken():
    tuning = [
        record([0.9, 0.6, 0.6], seed=100, rate=1.0),
        record([2.0, 1.0, 0.5], seed=100, rate=2.0),
        record([None, None, None], seed=100, rate=3.0),
        record([0.1, 0.1, 0.1], seed=100, rate=4.0, method="sgd"),
    ]
    assert best_rate(LOSS, tuning, "adam") == 2.0
    assert best_rate(LOSS, tuning[::2], "adam") == 1.0
    late = [record([9, 9, x], seed=100, rate=x) for x in (3.0, 2.0)]
    assert best_rate(LOSS, late, "adam") == 2.0
    accuracy = [record([0.1, 0.1, x], seed=100, rate=x) for x in (0.3, 0.2)]
    assert best_rate(PROBLEMS["digits"], accuracy, "adam") == 0.3


@pytest.fixture
def records():
    found = [record([2.0, 0.9, x], seed=i) for i, x in enumerate((0.4, 0.6, 0.7))]
    found += [record([0.1, 0.1, 0.1], seed=100), record([9.0, 9.0, 9.0], seed=100, rate=0.2)]
    found += [record([0.1, 0.1, 0.1], seed=0, rate=0.2)]  # of a rate that is no longer the best
    return found


def test_the_summary_has_medians_and_dashes_for_what_most_seeds_miss(records):
    assert counted(LOSS, records, "adam") == records[:3]
    assert counted(LOSS, records, "sgd") == []
    lines = summary(LOSS, records).splitlines()
    assert lines[0] == "## text, a transformer of two layers"
    assert lines[2] == (
        "|  | rate | steps to 1 | seconds to 1 | steps to 0.5 | seconds to 0.5 | end | "
        "rates that work |"
    )
    assert lines[4:] == ["| Adam | 0.1 | 20 | 2.0 | - | - | 0.6 | 1 of 2 |"]


def test_curves_are_those_of_the_runs_that_count(records):
    found = race_summary.curves(LOSS, [*records, record([None, 1.0, 1.0], seed=7)])
    ((steps, values),) = found.values()
    assert list(found) == ["Adam"]
    assert steps == [10, 20, 30]
    assert values.shape == (4, 3)
    assert np.isnan(values[3, 0])


@pytest.mark.skipif(not PUBLISHED.exists(), reason="a source distribution has no results")
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_published_logs_give_the_published_tables(name):
    lines = (PUBLISHED / f"{name}.jsonl").read_text().splitlines()
    found = summary(PROBLEMS[name], [json.loads(line) for line in lines])
    published = (PUBLISHED / f"{name}.md").read_text()
    assert found.splitlines()[4:] == published.splitlines()[4:]
    assert len(found.splitlines()) >= 6  # a title, a head and two methods
