"""The family's steps from DESIGN's page of mathematics, with dense matrices, in numpy.

Directions are one long vector; a Fisher is one block-diagonal matrix, put together from what
``oracle.factors()`` returns, or the whole matrix. Gradients, factors, jacobians and divergences
come from JAX; nothing else does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from small_nets import jit

import kldwrm_jax as kw


@dataclasses.dataclass
class Blocks:
    """Parameters as a vector, block by block: ``[kernel; bias]`` row by row, or one alone."""

    params: Any

    def __post_init__(self):
        self.places, start = {}, 0
        for layer, own in sorted(self.params.items()):
            for kind in sorted(own, reverse=True):  # kernel before bias, scale before bias
                self.places[layer, kind] = slice(start, start + own[kind].size)
                start += own[kind].size
        self.size = start

    def vector(self, tree):
        return np.concatenate([np.ravel(tree[layer][kind]) for layer, kind in self.places])

    def tree(self, vector):
        out = {layer: {} for layer, _ in self.places}
        for (layer, kind), place in self.places.items():
            out[layer][kind] = vector[place].reshape(self.params[layer][kind].shape)
        return out

    def matrix(self, factors, kron=np.kron, diagonal=np.diag):
        """The whole Fisher; the layers come in the order of their parameters."""
        if "network" in factors:
            return factors["network"]
        blocks = {}
        for layer, kind in self.places:
            if layer in factors:
                own = factors[layer]
                blocks[layer] = kron(*own) if isinstance(own, tuple) else own
            else:
                blocks[layer, kind] = diagonal(np.ravel(factors[f"{layer}/{kind}"]))
        return scipy.linalg.block_diag(*blocks.values())


def fisher(problem, params, k):
    """The exact Fisher of the whole network on batch ``k``, from its jacobian."""
    blocks, network = Blocks(params), problem.oracle(params, k).outputs
    outputs, tree = np.asarray(network(params)), jax.jacrev(network)(params)
    shape = (*outputs.shape, -1)
    jacobian = np.concatenate(
        [np.reshape(tree[layer][kind], shape) for layer, kind in blocks.places], axis=-1
    )
    if isinstance(problem.net.likelihood, kw.Gaussian):
        own = [np.eye(outputs.shape[-1]) / problem.net.likelihood.variance] * len(outputs)
    elif isinstance(problem.net.likelihood, kw.Bernoulli):
        p = 1 / (1 + np.exp(-outputs))
        own = [np.diag(x * (1 - x)) for x in p]
    else:
        p = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
        own = [np.diag(x) - np.outer(x, x) for x in p]
    return sum(j.T @ h @ j for j, h in zip(jacobian, own, strict=True)) / len(outputs)


def product(blocks, f, gamma):
    return blocks.matrix(f) + gamma * np.eye(blocks.size)


def factored(blocks, f, gamma):
    def kron(a, g):
        pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
        a = a + pi * np.sqrt(gamma) * np.eye(len(a))
        return np.kron(a, g + np.sqrt(gamma) / pi * np.eye(len(g)))

    return blocks.matrix(f, kron, lambda d: np.diag(d + gamma))


def combine(f, g, a, b):
    """``a f + b g``, factor by factor."""
    return jax.tree.map(lambda x, y: a * x + b * y, f, g)


@dataclasses.dataclass(frozen=True)
class Member:
    """A member's settings; ``lrs`` holds the learning rate of every step."""

    lrs: list
    rho: float
    damping: float = 0.01
    mode: Callable = product
    model: str = "linear"  # or "exact", "reweighted"
    wake: str | None = "proposed"  # None is K-FAC
    nu: float = 0.0
    period: int = 1
    inverse_every: int = 1
    kl_clip: float | None = None
    block_clip: float | None = None
    weight_decay: float = 0.0
    calibrate: bool = False
    inner: "Inner | None" = None


@dataclasses.dataclass(frozen=True)
class Inner:
    """QE's inner problem; ``divergence(k, params1, params2)`` is the symmetric KL on the batch."""

    divergence: Callable
    capacity: int
    steps: int
    omega: float
    kl_scale: float
    tail: str = "drop"

    def weights(self, rho, k):
        """For the stored iterates, oldest first."""
        oldest = k - self.capacity + 1
        first = oldest if self.tail == "fold" else 0
        return [
            self.kl_scale * (1.0 if i == first else 1.0 - rho) * rho ** (k - i)
            for i in range(oldest, k + 1)
        ]

    def objective(self, s, k, old, weights, g, b, lam):
        """Of a step, as a tree, in JAX; ``old`` are the stored iterates, the newest last."""
        flat = jnp.concatenate([jnp.ravel(s[layer][kind]) for layer, kind in Blocks(s).places])
        new = jax.tree.map(jnp.add, old[-1], s)
        wake = sum(w * self.divergence(k, p, new) for w, p in zip(weights, old, strict=True))
        return g @ flat + flat @ b @ flat / 2 + lam * wake

    @functools.cached_property
    def value_and_grad(self):
        return jit(jax.value_and_grad(self.objective))

    def solve(self, blocks, member, k, iterates, s, g, b, hessian, damping):
        """The step after the inner SGD, and the objective before and after."""
        del hessian, damping
        old = iterates[-self.capacity :]
        problem = k, old, self.weights(member.rho, k), g, b, 1 / member.lrs[k]
        before, _ = self.value_and_grad(blocks.tree(s), *problem)
        for _ in range(self.steps):
            _, gradient = self.value_and_grad(blocks.tree(s), *problem)
            gradient = block_clipped(blocks, blocks.vector(gradient), member.block_clip)
            s = s - self.omega * member.lrs[k] * gradient
        after, _ = self.value_and_grad(blocks.tree(s), *problem)
        return s, float(before), float(after)


@dataclasses.dataclass(frozen=True)
class Preconditioned(Inner):
    """The other inner solver: steps by the inverse of ``hessian``, shortened until they help.

    Every divergence has ``damping`` times half the squared distance added to it. Twice that from
    the newest iterate must not exceed ``kl_clip``, of calibrated members.
    """

    def solve(self, blocks, member, k, iterates, s, g, b, hessian, damping):
        old, lam = iterates[-self.capacity :], 1 / member.lrs[k]
        weights = self.weights(member.rho, k)
        here, points = blocks.vector(old[-1]), [blocks.vector(p) for p in old]

        def value_and_grad(s):
            value, gradient = self.value_and_grad(blocks.tree(s), k, old, weights, g, b, lam)
            gradient = blocks.vector(gradient)
            for weight, point in zip(weights, points, strict=True):
                apart, factor = here + s - point, lam * damping * weight / self.kl_scale
                value, gradient = value + factor * apart @ apart / 2, gradient + factor * apart
            return value, gradient

        limited = member.calibrate and member.kl_clip is not None
        limit = member.kl_clip if limited else np.inf
        best, step = np.zeros_like(s), s
        lowest = first = value_and_grad(best)[0]
        values, sizes = [], []
        for _ in range(self.steps + 1):
            trial = best + step
            value, gradient = value_and_grad(trial)
            new = jax.tree.map(np.add, old[-1], blocks.tree(trial))
            values.append(float(value))
            sizes.append(2 * float(self.divergence(k, old[-1], new)))
            if value <= lowest and sizes[-1] <= limit:
                best, lowest = trial, value
                step = -self.omega * member.lrs[k] * np.linalg.solve(hessian, gradient)
            else:
                step = step * min(0.5, np.sqrt(limit / sizes[-1]))
        assert lowest <= (min(first, values[0]) if sizes[0] <= limit else first)
        return best, values[0], float(lowest)


def block_clipped(blocks, v, tau):
    """Every parameter's part of ``v`` brought down to a root mean square of ``tau``."""
    if tau is None:
        return v
    v = v.copy()
    for place in blocks.places.values():
        norm, limit = np.linalg.norm(v[place]), tau * np.sqrt(len(v[place]))
        v[place] *= min(1.0, limit / norm)
    return v


def run(problem, member):
    """The trajectory of ``member``: params after every step, and what each step used."""
    blocks = Blocks(problem.params)
    rho, gamma = member.rho, member.damping

    params = problem.params
    iterates, trace = [], []
    m = pull = np.zeros(blocks.size)  # the model's gradient, R
    previous = None  # lr, ghat, grad M, Mhat ghat of the step before
    f_bar = f_inverted = None
    c = c_next = 1.0
    for k, lr in enumerate(member.lrs):
        grads, fresh = problem.measure(params, k)
        fresh = jax.tree.map(np.asarray, fresh)
        g = blocks.vector(grads)
        iterates.append(params)
        first = k == 0
        refreshed, inverted = k % member.period == 0, k % member.inverse_every == 0
        if refreshed:
            f_bar_before = f_bar
            f_bar = fresh if first else combine(f_bar, fresh, rho, 1 - rho)
            if inverted:
                f_inverted = f_bar
        new = refreshed and inverted

        # The model's gradient and the effective gradient.
        m = member.nu * m + g
        if member.wake is None:
            g_hat = g
        elif member.wake == "taken":
            g_hat = m + c * pull / lr
        elif first:
            g_hat = m
        else:
            # Prop. A.1: (lambda_k / lambda_{k-1}) rho [ghat - grad M - Mhat ghat].
            # The blocks times c are those with lambda times c.
            lr0, g_hat0, m0, m_hat_g_hat0 = previous
            g_hat = m + lr0 / (lr / c) * rho * (g_hat0 - m0 - m_hat_g_hat0)

        # S = Fbar + B / lambda, and Mhat.
        eye = np.eye(blocks.size)
        f_damped = member.mode(blocks, f_inverted, gamma)
        if member.model == "linear":
            s_matrix, m_hat = f_damped, eye
        elif member.model == "exact":
            b = blocks.matrix(fresh) if new else f_damped
            s_matrix = f_damped + b * lr
            m_hat = f_damped @ np.linalg.inv(s_matrix)
        else:
            lam = 1 / lr
            if first:
                f_hat = combine(fresh, fresh, 1, 1 / lam)
            elif new:
                f_hat = combine(f_bar_before, fresh, rho, ((1 - rho) * lam + 1) / lam)
            else:
                f_hat = combine(f_inverted, f_inverted, 1, 1 / lam)
            s_matrix = member.mode(blocks, f_hat, gamma)
            m_hat = lam / (1 + lam) * eye
            if new and not first:
                m_hat = blocks.matrix(f_bar) @ np.linalg.inv(s_matrix)

        # The step.
        right = g_hat + member.weight_decay * blocks.vector(params)
        if member.calibrate and refreshed:
            v = np.linalg.solve(s_matrix, right)
            whole = fisher(problem, params, k) + gamma * eye
            now = v @ whole @ v / (v @ member.mode(blocks, f_bar, gamma) @ v)
            c_next = now if first else rho * c + (1 - rho) * now
            c = c_next if first else c
        v = np.linalg.solve(c * s_matrix, right)
        kl_factor = 1.0
        if member.kl_clip is not None:
            kl_factor = min(1.0, np.sqrt(member.kl_clip / (lr**2 * v @ right)))
        s = -lr * kl_factor * block_clipped(blocks, v, member.block_clip)
        objectives = 0.0, 0.0
        if member.inner and k >= member.inner.capacity - 1:
            b, hessian = c * blocks.matrix(fresh if new else f_bar), c * (1 + lr) * f_damped
            s, *objectives = member.inner.solve(
                blocks, member, k, iterates, s, g, b, hessian, gamma
            )

        newest = member.mode(blocks, f_bar, gamma)
        pull = rho * (pull + newest @ s)
        previous = lr / c, g_hat, m, m_hat @ g_hat
        params = jax.tree.map(lambda p, x: p + x, params, blocks.tree(s))
        trace.append(
            {
                "params": params,
                "g_hat": g_hat,
                "g": g,
                "pull": pull,
                "factors": f_bar,
                "kl_clip": kl_factor,
                "objectives": objectives,
                "step": s,
                "calibration": c_next,
            }
        )
        c = c_next
    return trace
