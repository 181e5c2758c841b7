"""What the race compares. To add a case, add an entry to ``PROBLEMS`` or ``METHODS``."""

import math
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import kldwrm_jax as kw
from kldwrm_jax.experiments import data, models


class Arrays(NamedTuple):
    """Training and test examples."""

    train_x: jax.Array
    train_y: jax.Array
    test_x: jax.Array
    test_y: jax.Array


Loaded = tuple[nn.Module, Any, Arrays]  # network, likelihood, data


class Problem(NamedTuple):
    """A network, its data and the values of a metric to reach."""

    title: str
    load: Callable[[Path | None], Loaded]  # takes the folder of MNIST's files
    batch: int  # examples per step
    steps: int  # at most
    every: int  # steps between evaluations
    metric: str  # "accuracy" or "loss"
    targets: tuple[float, ...]  # the easiest first
    methods: tuple[str, ...]  # that are compared
    limit: float = 0.1  # on the KL divergence of steps at a learning rate, in units of the loss
    seconds: float = math.inf  # of process time, at most

    def reached(self, value: float | None, target: float) -> bool:
        """Whether a value, None if not finite, is at least as good as a target."""
        sign = 1 if self.metric == "accuracy" else -1
        return value is not None and sign * value >= sign * target


_WORDS = (
    ("anna", "bruno", "the baker", "a sailor", "my neighbour", "the old queen"),
    ("sees", "follows", "paints", "remembers", "never meets", "waits for"),
    ("a red boat", "the harbour", "two foxes", "bread", "the last letter", "a small bell"),
    ("today", "in winter", "at noon", "every day", "before dawn"),
)


def sentences(count: int, seed: int) -> str:
    """Random sentences from a small grammar."""
    rng = np.random.default_rng(seed)
    drawn = (" ".join(rng.choice(words) for words in _WORDS) for _ in range(count))
    return "".join(f"{sentence}. " for sentence in drawn)


def reference() -> tuple[str, str]:
    """The Python language reference, as ``pydoc`` has it: its topics, every tenth for testing."""
    text = {True: "", False: ""}
    for i, name in enumerate(sorted(topics)):
        text[i % 10 == 5] += topics[name]
    return text[False], text[True]


def _text(
    train: str, test: str, width: int = 48, length: int = 32, data_dir: Path | None = None
) -> Loaded:
    characters = sorted({*train, *test})

    def windows(text: str) -> tuple[jax.Array, jax.Array]:
        tokens = np.array([characters.index(c) for c in text], np.int32)
        tokens = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
        return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])

    return (
        models.Transformer(len(characters), width),
        kw.Categorical(),
        Arrays(*windows(train), *windows(test)),
    )


def _images(name: str, model: str) -> Callable[[Path | None], Loaded]:
    def load(data_dir: Path | None) -> Loaded:
        own = data.load(name, data_dir)
        x, test_x = ((x - own.mean) / own.std for x in (own.train_x, own.test_x[:5000]))
        arrays = map(jnp.asarray, (x, own.train_y, test_x, own.test_y[:5000]))
        return models.build(model, x.shape[1:], classes=10), kw.Categorical(), Arrays(*arrays)

    return load


def _autoencoder(widths: tuple[int, ...], activation: Any) -> Callable[[Path | None], Loaded]:
    """Four layers to the bottleneck and four back; that and the outputs, logits, are linear."""

    def load(data_dir: Path | None) -> Loaded:
        own = data.load("mnist", data_dir)
        x, test = (jnp.asarray(x.reshape(len(x), -1)) for x in (own.train_x, own.test_x[:5000]))
        whole = *widths, *widths[-2::-1], x.shape[1]
        layers: list[Any] = [each for width in whole for each in (nn.Dense(width), activation)]
        return nn.Sequential(layers[:7] + layers[8:-1]), kw.Bernoulli(), Arrays(x, x, test, test)

    return load


_SHORT = (
    *("sgd", "adam", "kfac", "so", "q"),
    *("kfac-calibrated", "so-calibrated", "q-calibrated", "qe-calibrated"),
)
_LONG = ("sgd-long", "adam-long", "kfac-tuned", "kfac-set", "so-set", "q-set")
_SMALL_DEEP, _LARGE_DEEP = (400, 200, 100, 30), (1000, 500, 250, 30)
PROBLEMS = {
    "digits": Problem(
        "digits, a small CNN",
        _images("digits", "cnn"),
        *(128, 150, 5, "accuracy", (0.95, 0.97)),
        methods=(*_SHORT, "qe"),
    ),
    "mnist": Problem(
        "MNIST, the paper's CNN",
        _images("mnist", "paper-cnn"),
        *(512, 150, 10, "accuracy", (0.95, 0.97)),
        methods=_SHORT,
    ),
    "autoencoder": Problem(
        "MNIST, an autoencoder of eight layers",
        _autoencoder(_SMALL_DEEP, nn.tanh),
        *(256, 150, 10, "loss", (150.0, 120.0)),
        methods=_SHORT,
        limit=10.0,
    ),
    "text": Problem(
        "text, a transformer of two layers",
        lambda _: _text(sentences(2000, seed=0), sentences(200, seed=1)),
        *(64, 200, 10, "loss", (1.0, 0.6)),
        methods=(*_SHORT, "qe"),
    ),
    "deep-autoencoder": Problem(
        "MNIST, the deep autoencoder 784-1000-500-250-30 and back",
        _autoencoder(_LARGE_DEEP, nn.relu),
        *(1000, 10_000, 20, "loss", (100.0, 90.0, 80.0, 75.0)),
        methods=_LONG,
        limit=10.0,
        seconds=60.0,
    ),
    "strided-cnn": Problem(
        "MNIST, a CNN of three strided convolutions",
        _images("mnist", "strided-cnn"),
        *(500, 10_000, 20, "loss", (0.08, 0.06, 0.05)),
        methods=_LONG,
        seconds=20.0,
    ),
    "reference": Problem(
        "the Python language reference, a transformer of two layers",
        lambda _: _text(*reference(), width=64, length=64),
        *(32, 10_000, 20, "loss", (2.0, 1.8, 1.6)),
        methods=_LONG,
        seconds=30.0,
    ),
}


class Method(NamedTuple):
    """Name in tables; factory from ``net.layers``, learning rate and KL limit; learning rates."""

    title: str
    make: Callable[[Any, Any, float], optax.GradientTransformation]
    rates: tuple[float, ...]  # none for steps that set themselves


_AS_RECORDED: dict[str, Any] = {"true_kl_clip": None}  # by the runs in results/race


def _plain(title: str, make: Callable[..., Any], rates: tuple = (0.01, 0.03, 0.1)) -> Method:
    arguments = {"refresh_every": 10, **_AS_RECORDED}
    return Method(title, lambda n, rate, _: make(n, rate, **arguments), rates)


def _calibrated(
    title: str, make: Callable[..., Any], rates: tuple = (0.1, 0.3, 1.0, 3.0), **arguments: Any
) -> Method:
    arguments |= {"refresh_every": 10, "calibrate": True, **_AS_RECORDED}
    return Method(title, lambda n, rate, kl: make(n, rate, kl_clip=kl, **arguments), rates)


def _tuned(layers: Any, rate: Any, kl: float) -> optax.GradientTransformation:
    arguments: dict[str, Any] = {"damping_mode": "factored", "refresh_every": 20}
    return kw.kfac(layers, rate, kl_clip=kl, true_kl_clip=None, **arguments)


def _set(title: str, make: Callable[..., Any]) -> Method:
    return Method(title, lambda layers, *_: make(layers, refresh_every=20), ())


_QE: dict[str, Any] = {"block_clip": None, "inner": "preconditioned", "kl_scale": 1.0}
_QE_TITLE, _SGD_RATES = "QE, calibrated, two preconditioned steps", (0.003, 0.03, 0.1, 0.3)
METHODS = {
    "sgd": Method("SGD with momentum", lambda _, rate, __: optax.sgd(rate, 0.9), _SGD_RATES),
    "adam": Method("Adam", lambda _, rate, __: optax.adam(rate), (0.001, 0.003, 0.01)),
    "kfac": _plain("K-FAC", kw.kfac),
    "so": _plain("SO", kw.so_kldwrm),
    "q": _plain("Q", kw.q_kldwrm),
    "qe": _plain("QE, ten steps of SGD", kw.qe_kldwrm, (0.01, 0.03)),
    "kfac-calibrated": _calibrated("K-FAC, calibrated", kw.kfac),
    "so-calibrated": _calibrated("SO, calibrated", kw.so_kldwrm),
    "q-calibrated": _calibrated("Q, calibrated", kw.q_kldwrm, block_clip=None),
    "qe-calibrated": _calibrated(_QE_TITLE, kw.qe_kldwrm, (0.1, 0.3, 1.0), **_QE),
    "sgd-long": Method(
        "SGD with momentum",
        lambda _, rate, __: optax.sgd(rate, 0.9),
        (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    ),
    "adam-long": Method(
        "Adam", lambda _, rate, __: optax.adam(rate), (0.0003, 0.001, 0.003, 0.01, 0.03)
    ),
    "kfac-tuned": Method("K-FAC, tuned", _tuned, (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
    "kfac-set": _set("K-FAC, nothing set", kw.kfac),
    "so-set": _set("SO, nothing set", kw.so_kldwrm),
    "q-set": _set("Q, nothing set", kw.q_kldwrm),
}
