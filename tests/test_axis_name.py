"""Two replicas against one device: checks of ``two_replicas.py`` in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("two_replicas.py")
ENVIRONMENT = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles quickly
WAYS = ("pmap", "unchecked", "checked")
outside = pytest.mark.outside


def held(*checks):
    """Whether all checks hold in a new process."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *checks],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held:") == len(checks)


@pytest.mark.parametrize(
    "name", ["nothing set", *(pytest.param(n, marks=outside) for n in ("kfac", "so", "qe"))]
)
def test_fifty_steps_of_two_replicas_are_those_of_one_device(name):
    held(f"agree {name}")


@outside
def test_calibrated_steps_of_two_replicas_are_those_of_one_device():
    held("agree q")


def test_a_split_batch_without_an_axis_name_is_an_error():
    held(*(f"unnamed {way}" for way in WAYS))


def test_a_resnet_with_a_named_batch_norm_trains_under_pmap():
    held("batch_norm pmap")


@outside
@pytest.mark.parametrize("way", ["unchecked", "checked"])
def test_a_resnet_with_a_named_batch_norm_trains_under_shard_map(way):
    held(f"batch_norm {way}")


@outside
def test_a_resnet18_in_the_shape_of_flax_imagenet_trains_under_pmap():
    held("resnet18 pmap")


@outside
@pytest.mark.parametrize("check", ["gradients", "micro_batches", "sampled"])
def test_in_every_kind_of_replicas_the_batch_is_one(check):
    held(*(f"{check} {way}" for way in WAYS))
