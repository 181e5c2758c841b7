"""Curvature: what a block is, how it is averaged, inverted and multiplied. Knows no Flax."""

from kldwrm_jax.curvature.blocks import Block, Dense, Diagonal, Kronecker, average
from kldwrm_jax.curvature.decompositions import decompose
from kldwrm_jax.curvature.devices import Devices
from kldwrm_jax.curvature.layers import LayerBlock, Layers, Parameter, per_block
from kldwrm_jax.curvature.monitors import AveragingError, averaging_error, contraction
from kldwrm_jax.curvature.outliers import sift
from kldwrm_jax.curvature.sides import LowRank
from kldwrm_jax.curvature.solvers import (
    Damping,
    Exact,
    Factored,
    Linear,
    Operator,
    Product,
    QuadraticSolver,
    Reweighted,
    Setting,
    Solver,
)

__all__ = [
    "AveragingError",
    "Block",
    "Damping",
    "Dense",
    "Devices",
    "Diagonal",
    "Exact",
    "Factored",
    "Kronecker",
    "LayerBlock",
    "Layers",
    "Linear",
    "LowRank",
    "Operator",
    "Parameter",
    "Product",
    "QuadraticSolver",
    "Reweighted",
    "Setting",
    "Solver",
    "average",
    "averaging_error",
    "contraction",
    "decompose",
    "per_block",
    "sift",
]
