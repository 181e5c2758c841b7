"""Two electrons in a harmonic trap: variational Monte Carlo against the clock.

    python examples/two_electrons.py --optimizer natural_gradient --seconds 10 --seed 0

prints the seconds of process time that its steps have taken, compilation and measuring apart, and
the energy, whose exact value is 3: in two dimensions, with the trap's frequency 1 and in units of
Hartree, the ground state is ``(1 + r12) exp(-(r1^2 + r2^2) / 2)`` (Taut, `Two electrons in a
homogeneous magnetic field: particular analytical solutions
<https://doi.org/10.1088/0305-4470/27/3/040>`_, 1994). With ``--out
results/vmc/two_electrons.jsonl`` every run is appended to a file once it is over; a run that is in
there is not done again.
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import runs
from jax.flatten_util import ravel_pytree

import kldwrm_jax as kw

EXACT = 3.0
WALKERS, MOVES, WIDTH = 512, 10, 0.6  # moves of a walker between two steps, and their width
DAMPING, MEMORY, NORM = 1e-3, 0.95, 0.3
BLOCKS = 200  # of MOVES moves each, over which an energy is averaged
GROWTH = 3.0  # of the time between two measurements


class LogPsi(nn.Module):
    """The logarithm of a wave function of two electrons, ``(n, 4)`` to ``(n, 1)``.

    A Gaussian, the cusp where the electrons meet, and a network that sees the bare coordinates,
    whose values for both orders of the electrons are added up: a singlet's orbital part is
    symmetric.
    """

    widths: tuple[int, ...] = (32, 32)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """At walkers."""
        r12 = distance(x)[:, None]
        h = jnp.stack([x, jnp.roll(x, 2, axis=-1)], axis=1)
        for width in self.widths:
            h = jnp.tanh(nn.Dense(width, param_dtype=float)(h))
        correlation = nn.Dense(1, param_dtype=float)(h).sum(axis=1)
        return correlation + r12 / (1 + r12) - jnp.sum(x**2, axis=-1, keepdims=True) / 2


Function = Callable[[jax.Array], jax.Array]  # log|psi|, from walkers (n, 4) to (n,)


def distance(x: jax.Array) -> jax.Array:
    """Between the two electrons of each walker."""
    return jnp.linalg.norm(x[:, :2] - x[:, 2:], axis=-1)


def local_energy(log_psi: Function, x: jax.Array) -> jax.Array:
    """The Hamiltonian's: ``-(laplace log psi + |grad log psi|^2) / 2 + |x|^2 / 2 + 1 / r12``."""

    def slope(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: log_psi(x).sum())(x)

    def curvature(i: jax.Array) -> jax.Array:
        along = jnp.broadcast_to(jnp.eye(4)[i], x.shape)
        return jnp.sum(jax.jvp(slope, (x,), (along,))[1] * along, axis=-1)

    laplacian = jax.vmap(curvature)(jnp.arange(4)).sum(axis=0)
    kinetic = -(laplacian + jnp.sum(slope(x) ** 2, axis=-1)) / 2
    return kinetic + jnp.sum(x**2, axis=-1) / 2 + 1 / distance(x)


def moved(log_psi: Function, x: jax.Array, key: jax.Array) -> jax.Array:
    """Walkers after some Metropolis moves, whose density is ``psi^2``."""

    def move(here: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, None]:
        x, log = here
        of_proposal, of_choice = jax.random.split(key)
        new = x + WIDTH * jax.random.normal(of_proposal, x.shape)
        new_log = log_psi(new)
        chance = jnp.exp(2 * (new_log - log))
        taken = jax.random.uniform(of_choice, log.shape) < chance
        return (jnp.where(taken[:, None], new, x), jnp.where(taken, new_log, log)), None

    (x, _), _ = jax.lax.scan(move, (x, log_psi(x)), jax.random.split(key, MOVES))
    return x


def deviations(energies: jax.Array) -> jax.Array:
    """Of local energies from their mean, without outliers."""
    middle = jnp.median(energies)
    spread = 5 * jnp.mean(jnp.abs(energies - middle))
    energies = jnp.clip(energies, middle - spread, middle + spread)
    return energies - energies.mean()


def spring(
    model: nn.Module, rate: optax.Schedule, damping: float, memory: float, norm: float
) -> optax.GradientTransformationExtraArgs:
    r"""SPRING as published, with a dense solve: what ``kw.natural_gradient`` is compared with.

    With :math:`\bar O = (O - \langle O \rangle) / \sqrt N` and :math:`\epsilon = -(E - \langle E
    \rangle) / \sqrt N`,

    .. math:: \phi_k = \bar O' (\bar O \bar O' + \lambda + 11' / N)^{-1}
              (\epsilon - \mu \bar O \phi_{k-1}) + \mu \phi_{k-1},

    and the step is :math:`\min(\eta, c / \|\phi_k\|)\, \phi_k`.
    """

    def init(params: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((), int), jnp.zeros_like(ravel_pytree(params)[0])

    def update(
        grads: Any,
        state: tuple[jax.Array, jax.Array],
        params: Any,
        *,
        x: Any,
        excess: Any,
        **_: Any,
    ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        del grads
        count, last = state
        n, (flat, unravel) = len(x), ravel_pytree(params)

        def log_psi(flat: jax.Array, x: jax.Array) -> jax.Array:
            return model.apply({"params": unravel(flat)}, x[None])[0, 0]

        o = jax.vmap(jax.grad(log_psi), (None, 0))(flat, x)
        o = (o - o.mean(axis=0)) / jnp.sqrt(n)
        matrix = o @ o.T + damping * jnp.eye(n) + jnp.ones((n, n)) / n
        left = -excess / jnp.sqrt(n) - memory * o @ last
        phi = o.T @ jax.scipy.linalg.solve(matrix, left, assume_a="pos") + memory * last
        length = jnp.minimum(rate(count), norm / jnp.linalg.norm(phi))
        return unravel(length * phi), (count + 1, phi)

    return optax.GradientTransformationExtraArgs(init, update)


def natural_gradient(
    layers: Any, rate: optax.Schedule, damping: float, memory: float, norm: float
) -> optax.GradientTransformationExtraArgs:
    """The same by this library; the gradient of the energy is twice SPRING's."""
    solved = kw.natural_gradient(
        layers, lambda count: rate(count) / 2, damping=damping, memory=memory, center=True
    )
    return optax.chain(solved, optax.clip_by_global_norm(norm))


# By the deviation of the local energy after ten seconds, 0.03 and 0.1 are alike for Adam, and
# better than 0.01 (three seeds). Those of the other two are not tuned.
RATES = {"natural_gradient": 0.3, "spring": 0.3, "adam": 0.03}


def optimizer(
    name: str, net: Any, model: nn.Module, rate: float
) -> optax.GradientTransformationExtraArgs:
    """One of ``RATES``, whose rate falls as one over the step after some hundred."""

    def falling(count: jax.Array) -> jax.Array:
        return rate / (1 + count / 300)

    if name == "natural_gradient":
        return natural_gradient(net.layers, falling, DAMPING, MEMORY, NORM)
    if name == "spring":
        return spring(model, falling, DAMPING, MEMORY, NORM)
    return optax.with_extra_args_support(optax.adam(falling))


Run = Callable[[int, float], Iterator[dict[str, float]]]


def compiled(name: str, rate: float, blocks: int = BLOCKS) -> Run:
    """A function of a seed and of seconds, which yields what it measures on the way."""
    model = LogPsi()
    net = kw.instrument(model, kw.Gaussian(), jnp.ones((WALKERS, 4)))
    tx = optimizer(name, net, model, rate)

    def at(params: Any) -> Function:
        return lambda x: model.apply({"params": params}, x)[:, 0]

    @jax.jit
    def start(key: jax.Array) -> tuple[Any, Any, jax.Array]:
        of_params, of_walkers, of_moves = jax.random.split(key, 3)
        params = model.init(of_params, jnp.ones((1, 4)))["params"]
        x = jax.random.normal(of_walkers, (WALKERS, 4))
        for of_some in jax.random.split(of_moves, 5):
            x = moved(at(params), x, of_some)
        return params, tx.init(params), x

    def step(params: Any, state: Any, x: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        x = moved(at(params), x, key)
        excess = deviations(local_energy(at(params), x))
        _, vjp = jax.vjp(lambda params: at(params)(x), params)
        (grads,) = vjp(2 * excess / len(x))
        own = {"oracle": net.oracle(params, x), "x": x, "excess": excess}
        updates, state = tx.update(grads, state, params, **own)
        return optax.apply_updates(params, updates), state, x

    @jax.jit
    def measure(params: Any, x: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """The energy, its standard error by walkers that do not know of each other, and more."""

        def block(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = moved(at(params), x, key)
            return x, local_energy(at(params), x)

        _, energies = jax.lax.scan(block, x, jax.random.split(key, blocks))
        by_walker = energies.mean(axis=0)
        return {
            "energy": by_walker.mean(),
            "error": by_walker.std() / jnp.sqrt(len(by_walker)),
            "deviation": energies.std(),  # of the local energy; of the exact ground state none
        }

    key = jax.random.key(0)
    compiled_step = jax.jit(step).lower(*start(key), key).compile()

    def run(seed: int, budget: float) -> Iterator[dict[str, float]]:
        of_start, of_moves, of_measuring = jax.random.split(jax.random.key(seed), 3)
        params, state, x = start(of_start)
        steps, seconds, due = 0, 0.0, 1.0
        while seconds < budget:
            key = jax.random.fold_in(of_moves, steps)
            begun = time.process_time()
            params, state, x = jax.block_until_ready(compiled_step(params, state, x, key))
            seconds += time.process_time() - begun
            steps += 1
            if seconds >= min(due, budget):
                due = GROWTH * seconds
                measured = measure(params, x, jax.random.fold_in(of_measuring, steps))
                numbers = {name: round(float(value), 7) for name, value in measured.items()}
                yield {"steps": steps, "seconds": round(seconds, 2), **numbers}

    return run


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizer", choices=RATES, default="natural_gradient")
    parser.add_argument("--rate", type=float, help="of the optimizer, at first")
    parser.add_argument("--seconds", type=float, default=10.0, help="of process time")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or several")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="a file of JSON lines to append to")
    return parser.parse_args()


def main() -> None:
    """Every seed that is not in the file."""
    args = arguments()
    jax.config.update("jax_enable_x64", not args.float32)
    rate = RATES[args.optimizer] if args.rate is None else args.rate
    settings = {
        "optimizer": args.optimizer,
        "rate": rate,
        "precision": "float32" if args.float32 else "float64",
        "budget": args.seconds,
    }
    seeds = runs.missing(args.out, settings, args.seed)
    if not seeds:
        return
    run = compiled(args.optimizer, rate)
    for seed in seeds:
        rows = []
        for measured in run(seed, args.seconds):
            rows.append(settings | {"seed": seed} | measured)
            print(
                f"seed {seed}, step {measured['steps']}, {measured['seconds']:.1f} s: "
                f"energy {measured['energy']:.5f} +- {measured['error']:.5f}, "
                f"above the exact one by {measured['energy'] - EXACT:.1e}, "
                f"standard deviation {measured['deviation']:.1e}",
                flush=True,
            )
        runs.append(args.out, rows)


if __name__ == "__main__":
    main()
