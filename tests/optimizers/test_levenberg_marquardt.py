"""Damping that adapts."""

import jax.numpy as jnp
import pytest

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

FIRST, YES, NO = jnp.asarray(0.1), jnp.ones((), bool), jnp.zeros((), bool)


def moved(rule, share, damping=0.1, fitting=YES):
    return float(rule.move(jnp.asarray(damping), FIRST, jnp.asarray(share), fitting))


def test_it_is_lowered_above_three_quarters_and_raised_below_one():
    rule = kw.LevenbergMarquardt(decay=0.5)
    assert moved(rule, 0.8) == pytest.approx(0.05)
    assert moved(rule, 0.5) == pytest.approx(0.1)
    assert moved(rule, 0.2) == pytest.approx(0.2)
    assert float(rule.raised(FIRST, FIRST)) == pytest.approx(0.2)


def test_where_iterates_are_averaged_it_only_comes_back_to_its_first_value():
    rule = kw.LevenbergMarquardt(decay=0.5)
    assert moved(rule, 0.0, fitting=NO) == pytest.approx(0.1)
    assert moved(rule, 0.9, 0.01, NO) == pytest.approx(0.01)
    assert moved(rule, 0.0, 0.8, NO) == pytest.approx(0.4)


def test_it_keeps_between_its_bounds():
    rule = kw.LevenbergMarquardt(decay=0.5, lowest=0.08, highest=0.15)
    assert moved(rule, 1.0) == pytest.approx(0.08)
    assert moved(rule, 0.0) == pytest.approx(0.15)
    found = kw.LevenbergMarquardt()
    assert moved(found, 0.0, 100.0) == pytest.approx(3.0)
    assert 0 < moved(found, 1.0, 1e-30) < 1e-13


def test_it_is_found_unless_it_is_given():
    assert kw.LevenbergMarquardt().first == 0.3
    assert kw.LevenbergMarquardt(initial=1e-3).first is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"initial": 0}, "initial must be a number > 0, got 0"),
        ({"every": 0}, "every must be a whole number >= 1"),
        ({"decay": -1}, "decay must be a number > 0, got -1"),
        ({"lowest": 0.0}, "lowest must be a number > 0"),
    ],
)
def test_wrong_arguments_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        kw.LevenbergMarquardt(**wrong)
