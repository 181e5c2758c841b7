"""The likelihoods of a model with several outputs: losses, Fishers and divergences are sums.

Every term is a mean over its own samples, of which each may have another number.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import check_all_non_negative
from kldwrm_jax.batch_axis import BatchAxis
from kldwrm_jax.likelihoods.families import Likelihood, is_likelihood
from kldwrm_jax.likelihoods.term import LikelihoodTerm

# A PyTreeDef of the likelihoods, and so of outputs, targets and weights.
Structure: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LikelihoodTerms:
    """What the likelihoods of all terms say of the outputs; a single one is a tree of one leaf."""

    each: tuple[LikelihoodTerm, ...]
    structure: Structure = dataclasses.field(metadata={"static": True})

    @property
    def axis(self) -> BatchAxis:
        """The axes over which the batch is split."""
        return self.each[0].axis

    @property
    def targets(self) -> list[Any]:
        """Of every term."""
        return [term.targets for term in self.each]

    @property
    def weights(self) -> list[jax.Array | None]:
        """Of every term."""
        return [term.weights for term in self.each]

    def by_term(self, outputs: Any) -> list[tuple[LikelihoodTerm, Any]]:
        """Every term with its own outputs."""
        return list(zip(self.each, self.structure.flatten_up_to(outputs), strict=True))

    @property
    def have_loss(self) -> bool:
        """Whether the targets of all terms are known."""
        return all(term.has_loss for term in self.each)

    def loss(self, outputs: Any) -> jax.Array:
        """The sum of the terms' mean negative log-likelihoods."""
        return self.axis.sum(self.loss_here(outputs))

    def loss_here(self, outputs: Any) -> jax.Array:
        """This replica's part of the loss, which is their sum."""
        return _sum([term.loss_here(own) for term, own in self.by_term(outputs)])

    def divergence(self, outputs1: Any, outputs2: Any) -> jax.Array:
        """The sum of the terms' mean symmetric KL divergences."""
        return self.axis.sum(self.divergence_here(outputs1, outputs2))

    def divergence_here(self, outputs1: Any, outputs2: Any) -> jax.Array:
        """This replica's part of the divergence, which is their sum."""
        others = self.structure.flatten_up_to(outputs2)
        pairs = zip(self.by_term(outputs1), others, strict=True)
        return _sum([term.divergence_here(one, two) for (term, one), two in pairs])

    def event_size(self, outputs: Any) -> int:
        """How many numbers the outputs have for one sample of every term."""
        return sum(term.event_size(own) for term, own in self.by_term(outputs))

    def samples(self, outputs: Any) -> jax.Array:
        """How many samples the batch is worth: those of the term that has the fewest."""
        counts = [term.samples(own) for term, own in self.by_term(outputs)]
        return jnp.stack(counts).min()

    def sample_shapes(self, outputs: Any) -> list[tuple[int, ...]]:
        """The axes of every term's outputs before the event's."""
        return [term.sample_shape(own) for term, own in self.by_term(outputs)]


def likelihood_leaves(likelihood: Any) -> tuple[list[Likelihood], Structure]:
    """The likelihoods of a tree, or of a single one, and its structure."""
    leaves, structure = jax.tree.flatten(likelihood, is_leaf=lambda x: isinstance(x, Likelihood))
    if not leaves or not all(map(is_likelihood, leaves)):
        raise ValueError(
            f"likelihood must implement kldwrm_jax.Likelihood, as kldwrm_jax.Categorical() does, "
            f"or be a tree of such, as {{'policy': kldwrm_jax.Categorical(), 'value': "
            f"kldwrm_jax.Gaussian()}}, got {likelihood!r}"
        )
    return leaves, structure


def make_terms(
    likelihood: Any,
    fisher: str,
    targets: Any,
    key: jax.Array | None,
    weights: Any,
    axis: BatchAxis,
) -> LikelihoodTerms:
    """The terms of a likelihood, or of a tree of them, on a batch."""
    leaves, structure = likelihood_leaves(likelihood)
    of_target, of_weight = (
        _by_leaf(structure, name, given)
        for name, given in (("targets", targets), ("weights", weights))
    )
    weights = [None if w is None else jnp.asarray(w, float) for w in of_weight]
    for own in weights:
        if own is not None:
            check_all_non_negative("weights", own)
    each = [
        LikelihoodTerm(own, fisher, y, key, w, axis, place)
        for place, (own, y, w) in enumerate(zip(leaves, of_target, weights, strict=True))
    ]
    return LikelihoodTerms(tuple(each), structure)


def _by_leaf(structure: Structure, name: str, given: Any) -> list[Any]:
    if given is None:
        return [None] * structure.num_leaves
    try:
        return structure.flatten_up_to(given)
    except ValueError as error:
        example = jax.tree.unflatten(structure, [name[0]] * structure.num_leaves)
        raise ValueError(
            f"{name} must have the structure of the likelihoods, {example}, with None for a term "
            f"that has none, got {jax.tree.map(jnp.shape, given)} ({error})"
        ) from error


def _sum(values: list[jax.Array]) -> jax.Array:
    return sum(values[1:], start=values[0])
