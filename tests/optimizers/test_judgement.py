"""What the next batch says of a step."""

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.optimizers.judgement import judge, unjudged

pytestmark = pytest.mark.usefixtures("x64")

MANY, FEW = 1e8, 1.0  # samples


def judged(changes, promise=1.0, size=0.1, samples=MANY):
    """The judgement after steps that changed the next batch's loss by these amounts."""
    judgement, verdicts = unjudged(), []
    for change in changes:
        slope = jnp.asarray(change + 0.5 * size)
        judgement, verdict = judge(
            judgement, jnp.asarray(promise), slope, jnp.asarray(size), samples
        )
        verdicts.append(verdict)
    return judgement, verdicts


def test_the_share_is_the_running_mean_of_realised_over_promised_decrease():
    changes, expected = [-0.8, -0.2, 0.1, -3.0], 1.0
    for change in changes:
        expected = 0.9 * expected + 0.1 * min(-change, 1)
    assert judged(changes)[0].share == pytest.approx(expected)


def test_a_quadratic_loss_keeps_exactly_what_it_promised(rng):
    """On a quadratic, the slope after the step and the curvature tell the change exactly."""
    root, g, s = rng.normal(size=(4, 4)), rng.normal(size=4), rng.normal(size=4)
    f = root @ root.T
    g = -np.abs(g) * np.sign(s) - f @ s  # downhill along the step
    promise, slope, size = -(g @ s + 0.5 * s @ f @ s), (g + f @ s) @ s, s @ f @ s
    judgement, _ = judge(unjudged(), *map(jnp.asarray, (promise, slope, size)), 1)
    assert judgement.share == pytest.approx(1.0)


def test_a_loss_that_rises_beyond_doubt_is_harm_and_one_within_the_noise_is_not():
    assert judged([0.6])[1][-1].harmed  # at once
    assert not judged([0.6], samples=FEW)[1][-1].harmed
    slowly = judged([0.2] * 5)[1]
    assert [bool(v.harmed) for v in slowly] == [True] * 5
    assert not any(v.harmed for v in judged([0.05] * 5, samples=10.0)[1])
    assert not any(v.harmed for v in judged([-0.5] * 5)[1])


def test_harm_is_forgotten_once_it_is_answered_but_not_the_share():
    judgement, _ = judged([0.6])
    assert judgement.change == judgement.promise == judgement.variance == 0
    assert judgement.share == pytest.approx(0.9 - 0.1 * 0.6)


def test_more_than_half_of_the_promise_is_confirmation():
    assert judged([-0.6] * 3)[1][-1].confirmed
    assert not judged([-0.4] * 3)[1][-1].confirmed


def test_no_step_is_no_evidence():
    before, _ = judged([-0.5])
    after, verdict = judge(before, *(jnp.zeros(()) for _ in range(3)), MANY)
    assert after == before
    assert not verdict.harmed
    assert not verdict.confirmed


def test_a_change_that_is_not_finite_is_harm():
    judgement, verdict = judge(unjudged(), jnp.ones(()), jnp.asarray(np.nan), jnp.ones(()), MANY)
    assert verdict.harmed
    assert np.isfinite(judgement.share)
