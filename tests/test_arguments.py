import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kldwrm_jax import arguments

NAN, INF = math.nan, math.inf

RANGES = {  # what it says is allowed, numbers it takes, numbers it refuses
    arguments.check_decay: ("in [0, 1)", [0, 0.0, 0.5, 0.999], [1, 1.0, -1e-9, NAN, INF]),
    arguments.check_fraction: ("in [0, 1]", [0, 0.5, 1, 1.0], [-1e-9, 1.001, NAN, INF]),
    arguments.check_non_negative: ("a number >= 0", [0, 0.0, 1e-30, 7], [-1e-30, -1, NAN, -INF]),
    arguments.check_positive: ("a number > 0", [1e-30, 1, 2.5], [0, 0.0, -1, NAN, -INF]),
}
each_range = pytest.mark.parametrize(
    ("check", "allowed", "good", "bad"),
    [(check, *rest) for check, rest in RANGES.items()],
    ids=[check.__name__ for check in RANGES],
)


@each_range
def test_numbers_in_range_pass(check, allowed, good, bad):
    for value in good:
        check("x", value)
        check("x", np.float32(value))
        check("x", np.float64(value))


@each_range
def test_numbers_out_of_range_are_refused_by_name_value_and_range(check, allowed, good, bad):
    for value in [*bad, *map(np.float64, bad)]:
        message = re.escape(f"my_argument must be {allowed}, got {value!r}")
        with pytest.raises(ValueError, match=message):
            check("my_argument", value)


@each_range
def test_what_is_no_number_is_refused(check, allowed, good, bad):
    for value in (True, False, None, "0.5"):
        message = re.escape(f"my_argument must be {allowed}, got {value!r}")
        with pytest.raises(ValueError, match=message):
            check("my_argument", value)


@each_range
def test_traced_values_and_schedules_pass(check, allowed, good, bad):
    check("x", optax.constant_schedule(-1.0))

    @jax.jit
    def traced(x):
        check("x", x)
        return x

    assert traced(-1.0) == -1


@pytest.mark.parametrize("least", [0, 1, 3])
def test_counts_are_whole_numbers_from_the_least(least):
    for value in (least, least + 5, np.int32(least)):
        arguments.check_count("x", value, least)
    for value in (least - 1, float(least), True, "1", None, NAN, np.float32(least)):
        message = re.escape(f"my_count must be a whole number >= {least}, known when the program")
        with pytest.raises(ValueError, match=f"{message}.*got {re.escape(repr(value))}"):
            arguments.check_count("my_count", value, least)


def test_counts_start_at_one_unless_told():
    arguments.check_count("x", 1)
    with pytest.raises(ValueError, match="x must be a whole number >= 1"):
        arguments.check_count("x", 0)


def test_counts_must_be_static():
    with pytest.raises(ValueError, match="known when the program is built"):
        jax.jit(lambda n: arguments.check_count("n", n))(jnp.asarray(2))


def test_choices_are_one_of_the_names():
    arguments.check_choice("mode", "product", ("product", "factored"))
    for value in ("Product", "", None, 1, ["product"]):
        message = re.escape(f"mode must be one of 'product', 'factored', got {value!r}")
        with pytest.raises(ValueError, match=message):
            arguments.check_choice("mode", value, ("product", "factored"))


def test_what_is_traced_is_not_known():
    seen = []
    jax.jit(lambda x: seen.append(arguments.is_known({"a": x, "b": 1.0})) or x)(1.0)
    assert seen == [False]
    assert arguments.is_known({"a": np.ones(2), "b": 1.0, "c": jax.numpy.ones(3), "d": None})
    assert not arguments.is_known([object()])
