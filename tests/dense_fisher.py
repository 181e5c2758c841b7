"""The exact Fisher of a network on a batch, from the jacobian of its outputs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


def matrix(outputs, params, likelihood, weights=None):
    """``sum_n (w_n / W) J_n' H_n J_n``, with ``H_n`` the Fisher of one sample's outputs.

    Args:
      outputs: the network's, as a function of the parameters, one event axis last.
      params: where.
      likelihood: of the outputs.
      weights: of the samples.
    """
    flat, unravel = ravel_pytree(params)
    h = outputs(params)
    jacobian = jax.jacobian(lambda p: outputs(unravel(p)))(flat)
    samples = h.shape[:-1]
    shares = jnp.full(samples, 1.0) if weights is None else weights
    shares = (shares / shares.sum()).reshape(-1)
    roots = likelihood.fisher_root(h).reshape(-1, len(shares), h.shape[-1])
    jacobian = jacobian.reshape(len(shares), h.shape[-1], -1)
    rows = jnp.einsum("jno,nop->jnp", roots, jacobian) * jnp.sqrt(shares)[:, None]
    rows = np.asarray(rows.reshape(-1, len(flat)))
    return rows.T @ rows


def vector(tree):
    """A tree as the matrix sees it."""
    return np.asarray(ravel_pytree(tree)[0])
