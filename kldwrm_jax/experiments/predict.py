"""``kldwrm predict``: what a step would take on many accelerators, from the layers' shapes."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.devices import Task, shares
from kldwrm_jax.experiments import options
from kldwrm_jax.experiments.errors import check_name
from kldwrm_jax.experiments.progress import Screen

_BYTES = 4  # of a float32
_EIGH, _INVERSE = 9.0, 10 / 3  # operations of a decomposition, over the cube of the side
_TREES = 4  # of the parameters' size: themselves, and what SO and Q remember
_PAIR = {"factored": 1, "product": 2}  # pairs of matrix products that precondition a layer


class Layer(NamedTuple):
    """Layers of one shape: the sides of their block, and how often an example uses their weights.

    The side of the inputs counts the bias. ``table``: an embedding that also makes the logits; its
    side of the inputs is diagonal.
    """

    inputs: int
    outputs: int
    rows: int
    copies: int = 1
    table: bool = False

    @property
    def parameters(self) -> int:
        """Of one copy."""
        return self.inputs * self.outputs

    @property
    def factor_entries(self) -> int:
        """Of one copy."""
        return (self.inputs if self.table else self.inputs**2) + self.outputs**2

    @property
    def precondition(self) -> float:
        """Operations of one pair of products from both sides."""
        left = 0 if self.table else 2 * self.inputs**2 * self.outputs
        return left + 2 * self.inputs * self.outputs**2

    @property
    def second_moments(self) -> float:
        """Operations for an example's part of both factors."""
        left = self.inputs if self.table else self.inputs**2
        return 2 * self.rows * (left + self.outputs**2)

    @property
    def sides(self) -> tuple[int, ...]:
        """Matrices to be decomposed."""
        return (self.outputs,) if self.table else (self.inputs, self.outputs)


class Network(NamedTuple):
    """A network, and how many examples of it a device takes."""

    title: str
    layers: tuple[Layer, ...]
    per_device: int


def resnet50() -> Network:
    """ResNet-50 on 224 x 224 images; convolutions without biases."""
    layers = [Layer(7 * 7 * 3, 64, 112**2)]
    channels = 64
    for width, blocks, size in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        places = size**2
        before = places * (1 if width == 64 else 4)  # the first block of a stage halves the image
        layers += [
            Layer(channels, width, before),
            Layer(channels, 4 * width, places),
            Layer(4 * width, width, places, blocks - 1),
            Layer(9 * width, width, places, blocks),
            Layer(width, 4 * width, places, blocks),
        ]
        channels = 4 * width
    return Network("ResNet-50, 32 images a device", (*layers, Layer(2049, 1000, 1)), 32)


def transformer(
    depth: int = 24, width: int = 1024, vocabulary: int = 50257, length: int = 1024
) -> Network:
    """A decoder of 355 million parameters; the embedding makes the logits, too."""
    layers = (
        Layer(width + 1, width, length, 4 * depth),  # queries, keys, values, outputs
        Layer(width + 1, 4 * width, length, depth),
        Layer(4 * width + 1, width, length, depth),
        Layer(vocabulary, width, length, table=True),
    )
    return Network("transformer of 355 M parameters, 8 sequences of 1024 a device", layers, 8)


NETWORKS = {"resnet-50": resnet50, "transformer-350m": transformer}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What a device does in a second, as far as programs reach it; bandwidth is a device's own."""

    flops: float = 120e12  # forward and backward pass, in bfloat16
    float32: float = 60e12  # preconditioning and statistics
    decompositions: float = 0.5e12  # of large symmetric matrices, in float32
    bandwidth: float = 50e9  # bytes, in an all-reduce
    latency: float = 30e-6  # of a collective, times the logarithm of the devices


class Prediction(NamedTuple):
    """Seconds of the parts of a step, and bytes."""

    gradient: float  # forward and backward pass
    gradient_exchange: float
    precondition: float
    statistics: float
    statistics_exchange: float
    decompositions: float
    decompositions_alone: float  # if every device does them all
    inverses_exchange: float
    step_bytes: float  # sent by a device on every step
    refresh_bytes: float  # and at a refresh, besides
    state_bytes: float  # factors and inverses on every device
    parameter_bytes: float  # parameters on every device

    @property
    def sgd(self) -> float:
        """A step of SGD."""
        return self.gradient + self.gradient_exchange

    @property
    def usual(self) -> float:
        """A step without a refresh."""
        return self.sgd + self.precondition

    @property
    def refresh(self) -> float:
        """What a refresh adds."""
        exchange = self.statistics_exchange + self.inverses_exchange
        return self.statistics + self.decompositions + exchange

    def ratio(self, period: int) -> float:
        """A step's mean time in steps of SGD."""
        return (self.usual + self.refresh / period) / self.sgd


def predict(
    network: Network, devices: int, accelerator: Accelerator, damping_mode: str = "product"
) -> Prediction:
    """The parts of a step on so many devices, data-parallel, with ``Inverse(mesh=mesh)``.

    Nothing overlaps: what XLA hides behind the backward pass comes as a gift.
    """
    own = network.layers
    passes = sum(6 * n.rows * n.copies * n.parameters for n in own) * network.per_device
    moments = sum(n.copies * n.second_moments for n in own) * network.per_device
    pairs = _PAIR[damping_mode] * sum(n.copies * n.precondition for n in own)
    parameters = _BYTES * sum(n.copies * n.parameters for n in own)
    factors = _BYTES * sum(n.copies * n.factor_entries for n in own)

    tasks = [
        Task(lambda f: f, (jax.ShapeDtypeStruct((n.copies, side, side), jnp.float32),))
        for n in own
        for side in n.sides
    ]
    constant = _EIGH if damping_mode == "product" else _INVERSE
    loads = [
        constant * sum(tasks[i].cost * len(which) for i, which in share.items())
        for share in shares(tasks, devices)
    ]

    def all_reduce(size: float) -> float:
        if devices == 1:
            return 0.0
        sent = 2 * (devices - 1) / devices * size
        return sent / accelerator.bandwidth + accelerator.latency * math.log2(devices)

    return Prediction(
        gradient=passes / accelerator.flops,
        gradient_exchange=all_reduce(parameters),
        precondition=pairs / accelerator.float32,
        statistics=passes / accelerator.flops + moments / accelerator.float32,
        statistics_exchange=all_reduce(factors),
        decompositions=max(loads) / accelerator.decompositions,
        decompositions_alone=sum(loads) / accelerator.decompositions,
        inverses_exchange=all_reduce(factors),
        step_bytes=2 * (devices - 1) / devices * parameters,
        refresh_bytes=4 * (devices - 1) / devices * factors,
        state_bytes=2 * factors,
        parameter_bytes=parameters,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Predicts the time of a K-FAC or SO step on many accelerators from the layers' shapes: "
        "data-parallel, decompositions shared out by kldwrm_jax.Inverse(mesh=mesh)."
    )
    usual = Accelerator()
    parser.add_argument(
        "--networks", nargs="+", default=list(NETWORKS), help=f"of {', '.join(NETWORKS)}"
    )
    parser.add_argument("--devices", nargs="+", type=options.count, default=[1, 8, 64, 512])
    parser.add_argument("--refresh-every", type=options.count, default=100)
    parser.add_argument("--damping-mode", choices=tuple(_PAIR), default="product")
    for field in dataclasses.fields(usual):
        parser.add_argument(
            f"--{field.name}",
            type=float,
            default=field.default,
            help=f"of a device, in a second (default: {field.default:g})"
            if field.name != "latency"
            else f"seconds (default: {field.default:g})",
        )


def run(args: argparse.Namespace) -> int:
    """Predicts."""
    screen = Screen()
    names = [field.name for field in dataclasses.fields(Accelerator)]
    accelerator = Accelerator(**{name: getattr(args, name) for name in names})
    for name in args.networks:
        check_name("--networks", name, NETWORKS)
        network = NETWORKS[name]()
        found = [
            (count, predict(network, count, accelerator, args.damping_mode))
            for count in args.devices
        ]
        screen.table(
            f"{network.title}: predicted, {args.damping_mode} damping",
            rows(found, args.refresh_every),
            {
                "devices": ("devices", str),
                "sgd": ("SGD, ms", "{:.1f}".format),
                "usual": ("usual step, ms", "{:.1f}".format),
                "refresh": ("a refresh adds, ms", "{:.0f}".format),
                "unshared": ("unshared, ms", "{:.0f}".format),
                "ratio": (f"mean of {args.refresh_every}, in SGD's", "{:.2f}".format),
                "step_bytes": ("MB a step", "{:.0f}".format),
                "refresh_bytes": ("MB a refresh", "{:.0f}".format),
                "memory": ("memory, MB", "{:.0f}".format),
                "sharded": ("if sharded, MB", "{:.0f}".format),
            },
        )
    return 0


def rows(found: Sequence[tuple[int, Prediction]], period: int) -> list[dict[str, float]]:
    """Predictions as a table has them: milliseconds and megabytes."""
    return [
        {
            "devices": count,
            "sgd": 1e3 * p.sgd,
            "usual": 1e3 * p.usual,
            "refresh": 1e3 * p.refresh,
            "unshared": 1e3 * (p.refresh - p.decompositions + p.decompositions_alone),
            "ratio": p.ratio(period),
            "step_bytes": p.step_bytes / 1e6,
            "refresh_bytes": p.refresh_bytes / 1e6,
            "memory": (p.state_bytes + _TREES * p.parameter_bytes) / 1e6,
            "sharded": (p.state_bytes + _TREES * p.parameter_bytes) / 1e6 / count,
        }
        for count, p in found
    ]
