"""The oracle: a batch's curvature, outputs and divergences, computed when asked for."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.watch import Watch
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.likelihoods import Likelihood
from kldwrm_jax.paths import leaves_by_path, replace_leaves

_DIRECTIONS_AT_ONCE = 16


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass with probes, whose backward passes give gradients and statistics.

    Args:
      outputs: the network's.
      vjp: from their cotangent to those of probes and parameters; its leaves are the residuals.
      variables: the other collections after the pass.
      loss_cotangent: the loss's gradient in the outputs, if it was asked for.
      mixing: layers in which examples depend on each other.
    """

    outputs: jax.Array
    vjp: Callable[[jax.Array], tuple[dict[str, Probes], dict[str, jax.Array]]]
    variables: dict[str, Any]
    loss_cotangent: jax.Array | None
    mixing: tuple[str, ...]

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Arrays are leaves."""
        return (self.outputs, self.vjp, self.variables, self.loss_cotangent), (self.mixing,)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> "Pass":
        """The pass again, whatever its leaves have become."""
        return cls(*children, *aux)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """A batch bound to parameters. A pytree: it crosses ``jit``, ``scan`` and ``vmap`` as it is.

    Made by ``net.oracle(...)``; nothing is computed before one of its methods is called, so that a
    step without a refresh pays nothing for it. Made by ``net.value_and_grad(...)``, it has done its
    forward pass, and a refresh needs a backward pass only.
    """

    model: Model
    likelihood: Likelihood
    fisher: str
    params: Any
    call: Call
    targets: jax.Array | None
    key: jax.Array | None
    weights: jax.Array | None
    done: Pass | None = None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Parameters, batch and keys are leaves; the model is structure."""
        children = (self.params, self.call, self.targets, self.key, self.weights, self.done)
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
        done = self._pass(self.model.uncovered) if self.done is None else self.done
        columns, scale = self._columns(done)
        positions = self._positions(done.outputs)
        seen = _sum_over_directions(lambda c: done.vjp(c)[0], columns, positions)
        made: dict[str, Factors] = {}
        for site in self.model.found.sites:
            made |= site.factors(seen[site.name], scale)
        if self.model.uncovered:
            _, gradients = done.vjp(jnp.sum(self._signs(columns) * columns, axis=0))
            for path in self.model.uncovered:
                made[path] = scale * gradients[path].astype(float) ** 2
        return {block.name: made[block.name] for block in self.model.layers}

    def value_and_grad(self) -> tuple[jax.Array, Any, "Oracle"]:
        """Loss and gradient at the oracle's parameters, and the oracle with this pass done."""
        done = self._pass(list(leaves_by_path(self.params)))
        loss, cotangent = jax.value_and_grad(self._loss)(done.outputs)
        _, gradients = done.vjp(cotangent)
        done = dataclasses.replace(done, loss_cotangent=cotangent)
        return loss, replace_leaves(self.params, gradients), dataclasses.replace(self, done=done)

    @property
    def variables(self) -> dict[str, Any]:
        """The collections given as ``variables``, such as ``batch_stats``, after the pass."""
        if self.done is None:
            raise ValueError(
                "an oracle made by net.oracle(...) has done no pass yet: make it by "
                "net.value_and_grad(...), or take the updated variables from your own loss"
            )
        return self.done.variables

    def outputs(self, params: Any) -> jax.Array:
        """The network's outputs on this batch, with the same dropout masks, at other parameters."""
        return self.model.outputs(params, self.call)

    def loss(self, params: Any) -> jax.Array:
        """Mean negative log-likelihood of the targets at other parameters."""
        return self._loss(self.outputs(params))

    def divergence(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """Mean symmetric KL divergence between two networks' outputs on this batch."""
        kl = self.likelihood.symmetric_kl(outputs1, outputs2)
        return jnp.sum(kl * self._shares(kl.shape))

    def quadratic(self, step: Any) -> jax.Array:
        r""":math:`\frac12 s'F s`: the divergence of a step to second order.

        ``F`` is the whole network's Fisher on this batch at the oracle's parameters, exactly: one
        JVP, and the second derivative of the divergence along it.

        Args:
          step: of the parameters' structure; what is masked in it does not move.
        """
        own = leaves_by_path(step)
        tangent = replace_leaves(
            jax.tree.map(jnp.zeros_like, self.params),
            {
                path: own[path].astype(p.dtype)
                for path, p in leaves_by_path(self.params).items()
                if path in own
            },
        )
        outputs, change = jax.jvp(self.outputs, (self.params,), (tangent,))
        one = jnp.ones((), outputs.dtype)

        def divergence_at(t: jax.Array) -> jax.Array:
            return self.divergence(outputs, outputs + t * change)

        def slope(t: jax.Array) -> jax.Array:
            return jax.jvp(divergence_at, (t,), (one,))[1]

        return 0.5 * jax.jvp(slope, (jnp.zeros_like(one),), (one,))[1]

    def _loss(self, outputs: jax.Array) -> jax.Array:
        nll = self.likelihood.nll(outputs, self._needed_targets("loss"))
        return jnp.sum(nll * self._shares(nll.shape))

    def _pass(self, paths: Sequence[str]) -> Pass:
        """A pass that is differentiable in the probes and in the parameters at ``paths``."""
        watches: list[Watch] = []

        def run(
            probes: dict[str, Probes], chosen: dict[str, jax.Array]
        ) -> tuple[jax.Array, dict[str, Any]]:
            params = replace_leaves(self.params, chosen)
            outputs, variables, watch = self.model.observed_outputs(
                params, self.call, self.weights, probes
            )
            watches.append(watch)
            return outputs, variables

        leaves = leaves_by_path(self.params)
        chosen = {path: leaves[path] for path in paths}
        outputs, vjp, variables = jax.vjp(run, self.model.probes(), chosen, has_aux=True)
        self.model.check_reached(self.params, self.call, watches[-1])
        return Pass(outputs, vjp, variables, None, tuple(self.model.mixing_layers(watches[-1])))

    def _columns(self, done: Pass) -> tuple[jax.Array, float]:
        """Cotangents, stacked in front, and a number.

        Their outer products sum to the outputs' Fisher over the number. It is not 1 for the data's
        labels and equal shares, where the cotangent is the loss's own: XLA does its backward pass
        once, if gradient and statistics are both due.
        """
        if self.fisher == "empirical" and done.loss_cotangent is not None and self.weights is None:
            return done.loss_cotangent[None], math.prod(self._samples(done.outputs))
        outputs = done.outputs
        scale = jnp.sqrt(self._shares(self._samples(outputs)))
        if self.fisher == "exact":
            if done.mixing:
                raise ValueError(
                    f"fisher='exact' needs examples that do not depend on each other, and they do "
                    f"in {', '.join(map(repr, done.mixing))}, which normalises over the batch: "
                    f"use fisher='sampled', or evaluate it with use_running_average=True"
                )
            return self.likelihood.fisher_root(outputs) * self._per_event(scale), 1.0
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
        gradient = jax.grad(lambda h: jnp.sum(self.likelihood.nll(h, targets) * scale))(outputs)
        return gradient[None], 1.0

    def _per_event(self, samples: jax.Array) -> jax.Array:
        """A number for every sample, to multiply whole events."""
        return samples.reshape(samples.shape + (1,) * self.likelihood.event_ndim)

    def _positions(self, outputs: jax.Array) -> int:
        """Samples of one example, whose directions must be taken one by one to be exact."""
        return math.prod(self._samples(outputs)[1:]) if self.fisher == "exact" else 1

    def _signs(self, columns: jax.Array) -> jax.Array:
        """Random signs, so that the square of a sum is the sum of squares in expectation."""
        key = jax.random.key(0) if self.key is None else jax.random.fold_in(self.key, 1)
        samples = columns.shape[: columns.ndim - self.likelihood.event_ndim]
        return self._per_event(jax.random.rademacher(key, samples, columns.dtype))

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
