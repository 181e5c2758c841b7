"""Eight devices against one: each of the checks of ``eight_devices.py`` in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("eight_devices.py")
ENVIRONMENT = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles quickly


def held(*checks):
    """What a process prints in which the checks hold."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *checks],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held:") == len(checks)
    return done.stdout


@pytest.mark.parametrize(
    "name",
    ["nothing set"]
    + [
        pytest.param(n, marks=pytest.mark.outside)
        for n in ("fitted by a part", "kfac", "so", "q", "qe")
    ],
)
def test_a_sharded_batch_gives_the_steps_of_one_device_and_sums_alone_travel(name):
    held(f"data_parallel {name}")


# Six matrices: of every layer two sides, of which many are equal. Q decomposes two for each.
@pytest.mark.parametrize(
    ("name", "matrices", "at_most"),
    [
        ("nothing set", 6, 1),
        pytest.param("product", 6, 1, marks=pytest.mark.outside),
        pytest.param("factored", 6, 1, marks=pytest.mark.outside),
        pytest.param("exact", 12, 2, marks=pytest.mark.outside),
        pytest.param("reweighted", 12, 3, marks=pytest.mark.outside),  # a large one is alone
    ],
)
def test_a_shared_refresh_gives_each_device_some_of_the_decompositions(name, matrices, at_most):
    out = held(f"shared_refresh {name}")
    most, total = map(int, re.search(r"decompositions (\d+) (\d+)", out).groups())
    assert total == matrices
    assert most <= at_most


@pytest.mark.outside
@pytest.mark.parametrize("name", ["staggered", "randomized"])
def test_inversions_in_turns_and_of_low_rank_are_shared_out_too(name):
    held(f"shared_refresh {name}")


@pytest.mark.outside
@pytest.mark.parametrize("name", ["nothing set", "so", "qe"])
def test_sharded_parameters_keep_their_sharding_and_so_does_what_is_shaped_like_them(name):
    held(f"sharded_parameters {name}")


@pytest.mark.outside
@pytest.mark.parametrize("mode", ["factored", "product"])
def test_sharded_factors_and_inverses_stay_where_they_are_between_refreshes(mode):
    held(f"sharded_factors {mode}")


@pytest.mark.outside
@pytest.mark.parametrize("name", ["fitted by a part", "so", "qe"])
def test_a_batch_in_parts_gives_the_steps_of_the_whole(name):
    held(f"micro_batches {name}")
