"""Training with nothing set, long past convergence: on real data, in many seeds.

    python benchmarks/long_runs.py --out results/trust/long_runs.jsonl

trains every network with every size of batch and in every precision, and appends a line for each
run: its loss on all data before, at best, after its first quarter at worst, and at the end. A case
that is in the file is not run again. ``--summary`` prints what there is.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import kldwrm_jax as kw

STEPS, EVERY = 1000, 5  # steps of a run, and between two measurements of its loss
SEEDS = 4
BATCHES = (16, 64, 256, None)  # None is all data
PRECISIONS = ("float32", "float64", "bfloat16")
RELAPSE = 10.0, 0.01  # a loss of more than so many times the best and this part of the initial one


@dataclasses.dataclass(frozen=True)
class Problem:
    """Data, and a network with its likelihood; ``network`` takes the type of its parameters."""

    x: np.ndarray
    y: np.ndarray
    likelihood: Any
    network: Callable[[Any], nn.Module]
    learnable: bool = True

    @property
    def floor(self) -> float:
        """The least that the loss can be: a Gaussian's logarithm of its normaliser."""
        outputs = self.y.shape[-1] if isinstance(self.likelihood, kw.Gaussian) else 0
        return 0.5 * outputs * np.log(2 * np.pi)


def dense(*widths: int, activation: Callable = nn.tanh) -> Callable[[Any], nn.Module]:
    """Dense layers with an activation between them."""

    def network(dtype: Any) -> nn.Module:
        layers: list[Any] = []
        for width in widths:
            layers += [nn.Dense(width, dtype=dtype, param_dtype=dtype), activation]
        return nn.Sequential(layers[:-1])

    return network


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of ten classes."""
        cell = nn.GRUCell(24, dtype=self.dtype, param_dtype=self.dtype)
        states = nn.RNN(cell)(x.reshape(-1, 8, 8))
        return nn.Dense(10, dtype=self.dtype, param_dtype=self.dtype)(states[:, -1])


class Convolutional(nn.Module):
    """Two strided convolutions and a dense layer."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of ten classes."""
        kind = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = x.reshape(-1, 8, 8, 1)
        for features in (8, 16):
            x = nn.gelu(nn.Conv(features, (3, 3), strides=2, **kind)(x))
        return nn.Dense(10, **kind)(x.reshape(len(x), -1))


class Transformer(nn.Module):
    """One block of causal attention over characters."""

    dtype: Any
    characters: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the next character."""
        kind = {"dtype": self.dtype, "param_dtype": self.dtype}
        h = nn.Embed(self.characters, 32, **kind)(x)
        h += nn.Embed(x.shape[1], 32, **kind)(jnp.arange(x.shape[1]))
        mask = nn.make_causal_mask(x)
        h += nn.MultiHeadDotProductAttention(2, **kind)(nn.LayerNorm(**kind)(h), mask=mask)
        h += nn.Dense(32, **kind)(nn.gelu(nn.Dense(64, **kind)(nn.LayerNorm(**kind)(h))))
        return nn.Dense(self.characters, **kind)(nn.LayerNorm(**kind)(h))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = datasets.load_digits(return_X_y=True)
    return x / 16, y


def digits(examples: int = 1797, network: Any = None) -> Problem:
    """Handwritten digits."""
    x, y = _digits()
    return Problem(x[:examples], y[:examples], kw.Categorical(), network or dense(32, 10))


def noise() -> Problem:
    """Handwritten digits with random labels: there is nothing to learn but noise."""
    x, y = _digits()
    return Problem(
        x, np.random.default_rng(0).permutation(y), kw.Categorical(), dense(32, 10), False
    )


def autoencoder() -> Problem:
    """Handwritten digits through a bottleneck."""
    x, _ = _digits()
    return Problem(x, x, kw.Bernoulli(), dense(32, 8, 32, 64))


def badly_scaled() -> Problem:
    """Diabetes, with columns of very different size."""
    x, y = datasets.load_diabetes(return_X_y=True)
    y = (y[:, None] - y.mean()) / y.std()
    return Problem(x * np.logspace(0, 3, 10), y, kw.Gaussian(), dense(32, 32, 1))


def table(load: Callable, *widths: int) -> Problem:
    """A table of measurements and classes."""
    x, y = load(return_X_y=True)
    return Problem((x - x.mean(0)) / x.std(0), y, kw.Categorical(), dense(*widths))


def exercise() -> Problem:
    """Three measurements of twenty people: fewer examples than parameters."""
    x, y = datasets.load_linnerud(return_X_y=True)
    x, y = ((a - a.mean(0)) / a.std(0) for a in (x, y))
    return Problem(x, y, kw.Gaussian(), dense(32, 32, 3))


def sine() -> Problem:
    """A wave, without noise."""
    x = np.linspace(-3, 3, 400)[:, None]
    return Problem(x, np.sin(2 * x) * np.cos(5 * x), kw.Gaussian(), dense(32, 32, 1))


def spirals() -> Problem:
    """Three noisy spirals: the example of the README."""
    rng = np.random.default_rng(0)
    y, radius = rng.integers(0, 3, 1024), np.sqrt(rng.uniform(size=1024))
    angle = 6 * radius + 2 * np.pi / 3 * y
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    x += 0.05 * rng.normal(size=x.shape)
    return Problem(x, y, kw.Categorical(), dense(64, 64, 3))


def text() -> Problem:
    """Characters of a description of the data sets."""
    letters = "".join(getattr(datasets, f"load_{n}")().DESCR for n in ("wine", "breast_cancer"))
    names, codes = np.unique([*letters], return_inverse=True)
    rows = codes[: 33 * (len(codes) // 33)].reshape(-1, 33)[:256]
    network = functools.partial(Transformer, characters=len(names))
    return Problem(rows[:, :-1], rows[:, 1:], kw.Categorical(), network)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "digits": digits,
    "digits, gelu": lambda: digits(network=dense(64, 64, 10, activation=nn.gelu)),
    "noise": noise,
    "autoencoder": autoencoder,
    "badly scaled": badly_scaled,
    "iris": lambda: table(datasets.load_iris, 16, 3),
    "wine": lambda: table(datasets.load_wine, 32, 3),
    "cancer": lambda: table(datasets.load_breast_cancer, 32, 16, 2),
    "exercise": exercise,
    "sine": sine,
    "spirals": spirals,
    "GRU": lambda: digits(400, Recurrent),
    "CNN": lambda: digits(600, Convolutional),
    "text": text,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, a size of its batches, and a precision."""

    problem: str
    batch: int | None
    precision: str


def cases() -> Iterator[Case]:
    """All of them: batches that are smaller than the data, and all data."""
    for precision in PRECISIONS:
        for name, make in PROBLEMS.items():
            examples = len(make().x)
            for batch in BATCHES:
                if batch is None or batch < examples:
                    yield Case(name, batch, precision)


def losses(
    case: Case,
    seeds: int = SEEDS,
    steps: int = STEPS,
    make: Callable[..., Any] = kw.kfac,
    every: int = EVERY,
) -> np.ndarray:
    """The loss on all data, before and every few steps, for every seed: [seeds, measurements].

    The least that is possible is taken off.
    """
    problem, dtype = PROBLEMS[case.problem](), jnp.dtype(case.precision)
    x, y = (jnp.asarray(a, dtype if a.dtype.kind == "f" else None) for a in (problem.x, problem.y))
    model, batch = problem.network(dtype), case.batch or len(x)
    net = kw.instrument(model, problem.likelihood, x[:batch])
    tx = make(net.layers)

    def step(carry: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> tuple[Any, None]:
        params, state = carry
        if batch < len(x):
            chosen = jax.random.choice(key, len(x), (batch,), replace=False)
            x, y = x[chosen], y[chosen]
        _, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return (optax.apply_updates(params, updates), state), None

    def train(seed: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        params = model.init(key, x[:1])["params"]

        def few_steps(carry: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
            carry, _ = jax.lax.scan(lambda c, k: step(c, k, x, y), carry, keys)
            return carry, net.oracle(carry[0], x, targets=y).loss(carry[0])

        keys = jax.random.split(key, (steps // every, every))
        before = net.oracle(params, x, targets=y).loss(params)
        _, after = jax.lax.scan(few_steps, (params, tx.init(params)), keys)
        return jnp.concatenate([before[None], after])

    found = jax.jit(jax.vmap(train, (0, None, None)))(jnp.arange(seeds), x, y)
    return np.asarray(found, np.float64) - problem.floor


def summary(losses: np.ndarray, learnable: bool = True) -> dict[str, float | bool]:
    """What a run's losses say: its end and, past its first quarter, its worst beside its best.

    Args:
      losses: before the run and during it.
      learnable: whether half of the initial loss is within reach.
    """
    initial, late = float(losses[0]), losses[len(losses) // 4 :]
    best = np.minimum.accumulate(losses)[len(losses) // 4 :]
    factor, part = RELAPSE
    return {
        "initial": initial,
        "best": float(np.nanmin(losses)),
        "final": float(losses[-1]),
        "worst": float(late.max()),
        "finite": bool(np.isfinite(losses).all()),
        "learned": bool(losses[-1] <= (0.5 if learnable else 1.0) * initial),
        "relapsed": bool(~(late <= factor * best + part * initial).all()),
    }


def report(rows: list[dict[str, Any]]) -> str:
    """How many runs keep what is promised, and those that do not."""
    counts = {
        "above half of the initial loss at the end": sum(not row["learned"] for row in rows),
        "relapsed": sum(row["relapsed"] for row in rows),
        "not finite": sum(not row["finite"] for row in rows),
    }
    lines = [f"{len(rows)} runs; " + "; ".join(f"{what}: {n}" for what, n in counts.items())]
    lines += [
        "  {problem}, batch {batch}, {precision}, seed {seed}: initial {initial:.2g}, best "
        "{best:.2g}, worst {worst:.2g}, final {final:.2g}".format(**row)
        for row in rows
        if row["relapsed"] or not row["learned"]
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a file of JSON lines")
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--summary", action="store_true", help="of the file, without a run")
    return parser.parse_args()


def main() -> None:
    """Every case that is not in the file."""
    args = arguments()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    rows = [json.loads(line) for line in lines]
    if args.summary:
        print(report(rows))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["problem"], row["batch"], row["precision"], row["steps"]) for row in rows}
    for case in cases():
        chosen = case.problem in args.problems and case.precision in args.precisions
        if not chosen or (case.problem, case.batch, case.precision, args.steps) in done:
            continue
        begun = time.monotonic()
        with jax.enable_x64(case.precision == "float64"):
            found = losses(case, args.seeds, args.steps)
        new = [
            dataclasses.asdict(case)
            | {"seed": seed, "steps": args.steps}
            | summary(own, PROBLEMS[case.problem]().learnable)
            for seed, own in enumerate(found)
        ]
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        print(f"{case}, {time.monotonic() - begun:.0f} s\n{report(new)}", flush=True)


if __name__ == "__main__":
    main()
