"""A forward pass with probes, whose backward passes give gradients and statistics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.batch_axis import zeros
from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.canonical import canonical_convolutions
from kldwrm_jax.capture.captured_layer import NO_BASES, Bases
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.trace import Path, TraceRecord
from kldwrm_jax.curvature.layer_spec import Arrays
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves

_DIRECTIONS_AT_ONCE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """What a forward pass leaves behind."""

    outputs: jax.Array
    # From the outputs' cotangent to those of probes and parameters; its leaves are the residuals.
    vjp: Callable[[jax.Array], tuple[dict[Path, Arrays], Leaves]]
    # The layers in which examples depend on each other.
    mixing: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def statistics(self, directions: jax.Array, positions: int) -> dict[Path, Arrays]:
        """The statistics of cotangents, stacked in front, summed.

        Args:
          directions: cotangents of the outputs, ``(directions, *outputs)``.
          positions: the samples of one example (the outputs' axes after the first). Where this is
            not 1, each is a direction of its own.
        """
        vjp = canonical_convolutions(lambda direction: self.vjp(direction)[0])
        total = directions.shape[0] * positions
        if total == 1:
            return vjp(directions[0])
        shape = directions.shape
        split = directions.reshape(shape[0], shape[1] if positions > 1 else 1, positions, -1)

        def statistics(i: jax.Array) -> dict[Path, Arrays]:
            here = (jnp.arange(positions) == i % positions)[:, None] & (i < total)
            return vjp(jnp.where(here, split[i // positions], 0).reshape(shape[1:]))

        at_once = min(total, _DIRECTIONS_AT_ONCE)
        rounds = -(-total // at_once)

        def add(sums: dict[Path, Arrays], indices: jax.Array) -> tuple[dict[Path, Arrays], None]:
            new = jax.vmap(statistics)(indices)
            return jax.tree.map(lambda old, x: old + x.sum(axis=0), sums, new), None

        empty = zeros(jax.eval_shape(statistics, jnp.zeros((), int)))
        indices = jnp.arange(rounds * at_once).reshape(rounds, at_once)
        return jax.lax.scan(add, empty, indices)[0]


def run_forward(
    model: Model,
    params: Any,
    call: Call,
    paths: Sequence[str],
    probes: dict[Path, Arrays],
    weights: jax.Array | None,
    bases: Bases = NO_BASES,
) -> ForwardPass:
    """A pass that is differentiable in the probes and in the parameters at ``paths``."""
    records: list[TraceRecord] = []

    def run(probes: dict[Path, Arrays], chosen: Leaves) -> jax.Array:
        own = replace_leaves(params, chosen)
        outputs, record = model.observed_outputs(own, call, probes, weights, bases)
        records.append(record)
        return outputs

    leaves = leaves_by_path(params)
    chosen = {path: leaves[path] for path in paths}
    outputs, vjp = jax.vjp(run, probes, chosen)
    model.check_reached(params, call, records[-1])
    return ForwardPass(outputs, vjp, tuple(model.mixing_layers(records[-1])))
