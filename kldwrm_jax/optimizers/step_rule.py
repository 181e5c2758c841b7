"""Whether a member's steps are set by a learning rate or set themselves."""

from typing import Any, NamedTuple, TypeAlias

import optax

from kldwrm_jax.optimizers.levenberg_marquardt import LevenbergMarquardt
from kldwrm_jax.optimizers.self_setting import Fit, SelfSetting

_KL_CLIP, _DAMPING = 0.1, 1e-2  # with a learning rate

Damping: TypeAlias = optax.ScalarOrSchedule | LevenbergMarquardt | None


class StepRule(NamedTuple):
    """What the arguments of a member say about the length of its steps."""

    learning_rate: optax.ScalarOrSchedule | None
    momentum: Any
    damping: optax.ScalarOrSchedule | None
    self_setting: SelfSetting | None
    kl_clip: Any
    damping_mode: str | None
    first_damping: float | None


def step_rule(
    learning_rate: optax.ScalarOrSchedule | None,
    momentum: Any,
    damping: Damping,
    damping_mode: str | None,
    fit: Fit,
    kl_clip: Any,
    mu: float,
) -> StepRule:
    """The defaults that depend on whether there is a learning rate; ``mu``: see ``SelfSetting``."""
    if isinstance(kl_clip, str) and kl_clip != "auto":
        raise ValueError(f"kl_clip must be a number > 0, None or 'auto', got {kl_clip!r}")
    if not isinstance(fit, Fit):
        raise ValueError(f"fit must be kldwrm_jax.Fit(...), got {fit!r}")
    if learning_rate is not None:
        if isinstance(damping, LevenbergMarquardt):
            raise ValueError(
                f"damping must be a number or a schedule where there is a learning rate, got "
                f"{damping!r}: leave out learning_rate={learning_rate!r} and the step sets itself"
            )
        return StepRule(
            learning_rate,
            0.0 if momentum is None else momentum,
            _DAMPING if damping is None else damping,
            None,
            _KL_CLIP if kl_clip == "auto" else kl_clip,
            damping_mode,
            None,
        )
    adaptive = LevenbergMarquardt() if damping is None else damping
    adapts = adaptive if isinstance(adaptive, LevenbergMarquardt) else None
    limit = None if kl_clip in ("auto", None) else kl_clip / 2  # kl_clip is of s'Fs
    return StepRule(
        None,
        0.0,
        None if adapts is not None else damping,
        SelfSetting(fit, momentum, adapts, mu, limit),
        None if kl_clip == "auto" else kl_clip,
        damping_mode or "factored",
        None if adapts is None else adapts.first,
    )
