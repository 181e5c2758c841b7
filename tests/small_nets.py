"""A small network with every kind of block that matters to the optimizers, and its batches."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import kldwrm_jax as kw

INPUTS, OUTPUTS, BATCH = 4, 3, 16


class Small(nn.Module):
    """Two Kronecker blocks, kernel and bias joined, and two diagonal ones (of the LayerNorm)."""

    dtype: Any = jnp.float32
    dropout: float = 0.0
    norm: bool = True

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(3, param_dtype=self.dtype, name="first")(x))
        if self.norm:
            x = nn.LayerNorm(param_dtype=self.dtype, name="norm")(x)
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(OUTPUTS, param_dtype=self.dtype, name="last")(x)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its instrumented twin, first parameters and a batch for every step."""

    model: nn.Module
    net: Any
    params: Any
    x: Any
    y: Any

    @property
    def layers(self):
        return self.net.layers

    def oracle(self, params, k):
        """The oracle of step ``k``, which may be traced."""
        i = k % len(self.x)
        rngs = {"dropout": jax.random.key(5)} if self.model.dropout else None
        return self.net.oracle(
            params, jnp.asarray(self.x)[i], targets=jnp.asarray(self.y)[i], rngs=rngs
        )

    @functools.cached_property
    def measure(self):
        """``(params, k) -> (gradient, factors)``, compiled."""

        def measure(params, k):
            oracle = self.oracle(params, k)
            return jax.grad(oracle.loss)(params), oracle.factors()

        return jit(measure)

    def step(self, tx):
        """``(params, state, k) -> (params, state)``, to be jitted or not."""

        def step(params, state, k):
            oracle = self.oracle(params, k)
            grads = jax.grad(oracle.loss)(params)
            updates, state = tx.update(grads, state, params, oracle=oracle)
            return optax.apply_updates(params, updates), state

        return step


def problem(
    likelihood=None, *, dtype=jnp.float32, dropout=0.0, norm=True, batches=3, seed=0
) -> Problem:
    """Batches of noise with a little sense in the labels."""
    rng = np.random.default_rng(seed)
    likelihood = likelihood or kw.Categorical()
    x = rng.normal(size=(batches, BATCH, INPUTS))
    teacher = np.tanh(x @ rng.normal(size=(INPUTS, OUTPUTS)))
    y = teacher.argmax(-1) if isinstance(likelihood, kw.Categorical) else teacher.astype(dtype)
    x = x.astype(dtype)
    model = Small(dtype, dropout, norm)
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(1)}
    params = model.init(keys, x[0])["params"]
    net = kw.instrument(model, likelihood, x[0], fisher="empirical")
    return Problem(model, net, params, x, y)


def _accepted(options):
    """These compiler options, or none where this backend or version does not know them."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(0.0)
    except Exception:
        return None
    return options


QUICKLY = _accepted(
    {
        "xla_cpu_use_fusion_emitters": False,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
)


# For programs that run long enough to be compiled well.
WELL = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def jit(f, **kwargs):
    """``jax.jit`` that compiles quickly rather than well: tests compile much and run little."""
    return jax.jit(f, compiler_options=QUICKLY, **kwargs)


def equation(model):
    """``u' = u`` with border values: residuals of seven and of three points, and likelihoods."""
    inside, border = jnp.linspace(0, 1, 7)[:, None], jnp.linspace(2, 3, 3)[:, None]
    params = model.init(jax.random.key(0), inside)["params"]

    def residuals(params, inside, border):
        def u(x):
            return model.apply({"params": params}, x)

        slope = jax.jvp(u, (inside,), (jnp.ones_like(inside),))[1]
        return {"border": u(border), "inside": slope - u(inside)}

    likelihoods = {"border": kw.Residuals(), "inside": kw.Residuals()}
    return residuals, likelihoods, (params, inside, border)
