r"""The exact Fisher of a batch in the space of its samples: :math:`F = J'J`.

A row of :math:`J` belongs to one sample and one column of the root of its outputs' Fisher. Where
there are fewer rows than parameters, :math:`JJ'` is the smaller matrix, and

.. math:: (J'J + \gamma I)^{-1} J' = J' (JJ' + \gamma I)^{-1}.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.likelihoods.families import Gaussian, Residuals, unscaled
from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves

_HIGHEST = jax.lax.Precision.HIGHEST
MOST_BYTES = 4 * 2**30  # of a matrix: of the rows, of their products, of dense blocks


class Purpose(NamedTuple):
    """Who asks for the rows, as errors name it."""

    name: str = "kldwrm_jax.natural_gradient"
    instead: str = "kldwrm_jax.kfac"  # without rows
    smaller: str = "smaller batches"  # with fewer
    solves: bool = True  # whether all products of the rows are needed, too


NATURAL_GRADIENT = Purpose()


class SampleSpace(NamedTuple):
    """The rows of a batch, ordered by term, example, position and column of the root."""

    rows: Leaves  # of J, a part for every parameter: (rows, *parameter)
    errors: jax.Array | None  # e, where J'e is the gradient of the loss; None without targets

    def times(self, v: Leaves) -> jax.Array:
        """:math:`Jv`: how a step changes the outputs, in units of their standard deviation."""
        parts = self.rows.items()
        changes = [jnp.tensordot(j, v[p], v[p].ndim, precision=_HIGHEST) for p, j in parts]
        return sum(changes[1:], start=changes[0])

    def transposed(self, y: jax.Array) -> Leaves:
        """:math:`J'y`."""
        return {p: jnp.tensordot(y, j, 1, precision=_HIGHEST) for p, j in self.rows.items()}

    def solved(self, lower: jax.Array) -> "SampleSpace":
        r"""The space with the rows :math:`L^{-1}J` and no errors."""

        def own(j: jax.Array) -> jax.Array:
            flat = j.reshape(j.shape[0], -1)
            return solve_triangular(lower, flat, lower=True).reshape(j.shape)

        return SampleSpace({path: own(j) for path, j in self.rows.items()}, None)

    def gram(self) -> jax.Array:
        """:math:`JJ'`."""
        flat = [j.reshape(j.shape[0], -1) for j in self.rows.values()]
        half = len(flat[0]) // 2  # of the two blocks off the diagonal, one is enough

        def block(a: slice, b: slice) -> jax.Array:
            products = [jnp.matmul(j[a], j[b].T, precision=_HIGHEST) for j in flat]
            return sum(products[1:], start=products[0])

        upper, lower = slice(half), slice(half, None)
        corner = block(lower, upper)
        return jnp.block([[block(upper, upper), corner.T], [corner, block(lower, lower)]])


def sample_space(
    oracle: Oracle,
    paths: Collection[str],
    purpose: Purpose = NATURAL_GRADIENT,
    *,
    center: bool = False,
) -> SampleSpace:
    """The space of a batch's samples, and of the parameters at some paths.

    Args:
      oracle: the batch's.
      paths: of the parameters.
      purpose: who asks.
      center: whether the mean over the samples is taken out of each column of the outputs; the
        gradient of the loss is then not ``J'e``, and there are no errors.
    """
    if center:
        _check_gaussian(oracle)
    _check_independent(oracle, purpose)
    leaves = {path: x for path, x in leaves_by_path(oracle.params).items() if path in paths}
    outputs = [own.astype(float) for _, own in oracle.terms.by_term(oracle.outputs(oracle.params))]
    roots = [term.fisher_root(own) for term, own in zip(oracle.terms.each, outputs, strict=True)]
    _check_memory(roots, oracle, leaves, purpose)
    by_term = [
        _jacobian(oracle, model, leaves, root, term.likelihood.event_ndim, purpose.name)
        for model, root, term in zip(oracle.model.by_term(), roots, oracle.terms.each, strict=True)
    ]
    if center:
        shares = [term.shares(own) for term, own in zip(oracle.terms.each, outputs, strict=True)]
        by_term = [_centered(rows, own) for rows, own in zip(by_term, shares, strict=True)]
    errors = [
        None if center else _errors(term, own, root)
        for term, own, root in zip(oracle.terms.each, outputs, roots, strict=True)
    ]
    known = [e for e in errors if e is not None]
    return SampleSpace(
        rows={path: jnp.concatenate([j[path] for j in by_term]) for path in leaves},
        errors=jnp.concatenate(known) if len(known) == len(errors) else None,
    )


def _jacobian(
    oracle: Oracle, model: Model, leaves: Leaves, root: jax.Array, event_ndim: int, name: str
) -> Leaves:
    """The rows of one term, example by example."""
    batch, shape = root.shape[1], root.shape[1:]

    def of_example(i: jax.Array, own_root: jax.Array) -> Leaves:
        one = oracle.examples({batch: lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1)})

        def outputs(leaves: Leaves) -> jax.Array:
            return model.outputs(replace_leaves(oracle.params, leaves), one.call)

        out, vjp = jax.vjp(outputs, leaves)
        if out.shape != (1, *shape[1:]):
            raise ValueError(
                f"the outputs of one example have shape {out.shape}, and those of the batch "
                f"{shape}: {name} needs the examples along the first axis of "
                f"the model's arguments and of its outputs"
            )
        cotangents = _one_position_each(own_root, event_ndim)
        (rows,) = jax.vmap(vjp)(cotangents[:, None].astype(out.dtype))
        return rows

    rows = jax.vmap(of_example, in_axes=(0, 1))(jnp.arange(batch), root)
    return {path: x.astype(float).reshape(-1, *leaves[path].shape) for path, x in rows.items()}


def _centered(rows: Leaves, shares: jax.Array) -> Leaves:
    r"""Each column without its mean: :math:`(I - uu')J`, with the root of the shares as u.

    A row is :math:`u_n O_n`, and the mean :math:`\sum_n u_n^2 O_n`.
    """
    u = jnp.sqrt(shares.reshape(-1)).astype(float)

    def centered(j: jax.Array) -> jax.Array:
        columns = j.reshape(len(u), -1)  # (samples, columns of the root and parameters)
        mean = jnp.matmul(u, columns, precision=_HIGHEST)
        return (columns - u[:, None] * mean).reshape(j.shape)

    return {path: centered(j) for path, j in rows.items()}


def _one_position_each(root: jax.Array, event_ndim: int) -> jax.Array:
    """From the root of one example, ``(k, *positions, *event)``, a cotangent for every row of it.

    The root is block diagonal over positions: every position of every column is a row of its own.
    """
    k, shape = root.shape[0], root.shape[1:]
    positions = math.prod(shape[: len(shape) - event_ndim])
    own = jnp.moveaxis(root.reshape(k, positions, -1), 0, 1)  # (positions, k, event)
    each = jnp.eye(positions)[:, None, :, None] * own[:, :, None, :]
    return each.reshape(positions * k, *shape)


def _errors(term: LikelihoodTerm, outputs: jax.Array, root: jax.Array) -> jax.Array | None:
    """The shortest :math:`e` with :math:`R'e` the gradient of the loss by the outputs."""
    if not term.has_loss:
        return None
    k, samples = root.shape[0], math.prod(term.sample_shape(outputs))
    columns = jnp.moveaxis(root.reshape(k, samples, -1), 0, -1)  # (samples, event, k)
    slope = jax.grad(term.loss_here)(outputs).reshape(samples, -1, 1)
    return jnp.matmul(jnp.linalg.pinv(columns), slope, precision=_HIGHEST).reshape(-1)


def _check_gaussian(oracle: Oracle) -> None:
    """An error where the columns of the root depend on the sample: they have no mean over them."""
    for term in oracle.terms.each:
        if not isinstance(unscaled(term.likelihood)[0], Gaussian | Residuals):
            raise ValueError(
                f"center=True needs outputs of a fixed variance, such as the logarithm of a wave "
                f"function, got {term.likelihood!r}: instrument the model with "
                f"kldwrm_jax.Gaussian(), or leave center out"
            )


def _check_independent(oracle: Oracle, purpose: Purpose) -> None:
    """An error where examples can not be taken one by one."""
    if oracle.model.mixing:
        layers = ", ".join(repr("/".join(path) or "root") for path in oracle.model.mixing)
        raise ValueError(
            f"{purpose.name} needs examples that do not depend on each other, and "
            f"they do in {layers}, which normalises over the batch: evaluate it with "
            f"use_running_average=True, or use {purpose.instead}"
        )
    if jax.tree.leaves(oracle.call.rngs):
        raise ValueError(
            f"{purpose.name} takes examples one by one, whose dropout masks would not be those of "
            f"the batch: call the model in its deterministic mode and leave rngs out of "
            f"net.oracle(...), or use {purpose.instead}"
        )
    if oracle.terms.axis.names:
        raise ValueError(
            f"{purpose.name} needs the rows of the whole batch, which axis_name="
            f"{oracle.terms.axis.names!r} splits: shard the batch under jax.jit instead"
        )


def _check_memory(roots: list[jax.Array], oracle: Oracle, leaves: Leaves, purpose: Purpose) -> None:
    """An error before matrices are made that would not fit."""
    terms = oracle.terms.each
    rows = sum(
        root.shape[0] * math.prod(term.sample_shape(root[0]))
        for term, root in zip(terms, roots, strict=True)
    )
    parameters = sum(math.prod(x.shape) for x in leaves.values())
    columns = max(rows, parameters) if purpose.solves else parameters
    needed = jnp.zeros((), float).dtype.itemsize * rows * columns
    if needed > MOST_BYTES:
        raise ValueError(
            f"{rows:,} rows (samples x columns of the root of their outputs' Fisher) and "
            f"{parameters:,} parameters make a matrix of {needed / 2**30:.1f} GiB, and "
            f"{purpose.name} makes none above {MOST_BYTES / 2**30:.0f}: use {purpose.smaller}, "
            f"or {purpose.instead}"
        )
