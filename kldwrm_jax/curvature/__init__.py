"""Curvature: what a block is, how it is averaged, inverted and multiplied. Knows no Flax."""

from kldwrm_jax.curvature.averaging import (
    AveragedFisher,
    Averages,
    CachedInverse,
    Refreshed,
    unchanged,
)
from kldwrm_jax.curvature.blocks import Block, Diagonal, Kronecker, average
from kldwrm_jax.curvature.decompositions import decompose
from kldwrm_jax.curvature.dense import Dense
from kldwrm_jax.curvature.devices import Devices
from kldwrm_jax.curvature.inverse import Inverse
from kldwrm_jax.curvature.layers import LayerBlock, Layers, per_block
from kldwrm_jax.curvature.monitors import AveragingError, averaging_error, contraction
from kldwrm_jax.curvature.outliers import judge_outlier, traces
from kldwrm_jax.curvature.parameters import Parameter
from kldwrm_jax.curvature.sides import LowRank
from kldwrm_jax.curvature.solvers import (
    DampingMode,
    ExactSolver,
    FactoredDamping,
    LinearSolver,
    Operator,
    ProductDamping,
    QuadraticSolver,
    ReweightedSolver,
    Solver,
    StepScalars,
)

__all__ = [
    "AveragedFisher",
    "Averages",
    "AveragingError",
    "Block",
    "CachedInverse",
    "DampingMode",
    "Dense",
    "Devices",
    "Diagonal",
    "ExactSolver",
    "FactoredDamping",
    "Inverse",
    "Kronecker",
    "LayerBlock",
    "Layers",
    "LinearSolver",
    "LowRank",
    "Operator",
    "Parameter",
    "ProductDamping",
    "QuadraticSolver",
    "Refreshed",
    "ReweightedSolver",
    "Solver",
    "StepScalars",
    "average",
    "averaging_error",
    "contraction",
    "decompose",
    "judge_outlier",
    "per_block",
    "traces",
    "unchanged",
]
