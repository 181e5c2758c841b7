"""Two curvature blocks made by hand, one of each kind, and the plain matrix they stand for."""

import dense
import jax
import numpy as np
import scipy.linalg

from kldwrm_jax.curvature import Diagonal, Kronecker, LayerBlock, Layers, Parameter
from kldwrm_jax.curvature.parameters import MatrixView

SHAPES = {"dense/kernel": (3, 2), "dense/bias": (2,), "scale": (4,)}
LAYERS = Layers(
    (
        LayerBlock(
            "dense",
            "Dense",
            Kronecker(),
            (
                Parameter("dense/kernel", (3, 2), view=MatrixView((3, 2), (), (0,), (1,))),
                Parameter("dense/bias", (2,), view=MatrixView((2,), (), (), (0,))),
            ),
            ((4, 4), (2, 2)),
        ),
        LayerBlock("scale", "LayerNorm", Diagonal(), (Parameter("scale", (4,)),), ((4,),)),
    )
)
BLOCKS = [*LAYERS]


def random_leaves(rng):
    return {path: rng.normal(size=shape) for path, shape in SHAPES.items()}


def random_factors(rng):
    return {"dense": (dense.spd(rng, 4), dense.spd(rng, 2)), "scale": rng.uniform(0.2, 2, size=4)}


def vector(leaves):
    """``[kernel; bias]`` row by row, then the scale."""
    return np.concatenate([np.ravel(leaves[path]) for path in SHAPES])


def matrix(factors):
    """Block by block, on such vectors."""
    factors = jax.tree.map(np.asarray, factors)
    return scipy.linalg.block_diag(*(dense.matrix(b.block, factors[b.name]) for b in BLOCKS))


def damped(factors, gamma, mode="product"):
    """The damped matrix, ``mode`` being ``"product"`` or ``"factored"``."""
    factors = jax.tree.map(np.asarray, factors)
    return scipy.linalg.block_diag(
        *(dense.damped(b.block, factors[b.name], gamma, mode) for b in BLOCKS)
    )
