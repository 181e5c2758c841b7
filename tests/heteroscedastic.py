"""A regression whose scale is learned, too: its Fisher grows a hundredfold within a few steps."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import small_nets

import kldwrm_jax as kw


@dataclasses.dataclass(frozen=True)
class MeanAndLogScale:
    """A Gaussian; the outputs are its mean and the logarithm of its standard deviation."""

    event_ndim: int = 1

    def nll(self, outputs, targets):
        mean, log_scale = outputs[..., 0], outputs[..., 1]
        return 0.5 * ((targets - mean) * jnp.exp(-log_scale)) ** 2 + log_scale

    def sample(self, key, outputs):
        mean, log_scale = outputs[..., 0], outputs[..., 1]
        return mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)

    def symmetric_kl(self, outputs1, outputs2, xi=0.5):
        def kl(p, q):
            apart = ((p[..., 0] - q[..., 0]) * jnp.exp(-q[..., 1])) ** 2
            wider = p[..., 1] - q[..., 1]
            return 0.5 * (jnp.exp(2 * wider) + apart - 1) - wider

        return xi * kl(outputs1, outputs2) + (1 - xi) * kl(outputs2, outputs1)

    def fisher_root(self, outputs):
        precision = jnp.exp(-outputs[..., 1])
        root = jnp.stack([precision, jnp.full_like(precision, 2**0.5)], axis=-1)
        return jax.vmap(lambda direction: root * direction)(jnp.eye(2))


class Regression:
    """A sine with noise that grows to the sides, and a network for it."""

    def __init__(self, width=32, examples=256):
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.uniform(keys[0], (examples, 1), minval=-3, maxval=3)
        noise = 0.05 + 0.1 * jnp.abs(x[:, 0])
        self.x, self.y = x, jnp.sin(2 * x[:, 0]) + noise * jax.random.normal(keys[1], (examples,))
        hidden = [layer for _ in range(2) for layer in (nn.Dense(width), nn.tanh)]
        self.model = nn.Sequential([*hidden, nn.Dense(2)])
        self.params = self.model.init(keys[2], x)["params"]
        self.net = kw.instrument(self.model, MeanAndLogScale(), x)

    def losses(self, make, rates, steps=60, batch=64):
        """Of the whole data after every step, for each of several learning rates."""
        net, x, y = self.net, self.x, self.y

        def train(rate):
            tx = make(net.layers, rate)

            def step(carried, k):
                params, state = carried
                key = jax.random.fold_in(jax.random.key(1), k)
                chosen = jax.random.randint(key, (batch,), 0, len(y))
                _, grads, oracle = net.value_and_grad(params, x[chosen], targets=y[chosen], key=key)
                updates, state = tx.update(grads, state, params, oracle=oracle)
                params = optax.apply_updates(params, updates)
                return (params, state), net.oracle(params, x, targets=y).loss(params)

            return jax.lax.scan(step, (self.params, tx.init(self.params)), jnp.arange(steps))[1]

        compiled = small_nets.jit(train)
        return jnp.stack([compiled(rate) for rate in rates])
