"""What the benchmark measures: networks, optimizers, and the cost each is meant to have."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import kldwrm_jax as kw
from kldwrm_jax.curvature import Layers

PERIOD = 30


class MLP(nn.Module):
    """Dense layers with ReLU between them, on flattened images."""

    widths: Sequence[int] = (512, 512)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Ten logits."""
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """The paper's network of 4,712 parameters, in Flax's own layers, without dropout."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Ten logits."""
        for features in (5, 7):
            x = nn.Conv(features, (5, 5), padding="VALID")(x)
            x = nn.relu(nn.max_pool(x, (2, 2), (2, 2)))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(30)(x)))


NETWORKS: dict[str, nn.Module] = {"mlp": MLP(), "cnn": CNN()}


def batch_of(size: int) -> tuple[jax.Array, jax.Array]:
    """Images and labels of MNIST's shape: random, since only their number matters."""
    images, labels = jax.random.split(jax.random.key(0))
    return (
        jax.random.normal(images, (size, 28, 28, 1)),
        jax.random.randint(labels, (size,), 0, 10),
    )


@dataclasses.dataclass(frozen=True)
class Subject:
    """An optimizer under test.

    Args:
      title: for people.
      make: from the layers to the transform; of first-order ones it does not look at them.
      targets: the cost it is meant to have, in steps of SGD, by network.
      slowest: the same for its slowest step.
    """

    title: str
    make: Callable[[Layers], optax.GradientTransformation]
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    slowest: dict[str, float] = dataclasses.field(default_factory=dict)


LR = 0.01

SUBJECTS: dict[str, Subject] = {
    "sgd": Subject("SGD", lambda _: optax.sgd(LR)),
    "adam": Subject("Adam", lambda _: optax.adam(LR)),
    "kfac": Subject(
        "K-FAC, factored damping",
        lambda layers: kw.kfac(layers, LR, damping_mode="factored"),
        {"mlp": 2.25, "cnn": 1.10},
    ),
    "so": Subject(
        "SO, factored damping",
        lambda layers: kw.so_kldwrm(layers, LR, damping_mode="factored"),
        {"mlp": 2.25, "cnn": 1.10},
    ),
    "kfac-product": Subject(
        "K-FAC, product damping", lambda layers: kw.kfac(layers, LR), {"mlp": 3.2, "cnn": 1.10}
    ),
    "q": Subject("Q, exact", lambda layers: kw.q_kldwrm(layers, LR), {"mlp": 2.4, "cnn": 1.12}),
    "q-reweighted": Subject(
        "Q, reweighted",
        lambda layers: kw.q_kldwrm(layers, LR, solver="reweighted"),
        {"mlp": 3.4, "cnn": 1.12},
    ),
    "qe": Subject(
        "QE, capacity 4, 10 inner steps",
        lambda layers: kw.qe_kldwrm(layers, LR),
        {"mlp": 27, "cnn": 13},
    ),
    "qe-preconditioned": Subject(
        "QE, capacity 4, calibrated, 2 preconditioned steps",
        lambda layers: kw.qe_kldwrm(
            layers, LR, inner="preconditioned", calibrate=True, kl_scale=1.0
        ),
        {"cnn": 4.5},
    ),
    "kfac-every-step": Subject(
        "K-FAC, statistics every step",
        lambda layers: kw.kfac(
            layers,
            LR,
            damping_mode="factored",
            refresh_every=1,
            inverse=kw.Inverse(every=PERIOD),
        ),
        {"mlp": 3.2, "cnn": 2.0},
    ),
    "kfac-staggered": Subject(
        "K-FAC, staggered",
        lambda layers: kw.kfac(
            layers, LR, damping_mode="factored", inverse=kw.Inverse(stagger=True)
        ),
        {"mlp": 2.25, "cnn": 1.10},
        slowest={"mlp": 5, "cnn": 2.8},
    ),
    "q-staggered": Subject(
        "Q, staggered",
        lambda layers: kw.q_kldwrm(layers, LR, inverse=kw.Inverse(stagger=True)),
        {"mlp": 2.4, "cnn": 1.12},
        slowest={"mlp": 5, "cnn": 2.8},
    ),
    "kfac-randomized": Subject(
        "K-FAC, randomized, rank 128",
        lambda layers: kw.kfac(layers, LR, inverse=kw.Inverse(method="randomized", rank=128)),
    ),
}
FIRST_ORDER = ("sgd", "adam")
COMPILE_TARGET = 3.0


def training_step(model: nn.Module, subject: str, batch: Any) -> tuple[Callable, tuple]:
    """A training step from ``(params, opt_state)`` and a batch to the next, and where it begins.

    First-order optimizers take the gradient as anyone would.
    """
    images, _ = batch
    params = model.init(jax.random.key(1), images)["params"]
    net = kw.instrument(model, kw.Categorical(), images, fisher="empirical")
    tx = SUBJECTS[subject].make(net.layers)

    def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state: tuple, batch: tuple) -> tuple:
        params, opt_state = state
        images, labels = batch
        if subject in FIRST_ORDER:
            grads = jax.grad(loss_of)(params, images, labels)
            updates, opt_state = tx.update(grads, opt_state, params)
        else:
            _, grads, oracle = net.value_and_grad(params, images, targets=labels)
            extra: Any = tx.update
            updates, opt_state = extra(grads, opt_state, params, oracle=oracle)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def has_kfac_jax() -> bool:
    """Whether kfac-jax can be measured beside ours."""
    return importlib.util.find_spec("kfac_jax") is not None


def kfac_jax_step(model: nn.Module, batch: Any) -> tuple[Callable, Any]:
    """kfac-jax at the same task: factors every step, inverses every 30, as it is meant to run.

    Its optimizer compiles its own step, when first called.
    """
    import kfac_jax  # type: ignore[import-not-found]

    images, _ = batch
    params = model.init(jax.random.key(1), images)["params"]

    def loss(params: Any, batch: tuple) -> jax.Array:
        images, labels = batch
        logits = model.apply({"params": params}, images)
        kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss),
        l2_reg=0.0,
        learning_rate_schedule=lambda *_, **__: jnp.asarray(LR),
        momentum_schedule=lambda *_, **__: jnp.asarray(0.0),
        damping_schedule=lambda *_, **__: jnp.asarray(1e-2),
        estimation_mode="fisher_empirical",
        curvature_update_period=1,
        inverse_update_period=PERIOD,
        num_burnin_steps=0,
    )
    state = optimizer.init(params, jax.random.key(2), batch)

    def step(carried: tuple, batch: tuple) -> tuple:
        params, state, number = carried
        params, state, *_ = optimizer.step(
            params, state, jax.random.key(3), batch=batch, global_step_int=number
        )
        return params, state, number + 1

    return step, (params, state, 0)
