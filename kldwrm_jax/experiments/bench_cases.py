"""What the benchmark measures. To add a case, add a line to ``NETWORKS`` or ``OPTIMIZERS``."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import linen as nn

import kldwrm_jax as kw
from kldwrm_jax.experiments.models import MLP

PERIOD = 30  # steps from one refresh to the next
Batch = tuple[jax.Array, jax.Array]


def images(size: int) -> Batch:
    """Random images and labels of MNIST's shape."""
    x, y = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (size, 28, 28, 1)), jax.random.randint(y, (size,), 0, 10)


_POOL = functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2))
_CONVOLUTIONS = [nn.Conv(5, (5, 5), padding="VALID"), nn.Conv(7, (5, 5), padding="VALID")]
# The paper's network of 4,712 parameters in standard Flax layers, without dropout.
CNN = nn.Sequential(
    [layer for conv in _CONVOLUTIONS for layer in (conv, _POOL, nn.relu)]
    + [lambda x: x.reshape(x.shape[0], -1), nn.Dense(30), nn.relu, nn.Dense(10)]
)
NETWORKS: dict[str, tuple[nn.Module, Callable[[int], Batch]]] = {
    "mlp": (MLP(10, (512, 512)), images),
    "cnn": (CNN, images),
}

LR = 0.01
_FACTORED: dict[str, Any] = {"damping_mode": "factored"}
_EVERY_STEP: dict[str, Any] = {"refresh_every": 1, "inverse": kw.Inverse(every=PERIOD)}
_STAGGERED = kw.Inverse(stagger=True)
_RANDOMIZED = kw.Inverse(method="randomized", rank=128)
_PRECONDITIONED: dict[str, Any] = {"inner": "preconditioned", "calibrate": True, "kl_scale": 1.0}

OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {  # from net.layers
    "sgd": lambda _: optax.sgd(LR),
    "adam": lambda _: optax.adam(LR),
    "kfac": lambda layers: kw.kfac(layers, LR, **_FACTORED),
    "so": lambda layers: kw.so_kldwrm(layers, LR, **_FACTORED),
    "kfac-product": lambda layers: kw.kfac(layers, LR),
    "q": lambda layers: kw.q_kldwrm(layers, LR),
    "q-reweighted": lambda layers: kw.q_kldwrm(layers, LR, solver="reweighted"),
    "qe": lambda layers: kw.qe_kldwrm(layers, LR),
    "qe-preconditioned": lambda layers: kw.qe_kldwrm(layers, LR, **_PRECONDITIONED),
    "kfac-every-step": lambda layers: kw.kfac(layers, LR, **_FACTORED, **_EVERY_STEP),
    "kfac-staggered": lambda layers: kw.kfac(layers, LR, **_FACTORED, inverse=_STAGGERED),
    "q-staggered": lambda layers: kw.q_kldwrm(layers, LR, inverse=_STAGGERED),
    "kfac-randomized": lambda layers: kw.kfac(layers, LR, inverse=_RANDOMIZED),
}
FIRST_ORDER = ("sgd", "adam")
GRADIENTS = ("value_and_grad", "oracle")


def training_step(
    model: nn.Module, optimizer: str, batch: Batch, gradient: str = "value_and_grad"
) -> tuple[Callable, tuple]:
    """A step from ``(params, opt_state)`` and a batch to the next state, and the first state.

    Collections such as ``batch_stats`` stay as they are. First-order optimizers, and all with
    ``gradient="oracle"``, get the gradient by ``jax.grad``.
    """
    variables = dict(model.init(jax.random.key(1), batch[0]))
    params = variables.pop("params")
    net = kw.instrument(model, kw.Categorical(), batch[0], fisher="empirical")
    tx = optax.with_extra_args_support(OPTIMIZERS[optimizer](net.layers))

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params, **variables}, x, mutable=list(variables))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state: tuple, batch: Batch) -> tuple:
        (params, opt_state), (x, y) = state, batch
        if optimizer not in FIRST_ORDER and gradient == "value_and_grad":
            _, grads, oracle = net.value_and_grad(params, x, targets=y, variables=variables)
        else:
            grads = jax.grad(loss_of)(params, x, y)
            oracle = net.oracle(params, x, targets=y, variables=variables)
        updates, opt_state = tx.update(grads, opt_state, params, oracle=oracle)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))
