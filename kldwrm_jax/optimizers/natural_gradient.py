r"""Natural gradients with the exact Fisher of the batch, solved in the space of its samples.

With the batch's Fisher :math:`F = J'J` and :math:`K = JJ'`, which has a row for every sample and
output, the step minimises the damped quadratic model of the loss,

.. math:: \phi_k = \arg\min_\phi\ g'\phi + \tfrac12 \phi' F \phi
          + \tfrac{\gamma}{2} \|\phi - \mu \phi_{k-1}\|^2,

and only :math:`K` is inverted; see ``damped_model.py``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import check_decay, check_non_negative, check_positive, is_known
from kldwrm_jax.capture import Oracle, sample_space
from kldwrm_jax.curvature import Layers
from kldwrm_jax.finite import squared_norm, vdot
from kldwrm_jax.optimizers import eager, found_damping
from kldwrm_jax.optimizers.clipping import kl_clip_factor
from kldwrm_jax.optimizers.damped_model import DampedModel
from kldwrm_jax.optimizers.found_damping import FoundDamping
from kldwrm_jax.optimizers.line_search import best_rate
from kldwrm_jax.optimizers.rejection import check_not_stuck, fits
from kldwrm_jax.optimizers.same_model import check_same_model
from kldwrm_jax.optimizers.state import NaturalGradientState, increment_if, new_monitor
from kldwrm_jax.paths import Leaves, leaves_by_path, leaves_like, replace_leaves

_DAMPING = 1e-3  # beside a learning rate
# The lowest damping, in units of the trace of K. On Poisson's equation, 2-d, the error after 20
# seconds was 3e-6 and 3e-6 of two seeds with 1e-12, 1e-5 and 1e-6 with 1e-13, 7e-7 and 4e-7 with
# 1e-14, 1e-5 and 4e-6 with 2e-16. In single precision also, in units of the squared epsilon: what
# is below is lost in the rounding of J.
_LOWEST, _LOWEST_ROUNDING = 1e-14, 10.0


def natural_gradient(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    damping: optax.ScalarOrSchedule | None = None,
    memory: float = 0.0,
    kl_clip: float | None = None,
    center: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Natural gradient with the exact Fisher of the batch.

    No blocks and no averages: :math:`(F + \gamma I)^{-1} g`, by a linear system with a row for
    every sample and output of the batch. For networks that solve equations, for wave functions and
    for small regressions, where it is ahead of K-FAC by orders of magnitude; a batch of a
    classifier has too many rows, and too much noise.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``; the Fisher is
        the exact one of the likelihood, whatever ``fisher`` was said there.
      learning_rate: what the solution is multiplied by, a number or an Optax schedule. None: a line
        search halves it, from 1 down to 1/4096, for as long as the loss on the batch falls; 0
        where no rate lowers it. It needs targets or residuals, and a batch that says nearly all.
      damping: :math:`\gamma`, a number or an Optax schedule. None: with a learning rate 1e-3;
        without one, a millionth of the Fisher's mean over samples at first. Then a fifth of the
        last step's where the search took a rate of 1/2 or more, twice as much where it took less
        than 1/4, and 1.5 times as much where the next batches confirm less than a quarter of what
        the steps' own batches gained. Never less than 1e-14 of the Fisher's trace, or 1e-13 in
        float32.
      memory: :math:`\mu`, SPRING's: the damping term is anchored at :math:`\mu` times the last
        solution, in place of zero, so that what earlier batches said is not lost where this one
        says nothing. 0.9 or more where batches are small.
      kl_clip: limit of the step's divergence, :math:`s'Fs`; None is no limit.
      center: whether the mean over the samples (weighted as they are) is taken out of every column
        of the jacobian. The outputs are then a logarithm up to a constant, as that of a wave
        function is. It needs a learning rate.

    The gradient need not be the likelihood's. What of it no sample of the batch accounts for, such
    as weight decay, is divided by the damping: set ``damping`` then.

    **Variational Monte Carlo.** The outputs are :math:`\log|\psi|` at the walkers, or its real and
    imaginary part as two columns, and ``kldwrm_jax.Gaussian()`` is their likelihood. With
    ``center=True`` the Fisher is the quantum geometric tensor, :math:`S = \mathrm{Re}(\langle
    O^\dagger O\rangle - \langle O\rangle^\dagger \langle O\rangle)`, and ``update`` takes the
    gradient of the energy, :math:`2\,\mathrm{Re}\langle (E - \bar E)^* O\rangle`, with an oracle
    without targets: stochastic reconfiguration, and with ``memory`` SPRING. (A learning rate is
    half of one beside :math:`\mathrm{Re}\langle (E - \bar E)^* O\rangle`.) SPRING's limit of the
    step's norm is ``optax.chain(kldwrm_jax.natural_gradient(...), optax.clip_by_global_norm(c))``:
    what is remembered is the solution before it. See ``examples/two_electrons.py``.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model = nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)])
      >>> x = jnp.linspace(-2, 2, 50)[:, None]
      >>> net = kw.instrument(model, kw.Gaussian(), x)
      >>> tx = kw.natural_gradient(net.layers)
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = tx.init(params)
      >>> for i in range(30):
      ...     loss, grads, oracle = net.value_and_grad(params, x, targets=jnp.sin(x))
      ...     updates, state = tx.update(grads, state, params, oracle=oracle)
      ...     params = optax.apply_updates(params, updates)
      >>> error = model.apply({"params": params}, x) - jnp.sin(x)
      >>> bool(jnp.abs(error).max() < 0.02)
      True

    References:
      Chen, Heyl, `Empowering deep neural quantum states through efficient optimization
      <https://arxiv.org/abs/2302.01941>`_, 2023; Goldshlager, Abrahamsen, Lin, `A
      Kaczmarz-inspired approach to accelerate the optimization of neural network wavefunctions
      <https://arxiv.org/abs/2401.10190>`_, 2024 (``memory``); Guzman-Cordero, Dangel, Goldshlager,
      Zeinhofer, `Improving energy natural gradient descent through Woodbury, momentum, and
      randomization <https://arxiv.org/abs/2505.12149>`_, 2025.
    """
    return NaturalGradient(layers, learning_rate, damping, memory, kl_clip, center).transform()


@dataclasses.dataclass(frozen=True)
class NaturalGradient:
    """The transform of :func:`natural_gradient`, whose arguments these are."""

    layers: Layers
    learning_rate: optax.ScalarOrSchedule | None
    damping: optax.ScalarOrSchedule | None
    memory: Any
    kl_clip: Any
    center: bool

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            check_non_negative("learning_rate", self.learning_rate)
        if self.damping is not None:
            check_non_negative("damping", self.damping)
        if self.kl_clip is not None:
            check_positive("kl_clip", self.kl_clip)
        check_decay("memory", self.memory)
        if self.center and self.learning_rate is None:
            raise ValueError(
                "center=True needs a learning rate, natural_gradient(layers, learning_rate, "
                "center=True), got learning_rate=None: a line search compares losses, and that "
                "of a wave function is not one of its batch"
            )

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """As an Optax transform."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> NaturalGradientState:
        """The state before the first step."""
        self.layers.active(leaves_by_path(params))
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), float), params)
        solution = zeros if self._remembers else None
        found = found_damping.unknown() if self._finds_damping else None
        return NaturalGradientState(jnp.zeros((), jnp.int32), solution, found, new_monitor())

    def update(
        self,
        updates: optax.Updates,
        state: NaturalGradientState,
        params: optax.Params | None = None,
        *,
        oracle: Oracle | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, NaturalGradientState]:
        """One step; ``oracle`` is the batch's ``net.oracle(...)``, the update the step itself."""
        del extra_args
        self.layers.active(leaves_by_path(updates))
        oracle = check_same_model(self.layers, updates, params, oracle)
        self._check_state(state)
        if not leaves_by_path(updates):  # everything is masked
            return updates, state
        if not is_known((updates, state, oracle)):
            return self._step(updates, state, oracle)
        check_not_stuck(state.monitor.refused_in_a_row)
        if eager.holds_arrays(self):
            eager.warn_of_slow_steps()
            return self._step(updates, state, oracle)
        return self._compiled_step(updates, state, oracle)

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., tuple[optax.Updates, NaturalGradientState]]:
        def step(*args: Any) -> tuple[optax.Updates, NaturalGradientState]:
            return self._step(*args)

        return jax.jit(step)

    def _step(
        self, updates: optax.Updates, state: NaturalGradientState, oracle: Oracle
    ) -> tuple[optax.Updates, NaturalGradientState]:
        g = optax.tree.cast(leaves_by_path(updates), float)
        space = sample_space(oracle, g.keys(), center=self.center)
        if self.learning_rate is None and space.errors is None:
            raise ValueError(
                "a step without a learning rate is found by a line search, which needs the loss: "
                "net.oracle(params, ..., targets=y), or natural_gradient(layers, learning_rate)"
            )
        model = DampedModel(space, space.gram(), g, self._anchor(state, g))
        found = self._judged(state, oracle)
        phi, damping = model.minimiser(self._damping(state, found, model.gram))
        rate, decrease = self._rate(state, oracle, phi)
        size = rate**2 * squared_norm(space.times(phi))
        clip = jnp.ones((), float)
        if self.kl_clip is not None:
            clip = kl_clip_factor(jnp.asarray(self.kl_clip, float), size)
        s = optax.tree.scale(rate * clip, phi)
        finite = jnp.isfinite(size) & jnp.isfinite(vdot(s, s)) & jnp.isfinite(vdot(g, g))
        finite &= rate >= 0
        # A search that takes little of a solution says that it is not one to remember.
        last = s if self.learning_rate is None else phi
        if found is not None:
            found = found._replace(damping=damping, rate=rate, promise=decrease)
        new = NaturalGradientState(
            optax.safe_increment(state.count),
            replace_leaves(state.solution, last) if self._remembers else None,
            found,
            state.monitor._replace(
                kl_clip=clip,
                learning_rate=rate,
                momentum=jnp.asarray(self.memory, float),
                damping=damping,
                reduction_ratio=jnp.zeros((), float) if found is None else found.share,
            ),
        )
        return _accept(updates, state, new, s, finite)

    def _judged(self, state: NaturalGradientState, oracle: Oracle) -> FoundDamping | None:
        """What is known of the last steps, with what this batch says of the last one."""
        if state.found is None:
            return None
        here, last = leaves_by_path(oracle.params), leaves_by_path(state.solution)
        before = {path: here[path] - s.astype(here[path].dtype) for path, s in last.items()}
        there = oracle.loss(replace_leaves(oracle.params, before))
        return state.found.judged((there - oracle.loss(oracle.params)).astype(float))

    def _damping(
        self, state: NaturalGradientState, found: FoundDamping | None, gram: jax.Array
    ) -> jax.Array:
        """What was given, or what is found."""
        trace = jnp.trace(gram)
        if found is not None:
            damping = found.next(trace, len(gram))
        elif self.damping is not None:
            damping = jnp.asarray(_at(state.count, self.damping), float)
        else:
            damping = jnp.asarray(_DAMPING, float)
        lowest = max(_LOWEST, _LOWEST_ROUNDING * float(jnp.finfo(trace.dtype).eps) ** 2)
        return jnp.maximum(damping, lowest * trace)

    def _rate(
        self, state: NaturalGradientState, oracle: Oracle, phi: Leaves
    ) -> tuple[jax.Array, jax.Array]:
        """The learning rate, and by how much a line search has lowered the loss with it."""
        if self.learning_rate is None:
            return best_rate(oracle, phi)
        return jnp.asarray(_at(state.count, self.learning_rate), float), jnp.zeros((), float)

    def _anchor(self, state: NaturalGradientState, g: Leaves) -> Leaves | None:
        r""":math:`\mu \phi_{k-1}`."""
        if not self._has_memory:
            return None
        last, memory = leaves_by_path(state.solution), jnp.asarray(self.memory, float)
        return {path: memory * last[path] for path in g}

    def _check_state(self, state: NaturalGradientState) -> None:
        if not isinstance(state, NaturalGradientState) or (
            (state.solution is not None, state.found is not None)
            != (self._remembers, self._finds_damping)
        ):
            raise ValueError(
                f"the state is not one of natural_gradient with "
                f"learning_rate={self.learning_rate!r}, damping={self.damping!r} and "
                f"memory={self.memory!r}: make one by this optimizer's init(params)"
            )

    @property
    def _finds_damping(self) -> bool:
        return self.learning_rate is None and self.damping is None

    @property
    def _remembers(self) -> bool:
        return self._finds_damping or self._has_memory

    @property
    def _has_memory(self) -> bool:
        return not (isinstance(self.memory, int | float) and self.memory == 0)


def _at(count: jax.Array, value: optax.ScalarOrSchedule) -> Any:
    return value(count) if callable(value) else value


def _accept(
    updates: optax.Updates,
    old: NaturalGradientState,
    new: NaturalGradientState,
    s: Leaves,
    finite: jax.Array,
) -> tuple[optax.Updates, NaturalGradientState]:
    """The step and the state after it; or no step, if it is not finite."""
    taken = finite & fits(updates, s)
    s, kept = optax.tree.where(taken, (s, new), (optax.tree.zeros_like(s), old))
    monitor = kept.monitor._replace(
        rejected_steps=increment_if(~taken, old.monitor.rejected_steps),
        refused_in_a_row=jnp.where(taken, 0, optax.safe_increment(old.monitor.refused_in_a_row)),
    )
    return leaves_like(updates, s), kept._replace(monitor=monitor)
