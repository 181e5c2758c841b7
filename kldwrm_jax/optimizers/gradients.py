r"""What a step is solved for: the model's gradient, the wake's pull, weight decay."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax import wake
from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature import LayerBlock
from kldwrm_jax.paths import Leaves


class Gradients(NamedTuple):
    """The gradients at one iterate, by the parameters' paths."""

    g: Leaves  # of the loss
    m: Leaves  # of the member's model at no step, grad M_k(0)
    pull: Leaves | None  # R_k; None for a member without a wake
    decay: Leaves | None  # weight_decay * theta_k; None without weight decay

    def scaled(self, c: Scalar) -> "Gradients":
        """Those of the loss times ``c``; the wake is in the units of the curvature."""
        g, m, decay = optax.tree.scale(c, (self.g, self.m, self.decay))
        return self._replace(g=g, m=m, decay=decay)

    def forget(self, blocks: list[LayerBlock], restart: Mapping[str, jax.Array]) -> "Gradients":
        """Empties the wake of the blocks whose average restarts, as if they had no past."""
        if self.pull is None:
            return self
        return self._replace(
            pull={
                p.path: jnp.where(restart[block.name], 0, self.pull[p.path])
                for block in blocks
                for p in block.parameters
            }
        )

    def effective(self, lr: Scalar) -> Leaves:
        r""":math:`h_k = \mathrm{lr}\,\nabla M_k(0) + R_k`, the learning rate times ``g_hat``."""
        if self.pull is None:
            return {path: lr * m for path, m in self.m.items()}
        return wake.effective_gradient(lr, self.m, self.pull)

    def right_side(self, lr: Scalar, h: Leaves) -> Leaves:
        """``h`` with weight decay, which is preconditioned but not remembered."""
        if self.decay is None:
            return h
        return {path: x + lr * self.decay[path].astype(x.dtype) for path, x in h.items()}

    def objective(self, c: Scalar) -> Leaves:
        r""":math:`\nabla M_k(0) + c R_k` with weight decay: the objective's, at a rate of 1."""
        if self.pull is None and self.decay is None:
            return self.m
        right = self.right_side(1 / c, self.effective(1 / c))
        return {path: c * x for path, x in right.items()}
