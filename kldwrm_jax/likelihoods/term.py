"""A likelihood on a batch: the loss, the divergence, and the cotangents that make the Fisher."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.likelihoods.families import Likelihood


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LikelihoodTerm:
    """What a likelihood says of the outputs on a batch; everything is a mean over samples."""

    likelihood: Likelihood = dataclasses.field(metadata={"static": True})
    fisher: str = dataclasses.field(metadata={"static": True})  # "sampled", "empirical", "exact"
    targets: jax.Array | None  # the data's labels
    key: jax.Array | None  # for labels drawn from the model
    weights: jax.Array | None  # of the samples

    def loss(self, outputs: jax.Array) -> jax.Array:
        """Mean negative log-likelihood of the targets."""
        nll = self.likelihood.nll(outputs, self._needed_targets("loss"))
        return jnp.sum(nll * self._shares(nll.shape))

    def divergence(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """Mean symmetric KL divergence."""
        kl = self.likelihood.symmetric_kl(outputs1, outputs2)
        return jnp.sum(kl * self._shares(kl.shape))

    def backward_passes(self, outputs: jax.Array) -> int:
        """How many backward passes the Fisher takes on outputs of this shape."""
        if self.fisher != "exact":
            return 1
        root = jax.eval_shape(self.likelihood.fisher_root, outputs)
        return root.shape[0] * self.positions(outputs)

    def positions(self, outputs: jax.Array) -> int:
        """The samples of one example, if their directions must be taken one by one."""
        return math.prod(self._samples(outputs)[1:]) if self.fisher == "exact" else 1

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
            self._needed_targets("fisher='empirical'")
            return jax.grad(self.loss)(outputs)[None], math.prod(self._samples(outputs))
        root = jnp.sqrt(self._shares(self._samples(outputs)))
        if self.fisher == "exact":
            if mixing:
                raise ValueError(
                    f"fisher='exact' needs examples that do not depend on each other, and they do "
                    f"in {', '.join(map(repr, mixing))}, which normalises over the batch: "
                    f"use fisher='sampled', or evaluate it with use_running_average=True"
                )
            return self.likelihood.fisher_root(outputs) * self._per_event(root), 1.0
        if self.fisher == "empirical":
            targets = self._needed_targets("fisher='empirical'")
        elif self.key is None:
            raise ValueError(
                "fisher='sampled' draws labels from the model and needs a key: "
                "net.oracle(params, ..., key=key)"
            )
        else:
            targets = self.likelihood.sample(self.key, outputs)
        targets = jax.lax.stop_gradient(targets)
        gradient = jax.grad(lambda h: jnp.sum(self.likelihood.nll(h, targets) * root))(outputs)
        return gradient[None], 1.0

    def random_signs(self, directions: jax.Array) -> jax.Array:
        """Signs, one per sample: the square of a sum is the sum of squares in expectation."""
        key = jax.random.key(0) if self.key is None else jax.random.fold_in(self.key, 1)
        samples = self._samples(directions)
        return self._per_event(jax.random.rademacher(key, samples, directions.dtype))

    def _samples(self, outputs: jax.Array) -> tuple[int, ...]:
        return outputs.shape[: outputs.ndim - self.likelihood.event_ndim]

    def _per_event(self, per_sample: jax.Array) -> jax.Array:
        return per_sample.reshape(per_sample.shape + (1,) * self.likelihood.event_ndim)

    def _shares(self, samples: tuple[int, ...]) -> jax.Array:
        """Each sample's part of the mean, ``w_n / W``."""
        if 0 in samples:
            raise ValueError(f"the batch is empty: the outputs are samples of shape {samples}")
        if self.weights is None:
            return jnp.full(samples, 1 / math.prod(samples))
        if self.weights.shape != samples:
            raise ValueError(
                f"weights must have the shape of the outputs without the likelihood's event axes, "
                f"{samples}, got {self.weights.shape}"
            )
        return self.weights / self.weights.sum()

    def _needed_targets(self, what: str) -> jax.Array:
        if self.targets is None:
            raise ValueError(f"{what} needs targets: net.oracle(params, ..., targets=y)")
        return self.targets
