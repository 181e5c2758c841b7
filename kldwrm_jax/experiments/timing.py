"""Timing of training steps: compiled beforehand, interleaved, with their spread."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[Any, Any], Any]  # from a state and a batch to the next state


class Compiled(NamedTuple):
    """A step ready to run."""

    step: Step
    state: Any
    seconds: float  # for tracing and compiling
    temporary_bytes: int | None  # of a step, where the compiler tells


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one subject's steps, a row for each round, and of the base's right before them.

    Machines drift: a round is compared with its neighbour, and the median of rounds counts.
    """

    rounds: tuple[tuple[float, ...], ...]
    beside: tuple[tuple[float, ...], ...]

    @property
    def ratios(self) -> list[float]:
        """Cost in steps of the base, round by round."""
        return self._compared(statistics.fmean, statistics.fmean)

    @property
    def ratio(self) -> float:
        """Cost in steps of the base."""
        return statistics.median(self.ratios)

    @property
    def usual(self) -> float:
        """Cost of a usual step, which has no refresh."""
        return statistics.median(self._compared(statistics.median, statistics.median))

    @property
    def slowest(self) -> float:
        """Cost of a round's slowest step: the place with the largest median of rounds."""
        rows = zip(self.rounds, self.beside, strict=True)
        costs = [[own / statistics.median(near) for own in row] for row, near in rows]
        return max(map(statistics.median, zip(*costs, strict=True)))

    def _compared(self, own: Callable[..., float], base: Callable[..., float]) -> list[float]:
        return [own(row) / base(near) for row, near in zip(self.rounds, self.beside, strict=True)]


def compile_step(step: Step, state: Any, batch: Any, attempts: int = 2) -> Compiled:
    """Compiles a step that gives its state away; the fastest of a few attempts counts."""
    best = None
    for _ in range(attempts):

        def fresh(state: Any, batch: Any) -> Any:  # a function that no cache knows
            return step(state, batch)

        begin = time.perf_counter()
        compiled = jax.jit(fresh, donate_argnums=0).lower(state, batch).compile()
        seconds = time.perf_counter() - begin
        best = seconds if best is None else min(best, seconds)
    analysis = compiled.memory_analysis()
    temporary = None if analysis is None else int(analysis.temp_size_in_bytes)
    return Compiled(compiled, state, best or 0.0, temporary)


def interleaved(
    subjects: Mapping[str, Compiled],
    base: Compiled,
    batch: Any,
    steps: int,
    rounds: int,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Rounds of steps of every subject in turn, each right after a round of the base.

    A first round warms caches and buffers up, and does not count.
    """
    states = {name: subject.state for name, subject in subjects.items()}
    base_state = jax.tree.map(jnp.copy, base.state)  # steps give their states away
    rows: dict[str, list[tuple[tuple[float, ...], tuple[float, ...]]]] = {n: [] for n in subjects}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            base_state, beside = run_steps(base.step, base_state, batch, steps)
            states[name], row = run_steps(subject.step, states[name], batch, steps)
            if number:
                rows[name].append((row, beside))
        after_round()
    return {name: Timing(*zip(*own, strict=True)) for name, own in rows.items()}


def run_steps(step: Step, state: Any, batch: Any, steps: int) -> tuple[Any, tuple[float, ...]]:
    """Some steps, one after another, and the seconds of each."""
    row = []
    for _ in range(steps):
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state, batch))
        row.append(time.perf_counter() - begin)
    return state, tuple(row)
