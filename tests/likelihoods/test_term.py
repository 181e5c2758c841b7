"""A likelihood on a batch: means, and the cotangents whose outer products make the Fisher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.references import categorical_fisher

import kldwrm_jax as kw
from kldwrm_jax.likelihoods.term import LikelihoodTerm

pytestmark = pytest.mark.usefixtures("x64")

H = np.random.default_rng(0).normal(size=(4, 3))
Y = np.array([0, 2, 1, 1])
W = jnp.array([1.0, 0.0, 2.0, 0.5])


def term(fisher="exact", targets=Y, key=None, weights=None):
    return LikelihoodTerm(kw.Categorical(), fisher, targets, key, weights)


@pytest.mark.parametrize("weights", [None, W], ids=["", "weighted"])
def test_exact_directions_are_a_root_of_the_mean_fisher(weights):
    directions, scale = term(weights=weights).directions(H, ())
    shares = np.full(4, 0.25) if weights is None else weights / weights.sum()
    expected = categorical_fisher(H) * shares[:, None, None]
    np.testing.assert_allclose(
        scale * jnp.einsum("jne,jnf->nef", directions, directions), expected, atol=1e-12
    )


def test_empirical_directions_are_those_of_the_losses_cotangent_up_to_the_scale():
    directions, scale = term("empirical").directions(H, ())
    assert scale == 4
    np.testing.assert_array_equal(directions[0], jax.grad(term("empirical").loss)(H))
    equal = term("empirical", weights=jnp.ones(4))
    weighted, one = equal.directions(H, ())
    assert one == 1.0
    np.testing.assert_allclose(scale * directions**2, weighted**2, rtol=1e-12)


def test_sampled_directions_have_the_fisher_as_their_expectation():
    keys = jax.random.split(jax.random.key(0), 20_000)

    def draw(key):
        ((direction,), _) = term("sampled", key=key).directions(H, ())
        return jnp.einsum("ne,nf->nef", direction, direction)

    mean = jax.vmap(draw)(keys).mean(axis=0)
    np.testing.assert_allclose(mean, categorical_fisher(H) / 4, atol=0.003)


def test_exact_is_refused_where_examples_mix():
    with pytest.raises(ValueError, match="'norm', which normalises over the batch"):
        term().directions(H, ["norm"])
    term("empirical").directions(H, ["norm"])


def test_positions_are_the_samples_of_an_example_for_exact_alone():
    h = jnp.zeros((2, 5, 7, 3))
    assert term().positions(h) == 35
    assert term("sampled").positions(h) == 1


def test_random_signs_are_one_for_each_sample():
    signs = term(key=jax.random.key(1)).random_signs(jnp.zeros((6, 4, 3)))
    assert signs.shape == (6, 4, 1)
    np.testing.assert_array_equal(jnp.abs(signs), 1)


def test_loss_and_divergence_are_weighted_means():
    nll = kw.Categorical().nll(H, Y)
    kl = kw.Categorical().symmetric_kl(H, 2 * H)
    for weights in (None, W):
        shares = np.full(4, 0.25) if weights is None else weights / weights.sum()
        own = term(weights=weights)
        np.testing.assert_allclose(own.loss(H), shares @ nll, rtol=1e-12)
        np.testing.assert_allclose(own.divergence(H, 2 * H), shares @ kl, rtol=1e-12)


def test_what_is_missing_or_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="loss needs targets"):
        term(targets=None).loss(H)
    with pytest.raises(ValueError, match="needs a key"):
        term("sampled").directions(H, ())
    with pytest.raises(ValueError, match="the batch is empty"):
        term().directions(H[:0], ())
    with pytest.raises(ValueError, match=r"weights must have the shape.*\(4,\), got \(3,\)"):
        term(weights=jnp.ones(3)).loss(H)


def test_weights_below_zero_that_are_traced_make_the_loss_nan():
    """Statistics have their roots: nothing that is finite would be true."""
    loss = jax.jit(lambda w: term(weights=w).loss(H))
    assert np.isfinite(loss(W))
    assert np.isnan(loss(W.at[1].set(-1.0)))
