"""What the benchmark measures. To add an optimizer, add a line to ``OPTIMIZERS``."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import linen as nn

import kldwrm_jax as kw
from kldwrm_jax.experiments.bench_networks import Batch

PERIOD = 20  # steps from one refresh to the next
LR = 0.01
_PRODUCT: dict[str, Any] = {"refresh_every": PERIOD}
_FACTORED: dict[str, Any] = {"refresh_every": PERIOD, "damping_mode": "factored"}
_EVERY_STEP: dict[str, Any] = {"refresh_every": 1, "damping_mode": "factored"}
_STAGGERED = kw.Inverse(stagger=True)
_RARE = kw.Inverse(every=PERIOD)
_RANDOMIZED = kw.Inverse(method="randomized", rank=128)
_PRECONDITIONED: dict[str, Any] = {"inner": "preconditioned", "calibrate": True, "kl_scale": 1.0}

OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {  # from net.layers
    "adam": lambda _: optax.adam(LR),
    "sgd": lambda _: optax.sgd(LR),
    "kfac-nothing-set": lambda layers: kw.kfac(layers, refresh_every=PERIOD),
    "kfac": lambda layers: kw.kfac(layers, LR, **_FACTORED),
    "so": lambda layers: kw.so_kldwrm(layers, LR, **_FACTORED),
    "q": lambda layers: kw.q_kldwrm(layers, LR, **_PRODUCT),
    "kfac-staggered": lambda layers: kw.kfac(layers, LR, **_FACTORED, inverse=_STAGGERED),
    "so-staggered": lambda layers: kw.so_kldwrm(layers, LR, **_FACTORED, inverse=_STAGGERED),
    "q-staggered": lambda layers: kw.q_kldwrm(layers, LR, **_PRODUCT, inverse=_STAGGERED),
    "kfac-every-step": lambda layers: kw.kfac(layers, LR, **_EVERY_STEP, inverse=_RARE),
    "kfac-product": lambda layers: kw.kfac(layers, LR, **_PRODUCT),
    "kfac-randomized": lambda layers: kw.kfac(layers, LR, **_PRODUCT, inverse=_RANDOMIZED),
    "q-reweighted": lambda layers: kw.q_kldwrm(layers, LR, **_PRODUCT, solver="reweighted"),
    "qe": lambda layers: kw.qe_kldwrm(layers, LR, **_PRODUCT),
    "qe-preconditioned": lambda layers: kw.qe_kldwrm(layers, LR, **_PRODUCT, **_PRECONDITIONED),
}
FIRST_ORDER = ("adam", "sgd")
GRADIENTS = ("oracle", "value_and_grad")


def training_step(
    model: nn.Module,
    optimizer: str,
    batch: Batch,
    gradient: str = "oracle",
    fisher: str = "sampled",
) -> tuple[Callable, tuple]:
    """A step from ``(params, opt_state)`` and a batch to the next state, and the first state.

    Collections such as ``batch_stats`` stay as they are. First-order optimizers, and all with
    ``gradient="oracle"``, get the gradient by ``jax.grad``.
    """
    variables = dict(jax.jit(model.init)(jax.random.key(1), batch[0]))
    params = variables.pop("params")
    net = kw.instrument(model, kw.Categorical(), batch[0], fisher=fisher)
    tx = optax.with_extra_args_support(OPTIMIZERS[optimizer](net.layers))

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params, **variables}, x, mutable=list(variables))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state: tuple, batch: Batch) -> tuple:
        (params, opt_state), (x, y) = state, batch
        if optimizer in FIRST_ORDER:
            updates, opt_state = tx.update(jax.grad(loss_of)(params, x, y), opt_state, params)
            return optax.apply_updates(params, updates), opt_state
        key = jax.random.key(opt_state.count) if fisher == "sampled" else None
        bound: Any = {"targets": y, "key": key, "variables": variables}
        if gradient == "value_and_grad":
            _, grads, oracle = net.value_and_grad(params, x, **bound)
        else:
            grads, oracle = jax.grad(loss_of)(params, x, y), net.oracle(params, x, **bound)
        updates, opt_state = tx.update(grads, opt_state, params, oracle=oracle)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))
