"""The oracle: a batch's curvature, outputs and divergences, computed when asked for."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.captured_layer import NO_BASES, Bases
from kldwrm_jax.capture.examples import (
    Take,
    are_certain,
    check_lengths,
    cut,
    cut_call,
    every,
    lengths_in,
)
from kldwrm_jax.capture.forward_pass import run_forward
from kldwrm_jax.capture.model import Model
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.likelihoods.evidence import Evidence, evidence_here
from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.likelihoods.terms import LikelihoodTerms
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """A batch bound to parameters. A pytree: it crosses ``jit``, ``scan`` and ``vmap`` as it is.

    It computes nothing before one of its methods is called, so that a step without a refresh pays
    nothing for it.
    """

    model: Model = dataclasses.field(metadata={"static": True})
    terms: LikelihoodTerms
    params: Any
    call: Call
    after: Any = None  # other variables after the pass of ``net.value_and_grad``

    def factors(self, bases: Bases | None = None) -> dict[str, Factors]:
        r"""Every block's curvature on this batch.

        Args:
          bases: for some blocks by name, orthogonal matrices ``(U_A, U_G)`` shaped like the
            factors; None for a side is the identity. The second moment of the per-example gradient
            is measured in the basis: :math:`S = \sum_n (U_A' \nabla_n U_G)^2` elementwise,
            EK-FAC's scaling.

        Returns:
          ``{"path/to/layer": (A, G)}``, scaled so that ``kron(A, G)`` is the layer's K-FAC block of
          the Fisher of the mean loss, for the row-major flattening of ``[W; b]``; ``(A, G, S)``
          where a basis was given; one array, shaped like its parameter, for a diagonal block; for
          a dense block the Fisher, one parameter after another and each flattened by rows.
        """
        bases = bases or NO_BASES
        for name in bases:
            self.model.layers[name]  # an error if there is no such block
        self._check_axis()
        made = self.model.layers.sum_of_terms(self._factors_by_term(bases))
        leaves = leaves_by_path(self.params)
        made |= {path: jnp.ones(jnp.shape(leaves[path])) for path in self.model.unseen}
        return {block.name: made[block.name] for block in self.model.layers}

    def _factors_by_term(self, bases: Bases) -> list[dict[str, Factors]]:
        """Every term's own curvature, of the blocks that the likelihoods see; or their sum."""
        if self.model.measure is not None:
            return [self.model.measure(self, bases)]
        # A pass for each: its backward pass meets the calls of a layer that this term depends on,
        # and no others, so that their rows are averaged, and weighted, as its own.
        models = self.model.by_term()
        return [
            self._factors_of(term, model, bases)
            for term, model in zip(self.terms.each, models, strict=True)
        ]

    def _factors_of(self, term: LikelihoodTerm, model: Model, bases: Bases) -> dict[str, Factors]:
        axis, paths = term.axis, model.uncovered
        params, probes = axis.varying((self.params, model.probes(bases)))
        run = run_forward(model, params, self.call, paths, probes, term.weights, bases)
        directions, scale = term.directions(run.outputs, run.mixing)
        collected = axis.sum(run.statistics(directions, term.positions(run.outputs)))
        made = model.factors(collected, scale)
        if paths:
            signs = term.random_signs(directions)
            _, gradients = run.vjp(jnp.sum(signs * directions, axis=0))
            for path in paths:
                made[path] = scale * axis.sum(gradients[path].astype(float) ** 2)
        return made

    def value_and_grad(self) -> tuple[jax.Array, Any, "Oracle"]:
        """Loss and gradient at the oracle's parameters, and the oracle with the variables after."""
        self._check_axis()
        loss, gradient, variables = self._value_and_grad_here()
        loss, gradient = self.terms.axis.sum((loss, gradient))
        return loss, gradient, dataclasses.replace(self, after=self.terms.axis.mean(variables))

    def _value_and_grad_here(self) -> tuple[jax.Array, Any, Any]:
        """This replica's part of loss and gradient, and its other variables after the pass."""
        params = self.terms.axis.varying(self.params)

        def loss(leaves: Leaves) -> tuple[jax.Array, Any]:
            own = replace_leaves(params, leaves)
            outputs, variables = self.model.outputs_and_variables(own, self.call)
            return self.terms.loss_here(outputs), variables

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(leaves_by_path(params))
        return value, replace_leaves(params, gradients), after

    @property
    def variables(self) -> Any:
        """The collections given as ``variables``, such as ``batch_stats``, after the pass."""
        if self.after is None:
            raise ValueError(
                "an oracle made by net.oracle(...) has done no pass yet: make it by "
                "net.value_and_grad(...), or take the updated variables from your own loss"
            )
        return self.after

    @property
    def event_size(self) -> int:
        """How many numbers the outputs have for one sample."""
        return self.terms.event_size(jax.eval_shape(self.outputs, self.params))

    def outputs(self, params: Any) -> Any:
        """The network's outputs on this batch at other parameters, with the same dropout masks.

        Of several likelihoods, a tree of outputs.

        Where the batch is split over replicas, these are the outputs of the part that is here.
        """
        return self.model.outputs(params, self.call)

    def loss(self, params: Any) -> jax.Array:
        """Mean negative log-likelihood of the targets at other parameters, summed over terms."""
        return self.terms.loss(self.outputs(self.averaging_gradient(params)))

    def averaging_gradient(self, params: Any) -> Any:
        """The same parameters, for functions of ``outputs`` that end in a mean over replicas.

        Their gradient by the parameters is then that mean's, too, and the same on every replica.
        """
        self._check_axis()
        return self.terms.axis.averaging_gradient(params)

    def divergence(self, outputs1: Any, outputs2: Any) -> jax.Array:
        """Mean symmetric KL divergence between two networks' outputs, summed over terms."""
        self._check_axis()
        return self.terms.divergence(outputs1, outputs2)

    def _check_axis(self) -> None:
        """An error if the batch is split over an axis that ``instrument`` was not told of."""
        terms = self.terms
        terms.axis.check(self.params, (self.call, terms.targets, terms.weights))

    def quadratic(self, step: Any) -> jax.Array:
        r""":math:`\frac12 s'F s`: the divergence of a step to second order.

        ``F`` is the exact Fisher of the whole network on this batch at the oracle's parameters.

        Args:
          step: of the parameters' structure; masked parameters do not move.
        """
        return 0.5 * self.gram([step])[0, 0]

    def gram(self, directions: Sequence[Any]) -> jax.Array:
        r""":math:`V'FV` for the exact Fisher of the whole network on this batch.

        One JVP per direction, and the second derivative of the divergence along them.

        Args:
          directions: the columns of ``V``, each of the parameters' structure; masked parameters do
            not move.

        Returns:
          The matrix.
        """
        outputs, changes = optax.tree.cast(self._changes(directions), float)
        slope = jax.grad(lambda h: self.terms.divergence_here(outputs, h))
        _, output_fisher = jax.linearize(slope, outputs)
        curved = jax.vmap(output_fisher)(changes)
        k = len(directions)
        highest = jax.lax.Precision.HIGHEST

        def products(u: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.matmul(u.reshape(k, -1), v.reshape(k, -1).T, precision=highest)

        by_term = jax.tree.leaves(jax.tree.map(products, changes, curved))
        return self.terms.axis.sum(jnp.stack(by_term).sum(axis=0))

    def evidence(self, directions: Sequence[Any]) -> Evidence:
        """What the batch says along directions, of which the last is the step that led here.

        Beside the JVPs of :meth:`gram`, one forward pass at the parameters before that step.
        """
        last, leaves = leaves_by_path(directions[-1]), leaves_by_path(self.params)
        before = {path: leaves[path] - s.astype(leaves[path].dtype) for path, s in last.items()}
        outputs, changes = self._changes(directions)
        there = self.outputs(replace_leaves(self.params, before))
        return self.terms.axis.sum(evidence_here(self.terms, outputs, changes, there))

    def _changes(self, directions: Sequence[Any]) -> tuple[Any, Any]:
        """The outputs, and their changes along directions, stacked in front."""
        leaves = leaves_by_path(self.params)
        columns = [leaves_by_path(direction) for direction in directions]

        def stack(path: str, p: jax.Array) -> jax.Array:
            return jnp.stack(
                [v[path].astype(p.dtype) if path in v else jnp.zeros_like(p) for v in columns]
            )

        tangents = {path: stack(path, p) for path, p in leaves.items()}
        outputs, jvp = jax.linearize(
            lambda leaves: self.outputs(replace_leaves(self.params, leaves)), leaves
        )
        return outputs, jax.vmap(jvp)(tangents)

    @property
    def samples(self) -> jax.Array:
        """How many samples the batch is worth; of several terms, that of the fewest."""
        return self.terms.samples(self._output_shapes)

    @property
    def sample_shapes(self) -> list[tuple[int, ...]]:
        """The outputs' axes that are samples, of every term; the first of them is the batch's."""
        return self.terms.sample_shapes(self._output_shapes)

    @functools.cached_property
    def _output_shapes(self) -> Any:
        return jax.eval_shape(self.model.outputs, self.params, self.call)

    @property
    def batch_size(self) -> int:
        """The length of the first axis of the outputs, which must be the same for all terms."""
        given = [t.weights if t.targets is None else t.targets for t in self.terms.each]
        known = [jnp.shape(x)[0] for x in given if x is not None]
        if len(known) < len(given):
            known = [shape[0] for shape in self.sample_shapes]
        if len({*known}) > 1:
            raise ValueError(
                f"the terms have batches of {', '.join(map(str, known))} examples, which can not "
                f"be split alike: use micro_batches=1, or terms with batches of one size"
            )
        return known[0]

    def part(self, take: Take) -> "Oracle":
        """The oracle of some examples.

        Args:
          take: takes them from an array whose first axis is the batch's; applied to targets,
            weights and the arguments of the model that ``instrument(..., batched=...)`` names;
            without it, to all that have as many entries as the batch.
        """
        batch = self.batch_size
        check_lengths(self.call, [batch], self.model.batched)
        return self.examples({batch: take})

    def thinned(self, examples_of: Callable[[tuple[int, ...]], int], place: Scalar = 0) -> "Oracle":
        """The oracle of every n-th example, or this one where that might be another model.

        The examples of a batch that is sharded over devices come from all of them. Terms with
        batches of different size are thinned each by itself, where the first axes of the model's
        arguments tell which are whose; a term for which they do not tell stays whole.

        The arguments with examples are those that ``instrument(..., batched=...)`` names. Without
        it they are those whose first axis is as long as a batch, and nothing is thinned unless the
        traced model shows that each of its outputs is made from one entry of these. A sequence
        along the first axis, the nodes of a graph and in-batch negatives are taken whole. Where a
        layer normalises over the batch, the part has statistics of its own; sums over
        the examples elsewhere in such a model are taken for a normalisation's. Dropout masks of the
        part are others than those of the whole.

        Args:
          examples_of: how many examples are to be left of a term whose samples have this shape.
          place: the first of them; with 0, 1, 2, ... every example has its turn.
        """
        shapes, batched = self.sample_shapes, self.model.batched
        check_lengths(self.call, {n for n, *_ in shapes}, batched)
        given, counts = lengths_in(self.call, batched), dict[int, int]()
        for shape in (shape for shape in shapes if shape[0] in given):
            counts[shape[0]] = max(examples_of(shape), counts.get(shape[0], 1))
        takes = {n: every(n // left, place) for n, left in counts.items() if n >= 2 * left}
        if not takes:
            return self
        if batched is None:
            shapes_of = tuple(x.shape for x in jax.tree.leaves(self._output_shapes))
            certain = are_certain(self.model, self.params, self.call, takes.keys(), shapes_of)
            return self.examples(takes) if certain else self
        thin = self.examples(takes)
        wanted = [(n // (n // counts[n]) if n in takes else n, *rest) for n, *rest in shapes]
        if (got := thin.sample_shapes) != wanted:
            raise ValueError(
                f"of the arguments that batched={batched!r} names, a part was taken, and the "
                f"outputs are samples of shapes {got} instead of {wanted}: instrument(..., "
                f"batched=...) must name all arguments whose first axis is the batch's, and no "
                f"others; batched=False keeps the whole batch"
            )
        return thin

    def examples(self, takes: Mapping[int, Take]) -> "Oracle":
        """The oracle of some examples of every term, by the length of its batch."""
        each = [
            dataclasses.replace(
                term,
                targets=jax.tree.map(lambda x: cut(x, takes), term.targets),
                weights=jax.tree.map(lambda x: cut(x, takes), term.weights),
            )
            for term in self.terms.each
        ]
        terms = dataclasses.replace(self.terms, each=tuple(each))
        call = cut_call(self.call, takes, self.model.batched)
        return Oracle(self.model, terms, self.params, call)
