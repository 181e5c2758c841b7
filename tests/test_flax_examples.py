"""Models of the shape of Flax's own examples, small, trained with another optimizer alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_nets import jit

import kldwrm_jax as kw

rng = np.random.default_rng(0)
LABELS = jnp.asarray(rng.integers(0, 4, size=32))
# Images of 8 x 8 with a bright quadrant, which is their class.
_ROWS, _COLUMNS = jnp.meshgrid(jnp.arange(8) // 4, jnp.arange(8) // 4, indexing="ij")
IMAGES = (LABELS[:, None, None] == 2 * _ROWS + _COLUMNS) + 0.3 * jnp.asarray(
    rng.normal(size=(32, 8, 8))
)
IMAGES = IMAGES[..., None].astype(jnp.float32)


def falls(losses, by):
    first, last = np.mean(losses[:2]), np.mean(losses[-3:])
    assert np.isfinite(losses).all()
    assert last < by * first


NOTHING_SET = {"refresh_every": 5}
CALIBRATED = {"learning_rate": 1.0, "calibrate": True, "refresh_every": 5}
each = pytest.mark.parametrize(
    "settings",
    [NOTHING_SET, pytest.param(CALIBRATED, marks=pytest.mark.slow)],
    ids=["nothing set", "calibrated"],
)


def losses_of(net, params, loss_and_oracle, steps, settings):
    """K-FAC's losses on one batch; ``loss_and_oracle`` is of parameters and a key."""
    tx = kw.kfac(net.layers, **settings)

    @jit
    def step(params, state, key):
        loss, grads, oracle = loss_and_oracle(params, key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, loss = step(params, state, jax.random.key(i))
        losses.append(float(loss))
    return losses


# --- MNIST ----------------------------------------------------------------------------------------


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        return nn.Dense(4)(x)


@each
def test_mnist_in_linen(settings):
    model = LinenCNN()
    net = kw.instrument(model, kw.Categorical(), IMAGES, uncovered="error")
    params = model.init(jax.random.key(0), IMAGES)["params"]

    def loss_and_oracle(params, key):
        return net.value_and_grad(params, IMAGES, targets=LABELS, key=key)

    falls(losses_of(net, params, loss_and_oracle, 30, settings), by=0.5)


class CNN(nnx.Module):
    """Batch normalisation inside, dropout whose streams come with the call."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.dropout1 = nnx.Dropout(0.1)
        self.dropout2 = nnx.Dropout(0.2)
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm1(self.dropout1(self.conv1(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = nnx.relu(self.dropout2(self.linear1(x.reshape(len(x), -1)), rngs=rngs))
        return self.linear2(x)


@pytest.mark.parametrize(
    "settings",
    [NOTHING_SET, pytest.param({"learning_rate": 0.2, "refresh_every": 5}, marks=pytest.mark.slow)],
    ids=["nothing set", "with a rate"],
)
def test_mnist_in_nnx_with_streams_at_the_call(settings):
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
    net = kw.instrument(model, kw.Categorical(), IMAGES, rngs, uncovered="error")
    tx = kw.kfac(net.layers, **settings)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, rngs):
        return optax.softmax_cross_entropy_with_integer_labels(model(IMAGES, rngs), LABELS).mean()

    @nnx.jit
    def train_step(model, optimizer, rngs, key):
        oracle = net.oracle(model, IMAGES, rngs, targets=LABELS, key=key)
        loss, grads = nnx.value_and_grad(loss_fn)(model, rngs)
        optimizer.update(model, grads, oracle=oracle)
        return loss

    losses = [float(train_step(model, optimizer, rngs, jax.random.key(i))) for i in range(15)]
    falls(losses, by=0.6)
    assert int(rngs.default.count[...]) == 30  # two dropouts a step
    assert np.abs(model.norm1.mean[...]).max() > 0


# --- VAE ------------------------------------------------------------------------------------------


class VAE(nn.Module):
    """Returns reconstruction, mean and log-variance."""

    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(16, name="encoder")(x))
        mean, logvar = nn.Dense(3, name="mean")(h), nn.Dense(3, name="logvar")(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        h = nn.relu(nn.Dense(16, name="decoder")(z))
        return nn.Dense(x.shape[-1], name="pixels")(h), mean, logvar


@each
def test_vae_with_its_own_loss(settings):
    x = (IMAGES.reshape(32, -1) > 0.5).astype(jnp.float32)
    model, likelihood = VAE(), kw.Bernoulli()
    net = kw.instrument(
        model, likelihood, x, jax.random.key(0), output=lambda out: out[0], uncovered="error"
    )
    assert len(net.layers) == 5
    params = model.init(jax.random.key(0), x, jax.random.key(1))["params"]

    def loss_and_oracle(params, key):
        def loss(params):
            logits, mean, logvar = model.apply({"params": params}, x, key)
            kl = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1)
            return (likelihood.nll(logits, x) + kl).mean()

        return *jax.value_and_grad(loss)(params), net.oracle(params, x, key, targets=x, key=key)

    falls(losses_of(net, params, loss_and_oracle, 30, settings), by=0.8)


# --- A decoder of tokens --------------------------------------------------------------------------


class DecoderBlock(nn.Module):
    width: int
    train: bool

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(2, use_bias=False)(h, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=not self.train)(h)
        h = nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


class Decoder(nn.Module):
    """Embeddings shared with the head, learned positions, causal blocks under remat."""

    vocabulary: int = 8
    width: int = 8
    train: bool = True

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, name="embed")
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = embed(shifted) + nn.Embed(tokens.shape[1], self.width, name="positions")(places)
        padding = nn.make_attention_mask(tokens > 0, tokens > 0)
        mask = nn.combine_masks(padding, nn.make_causal_mask(tokens))
        for i in range(2):
            x = nn.remat(DecoderBlock)(self.width, self.train, name=f"block{i}")(x, mask)
        return embed.attend(nn.LayerNorm()(x)) / self.width**0.5


@each
def test_a_decoder_with_padding(settings):
    start = rng.integers(1, 8, size=(16, 1))
    tokens = (start - 1 + np.arange(6)) % 7 + 1  # counts upwards from 1 to 7, and again
    tokens[:4, 4:] = 0
    tokens = jnp.asarray(tokens)
    weights = (tokens > 0).astype(jnp.float32)
    model, rngs = Decoder(), {"dropout": jax.random.key(0)}
    net = kw.instrument(model, kw.Categorical(), tokens, rngs=rngs, uncovered="error")
    assert not net.model.unseen
    params = model.init({"params": jax.random.key(0), **rngs}, tokens)["params"]

    def loss_and_oracle(params, key):
        given = {"targets": tokens, "weights": weights, "key": key, "rngs": {"dropout": key}}
        return net.value_and_grad(params, tokens, **given)

    falls(losses_of(net, params, loss_and_oracle, 30, settings), by=0.6)
