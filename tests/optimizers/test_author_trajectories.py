"""All four members match float64 runs of the paper author's solvers, parameter by parameter."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_nets

import kldwrm_jax as kw

DATA = pathlib.Path(__file__).parent.parent / "data" / "author_trajectories.npz"

MEMBERS = {
    "kfac": lambda layers: kw.kfac(
        layers, 0.01, rho=0.95, refresh_every=5, kl_clip=0.1, true_kl_clip=None
    ),
    "so": lambda layers: kw.so_kldwrm(layers, 0.01, rho=0.33, refresh_every=5, kl_clip=None),
    "q": lambda layers: kw.q_kldwrm(
        layers,
        0.01,
        rho=0.5,
        refresh_every=5,
        kl_clip=None,
        block_clip=None,
        solver="reweighted",
    ),
    "qe": lambda layers: kw.qe_kldwrm(
        layers,
        0.01,
        rho=0.5,
        refresh_every=5,
        kl_clip=None,
        block_clip=None,
        solver="reweighted",
        capacity=4,
        inner_steps=10,
        omega=0.07,
        kl_scale=1 / 660,
        tail="fold",
    ),
}


class PaperCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (5, 7):
            x = nn.Conv(features, (5, 5), padding="VALID", param_dtype=jnp.float64)(x)
            x = nn.relu(nn.max_pool(x, (2, 2), strides=(2, 2)))
        # The stored Dense_0 expects the flattened map in the order of height, width, channel.
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(30, param_dtype=jnp.float64)(x))
        return nn.Dense(10, param_dtype=jnp.float64)(x)


def tree(stored, prefix):
    out = {}
    for name in stored.files:
        if name.startswith(prefix + "/"):
            layer, kind = name.removeprefix(prefix + "/").split("/")
            out.setdefault(layer, {})[kind] = jnp.asarray(stored[name])
    return out


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("member", MEMBERS)
def test_matches_the_authors_trajectory(member):
    stored = np.load(DATA)
    pixels = stored["images"].astype(np.float32) / np.float32(255)
    images = ((pixels - np.float32(0.1307)) / np.float32(0.3081)).astype(np.float64)[..., None]
    labels = stored["labels"].astype(np.int32)
    params = tree(stored, "init")
    net = kw.instrument(
        PaperCNN(), kw.Categorical(), images[0], fisher="empirical", bias="separate"
    )
    tx = MEMBERS[member](net.layers)
    state = tx.init(params)

    @functools.partial(jax.jit, compiler_options=small_nets.WELL)
    def step(params, state, x, y):
        oracle = net.oracle(params, x, targets=y)
        loss, grads = jax.value_and_grad(oracle.loss)(params)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state, loss

    losses = stored[f"{member}/losses"]
    compared = 0
    for k in range(len(losses)):
        params, state, loss = step(params, state, images[k % 12], labels[k % 12])
        np.testing.assert_allclose(loss, losses[k], rtol=1e-9)
        expected = tree(stored, f"{member}/after_{k + 1}")
        for layer in expected:
            for kind, value in expected[layer].items():
                np.testing.assert_allclose(params[layer][kind], value, rtol=0, atol=1e-9)
                compared += 1
    assert compared >= 8
