"""The nine numbers of the paper's Table 1 and its rules for counting runs; and what we add."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from kldwrm_jax.experiments.runs import Run


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a run counts as past a threshold.

    The paper (supplement, "Considered Metrics Explanation") counts a run even if it gets worse
    afterwards, but only if it is past the threshold "significantly once" or "multiple times". The
    numbers are ours.
    """

    accuracy_margin: float = 0.001
    loss_margin: float = 0.01
    times: int = 3

    def __str__(self) -> str:
        return (
            f"A run counts if it is past the threshold at {self.times} or more epochs (the paper's "
            f"'multiple times'), or at one by at least "
            f"{100 * self.accuracy_margin:g} percentage points of accuracy or {self.loss_margin:g} "
            f"of loss (its 'significantly'); getting worse afterwards does not matter."
        )

    def accuracy(self, curve: Sequence[float], threshold: float, strict: bool = False) -> bool:
        """Whether a curve of accuracies (from 0 to 1) gets to the threshold, or above if strict."""
        # Accuracies are fractions of a whole number of images, but not exact ones.
        excess = np.round(np.asarray(curve) - threshold, 7)
        past = excess > 0 if strict else excess >= 0
        return self._counts(past, excess >= self.accuracy_margin)

    def loss(self, curve: Sequence[float], threshold: float) -> bool:
        """Whether a curve of losses gets below the threshold."""
        excess = threshold - np.asarray(curve)
        return self._counts(excess > 0, excess >= self.loss_margin)

    def _counts(self, past: np.ndarray, far: np.ndarray) -> bool:
        return bool(past.sum() >= self.times or far.any())


@dataclasses.dataclass(frozen=True)
class Summary:
    """A row of Table 1. Accuracies in percent; deviations are those of a sample (n - 1).

    The last number is not the paper's: the median over runs of the first epoch with an accuracy of
    98 % or more, infinite if most never have it.
    """

    at_least_98: int
    above_98: int
    at_least_985: int
    loss_below_025: int
    loss_below_02: int
    mean_accuracy: float
    std_accuracy: float
    mean_loss: float
    std_loss: float
    epochs_to_98: float


def summarise(runs: Sequence[Run], protocol: str, rule: Rule) -> Summary:
    """A row of Table 1 from runs of one setting, all of them finished."""
    accuracy = [run.curve("accuracy", protocol) for run in runs]
    loss = [run.curve("loss", protocol) for run in runs]
    last_accuracy = _last_accuracy(runs, protocol)
    last_loss = np.array([curve[-1] for curve in loss])
    return Summary(
        sum(rule.accuracy(curve, 0.98) for curve in accuracy),
        sum(rule.accuracy(curve, 0.98, strict=True) for curve in accuracy),
        sum(rule.accuracy(curve, 0.985) for curve in accuracy),
        sum(rule.loss(curve, 0.25) for curve in loss),
        sum(rule.loss(curve, 0.2) for curve in loss),
        float(last_accuracy.mean()),
        _deviation(last_accuracy),
        float(last_loss.mean()),
        _deviation(last_loss),
        float(np.median([_first_epoch(curve, 0.98) for curve in accuracy])),
    )


class Difference(NamedTuple):
    """Of two settings' accuracies after the last epoch: of their means, and of their spreads.

    A ``p`` is how likely a difference as large, either way, is to come of the seeds alone; nan
    where neither setting has a spread.
    """

    points: float  # of the means, in percentage points
    p: float  # Welch's t test
    ratio: float  # of the deviations
    ratio_p: float  # Brown and Forsythe's test


def difference(some: Sequence[Run], others: Sequence[Run], protocol: str) -> Difference:
    """The first against the second, two or more finished runs each."""
    a, b = _last_accuracy(some, protocol), _last_accuracy(others, protocol)
    points, deviations = float(a.mean() - b.mean()), (_deviation(a), _deviation(b))
    if not any(deviations):
        return Difference(points, np.nan, np.nan, np.nan)
    means = stats.ttest_ind_from_stats(
        a.mean(), deviations[0], len(a), b.mean(), deviations[1], len(b), equal_var=False
    )
    spreads = stats.levene(a, b, center="median")
    ratio = deviations[0] / deviations[1] if deviations[1] else np.inf
    return Difference(points, float(means.pvalue), ratio, float(spreads.pvalue))


def _last_accuracy(runs: Sequence[Run], protocol: str) -> np.ndarray:
    return 100 * np.array([run.curve("accuracy", protocol)[-1] for run in runs])


def _first_epoch(accuracy: Sequence[float], threshold: float) -> float:
    past = np.flatnonzero(np.round(np.asarray(accuracy) - threshold, 7) >= 0)
    return past[0] + 1 if len(past) else float("inf")


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")
