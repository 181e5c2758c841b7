r"""The step that all members share, as an Optax transform.

With :math:`\mathrm{lr} = 1/\lambda_k` and everything scaled by it (see :mod:`kldwrm_jax.wake`):

.. math::
   h &= \mathrm{lr}\, \nabla M_k(0) + R_k \\
   v &= [\bar F_k + \mathrm{lr}\, B_k]^{-1} (h + \mathrm{lr}\, \gamma_{wd}\, \theta_k) \\
   s &= -\mathrm{clip}(v) \\
   R_{k+1} &= \rho\,(R_k + \bar F_k s_k)
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax import wake
from kldwrm_jax.arguments import check_decay, check_non_negative, check_positive
from kldwrm_jax.capture import Oracle
from kldwrm_jax.curvature import LayerBlock, Layers, Solver, per_block
from kldwrm_jax.optimizers.clipping import block_clip_factors, kl_clip_factor
from kldwrm_jax.optimizers.exact_kl import ExactKL
from kldwrm_jax.optimizers.inverse import Inverse
from kldwrm_jax.optimizers.refresh import Curvature, Direction, Refresh
from kldwrm_jax.optimizers.state import KLDWRMState, new_monitor, next_count, raised
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


@dataclasses.dataclass(frozen=True)
class Member:
    r"""One member of the family: its model, its solver, its wake. See ``family.py``.

    Args:
      layers: the model's curvature blocks.
      learning_rate: :math:`1/\lambda`, a number or a schedule.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`.
      solver: the linear algebra of the member's model.
      refresh_every: steps between two refreshes of the statistics.
      inverse: how and when the statistics are inverted.
      kl_clip: limit of the whole step's quadratic divergence, or None.
      block_clip: limit of every parameter's root mean square, in units of the rate, or None.
      weight_decay: joins the effective gradient, preconditioned but not remembered.
      calibrate: whether the blocks are multiplied by ``c``, what is missing along the step.
      wake: ``"proposed"``, ``"taken"``, or None for K-FAC, which needs none.
      nu: momentum of the linear model.
      exact_kl: QE's inner problem, or None.
    """

    layers: Layers
    learning_rate: Any
    rho: Any
    damping: Any
    solver: Solver
    refresh_every: Any
    inverse: Inverse
    kl_clip: Any
    block_clip: Any
    weight_decay: Any
    calibrate: bool
    wake: str | None
    nu: Any = 0.0
    exact_kl: ExactKL | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Layers):
            raise ValueError(
                f"layers must be net.layers of net = kldwrm_jax.instrument(...), got "
                f"{type(self.layers).__name__}"
            )
        if not callable(self.learning_rate):
            check_non_negative("learning_rate", self.learning_rate)
        if not isinstance(self.calibrate, bool):
            raise ValueError(f"calibrate must be True or False, got {self.calibrate!r}")
        check_decay("nu", self.nu)
        check_non_negative("weight_decay", self.weight_decay)
        for name, limit in (("kl_clip", self.kl_clip), ("block_clip", self.block_clip)):
            if limit is not None:
                check_positive(name, limit)
        _ = self.refresh  # checks its own arguments

    @property
    def refresh(self) -> Refresh:
        """When and how this member's curvature is computed anew."""
        wants_b = self.exact_kl is not None
        return Refresh(
            self.solver, self.damping, self.rho, self.refresh_every, self.inverse, wants_b
        )

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The member as an Optax transform."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> KLDWRMState:
        """A state before the first step; its blocks are those of ``layers``."""
        self.layers.active(leaves_by_path(params))
        factors, inverses = self.refresh.init(self.layers)

        def like_params() -> optax.Updates:
            return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), float), params)

        remembers = self.wake is not None
        return KLDWRMState(
            count=jnp.zeros((), jnp.int32),
            factors=factors,
            inverses=inverses,
            strange=jnp.zeros(len(factors), jnp.int32),
            calibration=jnp.ones((), float),
            g_prev=like_params() if remembers else None,
            g_hat=like_params() if remembers else None,
            pull=like_params() if remembers else None,
            momentum=like_params() if remembers and not _is_zero(self.nu) else None,
            history=None if self.exact_kl is None else self.exact_kl.empty(params),
            monitor=new_monitor(),
        )

    def update(
        self,
        updates: optax.Updates,
        state: KLDWRMState,
        params: optax.Params | None = None,
        *,
        oracle: Oracle | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, KLDWRMState]:
        """One step; ``oracle`` is the batch's ``net.oracle(...)``, the update the step itself."""
        del extra_args
        if oracle is None:
            raise ValueError(
                "update needs the batch's curvature: tx.update(grads, state, params, "
                "oracle=net.oracle(params, x, ...)). With a flax TrainState use "
                "kldwrm_jax.TrainState, whose apply_gradients(grads=grads, oracle=oracle) "
                "forwards it"
            )
        theta = self._theta(params)
        blocks = self.layers.active(leaves_by_path(updates))
        self._check(updates, state, params, oracle)
        g = optax.tree.cast(leaves_by_path(updates), float)
        if not blocks:  # all is masked
            return updates, state
        lr, rho = self._rate(state.count), jnp.asarray(self.rho, float)

        m = self._model_gradient(g, state)
        # Blocks that are c times larger all leave but the gradient as it is, which is 1 / c of it.
        rate = lr / state.calibration

        def right_sides(anew: jax.Array) -> tuple[Leaves, Leaves]:
            h = wake.effective_gradient(rate, m, self._pull(blocks, state, m, anew))
            return h, self._decayed(h, theta, rate)

        curvature, direction = self.refresh(blocks, state, oracle, g, right_sides, lr)
        pull, (h, _) = self._pull(blocks, state, m, curvature.anew), right_sides(curvature.anew)
        c = state.calibration
        if self.calibrate:
            measured = self._calibrated(blocks, state, curvature, oracle, direction, g, lr)
            # Before the first step nothing is remembered that would not shrink with the gradient.
            c = jnp.where(state.count == 0, measured, c)
            direction, rate = direction.scaled(state.calibration / c), lr / c
            h = optax.tree.scale(state.calibration / c, h)
            state = state._replace(calibration=measured)
        # What is not finite in gradient, pull or direction is not finite in their product.
        finite = jnp.isfinite(direction.size)
        refreshes = raised(state.monitor.refreshes, curvature.refreshed)
        taken = finite & (refreshes > 0)

        s, kl_factor, block_factor = self._clipped(direction.v, c * direction.size, lr)
        last = state.monitor._replace(
            kl_clip=kl_factor,
            block_clip=block_factor,
            contraction=rho * direction.contraction,
            wake_ratio=jnp.sqrt(optax.tree.vdot(pull, pull))
            / _or_one(rate * jnp.sqrt(optax.tree.vdot(m, m))),
        )
        new: dict[str, Any] = {"count": next_count(state.count, self._round)}
        if self.exact_kl is not None:
            history = self.exact_kl.push(state.history, params, state.count, taken)
            s, before, after = self._exact_step(
                s, g, blocks, curvature, state, oracle, params, history, lr, rho, c, taken
            )
            last = last._replace(objective_before=before, objective_after=after)
            state = state._replace(history=history)
        if self.wake is not None:
            fisher_step = jax.tree.map(jnp.negative, direction.pulled)
            if self.wake == "taken":
                fisher_step = self.refresh.multiply(blocks, curvature.factors, s)
                finite &= jnp.isfinite(optax.tree.vdot(fisher_step, s))
            new |= {
                "g_prev": replace_leaves(state.g_prev, g),
                "g_hat": replace_leaves(state.g_hat, wake.unscaled(rate, h, m)),
                "pull": replace_leaves(state.pull, wake.remember(rho, pull, fisher_step)),
            }
        if state.momentum is not None:
            new["momentum"] = replace_leaves(state.momentum, m)
        finite &= _fits(updates, s)
        taken &= finite

        new["monitor"] = last
        old = {name: getattr(state, name) for name in new}
        old |= self._faded(state, g, finite)
        kept = optax.tree.where(taken, new, old)
        kept["monitor"] = kept["monitor"]._replace(
            refreshes=refreshes,
            rejected_refreshes=raised(state.monitor.rejected_refreshes, curvature.rejected),
            outliers=raised(state.monitor.outliers, curvature.outlier),
            rejected_steps=raised(state.monitor.rejected_steps, ~finite),
        )
        step = {path: jnp.where(taken, x, 0) for path, x in s.items()}
        return _like(updates, step), state._replace(
            factors=curvature.factors,
            inverses=curvature.inverses,
            strange=curvature.strange,
            **kept,
        )

    def _check(
        self,
        updates: optax.Updates,
        state: KLDWRMState,
        params: optax.Params | None,
        oracle: Oracle,
    ) -> None:
        """All that belongs to one step is of one model and of this optimizer."""
        known = self.layers.parameters
        self.layers.active({p: x for p, x in leaves_by_path(oracle.params).items() if p in known})
        g, theta = leaves_by_path(updates), leaves_by_path(params)
        if params is not None and theta.keys() != g.keys():
            raise ValueError(
                f"gradients and parameters must have the same structure; only one of them has "
                f"{', '.join(map(repr, sorted(theta.keys() ^ g.keys())))}"
            )
        if state.factors.keys() != {block.name for block in self.layers}:
            raise ValueError(
                f"the state has the blocks {', '.join(map(repr, state.factors))}, the optimizer "
                f"{', '.join(repr(block.name) for block in self.layers)}: it is the state of "
                f"another model; make one by this optimizer's init(params)"
            )
        remembers = self.wake is not None
        needed = {
            "pull": remembers,
            "momentum": remembers and not _is_zero(self.nu),
            "history": self.exact_kl is not None,
        }
        if any((getattr(state, name) is not None) != need for name, need in needed.items()):
            raise ValueError(
                "the state is that of another member of the family, which remembers other things: "
                "make one by this optimizer's init(params)"
            )

    def _model_gradient(self, g: Leaves, state: KLDWRMState) -> Leaves:
        if state.momentum is None:
            return g
        return wake.linear_model(jnp.asarray(self.nu, float), leaves_by_path(state.momentum), g)

    def _calibrated(
        self,
        blocks: list[LayerBlock],
        state: KLDWRMState,
        curvature: Curvature,
        oracle: Oracle,
        direction: Direction,
        g: Leaves,
        lr: jax.Array,
    ) -> jax.Array:
        """How many times the blocks' quadratic of a step the Fisher's is, averaged as they are.

        Both are damped: of the blocks, what the step is made with is measured. At a rate of zero
        there may be no step, but the gradient has a direction. The number begins anew with the
        average of any block; an absurd batch does not count.
        """
        # It is 1, exactly, until it is measured.
        anew = curvature.anew.any() | (state.calibration == 1)

        def measure() -> jax.Array:
            v = jax.lax.cond(
                direction.size == 0,
                lambda: self.refresh.solve_between(blocks, curvature.inverses, g, lr),
                lambda: direction.v,
            )
            curved = self.refresh.multiply(blocks, curvature.factors, v)
            damping = jnp.asarray(self.damping, float) * optax.tree.vdot(v, v)
            now = (2 * oracle.quadratic(v) + damping) / optax.tree.vdot(v, curved)
            decay = jnp.where(anew, 0, jnp.asarray(self.rho, float))
            new = decay * state.calibration + (1 - decay) * now
            return jnp.where(jnp.isfinite(new) & (new > 0), new, state.calibration)

        believed = curvature.refreshed & ~curvature.outlier
        return jax.lax.cond(believed, measure, lambda: state.calibration)

    def _pull(
        self, blocks: list[LayerBlock], state: KLDWRMState, m: Leaves, anew: jax.Array
    ) -> Leaves:
        """The wake's pull; none on a block whose average begins anew, as if it had no past."""
        if self.wake is None:
            return optax.tree.zeros_like(m)
        remembered = leaves_by_path(state.pull)
        return {
            p.path: jnp.where(anew[i], 0, remembered[p.path])
            for i, block in enumerate(blocks)
            for p in block.parameters
        }

    def _decayed(self, h: Leaves, theta: Leaves, lr: jax.Array) -> Leaves:
        """The effective gradient with weight decay."""
        if _is_zero(self.weight_decay):
            return h
        decay = lr * jnp.asarray(self.weight_decay, float)
        return {path: x + decay * theta[path].astype(x.dtype) for path, x in h.items()}

    def _faded(self, state: KLDWRMState, g: Leaves, finite: jax.Array) -> dict[str, Any]:
        """The memory after a step that is refused.

        If the gradient is honest, it is the memory that overflows with today's curvature: it fades,
        as on a step of zero. Otherwise no step would ever be taken again.
        """
        jammed = ~finite & jnp.isfinite(optax.tree.vdot(g, g))
        return {
            name: optax.tree.scale(jnp.where(jammed, jnp.asarray(decay, float), 1), remembered)
            for name, decay in (("pull", self.rho), ("momentum", self.nu))
            if (remembered := getattr(state, name)) is not None
        }

    def _clipped(
        self, v: Leaves, size: jax.Array, lr: jax.Array
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """``-v``, clipped; each factor is computed from the unclipped direction."""
        kl_factor, block_factor = jnp.ones((), float), jnp.ones((), float)
        s = jax.tree.map(jnp.negative, v)
        if self.kl_clip is not None:
            kl_factor = kl_clip_factor(jnp.asarray(self.kl_clip, float), size)
            s = {path: kl_factor * x for path, x in s.items()}
        if self.block_clip is not None:
            factors = self._block_factors(v, lr)
            s = {path: factors[path] * x for path, x in s.items()}
            block_factor = jnp.min(jnp.stack([jnp.min(x) for x in factors.values()]))
        return s, kl_factor, block_factor

    def _block_factors(self, v: Leaves, lr: jax.Array) -> Leaves:
        tau = jnp.asarray(self.block_clip, float)
        return block_clip_factors(tau, lr, v, self.layers.parameters)

    def _exact_step(
        self,
        s: Leaves,
        g: Leaves,
        blocks: list[LayerBlock],
        curvature: Curvature,
        state: KLDWRMState,
        oracle: Oracle,
        params: optax.Params,
        history: optax.Params,
        lr: jax.Array,
        rho: jax.Array,
        c: jax.Array,
        taken: jax.Array,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """The Q step, improved on the exact divergence once the buffer is full."""
        exact, b = self.exact_kl, curvature.b
        assert exact is not None
        assert b is not None

        def clip(gradient: Leaves) -> Leaves:
            if self.block_clip is None:
                return gradient
            factors = self._block_factors(gradient, lr)
            return {path: factors[path] * x for path, x in gradient.items()}

        def multiply_b(s: Leaves) -> Leaves:
            return per_block(blocks, lambda own, v: c * own.block.multiply(b[own.name], v), s)

        def precondition(gradient: Leaves) -> Leaves:
            v = self.refresh.solve_between(blocks, curvature.inverses, gradient, lr)
            return jax.tree.map(lambda x: x / c, v)

        def improve() -> tuple[Leaves, jax.Array, jax.Array]:
            objective = exact.objective(
                g=g,
                multiply_b=multiply_b,
                gamma=jnp.asarray(self.damping, float),
                lr=lr,
                rho=rho,
                oracle=oracle,
                params=params,
                history=history,
                count=state.count,
            )
            # Calibrated blocks see the true divergence, and so does the limit of the Q step.
            unlimited = self.kl_clip is None or not self.calibrate
            limit = jnp.asarray(jnp.finfo(lr.dtype).max if unlimited else self.kl_clip, lr.dtype)
            solved = exact.solve(s, objective, clip, precondition, limit)
            scale = jnp.where(lr > 0, 1 / jnp.where(lr > 0, lr, 1), 1)
            return solved.s, scale * solved.start, scale * solved.end

        full = taken & (state.count >= exact.capacity - 1)
        zero = jnp.zeros((), float)
        better, before, after = jax.lax.cond(full, improve, lambda: (s, zero, zero))
        # Where the inner solver diverges, the Q step stands.
        finite = jnp.isfinite(optax.tree.vdot(better, better))
        return optax.tree.where(finite, better, s), before, after

    @property
    def _round(self) -> Any:
        """A number of steps after which all that depends on the count's remainders comes again."""
        capacity = 1 if self.exact_kl is None else self.exact_kl.capacity
        known = math.lcm(capacity, self.inverse.every or 1)
        if isinstance(self.refresh_every, numbers.Integral):
            return min(math.lcm(known, self.refresh_every), jnp.iinfo(jnp.int32).max)
        return known * self.refresh_every

    def _rate(self, count: jax.Array) -> jax.Array:
        rate = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, float)

    def _theta(self, params: optax.Params | None) -> Leaves:
        if params is not None:
            return leaves_by_path(params)
        if not _is_zero(self.weight_decay) or self.exact_kl is not None:
            raise ValueError(
                "update needs the parameters for weight decay and for QE: "
                "tx.update(grads, state, params, oracle=oracle)"
            )
        return {}


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _or_one(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, 1)


def _fits(updates: optax.Updates, step: Leaves) -> jax.Array:
    """Whether no part of the step overflows in the gradients' type, where that is a narrow one."""
    fits = jnp.ones((), bool)
    for path, x in leaves_by_path(updates).items():
        theirs, ours = jnp.finfo(x.dtype), jnp.finfo(step[path].dtype)
        if theirs.maxexp < ours.maxexp:
            fits &= jnp.abs(step[path]).max(initial=0) <= theirs.max
    return fits


def _like(updates: optax.Updates, leaves: Leaves) -> optax.Updates:
    """Leaves in the structure and types of the gradients."""
    types = {path: jnp.asarray(x).dtype for path, x in leaves_by_path(updates).items()}
    return replace_leaves(updates, {path: leaves[path].astype(types[path]) for path in types})
