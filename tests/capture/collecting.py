"""Statistics as cotangents of probes, and the same sums written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.capture.layer_call import Operands, Options, matrix_product
from kldwrm_jax.capture.observe import Collector, observe
from kldwrm_jax.curvature.parameters import MatrixView


def product(inputs=3, outputs=2, groups=None, biased=True, **options):
    """The description of a matrix product."""
    grouped, k = (groups,) if groups else (), int(bool(groups))
    shapes = {"kernel": (*grouped, inputs, outputs), "bias": (*grouped, outputs)}
    kernel = MatrixView(shapes["kernel"], tuple(range(k)), (k,), (k + 1,))
    bias = MatrixView(shapes["bias"], tuple(range(k)), (), (k,))
    shapes = shapes if biased else {"kernel": shapes["kernel"]}
    operands = Operands("Dense", None, shapes, Options(**options))
    return matrix_product(operands, kernel, bias).spec


def zeros(spec):
    """Probes."""
    return {name: jnp.zeros(shape) for name, shape in spec.probes.items()}


def observed(spec, z, a, probes, weights=None):
    constants = {} if weights is None else {"weights": weights}
    return observe(Collector(spec.statistic), z, a, probes, constants)


def collect(spec, a, g, weights=None, statistic=None):
    """What the probes of ``spec`` get when ``g`` is the cotangent of a layer's output."""
    z, constants = jnp.zeros_like(g), {} if weights is None else {"weights": weights}
    collector = Collector(statistic or spec.statistic)
    _, vjp = jax.vjp(lambda p: observe(collector, z, a, p, constants), zeros(spec))
    return vjp(g)[0]


def factors(spec, collected):
    """The factors of every block by its part."""
    made = spec.factors(collected, 1.0)
    return {block.name: own for block, own in zip(spec.blocks, made, strict=True)}


def moment(rows, weights=None):
    rows = np.reshape(rows, (-1, np.shape(rows)[-1]))
    weights = np.ones(len(rows)) if weights is None else np.reshape(weights, -1)
    return sum(w * np.outer(r, r) for w, r in zip(weights, rows, strict=True))


def with_ones(a):
    return np.concatenate([a, np.ones((*a.shape[:-1], 1))], axis=-1)
