"""Curvature of networks written out by hand: jacobians and per-example gradients in plain JAX.

A network is a function of a :class:`Tape`; it hands every layer's inputs and outputs to the tape.
Nothing here goes through the library.
"""

import jax
import jax.numpy as jnp
import numpy as np


class Tape:
    """Records the rows that layers see, and perturbs their outputs to be differentiated."""

    def __init__(self, shifts=None):
        self.shifts = shifts or {}
        self.inputs = {}
        self.outputs = {}

    def __call__(self, name, a, z):
        call = f"{name}#{sum(key.split('#')[0] == name for key in self.inputs)}"
        self.inputs[call], self.outputs[call] = a, z
        return z + self.shifts.get(call, 0)

    def dense(self, name, x, layer):
        """A Flax Dense layer's parameters at work, written out."""
        return self(name, x, x @ layer["kernel"] + layer.get("bias", 0))


def gaussian_root(h, variance=1.0):
    """Columns of each sample's output Fisher: (directions, *samples, event)."""
    eye = jnp.eye(h.shape[-1]) / np.sqrt(variance)
    return jnp.stack([jnp.broadcast_to(e, h.shape) for e in eye])


def categorical_fisher(h):
    """``diag(p) - p p'`` of each sample."""
    p = jnp.exp(h - jax.scipy.special.logsumexp(h, axis=-1, keepdims=True))
    return jnp.eye(h.shape[-1]) * p[..., None, :] - p[..., :, None] * p[..., None, :]


def categorical_root(h):
    """A symmetric square root of each sample's Fisher, by eigenvectors."""
    values, vectors = jnp.linalg.eigh(categorical_fisher(h))
    return jnp.moveaxis(vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :], -1, 0)


def shares(weights):
    """Each sample's part of the mean."""
    return weights / weights.sum()


def block_fisher(outputs_of, theta, fisher, share):
    """The dense Fisher of ``theta``: jacobians of ``(*samples, event)`` outputs."""
    jacobian = jax.jacobian(outputs_of)(theta)
    event = fisher.shape[-1]
    j = jacobian.reshape(-1, event, theta.size)
    return jnp.einsum(
        "n,nep,nef,nfq->pq", share.reshape(-1), j, fisher.reshape(-1, event, event), j
    )


def row_weights(rows, weights):
    """Weights of rows that have the samples' axes in front, as far as they do."""
    if weights is None:
        return jnp.ones(rows)
    common = 0
    while common < min(len(rows), weights.ndim) and rows[common] == weights.shape[common]:
        common += 1
    summed = weights.sum(axis=tuple(range(common, weights.ndim)))
    return jnp.broadcast_to(summed.reshape(summed.shape + (1,) * (len(rows) - common)), rows)


def _gradients_together(network, zeros, columns):
    """For every direction, gradients of ``sum_n column_n . output_n``."""
    return jax.vmap(
        lambda column: jax.grad(lambda shifts: (network(Tape(shifts)) * column).sum())(zeros)
    )(columns)


def _gradients_apart(network, zeros, columns):
    """For every direction and every sample, gradients of ``column_n . output_n``."""
    jacobians = jax.jacrev(lambda shifts: network(Tape(shifts)))(zeros)
    flat = columns.reshape(columns.shape[0], -1, columns.shape[-1])

    def contracted(jacobian, zero):
        jacobian = jacobian.reshape(*flat.shape[1:], *zero.shape)
        return jnp.einsum("jne,ne...->jn...", flat, jacobian).reshape(-1, *zero.shape)

    return jax.tree.map(contracted, jacobians, zeros)


def kfac(network, root, weights=None, together=False, reduce=False, bias=True):
    """Every layer's K-FAC factors ``{name: (A, G)}`` of a network that uses a tape.

    ``root``: columns of the output Fisher, (directions, *samples, event), without the shares.
    ``weights``: over the samples; a layer's rows have those of the samples' axes they share.
    ``together``: one backward pass for all samples (labels drawn) or one each (exact).
    ``bias``: a set of names that have one, or True for all.
    """
    weights = None if weights is None else jnp.asarray(weights, float)

    @jax.jit
    def run():
        tape = Tape()
        h = network(tape)
        share = shares(jnp.ones(h.shape[:-1]) if weights is None else weights)
        scaled = root * jnp.sqrt(share)[..., None]
        zeros = {call: jnp.zeros(z.shape, h.dtype) for call, z in tape.outputs.items()}
        gradients = (_gradients_together if together else _gradients_apart)(network, zeros, scaled)
        collected = {}
        for call, inputs in tape.inputs.items():
            name, a = call.split("#")[0], inputs
            g = gradients[call]
            w = row_weights(a.shape[:-1], weights)
            if reduce:
                inner = tuple(range(1, w.ndim))
                total = w.sum(axis=inner)
                mean = (a * w[..., None]).sum(axis=inner) / jnp.where(total == 0, 1, total)[:, None]
                a, g, w = mean, g.sum(axis=tuple(1 + axis for axis in inner)), total
            if bias is True or name in bias:
                a = jnp.concatenate([a, jnp.ones((*a.shape[:-1], 1))], axis=-1)
            moment = jnp.einsum("...,...i,...j->ij", w, a, a)
            square = jnp.einsum("...i,...j->ij", g, g)
            old = collected.get(name, (0, 0, 0))
            collected[name] = (old[0] + moment, old[1] + square, old[2] + w.sum())
        return {name: (a / count, g) for name, (a, g, count) in collected.items()}

    return run()


def assert_factors(got, expected, rtol=1e-9, atol=1e-12):
    """Same names, same arrays."""
    assert set(got) == set(expected)
    for name in expected:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=name),
            tuple(got[name]) if isinstance(got[name], tuple) else got[name],
            tuple(expected[name]) if isinstance(expected[name], tuple) else expected[name],
        )


def initialised(model, *args, seed=0, **kwargs):
    """A model's params, all of them random (biases and scales too), in the default float type."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    shapes = jax.eval_shape(lambda *a: model.init(keys, *a, **kwargs), *args)["params"]
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(max(1, np.prod(leaf.shape[:-1]))))

    return jax.tree.map(draw, shapes)


def factors(net, params, *args, **kwargs):
    """``net.oracle(...).factors()`` under jit."""
    oracle = net.oracle(params, *args, **kwargs)
    return jax.jit(lambda o: o.factors())(oracle)
