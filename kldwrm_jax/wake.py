r"""The wake: what a member of the family remembers of where it has been.

Every member minimises, at :math:`\theta_k`,

.. math:: M_k(s) + \lambda_k \sum_i \kappa(i)\, \rho^{k-i}\, D(\theta_i, \theta_k + s).

With a quadratic divergence the sum's gradient at ``s = 0`` is :math:`\lambda_k R_k`, the *pull* of
the earlier iterates,

.. math:: R_k = \sum_{i<k} \kappa(i)\, \rho^{k-i}\, F_i\, (s_i + \dots + s_{k-1}),

and for any steps whatever

.. math:: R_{k+1} = \rho\,(R_k + \bar F_k s_k), \qquad R_0 = 0.

That is the whole recursion. Everything here is scaled by the learning rate
:math:`\mathrm{lr} = 1/\lambda`, so that a rate of zero divides nothing: the effective gradient
:math:`\hat g_k = \nabla M_k(0) + \lambda_k R_k` appears as
:math:`h_k = \mathrm{lr}_k \hat g_k = \mathrm{lr}_k \nabla M_k(0) + R_k`, and a model's minimiser is
:math:`s = -v`, :math:`v = [\bar F_k + \mathrm{lr}_k B_k]^{-1} h_k`. Following that minimiser,
:math:`R_{k+1} = \rho\,(R_k - \bar F_k v_k)`, which is Props. 3.1, 4.1, 4.2 and A.1 in a line:

- ``B = 0``: :math:`\bar F_k v_k = h_k`, hence :math:`R_{k+1} = -\rho\,\mathrm{lr}_k \nabla M_k(0)`;
- otherwise :math:`\bar F_k v_k = \hat M_k h_k`, hence :math:`\hat g_{k+1} = g_{k+1} +
  \frac{\lambda_{k+1}}{\lambda_k} \rho\,[\hat g_k - g_k - \hat M_k \hat g_k]`.

A rate that drops sharply leaves a large pull beside a small gradient: tenfold at once, and the old
wake counts tenfold against the new gradient (:math:`\lambda_{k+1}/\lambda_k = 10`), so that a step
may point uphill.

All functions take and return pytrees, and know nothing of what :math:`\bar F` is.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.finite import vdot

Tree = TypeVar("Tree")


def linear_model(nu: Scalar, remembered: Tree, g: Tree) -> Tree:
    r"""The gradient of the linear model with momentum: :math:`\sum_i \nu^{k-i} g_i`.

    Args:
      nu: the model's momentum; 0 keeps the newest gradient only, ``rho`` makes SO-KLD-WRM K-FAC.
      remembered: the value of the step before (zeros at first).
      g: the newest gradient.

    Returns:
      ``nu * remembered + g``.
    """
    return jax.tree.map(lambda m, x: nu * m + x, remembered, g)


def effective_gradient(lr: Scalar, model_gradient: Tree, pull: Tree) -> Tree:
    r""":math:`h_k = \mathrm{lr}_k \nabla M_k(0) + R_k`: the learning rate times ``g_hat``."""
    return jax.tree.map(lambda m, r: lr * m + r, model_gradient, pull)


def unscaled(lr: Scalar, h: Tree, model_gradient: Tree) -> Tree:
    r""":math:`\hat g_k = h_k / \mathrm{lr}_k`; at a rate of zero, the model's gradient alone."""
    safe = jnp.where(jnp.asarray(lr) > 0, lr, 1)
    return jax.tree.map(lambda x, m: jnp.where(jnp.asarray(lr) > 0, x / safe, m), h, model_gradient)


def remember(rho: Scalar, pull: Tree, fisher_step: Tree) -> Tree:
    r""":math:`R_{k+1} = \rho\,(R_k + \bar F_k s_k)`.

    Args:
      rho: the decay of the wake, in [0, 1).
      pull: :math:`R_k`.
      fisher_step: :math:`\bar F_k s_k`, of the step taken or of the model's minimiser.

    Returns:
      The pull at the next iterate.

    Example:
      SO-KLD-WRM for two steps on a quadratic, from the recursion alone:

      >>> import jax.numpy as jnp
      >>> from kldwrm_jax import wake
      >>> rho, lr, f_bar, pull = 0.5, 0.1, 4.0, jnp.zeros(())
      >>> for g in (1.0, 3.0):
      ...     h = wake.effective_gradient(lr, g, pull)
      ...     step = -h / f_bar
      ...     pull = wake.remember(rho, pull, f_bar * step)
      >>> round(float(-step * f_bar / lr), 6)  # g_1 - rho g_0
      2.5
    """
    return jax.tree.map(lambda r, fs: rho * (r + fs), pull, fisher_step)


def ratio(lr: Scalar, model_gradient: Tree, pull: Tree) -> jax.Array:
    r""":math:`\|R_k\| / (\mathrm{lr}_k \|\nabla M_k(0)\|)`: how much the wake counts in a step."""
    r, m = (jnp.sqrt(vdot(tree, tree)) for tree in (pull, model_gradient))
    return r / jnp.where(lr * m > 0, lr * m, 1)
