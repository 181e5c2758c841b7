r"""The family: K-FAC, SO-, Q- and QE-KLD-WRM.

At :math:`\theta_k` every member minimises

.. math:: M_k(s) + \lambda_k \sum_i \kappa(i)\, \rho^{k-i}\, D(\theta_i, \theta_k + s),
          \qquad \kappa(0) = 1,\ \kappa(i > 0) = 1 - \rho,

and they differ in the model :math:`M_k` and the divergence :math:`D`:

=============  ====================================  ==================  =================
member         :math:`M_k(s)`                        :math:`D`           solver
=============  ====================================  ==================  =================
``kfac``       :math:`(\sum_i \rho^{k-i} g_i)'s`     quadratic           ``Linear``
``so_kldwrm``  :math:`g_k's`                         quadratic           ``Linear``
``q_kldwrm``   :math:`g_k's + \frac12 s'B_k s`       quadratic           ``Exact``, ``Reweighted``
``qe_kldwrm``  :math:`g_k's + \frac12 s'B_k s`       symmetric KL        the Q step, then SGD
=============  ====================================  ==================  =================
"""

from typing import Any

import optax

from kldwrm_jax.arguments import check_choice
from kldwrm_jax.curvature import (
    Damping,
    Devices,
    Exact,
    Factored,
    Layers,
    Linear,
    Product,
    Reweighted,
    Solver,
)
from kldwrm_jax.optimizers.exact_kl import ExactKL
from kldwrm_jax.optimizers.inverse import Inverse
from kldwrm_jax.optimizers.member import Member

_AT_EVERY_REFRESH = Inverse()


def kfac(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rho: float = 0.95,
    damping: float = 1e-2,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""K-FAC: natural gradient with exponentially averaged Kronecker factors.

    .. math:: s_k = -\lambda^{-1} \bar F_k^{-1} g_k

    For constant :math:`\lambda` this is the wake of quadratic models of Prop. 3.1. The update is
    the whole step, sign included.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule.
      rho: decay of the factors' average, once a refresh.
      damping: :math:`\gamma`.
      damping_mode: ``"product"``, also by None: :math:`(\bar F + \gamma I)^{-1}` exactly, by
        eigenvectors; ``"factored"``: :math:`\sqrt\gamma` on each factor, cheaper.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: scales the step :math:`s = -v` so that :math:`v'\bar F v` stays below this; None
        turns it off. Low damping or a high rate make large first steps: try 0.01 then.
      weight_decay: times the parameters, is added to the gradient before it is preconditioned. The
        same as ``optax.add_decayed_weights`` before this in a chain, for K-FAC.
      calibrate: multiplies the blocks by a number ``c``: how many times their own divergence the
        step's true one is, to second order, damping included in both. Measured by one JVP at a
        refresh and averaged as the factors are. Kronecker blocks see an eighth or less of a step's
        divergence; with this, ``learning_rate`` and ``kl_clip`` mean what they say. See
        :func:`kldwrm_jax.kl_report`.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x = nn.Dense(1), jnp.array([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0]])
      >>> y = x @ jnp.array([[1.0], [0.01]])  # badly scaled: gradient descent crawls
      >>> net = kw.instrument(model, kw.Gaussian(), x, fisher="exact")
      >>> tx = kw.kfac(net.layers, 1.0, damping=1e-6, refresh_every=1, kl_clip=None)
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     oracle = net.oracle(params, x, targets=y)
      ...     grads = jax.grad(oracle.loss)(params)
      ...     updates, state = tx.update(grads, state, params, oracle=oracle)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(jnp.abs(model.apply({"params": params}, x) - y).max() < 1e-3)
      True

    References:
      Martens, Grosse, `Optimizing Neural Networks with Kronecker-factored Approximate Curvature
      <https://arxiv.org/abs/1503.05671>`_, 2015; Puiu, `Rethinking Exponential Averaging of the
      Fisher <https://arxiv.org/abs/2204.04718>`_, 2022.
    """
    return Member(
        layers=layers,
        learning_rate=learning_rate,
        rho=rho,
        damping=damping,
        solver=Linear(_damping(damping_mode, inverse)),
        refresh_every=refresh_every,
        inverse=inverse,
        kl_clip=kl_clip,
        block_clip=None,
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=None,
    ).transform()


def so_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rho: float = 0.33,
    damping: float = 1e-2,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
    nu: float = 0.0,
    wake: str = "proposed",
) -> optax.GradientTransformationExtraArgs:
    r"""SO-KLD-WRM: a linear model and a wake of quadratic divergences (Prop. 4.1).

    .. math:: s_k = -\lambda^{-1} \bar F_k^{-1} (g_k - \rho\, g_{k-1}), \qquad g_{-1} = 0

    With a schedule, :math:`\rho` is multiplied by :math:`\lambda_k/\lambda_{k-1}` (Prop. A.1): a
    rate that drops sharply makes the old gradient count more than the new one for a step.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`; the theory then is that of :math:`F_i + \gamma I`.
      damping_mode: ``"product"``, also by None, or ``"factored"``; see :func:`kfac`.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the step's quadratic divergence; None turns it off.
      weight_decay: times the parameters, joins the effective gradient: preconditioned, not
        remembered. ``optax.add_decayed_weights`` before this in a chain makes it part of the
        gradient instead, which the wake remembers.
      calibrate: multiplies the blocks by what they miss of a step's divergence; see :func:`kfac`.
      nu: momentum of the linear model :math:`\sum_i \nu^{k-i} g_i`: 0 is SO-KLD-WRM, ``rho`` is
        K-FAC for constant :math:`\lambda`.
      wake: ``"proposed"``: the recursion follows the model's minimiser, whatever clipping or weight
        decay do to the step. ``"taken"``: it follows the steps that this transform returned.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = optax.chain(kw.so_kldwrm(net.layers, 0.3, refresh_every=5), optax.scale(0.5))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state, key):
      ...     oracle = net.oracle(params, x, targets=y, key=key)
      ...     loss, grads = jax.value_and_grad(oracle.loss)(params)
      ...     updates, state = tx.update(grads, state, params, oracle=oracle)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> for i in range(20):
      ...     params, state, loss = step(params, state, jax.random.key(i))
      >>> bool(loss < 0.5)
      True

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.2.
    """
    return Member(
        layers=layers,
        learning_rate=learning_rate,
        rho=rho,
        damping=damping,
        solver=Linear(_damping(damping_mode, inverse)),
        refresh_every=refresh_every,
        inverse=inverse,
        kl_clip=kl_clip,
        block_clip=None,
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=_wake(wake),
        nu=nu,
    ).transform()


def q_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rho: float = 0.5,
    damping: float = 1e-2,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
    solver: str = "exact",
    block_clip: float | None = 2.0,
    wake: str = "proposed",
) -> optax.GradientTransformationExtraArgs:
    r"""Q-KLD-WRM: a quadratic model, ``B = F``, and a wake of quadratic divergences (Prop. 4.2).

    .. math::
       s_k &= -\lambda_k^{-1} [\bar F_k + B_k/\lambda_k]^{-1} \hat g_k \\
       \hat g_{k+1} &= g_{k+1}
           + \tfrac{\lambda_{k+1}}{\lambda_k} \rho\, [\hat g_k - g_k - \hat M_k \hat g_k],
           \qquad \hat M_k = \bar F_k [\bar F_k + B_k/\lambda_k]^{-1},\ \hat g_0 = g_0

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule; the ratio of rates enters the
        recursion (Prop. A.1), and a sharp drop makes the old wake count more for a step.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`.
      damping_mode: None is what the solver needs or prefers: ``"factored"`` for ``"exact"``,
        ``"product"`` for ``"reweighted"``.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the step's quadratic divergence; None turns it off.
      weight_decay: times the parameters, joins :math:`\hat g`: preconditioned, not remembered.
        ``optax.add_decayed_weights`` before this in a chain makes it part of the gradient instead,
        which the wake remembers.
      calibrate: multiplies the blocks by what they miss of a step's divergence; see :func:`kfac`.
      solver: ``"exact"`` diagonalises :math:`(B, \bar F)` at once; ``"reweighted"`` is the author's
        cheaper approximation.
      block_clip: limit of every parameter's root mean square in :math:`v = \lambda s`; None turns
        it off.
      wake: ``"proposed"`` (the recursion above, whatever clipping does to the step) or ``"taken"``
        (from the steps that this transform returned).

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = kw.q_kldwrm(net.layers, optax.cosine_decay_schedule(0.3, 100), refresh_every=5)
      >>> state = kw.TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
      >>> @jax.jit
      ... def step(state, key):
      ...     oracle = net.oracle(state.params, x, targets=y, key=key)
      ...     grads = jax.grad(oracle.loss)(state.params)
      ...     return state.apply_gradients(grads=grads, oracle=oracle)
      >>> for i in range(20):
      ...     state = step(state, jax.random.key(i))
      >>> bool(kw.diagnostics(state.opt_state)["contraction"] < 1)
      True

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.3 and supplement, sections 5 and 7.
    """
    return Member(
        layers=layers,
        learning_rate=learning_rate,
        rho=rho,
        damping=damping,
        solver=_quadratic(solver, damping_mode, inverse),
        refresh_every=refresh_every,
        inverse=inverse,
        kl_clip=kl_clip,
        block_clip=block_clip,
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=_wake(wake),
    ).transform()


def qe_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rho: float = 0.5,
    damping: float = 1e-2,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
    solver: str = "exact",
    block_clip: float | None = 2.0,
    wake: str = "proposed",
    capacity: int = 4,
    inner: str = "sgd",
    inner_steps: int | None = None,
    omega: float | None = None,
    kl_scale: float = 1 / 330,
    tail: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    r"""QE-KLD-WRM: a quadratic model and the exact symmetric KL to the newest iterates.

    .. math:: \min_s\ g_k's + \tfrac12 s'B_k s
              + \lambda \sum_i \zeta(i)\, \rho^{k-i} D_{KL}(\theta_i, \theta_k + s)

    on the current batch, by ``inner_steps`` from the Q step, over the newest ``capacity``
    iterates (:math:`\theta_k` among them), kept in a ring buffer in the state. Until the buffer is
    full, and where the inner solver diverges, the Q step is taken. The networks compared share
    dropout masks and, where only some parameters are trained by this transform, the present values
    of the others. :math:`B_k` is the fresh curvature at an inversion and the newest average
    otherwise.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`.
      damping_mode: as in :func:`q_kldwrm`.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the Q step's quadratic divergence and, with ``calibrate`` and
        ``inner="preconditioned"``, of twice the true divergence of the whole step; None turns it
        off.
      weight_decay: joins :math:`\hat g` of the Q step, as in :func:`q_kldwrm`.
      calibrate: multiplies the blocks by what they miss of a step's divergence; see :func:`kfac`.
      solver: as in :func:`q_kldwrm`.
      block_clip: limit of every parameter's root mean square, in the Q step and in every inner
        gradient; None turns it off.
      wake: of the Q step, as in :func:`q_kldwrm`.
      capacity: iterates in the buffer; a static number.
      inner: how the inner problem is solved. ``"sgd"``: as in the paper. ``"preconditioned"``:
        with the inverse that the Q step was made with, each step (the Q step first) shortened until
        it lowers the objective within the limit ``kl_clip``. The objective never ends above its
        value at no step, nor at a Q step that is within the limit.
      inner_steps: its steps; 10 of SGD, 2 preconditioned by None.
      omega: their length; 0.07 for SGD, in units of :math:`1/\lambda`, 1 preconditioned by None.
      kl_scale: :math:`\zeta = ` ``kl_scale`` :math:`\kappa`. The paper's 1/330 makes up for
        Kronecker blocks that are too small by about that factor along the step.
      tail: ``"drop"`` forgets iterates that have left the buffer; ``"fold"`` gives their weight to
        the oldest that is left, as the paper's author does (with ``kl_scale=1/660``).

    Returns:
      An Optax transform whose ``update`` takes ``params`` and
      ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x = nn.Dense(2), jax.random.normal(jax.random.key(0), (8, 3))
      >>> net = kw.instrument(model, kw.Gaussian(), x)
      >>> tx = kw.qe_kldwrm(net.layers, 0.1, capacity=3)
      >>> params = model.init(jax.random.key(1), x)["params"]
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state, key):
      ...     oracle = net.oracle(params, x, targets=jnp.ones((8, 2)), key=key)
      ...     grads = jax.grad(oracle.loss)(params)
      ...     updates, state = tx.update(grads, state, params, oracle=oracle)
      ...     return optax.apply_updates(params, updates), state
      >>> for i in range(4):
      ...     params, state = step(params, state, jax.random.key(i))
      >>> told = kw.diagnostics(state)
      >>> bool(told["objective_after"] < told["objective_before"])
      True

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.4.
    """
    return Member(
        layers=layers,
        learning_rate=learning_rate,
        rho=rho,
        damping=damping,
        solver=_quadratic(solver, damping_mode, inverse),
        refresh_every=refresh_every,
        inverse=inverse,
        kl_clip=kl_clip,
        block_clip=block_clip,
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=_wake(wake),
        exact_kl=_exact_kl(capacity, inner, inner_steps, omega, kl_scale, tail),
    ).transform()


_INNER: dict[str, tuple[int, float]] = {"sgd": (10, 0.07), "preconditioned": (2, 1.0)}


def _exact_kl(
    capacity: int,
    inner: str,
    inner_steps: int | None,
    omega: float | None,
    kl_scale: float,
    tail: str,
) -> ExactKL:
    check_choice("inner", inner, _INNER)
    usual_steps, usual_omega = _INNER[inner]
    return ExactKL(
        capacity,
        inner,
        usual_steps if inner_steps is None else inner_steps,
        usual_omega if omega is None else omega,
        kl_scale,
        tail,
    )


def _wake(wake: str) -> str:
    check_choice("wake", wake, ("proposed", "taken"))
    return wake


_DAMPING: dict[str, Any] = {"product": Product, "factored": Factored}


def _damping(mode: str | None, inverse: Inverse) -> Damping:
    mode = "product" if mode is None else mode
    check_choice("damping_mode", mode, _DAMPING)
    return _DAMPING[mode](_devices(inverse))


def _devices(inverse: Inverse) -> Devices | None:
    if not isinstance(inverse, Inverse):
        raise ValueError(f"inverse must be a kldwrm_jax.Inverse(...), got {inverse!r}")
    return inverse.devices


def _quadratic(solver: str, mode: str | None, inverse: Inverse) -> Solver:
    check_choice("solver", solver, ("exact", "reweighted"))
    if solver == "reweighted":
        return Reweighted(_damping(mode, inverse))
    if mode is not None:
        check_choice("damping_mode", mode, _DAMPING)
    if mode == "product":
        raise ValueError(
            "damping_mode='product' is not diagonal in the basis of solver='exact': use "
            "damping_mode='factored', or solver='reweighted'"
        )
    return Exact(Factored(_devices(inverse)))
