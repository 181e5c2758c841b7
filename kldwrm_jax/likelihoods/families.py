r"""Likelihoods: what a network's outputs say about its targets, :math:`p(y \mid h)`.

A likelihood owns the trailing *event* axes of the outputs; the axes before them are independent
samples. Everything else in the library is written against the small protocol :class:`Likelihood`.
"""

import dataclasses
import math
import numbers
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, log_softmax, sigmoid

from kldwrm_jax.arguments import Scalar, check_count, check_fraction, check_positive


@runtime_checkable
class Likelihood(Protocol):
    r"""What the library asks of a likelihood; implement these to bring your own.

    ``outputs`` has shape ``(*samples, *event)``, with ``event_ndim`` event axes. The example below
    is complete: a Poisson likelihood with log-rates as outputs.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> from jax.scipy.special import gammaln
      >>> import kldwrm_jax as kw
      >>> @dataclasses.dataclass(frozen=True)
      ... class Poisson:
      ...     event_ndim: int = 1
      ...     def nll(self, outputs, targets):
      ...         return (jnp.exp(outputs) - targets * outputs + gammaln(targets + 1)).sum(-1)
      ...     def sample(self, key, outputs):
      ...         return jax.random.poisson(key, jnp.exp(outputs))
      ...     def symmetric_kl(self, outputs1, outputs2, xi=0.5):
      ...         r1, r2 = jnp.exp(outputs1), jnp.exp(outputs2)
      ...         forward = r1 * (outputs1 - outputs2) - r1 + r2
      ...         backward = r2 * (outputs2 - outputs1) - r2 + r1
      ...         return (xi * forward + (1 - xi) * backward).sum(-1)
      ...     def fisher_root(self, outputs):
      ...         eye = jnp.eye(outputs.shape[-1])
      ...         return jax.vmap(lambda e: jnp.exp(outputs / 2) * e)(eye)
      >>> isinstance(Poisson(), kw.Likelihood)
      True
    """

    @property
    def event_ndim(self) -> int:
        """How many trailing axes of the outputs make one event."""
        ...

    def nll(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of every sample: ``(*samples,)``."""
        ...

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """Targets drawn from the model, one for every sample."""
        ...

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        """``xi KL(1 || 2) + (1 - xi) KL(2 || 1)`` of every sample: ``(*samples,)``."""
        ...

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        """Columns ``c_j``, stacked in front, whose ``sum_j c_j c_j'`` is every sample's Fisher."""
        ...


def _full_precision(outputs: jax.Array) -> jax.Array:
    """At least float32: log-probabilities of bfloat16 logits are worth nothing."""
    outputs = jnp.asarray(outputs)
    return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))


def _sum_events(values: jax.Array, event_ndim: int) -> jax.Array:
    return values.sum(axis=tuple(range(-event_ndim, 0))) if event_ndim else values


def _event_basis(outputs: jax.Array, event_ndim: int) -> jax.Array:
    """The unit vectors of the event space, shaped to broadcast against ``outputs``."""
    if outputs.ndim < event_ndim:
        raise ValueError(
            f"outputs must have at least event_ndim={event_ndim} axes, got shape {outputs.shape}"
        )
    event = outputs.shape[outputs.ndim - event_ndim :]
    size = math.prod(event)
    samples = (1,) * (outputs.ndim - event_ndim)
    return jnp.eye(size, dtype=outputs.dtype).reshape(size, *samples, *event)


def _mixed_kl(log_p: jax.Array, log_q: jax.Array, xi: Scalar) -> jax.Array:
    """Terms of ``xi KL(p || q) + (1 - xi) KL(q || p)``; an event that neither expects adds 0."""
    p, q = xi * jnp.exp(log_p), (1 - xi) * jnp.exp(log_q)
    expected = (p > 0) | (q > 0)
    log_ratio = jnp.where(expected, log_p, 0) - jnp.where(expected, log_q, 0)
    return (p - q) * log_ratio


@dataclasses.dataclass(frozen=True)
class Categorical:
    r"""Classes, from logits along the last axis.

    :math:`p(y \mid h) = \mathrm{softmax}(h)_y`. Targets are class indices, one for every sample.
    Divergences are computed from log-softmax, never from ratios of probabilities.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> logits = jnp.array([[0.0, 0.0], [1e4, -1e4]])
      >>> [f"{x:.3f}" for x in kw.Categorical().nll(logits, jnp.array([1, 1]))]
      ['0.693', '20000.000']
      >>> kw.Categorical().symmetric_kl(logits, logits).tolist()
      [0.0, 0.0]
    """

    @property
    def event_ndim(self) -> int:
        """One: the axis of the logits."""
        return 1

    def nll(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Cross-entropy of integer ``targets``: shape of ``outputs`` without its last axis.

        NumPy targets are looked at; those on the device cannot be: there, one that is too large
        gives NaN, with a gradient of NaN, so that an optimizer refuses the step; and -1 is the last
        class. Padding is said with ``net.oracle(..., weights=...)``.
        """
        outputs = _full_precision(outputs)
        largest = targets.max(initial=0) if _is_whole(targets) else 0
        if largest >= outputs.shape[-1]:
            raise ValueError(
                f"targets of Categorical must be below the number of logits, {outputs.shape[-1]}, "
                f"got {largest}: give the model as many outputs as there are classes"
            )
        targets = jnp.asarray(targets)
        if targets.shape != outputs.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
            raise ValueError(
                f"targets of Categorical must be integer class indices of shape "
                f"{outputs.shape[:-1]} for logits of shape {outputs.shape}, got "
                f"{targets.dtype}{list(targets.shape)} (one-hot targets: take their argmax)"
            )
        classes = outputs.shape[-1]
        targets = targets.astype(jnp.int32)  # which holds the bounds, as unsigned bytes do not
        known = jnp.clip(targets, -classes, classes - 1)
        # Picked by a mask: the gradient of a look-up is a scatter, which takes long to compile.
        mask = jnp.arange(classes) == (known % classes)[..., None]
        picked = jnp.where(mask, log_softmax(outputs), 0).sum(axis=-1)
        return -picked * jnp.where(known == targets, 1, jnp.nan)

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """A class index for every sample."""
        # By the inverse of the distribution function: one random number per sample, where
        # jax.random.categorical draws one per class and takes four times as long to compile.
        cumulative = jnp.cumsum(jax.nn.softmax(_full_precision(outputs)), axis=-1)
        u = jax.random.uniform(key, (*outputs.shape[:-1], 1), cumulative.dtype)
        drawn = jnp.sum(cumulative <= u * cumulative[..., -1:], axis=-1)
        return jnp.minimum(drawn, outputs.shape[-1] - 1)

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        """Mixed KL divergence of every sample; symmetric at ``xi = 1/2``."""
        check_fraction("xi", xi)
        log_p, log_q = (
            log_softmax(_full_precision(outputs1)),
            log_softmax(_full_precision(outputs2)),
        )
        return _mixed_kl(log_p, log_q, xi).sum(axis=-1)

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        r"""Columns :math:`\sqrt{p_j}\,(e_j - p)` of :math:`\mathrm{diag}(p) - p p'`."""
        outputs = _full_precision(outputs)
        p = jax.nn.softmax(outputs)
        basis = _event_basis(outputs, 1)
        return jnp.sqrt(jnp.moveaxis(p, -1, 0))[..., None] * (basis - p)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    r"""Real values with a fixed variance: :math:`p(y \mid h) = N(y; h, \sigma^2 I)`.

    Args:
      variance: :math:`\sigma^2`, a number > 0.
      event_ndim: how many trailing axes of the outputs make one observation. ``nll`` sums over
        them; the axes before are samples, which are averaged. Use 0 for one value a sample without
        an axis of its own.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> float(kw.Gaussian().symmetric_kl(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])))
      2.0
    """

    variance: float = 1.0
    event_ndim: int = 1

    def __post_init__(self) -> None:
        check_positive("variance", self.variance)
        check_count("event_ndim", self.event_ndim, least=0)

    def nll(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-density, constants included, summed over the event axes."""
        outputs, targets = _full_precision(outputs), jnp.asarray(targets)
        _check_same_shape("Gaussian", outputs, targets)
        scaled = (outputs - targets) ** 2 / self.variance + math.log(2 * math.pi * self.variance)
        return _sum_events(0.5 * scaled, self.event_ndim)

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """Outputs plus noise of the model's variance."""
        outputs = _full_precision(outputs)
        noise = jax.random.normal(key, outputs.shape, outputs.dtype)
        return outputs + math.sqrt(self.variance) * noise

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        r""":math:`\|h_1 - h_2\|^2 / 2\sigma^2`, the same in both directions."""
        check_fraction("xi", xi)
        squares = (_full_precision(outputs1) - _full_precision(outputs2)) ** 2
        return _sum_events(squares, self.event_ndim) / (2 * self.variance)

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        r"""Columns :math:`e_j / \sigma`."""
        outputs = _full_precision(outputs)
        basis = _event_basis(outputs, self.event_ndim) / math.sqrt(self.variance)
        return jnp.broadcast_to(basis, basis.shape[:1] + outputs.shape)


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    r"""Independent binary values from logits: :math:`p(y = 1 \mid h) = \mathrm{sigmoid}(h)`.

    Args:
      event_ndim: how many trailing axes of the outputs make one observation. ``nll`` sums over
        them; the axes before are samples, which are averaged. Use 0 for one logit a sample
        without an axis of its own.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> float(kw.Bernoulli().nll(jnp.array([0.0]), jnp.array([1.0])).round(4))
      0.6930999755859375
    """

    event_ndim: int = 1

    def __post_init__(self) -> None:
        check_count("event_ndim", self.event_ndim, least=0)

    def nll(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Binary cross-entropy of targets in {0, 1}, summed over the event axes."""
        outputs, targets = _full_precision(outputs), jnp.asarray(targets)
        _check_same_shape("Bernoulli", outputs, targets)
        likelihood = targets * log_sigmoid(outputs) + (1 - targets) * log_sigmoid(-outputs)
        return _sum_events(-likelihood, self.event_ndim)

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """Zeros and ones, in the outputs' type."""
        outputs = _full_precision(outputs)
        return jax.random.bernoulli(key, sigmoid(outputs)).astype(outputs.dtype)

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        """Mixed KL divergence of every sample; symmetric at ``xi = 1/2``."""
        check_fraction("xi", xi)
        h1, h2 = _full_precision(outputs1), _full_precision(outputs2)
        ones = _mixed_kl(log_sigmoid(h1), log_sigmoid(h2), xi)
        zeros = _mixed_kl(log_sigmoid(-h1), log_sigmoid(-h2), xi)
        return _sum_events(ones + zeros, self.event_ndim)

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        r"""Columns :math:`\sqrt{p_j (1 - p_j)}\, e_j`."""
        outputs = _full_precision(outputs)
        deviation = jnp.exp(0.5 * (log_sigmoid(outputs) + log_sigmoid(-outputs)))
        return deviation * _event_basis(outputs, self.event_ndim)


@dataclasses.dataclass(frozen=True)
class Residuals(Gaussian):
    r"""Residuals, to be driven to zero: a Gaussian whose targets are zero and are not given.

    The loss is :math:`\|r\|^2 / 2\sigma^2`, without the density's constant: it falls to zero with
    the residuals, whose digits would be lost beside a constant.

    Args:
      variance: :math:`\sigma^2`, a number > 0.
      event_ndim: how many trailing axes of the outputs make one residual; 0 for outputs of shape
        ``(N,)``.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> float(kw.Residuals().nll(jnp.array([3.0, 4.0])))
      12.5
    """

    def nll(self, outputs: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        """Half the squared residual over the variance, summed over the event axes.

        Args:
          outputs: the residuals.
          targets: none. Only what ``sample`` draws, for the Fisher, is not zero.
        """
        outputs = _full_precision(outputs)
        if targets is not None:
            _check_same_shape("Residuals", outputs, jnp.asarray(targets))
            outputs = outputs - targets
        return _sum_events(0.5 * outputs**2 / self.variance, self.event_ndim)


@dataclasses.dataclass(frozen=True)
class DiagonalGaussian:
    r"""Real values whose scales are outputs, too: :math:`p(y \mid h) = N(y; \mu, e^{2\lambda})`.

    The last axis of the outputs has the means and then the log-scales, :math:`h = (\mu, \lambda)`:
    twice the length of the targets'. For regression with noise that depends on the inputs, and for
    policies with continuous actions.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> outputs = jnp.array([1.0, 2.0, 0.0, -1.0])  # N(1, 1) and N(2, exp(-2))
      >>> f"{kw.DiagonalGaussian().nll(outputs, jnp.array([1.0, 2.0])):.4f}"
      '0.8379'
    """

    @property
    def event_ndim(self) -> int:
        """One: the axis of means and log-scales."""
        return 1

    def nll(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-density, constants included, summed over the last axis."""
        (mean, log_scale), targets = _mean_and_log_scale(outputs), jnp.asarray(targets)
        if targets.shape != mean.shape:
            raise ValueError(
                f"targets of DiagonalGaussian must have the shape of the means, {mean.shape}, "
                f"which are the first half of the outputs, got {targets.shape}"
            )
        apart = (targets - mean) * jnp.exp(-log_scale)
        return (0.5 * (apart**2 + math.log(2 * math.pi)) + log_scale).sum(axis=-1)

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """Means plus noise of the outputs' scale."""
        mean, log_scale = _mean_and_log_scale(outputs)
        return mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape, mean.dtype)

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        """Mixed KL divergence of every sample; symmetric at ``xi = 1/2``."""
        check_fraction("xi", xi)

        def kl(p: jax.Array, q: jax.Array) -> jax.Array:
            (mean, log_scale), (other, reference) = _mean_and_log_scale(p), _mean_and_log_scale(q)
            wider, apart = log_scale - reference, (mean - other) * jnp.exp(-reference)
            return (0.5 * (jnp.expm1(2 * wider) + apart**2) - wider).sum(axis=-1)

        return xi * kl(outputs1, outputs2) + (1 - xi) * kl(outputs2, outputs1)

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        r"""Columns :math:`e^{-\lambda_j} e_j` of the means and :math:`\sqrt2\, e_j` of the rest."""
        _, log_scale = _mean_and_log_scale(outputs)
        of_scale = jnp.full_like(log_scale, math.sqrt(2))
        root = jnp.concatenate([jnp.exp(-log_scale), of_scale], axis=-1)
        return root * _event_basis(root, 1)


def _mean_and_log_scale(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    outputs = _full_precision(outputs)
    size = outputs.shape[-1]
    if size % 2:
        raise ValueError(
            f"outputs of DiagonalGaussian are means and log-scales along the last axis, whose "
            f"length must be even, got shape {outputs.shape}"
        )
    return outputs[..., : size // 2], outputs[..., size // 2 :]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A likelihood whose log-likelihood is multiplied by a factor: the weight of a loss term.

    The loss, the Fisher and the divergence are ``factor`` times those of the likelihood; samples
    are its own.

    Args:
      likelihood: any.
      factor: a number > 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> float(kw.Scaled(kw.Residuals(), 10.0).nll(jnp.array([3.0, 4.0])))
      125.0
    """

    likelihood: Likelihood
    factor: float

    def __post_init__(self) -> None:
        if not is_likelihood(self.likelihood):
            raise ValueError(
                f"likelihood must implement kldwrm_jax.Likelihood, as kldwrm_jax.Categorical() "
                f"does, got {self.likelihood!r}"
            )
        if not isinstance(self.factor, numbers.Real):
            raise ValueError(
                f"factor must be a number that is known when the program is built, got "
                f"{self.factor!r}"
            )
        check_positive("factor", self.factor)

    @property
    def event_ndim(self) -> int:
        """The likelihood's."""
        return self.likelihood.event_ndim

    def nll(self, outputs: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        """``factor`` times the likelihood's."""
        return self.factor * self.likelihood.nll(outputs, targets)  # type: ignore[arg-type]

    def sample(self, key: jax.Array, outputs: jax.Array) -> jax.Array:
        """Targets drawn from the likelihood."""
        return self.likelihood.sample(key, outputs)

    def symmetric_kl(self, outputs1: jax.Array, outputs2: jax.Array, xi: Scalar = 0.5) -> jax.Array:
        """``factor`` times the likelihood's."""
        return self.factor * self.likelihood.symmetric_kl(outputs1, outputs2, xi)

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        """The likelihood's, times the root of ``factor``."""
        return math.sqrt(self.factor) * self.likelihood.fisher_root(outputs)


def is_likelihood(x: object) -> bool:
    """Whether this is one, not the class of one."""
    return isinstance(x, Likelihood) and not isinstance(x, type)


def unscaled(likelihood: Likelihood) -> tuple[Likelihood, float]:
    """The likelihood inside of any number of :class:`Scaled`, and the product of their factors."""
    factor = 1.0
    while isinstance(likelihood, Scaled):
        factor *= likelihood.factor
        likelihood = likelihood.likelihood
    return likelihood, factor


def _is_whole(targets: object) -> bool:
    """Whole numbers that can be looked at, since they are not on a device."""
    return isinstance(targets, np.ndarray) and np.issubdtype(targets.dtype, np.integer)


def _check_same_shape(name: str, outputs: jax.Array, targets: jax.Array) -> None:
    if targets.shape != outputs.shape:
        raise ValueError(
            f"targets of {name} must have the shape of the outputs, {outputs.shape}, "
            f"got {targets.shape}"
        )
