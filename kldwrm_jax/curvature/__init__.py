"""Curvature: what a block is, how it is averaged, inverted and multiplied. Knows no Flax."""

from kldwrm_jax.curvature.blocks import Block, Dense, Diagonal, Kronecker, average
from kldwrm_jax.curvature.layers import LayerBlock, Layers, Parameter, per_block
from kldwrm_jax.curvature.monitors import AveragingError, averaging_error, contraction
from kldwrm_jax.curvature.solvers import (
    Damping,
    Exact,
    Factored,
    Linear,
    Operator,
    Product,
    Reweighted,
    Setting,
    Solver,
)

__all__ = [
    "AveragingError",
    "Block",
    "Damping",
    "Dense",
    "Diagonal",
    "Exact",
    "Factored",
    "Kronecker",
    "LayerBlock",
    "Layers",
    "Linear",
    "Operator",
    "Parameter",
    "Product",
    "Reweighted",
    "Setting",
    "Solver",
    "average",
    "averaging_error",
    "contraction",
    "per_block",
]
