import doctest
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kldwrm_jax import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Gaussian,
    Likelihood,
    Residuals,
    Scaled,
)

few_examples = settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def docstring_poisson():
    """The Poisson likelihood that the documentation of `Likelihood` shows."""
    examples = doctest.DocTestParser().get_examples(Likelihood.__doc__)
    namespace = {}
    exec("".join(example.source for example in examples), namespace)
    return namespace["Poisson"]()


LIKELIHOODS = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(variance=0.7),
    "poisson": docstring_poisson(),
}
each_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
each_xi = pytest.mark.parametrize("xi", [0.0, 0.3, 0.5, 1.0])


@functools.partial(jax.jit, static_argnums=0)
def divergences_and_gradients(likelihood, h1, h2, xi):
    divergences, pullback = jax.vjp(lambda *h: likelihood.symmetric_kl(*h, xi), h1, h2)
    return divergences, *pullback(jnp.ones_like(divergences))


@functools.partial(jax.jit, static_argnums=0)
def fisher_root(likelihood, h):
    return likelihood.fisher_root(h)


def outcomes(likelihood, h):
    """Targets and probabilities whose weighted sum is an expectation under p(y | h), h: (n,)."""
    match likelihood:
        case Categorical():
            return [(k, p) for k, p in enumerate(scipy.special.softmax(h))]
        case Gaussian():
            # Gauss-Hermite: exact for the quadratics that scores' products are.
            nodes, weights = np.polynomial.hermite_e.hermegauss(5)
            values = [[(x, w / weights.sum()) for x, w in zip(nodes, weights, strict=True)]] * len(
                h
            )
            draws = [
                (h + np.sqrt(likelihood.variance) * np.array(z), np.prod(w))
                for z, w in (zip(*combo, strict=True) for combo in itertools.product(*values))
            ]
            return draws
        case Bernoulli():
            support, pmf = [0.0, 1.0], scipy.stats.bernoulli(scipy.special.expit(h)).pmf
        case _:
            support, pmf = range(40), scipy.stats.poisson(np.exp(h)).pmf
    targets = [np.array(y, float) for y in itertools.product(support, repeat=len(h))]
    return [(y, np.prod(pmf(y))) for y in targets]


def kl(likelihood, h1, h2):
    """KL(1 || 2) of one sample, by summation or quadrature over one coordinate at a time."""
    match likelihood:
        case Categorical():
            return scipy.stats.entropy(scipy.special.softmax(h1), scipy.special.softmax(h2))
        case Gaussian():
            sigma = np.sqrt(likelihood.variance)
            y = np.linspace(-30, 30, 20001)[:, None]
            p, q = scipy.stats.norm(h1, sigma), scipy.stats.norm(h2, sigma)
            integrand = p.pdf(y) * (p.logpdf(y) - q.logpdf(y))
            return np.trapezoid(integrand, y, axis=0).sum()
        case Bernoulli():
            y = np.arange(2)[:, None]
            p, q = (scipy.stats.bernoulli(scipy.special.expit(h)).pmf(y) for h in (h1, h2))
        case _:
            y = np.arange(100)[:, None]
            p, q = (scipy.stats.poisson(np.exp(h)).pmf(y) for h in (h1, h2))
    return scipy.stats.entropy(p, q).sum()


def fisher(likelihood, h):
    """``sum_j c_j c_j'`` of one sample."""
    root = np.asarray(fisher_root(likelihood, jnp.asarray(h)))
    columns = root.reshape(root.shape[0], -1)
    return columns.T @ columns


def test_categorical_nll_is_minus_the_log_probability_of_the_target(rng, x64):
    h = rng.normal(size=(2, 3, 5))
    y = rng.integers(5, size=(2, 3))
    p = np.exp(h) / np.exp(h).sum(-1, keepdims=True)
    expected = [[-np.log(p[i, j, y[i, j]]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(Categorical().nll(h, y), expected, rtol=1e-12)


@pytest.mark.parametrize("event_ndim", [0, 1, 2])
def test_gaussian_nll_is_minus_the_log_density_summed_over_event_axes(event_ndim, rng, x64):
    h, y = rng.normal(size=(2, 2, 3, 4))
    logpdf = scipy.stats.norm.logpdf(y, loc=h, scale=np.sqrt(0.3))
    expected = -logpdf.sum(axis=tuple(range(3 - event_ndim, 3)))
    nll = Gaussian(variance=0.3, event_ndim=event_ndim).nll(h, y)
    assert nll.shape == (2, 3, 4)[: 3 - event_ndim]
    np.testing.assert_allclose(nll, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [float, int, bool])
@pytest.mark.parametrize("event_ndim", [0, 1, 2])
def test_bernoulli_nll_is_minus_the_log_mass_summed_over_event_axes(event_ndim, dtype, rng, x64):
    h = rng.normal(size=(2, 3, 4))
    y = rng.integers(2, size=h.shape)
    logpmf = scipy.stats.bernoulli.logpmf(y, scipy.special.expit(h))
    expected = -logpmf.sum(axis=tuple(range(3 - event_ndim, 3)))
    nll = Bernoulli(event_ndim=event_ndim).nll(h, y.astype(dtype))
    assert nll.shape == (2, 3, 4)[: 3 - event_ndim]
    np.testing.assert_allclose(nll, expected, rtol=1e-12)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), docstring_poisson()])
def test_probabilities_of_all_outcomes_are_exp_of_minus_nll(likelihood, rng, x64):
    h = rng.normal(size=2) * 0.5
    for y, p in outcomes(likelihood, h)[:30]:
        np.testing.assert_allclose(np.exp(-likelihood.nll(h, y)), p, rtol=1e-10)


@each_xi
@each_likelihood
def test_symmetric_kl_mixes_the_two_kls_of_the_definition(likelihood, xi, rng, x64):
    h1, h2 = rng.normal(size=(2, 2, 3))
    expected = [
        xi * kl(likelihood, a, b) + (1 - xi) * kl(likelihood, b, a)
        for a, b in zip(h1, h2, strict=True)
    ]
    divergences, *_ = divergences_and_gradients(likelihood, h1, h2, xi)
    np.testing.assert_allclose(divergences, expected, rtol=1e-8)


@pytest.mark.parametrize("event_ndim", [0, 1, 2])
@pytest.mark.parametrize("family", [Gaussian, Bernoulli])
def test_divergence_and_fisher_sum_over_event_axes_and_keep_the_others(
    family, event_ndim, rng, x64
):
    h1, h2 = rng.normal(size=(2, 2, 3, 4))
    shape, event = (2, 3, 4)[: 3 - event_ndim], (2, 3, 4)[3 - event_ndim :]
    single, joint = family(event_ndim=0), family(event_ndim=event_ndim)

    expected = single.symmetric_kl(h1, h2).reshape(*shape, -1).sum(-1)
    np.testing.assert_allclose(joint.symmetric_kl(h1, h2), expected, rtol=1e-12)

    root = np.asarray(fisher_root(joint, h1))
    size = int(np.prod(event))
    assert root.shape == (size, 2, 3, 4)
    columns = root.reshape(size, *shape, size)
    variances = np.asarray(fisher_root(single, h1))[0] ** 2
    expected = variances.reshape(*shape, size)[..., None] * np.eye(size)
    np.testing.assert_allclose(np.einsum("j...a,j...b->...ab", columns, columns), expected)


@few_examples
@given(data=st.data())
@pytest.mark.parametrize("family", [Categorical, Bernoulli, Gaussian])
def test_symmetric_kl_is_symmetric_nonnegative_and_zero_only_for_itself(family, data, x64):
    shape = data.draw(st.sampled_from([(3,), (2, 1, 2)]))
    logits = hnp.arrays(np.float64, shape, elements=st.floats(-40, 40))
    h1, h2 = data.draw(logits), data.draw(logits)
    likelihood = family()
    forward, backward = likelihood.symmetric_kl(h1, h2), likelihood.symmetric_kl(h2, h1)
    np.testing.assert_allclose(forward, backward, rtol=1e-12)
    assert (forward >= 0).all()
    assert (likelihood.symmetric_kl(h1, h1) == 0).all()
    assert (likelihood.symmetric_kl(h1, h1 + np.arange(shape[-1]) + 1) > 0).all()


@each_xi
@each_likelihood
def test_symmetric_kl_is_half_the_fisher_quadratic_for_small_differences(likelihood, xi, rng, x64):
    h, d = rng.normal(size=(2, 3))
    d = 1e-4 * d
    divergence, *_ = divergences_and_gradients(likelihood, h, h + d, xi)
    np.testing.assert_allclose(divergence, 0.5 * d @ fisher(likelihood, h) @ d, rtol=1e-3)


@each_likelihood
def test_fisher_root_squares_to_the_hessian_of_the_nll(likelihood, rng, x64):
    h = jnp.asarray(rng.normal(size=2))
    y = outcomes(likelihood, np.asarray(h))[1][0]
    hessian = jax.jit(jax.hessian(likelihood.nll))(h, y)
    np.testing.assert_allclose(fisher(likelihood, h), hessian, atol=1e-12)


@each_likelihood
def test_fisher_root_squares_to_the_expected_outer_product_of_scores(likelihood, rng, x64):
    h = rng.normal(size=2) * 0.5
    targets, probabilities = zip(*outcomes(likelihood, h), strict=True)
    score = jax.jit(jax.vmap(jax.grad(likelihood.nll), (None, 0)))
    scores = score(jnp.asarray(h), jnp.asarray(targets))
    expected = np.einsum("y,ya,yb->ab", probabilities, scores, scores)
    np.testing.assert_allclose(fisher(likelihood, h), expected, atol=1e-9)


@each_likelihood
def test_fisher_root_treats_leading_axes_as_independent_samples(likelihood, rng, x64):
    h = rng.normal(size=(2, 3, 4))
    root = np.asarray(fisher_root(likelihood, jnp.asarray(h)))
    assert root.shape == (4, 2, 3, 4)
    for i, j in np.ndindex(2, 3):
        own = root[:, i, j]
        np.testing.assert_allclose(own.T @ own, fisher(likelihood, h[i, j]), atol=1e-12)


@each_xi
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_values_and_gradients_are_finite_for_huge_logits(likelihood, xi):
    rows = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [0.0, 1e-4, -1e4]])
    h1, h2 = (jnp.asarray(x) for x in zip(*itertools.product(rows, rows), strict=True))

    for array in divergences_and_gradients(likelihood, h1, h2, xi):
        assert jnp.isfinite(array).all()
    divergences, *gradients = divergences_and_gradients(likelihood, h1, h1, xi)
    np.testing.assert_array_equal(divergences, 0)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_nll_and_fisher_of_huge_logits_are_finite(likelihood):
    h = jnp.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]])
    targets = jax.jit(likelihood.sample)(jax.random.key(0), -h)
    nll, gradient = jax.jit(jax.value_and_grad(lambda h: likelihood.nll(h, targets).sum()))(h)
    np.testing.assert_allclose(nll, 4e4 if isinstance(likelihood, Categorical) else 5e4, rtol=1e-4)
    assert jnp.isfinite(gradient).all()
    assert jnp.isfinite(fisher_root(likelihood, h)).all()


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_divergence_of_huge_logits_is_their_distance(likelihood):
    h1, h2 = jnp.array([1e4, -1e4]), jnp.array([-1e4, 1e4])
    expected = 2e4
    np.testing.assert_allclose(likelihood.symmetric_kl(h1, h2), expected, rtol=1e-6)


@each_xi
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_outcomes_masked_on_both_sides_add_nothing(likelihood, xi, rng):
    h1, h2 = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    mask = jnp.full((4, 1), -jnp.inf)

    masked1, masked2 = (jnp.concatenate([h, mask], axis=-1) for h in (h1, h2))

    expected, *gradients = divergences_and_gradients(likelihood, h1, h2, xi)
    divergences, *masked_gradients = divergences_and_gradients(likelihood, masked1, masked2, xi)
    np.testing.assert_allclose(divergences, expected, rtol=1e-6)
    for masked, free in zip(masked_gradients, gradients, strict=True):
        np.testing.assert_allclose(masked[:, :-1], free, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(masked[:, -1], 0)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_an_outcome_masked_on_one_side_counts_only_where_the_other_expects_it(likelihood):
    masked, free = jnp.array([0.0, -jnp.inf]), jnp.array([0.0, 0.0])
    np.testing.assert_allclose(likelihood.symmetric_kl(masked, free, 1.0), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(likelihood.symmetric_kl(free, masked, 0.0), np.log(2), rtol=1e-6)
    assert likelihood.symmetric_kl(masked, free, 0.5) == jnp.inf
    assert likelihood.symmetric_kl(free, masked, 0.5) == jnp.inf


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
def test_half_precision_outputs_are_computed_in_float32(likelihood, dtype, rng):
    h1, h2 = jnp.asarray(rng.normal(size=(2, 4, 3)), dtype)
    wide1, wide2 = h1.astype(jnp.float32), h2.astype(jnp.float32)
    targets = likelihood.sample(jax.random.key(0), h1)
    pairs = [
        (likelihood.nll(h1, targets), likelihood.nll(wide1, targets)),
        (likelihood.symmetric_kl(h1, h2), likelihood.symmetric_kl(wide1, wide2)),
        (fisher_root(likelihood, h1), fisher_root(likelihood, wide1)),
    ]
    for half, full in pairs:
        assert half.dtype == jnp.float32
        np.testing.assert_array_equal(half, full)


@each_likelihood
def test_samples_have_the_mean_and_covariance_of_the_model(likelihood):
    # The score of an exponential family is y - E[y], and its second moment is the Fisher.
    n, h = 20_000, np.array([0.3, -0.8, 0.9])
    outputs = jnp.broadcast_to(jnp.asarray(h, jnp.float32), (100, n // 100, 3))
    draws = jax.jit(likelihood.sample)(jax.random.key(1), outputs)
    scores = jax.jit(jax.grad(lambda h: likelihood.nll(h, draws).sum()))(outputs).reshape(n, 3)
    expected = fisher(likelihood, h)
    spread = np.sqrt(np.diag(expected).max())
    np.testing.assert_allclose(scores.mean(0), 0, atol=5 * spread / np.sqrt(n))
    # The largest fourth moment among these families (Poisson, rate 2.5) is below 4 spread^4.
    second_moment = np.asarray(scores.T @ scores) / n
    np.testing.assert_allclose(second_moment, expected, atol=10 * spread**2 / np.sqrt(n))


def test_categorical_samples_classes_at_their_probabilities():
    h = jnp.array([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]])
    draws = Categorical().sample(jax.random.key(0), jnp.broadcast_to(h, (20_000, 2, 3)))
    assert draws.shape == (20_000, 2)
    frequencies = np.stack([np.mean(np.asarray(draws) == k, axis=0) for k in range(3)], axis=-1)
    np.testing.assert_allclose(frequencies, scipy.special.softmax(h, axis=-1), atol=0.015)


def test_anything_with_the_right_methods_is_a_likelihood():
    assert all(isinstance(likelihood, Likelihood) for likelihood in LIKELIHOODS.values())

    class WithoutFisher:
        event_ndim = 1
        nll = sample = symmetric_kl = lambda self, *args: 0

    assert not isinstance(WithoutFisher(), Likelihood)


@pytest.mark.parametrize("variance", [0, -1.0, float("nan"), None, "1"])
def test_a_variance_that_is_not_positive_is_refused(variance):
    with pytest.raises(ValueError, match=f"variance must be a number > 0, got {variance!r}"):
        Gaussian(variance=variance)


@pytest.mark.parametrize("event_ndim", [-1, 1.0, True, None])
@pytest.mark.parametrize("family", [Gaussian, Bernoulli])
def test_an_event_ndim_that_is_no_count_is_refused(family, event_ndim):
    with pytest.raises(
        ValueError, match=rf"event_ndim must be a whole number >= 0.*{event_ndim!r}"
    ):
        family(event_ndim=event_ndim)


@pytest.mark.parametrize("xi", [-0.1, 1.5, float("nan"), None])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
def test_a_mixture_outside_zero_one_is_refused(likelihood, xi):
    with pytest.raises(ValueError, match=rf"xi must be in \[0, 1\], got {xi!r}"):
        likelihood.symmetric_kl(jnp.zeros((2, 3)), jnp.zeros((2, 3)), xi)


@pytest.mark.parametrize(
    ("targets", "got"),
    [
        (jnp.zeros((4, 3)), r"float32\[4, 3\]"),
        (jnp.zeros(4), r"float32\[4\]"),
        (jnp.zeros((4, 1), int), r"int32\[4, 1\]"),
        (jnp.zeros(5, int), r"int32\[5\]"),
        (jnp.zeros(4, bool), r"bool\[4\]"),
    ],
)
def test_categorical_refuses_targets_that_are_not_class_indices(targets, got):
    expected = rf"integer class indices of shape \(4,\) for logits of shape \(4, 3\), got {got}"
    with pytest.raises(ValueError, match=expected):
        Categorical().nll(jnp.zeros((4, 3)), targets)


@pytest.mark.parametrize("family", [Gaussian, Bernoulli])
def test_targets_that_would_broadcast_are_refused(family):
    expected = (
        rf"targets of {family.__name__} must have the shape of the outputs, \(4, 1\), got \(4,\)"
    )
    with pytest.raises(ValueError, match=expected):
        family().nll(jnp.zeros((4, 1)), jnp.zeros(4))


MEAN_AND_LOG_SCALE = np.array([0.3, -1.0, 0.2, -0.5])


def test_diagonal_gaussian_nll_is_minus_the_log_density(rng, x64):
    h, y = rng.normal(size=(5, 2, 6)), rng.normal(size=(5, 2, 3))
    expected = -scipy.stats.norm.logpdf(y, h[..., :3], np.exp(h[..., 3:])).sum(-1)
    np.testing.assert_allclose(DiagonalGaussian().nll(h, y), expected, rtol=1e-12)


@each_xi
def test_diagonal_gaussian_divergence_mixes_the_two_kls_of_the_definition(xi, rng, x64):
    h1, h2 = 0.5 * rng.normal(size=(2, 4))
    y = np.linspace(-30, 30, 20001)[:, None]
    p, q = (scipy.stats.norm(h[:2], np.exp(h[2:])) for h in (h1, h2))
    forward, backward = (
        np.trapezoid(a.pdf(y) * (a.logpdf(y) - b.logpdf(y)), y, axis=0).sum()
        for a, b in ((p, q), (q, p))
    )
    got = DiagonalGaussian().symmetric_kl(h1, h2, xi)
    np.testing.assert_allclose(got, xi * forward + (1 - xi) * backward, rtol=1e-8)


def test_diagonal_gaussian_fisher_root_squares_to_the_expected_outer_product_of_scores(x64):
    """By Gauss-Hermite quadrature, which is exact for the scores' products."""
    h, (nodes, weights) = MEAN_AND_LOG_SCALE, np.polynomial.hermite_e.hermegauss(7)
    weights = weights / weights.sum()
    z = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    scores = jax.vmap(jax.grad(DiagonalGaussian().nll), (None, 0))(
        jnp.asarray(h), h[:2] + np.exp(h[2:]) * z
    )
    expected = np.einsum("y,ya,yb->ab", np.outer(weights, weights).reshape(-1), scores, scores)
    np.testing.assert_allclose(fisher(DiagonalGaussian(), h), expected, atol=1e-12)
    batched = DiagonalGaussian().fisher_root(np.stack([h, 2 * h]))
    assert batched.shape == (4, 2, 4)
    second = np.asarray(batched[:, 1])
    np.testing.assert_allclose(second.T @ second, fisher(DiagonalGaussian(), 2 * h), atol=1e-12)


def test_diagonal_gaussian_samples_have_its_moments():
    h = jnp.broadcast_to(jnp.asarray(MEAN_AND_LOG_SCALE), (40_000, 4))
    y = DiagonalGaussian().sample(jax.random.key(0), h)
    np.testing.assert_allclose(y.mean(axis=0), MEAN_AND_LOG_SCALE[:2], atol=0.03)
    np.testing.assert_allclose(y.std(axis=0), np.exp(MEAN_AND_LOG_SCALE[2:]), rtol=0.03)


def test_diagonal_gaussian_refuses_shapes_that_are_not_means_and_scales():
    with pytest.raises(ValueError, match=r"must be even, got shape \(4, 3\)"):
        DiagonalGaussian().nll(jnp.zeros((4, 3)), jnp.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"shape of the means, \(4, 1\).*got \(4, 2\)"):
        DiagonalGaussian().nll(jnp.zeros((4, 2)), jnp.zeros((4, 2)))


def test_residuals_are_half_their_squares_over_the_variance(rng, x64):
    r = rng.normal(size=(3, 2))
    own, gaussian = Residuals(variance=0.3), Gaussian(variance=0.3)
    np.testing.assert_allclose(own.nll(r), (r**2).sum(-1) / 0.6, rtol=1e-12)
    np.testing.assert_array_equal(own.fisher_root(r), gaussian.fisher_root(r))
    np.testing.assert_array_equal(own.symmetric_kl(r, 2 * r), gaussian.symmetric_kl(r, 2 * r))


@pytest.mark.parametrize("factor", [0.0, -1.0, "2", None])
def test_a_factor_that_is_no_positive_number_is_an_error(factor):
    with pytest.raises(ValueError, match="factor must be"):
        Scaled(Gaussian(), factor)
    with pytest.raises(ValueError, match="likelihood must implement"):
        Scaled(Gaussian, 1.0)
