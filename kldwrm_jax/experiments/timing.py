"""Timing of training steps: compiled beforehand and interleaved with a baseline."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[Any, Any], Any]  # from a state and a batch to the next state


class Compiled(NamedTuple):
    """A compiled step, its initial state, compile time, and memory if the backend reports it."""

    step: Step
    state: Any
    seconds: float
    temporary_bytes: int | None


def compile_step(step: Step, state: Any, batch: Any) -> Compiled:
    """Compiles a step that donates its state."""
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    seconds, analysis = time.perf_counter() - started, compiled.memory_analysis()
    return Compiled(compiled, state, seconds, analysis and int(analysis.temp_size_in_bytes))


def interleaved(
    cases: Mapping[Any, Compiled], base: Compiled, batch: Any, steps: int, rounds: int
) -> Iterator[dict[Any, np.ndarray]]:
    """Times rounds of steps of every case in turn, each right after some of the baseline's.

    Yields after every round the seconds so far, by case: wall-clock and process time of its steps,
    then means of the baseline's, as an array (4, rounds, steps). A first round warms up caches and
    buffers and is discarded.
    """
    states = {name: case.state for name, case in cases.items()}
    base_state = jax.tree.map(jnp.copy, base.state)  # steps donate their states
    seconds: dict[Any, list] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, case in cases.items():
            base_state, base_seconds = _run(base.step, base_state, batch, -(-steps // 4))
            states[name], own_seconds = _run(case.step, states[name], batch, steps)
            typical = np.median(base_seconds, axis=1, keepdims=True)
            seconds[name].append(np.concatenate([own_seconds, typical.repeat(steps, axis=1)]))
        yield {name: np.stack(own, axis=1)[:, 1:] for name, own in seconds.items()}


def _run(step: Step, state: Any, batch: Any, steps: int) -> tuple[Any, np.ndarray]:
    """Runs some steps; returns the state, and wall-clock and process seconds, (2, steps)."""
    clocks = [(time.perf_counter(), time.process_time())]
    for _ in range(steps):
        state = jax.block_until_ready(step(state, batch))
        clocks.append((time.perf_counter(), time.process_time()))
    return state, np.diff(clocks, axis=0).T


def relative(seconds: np.ndarray) -> dict[str, Any]:
    """Step times relative to the baseline, from the array of a case.

    Machines drift, so every round is compared with the baseline's round right before it, and the
    median over rounds is reported.
    """
    wall, process, base_wall, base_process = seconds
    ratios, typical = wall.mean(1) / base_wall.mean(1), np.median(base_wall, 1)
    return {
        "ratio": float(np.median(ratios)),
        "ratio_of_each_round": ratios.tolist(),
        "process_ratio": float(np.median(process.mean(1) / base_process.mean(1))),
        "usual_step": float(np.median(np.median(wall, 1) / typical)),
        "slowest_step": float(np.median(wall / typical[:, None], axis=0).max()),
        "step_seconds": float(np.median(wall.mean(1))),
        "process_seconds": float(np.median(process.mean(1))),
    }
