"""The family's problem solved without any recursion: the whole history is kept, in numpy.

At every step the objective

    lr M(s) + sum_i kappa(i) rho^(k-i) 1/2 (s + d_i)' F_i (s + d_i),   d_i = s_i + ... + s_{k-1},

is written out with every Fisher F_i and every step s_j so far, and minimised by a dense solve.
(It is the paper's objective times lr = 1/lambda, so that lr = 0 makes sense: the wake alone.)
"""

import numpy as np


def weights(rho, k):
    """kappa(i) rho^(k-i) for i = 0..k, with kappa(0) = 1 and kappa(i) = 1 - rho."""
    return [(1.0 if i == 0 else 1.0 - rho) * rho ** (k - i) for i in range(k + 1)]


def averages(fishers, rho):
    """Fbar_k of every k, each as a sum of its own."""
    return [
        sum(w * f for w, f in zip(weights(rho, k), fishers, strict=False))
        for k in range(len(fishers))
    ]


def between_refreshes(refreshed, rho, period, steps):
    """F_k of every step: fresh every ``period`` steps, the stored average otherwise."""
    stored = averages(refreshed, rho)
    return [
        refreshed[k // period] if k % period == 0 else stored[k // period] for k in range(steps)
    ]


def pull(fishers, steps, rho):
    """R_k = sum_{i<k} kappa(i) rho^(k-i) F_i (s_i + ... + s_{k-1}), where k = len(steps)."""
    k = len(steps)
    w = weights(rho, k)
    terms = (w[i] * fishers[i] @ sum(steps[i:]) for i in range(k))
    return sum(terms, start=np.zeros(fishers[0].shape[0]))


def objective(s, lr, model_gradient, b, fishers, steps, rho):
    """The objective above at ``s``, for the newest of the ``fishers``."""
    k = len(steps)
    total = lr * (model_gradient @ s + 0.5 * s @ b @ s)
    for i, w in enumerate(weights(rho, k)):
        displacement = s + sum(steps[i:], start=np.zeros_like(s))
        total += w * 0.5 * displacement @ fishers[i] @ displacement
    return total


def minimiser(lr, model_gradient, b, fishers, steps, rho):
    """Where the objective's gradient vanishes."""
    k = len(steps)
    w = weights(rho, k)
    hessian = lr * b + sum(w[i] * fishers[i] for i in range(k + 1))
    return -np.linalg.solve(hessian, lr * model_gradient + pull(fishers, steps, rho))


def run(fishers, gradients, lrs, rho, *, curvatures=None, nu=0.0, take=lambda k, s: s):
    """Every step's minimiser, along the steps that ``take`` makes of them.

    The model is linear with momentum ``nu``; ``curvatures`` are its B_k, none by default.
    """
    proposals, steps = [], []
    for k, lr in enumerate(lrs):
        model_gradient = sum(nu ** (k - i) * gradients[i] for i in range(k + 1))
        b = np.zeros_like(fishers[0]) if curvatures is None else curvatures[k]
        proposals.append(minimiser(lr, model_gradient, b, fishers[: k + 1], steps, rho))
        steps.append(take(k, proposals[-1]))
    return np.array(proposals)
