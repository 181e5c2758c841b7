"""Timing of training steps: compiled beforehand, interleaved, with their spread."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Step = Callable[[Any, Any], Any]  # from a state and a batch to the next state


class Compiled(NamedTuple):
    """A step ready to run."""

    step: Step
    state: Any
    seconds: float  # for tracing and compiling
    temporary_bytes: int | None  # of a step, where the compiler tells


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one subject's steps, a row for each round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def per_round(self) -> list[float]:
        """Seconds of every round."""
        return [sum(steps) for steps in self.rounds]

    @property
    def slowest(self) -> float:
        """The slowest step of a round, median over the rounds: a hiccup is not the subject's."""
        return statistics.median(max(steps) for steps in self.rounds)

    @property
    def usual(self) -> float:
        """The median step."""
        return statistics.median(step for steps in self.rounds for step in steps)


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
    batch: Any,
    steps: int,
    rounds: int,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Rounds of steps of every subject in turn, so that all meet the same machine.

    A first round warms caches and buffers up, and does not count.
    """
    states = {name: subject.state for name, subject in subjects.items()}
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            states[name], row = run_steps(subject.step, states[name], batch, steps)
            if number:
                rows[name].append(row)
        after_round()
    return {name: Timing(tuple(row)) for name, row in rows.items()}


def run_steps(step: Step, state: Any, batch: Any, steps: int) -> tuple[Any, tuple[float, ...]]:
    """Some steps, one after another, and the seconds of each."""
    row = []
    for _ in range(steps):
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state, batch))
        row.append(time.perf_counter() - begin)
    return state, tuple(row)
