import made_runs
import numpy as np
import pytest

from kldwrm_jax.experiments.table import Rule, difference, summarise

RULE = Rule(accuracy_margin=0.001, loss_margin=0.01, times=3)


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
    assert RULE.accuracy(curve, 0.98) == counts


def test_a_strict_threshold_is_not_met_by_equality():
    """An accuracy of 9800 in 10000 images, as float32 has it, is 98 %."""
    equal = [float(np.float32(0.98))] * 5
    assert RULE.accuracy(equal, 0.98)
    assert not RULE.accuracy(equal, 0.98, strict=True)
    above = [float(np.float32(0.9801))] * 3
    assert RULE.accuracy(above, 0.98, strict=True)


def test_losses_count_downwards():
    assert RULE.loss([0.24], 0.25)
    assert not RULE.loss([0.245, 0.3], 0.25)
    assert RULE.loss([0.245, 0.3, 0.249, 0.249], 0.25)


def test_the_rule_says_its_numbers():
    text = str(Rule(accuracy_margin=0.002, loss_margin=0.03, times=4))
    assert "0.2 percentage points" in text
    assert "0.03 of loss" in text
    assert "at 4 or more epochs" in text


def test_the_nine_numbers_are_those_of_the_curves(tmp_path):
    accuracy = [[0.985, 0.985, 0.985], [0.98, 0.98, 0.98], [0.5, 0.982, 0.96]]
    loss = [[0.1, 0.3, 0.3], [0.26, 0.26, 0.26], [0.24, 0.3, 0.9]]
    made = [
        made_runs.write(tmp_path, seed, accuracy=a, loss=l)
        for seed, (a, l) in enumerate(zip(accuracy, loss, strict=True))
    ]
    found = summarise(made, "paper", RULE)
    assert (found.at_least_98, found.above_98, found.at_least_985) == (3, 2, 1)
    assert (found.loss_below_025, found.loss_below_02) == (2, 1)
    last = [98.5, 98.0, 96.0]
    assert found.mean_accuracy == pytest.approx(np.mean(last))
    assert found.std_accuracy == pytest.approx(np.std(last, ddof=1))
    assert found.mean_loss == pytest.approx(np.mean([0.3, 0.26, 0.9]))
    assert found.epochs_to_98 == 1
    assert summarise(made[2:], "paper", RULE).epochs_to_98 == 2
    assert np.isnan(summarise(made[:1], "paper", RULE).std_loss)
    assert summarise(made, "corrected", RULE).mean_accuracy == pytest.approx(np.mean(last) + 1)


def test_runs_most_of_which_never_have_98_percent_take_for_ever(tmp_path):
    made = [
        made_runs.write(tmp_path, i, [0.9, x], loss=[1, 1]) for i, x in enumerate((0.99, 0.9, 0.9))
    ]
    assert np.isinf(summarise(made, "paper", RULE).epochs_to_98)


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
    found = difference(a, b, "paper")
    assert found.points == pytest.approx(x.mean() - y.mean())
    errors = [np.var(values, ddof=1) / len(values) for values in (x, y)]
    t = found.points / np.sqrt(sum(errors))
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 3 + errors[1] ** 2 / 2)
    drawn = np.random.default_rng(0).standard_t(freedom, 200_000)
    assert found.p == pytest.approx(np.mean(np.abs(drawn) >= abs(t)), abs=0.01)
    assert difference(b, a, "paper").points == -found.points


def test_a_difference_of_spreads_is_a_difference_of_mean_distances_from_the_median(two_settings):
    """Brown and Forsythe: an analysis of variance of those distances, here of two groups."""
    (a, b), values = two_settings
    found = difference(a, b, "paper")
    assert found.ratio == pytest.approx(np.std(values[0], ddof=1) / np.std(values[1], ddof=1))
    distances = [np.abs(x - np.median(x)) for x in values]
    whole = np.concatenate(distances)
    between = sum(len(d) * (d.mean() - whole.mean()) ** 2 for d in distances)
    within = sum(((d - d.mean()) ** 2).sum() for d in distances)
    f = between / (within / (len(whole) - 2))
    drawn = np.random.default_rng(0).f(1, len(whole) - 2, 200_000)
    assert found.ratio_p == pytest.approx(np.mean(drawn >= f), abs=0.01)


def test_where_nothing_varies_nothing_is_known_of_a_difference(two_settings):
    (a, b), (x, y) = two_settings
    found = difference([a[0]] * 2, [b[0]] * 2, "paper")
    assert found.points == pytest.approx(x[0] - y[0])
    assert np.isnan(found[1:]).all()
    assert np.isinf(difference(a, [b[0]] * 2, "paper").ratio)
