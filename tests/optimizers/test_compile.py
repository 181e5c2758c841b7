"""What a step compiles to: equal layers share their kernels."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from small_nets import WELL

import kldwrm_jax as kw

MEMBERS = {
    "kfac, nothing set": lambda layers: kw.kfac(layers, refresh_every=20),
    "kfac": lambda layers: kw.kfac(layers, 0.1, damping_mode="factored", refresh_every=20),
    "kfac, product": lambda layers: kw.kfac(layers, 0.1, refresh_every=20),
    "so": lambda layers: kw.so_kldwrm(layers, 0.1, damping_mode="factored", refresh_every=20),
    "q": lambda layers: kw.q_kldwrm(layers, 0.1, refresh_every=20),
}


def canonical(computation):
    """A fused computation without the names in it, or where it comes from."""
    text = re.sub(
        r", (?:metadata|frontend_attributes|backend_config)=.*$", "", computation, flags=re.M
    )
    header, _, body = text.partition("\n")
    names = {}

    def rename(match):
        return names.setdefault(match[0], f"%{len(names)}")

    return header.rpartition("->")[2] + re.sub(r"%[\w.-]+", rename, body)


def kernels(member, depth, width=24):
    """The distinct fused computations of a training step of a network of equal layers."""
    hidden = [layer for _ in range(depth) for layer in (nn.Dense(width), nn.tanh)]
    model, x, y = nn.Sequential([*hidden, nn.Dense(5)]), jnp.ones((16, width)), jnp.zeros(16, int)
    params = model.init(jax.random.key(0), x)["params"]
    net = kw.instrument(model, kw.Categorical(), x)
    tx = MEMBERS[member](net.layers)

    def step(params, state, x, y, key):
        oracle = net.oracle(params, x, targets=y, key=key)
        grads = jax.grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step).lower(params, tx.init(params), x, y, jax.random.key(0))
    text = lowered.compile(compiler_options=WELL).as_text()
    found = re.findall(r"^%(?:fused|wrapped).*?^}", text, flags=re.M | re.DOTALL)
    return {canonical(computation) for computation in found}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of the CPU")
@pytest.mark.parametrize(
    "member",
    ["kfac, nothing set", "kfac", "q"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("kfac, product", "so")],
)
def test_twice_as_many_equal_layers_need_hardly_more_kernels(member):
    few, many = len(kernels(member, 3)), len(kernels(member, 6))
    assert few > 50  # it is the step's kernels that are counted
    assert many <= 1.1 * few
