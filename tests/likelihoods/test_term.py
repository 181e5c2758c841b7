"""A likelihood on a batch: means, and the cotangents whose outer products make the Fisher."""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class Careless:
    """A likelihood whose ``nll`` does not look at shapes."""

    event_ndim: int = 1

    def nll(self, outputs, targets):
        return ((outputs - targets) ** 2).sum(-1)

    def sample(self, key, outputs):
        return outputs + jax.random.normal(key, outputs.shape)

    def symmetric_kl(self, outputs1, outputs2, xi=0.5):
        return ((outputs1 - outputs2) ** 2).sum(-1)

    def fisher_root(self, outputs):
        return jnp.ones((1, *outputs.shape))


@pytest.mark.parametrize("likelihood", [kw.Gaussian(), kw.Bernoulli(), Careless()])
def test_outputs_without_an_axis_of_examples_are_an_error(likelihood):
    """The batch would be the event: a loss and a curvature as many times too large."""
    own = LikelihoodTerm(likelihood, "exact", np.zeros(4), None, None)
    for measure in (
        own.loss,
        lambda h: own.divergence(h, h),
        lambda h: own.directions(h, ()),
    ):
        with pytest.raises(ValueError, match=r"axis of examples.*\(4,\).*say event_ndim=0"):
            measure(jnp.zeros(4))


def test_logits_without_an_axis_of_examples_are_one_example():
    """There is nothing else that they could be."""
    one = LikelihoodTerm(kw.Categorical(), "exact", jnp.array(2), None, None)
    np.testing.assert_allclose(one.loss(H[0]), kw.Categorical().nll(H[:1], Y[:1] + 2)[0])
    with pytest.raises(ValueError, match=r"axis of examples.*got shape \(\)"):
        one.loss(jnp.zeros(()))


@pytest.mark.parametrize("family", [kw.Gaussian, kw.Bernoulli])
def test_one_value_for_each_example_is_said_by_the_number_of_event_axes(family):
    h, y = H[:, 0], np.array([0.0, 1.0, 1.0, 0.0])
    flat = LikelihoodTerm(family(event_ndim=0), "exact", y, None, None)
    column = LikelihoodTerm(family(), "exact", y[:, None], None, None)
    np.testing.assert_allclose(flat.loss(h), column.loss(h[:, None]), rtol=1e-12)
    np.testing.assert_allclose(
        flat.directions(h, ())[0][..., None], column.directions(h[:, None], ())[0], rtol=1e-12
    )
    np.testing.assert_allclose(
        flat.divergence(h, 2 * h), column.divergence(h[:, None], 2 * h[:, None]), rtol=1e-12
    )


@pytest.mark.parametrize("likelihood", [Careless(), kw.Gaussian(), kw.Bernoulli()])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_targets_that_would_broadcast_are_an_error(likelihood, fisher):
    own = LikelihoodTerm(likelihood, fisher, np.zeros(4), None, None)
    h = jnp.zeros((4, 1))
    with pytest.raises(ValueError, match=r"targets of .* must have.*\(4, 1\).*got \(4,\)"):
        own.loss(h)
    if fisher == "empirical":
        with pytest.raises(ValueError, match=r"reshape\(\(4, 1\)\)"):
            own.directions(h, ())
    right = LikelihoodTerm(likelihood, fisher, np.zeros((4, 1)), None, None)
    assert np.isfinite(right.loss(h))


def test_a_likelihood_whose_event_axes_are_miscounted_is_an_error():
    own = LikelihoodTerm(Careless(event_ndim=2), "exact", np.zeros((4, 3, 2)), None, None)
    with pytest.raises(ValueError, match=r"nll of Careless.* event_ndim=2 axes, got \(4, 3\)"):
        own.loss(jnp.zeros((4, 3, 2)))


def test_weights_below_zero_that_are_traced_make_the_loss_nan():
    """Statistics have their roots: nothing that is finite would be true."""
    loss = jax.jit(lambda w: term(weights=w).loss(H))
    assert np.isfinite(loss(W))
    assert np.isnan(loss(W.at[1].set(-1.0)))
