"""A whole training step lowers for accelerators that are not here."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import kldwrm_jax as kw

MEMBERS = {
    "kfac_nothing_set": kw.kfac,
    "qe_nothing_set": kw.qe_kldwrm,
    "kfac": lambda layers: kw.kfac(layers, 0.1),
    "kfac_factored": lambda layers: kw.kfac(layers, 0.1, damping_mode="factored"),
    "so": lambda layers: kw.so_kldwrm(layers, 0.1),
    "q_exact": lambda layers: kw.q_kldwrm(layers, 0.1),
    "q_reweighted": lambda layers: kw.q_kldwrm(layers, 0.1, solver="reweighted"),
    "qe": lambda layers: kw.qe_kldwrm(layers, 0.1),
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Conv(3, (3, 3))(x))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize(
    "member",
    [
        "kfac_nothing_set",
        "qe_nothing_set",
        "kfac",
        "so",
        "q_exact",
        "q_reweighted",
        "qe",
        pytest.param("kfac_factored", marks=pytest.mark.slow),
    ],
)
def test_a_training_step_lowers_for_cuda_and_tpu_without_host_callbacks(member):
    model, x, y = Net(), jnp.ones((2, 5, 5, 1)), jnp.zeros(2, jnp.int32)
    net = kw.instrument(model, kw.Categorical(), x)
    tx = MEMBERS[member](net.layers)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    state = jax.eval_shape(tx.init, params)

    def step(params, state, x, y, seed):
        oracle = net.oracle(params, x, targets=y, key=jax.random.key(seed))
        grads = jax.grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    exported = export.export(jax.jit(step), platforms=["cuda", "tpu"])(params, state, x, y, 0)
    assert exported.platforms == ("cuda", "tpu")
    calls = set(re.findall(r"custom_call @(\w+)", exported.mlir_module()))
    assert not {call for call in calls if "callback" in call.lower()}
