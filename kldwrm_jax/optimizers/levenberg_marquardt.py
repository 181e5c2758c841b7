"""Damping that adapts to how well the quadratic model predicts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import check_count, check_positive

_FIRST = 0.3  # in units of the mean eigenvalue of the first statistics
_LARGE, _SMALL = 0.75, 0.25  # realised shares


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt:
    r"""A value for ``damping``: it moves with the reduction ratio, in the state.

    The reduction ratio compares what the loss did with what the quadratic model said. It is judged
    on the *next* batch, since a step always pleases the batch that it was made from: there, damping
    would fall until the step fits the noise. Where the ratio is above three quarters the damping is
    lowered, below one quarter it is raised; it stays where the noise of the batches rules, and
    steps are averaged. A loss that rises beyond doubt raises the damping at once.

    Args:
      initial: the first damping. None finds it: 0.3 times the mean eigenvalue of the first
        refresh's statistics.
      every: steps between two changes.
      decay: what the damping is multiplied, or divided, by.
      lowest: None is a hundred times the machine's precision times the first damping.
      highest: None is thirty times the first damping.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x = nn.Dense(1), jnp.array([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0]])
      >>> y = x @ jnp.array([[1.0], [0.01]])
      >>> net = kw.instrument(model, kw.Gaussian(), x)
      >>> tx = kw.kfac(net.layers, damping=kw.LevenbergMarquardt(initial=1e-3))
    """

    initial: Any = None
    every: int = 5
    decay: Any = 0.77
    lowest: Any = None
    highest: Any = None

    def __post_init__(self) -> None:
        for name in ("initial", "lowest", "highest"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_count("every", self.every)
        check_positive("decay", self.decay)

    @property
    def first(self) -> float | None:
        """The first damping in units of the mean eigenvalue, where it has to be found."""
        return _FIRST if self.initial is None else None

    def move(
        self, damping: jax.Array, first: jax.Array, share: jax.Array, fitting: jax.Array
    ) -> jax.Array:
        """The damping of the next steps.

        Args:
          damping: of this one.
          first: of the first one.
          share: what the next batches realised of the predicted decrease.
          fitting: whether steps are fitted; where iterates are averaged the share says nothing, and
            damping that harm has raised above its first value comes back.
        """
        tiny = 100 * jnp.finfo(damping.dtype).eps
        lowest = tiny * first if self.lowest is None else jnp.asarray(self.lowest, float)
        highest = 30 * first if self.highest is None else jnp.asarray(self.highest, float)
        lower = jnp.where(fitting, share > _LARGE, damping > first)
        factor = jnp.where(lower, self.decay, 1)
        factor = jnp.where(fitting & (share < _SMALL), 1 / self.decay, factor)
        return jnp.clip(factor * damping, lowest, highest)

    def raised(self, damping: jax.Array, first: jax.Array) -> jax.Array:
        """The damping after a step that did harm."""
        return self.move(damping, first, jnp.zeros_like(damping), jnp.ones((), bool))
