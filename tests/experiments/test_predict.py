"""The cost model: its counts against known ones, its predictions against what must hold."""

import json

import pytest

from kldwrm_jax.experiments import cli
from kldwrm_jax.experiments.predict import (
    Accelerator,
    Layer,
    Network,
    predict,
    resnet50,
    transformer,
)

MLP = Network("MLP", (Layer(785, 512, 1), Layer(513, 512, 1), Layer(513, 10, 1)), 512)
EQUAL = Accelerator(flops=1e12, float32=1e12)


def parameters(network):
    return sum(layer.copies * layer.parameters for layer in network.layers)


def test_networks_have_the_parameters_they_are_known_for():
    # 25,557,032 and 354,823,168 without scales and biases of normalisations, and positions.
    assert parameters(resnet50()) == 25_557_032 - 53_120
    assert parameters(transformer()) == 354_823_168 - 1024 * 1024 - 2 * 1024 * (2 * 24 + 1)


def test_resnet50_needs_its_four_billion_multiplications_a_forward_pass():
    forward = sum(n.copies * n.rows * n.parameters for n in resnet50().layers)
    assert forward == pytest.approx(4.09e9, rel=0.01)


@pytest.mark.parametrize(("mode", "limit"), [("factored", 1.96), ("product", 2.9)])
def test_a_step_between_refreshes_costs_what_arithmetic_says(mode, limit):
    """The gradient of the images is not needed, which the model does not know."""
    prediction = predict(MLP, 1, EQUAL, mode)
    assert prediction.usual / prediction.sgd == pytest.approx(limit, rel=0.15)


def test_decompositions_are_shared_until_a_device_has_one():
    network = Network("equal", (Layer(100, 100, 1, copies=8),), 1)
    times = [predict(network, n, EQUAL).decompositions for n in (1, 2, 8, 16, 64)]
    assert times == pytest.approx([times[0] / n for n in (1, 2, 8, 16, 16)])
    alone = predict(network, 64, EQUAL).decompositions_alone
    assert alone == pytest.approx(times[0])


def test_one_device_communicates_nothing():
    prediction = predict(MLP, 1, EQUAL)
    assert prediction.step_bytes == prediction.refresh_bytes == 0
    assert prediction.gradient_exchange == 0


def test_the_command_prints_a_row_for_every_number_of_devices(capsys):
    assert cli.main(["predict", "--networks", "resnet-50", "--devices", "64", "512"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["devices"] for row in rows] == [64, 512]
    assert cli.main(["predict", "--networks", "lenet"]) == 1
    assert "resnet-50" in capsys.readouterr().err
