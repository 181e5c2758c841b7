"""Solve a differential equation against the clock, with nothing set.

    python examples/solve_equation.py poisson-2 --seconds 20 --seed 0

prints the seconds of process time that its steps have taken, compilation and measuring apart, the
loss of the last batch, and the relative error of the solution in the norm of L2. With ``--out
results/equations/poisson-2.jsonl`` every run is appended to a file once it is over; a run that is
in there is not done again.
"""

import argparse
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
import runs
from equations import EQUATIONS, LARGE, Equation, network

import kldwrm_jax as kw

TEST_POINTS = 9000
GROWTH = 1.25  # of the time between two measurements

OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "natural_gradient": kw.natural_gradient,
    "kfac": kw.kfac,
    "lbfgs": lambda layers: optax.lbfgs(),
    "adam": lambda layers: optax.adam(1.0),
    "muon": lambda layers: optax.contrib.muon(1.0),
}
RATED = ("adam", "muon")  # need a rate, which decays to zero along a cosine


Run = Callable[[int, float], Iterator[dict[str, float]]]


def compiled(equation: Equation, optimizer: str, rate: float | None, same_points: bool) -> Run:
    """A function of a seed and of seconds, which yields what it measures on the way.

    Args:
      equation: to be solved.
      optimizer: one of ``OPTIMIZERS``.
      rate: at the start, if the optimizer needs one.
      same_points: whether all steps see the points of the first one.
    """
    model = network(LARGE)
    test = jax.random.uniform(jax.random.key(99), (TEST_POINTS, equation.dimensions))
    points = equation.points(jax.random.key(0))
    params = model.init(jax.random.key(0), test[:1])["params"]
    net = kw.instrument(equation.terms(model), equation.likelihoods, params, *points)
    tx = optax.with_extra_args_support(OPTIMIZERS[optimizer](net.layers))

    @jax.jit
    def start(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, test[:1])["params"]
        return params, tx.init(params)

    def step(params: Any, state: Any, key: jax.Array, rate: Any) -> tuple[Any, Any, jax.Array]:
        points = equation.points(key)
        loss, grads, oracle = net.value_and_grad(params, *points, key=key)
        own = {"value": loss, "grad": grads, "value_fn": oracle.loss, "oracle": oracle}
        updates, state = tx.update(grads, state, params, **own)
        updates = optax.tree.scale(rate, updates)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def error(params: Any) -> jax.Array:
        return equation.error(lambda x: model.apply({"params": params}, x), test)

    example = *start(jax.random.key(0)), jax.random.key(0), 1.0
    compiled_step = jax.jit(step).lower(*example).compile()

    def run(seed: int, budget: float) -> Iterator[dict[str, float]]:
        of_start, of_points = jax.random.split(jax.random.key(seed))
        params, state = start(of_start)
        steps, seconds, due = 0, 0.0, 1.0
        while seconds < budget:
            key = of_points if same_points else jax.random.fold_in(of_points, steps)
            now = 1.0 if rate is None else rate * 0.5 * (1 + math.cos(math.pi * seconds / budget))
            begun = time.process_time()
            params, state, loss = jax.block_until_ready(compiled_step(params, state, key, now))
            seconds += time.process_time() - begun
            steps += 1
            if seconds >= min(due, budget):
                due = GROWTH * seconds
                measured = {"loss": float(loss), "error": float(error(params))}
                yield {"steps": steps, "seconds": round(seconds, 2), **measured}

    return run


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("equation", choices=EQUATIONS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="natural_gradient")
    parser.add_argument("--rate", type=float, help="of adam and muon")
    parser.add_argument("--seconds", type=float, default=20.0, help="of process time")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or several")
    parser.add_argument("--points", type=int, nargs=2, metavar=("INTERIOR", "BOUNDARY"))
    parser.add_argument("--same-points", action="store_true", help="on every step")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="a file of JSON lines to append to")
    args = parser.parse_args()
    if (args.rate is None) == (args.optimizer in RATED):
        parser.error(f"--rate is for {' and '.join(RATED)}, and they need it")
    return args


def main() -> None:
    """Every seed that is not in the file."""
    args = arguments()
    jax.config.update("jax_enable_x64", not args.float32)
    equation = EQUATIONS[args.equation]
    if args.points:
        interior, boundary = args.points
        equation = dataclasses.replace(equation, interior=interior, boundary=boundary)
    settings = {
        "equation": args.equation,
        "optimizer": args.optimizer,
        "rate": args.rate,
        "points": [equation.interior, equation.boundary],
        "same_points": args.same_points,
        "precision": "float32" if args.float32 else "float64",
        "budget": args.seconds,
    }
    seeds = runs.missing(args.out, settings, args.seed)
    if not seeds:
        return
    run = compiled(equation, args.optimizer, args.rate, args.same_points)
    for seed in seeds:
        rows = []
        for measured in run(seed, args.seconds):
            rows.append(settings | {"seed": seed} | measured)
            print(
                f"seed {seed}, step {measured['steps']}, {measured['seconds']:.1f} s: "
                f"loss {measured['loss']:.1e}, relative error {measured['error']:.1e}",
                flush=True,
            )
        runs.append(args.out, rows)


if __name__ == "__main__":
    main()
