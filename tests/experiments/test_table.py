import made_runs
import numpy as np
import pytest

from kldwrm_jax.experiments import recipes, table
from kldwrm_jax.experiments.table import PAPER_SETTINGS, difference, summarise


def test_there_are_four_settings_a_solver_and_one_of_them_is_best():
    for solver in recipes.SOLVERS:
        entries = [e for e in PAPER_SETTINGS if e.setting.optimizer == solver]
        assert len(entries) == 4
        assert [e.best for e in entries].count(True) == 1
    assert len({entry.name for entry in PAPER_SETTINGS}) == 16


def test_the_best_settings_are_those_of_the_papers_main_table():
    rows = {e.setting.optimizer: e.row for e in PAPER_SETTINGS if e.best}
    assert {name: tuple(row.values()) for name, row in rows.items()} == {
        "kfac": (3, 3, 1, 5, 2, 96.19, 3.2, 0.26, 0.10),
        "so": (4, 2, 0, 7, 0, 97.60, 0.85, 0.25, 0.04),
        "q": (5, 4, 0, 4, 0, 97.69, 0.69, 0.26, 0.04),
        "qe": (8, 7, 2, 9, 0, 98.01, 0.64, 0.23, 0.02),
    }
    assert all([*row] == [*table.COLUMNS][:9] for row in rows.values())


def test_debatable_counts_have_their_slash():
    slashes = [n for entry in PAPER_SETTINGS for n in entry.row.values() if isinstance(n, str)]
    assert slashes == ["7/8", "4/5", "6/7", "7/8", "9/10"]


@pytest.mark.parametrize(
    ("curve", "counts"),
    [
        ([0.9, 0.98, 0.98, 0.97], False),  # twice, by nothing
        ([0.98, 0.9, 0.9801, 0.9, 0.98], True),  # three times
        ([0.9, 0.981, 0.5, 0.5], True),  # once, by the margin, and worse afterwards
        ([0.9, 0.9809, 0.5, 0.5], False),  # once, by less
        ([float("nan"), 0.99], True),
        ([float("nan")] * 5, False),
    ],
)
def test_a_run_counts_if_it_is_past_significantly_once_or_several_times(curve, counts):
    assert table.reaches(curve, 0.98) == counts


def test_a_strict_threshold_is_not_met_by_equality():
    """An accuracy of 9800 in 10000 images, as float32 has it, is 98 %."""
    equal = [float(np.float32(0.98))] * 5
    assert table.reaches(equal, 0.98)
    assert not table.reaches(equal, 0.98, strict=True)
    above = [float(np.float32(0.9801))] * 3
    assert table.reaches(above, 0.98, strict=True)


def test_losses_count_downwards():
    assert table.falls_below([0.24], 0.25)
    assert not table.falls_below([0.245, 0.3], 0.25)
    assert table.falls_below([0.245, 0.3, 0.249, 0.249], 0.25)


def test_the_rule_says_its_numbers():
    assert "0.1 percentage points" in table.RULE
    assert "0.01 of loss" in table.RULE
    assert "at least 3 epochs" in table.RULE


def test_the_nine_numbers_are_those_of_the_curves(tmp_path):
    accuracy = [[0.985, 0.985, 0.985], [0.98, 0.98, 0.98], [0.5, 0.982, 0.96]]
    loss = [[0.1, 0.3, 0.3], [0.26, 0.26, 0.26], [0.24, 0.3, 0.9]]
    made = [
        made_runs.write(tmp_path, seed, accuracy=a, loss=l)
        for seed, (a, l) in enumerate(zip(accuracy, loss, strict=True))
    ]
    found = summarise(made, "paper")
    assert (found["at_least_98"], found["above_98"], found["at_least_985"]) == (3, 2, 1)
    assert (found["loss_below_025"], found["loss_below_02"]) == (2, 1)
    last = [98.5, 98.0, 96.0]
    assert found["mean_accuracy"] == pytest.approx(np.mean(last))
    assert found["std_accuracy"] == pytest.approx(np.std(last, ddof=1))
    assert found["mean_loss"] == pytest.approx(np.mean([0.3, 0.26, 0.9]))
    assert found["epochs_to_98"] == 1
    assert summarise(made[2:], "paper")["epochs_to_98"] == 2
    assert np.isnan(summarise(made[:1], "paper")["std_loss"])
    assert summarise(made, "corrected")["mean_accuracy"] == pytest.approx(np.mean(last) + 1)


def test_runs_most_of_which_never_have_98_percent_take_for_ever(tmp_path):
    made = [
        made_runs.write(tmp_path, i, [0.9, x], loss=[1, 1]) for i, x in enumerate((0.99, 0.9, 0.9))
    ]
    assert np.isinf(summarise(made, "paper")["epochs_to_98"])


@pytest.fixture
def two_settings(tmp_path):
    values = [0.95, 0.96, 0.98, 0.97], [0.97, 0.985, 0.98]
    made = [
        [made_runs.write(tmp_path / str(k), i, [x]) for i, x in enumerate(accuracies)]
        for k, accuracies in enumerate(values)
    ]
    return made, [100 * np.array(accuracies) for accuracies in values]


def test_a_difference_of_means_has_the_p_of_welch(two_settings):
    """t and its degrees of freedom by hand; the distribution by sampling it."""
    (a, b), (x, y) = two_settings
    points, p, *_ = difference(a, b, "paper")
    assert points == pytest.approx(x.mean() - y.mean())
    errors = [np.var(values, ddof=1) / len(values) for values in (x, y)]
    t = points / np.sqrt(sum(errors))
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 3 + errors[1] ** 2 / 2)
    drawn = np.random.default_rng(0).standard_t(freedom, 200_000)
    assert p == pytest.approx(np.mean(np.abs(drawn) >= abs(t)), abs=0.01)
    assert difference(b, a, "paper")[0] == -points


def test_a_difference_of_spreads_is_a_difference_of_mean_distances_from_the_median(two_settings):
    """Brown and Forsythe: an analysis of variance of those distances, here of two groups."""
    (a, b), values = two_settings
    _, _, ratio, ratio_p = difference(a, b, "paper")
    assert ratio == pytest.approx(np.std(values[0], ddof=1) / np.std(values[1], ddof=1))
    distances = [np.abs(x - np.median(x)) for x in values]
    whole = np.concatenate(distances)
    between = sum(len(d) * (d.mean() - whole.mean()) ** 2 for d in distances)
    within = sum(((d - d.mean()) ** 2).sum() for d in distances)
    f = between / (within / (len(whole) - 2))
    drawn = np.random.default_rng(0).f(1, len(whole) - 2, 200_000)
    assert ratio_p == pytest.approx(np.mean(drawn >= f), abs=0.01)


def test_where_nothing_varies_nothing_is_known_of_a_difference(two_settings):
    (a, b), (x, y) = two_settings
    found = difference([a[0]] * 2, [b[0]] * 2, "paper")
    assert found[0] == pytest.approx(x[0] - y[0])
    assert np.isnan(found[1:]).all()
    assert np.isinf(difference(a, [b[0]] * 2, "paper")[2])
