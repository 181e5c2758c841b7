r"""How a block is inverted: damping, and the three solves of the family.

A :class:`Solver` turns averaged factors into *caches*, one per block, which the optimizer's state
keeps until the next inversion, and a cache into an :class:`Operator` for one step. Directions are
scaled by the learning rate throughout: with :math:`h = \mathrm{lr}\,\hat g` the step is
:math:`s = -v`,

.. math:: v = [\bar F + \mathrm{lr}\, B]^{-1} h,

so that nothing is divided by a learning rate that may be zero.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.curvature.blocks import Block, Factors
from kldwrm_jax.curvature.decompositions import decompose
from kldwrm_jax.curvature.devices import Devices

Cache = Any  # a pytree of arrays


class StepScalars(NamedTuple):
    """The hyperparameters of one step."""

    lr: Scalar  # learning rate, 1 / lambda
    rho: Scalar  # decay of the average and of the wake
    damping: Scalar  # gamma
    first: jax.Array | bool  # whether no statistics have been averaged yet
    calibration: Scalar = 1.0  # c, where the blocks stand for c times their product


class Operator(NamedTuple):
    r"""One block's solve at one step.

    ``solve(h)`` is :math:`v = [\bar F + \mathrm{lr} B]^{-1} h`; ``times_average(h, v)`` is
    :math:`\bar F v = \hat M h`, what the wake remembers; ``contraction`` is the norm of
    :math:`I - \hat M` in the metric of :math:`\bar F^{-1}`.
    """

    solve: Callable[[jax.Array], jax.Array]
    times_average: Callable[[jax.Array, jax.Array], jax.Array]
    contraction: jax.Array


class DampingMode(Protocol):
    r"""How :math:`\gamma` is added: what is cached, how it solves, and the matrix it stands for."""

    @property
    def devices(self) -> Devices | None:
        """Devices that share the decompositions out; with None, each device does them all."""
        ...

    def invert(
        self, blocks: Sequence[Block], factors: Sequence[Factors], damping: Scalar
    ) -> list[Cache]:
        """What is kept of every block's factors to solve with them."""
        ...

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, damping: Scalar, c: Scalar
    ) -> jax.Array:
        """The damped solve with all factors scaled by ``c``."""
        ...

    def multiply(self, block: Block, f: Factors, v: jax.Array, damping: Scalar) -> jax.Array:
        """The damped matrix times ``v``."""
        ...


@dataclasses.dataclass(frozen=True)
class ProductDamping:
    r"""Damping of the product, :math:`(F + \gamma I)^{-1}` exactly, by eigendecompositions."""

    devices: Devices | None = None

    def invert(
        self, blocks: Sequence[Block], factors: Sequence[Factors], damping: Scalar
    ) -> list[Cache]:
        """Eigenbases."""
        del damping
        return decompose(lambda side: side.eigen, blocks, factors, devices=self.devices)

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        r""":math:`(cF + \gamma I)^{-1} v`."""
        return block.eigen_solve(cache, v, damping, c)

    def multiply(self, block: Block, f: Factors, v: jax.Array, damping: Scalar) -> jax.Array:
        r""":math:`(F + \gamma I) v`."""
        return block.multiply(f, v) + damping * v


@dataclasses.dataclass(frozen=True)
class FactoredDamping:
    r"""Damping of each factor with its share of :math:`\sqrt\gamma`: two Cholesky inverses."""

    devices: Devices | None = None

    def invert(
        self, blocks: Sequence[Block], factors: Sequence[Factors], damping: Scalar
    ) -> list[Cache]:
        """Inverses of the damped factors, by Cholesky."""
        damped = _damped(blocks, factors, damping)
        return decompose(lambda side: side.inverse, blocks, damped, devices=self.devices)

    def solve(
        self, block: Block, cache: Cache, v: jax.Array, damping: Scalar, c: Scalar = 1.0
    ) -> jax.Array:
        """Two products a layer; the damped factors are scaled by ``c`` together."""
        del damping
        return block.multiply(block.scale(cache, 1 / c), v)

    def multiply(self, block: Block, f: Factors, v: jax.Array, damping: Scalar) -> jax.Array:
        """The damped factors times ``v``."""
        return block.multiply(block.damp(f, damping), v)


class Solver(Protocol):
    """A member's linear algebra."""

    @property
    def damping_mode(self) -> DampingMode:
        r"""How :math:`\gamma` is added, and what is cached."""
        ...

    def between(self, block: Block, cache: Cache, at: StepScalars) -> Operator:
        r"""The solve with a cached inverse of the average, where :math:`B_k = F_k := \bar F_k`."""
        ...


@runtime_checkable
class QuadraticSolver(Solver, Protocol):
    """The linear algebra of a member whose model is quadratic."""

    def refresh(
        self,
        blocks: Sequence[Block],
        f_bar: Sequence[Factors],
        fresh: Sequence[Factors],
        at: StepScalars,
    ) -> tuple[list[Cache], list[Operator]]:
        """Caches for the steps to come, and the operators of this one, where ``B`` is ``fresh``.

        ``f_bar`` includes ``fresh`` already.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LinearSolver:
    r"""A linear model, ``B = 0``: K-FAC (Prop. 3.1) and SO-KLD-WRM (Prop. 4.1).

    The wake remembers :math:`\bar F \bar F^{-1} h = h`: nothing to multiply.
    """

    damping_mode: DampingMode

    def between(self, block: Block, cache: Cache, at: StepScalars) -> Operator:
        """The cached inverse."""
        return Operator(
            solve=lambda h: self.damping_mode.solve(block, cache, h, at.damping, 1.0),
            times_average=lambda h, v: h,
            contraction=jnp.zeros(()),
        )


@dataclasses.dataclass(frozen=True)
class ExactSolver:
    r"""Q-KLD-WRM (Prop. 4.2) by simultaneous diagonalisation of :math:`(B, \bar F)`.

    Exact for the ``factored``-damped :math:`\bar A \otimes \bar G` in place of :math:`\bar F`.
    Between refreshes ``B = F_bar``, so that the solve is :math:`\bar F^{-1} / (1 + \mathrm{lr})`
    and :math:`\hat M = I / (1 + \mathrm{lr})`: no second decomposition.
    """

    damping_mode: FactoredDamping = dataclasses.field(default_factory=FactoredDamping)

    def refresh(
        self,
        blocks: Sequence[Block],
        f_bar: Sequence[Factors],
        fresh: Sequence[Factors],
        at: StepScalars,
    ) -> tuple[list[Cache], list[Operator]]:
        """Bases for this step, the inverses they contain for the next."""
        damped = _damped(blocks, f_bar, at.damping)
        bases = decompose(
            lambda side: side.pencil, blocks, damped, fresh, devices=self.damping_mode.devices
        )

        def operator(block: Block, f: Factors, basis: Any) -> Operator:
            largest = at.lr * block.pencil_norm(basis)
            return Operator(
                solve=lambda h: block.pencil_solve(basis, h, at.lr),
                times_average=lambda h, v: block.multiply(f, v),
                contraction=jnp.asarray(1 - 1 / (1 + largest)),
            )

        operators = [operator(*own) for own in zip(blocks, damped, bases, strict=True)]
        return decompose(lambda side: side.outer, blocks, bases), operators

    def between(self, block: Block, cache: Cache, at: StepScalars) -> Operator:
        """The cached inverse, scaled."""
        return Operator(
            solve=lambda h: self.damping_mode.solve(block, cache, h, at.damping) / (1 + at.lr),
            times_average=lambda h, v: h / (1 + at.lr),
            contraction=jnp.asarray(at.lr / (1 + at.lr), float),
        )


@dataclasses.dataclass(frozen=True)
class ReweightedSolver:
    r"""Q-KLD-WRM as its author runs it: ``(A_bar + lr A, G_bar + lr G)`` as if it were exact.

    :math:`\bar A_k + \mathrm{lr} A_k = \rho \bar A_{k-1} + \frac{(1-\rho)\lambda + 1}{\lambda} A_k`
    (supplement, section 5). On steps with ``B = F_bar``, the first among them, both factors are
    scaled by ``1 + lr`` while :math:`\hat M = I / (1 + \mathrm{lr})`; at other refreshes the wake
    remembers the undamped average times the damped direction. There ``contraction`` is an upper
    bound, damping aside: no factor exceeds its average :math:`1/(1-\rho)` times, so that
    :math:`\hat A \otimes \hat G \le (1 + \mathrm{lr}/(1-\rho))^2\, \bar A \otimes \bar G`.
    """

    damping_mode: DampingMode

    def refresh(
        self,
        blocks: Sequence[Block],
        f_bar: Sequence[Factors],
        fresh: Sequence[Factors],
        at: StepScalars,
    ) -> tuple[list[Cache], list[Operator]]:
        """The reweighted inverses for this step, the averages' for the next."""
        f_hat = jax.tree.map(lambda bar, new: bar + at.lr * new, list(f_bar), list(fresh))
        # One call for both, so that their equal sides are stacked.
        inverses = self.damping_mode.invert([*blocks, *blocks], [*f_hat, *f_bar], at.damping)
        now, caches = inverses[: len(blocks)], inverses[len(blocks) :]
        bound = 1 - 1 / (1 + at.lr / (1 - at.rho)) ** 2

        def operator(block: Block, f: Factors, inverse: Cache, cache: Cache) -> Operator:
            plain = self.between(block, cache, at)
            return Operator(
                solve=lambda h: self.damping_mode.solve(block, inverse, h, at.damping, 1.0),
                times_average=lambda h, v: jnp.where(
                    at.first, plain.times_average(h, v), block.multiply(f, v)
                ),
                contraction=jnp.where(at.first, plain.contraction, bound),
            )

        return caches, [operator(*own) for own in zip(blocks, f_bar, now, caches, strict=True)]

    def between(self, block: Block, cache: Cache, at: StepScalars) -> Operator:
        """The cached inverse of the average, with its factors scaled by ``1 + lr``."""
        return Operator(
            solve=lambda h: self.damping_mode.solve(block, cache, h, at.damping, 1 + at.lr),
            times_average=lambda h, v: h / (1 + at.lr),
            contraction=jnp.asarray(at.lr / (1 + at.lr), float),
        )


def _damped(blocks: Sequence[Block], factors: Sequence[Factors], damping: Scalar) -> list[Factors]:
    return [block.damp(f, damping) for block, f in zip(blocks, factors, strict=True)]
