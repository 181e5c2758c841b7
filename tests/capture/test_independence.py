"""Which programs keep examples apart; what a part of the batch gives decides who is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.capture.independence import keeps_examples_apart

P, Q = 1009, 1013
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(12, 6)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(3, 1, 2)), jnp.float32)


def is_apart(function, shape=(P, 6), lengths=(P,), **options):
    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return keeps_examples_apart(program, lengths, **options)


def mlp(x):
    return jnp.tanh(x @ W)


def flattened(x):
    """Examples and positions merged into one axis, and split again."""
    rows = mlp(jnp.tile(x[:, None], (1, 5, 1)).reshape(-1, 6))
    return rows.reshape(len(x), 5, 3)


def mapped(x):
    return jax.lax.map(mlp, x)


def branching(x):
    return jax.lax.cond(W[0, 0] > 0, mlp, lambda x: -mlp(x), x)


def selected(x):
    chosen = jnp.take_along_axis(mlp(x), jnp.argmax(x[:, :3], 1)[:, None], 1)
    return jax.vmap(lambda h, x: h.at[jnp.argmin(x[:3])].set(0))(mlp(x), x) + chosen


def sorted_features(x):
    largest, _ = jax.lax.top_k(mlp(x), 2)
    return jnp.concatenate([jnp.sort(mlp(x), 1).cumsum(1), largest, x[:, ::-1]], axis=1)


def solved(x):
    def own(x):
        matrix = jnp.eye(6) + jnp.outer(x, x)
        return (
            jnp.linalg.solve(matrix, x),
            jnp.linalg.slogdet(matrix)[1],
            jnp.linalg.eigvalsh(matrix),
        )

    return jnp.concatenate([y.reshape(len(x), -1) for y in jax.vmap(own)(x)], axis=1)


def convolved_one_by_one(x):
    def own(x):
        return jax.lax.conv_general_dilated(
            x[None, :, None], KERNEL, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )[0]

    return jax.vmap(own)(x)


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")


def gradient_of_a_pool(x):
    return jax.vmap(jax.grad(lambda x: (pooled(x[None]) ** 2).sum()))(x)


def gradient_of_a_sum(x):
    return jax.grad(lambda x: (mlp(x) ** 2).sum())(x)


def spectrum(x):
    return jnp.abs(jnp.fft.rfft(x, axis=1))


def until_large(x):
    return jax.vmap(lambda x: jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, x))(x)


def padded(x):
    return jnp.pad(x, ((0, 0), (1, 2))).at[:, 0].set(x[:, 1])


def windows(x):
    starts = jnp.argmax(x[:, :3], axis=1)
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice(x, (i,), (2,)))(x, starts)


def looked_up(x):
    return W[jnp.argmax(x, axis=1)]


def over_time(x):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros(len(x)), x.T)[1].T


APART = [
    flattened,
    mapped,
    branching,
    selected,
    sorted_features,
    solved,
    convolved_one_by_one,
    pooled,
    gradient_of_a_pool,
    gradient_of_a_sum,
    spectrum,
    until_large,
    padded,
    windows,
    looked_up,
    over_time,
]


# --- And those that do not --------------------------------------------------------------------


def softmax_over_the_batch(x):
    return jax.nn.softmax(mlp(x), axis=0)


def summed(x):
    h = mlp(x)
    return h + h.sum(axis=0)


def contracted(x):
    h = mlp(x)
    return h @ jnp.einsum("ni,nj->ij", h, h)


def in_turn(x):
    return jax.lax.associative_scan(jnp.add, mlp(x))


def looped(x):
    return jax.lax.scan(lambda h, x: (h + x, h), jnp.zeros(3), mlp(x))[1]


def shuffled(x):
    return jax.random.permutation(jax.random.key(1), mlp(x))


def backwards(x):
    return mlp(x)[::-1]


def shifted(x):
    return mlp(x) + jnp.roll(mlp(x), 1, axis=0)


def first_as_reference(x):
    return mlp(x) - mlp(x[:1])


def time_first(x):
    """As many positions as examples, merged into an axis in which neighbours are examples."""
    rows = jnp.swapaxes(jnp.tile(x[:, None], (1, 5, 1)), 0, 1).reshape(-1, 6)
    return mlp(rows).reshape(len(x), 5, 3)


def scaled_by_the_length(x):
    return mlp(x) / jnp.sqrt(len(x))


def numbered(x):
    return mlp(x) * jnp.arange(len(x))[:, None]


def inside_a_jit(x):
    return jax.jit(lambda h: h - jnp.mean(h, axis=0))(mlp(x))


def convolved(x):
    return jax.vmap(lambda h: jnp.convolve(h, jnp.ones(3), mode="same"), 1, 1)(mlp(x))


def counted_by_class(x):
    return x[:, :3] + jnp.zeros(3).at[jnp.argmax(x, axis=1) // 2].add(x[:, 0])


def pooled_over_neighbours(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME")


def sorted_examples(x):
    return jnp.sort(x, axis=0)


def two_in_one_axis(x):
    return (x[:, None] * x[None]).reshape(-1, 6).reshape(len(x), len(x), 6).max(axis=1)


def constant_table(x):
    return x * np.arange(len(x))[:, None]


def carried_map(x):
    return jax.lax.scan(lambda k, x: (k + 1, x * k), 0.0, x)[1]


OTHERS = [
    softmax_over_the_batch,
    summed,
    contracted,
    in_turn,
    looped,
    shuffled,
    backwards,
    shifted,
    first_as_reference,
    time_first,
    scaled_by_the_length,
    numbered,
    inside_a_jit,
    convolved,
    counted_by_class,
    pooled_over_neighbours,
    sorted_examples,
    two_in_one_axis,
    constant_table,
    carried_map,
]


@pytest.mark.parametrize("function", APART)
def test_programs_that_treat_examples_one_by_one_are_known(function):
    np.testing.assert_allclose(function(X[1::3]), function(X)[1::3], rtol=1e-4, atol=1e-5)
    assert is_apart(function)


@pytest.mark.parametrize("function", OTHERS)
def test_programs_that_do_not_are_known(function):
    assert np.abs(function(X[2::3]) - function(X)[2::3]).max() > 1e-3
    assert not is_apart(function)


def test_what_a_normalisation_does_may_pass():
    def normalised(x):
        return (x - x.mean(axis=0)) / x.std(axis=0)

    assert not is_apart(normalised)
    assert is_apart(normalised, normalised=True)
    for function in (two_in_one_axis, backwards, looped):
        assert not is_apart(function, normalised=True)


def test_what_can_not_be_told_apart_is_said_to_mix():
    def two_views(x):
        h = mlp(jnp.concatenate([x, -x]))
        return h[: len(x)] * h[len(x) :]

    def chosen_by_number(x):
        return x[jnp.arange(len(x)), jnp.argmax(x, axis=1)]

    assert not is_apart(two_views)
    assert not is_apart(chosen_by_number)


def test_an_equation_that_nobody_knows_mixes():
    def called_back(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert not is_apart(called_back)
    # Unless it has no part in the batch.
    assert is_apart(lambda x: x + called_back(jnp.ones(6)))


def test_batches_of_two_terms_may_not_meet():
    def program(function):
        shapes = [jax.ShapeDtypeStruct((n, 6), jnp.float32) for n in (P, Q)]
        return jax.make_jaxpr(function)(*shapes)

    assert keeps_examples_apart(program(lambda x, z: (mlp(x), mlp(z))), (P, Q))
    assert not keeps_examples_apart(program(lambda x, z: (mlp(x) @ mlp(z).T, mlp(z))), (P, Q))
    assert not keeps_examples_apart(program(lambda x, z: (x + z.sum(0), z)), (P, Q))
