"""What the next batch says of a step."""

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.optimizers.judgement import Change, judge, unjudged

pytestmark = pytest.mark.usefixtures("x64")

CERTAIN, DOUBTFUL = 1e-10, 1.0  # variances


def judged(changes, promise=1.0, variance=CERTAIN, loss=100.0):
    """The judgement after steps that changed the next batch's loss by these amounts."""
    judgement, verdicts = unjudged(), []
    for change in changes:
        last = Change(*map(jnp.asarray, (promise, change, variance, loss)))
        judgement, verdict = judge(judgement, last)
        verdicts.append(verdict)
    return judgement, verdicts


def test_the_share_is_the_running_mean_of_realised_over_promised_decrease():
    changes, expected = [-0.8, -0.2, 0.1, -3.0], 1.0
    for change in changes:
        expected = 0.9 * expected + 0.1 * min(-change, 1)
    assert judged(changes)[0].share == pytest.approx(expected)


def test_a_loss_that_rises_beyond_doubt_is_harm_and_one_within_the_noise_is_not():
    assert judged([0.6])[1][-1].harmed  # at once
    assert not judged([0.6], variance=DOUBTFUL)[1][-1].harmed
    slowly = judged([0.2] * 5)[1]
    assert [bool(v.harmed) for v in slowly] == [True] * 5
    assert not any(v.harmed for v in judged([0.05] * 5, variance=0.01)[1])
    assert not any(v.harmed for v in judged([-0.5] * 5)[1])


def test_a_step_that_raised_the_loss_by_more_than_it_had_promised_to_lower_it_is_undone():
    assert judged([1.1])[1][-1].undo
    assert not judged([0.9])[1][-1].undo
    assert not judged([1.1], variance=DOUBTFUL)[1][-1].undo


def test_a_loss_that_has_doubled_is_enough_where_few_samples_carry_it():
    """One of n samples: the change is as large as its deviation, however much it is."""
    (verdict,) = judged([0.5], promise=0.01, variance=0.49**2, loss=0.1)[1]
    assert verdict.undo
    (verdict,) = judged([0.5], promise=0.01, variance=0.49**2, loss=1.0)[1]
    assert not verdict.undo
    (verdict,) = judged([0.5], promise=0.01, variance=0.49**2, loss=0.0)[1]  # not known
    assert not verdict.undo


def test_what_is_not_finite_is_undone():
    for wrong in (np.nan, np.inf):
        judgement, (*_, verdict) = judged([-0.5, wrong])
        assert verdict.undo
        assert verdict.harmed
        assert all(np.isfinite(x) for x in judgement)


def test_harm_is_forgotten_once_it_is_answered_but_not_the_share():
    judgement, _ = judged([0.6])
    assert judgement.change == judgement.promise == judgement.variance == 0
    assert judgement.share == pytest.approx(0.9 - 0.1 * 0.6)


def test_more_than_half_of_the_promise_is_confirmation():
    assert judged([-0.6] * 3)[1][-1].confirmed
    assert not judged([-0.4] * 3)[1][-1].confirmed


def test_no_step_is_no_evidence():
    before, _ = judged([-0.5])
    after, verdict = judge(before, Change(*(jnp.zeros(()) for _ in Change._fields)))
    assert after == before
    assert not any(verdict)
