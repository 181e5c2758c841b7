"""Dense structures: the exact Fisher of each layer, or of the whole network, as one matrix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.captured_layer import Bases
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.capture.sample_space import MOST_BYTES, Purpose, sample_space
from kldwrm_jax.curvature import Dense, LayerBlock, Layers, Parameter
from kldwrm_jax.curvature.blocks import Factors


def with_dense_blocks(model: Model, structure: str) -> Model:
    """The model with dense blocks for all that the likelihood sees.

    Args:
      model: with Kronecker blocks.
      structure: ``"layer"``, where a parameter without a layer has a block for itself, or
        ``"network"``.
    """
    seen = [block for block in model.layers if not block.unseen]
    unseen = [block for block in model.layers if block.unseen]
    blocks = _by_layer(model, seen) if structure == "layer" else [_of_network(seen)]
    _check_memory(blocks, structure)
    purpose = Purpose(
        name=f"structure={structure!r}",
        instead="structure='kronecker'",
        smaller="net.oracle(..., micro_batches=n)",
        solves=False,
    )

    def measure(oracle: Oracle, bases: Bases) -> dict[str, Factors]:
        if bases:
            raise ValueError(
                f"bases are for the two sides of a Kronecker product, and structure={structure!r} "
                f"has none, got bases for {', '.join(map(repr, bases))}: leave them out, or use "
                f"instrument(..., structure='kronecker')"
            )
        paths = [p.path for block in blocks for p in block.parameters]
        rows = sample_space(_as_called(oracle), paths, purpose).rows
        return {own.name: Dense().statistics(own.parameters, rows) for own in blocks}

    return dataclasses.replace(
        model, layers=Layers((*blocks, *unseen)), uncovered=(), measure=measure
    )


def _of_network(seen: Sequence[LayerBlock]) -> LayerBlock:
    parameters = [Parameter(p.path, p.shape) for block in seen for p in block.parameters]
    return _block("network", "all layers", parameters)


def _by_layer(model: Model, seen: Sequence[LayerBlock]) -> list[LayerBlock]:
    layers = [
        _block(own.name, own.blocks[0].kind, [p for b in own.blocks for p in b.parameters])
        for own in model.captured
    ]
    alone = [_block(b.name, b.kind, b.parameters) for b in seen if b.name in model.uncovered]
    return [*layers, *alone]


def _block(name: str, kind: str, parameters: Sequence[Parameter]) -> LayerBlock:
    n = sum(p.slice_size for p in parameters)
    return LayerBlock(name, kind, Dense(), tuple(parameters), ((*parameters[0].stacked, n, n),))


def _as_called(oracle: Oracle) -> Oracle:
    """The oracle, whose model knows the layers in which this call's examples are mixed."""
    mixing = list[tuple[str, ...]]()

    def run(params: Any, call: Any) -> None:
        record = oracle.model.observed_outputs(params, call, oracle.model.probes())[1]
        mixing.extend(record.mixing)

    jax.eval_shape(run, oracle.params, oracle.call)
    both = tuple(dict.fromkeys((*mixing, *oracle.model.mixing)))
    return dataclasses.replace(oracle, model=dataclasses.replace(oracle.model, mixing=both))


def _check_memory(blocks: Sequence[LayerBlock], structure: str) -> None:
    """An error before matrices are made that would not fit."""
    itemsize = jnp.zeros((), float).dtype.itemsize
    needed = 2 * itemsize * sum(block.factor_size for block in blocks)
    if needed > MOST_BYTES:
        largest = max(blocks, key=lambda block: block.factor_size)
        smaller = "structure='layer', or " if structure == "network" else ""
        raise ValueError(
            f"structure={structure!r} makes dense blocks, of which the largest, {largest.name!r}, "
            f"is a matrix of {largest.shapes[0][-1]:,} rows and columns: {needed / 2**30:.1f} GiB "
            f"for all averages and their inverses, and kldwrm_jax makes none above "
            f"{MOST_BYTES / 2**30:.0f}: use {smaller}structure='kronecker'"
        )
