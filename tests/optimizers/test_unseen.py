"""Parameters that the likelihood does not see: plain steps that leave the others alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_nets import jit

import kldwrm_jax as kw

MEMBERS = {"kfac": kw.kfac, "so": kw.so_kldwrm, "q": kw.q_kldwrm}


class ActorCritic(nn.Module):
    critic: bool = True

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(4, name="trunk")(x))
        logits = nn.Dense(3, name="actor")(h)
        if not self.critic:
            return logits, jnp.zeros(len(x))
        return logits, nn.Dense(1, name="critic")(h)[:, 0]


X = jax.random.normal(jax.random.key(0), (16, 5))
PARAMS = ActorCritic().init(jax.random.key(1), X)["params"]
GRADIENT = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), PARAMS)


def two_steps(member, model, critic, **options):
    """Steps with gradients of the critic times a factor."""
    net = kw.instrument(model, kw.Categorical(), X, output=lambda out: out[0])
    own = {name: PARAMS[name] for name in PARAMS if critic or name != "critic"}
    tx = MEMBERS[member](net.layers, 0.1, refresh_every=1, **options)
    grads = {name: GRADIENT[name] for name in own}
    if critic:
        grads["critic"] = jax.tree.map(lambda g: critic * g, grads["critic"])

    @jit
    def step(state, key):
        return tx.update(grads, state, own, oracle=net.oracle(own, X, key=key))

    state = tx.init(own)
    for i in range(2):
        updates, state = step(state, jax.random.key(i))
    return updates, state


@pytest.mark.parametrize(
    ("member", "options"), [("kfac", {}), ("kfac", {"calibrate": True}), ("so", {}), ("q", {})]
)
def test_a_critic_without_curvature_leaves_the_actor_alone(member, options):
    updates, _ = two_steps(member, ActorCritic(), 1e3, **options)
    alone, _ = two_steps(member, ActorCritic(critic=False), 0, **options)
    for name in ("trunk", "actor"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
            updates[name],
            alone[name],
        )


def test_its_step_is_the_gradients():
    updates, _ = two_steps("kfac", ActorCritic(), 1.0, kl_clip=None, damping=1e-6)
    np.testing.assert_allclose(
        updates["critic"]["kernel"], -0.1 * GRADIENT["critic"]["kernel"], rtol=1e-4
    )


def test_a_gradient_of_it_that_is_not_finite_is_refused():
    updates, state = two_steps("kfac", ActorCritic(), jnp.inf)
    assert kw.diagnostics(state)["rejected_steps"] == 2
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_it_has_no_part_in_the_report():
    net = kw.instrument(ActorCritic(), kw.Categorical(), X, output=lambda out: out[0])
    oracle = net.oracle(PARAMS, X, key=jax.random.key(0))
    step = jax.tree.map(lambda g: 1e-2 * g, GRADIENT)
    larger = step | {"critic": jax.tree.map(lambda g: 100 * g, step["critic"])}
    one, two = (kw.kl_report(oracle, PARAMS, own) for own in (step, larger))
    np.testing.assert_allclose(one.blocks, two.blocks)
