"""The oracle: a batch's curvature, outputs and divergences, computed when asked for."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.linen import LinenModel, Watch
from kldwrm_jax.capture.statistics import Probes
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.likelihoods import Likelihood
from kldwrm_jax.paths import leaves_by_path, replace_leaves

_DIRECTIONS_AT_ONCE = 16


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """A batch bound to parameters. A pytree: it crosses ``jit``, ``scan`` and ``vmap`` as it is.

    Made by ``net.oracle(...)``; nothing is computed before one of its methods is called, so that a
    step without a refresh pays nothing for it.
    """

    model: LinenModel
    likelihood: Likelihood
    fisher: str
    params: Any
    call: Call
    targets: jax.Array | None
    key: jax.Array | None
    weights: jax.Array | None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Parameters, batch and keys are leaves; the model is structure."""
        children = (self.params, self.call, self.targets, self.key, self.weights)
        return children, (self.model, self.likelihood, self.fisher)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> "Oracle":
        """The oracle again, whatever its leaves have become."""
        return cls(*aux, *children)

    def factors(self) -> dict[str, Factors]:
        r"""Every block's curvature on this batch.

        Returns:
          ``{"path/to/layer": (A, G)}``, scaled so that ``kron(A, G)`` is the layer's K-FAC block of
          the Fisher of the mean loss, for the row-major flattening of ``[W; b]``; one array, shaped
          like its parameter, for a diagonal block.
        """
        watches: list[Watch] = []

        def run(probes: dict[str, Probes], uncovered: dict[str, jax.Array]) -> jax.Array:
            params = replace_leaves(self.params, uncovered)
            outputs, watch = self.model.observed_outputs(params, self.call, self.weights, probes)
            watches.append(watch)
            return outputs

        leaves = leaves_by_path(self.params)
        uncovered = {path: leaves[path] for path in self.model.uncovered}
        outputs, vjp = jax.vjp(run, self.model.probes(), uncovered)
        self.model.check_reached(self.params, self.call, watches[-1])
        columns = self._columns(outputs, watches[-1])
        seen = _sum_over_directions(lambda c: vjp(c)[0], columns, self._positions(outputs))
        made: dict[str, Factors] = {}
        for site in self.model.sites:
            made |= site.factors(seen[site.name])
        if uncovered:
            _, gradients = vjp(jnp.sum(self._signs(columns) * columns, axis=0))
            made |= {path: g.astype(float) ** 2 for path, g in gradients.items()}
        return {block.name: made[block.name] for block in self.model.layers}

    def outputs(self, params: Any) -> jax.Array:
        """The network's outputs on this batch, with the same dropout masks, at other parameters."""
        return self.model.outputs(params, self.call)

    def loss(self, params: Any) -> jax.Array:
        """Mean negative log-likelihood of the targets at other parameters."""
        nll = self.likelihood.nll(self.outputs(params), self._needed_targets("loss"))
        return jnp.sum(nll * self._shares(nll.shape))

    def divergence(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """Mean symmetric KL divergence between two networks' outputs on this batch."""
        kl = self.likelihood.symmetric_kl(outputs1, outputs2)
        return jnp.sum(kl * self._shares(kl.shape))

    def _columns(self, outputs: jax.Array, watch: Watch) -> jax.Array:
        """Cotangents whose outer products sum to the outputs' Fisher, stacked in front."""
        scale = jnp.sqrt(self._shares(self._samples(outputs)))
        if self.fisher == "exact":
            mixing = self.model.mixing_layers(watch)
            if mixing:
                raise ValueError(
                    f"fisher='exact' needs examples that do not depend on each other, and they do "
                    f"in {', '.join(map(repr, mixing))}, which normalises over the batch: "
                    f"use fisher='sampled', or evaluate it with use_running_average=True"
                )
            root = self.likelihood.fisher_root(outputs)
            return root * scale.reshape(scale.shape + (1,) * self.likelihood.event_ndim)
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
        return jax.grad(lambda h: jnp.sum(self.likelihood.nll(h, targets) * scale))(outputs)[None]

    def _positions(self, outputs: jax.Array) -> int:
        """Samples of one example, whose directions must be taken one by one to be exact."""
        return math.prod(self._samples(outputs)[1:]) if self.fisher == "exact" else 1

    def _signs(self, columns: jax.Array) -> jax.Array:
        """Random signs, so that the square of a sum is the sum of squares in expectation."""
        key = jax.random.key(0) if self.key is None else jax.random.fold_in(self.key, 1)
        samples = columns.shape[: columns.ndim - self.likelihood.event_ndim]
        signs = jax.random.rademacher(key, samples, columns.dtype)
        return signs.reshape(samples + (1,) * self.likelihood.event_ndim)

    def _samples(self, outputs: jax.Array) -> tuple[int, ...]:
        return outputs.shape[: outputs.ndim - self.likelihood.event_ndim]

    def _shares(self, samples: tuple[int, ...]) -> jax.Array:
        """Each sample's part of the mean."""
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


def _sum_over_directions(
    statistics: Callable[[jax.Array], Any], columns: jax.Array, positions: int
) -> Any:
    """Statistics of every column at every position of its examples, summed, a few at a time."""
    total = columns.shape[0] * positions
    if total == 1:
        return statistics(columns[0])
    shape = columns.shape
    split = columns.reshape(shape[0], shape[1] if positions > 1 else 1, positions, -1)

    def direction(i: jax.Array) -> jax.Array:
        here = (jnp.arange(positions) == i % positions)[:, None] & (i < total)
        return jnp.where(here, split[i // positions], 0).reshape(shape[1:])

    at_once = min(total, _DIRECTIONS_AT_ONCE)
    rounds = -(-total // at_once)

    def add(carried: Any, indices: jax.Array) -> tuple[Any, None]:
        new = jax.vmap(lambda i: statistics(direction(i)))(indices)
        return jax.tree.map(lambda old, x: old + x.sum(axis=0), carried, new), None

    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(statistics, columns[0])
    )
    indices = jnp.arange(rounds * at_once).reshape(rounds, at_once)
    return jax.lax.scan(add, zeros, indices)[0]
