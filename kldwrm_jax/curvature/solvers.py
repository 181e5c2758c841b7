r"""How a block is inverted: damping, and the three solves of the family.

A :class:`Solver` turns averaged factors into a *cache*, kept in the optimizer's state until the
next refresh, and both into an :class:`Operator` for the step at hand. Directions are scaled by the
learning rate throughout: with :math:`h = \mathrm{lr}\,\hat g` the step is :math:`s = -v`,

.. math:: v = [\bar F + \mathrm{lr}\, B]^{-1} h,

so that nothing is divided by a learning rate that may be zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.blocks import Block, Factors

Cache = Any  # a pytree of arrays


class Setting(NamedTuple):
    """The numbers of one step."""

    gamma: Scalar  # damping
    lr: Scalar  # learning rate, 1 / lambda
    rho: Scalar  # decay of the average
    first: jax.Array | bool  # whether a refresh is the first of all


class Operator(NamedTuple):
    r"""One block's solve at one step.

    ``solve(h)`` is :math:`v = [\bar F + \mathrm{lr} B]^{-1} h`; ``pull(h, v)`` is
    :math:`\bar F v = \hat M h`, what the wake remembers; ``contraction`` is the norm of
    :math:`I - \hat M` in the metric of :math:`\bar F^{-1}`.
    """

    solve: Callable[[jax.Array], jax.Array]
    pull: Callable[[jax.Array, jax.Array], jax.Array]
    contraction: jax.Array


class Damping(Protocol):
    """A way to add ``gamma``: what is cached, how it solves, and what matrix it stands for."""

    def invert(self, block: Block, f: Factors, gamma: Scalar) -> Cache:
        """What is kept of ``f`` to solve with it."""
        ...

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, gamma: Scalar, c: Scalar
    ) -> jax.Array:
        """The damped solve with all factors scaled by ``c``."""
        ...

    def multiply(self, block: Block, f: Factors, v: jax.Array, gamma: Scalar) -> jax.Array:
        """The damped matrix times ``v``."""
        ...


@dataclasses.dataclass(frozen=True)
class Product:
    r"""``gamma`` joins every eigenvalue of the product: :math:`(F + \gamma I)^{-1}` exactly."""

    def invert(self, block: Block, f: Factors, gamma: Scalar) -> Cache:
        """An eigenbasis."""
        del gamma
        return block.eigen(f)

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, gamma: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        r""":math:`(cF + \gamma I)^{-1} v`."""
        return block.eigen_solve(cache, v, gamma, c)

    def multiply(self, block: Block, f: Factors, v: jax.Array, gamma: Scalar) -> jax.Array:
        r""":math:`(F + \gamma I) v`."""
        return block.multiply(f, v) + gamma * v


@dataclasses.dataclass(frozen=True)
class Factored:
    r""":math:`\sqrt\gamma` is shared between the factors: the inverse keeps their structure."""

    def invert(self, block: Block, f: Factors, gamma: Scalar) -> Cache:
        """Inverses of the damped factors, by Cholesky."""
        return block.inverse(block.damp(f, gamma))

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, gamma: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """Two products a layer; the damped factors are scaled by ``c`` together."""
        del gamma
        return block.multiply(block.scale(cache, 1 / c), v)

    def multiply(self, block: Block, f: Factors, v: jax.Array, gamma: Scalar) -> jax.Array:
        """The damped factors times ``v``."""
        return block.multiply(block.damp(f, gamma), v)


class Solver(Protocol):
    r"""A member's linear algebra. ``fresh`` is :math:`B_k = F_k`, ``f_bar`` includes it already.

    ``is_linear`` says that ``B = 0``: a refresh then has no operator of its own.
    """

    is_linear: ClassVar[bool]

    @property
    def damping(self) -> Damping:
        """How ``gamma`` is added."""
        ...

    def refresh(
        self, block: Block, f_bar: Factors, fresh: Factors, at: Setting
    ) -> tuple[Cache, Operator]:
        """New factors: the cache for the steps to come, and the operator for this one."""
        ...

    def between(self, block: Block, cache: Cache, at: Setting) -> Operator:
        r"""A step without a refresh, where :math:`B_k = F_k := \bar F_k`."""
        ...


@dataclasses.dataclass(frozen=True)
class Linear:
    r"""A linear model, ``B = 0``: K-FAC (Prop. 3.1) and SO-KLD-WRM (Prop. 4.1).

    The wake remembers :math:`\bar F \bar F^{-1} h = h`: nothing to multiply.
    """

    is_linear: ClassVar[bool] = True
    damping: Damping

    def refresh(
        self, block: Block, f_bar: Factors, fresh: Factors, at: Setting
    ) -> tuple[Cache, Operator]:
        """The inverse of the new average, for this step and the next."""
        del fresh
        cache = self.damping.invert(block, f_bar, at.gamma)
        return cache, self.between(block, cache, at)

    def between(self, block: Block, cache: Cache, at: Setting) -> Operator:
        """The cached inverse."""
        return Operator(
            solve=lambda h: self.damping.solve(block, cache, h, at.gamma, 1.0),
            pull=lambda h, v: h,
            contraction=jnp.zeros(()),
        )


@dataclasses.dataclass(frozen=True)
class Exact:
    r"""Q-KLD-WRM (Prop. 4.2) by simultaneous diagonalisation of :math:`(B, \bar F)`.

    Exact for the ``factored``-damped :math:`\bar A \otimes \bar G` in place of :math:`\bar F`.
    Between refreshes ``B = F_bar``, so that the solve is :math:`\bar F^{-1} / (1 + \mathrm{lr})`
    and :math:`\hat M = I / (1 + \mathrm{lr})`: no second decomposition.
    """

    is_linear: ClassVar[bool] = False
    damping: Factored = dataclasses.field(default_factory=Factored)

    def refresh(
        self, block: Block, f_bar: Factors, fresh: Factors, at: Setting
    ) -> tuple[Cache, Operator]:
        """The basis for this step, the inverse it contains for the next."""
        damped = block.damp(f_bar, at.gamma)
        basis = block.pencil(damped, fresh)
        largest = at.lr * block.pencil_norm(basis)
        return block.pencil_inverse(basis), Operator(
            solve=lambda h: block.pencil_solve(basis, h, at.lr),
            pull=lambda h, v: block.multiply(damped, v),
            contraction=jnp.asarray(1 - 1 / (1 + largest)),
        )

    def between(self, block: Block, cache: Cache, at: Setting) -> Operator:
        """The cached inverse, scaled."""
        return Operator(
            solve=lambda h: self.damping.solve(block, cache, h, at.gamma) / (1 + at.lr),
            pull=lambda h, v: h / (1 + at.lr),
            contraction=jnp.asarray(at.lr / (1 + at.lr), float),
        )


@dataclasses.dataclass(frozen=True)
class Reweighted:
    r"""Q-KLD-WRM as its author runs it: ``(A_bar + lr A, G_bar + lr G)`` as if it were exact.

    :math:`\bar A_k + \mathrm{lr} A_k = \rho \bar A_{k-1} + \frac{(1-\rho)\lambda + 1}{\lambda} A_k`
    (supplement, section 5). On steps with ``B = F_bar``, the first among them, both factors are
    scaled by ``1 + lr`` while :math:`\hat M = I / (1 + \mathrm{lr})`; at other refreshes the wake
    remembers the undamped average times the damped direction. There ``contraction`` is an upper
    bound, damping aside: no factor exceeds its average :math:`1/(1-\rho)` times, so that
    :math:`\hat A \otimes \hat G \le (1 + \mathrm{lr}/(1-\rho))^2\, \bar A \otimes \bar G`.
    """

    is_linear: ClassVar[bool] = False
    damping: Damping

    def refresh(
        self, block: Block, f_bar: Factors, fresh: Factors, at: Setting
    ) -> tuple[Cache, Operator]:
        """The reweighted inverse for this step, the average's for the next."""
        f_hat = jax.tree.map(lambda bar, new: bar + at.lr * new, f_bar, fresh)
        now = self.damping.invert(block, f_hat, at.gamma)
        cache = self.damping.invert(block, f_bar, at.gamma)
        plain = self.between(block, cache, at)
        bound = 1 - 1 / (1 + at.lr / (1 - at.rho)) ** 2
        return cache, Operator(
            solve=lambda h: self.damping.solve(block, now, h, at.gamma, 1.0),
            pull=lambda h, v: jnp.where(at.first, plain.pull(h, v), block.multiply(f_bar, v)),
            contraction=jnp.where(at.first, plain.contraction, bound),
        )

    def between(self, block: Block, cache: Cache, at: Setting) -> Operator:
        """The cached inverse of the average, with its factors scaled by ``1 + lr``."""
        return Operator(
            solve=lambda h: self.damping.solve(block, cache, h, at.gamma, 1 + at.lr),
            pull=lambda h, v: h / (1 + at.lr),
            contraction=jnp.asarray(at.lr / (1 + at.lr), float),
        )
