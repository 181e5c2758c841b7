r"""The family: K-FAC, SO-, Q- and QE-KLD-WRM.

At :math:`\theta_k` every member minimises

.. math:: M_k(s) + \lambda_k \sum_i \kappa(i)\, \rho^{k-i}\, D(\theta_i, \theta_k + s),
          \qquad \kappa(0) = 1,\ \kappa(i > 0) = 1 - \rho,

and they differ in the model :math:`M_k` and the divergence :math:`D`:

=============  ====================================  ==================  =================
member         :math:`M_k(s)`                        :math:`D`           solver
=============  ====================================  ==================  =================
``kfac``       :math:`(\sum_i \rho^{k-i} g_i)'s`     quadratic           linear
``so_kldwrm``  :math:`g_k's`                         quadratic           linear
``q_kldwrm``   :math:`g_k's + \frac12 s'B_k s`       quadratic           exact or reweighted
``qe_kldwrm``  :math:`g_k's + \frac12 s'B_k s`       symmetric KL        the Q step, then SGD
=============  ====================================  ==================  =================
"""

import optax

from kldwrm_jax.arguments import check_choice
from kldwrm_jax.curvature import AveragedFisher, Inverse, Layers, LinearSolver
from kldwrm_jax.curvature.solver_choice import (
    check_damping_mode,
    damping_mode_of,
    quadratic_solver_of,
)
from kldwrm_jax.optimizers.clipping import Clip
from kldwrm_jax.optimizers.inner_problem import InnerProblem
from kldwrm_jax.optimizers.member import Member
from kldwrm_jax.optimizers.self_setting import Fit
from kldwrm_jax.optimizers.step_rule import Damping, step_rule

_AT_EVERY_REFRESH, _FIT = Inverse(), Fit()


def kfac(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    momentum: float | None = None,
    damping: Damping = None,
    fit: Fit = _FIT,
    rho: float = 0.95,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | str | None = "auto",
    true_kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""K-FAC: natural gradient with exponentially averaged Kronecker factors.

    .. math:: s_k = -\lambda^{-1} \bar F_k^{-1} g_k

    For constant :math:`\lambda` this is the wake of quadratic models of Prop. 3.1. The update is
    the whole step, sign included.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule. Below zero it is an error;
        inside ``jit``, where a schedule's value cannot be looked at, such steps are refused. None:
        the step sets itself, and nothing that follows in a chain should change it.
      momentum: what the last step is multiplied by and added. None is 0 with a learning rate;
        without one it is fitted.
      damping: :math:`\gamma`, a number or an Optax schedule. ``"factored"`` inverses keep the value
        that they were made with. None is 0.01 with a learning rate; without one it adapts, as
        :class:`LevenbergMarquardt` does, which may be given here to change how.
      fit: how a step that sets itself is fitted.
      rho: decay of the factors' average, once a refresh.
      damping_mode: ``"product"``: :math:`(\bar F + \gamma I)^{-1}` exactly, by
        eigendecompositions; ``"factored"``: :math:`\sqrt\gamma` on each factor, cheaper. None is
        ``"product"`` with a learning rate, ``"factored"`` without. Dense blocks have one mode,
        :math:`\bar F + \gamma I`: leave it out.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the step's quadratic divergence, :math:`s'\bar F s`; None turns it off.
        ``"auto"`` is 0.1 with a learning rate; with low damping or a high rate, where first steps
        are large, try 0.01. A step that sets itself has a limit of its own for :math:`s'Fs`, with
        the exact Fisher, and this bounds it from above (``"auto"`` and None do not).
      true_kl_clip: limit of the same with the exact Fisher of the batch, for every number among the
        outputs of an example: the blocks, or an average that is some steps old, may underestimate
        the divergence by orders of magnitude. A JVP per refresh, and one on every step that comes
        near the limit. None, or ``kl_clip=None``, turns it off; a step that sets itself does not
        need it.
      weight_decay: multiplies the parameters, and joins the gradient before it is preconditioned.
        For K-FAC this equals ``optax.add_decayed_weights`` in front of it in a chain.
      calibrate: multiplies the blocks by the ratio of the exact to the approximate quadratic KL
        along the step, both damped. Kronecker-factored curvature underestimates the KL divergence
        of a step (:func:`kldwrm_jax.kl_report` measures by how much); calibrated, a
        ``learning_rate`` of 1 is a full step and ``kl_clip`` limits the true divergence. One JVP
        per refresh.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = kw.kfac(net.layers)  # nothing is set
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = tx.init(params)
      >>> for i in range(20):
      ...     loss, grads, oracle = net.value_and_grad(
      ...         params, x, targets=y, key=jax.random.key(i))
      ...     updates, state = tx.update(grads, state, params, oracle=oracle)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss < 0.05)
      True

    References:
      Martens, Grosse, `Optimizing Neural Networks with Kronecker-factored Approximate Curvature
      <https://arxiv.org/abs/1503.05671>`_, 2015; Puiu, `Rethinking Exponential Averaging of the
      Fisher <https://arxiv.org/abs/2204.04718>`_, 2022.
    """
    check_damping_mode(layers, damping_mode)
    rule = step_rule(learning_rate, momentum, damping, damping_mode, fit, kl_clip, mu=1)
    solver = LinearSolver(damping_mode_of(rule.damping_mode, inverse))
    return Member(
        fisher=AveragedFisher(layers, solver, rho, refresh_every, inverse, rule.first_damping),
        learning_rate=rule.learning_rate,
        damping=rule.damping,
        momentum=rule.momentum,
        self_setting=rule.self_setting,
        clip=Clip(rule.kl_clip, None, true_kl_clip),
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=None,
    ).transform()


def so_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    momentum: float | None = None,
    damping: Damping = None,
    fit: Fit = _FIT,
    rho: float = 0.33,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | str | None = "auto",
    true_kl_clip: float | None = 0.1,
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
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule; None for a step that sets
        itself: what is fitted minimises the member's objective, wake included, where
        :math:`\lambda` is 1 on calibrated blocks.
      momentum: see :func:`kfac`.
      fit: see :func:`kfac`.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`; the theory is that of :math:`F_i + \gamma I`. See :func:`kfac`.
      damping_mode: see :func:`kfac`.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the step's quadratic divergence; None turns it off.
      true_kl_clip: see :func:`kfac`. The wake remembers the step as this shortens it.
      weight_decay: joins the effective gradient: preconditioned, but not remembered by the wake, as
        it would be by ``optax.add_decayed_weights`` in front of this in a chain.
      calibrate: see :func:`kfac`.
      nu: momentum of the linear model :math:`\sum_i \nu^{k-i} g_i`: 0 is SO-KLD-WRM, ``rho`` is
        K-FAC for constant :math:`\lambda`.
      wake: ``"proposed"``: the recursion follows the minimiser of the model, before clipping and
        weight decay. ``"taken"``: it follows the steps that this transform returns.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = kw.so_kldwrm(net.layers)
      >>> state = kw.TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
      >>> for i in range(20):
      ...     loss, grads, oracle = net.value_and_grad(
      ...         state.params, x, targets=y, key=jax.random.key(i))
      ...     state = state.apply_gradients(grads=grads, oracle=oracle)
      >>> bool(loss < 0.05)
      True

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.2.
    """
    check_damping_mode(layers, damping_mode)
    rule = step_rule(learning_rate, momentum, damping, damping_mode, fit, kl_clip, mu=1)
    solver = LinearSolver(damping_mode_of(rule.damping_mode, inverse))
    return Member(
        fisher=AveragedFisher(layers, solver, rho, refresh_every, inverse, rule.first_damping),
        learning_rate=rule.learning_rate,
        damping=rule.damping,
        momentum=rule.momentum,
        self_setting=rule.self_setting,
        clip=Clip(rule.kl_clip, None, true_kl_clip),
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=check_choice("wake", wake, ("proposed", "taken")),
        nu=nu,
    ).transform()


def q_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    momentum: float | None = None,
    damping: Damping = None,
    fit: Fit = _FIT,
    rho: float = 0.5,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | str | None = "auto",
    true_kl_clip: float | None = 0.1,
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
        recursion (Prop. A.1), and a sharp drop makes the old wake count more for a step. None: see
        :func:`so_kldwrm`.
      momentum: see :func:`kfac`.
      fit: see :func:`kfac`.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`; see :func:`kfac`.
      damping_mode: with None ``"factored"`` for the ``"exact"`` solver, which needs it, and
        ``"product"`` for ``"reweighted"``.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the step's quadratic divergence; None turns it off.
      true_kl_clip: see :func:`kfac`. The wake remembers the step as this shortens it.
      weight_decay: see :func:`so_kldwrm`.
      calibrate: see :func:`kfac`.
      solver: ``"exact"`` diagonalises :math:`B` and :math:`\bar F` simultaneously; ``"reweighted"``
        is the author's cheaper approximation.
      block_clip: limit of every parameter's root mean square in :math:`\lambda s`; None turns it
        off.
      wake: see :func:`so_kldwrm`.

    Returns:
      An Optax transform whose ``update`` takes ``oracle=net.oracle(params, x, ...)``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x, y = nn.Dense(3), jnp.eye(6), jnp.array([0, 1, 2, 0, 1, 2])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> tx = kw.q_kldwrm(net.layers, optax.cosine_decay_schedule(1.0, 100), refresh_every=5)
      >>> state = kw.TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
      >>> for i in range(20):
      ...     loss, grads, oracle = net.value_and_grad(
      ...         state.params, x, targets=y, key=jax.random.key(i))
      ...     state = state.apply_gradients(grads=grads, oracle=oracle)
      >>> bool(loss < 0.1), bool(kw.diagnostics(state.opt_state)["contraction"] < 1)
      (True, True)

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.3 and supplement, sections 5 and 7.
    """
    check_damping_mode(layers, damping_mode)
    rule = step_rule(learning_rate, momentum, damping, damping_mode, fit, kl_clip, mu=2)
    quadratic = quadratic_solver_of(solver, rule.damping_mode, inverse)
    return Member(
        fisher=AveragedFisher(layers, quadratic, rho, refresh_every, inverse, rule.first_damping),
        learning_rate=rule.learning_rate,
        damping=rule.damping,
        momentum=rule.momentum,
        self_setting=rule.self_setting,
        clip=Clip(rule.kl_clip, block_clip, true_kl_clip),
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=check_choice("wake", wake, ("proposed", "taken")),
    ).transform()


def qe_kldwrm(
    layers: Layers,
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    momentum: float | None = None,
    damping: Damping = None,
    fit: Fit = _FIT,
    rho: float = 0.5,
    damping_mode: str | None = None,
    refresh_every: int = 30,
    inverse: Inverse = _AT_EVERY_REFRESH,
    kl_clip: float | str | None = "auto",
    true_kl_clip: float | None = 0.1,
    weight_decay: float = 0.0,
    calibrate: bool = False,
    solver: str = "exact",
    block_clip: float | None = 2.0,
    wake: str = "proposed",
    capacity: int = 4,
    inner: str | None = None,
    inner_steps: int | None = None,
    omega: float | None = None,
    kl_scale: float | None = None,
    tail: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    r"""QE-KLD-WRM: a quadratic model and the exact symmetric KL to the newest iterates.

    .. math:: \min_s\ g_k's + \tfrac12 s'B_k s
              + \lambda \sum_i \zeta(i)\, \rho^{k-i} D_{KL}(\theta_i, \theta_k + s)

    on the current batch, by ``inner_steps`` from the Q step, over the newest ``capacity`` iterates
    (:math:`\theta_k` among them), kept in a ring buffer in the state. Until the buffer is full, and
    where the inner solver diverges, the Q step is taken. The networks that are compared share
    dropout masks and the current values of parameters that this transform does not train.
    :math:`B_k` is the batch's curvature at an inversion and the newest average otherwise.

    Args:
      layers: ``net.layers`` of ``net = kldwrm_jax.instrument(model, likelihood, x)``.
      learning_rate: :math:`1/\lambda`, a number or an Optax schedule. With None the Q step sets
        itself before the inner solver improves it; take ``inner="preconditioned"`` and
        ``kl_scale=1.0`` then, since the length of ``"sgd"`` is in units of the learning rate.
      momentum: of the Q step; see :func:`kfac`.
      fit: see :func:`kfac`.
      rho: decay of the average and of the wake.
      damping: :math:`\gamma`; see :func:`kfac`.
      damping_mode: see :func:`q_kldwrm`.
      refresh_every: steps between two refreshes of factors and inverses.
      inverse: how and when inverses are made.
      kl_clip: limit of the Q step's quadratic divergence and, with ``calibrate`` and
        ``inner="preconditioned"``, of twice the true divergence of the whole step; None turns it
        off.
      true_kl_clip: of the whole step; see :func:`so_kldwrm`. A JVP on every step.
      weight_decay: of the Q step; see :func:`so_kldwrm`.
      calibrate: see :func:`kfac`.
      solver: see :func:`q_kldwrm`.
      block_clip: limit of every parameter's root mean square, in the Q step and in every inner
        gradient; None turns it off.
      wake: of the Q step; see :func:`so_kldwrm`.
      capacity: iterates in the buffer; a static number.
      inner: the inner solver. ``"sgd"``: as in the paper; the default with a learning rate, and
        only there. ``"preconditioned"``, the default without one: with the inverse that the Q step
        was made with; each step, the Q step first, is shortened until it lowers the objective
        within the limit ``kl_clip``. The objective never ends above its value at no step, nor at a
        Q step that is within the limit.
      inner_steps: defaults to 10 (``"sgd"``) or 2 (``"preconditioned"``).
      omega: length of the inner steps; defaults to 0.07 (``"sgd"``, in units of
        :math:`1/\lambda`) or 1 (``"preconditioned"``).
      kl_scale: :math:`\zeta = ` ``kl_scale`` :math:`\kappa`. None is the paper's 1/330, which
        compensates for Kronecker factors that underestimate the divergence; where the step sets
        itself, on calibrated blocks, it is 1.
      tail: ``"drop"`` forgets iterates that have left the buffer; ``"fold"`` gives their weight to
        the oldest one left, as the paper's author does (with ``kl_scale=1/660``).

    Returns:
      An Optax transform whose ``update`` takes ``params`` and ``oracle``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import kldwrm_jax as kw
      >>> model, x = nn.Dense(2), jax.random.normal(jax.random.key(0), (8, 3))
      >>> net = kw.instrument(model, kw.Gaussian(), x)
      >>> params = model.init(jax.random.key(1), x)["params"]
      >>> tx = kw.qe_kldwrm(net.layers, inner="preconditioned", kl_scale=1.0, capacity=3)
      >>> state = kw.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      >>> for i in range(40):
      ...     loss, grads, oracle = net.value_and_grad(
      ...         state.params, x, targets=jnp.ones((8, 2)), key=jax.random.key(i))
      ...     state = state.apply_gradients(grads=grads, oracle=oracle)
      >>> bool(jnp.abs(model.apply({"params": state.params}, x) - 1).max() < 0.02)
      True

    References:
      Puiu, `Rethinking Exponential Averaging of the Fisher <https://arxiv.org/abs/2204.04718>`_,
      2022, section 4.4.
    """
    sets_itself = learning_rate is None
    inner = inner or ("preconditioned" if sets_itself else "sgd")
    usual_steps, usual_omega = _INNER[check_choice("inner", inner, _INNER)]
    if sets_itself and inner == "sgd":
        raise ValueError(
            "inner must be 'preconditioned' where the step sets itself, got 'sgd', whose steps are "
            "in units of the learning rate: pass one, or leave inner out"
        )
    check_damping_mode(layers, damping_mode)
    rule = step_rule(learning_rate, momentum, damping, damping_mode, fit, kl_clip, mu=2)
    quadratic = quadratic_solver_of(solver, rule.damping_mode, inverse)
    clip = Clip(rule.kl_clip, block_clip, true_kl_clip)
    return Member(
        fisher=AveragedFisher(layers, quadratic, rho, refresh_every, inverse, rule.first_damping),
        learning_rate=rule.learning_rate,
        damping=rule.damping,
        momentum=rule.momentum,
        self_setting=rule.self_setting,
        clip=clip,
        weight_decay=weight_decay,
        calibrate=calibrate,
        wake=check_choice("wake", wake, ("proposed", "taken")),
        inner_problem=InnerProblem(
            capacity,
            inner,
            usual_steps if inner_steps is None else inner_steps,
            usual_omega if omega is None else omega,
            (1.0 if sets_itself else 1 / 330) if kl_scale is None else kl_scale,
            tail,
            clip,
            calibrated=calibrate or sets_itself,
        ),
    ).transform()


_INNER: dict[str, tuple[int, float]] = {"sgd": (10, 0.07), "preconditioned": (2, 1.0)}
