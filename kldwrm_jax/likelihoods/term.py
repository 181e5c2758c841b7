"""A likelihood on a batch: the loss, the divergence, and the cotangents that make the Fisher.

Where the batch is split over an axis of ``pmap`` or ``shard_map``, means are those of the whole
batch, and cotangents those of the part that is here, scaled for sums over all parts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.batch_axis import BatchAxis
from kldwrm_jax.likelihoods.families import Likelihood, Residuals, unscaled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LikelihoodTerm:
    """What a likelihood says of the outputs on a batch; everything is a mean over samples."""

    likelihood: Likelihood = dataclasses.field(metadata={"static": True})
    fisher: str = dataclasses.field(metadata={"static": True})  # "sampled", "empirical", "exact"
    targets: jax.Array | None  # the data's labels
    key: jax.Array | None  # for labels drawn from the model
    weights: jax.Array | None  # of the samples
    # The axes over which the batch is split.
    axis: BatchAxis = dataclasses.field(default=BatchAxis(), metadata={"static": True})
    # Its place among several terms, each of which draws labels of its own.
    place: int = dataclasses.field(default=0, metadata={"static": True})

    def loss(self, outputs: jax.Array) -> jax.Array:
        """Mean negative log-likelihood of the targets."""
        return self.axis.sum(self.loss_here(outputs))

    def loss_here(self, outputs: jax.Array) -> jax.Array:
        """This replica's part of the loss, which is their sum."""
        return self._total(outputs, self.losses(outputs))

    def losses(self, outputs: jax.Array) -> jax.Array:
        """Every sample's negative log-likelihood of its target."""
        return self._nll(outputs, self._needed_targets("loss", outputs))

    def divergence(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """Mean symmetric KL divergence."""
        return self.axis.sum(self.divergence_here(outputs1, outputs2))

    def divergence_here(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """This replica's part of the divergence, which is their sum."""
        return self._total(outputs1, self.likelihood.symmetric_kl(outputs1, outputs2))

    def shares(self, outputs: jax.Array) -> jax.Array:
        """Every sample's part of the mean."""
        return self._shares(self.sample_shape(outputs))

    def event_size(self, outputs: jax.Array | jax.ShapeDtypeStruct) -> int:
        """How many numbers the outputs have for one sample."""
        return math.prod(outputs.shape[outputs.ndim - self.likelihood.event_ndim :])

    def backward_passes(self, outputs: jax.Array) -> int:
        """How many backward passes the Fisher takes on outputs of this shape."""
        if self.fisher != "exact":
            return 1
        root = jax.eval_shape(self.likelihood.fisher_root, outputs)
        return root.shape[0] * self.positions(outputs)

    def samples(self, outputs: jax.Array) -> jax.Array:
        r"""How many samples the batch is worth: :math:`(\sum_n w_n)^2 / \sum_n w_n^2`."""
        return 1 / self.axis.sum(jnp.sum(self._shares(self.sample_shape(outputs)) ** 2))

    def positions(self, outputs: jax.Array) -> int:
        """The samples of one example, if their directions must be taken one by one."""
        return math.prod(self.sample_shape(outputs)[1:]) if self.fisher == "exact" else 1

    def directions(self, outputs: jax.Array, mixing: Sequence[str]) -> tuple[jax.Array, float]:
        """Cotangents, stacked in front, whose outer products sum to the outputs' Fisher / scale.

        Args:
          outputs: the network's.
          mixing: the layers in which examples depend on each other.

        Returns:
          The cotangents and the scale.
        """
        if self.fisher == "empirical" and self.weights is None:
            # With equal shares, 1 / n times the Fisher is made of the loss's own cotangent: where
            # statistics are collected on every step, XLA does one backward pass for both.
            self._needed_targets("fisher='empirical'", outputs)
            scale = math.prod(self.sample_shape(outputs)) * self.axis.size
            return jax.grad(self.loss_here)(outputs)[None], scale / self._factor
        if self.fisher == "exact":
            if mixing:
                raise ValueError(
                    f"fisher='exact' needs examples that do not depend on each other, and they do "
                    f"in {', '.join(map(repr, mixing))}, which normalises over the batch: "
                    f"use fisher='sampled', or evaluate it with use_running_average=True"
                )
            return self.fisher_root(outputs), 1.0
        if self.fisher == "empirical":
            targets = self._needed_targets("fisher='empirical'", outputs)
        elif self._own_key is None:
            raise ValueError(
                "fisher='sampled' draws labels from the model and needs a key: "
                "net.oracle(params, ..., key=key)"
            )
        else:
            targets = self.likelihood.sample(self.axis.fold_in(self._own_key), outputs)
        targets = jax.lax.stop_gradient(targets)
        # The Fisher has the factor once, its scores twice.
        root = jnp.sqrt(self._shares(self.sample_shape(outputs)) / self._factor)
        gradient = jax.grad(lambda h: jnp.sum(self._nll(h, targets) * root))(outputs)
        return gradient[None], 1.0

    def fisher_root(self, outputs: jax.Array) -> jax.Array:
        """Columns, stacked in front, whose outer products sum to the outputs' exact Fisher."""
        root = jnp.sqrt(self._shares(self.sample_shape(outputs)))
        return self.likelihood.fisher_root(outputs) * self._per_event(root)

    def random_signs(self, directions: jax.Array) -> jax.Array:
        """Signs, one per sample: the square of a sum is the sum of squares in expectation."""
        own = self._own_key
        key = jax.random.key(0) if own is None else jax.random.fold_in(own, 1)
        samples = self.sample_shape(directions)
        signs = jax.random.rademacher(self.axis.fold_in(key), samples, directions.dtype)
        return self._per_event(signs)

    @property
    def _factor(self) -> float:
        """By which the likelihood is scaled."""
        return unscaled(self.likelihood)[1]

    @property
    def _own_key(self) -> jax.Array | None:
        if self.key is None or self.place == 0:
            return self.key
        return jax.random.fold_in(self.key, 1 + self.place)

    def _nll(self, outputs: jax.Array, targets: Any) -> jax.Array:
        samples, nll = self.sample_shape(outputs), self.likelihood.nll(outputs, targets)
        if nll.shape != samples:
            raise ValueError(
                f"nll of {self.likelihood!r} must have the shape of its outputs, {outputs.shape}, "
                f"without event_ndim={self.likelihood.event_ndim} axes, got {nll.shape} with "
                f"targets of shape {jnp.shape(targets)}"
            )
        return nll

    def _total(self, outputs: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.sum(values * self._shares(self.sample_shape(outputs)))

    def sample_shape(self, outputs: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """The outputs' axes before the likelihood's event axes."""
        event = self.likelihood.event_ndim
        # Where the number of event axes is the user's to choose, outputs (N,) are one event to the
        # likelihood and N examples to the user: loss and curvature would be N times too large.
        if outputs.ndim < event or (outputs.ndim == event and _chooses_event(self.likelihood)):
            raise ValueError(
                f"outputs of {self.likelihood!r} must have an axis of examples before the event "
                f"axes, of which it has {event}, got shape {outputs.shape}. For one value per "
                f"example say event_ndim=0, as in kldwrm_jax.Gaussian(event_ndim=0), or give the "
                f"outputs a last axis of length one; if they are those of one example, give the "
                f"batch a first axis of length one"
            )
        return outputs.shape[: outputs.ndim - event]

    def _per_event(self, per_sample: jax.Array) -> jax.Array:
        return per_sample.reshape(per_sample.shape + (1,) * self.likelihood.event_ndim)

    def _shares(self, samples: tuple[int, ...]) -> jax.Array:
        """Each sample's part of the mean, ``w_n / W``, over all replicas."""
        if 0 in samples:
            raise ValueError(f"the batch is empty: the outputs are samples of shape {samples}")
        if self.weights is None:
            return jnp.full(samples, 1 / (math.prod(samples) * self.axis.size))
        if self.weights.shape != samples:
            raise ValueError(
                f"weights must have the shape of the outputs without the likelihood's event axes, "
                f"{samples}, got {self.weights.shape}"
            )
        # Root shares enter the statistics. Traced weights cannot be checked: the loss shows it.
        shares = self.weights / self.axis.sum(self.weights.sum())
        return jnp.where((self.weights < 0).any(), jnp.nan, shares)

    @property
    def has_loss(self) -> bool:
        """Whether the targets are known; those of residuals are zero."""
        return self.targets is not None or self._is_residual

    @property
    def _is_residual(self) -> bool:
        return isinstance(unscaled(self.likelihood)[0], Residuals)

    def _needed_targets(self, what: str, outputs: jax.Array) -> Any:
        if self._is_residual:
            if self.targets is not None:
                raise ValueError(
                    f"{self.likelihood!r} takes no targets: residuals are driven to zero. Leave "
                    f"targets out, or give None for this term; kldwrm_jax.Gaussian() takes targets"
                )
            return None
        if self.targets is None:
            raise ValueError(f"{what} needs targets: net.oracle(params, ..., targets=y)")
        _check_no_broadcast(self.likelihood, outputs, self.targets)
        return self.targets


def _chooses_event(likelihood: Any) -> bool:
    """Whether the number of event axes is an argument of the likelihood."""
    likelihood, _ = unscaled(likelihood)
    fields = dataclasses.fields(likelihood) if dataclasses.is_dataclass(likelihood) else ()
    return "event_ndim" in {field.name for field in fields}


def _check_no_broadcast(likelihood: Likelihood, outputs: jax.Array, targets: Any) -> None:
    """An error for targets (N,) where those of the likelihood are (N, 1), and the like.

    An ``nll`` that does not look would compare each example with the targets of all.
    """
    got, whole = jnp.shape(targets), outputs.shape
    if got == whole or 1 not in (*got, *whole):
        return
    try:
        wanted = jax.eval_shape(likelihood.sample, jax.random.key(0), outputs).shape
    except NotImplementedError:
        return
    if got != wanted and [n for n in got if n != 1] == [n for n in wanted if n != 1]:
        raise ValueError(
            f"targets of {likelihood!r} must have shape {wanted} for outputs of shape {whole}, got "
            f"{got}: use targets.reshape({wanted})"
        )
